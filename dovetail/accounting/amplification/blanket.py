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
"""

from __future__ import annotations

import dataclasses
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

__all__ = ["BENNETT", "EXACT", "HOEFFDING", "bennett", "exact", "exact_delta", "frontier_of", "hoeffding"]

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
_LEAST_POINTS = 2**17
_CAP_SLACK = 1e-8  # more than the error of the mass of a cap


def hoeffding(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps with B^2 / (4 a gamma n) (1 - gamma (1 - e^(-2 a^2/B^2)))^n <= delta, a = e^eps - 1.

    B is the range of L.

    Guarantees:
        Never below the exact blanket, nor below enumeration.

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Sec. 5.
    """
    n, report = _asked(event, delta=delta)
    gamma = _gamma(report)

    def log_delta(eps: np.ndarray) -> np.ndarray:
        a, B = np.expm1(eps), _range(report, eps)
        return 2 * np.log(B) - np.log(4 * a * gamma * n) + n * np.log1p(gamma * np.expm1(-2 * (a / B) ** 2))

    return closed_forms.gain(_first(log_delta, event, delta=delta), event, delta=delta, theorem=HOEFFDING)


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
    n, report = _asked(event, delta=delta)
    gamma = _gamma(report)

    def log_delta(eps: np.ndarray) -> np.ndarray:
        a, b, c = np.expm1(eps), _top(report, eps), _second_moment(report, eps)
        u = a * b / c
        phi = np.where(u < 1e-4, u * u / (2 + 2 * u / 3), ((1 + u) * np.log1p(u) - u) * (1 - 1e-11))  # rounded down
        mgf = n * np.log1p(gamma * np.expm1(-(c / b**2) * phi))
        nobody = n * math.log1p(-gamma)
        return np.log(b / np.log1p(u) / (gamma * n)) + mgf + np.log(-np.expm1(nobody - mgf))

    return closed_forms.gain(_first(log_delta, event, delta=delta), event, delta=delta, theorem=BENNETT)


def exact(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps by the blanket expectation itself, for Laplace and for randomized response.

    Guarantees:
        Never below enumeration (of randomized response; of Laplace seen through any partition of its outputs).
        Never above `hoeffding` and `bennett`, nor (for binary randomized response) `clones.numerical23`.
        Refuses generic randomizers, and crowds that the grid cannot resolve (n above 1e9, or n gamma above about 2e8).

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), Lemma 5.3; Su, Cheng, Wang (2025).
    """
    n, report = _asked(event, delta=delta)
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
    return closed_forms.gain(eps, event, delta=delta, theorem=EXACT)


def exact_delta(event: Shuffled, *, eps: float, coarser: float = 1.0) -> float:
    """The blanket expectation at eps, rounded up; exact up to rounding for binary randomized response.

    For two levels the blanket pair is the clone pair with clone probability gamma, and no grid is needed. `coarser`
    widens the steps of the grid, to at most a twelfth of a standard deviation: faster, and a little larger.
    """
    _validate.non_negative(eps=eps)
    _validate.at_least(1, coarser=coarser)
    n, report = _asked(event)
    if report.kind == "generic":
        raise NotApplicable("the blanket expectation needs the randomizer itself, the report is generic")
    if eps >= report.eps_local:
        return 0.0
    if report.kind == "rr" and report.levels == 2:
        return clones.delta_of(event, eps=eps)
    if n > _MOST_USERS:
        raise NotApplicable(f"n={n} is more than the precision of the FFT resolves")
    gamma = _gamma(report)
    resolution = _resolution(n * gamma)
    resolution = max(resolution, min(resolution * coarser, 1 / 12))
    grid = _law(report, eps, crowd=n * gamma, resolution=resolution)
    return numerics.probability(blanket_grid.mean_excess(grid, blanket_grid.BinomialDraws(n, gamma)))


def _asked(event: Shuffled, *, delta: float | None = None) -> tuple[int, Report]:
    n, eps_local = closed_forms.single(event, delta=delta)
    if eps_local > _MOST_EPS_LOCAL:
        raise NotApplicable(f"no gain over eps_local={eps_local:.4g}: the blanket is empty")
    return n, event.report


def _gamma(report: Report) -> float:
    return report.gamma * (1 - (_CAP_SLACK if report.kind == "cap" else 1e-15))  # a smaller blanket is a blanket


def _range(report: Report, eps: np.ndarray) -> np.ndarray:
    """B: the range of L."""
    match report.kind:
        case "generic":
            return 2 * math.sinh(report.eps_local) * (1 + np.exp(eps))
        case "laplace":
            return 2 * math.sinh(report.eps_local / 2) * (1 + np.exp(eps))
    return report.gamma * math.expm1(report.eps_local) * (1 + np.exp(eps))


def _top(report: Report, eps: np.ndarray) -> np.ndarray:
    """b: the largest L."""
    match report.kind:
        case "generic":
            return -math.exp(report.eps_local) * np.expm1(eps - 2 * report.eps_local)
        case "laplace":
            return -math.exp(report.eps_local / 2) * np.expm1(eps - report.eps_local)
    return -report.gamma * math.exp(report.eps_local) * np.expm1(eps - report.eps_local)


def _second_moment(report: Report, eps: np.ndarray) -> np.ndarray:
    """c: E[L^2], or a bound on it over all inputs (for Laplace, inputs 0 and 1 are the worst)."""
    e0, E = report.eps_local, np.exp(eps)
    match report.kind:
        case "generic":
            return _difference(math.exp(e0) * (E**2 + 1), 2 * E * math.exp(-3 * e0))
        case "laplace":
            squares = (E**2 + 1) / 3 * (2 * math.exp(e0 / 2) + math.exp(-e0))
            return _difference(squares, 2 * E * (2 * math.exp(-e0 / 2) - math.exp(-e0)))
    sides = (math.exp(e0) - E) ** 2 + (1 - E * math.exp(e0)) ** 2 + (1 / report.mass - 2) * (1 - E) ** 2
    return report.gamma**2 * report.mass * sides


def _difference(more: np.ndarray, less: np.ndarray) -> np.ndarray:
    """more - less, rounded up: where they are nearly equal only their roundings are left."""
    return more - less + 16 * numerics.ULP * (more + less)


def _first(log_delta: Callable[[np.ndarray], np.ndarray], event: Shuffled, *, delta: float) -> float:
    """The smallest eps below eps_local at which delta is met, from above; the formulas need not fall everywhere."""
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


def _resolution(crowd: float) -> float:
    """Grid step in standard deviations of L: fine where the FFT is short, never coarser than 0.12."""
    reach = 16 * math.sqrt(crowd)
    resolution = max(min(max(reach / _LEAST_POINTS, 0.004), 0.02), reach / blanket_grid.MOST_POINTS)
    if resolution > 0.12:
        raise NotApplicable(
            f"n gamma = {crowd:.3g} is more than the grid of {blanket_grid.MOST_POINTS} points resolves"
        )
    return resolution


def _law(report: Report, eps: float, *, crowd: float, resolution: float) -> blanket_grid.Grid:
    """The law of L for the worst pair of inputs, spread on a grid.

    For Laplace the worst pair is (0, 1): any other is below it in convex order (docs/proofs/laplace-blanket.md). Others
    have a frontier (docs/proofs/blankets.md).
    """
    if report.kind != "laplace":
        values, probs = frontier_of(report).law(math.exp(eps))
        return blanket_grid.Grid.of(values, probs, crowd=crowd, resolution=resolution)
    e0, at = report.eps_local, np.asarray(eps)
    top, std = float(_top(report, at)), math.sqrt(max(float(_second_moment(report, at)) - math.expm1(eps) ** 2, 0.0))
    bottom = top - float(_range(report, at))
    middle = -math.exp(-e0 / 2) * math.expm1(eps)
    floor = max(bottom, 2 * middle - top * (crowd + 12 * math.sqrt(crowd) + 30))  # as in `Grid.of`
    step = max(min(std, top) * resolution, (top - floor) / blanket_grid.MOST_POINTS)
    if top - floor > 2 * blanket_grid.MOST_POINTS * top:
        raise NotApplicable(f"the range of L is more than a grid resolves at eps={eps:.4g}, eps_local={e0:.4g}")
    grid = blanket_grid.Grid(bottom=floor, top=top, step=top / math.ceil(top / step))
    scale, shift = math.exp(-e0 / 4) / 4, math.exp(-e0 / 2)
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
