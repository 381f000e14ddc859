"""APES's and S-APES's formulas as printed (Liu, Zhao, Xiong, Liu, Chen 2023), and the numbers of its Table 3.

Table 3 does not come from Thm. 4 (0.205 there, 0.057 in the table) but from numerics: the clone pair of Feldman,
McMillan, Talwar 2022 with the number of echoes taken as normal, in blocks of 100 counts, by ten halvings of the closed
form. `echo_numerical` and `unis_numerical` do the same, dropped mass included, and reproduce the table to the digit.
Users' budgets compose by Lemma 2 at delta' = delta_uc - folds delta_c, or 1e-8 where that leaves nothing.

The numerics behind Table 3 are reproduced as they must have been run: the number of clones (echoes) is cut into blocks
of 100 around its mean, every block takes the worse of its two ends, and ten halvings of the closed form give eps. With
a normal law for the count one in a hundred counts is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.claims._claim import HOLDS, REFUTED, UNPROVEN, Claim
from dovetail.claims.flame import lemma3
from dovetail.events import Personalized
from dovetail.statements import NotApplicable, Theorem

__all__ = [
    "apes",
    "echo_numerical",
    "equation2",
    "ldp_min",
    "pldp",
    "proposition1",
    "s_apes",
    "theorem4",
    "unis",
    "unis_numerical",
]

_DELTA_SHUFFLE = 1e-8
_AVERAGED = (
    "It averages the echo probabilities over all budgets as if the victim's own were secret: among 9,999 users with "
    "eps .05 one with eps 8 is claimed .094, and a count of reports shows .118."
)
_UNEQUAL = (
    "The paper itself calls it an approximation, since Laplace reports of unequal scales have an unbounded divergence."
)


def _apes_theorem(key: str, where: str) -> Theorem:
    return Theorem(
        key=f"APES.{key}",
        where=f"APES (Liu, Zhao, Xiong, Liu, Chen, AAAI 2023), {where}",
        url="https://arxiv.org/abs/2304.05516",
    )


def equation2(eps_locals: Sequence[float], *, delta: float) -> Claim:
    """The naive bound: Feldman, McMillan, Talwar 2022 in closed form, everybody at the largest budget."""
    budgets = _budget_array(eps_locals)
    _validate.in_open_interval(0, 1, delta=delta)
    n = len(budgets)
    largest = float(budgets.max())
    limit = math.log(n / (16 * math.log(2 / delta)))
    if largest > limit:
        raise NotApplicable(f"APES eq. 2 needs eps_local <= {limit:.3g} at n={n}, delta={delta}; got {largest}")
    equal = largest == float(budgets.min())
    return Claim(
        eps=clone_closed_form(largest, n * math.exp(-largest), delta),
        delta=delta,
        theorem=_apes_theorem("eq2", "eq. 2"),
        verdict=HOLDS if equal else UNPROVEN,
        reason="With equal budgets it is the clone bound of Feldman, McMillan, Talwar 2022." if equal else _UNEQUAL,
    )


def theorem4(eps_locals: Sequence[float], *, delta_shuffle: float = _DELTA_SHUFFLE) -> Claim:
    """The closed form of Echo of Neighbors for one coordinate; the victim has the largest budget."""
    budgets = _budget_array(eps_locals)
    mean, _ = echo_moments(budgets)
    return _theorem4(float(budgets.max()), mean, delta_shuffle)


def _theorem4(largest: float, mean: float, delta_shuffle: float) -> Claim:
    """The same by the largest budget and the mean number of echoes."""
    _validate.in_open_interval(0, 1, delta_shuffle=delta_shuffle)
    if mean < 16 * math.log(4 / delta_shuffle):
        raise NotApplicable(f"APES Thm. 4 needs {16 * math.log(4 / delta_shuffle):.3g} echoes, got {mean:.3g}")
    return Claim(
        eps=clone_closed_form(largest, mean, delta_shuffle),
        delta=math.tanh(largest / 2) * delta_shuffle,
        theorem=_apes_theorem("thm4", "Thm. 4"),
        verdict=REFUTED,
        reason="It averages the echo probabilities over all budgets as if the victim's own were secret: among 9,999 "
        "users with eps .05 one with eps 100 is claimed .312, and a count of reports shows .44.",
    )


def echo_numerical(eps_locals: Sequence[float], *, delta: float = _DELTA_SHUFFLE) -> Claim:
    """Table 3's eps_c of APES (0.057): the numerics behind Thm. 4."""
    budgets = _budget_array(eps_locals)
    mean, spread = echo_moments(budgets)
    largest = float(budgets.max())
    largest_eps = _theorem4(largest, mean, delta).eps

    def mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return ndtr((high - (mean - 0.5)) / spread) - ndtr((low - (mean - 0.5)) / spread)

    eps = eps_by_blocks(largest, mean, len(budgets), mass, largest_eps, delta)
    return Claim(eps=eps, delta=delta, theorem=_apes_theorem("numerical", "Table 3"), verdict=REFUTED, reason=_AVERAGED)


def unis_numerical(eps_locals: Sequence[float], *, delta: float = _DELTA_SHUFFLE) -> Claim:
    """Table 3's eps_c of UniS (0.069): clones 2022, everybody at the largest budget."""
    budgets = _budget_array(eps_locals)
    naive = equation2(eps_locals, delta=delta)
    n = len(budgets)
    largest = float(budgets.max())
    prob = math.exp(-largest)

    def mass(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return numerics.binomial_cdf(high, n - 1, prob) - numerics.binomial_cdf(low - 1, n - 1, prob)

    # The published code of the clone bound starts its halvings from this variant of the closed form.
    width = math.expm1(naive.eps) / math.tanh(largest / 2)
    start = math.log1p(-math.expm1(-largest) / (1 + math.exp(-largest) / (1 + width)) * width)
    eps = eps_by_blocks(largest, (n - 1) * prob, n, mass, start, delta)
    where = _apes_theorem("unis", "Table 3, UniS")
    return Claim(eps=eps, delta=delta, theorem=where, verdict=naive.verdict, reason=naive.reason)


def proposition1(*, eps_each: float, delta_each: float, kept: int, delta_slack: float) -> Claim:
    """S-APES over the 2b coordinates that it says may differ; delta' stands where delta_uc is printed under the log."""
    _validate.at_least(1, kept=kept)
    total = lemma3(eps=eps_each, delta=delta_each, folds=2 * kept, delta_slack=delta_slack)
    return Claim(
        eps=total.eps,
        delta=total.delta,
        theorem=_apes_theorem("prop1", "Prop. 1"),
        verdict=REFUTED,
        reason="All d coordinates are perturbed and shuffled, and keeping b of them is post-processing, so the "
        "composition is d-fold and not 2b-fold.",
    )


def apes(event: Personalized, *, delta: float, delta_shuffle: float = _DELTA_SHUFFLE) -> Claim:
    """What the paper claims for APES: 57.6 over all coordinates, 0.057 for one (where delta is delta_shuffle)."""
    return _over_coordinates(echo_numerical, event, delta, delta_shuffle)


def unis(event: Personalized, *, delta: float, delta_shuffle: float = _DELTA_SHUFFLE) -> Claim:
    """What the paper claims for UniS: 76.9 over all coordinates, 0.069 for one (where delta is delta_shuffle)."""
    return _over_coordinates(unis_numerical, event, delta, delta_shuffle)


def s_apes(event: Personalized, *, delta: float, kept: int, delta_shuffle: float = _DELTA_SHUFFLE) -> Claim:
    """What the paper claims for S-APES with `kept` = b coordinates: 25.6 at b = d/5."""
    _validate.in_interval(1, event.coordinates, kept=kept)
    each = echo_numerical(event.eps_locals, delta=delta_shuffle)
    delta_each = _delta_each(event, delta_shuffle)
    slack = _delta_left(delta, 2 * kept * delta_each, delta_shuffle)
    return proposition1(eps_each=each.eps, delta_each=delta_each, kept=kept, delta_slack=slack)


def pldp(event: Personalized, *, delta: float = 0.0) -> Claim:
    """What the paper claims for PLDP, which is not shuffled: d times the largest budget (7850)."""
    _validate.in_interval(0, 1, delta=delta)
    eps = event.coordinates * max(event.eps_locals)
    reason = "It is basic composition of d Laplace reports at the largest budget."
    return Claim(eps=eps, delta=0.0, theorem=_apes_theorem("pldp", "Table 3, PLDP"), verdict=HOLDS, reason=reason)


def ldp_min(event: Personalized, *, delta: float) -> Claim:
    """What the paper claims for LDP-Min, not shuffled: the smallest budget d-fold by advanced composition (40.1)."""
    smallest = min(event.eps_locals)
    where = _apes_theorem("ldp-min", "Table 3, LDP-Min")
    reason = "It is the composition of d Laplace reports at the smallest budget."
    if event.coordinates == 1:
        return Claim(eps=smallest, delta=0.0, theorem=where, verdict=HOLDS, reason=reason)
    total = lemma3(eps=smallest, delta=0.0, folds=event.coordinates, delta_slack=delta)
    return Claim(eps=total.eps, delta=total.delta, theorem=where, verdict=HOLDS, reason=reason)


def _over_coordinates(
    numerical: Callable[..., Claim], event: Personalized, delta: float, delta_shuffle: float
) -> Claim:
    """The numerics of one coordinate at delta, or at delta_shuffle and composed over all coordinates."""
    if event.coordinates == 1:
        return numerical(event.eps_locals, delta=delta)
    each = numerical(event.eps_locals, delta=delta_shuffle)
    delta_each = _delta_each(event, delta_shuffle)
    slack = _delta_left(delta, event.coordinates * delta_each, delta_shuffle)
    total = lemma3(eps=each.eps, delta=delta_each, folds=event.coordinates, delta_slack=slack)
    where = Theorem(
        key=each.theorem.key + "+lemma2", where=each.theorem.where + ", composed by Lemma 2", url=each.theorem.url
    )
    return Claim(eps=total.eps, delta=total.delta, theorem=where, verdict=each.verdict, reason=each.reason)


def _delta_each(event: Personalized, delta_shuffle: float) -> float:
    return math.tanh(max(event.eps_locals) / 2) * delta_shuffle


def _delta_left(delta: float, spent: float, delta_shuffle: float) -> float:
    """What the coordinates leave of delta for delta'; Table 3 took 1e-8 where they leave nothing."""
    _validate.in_open_interval(0, 1, delta=delta)
    return delta - spent if delta > spent else delta_shuffle


def _budget_array(eps_locals: Sequence[float]) -> np.ndarray:
    budgets = np.asarray(eps_locals, dtype=float)
    if budgets.ndim != 1 or len(budgets) < 2:
        raise ValueError(f"expected the budgets of at least 2 users, got {budgets.size}")
    if not (np.all(np.isfinite(budgets)) and np.all(budgets > 0)):
        raise ValueError(f"expected every eps_local > 0, got {budgets.min()}")
    return budgets


_BLOCK = 100
_HALVINGS = 10


def echo_moments(budgets: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of sum_{i>1} sum_j Bern(p_ij / n), p_ij as in Lemma 6, user 1 having the largest eps.

    With r(e) = (1 - e^-e) / e, p_ij = r(e_j) / r(e_i) e^-max(e_i, e_j): sorting makes both sums linear.
    """
    e = np.sort(budgets)
    n = len(e)
    sums = []
    for power in (1, 2):
        r = (-np.expm1(-e) / e) ** power
        damp = np.exp(-power * e)
        up_to, beyond = np.cumsum(r), np.cumsum((r * damp)[::-1])[::-1]
        inner = damp * up_to + np.append(beyond[1:], 0.0)
        sums.append(float(np.sum((inner / r)[:-1])) / n**power)
    return sums[0], math.sqrt(max(sums[0] - sums[1], 0.0))


def clone_closed_form(eps_local: float, clones: float, delta: float) -> float:
    """ln(1 + tanh(eps/2) (8 sqrt(ln(4/delta) / clones) + 8 / clones))."""
    return math.log1p(math.tanh(eps_local / 2) * (8 * math.sqrt(math.log(4 / delta) / clones) + 8 / clones))


def eps_by_blocks(
    eps_local: float,
    centre: float,
    num_users: int,
    mass_between: Callable[[np.ndarray, np.ndarray], np.ndarray],
    start: float,
    delta: float,
) -> float:
    """Ten halvings from `start`, the number of clones taken in blocks of 100 around its mean, each at its worse end.

    Blocks are added outwards until less is left than they have summed up to, and then the rest is added. A normal
    `mass_between` leaves out one count in a hundred between neighbouring blocks, so that this never happens and the
    rest is lost: the published computation, not an upper bound.
    """
    if num_users <= 2 * _BLOCK:
        raise NotApplicable(f"the numerics of Table 3 work in blocks of {_BLOCK} users, too coarse for n={num_users}")
    steps = np.arange(1, math.ceil(num_users / _BLOCK))
    above, below = np.ceil(centre + steps * _BLOCK), np.ceil(centre - steps * _BLOCK)
    low = np.column_stack([above - _BLOCK + (steps > 1), np.maximum(below, 0)]).ravel()
    high = np.column_stack([np.minimum(above, num_users - 1), below + _BLOCK - 1]).ravel()
    inside = (low <= num_users - 1) & (high >= 0)
    low, high = low[inside], high[inside]
    weights = mass_between(low, high)
    low, high, weights = low[weights != 0], high[weights != 0], weights[weights != 0]  # most are far from the mean
    left = 1 - np.cumsum(weights)
    bottom, top = 0.0, min(start, eps_local)
    for _ in range(_HALVINGS):
        eps = (bottom + top) / 2
        at_high = _delta_by_clones(high, eps, eps_local)
        total = np.cumsum(weights * np.maximum(_delta_by_clones(low, eps, eps_local), at_high))
        enough = np.flatnonzero(left < np.cumsum(weights * at_high))
        reached = total[enough[0]] + left[enough[0]] if enough.size else total[-1]
        bottom, top = (bottom, eps) if reached < delta else (eps, top)
    return top


def _delta_by_clones(clones: np.ndarray, eps: float, eps_local: float) -> np.ndarray:
    """Hockey-stick divergence of the clone pair given the number of clones, by two binomial cdfs."""
    p, ratio = 1 / (1 + math.exp(-eps_local)), math.exp(eps)
    odds = ((ratio + 1) * p - 1) / ((ratio + 1) * p - ratio)
    cut = (clones + 1) / (odds + 1)
    here, before = numerics.binomial_cdf(cut, clones, 0.5), numerics.binomial_cdf(cut - 1, clones, 0.5)
    return p * here + (1 - p) * before - ratio * ((1 - p) * here + p * before)
