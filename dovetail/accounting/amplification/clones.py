"""Amplification by shuffling via clones, numerically (Feldman, McMillan, Talwar 2021, 2023).

Any other user's report is, with probability p, a clone: a fair coin between the victim's two worst reports. Given C
clones, A ~ Bin(C, 1/2) of them on the first side, and the victim's D ~ Bern(e^eps_local / (1 + e^eps_local)), the
adversary has to tell (A + D, C - A + 1 - D) from (A + 1 - D, C - A + D). Their sum reveals C, so delta(eps) is the mean
over C of a one-step delta, two binomial probabilities each; both directions are equal by reflection. Counts are summed
over a window of width O(sqrt n); the mass outside is added, times the largest one-step delta that it can have.

p = e^-eps_local in the 2021 paper; p = 2 / (e^eps_local + 1) in the 2023 one, whose erratum restricts it to some
randomizers: docs/proofs/personalized-clones.md (all budgets equal) proves it for all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification import closed_forms
from dovetail.accounting.search import smallest_eps
from dovetail.events import Shuffled
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = [
    "FMT22",
    "FMT23",
    "CloneCounts",
    "binomial_counts",
    "clone_probability",
    "delta_by_clone_count",
    "delta_of",
    "expected_delta",
    "numerical22",
    "numerical23",
]

FMT22 = Theorem(
    key="FMT22.numerical",
    where="clones, numerically (Feldman, McMillan, Talwar, FOCS 2021, Thm. 3.2)",
    url="https://arxiv.org/abs/2012.12803",
)
FMT23 = Theorem(
    key="FMT23.numerical",
    where="stronger clones, numerically (Feldman, McMillan, Talwar, SODA 2023), for every randomizer by "
    "docs/proofs/personalized-clones.md",
    url="https://arxiv.org/abs/2208.04591",
)

_TAIL = 1e-10  # window of counts: outside mass relative to delta
_WIDEST = 2**15  # counts of a window that is not cut into blocks
_BLOCKS = 2**13
_WIDE = 2**12  # the same if coarse
_FEW_BLOCKS = 2**10
_TINY = 1e-290  # stands for everything that may underflow
_FINE_USERS = 10**5  # more of them are told apart less finely: delta is then a little larger
_MOST_USERS = 10**12  # delta falls in n, so fewer users give an upper bound
_LARGEST_EXPONENT = 700.0  # what is subtracted may be less
_MOST_EPS_LOCAL = 500.0  # beyond, e^-eps_local leaves no clone at any number of users that fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloneCounts:
    """The law of the number of clones: a window of counts with their probabilities, and the mass on either side.

    The probabilities are rounded up. The arrays are shared: do not write to them.
    """

    counts: np.ndarray  # whole numbers, rising
    weights: np.ndarray  # the probability of each
    below: float  # the probability of fewer clones than the window has
    above: float  # that of more


def clone_probability(eps_local: float, *, year: int) -> float:
    """The probability that another user's report is a clone, rounded down."""
    _validate.positive(eps_local=eps_local)
    _validate.one_of((2022, 2023), year=year)
    small = math.exp(-eps_local)
    return (small if year == 2022 else 2 * small / (1 + small)) * (1 - 1e-15)


def delta_by_clone_count(counts: np.ndarray, *, eps: float, eps_local: float) -> np.ndarray:
    """The delta at eps given each number of clones, rounded up.

    With c clones the likelihood ratio rises in A + D, so the best event is a half-line {A + D >= k}, and
    delta = u P(A = k - 1) - (e^eps - 1) P(A >= k), u = (e^eps_local - e^eps) / (1 + e^eps_local), A ~ Bin(c, 1/2),
    k = 1 + floor((c + 1)(1 + tanh(eps/2) / tanh(eps_local/2)) / 2).

    Arguments:
        counts: numbers of clones, an array of any shape.
        eps: at which delta is asked for, 0 or more.
        eps_local: of the victim's report.

    Returns: an array of the same shape; 0 where eps >= eps_local.

    Guarantees:
        Never below the exact value, and within 1e-8 of it for up to 1e6 clones.
        Falls as the count rises: a clone more is post-processing.
    """
    _validate.non_negative(eps=eps)
    _validate.positive(eps_local=eps_local)
    counts = np.asarray(counts)
    if eps >= eps_local:
        return np.zeros(counts.shape)
    u = -math.expm1(eps - eps_local) / (1 + math.exp(-eps_local))
    threshold = math.tanh(eps / 2) / math.tanh(eps_local / 2)
    k = np.minimum(np.floor((counts + 1) * (1 + threshold) / 2), counts) + 1
    rounding = numerics.binomial_outward_factor(counts) - 1
    at_edge = u * numerics.binomial_pmf(k - 1, counts, 0.5)
    beyond = (
        math.expm1(min(eps, _LARGEST_EXPONENT)) * numerics.binomial_sf(k - 1, counts, 0.5)
        if eps
        else np.zeros(counts.shape)
    )
    steps = np.clip(at_edge * (1 + rounding) - beyond * (1 - rounding), 0.0, 1.0)
    return np.where(np.isnan(steps), 1.0, steps)


def binomial_counts(trials: int, prob: float, *, tail: float, coarse: bool = False) -> CloneCounts:
    """C ~ Bin(trials, prob) on a window that misses at most `tail` on either side, which is charged in full.

    A window of more than 2^15 counts is cut into 2^13 blocks (if coarse, one of 2^12 into 2^10), each standing at its
    lowest count: fewer clones, which is the safe side for anything that falls in the number of clones.

    Arguments:
        trials: other users.
        prob: how probably each of them is a clone.
        tail: the mass that the window may miss on either side.
        coarse: whether windows are cut into fewer blocks, for speed.

    Guarantees:
        The weights and both sides sum to 1 or a little more.
    """
    _validate.integer(trials=trials)
    _validate.non_negative(trials=trials, tail=tail)
    _validate.in_interval(0, 1, prob=prob)
    tail = max(tail, _TINY)
    log_tail = math.log(1 / tail)
    mean, variance = trials * prob, trials * prob * (1 - prob)
    reach = log_tail / 3 + math.sqrt((log_tail / 3) ** 2 + 2 * log_tail * variance)  # Bernstein
    reach += 1 + 1e-12 * trials
    low, high = max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach))
    rounding = numerics.binomial_outward_factor(trials) - 1
    widest, blocks = (_WIDE, _FEW_BLOCKS) if coarse else (_WIDEST, _BLOCKS)
    if high - low < widest:
        counts = np.arange(low, high + 1)
        weights = numerics.binomial_pmf(counts, trials, prob) * (1 + rounding)
    else:
        counts = low + (high + 1 - low) * np.arange(blocks, dtype=np.int64) // blocks
        weights = _block_masses(np.append(counts, high + 1), trials, prob, rounding)
    return CloneCounts(
        counts=counts,
        weights=weights,
        below=tail if low > 0 else 0.0,
        above=tail if high < trials else 0.0,
    )


def _block_masses(edges: np.ndarray, trials: int, prob: float, rounding: float) -> np.ndarray:
    """P(edges[i] <= C < edges[i + 1]), rounded up: by cdfs on the left of the mean, by tails on the right."""
    left = edges[1:] <= trials * prob
    cdf, sf = numerics.binomial_cdf(edges - 1, trials, prob), numerics.binomial_sf(edges - 1, trials, prob)
    from_left = cdf[1:] * (1 + rounding) - cdf[:-1] * (1 - rounding)
    from_right = sf[:-1] * (1 + rounding) - sf[1:] * (1 - rounding)
    return np.where(left, from_left, from_right)


def expected_delta(law: CloneCounts, *, eps: float, eps_local: float) -> float:
    """The delta at eps when the number of clones follows this law, rounded up.

    Mass below the window is charged the delta without clones, mass above it the delta at the window's upper end.

    Arguments:
        law: of the number of clones.
        eps: at which delta is asked for.
        eps_local: of the victim's report.
    """
    if eps >= eps_local:
        return 0.0
    steps = delta_by_clone_count(np.append(0, law.counts), eps=eps, eps_local=eps_local)
    inside = float((law.weights * steps[1:]).sum()) * (1 + 1e-13)
    return numerics.as_probability_bound(inside + law.below * float(steps[0]) + law.above * float(steps[-1]) + _TINY)


def delta_of(event: Shuffled, *, eps: float, year: int = 2023) -> float:
    """The delta of one shuffled report at this eps, rounded up.

    Arguments:
        event: one shuffled report.
        eps: at which delta is asked for.
        year: which clone probability counts: that of the paper of 2022 or of 2023.
    """
    _validate.non_negative(eps=eps)
    n, eps_local = closed_forms.require_single_report(event)
    return expected_delta(_clones_among_others(n, eps_local, year), eps=eps, eps_local=eps_local)


@functools.lru_cache(maxsize=8)  # a curve asks about one law at many eps
def _clones_among_others(num_users: int, eps_local: float, year: int) -> CloneCounts:
    """The law of the number of clones among the others, kept; told apart less finely in large crowds."""
    prob = clone_probability(eps_local, year=year)
    coarse = num_users > _FINE_USERS
    return binomial_counts(min(num_users, _MOST_USERS) - 1, prob, tail=1e-100, coarse=coarse)


def numerical22(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps by clones of probability e^-eps_local; for any randomizer."""
    return _numerical_bound(event, delta=delta, year=2022, theorem=FMT22)


def numerical23(event: Shuffled, *, delta: float) -> Bound:
    """The smallest eps by clones of probability 2 / (e^eps_local + 1); for any randomizer.

    Guarantees:
        Never below exact enumeration, never above `numerical22`.
        Exact for binary randomized response when the adversary is told who sent a blanket report.
    """
    return _numerical_bound(event, delta=delta, year=2023, theorem=FMT23)


def _numerical_bound(event: Shuffled, *, delta: float, year: int, theorem: Theorem) -> Bound:
    """The smallest eps by clones of this year's probability; refuses where it is no gain over eps_local."""
    n, eps_local = closed_forms.require_single_report(event, delta=delta)
    if eps_local > _MOST_EPS_LOCAL:
        raise NotApplicable(f"no gain over eps_local={eps_local:.4g}: there are no clones")
    closed = closed_forms.clones22 if year == 2022 else closed_forms.clones23
    try:
        high = closed(event, delta=delta).eps
    except NotApplicable:
        high = eps_local
    eps = _smallest_eps(n, eps_local, delta, year, high)
    return closed_forms.bound_if_gain(eps, event, delta=delta, theorem=theorem)


@functools.lru_cache(maxsize=64)  # reports of several kinds have the same clones
def _smallest_eps(num_users: int, eps_local: float, delta: float, year: int, high: float) -> float:
    """The smallest eps at this delta, rounded up, `high` is where the search starts."""
    law = binomial_counts(min(num_users, _MOST_USERS) - 1, clone_probability(eps_local, year=year), tail=_TAIL * delta)
    return smallest_eps(lambda eps: expected_delta(law, eps=eps, eps_local=eps_local), delta=delta, high=high)
