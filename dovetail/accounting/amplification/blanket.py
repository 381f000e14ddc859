"""The privacy blanket (Balle, Bell, Gascon, Nissim 2019): Hoeffding, Bennett, and the expectation itself.

Every report of a randomizer is, with probability gamma, drawn from one distribution omega whatever the input. Reveal
who drew from it: the victim hides among M ~ Bin(n, gamma) draws, and

    delta(eps) = 1 / (gamma n) E[(L_1 + ... + L_M)_+],   L = (R(x)(y) - e^eps R(x')(y)) / omega(y),  y ~ omega.

Hoeffding and Bennett bound that expectation by the range and by the second moment of L. The exact bound computes it: L
is moved to a grid by splitting every point between its two neighbours, which keeps the mean and can only raise the
expectation of a convex function, and the n-fold sum is taken by an FFT of the exponentially tilted law. The FFT's
aliasing only adds mass; its rounding errors are charged.

Blankets: any randomizer R(x0) itself, gamma = e^-eps_local; Laplace on [0, 1] its R(1/2), gamma = e^(-eps_local/2);
b-ary randomized response the uniform law, gamma = b / (e^eps_local + b - 1).

The second half of the file is for users with unequal budgets e_i. The functions `..._floors` say with which
probability g_i each user's report is a draw from one law w, and the functions `..._frontier` how well a victim's report
can be told from it (the F of `frontier`):

- *Clip-Laplace* in its box: the uniform law w. User i's density is at least ``g_i w, g_i = e_i / (e^e_i - 1)``.
- *Clip-Laplace with a public threshold* (S-APES): the same, seen through the map that draws small reports anew.
- *Levels*: the uniform law, ``g_i = b / (e^e_i + b - 1)``.
- *Laplace* on [0, 1]: a Laplace law of the victim's budget e around a uniform point of [1/2 - t, 1/2 + t], which is a
  blanket of users whose budget is at most e. It is wider than the blanket of equal users, and suits smaller budgets.

Proofs are in docs/proofs/blankets.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification import blanket_grid, clones, closed_forms, frontier
from dovetail.accounting.amplification.frontier import Frontier
from dovetail.accounting.search import smallest_eps
from dovetail.events import Report, Shuffled
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = [
    "BENNETT",
    "EXACT",
    "HOEFFDING",
    "bennett",
    "clip_laplace_blanket_probs",
    "exact",
    "exact_delta",
    "frontier_of",
    "hoeffding",
    "laplace_blanket_probs",
    "laplace_frontier",
    "level_blanket_probs",
    "threshold_frontier",
]

_URL = "https://arxiv.org/abs/1903.02837"
HOEFFDING = Theorem(
    key="BBGN19.hoeffding",
    where="privacy blanket, Hoeffding (Balle, Bell, Gascon, Nissim, CRYPTO 2019, Sec. 5)",
    url=_URL,
)
BENNETT = Theorem(
    key="BBGN19.bennett",
    where="privacy blanket, Bennett (Balle, Bell, Gascon, Nissim, CRYPTO 2019, Sec. 5)",
    url=_URL,
)
EXACT = Theorem(
    key="BBGN19.exact",
    where="privacy blanket, its expectation on a grid rounded outward (Balle, Bell, Gascon, Nissim, CRYPTO 2019, "
    "Lemma 5.3; optimal among decompositions: Su, Cheng, Wang 2025)",
    url="https://arxiv.org/abs/2504.07414",
)

_MOST_EPS_LOCAL = 100.0  # beyond, gamma n < 1 for every n that fits, and powers of e^eps_local would overflow
_MOST_USERS = 10**9
_LEAST_POINTS = 2**17  # that a grid may always have
_CAP_SLACK = 1e-8  # more than the error of the mass of a cap


def hoeffding(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps with B^2 / (4 a gamma n) (1 - gamma (1 - e^(-2 a^2/B^2)))^n <= delta, a = e^eps - 1.

    B is the range of L.

    Guarantees:
        Never below the exact blanket, nor below enumeration.

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Sec. 5.
    """
    n, report = _require_single_report(event, delta=delta)
    gamma = _blanket_probability(report)

    def log_delta(eps: np.ndarray) -> np.ndarray:
        a, B = np.expm1(eps), _range_of_l(report, eps)
        return 2 * np.log(B) - np.log(4 * a * gamma * n) + n * np.log1p(gamma * np.expm1(-2 * (a / B) ** 2))

    return closed_forms.bound_if_gain(
        _estimate_smallest_eps(log_delta, event, delta=delta), event, delta=delta, theorem=HOEFFDING
    )


def bennett(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps with 1/(gamma n) b/log(1+u) ((1 + gamma (e^-t - 1))^n - (1-gamma)^n) <= delta.

    a = e^eps - 1, b = max L, c = E[L^2], u = a b / c, t = (c / b^2) ((1+u) log(1+u) - u). For m blanket draws,
    E[e^(x L)] <= exp(-x a + (c / b^2)(e^(x b) - 1 - x b)) at x = log(1+u) / b gives E[(L_1+...+L_m)_+] <= e^(-m t) / x;
    m = 0 contributes nothing.

    Guarantees:
        Never below the exact blanket, nor below enumeration.

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Sec. 5; FLAME's printed variant, which is not valid, is not here.
    """
    n, report = _require_single_report(event, delta=delta)
    gamma = _blanket_probability(report)

    def log_delta(eps: np.ndarray) -> np.ndarray:
        a, b, c = np.expm1(eps), _largest_l(report, eps), _second_moment_of_l(report, eps)
        u = a * b / c
        phi = np.where(u < 1e-4, u * u / (2 + 2 * u / 3), ((1 + u) * np.log1p(u) - u) * (1 - 1e-11))  # rounded down
        mgf = n * np.log1p(gamma * np.expm1(-(c / b**2) * phi))
        nobody = n * math.log1p(-gamma)
        return np.log(b / np.log1p(u) / (gamma * n)) + mgf + np.log(-np.expm1(nobody - mgf))

    return closed_forms.bound_if_gain(
        _estimate_smallest_eps(log_delta, event, delta=delta), event, delta=delta, theorem=BENNETT
    )


def exact(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps by the blanket expectation itself, for Laplace and for randomized response.

    Guarantees:
        Never below enumeration (of randomized response; of Laplace seen through any partition of its outputs).
        Never above `hoeffding` and `bennett`, nor (for binary randomized response) `clones.numerical23`.
        Refuses generic randomizers, and crowds that the grid cannot resolve (n above 1e9, or n gamma above about 2e8).

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Lemma 5.3; Su, Cheng, Wang (2025).
    """
    n, report = _require_single_report(event, delta=delta)
    if report.kind == "rr" and report.levels == 2:
        return dataclasses.replace(clones.numerical23(event, delta=delta), proof=EXACT.proof)
    high = report.eps_local * (1 - closed_forms.LEAST_GAIN)
    for bound in (clones.numerical23, hoeffding, bennett):
        try:
            high = min(high, bound(event, delta=delta).eps)
        except NotApplicable:
            continue
    if exact_delta(event, eps=high) > delta:
        raise NotApplicable(f"no gain over eps_local={report.eps_local:.4g} at n={n}, delta={delta:.3g}")
    eps = smallest_eps(lambda x: exact_delta(event, eps=x), delta=delta, high=high, tolerance=1e-7)
    return closed_forms.bound_if_gain(eps, event, delta=delta, theorem=EXACT)


def exact_delta(event: Shuffled, *, eps: float, coarser: float = 1.0) -> float:
    """The blanket expectation at eps, rounded up; exact up to rounding for binary randomized response.

    For two levels the blanket pair is the clone pair with clone probability gamma, and no grid is needed. `coarser`
    widens the steps of the grid, to at most a twelfth of a standard deviation: faster, and a little larger.

    Arguments:
        event: one shuffled report.
        eps: at which delta is asked for.
        coarser: how many times wider the steps of the grid may be.
    """
    _validate.non_negative(eps=eps)
    _validate.at_least(1, coarser=coarser)
    n, report = _require_single_report(event)
    if report.kind == "generic":
        raise NotApplicable("the blanket expectation needs the randomizer itself, the report is generic")
    if eps >= report.eps_local:
        return 0.0
    if report.kind == "rr" and report.levels == 2:
        return clones.delta_of(event, eps=eps)
    if n > _MOST_USERS:
        raise NotApplicable(f"n={n} is more than the precision of the FFT resolves")
    gamma = _blanket_probability(report)
    resolution = _grid_resolution(n * gamma)
    resolution = max(resolution, min(resolution * coarser, 1 / 12))
    grid = _law_of_l(report, eps, mean_draws=n * gamma, resolution=resolution)
    return numerics.as_probability_bound(blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(n, gamma)))


def _require_single_report(event: Shuffled, *, delta: float | None = None) -> tuple[int, Report]:
    """Check the question, and return the number of honest users and their report."""
    n, eps_local = closed_forms.require_single_report(event, delta=delta)
    if eps_local > _MOST_EPS_LOCAL:
        raise NotApplicable(f"no gain over eps_local={eps_local:.4g}: the blanket is empty")
    return n, event.report


def _blanket_probability(report: Report) -> float:
    """The blanket probability, rounded down."""
    return report.gamma * (1 - (_CAP_SLACK if report.kind == "cap" else 1e-15))  # a smaller blanket is a blanket


def _range_of_l(report: Report, eps: np.ndarray) -> np.ndarray:
    """B: the largest L less the smallest one, at every eps."""
    match report.kind:
        case "generic":
            return 2 * math.sinh(report.eps_local) * (1 + np.exp(eps))
        case "laplace":
            return 2 * math.sinh(report.eps_local / 2) * (1 + np.exp(eps))
    return report.gamma * math.expm1(report.eps_local) * (1 + np.exp(eps))


def _largest_l(report: Report, eps: np.ndarray) -> np.ndarray:
    """b: the largest L, at every eps."""
    match report.kind:
        case "generic":
            return -math.exp(report.eps_local) * np.expm1(eps - 2 * report.eps_local)
        case "laplace":
            return -math.exp(report.eps_local / 2) * np.expm1(eps - report.eps_local)
    return -report.gamma * math.exp(report.eps_local) * np.expm1(eps - report.eps_local)


def _second_moment_of_l(report: Report, eps: np.ndarray) -> np.ndarray:
    """c: E[L^2] at every eps, or a bound on it over all inputs (for Laplace, inputs 0 and 1 are the worst)."""
    e0, E = report.eps_local, np.exp(eps)
    match report.kind:
        case "generic":
            return _subtract_upward(math.exp(e0) * (E**2 + 1), 2 * E * math.exp(-3 * e0))
        case "laplace":
            squares = (E**2 + 1) / 3 * (2 * math.exp(e0 / 2) + math.exp(-e0))
            return _subtract_upward(squares, 2 * E * (2 * math.exp(-e0 / 2) - math.exp(-e0)))
    sides = (math.exp(e0) - E) ** 2 + (1 - E * math.exp(e0)) ** 2 + (1 / report.mass - 2) * (1 - E) ** 2
    return report.gamma**2 * report.mass * sides


def _subtract_upward(minuend: np.ndarray, subtrahend: np.ndarray) -> np.ndarray:
    """more - less of two arrays that are not negative, rounded up, also where they are nearly equal."""
    return minuend - subtrahend + 16 * numerics.ULP * (minuend + subtrahend)


def _estimate_smallest_eps(log_delta: Callable[[np.ndarray], np.ndarray], event: Shuffled, *, delta: float) -> float:
    """About the smallest eps below eps_local at which delta is met, from above; infinite if there is none.

    The formulas need not fall everywhere, so that a grid of eps is refined around the first that meets it.
    """
    low, high = event.report.eps_local * 1e-12, event.report.eps_local * (1 - 1e-6)
    target = math.log(delta) * (1 + 1e-12) - 1e-11
    for _ in range(7):
        grid = np.geomspace(low, high, 256)
        met = log_delta(grid) <= target
        if not met.any():
            return math.inf
        where = int(met.argmax())
        if where == 0:
            return float(grid[0])
        low, high = float(grid[where - 1]), float(grid[where])
    return high


def _grid_resolution(mean_draws: float) -> float:
    """Grid step in standard deviations of L: fine where the FFT is short, never coarser than 0.12.

    `mean_draws` is the mean number of draws, n gamma; a sum of so many is resolved on 16 of its standard deviations.
    """
    width = 16 * math.sqrt(mean_draws)
    resolution = max(min(max(width / _LEAST_POINTS, 0.004), 0.02), width / blanket_grid.MOST_POINTS)
    if resolution > 0.12:
        raise NotApplicable(
            f"n gamma = {mean_draws:.3g} is more than the grid of {blanket_grid.MOST_POINTS} points resolves"
        )
    return resolution


def _law_of_l(report: Report, eps: float, *, mean_draws: float, resolution: float) -> blanket_grid.Grid:
    """The law of L for the worst pair of inputs, spread on a grid.

    For Laplace the worst pair is (0, 1): any other is below it in convex order (docs/proofs/laplace-blanket.md). Others
    have a frontier (docs/proofs/blankets.md).
    """
    if report.kind != "laplace":
        values, probs = frontier_of(report).law_of_l(math.exp(eps))
        return blanket_grid.Grid.from_law(values, probs, mean_draws=mean_draws, resolution=resolution)
    e0 = report.eps_local
    at = np.asarray(eps)
    top = float(_largest_l(report, at))
    std = math.sqrt(max(float(_second_moment_of_l(report, at)) - math.expm1(eps) ** 2, 0.0))
    bottom = top - float(_range_of_l(report, at))
    middle = -math.exp(-e0 / 2) * math.expm1(eps)
    floor = max(bottom, 2 * middle - top * (mean_draws + 12 * math.sqrt(mean_draws) + 30))  # as in `Grid.of`
    step = max(min(std, top) * resolution, (top - floor) / blanket_grid.MOST_POINTS)
    if top - floor > 2 * blanket_grid.MOST_POINTS * top:
        raise NotApplicable(f"the range of L is more than a grid resolves at eps={eps:.4g}, eps_local={e0:.4g}")
    grid = blanket_grid.Grid(bottom=floor, top=top, step=top / math.ceil(top / step))
    scale = math.exp(-e0 / 4) / 4
    shift = math.exp(-e0 / 2)
    at_floor = shift / 2 if floor == bottom else 2 * scale * math.exp(eps / 2) / math.sqrt(shift - floor)
    grid.add_points(np.array([top, floor]), np.array([shift / 2, at_floor]))
    grid.add_power_law(low=middle, high=top, start=shift, scale=scale)
    left = scale * math.exp(eps / 2)
    grid.add_power_law(low=-middle, high=-floor, start=shift * math.exp(eps), scale=left, mirrored=True)
    return grid


def frontier_of(report: Report) -> Frontier:
    """The frontier of a level among levels, or of a cap of the sphere."""
    if report.kind not in ("rr", "cap"):
        raise NotApplicable(f"no frontier here for reports of kind {report.kind!r}")
    slack = _CAP_SLACK if report.kind == "cap" else 0.0
    return frontier.randomized_response(report.eps_local, report.mass, slack=slack)


_DOWN = 1 - 1e-12  # rounds a g_i down by more than its error
_CELLS = 64  # of a part of the line or of the box; more would not be seen
_LEAST_PLATEAU = 1e-3  # budgets that have a plateau ...
_LARGEST_PLATEAU = 100.0  # ... are between these
_AT_ONCE = 32  # boxes that are looked at together
_MOST_BOXES = 5000  # of budgets and inputs that are looked at
_SLACK = 1e-10  # more than the relative error of a ratio of differences
_LEVELS = 256  # ratios at which frontiers are compared
_CLOSE = (4e-3, 1.6e-2, 6.4e-2)  # log ratios of densities, over eps_local, that may be too small to matter


def clip_laplace_blanket_probs(eps_locals: np.ndarray) -> np.ndarray:
    """g_i of every budget (above 0) for Clip-Laplace against the uniform law on the box, rounded down."""
    return eps_locals * np.exp(-eps_locals) / -np.expm1(-eps_locals) * _DOWN


def level_blanket_probs(eps_locals: np.ndarray, levels: int) -> np.ndarray:
    """g_i of every budget for randomized response against the uniform law on the levels, rounded down."""
    small = np.exp(-eps_locals)
    return levels * small / (1 + (levels - 1) * small) * _DOWN


def laplace_blanket_probs(eps_locals: np.ndarray, eps_victim: float, half_width: float) -> np.ndarray:
    """g_i of every budget for Laplace noise against the plateau of a victim's budget, rounded down.

    It is 0 for budgets above the victim's, whose tails are shorter than the plateau's.

    The ratio of densities is least where e^(e s) = [e_i/q + sqrt((e_i/q)^2 + e^2 - e_i^2)] / (e + e_i), with s the
    distance from 1/2 and q = e^(-e t): its logarithm is convex in s.

    Arguments:
        eps_locals: the users' budgets.
        eps_victim: the victim's budget, that of the blanket's tails.
        half_width: t, half the width of the plateau.
    """
    _validate.positive(half_width=half_width)
    _require_plateau(eps_victim)
    e, t = eps_victim, half_width
    budgets = np.minimum(eps_locals, e)
    q = math.exp(-e * t)
    growth = (budgets / q + np.sqrt((budgets / q) ** 2 + (e + budgets) * (e - budgets))) / (e + budgets)
    plateau = -math.expm1(-e * t) - q * (np.sqrt(growth) - 1 / np.sqrt(growth)) ** 2 / 2  # 1 - q cosh(e s)
    floors = budgets * t * np.exp(-budgets / 2 - budgets * np.log(growth) / e) / plateau
    return np.where(eps_locals <= e, np.minimum(floors, 1.0) * _DOWN, 0.0)


def _require_plateau(eps_local: float) -> None:
    """Refuse budgets that have no plateau.

    Of small ones the masses of cells are differences of nearly equal numbers, and not right to `_SLACK`.
    """
    if not _LEAST_PLATEAU <= eps_local <= _LARGEST_PLATEAU:
        raise NotApplicable(f"no plateau for a budget of {eps_local:.4g}")


@functools.lru_cache(maxsize=256)
def laplace_frontier(eps_local: float, half_width: float) -> Frontier:
    """F of Laplace noise on [0, 1] against its plateau: of the input 1, for the two ends are the worst.

    Distances are from 1/2. Cells end at 1/2 (the input), at the plateau's ends and where ratios are constant beyond.

    Arguments:
        eps_local: the victim's budget.
        half_width: t, half the width of the plateau.
    """
    _validate.positive(half_width=half_width)
    _require_plateau(eps_local)
    e, t = eps_local, half_width
    far = max(t, 0.5)
    cuts = np.unique(np.concatenate([np.linspace(-far, far, 2 * _CELLS + 1), [-t, t, 0.5]]))
    width = np.diff(cuts)

    def blanket(s: np.ndarray) -> np.ndarray:
        inside = -math.expm1(-e * t) - 2 * math.exp(-e * t) * np.sinh(e / 2 * np.minimum(np.abs(s), t)) ** 2
        return np.where(np.abs(s) <= t, inside, math.sinh(e * t) * np.exp(-e * np.abs(s))) / (2 * t)

    def blanket_below(s: np.ndarray) -> np.ndarray:  # the mass between 0 and s
        size = np.minimum(np.abs(s), t)
        inside = size - math.exp(-e * t) * np.sinh(e * size) / e
        beyond = math.sinh(e * t) / e * -np.expm1(-e * np.maximum(np.abs(s) - t, 0.0)) * math.exp(-e * t)
        return np.sign(s) * (inside + beyond) / (2 * t)

    def report_below(s: np.ndarray) -> np.ndarray:
        return -np.sign(s - 0.5) * np.expm1(-e * np.abs(s - 0.5)) / 2

    ratio = e / 2 * np.exp(-e * np.abs(cuts - 0.5)) / blanket(cuts)
    tails = np.array([0.5 + float(report_below(cuts[0])), 0.5 - float(report_below(cuts[-1]))])
    ends = np.array([0.5 + float(blanket_below(cuts[0])), 0.5 - float(blanket_below(cuts[-1]))])
    base = np.concatenate([np.diff(blanket_below(cuts)), ends])
    own = np.concatenate([np.diff(report_below(cuts)), tails])
    real = np.concatenate([width > 1e-12, [True, True]])
    lowest = np.concatenate([np.minimum(ratio[:-1], ratio[1:]), ratio[[0, -1]]])
    highest = np.concatenate([np.maximum(ratio[:-1], ratio[1:]), ratio[[0, -1]]])
    return frontier.from_cells(base[real], own[real], lowest[real] * (1 - _SLACK), highest[real] * (1 + _SLACK))


class _Thresholded:
    """Clip-Laplace on [-1, 1] whose reports below the threshold are drawn anew around 0, at a public budget.

    Of a report drawn anew that falls below the threshold again nothing is seen but that: all of these are one cell.
    """

    def __init__(self, eps_fresh: float, threshold: float) -> None:
        """Arguments are those of `threshold_frontier`."""
        outer = np.linspace(threshold, 1.0, _CELLS + 1)
        self._cuts = np.concatenate([-outer[::-1], outer])
        self._middle = _CELLS  # the cell between -threshold and threshold
        self._anew = threshold  # the blanket's mass that is drawn anew
        fresh_rate, at_0 = np.array([eps_fresh]), np.zeros(1)
        self._fresh = self._cell_masses(fresh_rate, at_0)[0]
        self._drawn = self._density_range(fresh_rate, at_0)
        self._blanket = self._redraw_small_reports(np.diff(self._cuts)[None] / 2)[0]

    def _cell_masses(self, eps_local: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The cells' masses under Clip-Laplace, a row for each pair of a budget and an input x in [-1, 1]."""
        away = self._cuts - x[:, None]
        below = -np.sign(away) * np.expm1(-eps_local[:, None] / 2 * np.abs(away))
        return np.diff(below) / (below[:, -1:] - below[:, :1])

    def _density_range(self, eps_local: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest density of every cell under Clip-Laplace, over the uniform law's.

        Two arrays, each with a row for each pair of a budget and an input x.
        """
        rate = eps_local[:, None] / 2
        x = x[:, None]
        peak = -2 * rate / (np.expm1(-rate * (1 - x)) + np.expm1(-rate * (1 + x)))
        left, right = self._cuts[:-1], self._cuts[1:]
        nearest = np.maximum(np.maximum(left - x, x - right), 0.0)
        furthest = np.maximum(np.abs(left - x), np.abs(right - x))
        return peak * np.exp(-rate * furthest), peak * np.exp(-rate * nearest)

    def _redraw_small_reports(self, masses: np.ndarray) -> np.ndarray:
        """The cells' masses after small reports are drawn anew: rows of laws in, rows of laws out."""
        anew = masses[:, self._middle]
        pushed = masses + anew[:, None] * self._fresh
        pushed[:, self._middle] = anew * self._fresh[self._middle]
        return pushed

    def excess_bounds(
        self, eps_local: np.ndarray, x: np.ndarray, slack: np.ndarray, thresholds: np.ndarray
    ) -> np.ndarray:
        """E[(r - t)_+], rounded up, at every t in `thresholds`, for r the ratio of a report's density to the blanket's.

        There is a row for each pair of a budget and an input x. It holds for all laws with a density within e^(+-slack)
        of that pair's. Rounded up by splitting the mass of cells.

        At a point beyond the threshold r = (R + a f)/(1 + c f), with R the report's density, f that of a draw anew, a
        and c the masses that are drawn anew. It is monotone in R and in f: its extremes are at the corners of theirs.
        """
        masses = self._cell_masses(eps_local, x)
        anew = masses[:, self._middle, None]
        corners = [
            (r + anew * f) / (1 + self._anew * f) for r in self._density_range(eps_local, x) for f in self._drawn
        ]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        low[:, self._middle] = high[:, self._middle] = anew[:, 0] / self._anew
        ratio, mass = frontier.move_cells_to_ends(self._blanket, self._redraw_small_reports(masses), low, high)
        none = np.zeros((len(ratio), 1))
        above = np.hstack([np.cumsum(mass[:, ::-1], axis=1)[:, ::-1], none])
        first = np.hstack([np.cumsum((mass * ratio)[:, ::-1], axis=1)[:, ::-1], none])

        def excess(factor: np.ndarray) -> np.ndarray:
            t = thresholds * factor[:, None]
            place = np.stack([np.searchsorted(*row) for row in zip(ratio, t, strict=True)])
            return np.take_along_axis(first, place, axis=1) - t * np.take_along_axis(above, place, axis=1)

        more, less = np.exp(slack)[:, None], np.exp(-slack)[:, None]
        return np.minimum(more * excess(less[:, 0]), 1 - less + less * excess(more[:, 0]))


@functools.lru_cache(maxsize=64)
def threshold_frontier(eps_local: float, eps_fresh: float, threshold: float) -> Frontier:
    """The frontier F of S-APES's reports: no smaller than that of any budget up to this one, on any input.

    Boxes of budgets and inputs cover them. The logarithm of a density moves by at most 1 per unit of the budget, and by
    at most the budget per unit of x in [-1, 1] (mirrored, in [0, 1]). A box whose laws stay below what is known already
    adds nothing; any other is halved, until its laws are close, and then raises what is known.

    Arguments:
        eps_local: the largest budget of the users.
        eps_fresh: the smallest budget, at which small reports are drawn anew.
        threshold: below which a report counts as small, as a share of half the box.
    """
    _validate.positive(eps_local=eps_local, eps_fresh=eps_fresh)
    _validate.in_open_interval(0, 1, threshold=threshold)
    laws = _Thresholded(eps_fresh, threshold)
    for close in _CLOSE:
        result = _frontier_by_boxes(laws, eps_local, close * eps_local)
        if result is not None:
            return result
    return frontier.clip_laplace(eps_local)  # the map only takes away


def _frontier_by_boxes(laws: _Thresholded, eps_local: float, max_log_ratio: float) -> Frontier | None:
    """The frontier of all budgets up to eps_local and all inputs; None where that takes too many boxes.

    Boxes are halved until the log ratio of two densities in one is at most `max_log_ratio`.
    """
    bottom, top = eps_local / math.expm1(eps_local), eps_local / -math.expm1(-eps_local)  # of all densities
    at = np.linspace(bottom * _DOWN, top / _DOWN, _LEVELS)
    envelope = laws.excess_bounds(np.array([eps_local]), np.ones(1), np.array([max_log_ratio]), at)[0]
    boxes = np.array([[0.0, eps_local, 0.0, 1.0]])
    looked_at = 0
    while len(boxes):
        batch, boxes = boxes[-_AT_ONCE:], boxes[:-_AT_ONCE]
        looked_at += len(batch)
        if looked_at > _MOST_BOXES:
            return None
        low, high, left, right = batch.T  # budgets from low to high, inputs from left to right
        budget, x = (low + high) / 2, (left + right) / 2
        slack = (high - low) / 2 + high * (right - left) / 2
        excess = laws.excess_bounds(budget, x, slack, at)
        leaf = slack <= max_log_ratio
        envelope = np.max([envelope, *excess[leaf]], axis=0)
        open_ = ~leaf & ~(excess <= envelope).all(axis=1)
        tall, wide = open_ & (high - low > high * (right - left)), open_ & (high - low <= high * (right - left))
        halves = [
            np.stack([low, budget, left, right], axis=1)[tall],
            np.stack([budget, high, left, right], axis=1)[tall],
            np.stack([low, high, left, x], axis=1)[wide],
            np.stack([low, high, x, right], axis=1)[wide],
        ]
        boxes = np.concatenate([boxes, *halves])
    envelope = np.maximum(envelope * (1 + 1e-12), np.maximum(1 - at, 0.0))
    envelope[0], envelope[-1] = 1 - at[0], 0.0
    return frontier.from_excess(at, envelope)
