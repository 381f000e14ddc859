"""One biased coin among fair coins: the dominating pairs of shuffled coordinates.

This file has two pairs: `BinomialPair`, where all users hide the victim alike, and further down `PoissonBinomialPair`,
where each hides it with a probability of its own (personal budgets).

**`BinomialPair`.** The adversary sees how many of N coins show heads. One of them, the victim's, has bias (1 + tilt)/2
under P and (1 - tilt)/2 under Q; the others are fair. N = 1 + others - Bin(exposed, prob_exposed) is seen too: an
exposed message says nothing and is set aside. With s = (heads - tails)/N and w the law of s when all N coins are fair,
``P = (1 + tilt s) w`` and ``Q = (1 - tilt s) w``, so everything is an expectation under one symmetric law on [-1, 1],
of a convex function of s. A mean-preserving spread of w gives a pair that dominates (docs/proofs/coins.md): all
truncation, blocking and rounding to grids here is such a spread. Nothing is dropped, and no delta is spent on it.

**`PoissonBinomialPair`**, the pair of personalised clones. The victim's coin shows heads with probability ``E/(E+1)``,
E = e^eps_local, and hides among C fair coins, C ~ PoissonBinomial(probs). Where the outcomes are cut into regions of
fixed probability, C has a law of its own in each (`Hiding`). More clones never hurt, so every approximation takes
fewer: upper tails of C move down, lower tails are charged in full.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification.clones import CloneCounts, binomial_counts, expected_delta
from dovetail.accounting.loss_distributions import LossDistribution
from dovetail.accounting.numerics import ULP
from dovetail.accounting.pairs import symmetric
from dovetail.statements import NotApplicable

__all__ = [
    "MANY_COINS",
    "SOME_COINS",
    "BinomialPair",
    "Coins",
    "Hiding",
    "PoissonBinomialPair",
    "clone_counts",
    "clone_counts_by_tail_bounds",
    "coarsen_counts",
]

_MASS_OUTWARD = 1 + 1e-10  # more than the error of interpolation and of a sum
_TILT_OUTWARD = 1 + 1e-15
_UNDERFLOW = 1e-300  # put at |s| = 1 for every probability that may have underflowed
_WIDE = 12.0  # standard deviations that are resolved finely
_POINTS = 400_000  # outcomes that are resolved finely
_NEAR = 30_000  # outcomes of one crowd that are resolved one by one
_CHUNK = 2_000_000  # outcomes that are held at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinomialPair:
    """A coin of bias (1 +- tilt)/2 among 1 + others - Bin(exposed, prob_exposed) coins, `folds` independent times.

    Guarantees:
        Never below the enumeration of all outcomes, at any order, eps or number of folds.
        P and Q may change places: the pair is symmetric by reflection.
    """

    others: int
    exposed: int
    prob_exposed: float
    tilt: float
    folds: int = 1

    def __post_init__(self) -> None:
        _validate.integer(others=self.others, exposed=self.exposed, folds=self.folds)
        _validate.non_negative(others=self.others, exposed=self.exposed)
        _validate.at_least(1, folds=self.folds)
        _validate.in_interval(0, 1, prob_exposed=self.prob_exposed)
        _validate.in_interval(0, 1, tilt=self.tilt)
        _validate.positive(tilt=self.tilt)

    @property
    def eps_pure(self) -> float:
        """The largest privacy loss of one fold, rounded up; infinite where the tilt is 1."""
        return math.inf if self._tilt_rounded_up == 1 else 2 * math.atanh(self._tilt_rounded_up) * (1 + 4 * ULP)

    @property
    def _tilt_rounded_up(self) -> float:
        """The tilt, rounded up by more than any rounding error in tilt s."""
        return min(1.0, self.tilt * _TILT_OUTWARD)

    @property
    def typical_number_of_coins(self) -> float:
        """About the mean of N, the number of coins that the victim's hides among, its own included."""
        return 1 + max(0.0, self.others - self.exposed * self.prob_exposed)

    @property
    def std_loss(self) -> float:
        """About the standard deviation of the privacy loss of one fold: to choose grids by, never for a bound."""
        return 2 * self.tilt / math.sqrt(self.typical_number_of_coins)

    def one_fold(self) -> BinomialPair:
        """The pair of one of the copies: one coordinate alone."""
        return dataclasses.replace(self, folds=1)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergence of all folds at each order > 1 (both directions are equal)."""
        if math.isinf(self.eps_pure):
            return np.inf + symmetric.renyi(orders, np.zeros(1), np.ones(1))
        points, mass = _compact_law(self)
        return self.folds * np.fmin(symmetric.renyi(orders, self._tilt_rounded_up * points, mass), self.eps_pure)

    def loss(self, *, interval: float = 1e-4) -> LossDistribution:
        """The privacy loss of all folds, rounded up to multiples of `interval` ("connect the dots")."""

        def on(tanh: np.ndarray) -> np.ndarray:
            return _law_on_grid(self, tanh / self._tilt_rounded_up)

        return symmetric.composed_loss(on, self.eps_pure, std=self.std_loss, folds=self.folds, interval=interval)


def _numbers_of_coins(pair: BinomialPair) -> tuple[np.ndarray, np.ndarray]:
    """The law of N, the number of coins: its values and their probabilities, rounded up.

    Neighbouring values are taken in blocks, each replaced by its smallest, which dominates it.
    """
    trials, prob = pair.exposed, pair.prob_exposed
    half_width = _WIDE * (math.sqrt(trials * prob * (1 - prob)) + 1)
    low = max(0, math.floor(trials * prob - half_width))
    high = min(trials, math.ceil(trials * prob + half_width))
    stride = math.ceil((high + 1 - low) / max(32, _POINTS / (_WIDE / 2 * math.sqrt(pair.typical_number_of_coins) + 64)))
    starts = np.arange(low, high + 1, stride)
    gone = [np.minimum(starts + stride - 1, high)]
    mass = [np.add.reduceat(numerics.binomial_pmf(np.arange(low, high + 1), trials, prob), starts - low)]
    mass[0][0] += numerics.binomial_cdf(low - 1, trials, prob)
    outward = numerics.binomial_outward_factor(trials)
    edge, step = high, stride
    while edge < trials:  # upper tail: ever larger blocks, each with all that is beyond
        step = max(step + 1, step * 9 // 8)
        beyond, edge = numerics.binomial_sf(edge, trials, prob), min(edge + step, trials)
        gone.append(np.array([edge]))
        mass.append(np.array([beyond]))
    sizes = 1 + np.maximum(pair.others - np.concatenate(gone), 0)
    return sizes, np.concatenate(mass) * outward


def _law_of_coin_tosses(sizes: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law of |s| when N fair coins are tossed, N having this law: points and masses, in any order.

    Every outcome near the middle is a point; beyond, rings of outcomes are rounded up to their largest |s|. In large
    crowds outcomes near the middle are taken in blocks, which are rounded up as well.

    Arguments:
        sizes: values of N.
        probs: the probability of each.
    """
    largest = int(sizes.max())
    near = min(largest // 2, math.ceil(_WIDE / 2 * math.sqrt(largest)))
    stride = max(1, near // _NEAR)
    rings = [near + 1]
    while rings[-1] <= largest // 2:
        rings.append(rings[-1] + max(1, rings[-1] // 32))
    start = np.concatenate([np.arange(0, near + 1, stride), rings])
    n = sizes[:, None]
    first, last = start[None, :-1], np.minimum(start[None, 1:] - 1, n // 2)
    middle = (n + 1) // 2
    excess = 2 * (middle + last) - n
    at_first = numerics.binomial_pmf(middle + first, n, 0.5) * probs[:, None]
    mass = np.where(excess == 0, 1, 2) * (last - first + 1) * at_first
    real = first <= n // 2
    mass = np.where(real, mass, 0.0) * (_MASS_OUTWARD * numerics.binomial_outward_factor(largest))
    if stride > 1:  # blocks weigh too much: what exceeds the crowd's own weight is taken from the smallest |s|
        most = probs[:, None] * _MASS_OUTWARD
        mass = -np.diff(np.minimum(np.cumsum(mass[:, ::-1], axis=1)[:, ::-1], most), axis=1, append=0.0)
    return (excess / n)[real], mass[real]


def _law_in_chunks(pair: BinomialPair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The law of |s| piece by piece: points and masses, the last piece for all that may have underflowed."""
    sizes, probs = _numbers_of_coins(pair)
    rows = max(1, _CHUNK // (min(8 * math.isqrt(int(sizes.max())), 2 * _NEAR) + 256))
    for i in range(0, len(sizes), rows):
        yield _law_of_coin_tosses(sizes[i : i + rows], probs[i : i + rows])
    yield np.ones(1), np.full(1, _UNDERFLOW)


def _law_on_grid(pair: BinomialPair, grid: np.ndarray) -> np.ndarray:
    """The law of |s| spread to a grid that starts at 0 and reaches 1, so that the mean of |s| is kept."""
    mass = np.zeros(len(grid))
    for points, probs in _law_in_chunks(pair):
        mass += symmetric.spread_to_grid(points, probs, grid)
    return mass


@functools.lru_cache(maxsize=64)
def _compact_law_of_coins(others: int, exposed: int, prob_exposed: float) -> tuple[np.ndarray, np.ndarray]:
    """`_compact_law`, kept; w does not depend on the tilt. Its arrays cannot be written to."""
    pair = BinomialPair(others=others, exposed=exposed, prob_exposed=prob_exposed, tilt=0.5)
    if others <= 64:
        points, mass = zip(*_law_in_chunks(pair), strict=True)
        law = np.concatenate(points), np.concatenate(mass)
    else:
        std = 1 / math.sqrt(pair.typical_number_of_coins)
        fine = np.arange(0, min(_WIDE * std, 1.0), std / 128)
        coarse = np.geomspace(fine[-1], 1, 2 + math.ceil(-100 * math.log(fine[-1])))
        grid = np.unique(np.concatenate([fine, coarse]))
        law = grid, _law_on_grid(pair, grid)
    for array in law:
        array.flags.writeable = False
    return law


def _compact_law(pair: BinomialPair) -> tuple[np.ndarray, np.ndarray]:
    """Points |s| and masses of a law that dominates the pair's, few enough to be asked at many orders."""
    return _compact_law_of_coins(pair.others, pair.exposed, pair.prob_exposed)


_TINY = 1e-290  # masses below this are charged, not carried
MANY_COINS = 20_000  # coins, of which more are taken in classes
_CLASSES = 128  # of coins of similar probabilities
_MOST_TRIALS = 2**19  # of a binomial count in one piece
SOME_COINS = 1000  # coins from which on the law of a count may be bounded and not computed
_NARROW = 0.03  # deviation over mean of such a count, at the most
_BERRY_ESSEEN = 0.5600001  # Shevtsova's constant, rounded up
_PARTS = 4  # counts to one standard deviation in `clone_counts_by_tail_bounds`
_DEVIATIONS = (17.0, 6.0)  # how far its counts go below and above the mean
_SLOPES = 48  # of Chernoff's bound that are tried
_SHALLOW = 1e-60  # masses below this are charged where there are many coins
_DEPTH = 300.0  # nats of tail mass that are resolved


class Coins(NamedTuple):
    """Coins, one for each user: the probabilities of heads, rising, and how many users have each."""

    probs: np.ndarray
    counts: np.ndarray

    @property
    def mean(self) -> float:
        """The mean number of heads."""
        return float(self.probs @ self.counts)

    @property
    def std(self) -> float:
        """About the standard deviation of the number of heads."""
        return math.sqrt(float((self.probs * (1 - self.probs)) @ self.counts))

    def probs_by_user(self) -> np.ndarray:
        """One probability for each user, rising."""
        return np.repeat(self.probs, self.counts)


Hiding = tuple[tuple[float, Coins], ...]  # (probability of a region of outcomes, clone probabilities in it)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonBinomialPair:
    """A victim's coin of this eps_local that hides among clones, on one coordinate; both directions are equal."""

    hiding: Hiding
    eps_local: float
    bounded: bool = False  # whether laws of clones may be bounded and not computed

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)

    @functools.cached_property
    def laws(self) -> list[tuple[float, CloneCounts]]:
        """For each region its probability, and the law of the number of clones in it, rounded down."""
        return [(mass, coarsen_counts(clone_counts(coins, bounded=self.bounded))) for mass, coins in self.hiding]

    def delta(self, eps: float) -> float:
        """delta at eps of one coordinate, the same in both directions, rounded up."""
        _validate.non_negative(eps=eps)
        terms = (mass * expected_delta(law, eps=eps, eps_local=self.eps_local) for mass, law in self.laws)
        return numerics.as_probability_bound(math.fsum(terms) * (1 + 1e-14))


def clone_counts(coins: Coins | np.ndarray, *, bounded: bool = False) -> CloneCounts:
    """A lower bound on the law of the number of heads, exact up to rounding where there are few coins.

    By direct convolution of positive numbers: no transform, no cancellation. Many coins are taken in classes, or their
    law is bounded by limit theorems, which costs some of the tails' precision.

    Arguments:
        coins: the users' probabilities to be a clone; an array has one for each user.
        bounded: whether bounds may take the place of the law also where coins are few, which is faster.

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    if not isinstance(coins, Coins):
        coins = Coins(*np.unique(np.asarray(coins, dtype=float), return_counts=True))
    _validate.finite_array(probs=coins.probs)
    if ((coins.probs < 0) | (coins.probs > 1)).any():
        raise ValueError(f"expected probabilities, got values from {coins.probs.min()} to {coins.probs.max()}")
    if (bounded or coins.counts.sum() > MANY_COINS) and 2 * _PARTS <= coins.std <= _NARROW * coins.mean:
        return clone_counts_by_tail_bounds(coins)
    if coins.counts.sum() > MANY_COINS:
        return _clone_counts_by_classes(coins)
    probs = coins.probs_by_user()
    rows = np.stack([1 - probs, probs], axis=1) if len(probs) else np.ones((1, 1))
    while len(rows) > 1 and rows.shape[1] <= 64:
        if len(rows) % 2:
            rows = np.concatenate([rows, np.eye(1, rows.shape[1])])
        a, b = rows[::2], rows[1::2]
        rows = np.zeros((len(a), 2 * a.shape[1] - 1))
        for j in range(a.shape[1]):
            rows[:, j : j + a.shape[1]] += a[:, j : j + 1] * b
    return _convolve([_trim_light_ends(row, 0, 0.0, _TINY) for row in rows], _TINY, len(probs))


def _convolve(parts: list[tuple[np.ndarray, int, float]], least: float, trials: int) -> CloneCounts:
    """The law of the sum of independent counts, convolved two by two.

    Arguments:
        parts: of each count the probabilities, the count of the first one, and the mass below it.
        least: masses below this at the ends are not carried on (`_trim_light_ends`).
        trials: how many coins there are in all, for the rounding error.
    """
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [
            _trim_light_ends(np.convolve(a, b), i + j, lost + more, least) for (a, i, lost), (b, j, more) in pairs
        ] + odd
    weights, first, below = parts[0]
    outward = 1 + 1e-15 * (trials + 64)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights * outward, below=below, above=0.0)


def _clone_counts_by_classes(coins: Coins) -> CloneCounts:
    """`clone_counts` of many coins: users of similar probabilities as a binomial count at the least of theirs."""
    summed = np.cumsum(np.sqrt(coins.probs) * coins.counts)
    cuts = np.unique(np.searchsorted(summed, summed[-1] * np.arange(1, _CLASSES) / _CLASSES))
    parts = []
    for probs, counts in zip(np.split(coins.probs, cuts), np.split(coins.counts, cuts), strict=True):
        if len(probs) and (prob := float(probs[0])) > 0:
            for trials in _split_trials(int(counts.sum())):
                law = binomial_counts(trials, prob, tail=_SHALLOW)
                weights = law.weights.copy()
                weights[-1] += law.above
                parts.append((weights, int(law.counts[0]), law.below))
    parts.sort(key=lambda part: len(part[0]))
    return _convolve(parts or [(np.ones(1), 0, 0.0)], _SHALLOW, int(coins.counts.sum()))


def clone_counts_by_tail_bounds(coins: Coins) -> CloneCounts:
    """`clone_counts` by bounds on the lower tails, on counts that are a fourth of the standard deviation apart.

    P(C <= k) is at most Phi((k - mean) / std) + .56 / std (Berry and Esseen's theorem with Shevtsova's constant, as
    E|X - p|^3 <= p (1 - p) for a coin X), and at most E e^(slope (k - C)) for every slope > 0 (Chernoff). A law with
    larger lower tails has fewer heads, and so has one that is rounded down (docs/proofs/blankets.md).

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    mean = coins.mean
    std = coins.std
    slack = ULP * (len(coins.probs) + 16)
    if not std >= 2 * _PARTS:
        raise NotApplicable(
            f"the limit law needs many coins: heads deviate by {std:.3g} here, and {2 * _PARTS} is the least"
        )
    step = int(std / _PARTS)
    first = max(0, math.floor(mean - _DEVIATIONS[0] * std))
    counts = np.arange(first, mean + _DEVIATIONS[1] * std, step, dtype=np.int64)
    slopes = np.linspace(0.25, _DEVIATIONS[0] + 2.0, _SLOPES) / std
    log_mean = np.log1p(np.multiply.outer(np.expm1(-slopes), coins.probs)) @ coins.counts  # of e^(-slope C)
    upward = np.multiply.outer(counts - 1.0, slopes)
    chernoff = np.exp(np.minimum((upward * (1 + slack) + log_mean * (1 - slack)).min(axis=1), 0.0))
    low = mean * (1 - slack)
    deviation = std * (1 + slack)
    gauss = ndtr((counts - 1.0 - low) / np.where(counts - 1.0 < low, deviation, std * (1 - slack)))
    fewer = np.minimum(chernoff, gauss * (1 + 1e-12) + _BERRY_ESSEEN / (std * (1 - slack))) * (counts > 0)
    fewer = np.maximum.accumulate(np.minimum(fewer, 1.0))
    weights = np.diff(fewer, append=1.0) * (1 + 1e-12)
    return CloneCounts(counts=counts, weights=weights, below=float(fewer[0]) * (1 + 1e-12), above=0.0)


def _split_trials(trials: int) -> list[int]:
    """So many trials cut into portions of at most `_MOST_TRIALS`."""
    whole, rest = divmod(trials, _MOST_TRIALS)
    return [_MOST_TRIALS] * whole + [rest] * (rest > 0)


def _trim_light_ends(masses: np.ndarray, first: int, lost: float, least: float) -> tuple[np.ndarray, int, float]:
    """The law without ends whose masses are at most `least` each.

    Arguments:
        masses: of the counts from `first` on.
        first: the first count.
        lost: the mass below it so far.
        least: what is negligible.

    Returns: the same three for the counts that are kept. Mass below them is added to `lost`; mass above them moves
        down to the last count kept.
    """
    keep = np.flatnonzero(masses > least)
    i, j = int(keep[0]), int(keep[-1]) + 1
    kept = masses[i:j].copy()
    kept[-1] += masses[j:].sum()
    return kept, first + i, lost + float(masses[:i].sum()) + len(masses) * _TINY


def _drop_light_ends(law: CloneCounts, least: float) -> CloneCounts:
    """The law without ends whose counts weigh less than this each."""
    weights, first, below = _trim_light_ends(law.weights, int(law.counts[0]), law.below, least)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights, below=below, above=0.0)


def coarsen_counts(law: CloneCounts, *, parts: int = 8) -> CloneCounts:
    """The law on fewer counts, each rounded down: to a part of the standard deviation, in the tails to a whole one.

    Arguments:
        law: with consecutive counts; any other was made coarse already, and is returned as it is.
        parts: counts to one standard deviation in the bulk.
    """
    if np.any(np.diff(law.counts) != 1):
        return law  # as `clone_counts_by_tail_bounds` made it
    law = _drop_light_ends(law, math.exp(-_DEPTH))
    counts, masses = law.counts, law.weights
    mean = float(counts @ masses) / masses.sum()
    deviation = math.sqrt(float((counts - mean) ** 2 @ masses))
    if deviation < 2 * parts:
        return law
    fine, coarse = int(deviation / parts), int(deviation)
    start = np.where(abs(counts - mean) < 8 * deviation, counts // fine * fine, counts // coarse * coarse)
    values, where = np.unique(np.maximum(start, counts[0]), return_inverse=True)
    return CloneCounts(counts=values, weights=np.bincount(where, masses), below=law.below, above=0.0)
