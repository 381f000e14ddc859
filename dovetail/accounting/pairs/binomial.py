"""One biased coin among fair coins: the dominating pair of every shuffled coordinate.

The adversary sees how many of N coins show heads. One of them, the victim's, has bias (1 + tilt)/2 under P and
(1 - tilt)/2 under Q; the others are fair. N = 1 + others - Bin(exposed, prob_exposed) is seen too: an exposed message
says nothing and is set aside. With s = (heads - tails)/N and w the law of s when all N coins are fair,
``P = (1 + tilt s) w`` and ``Q = (1 - tilt s) w``, so everything is an expectation under one symmetric law on [-1, 1],
of a convex function of s. A mean-preserving spread of w gives a pair that dominates (docs/proofs/coins.md): all
truncation, blocking and rounding to grids here is such a spread. Nothing is dropped, and no delta is spent on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.loss_distributions import LossDistribution
from dovetail.accounting.numerics import ULP
from dovetail.accounting.pairs import symmetric

__all__ = ["BinomialPair"]

_MASS_OUTWARD = 1 + 1e-10  # more than the error of interpolation and of a sum
_TILT_OUTWARD = 1 + 1e-15
_UNDERFLOW = 1e-300  # put at |s| = 1 for every probability that may have underflowed
_WIDE = 12.0  # standard deviations that are resolved finely
_POINTS = 400_000  # outcomes that are resolved finely
_NEAR = 30_000  # outcomes of one crowd that are resolved one by one
_CHUNK = 2_000_000


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
        """The largest privacy loss of one fold, rounded up."""
        return math.inf if self._outward == 1 else 2 * math.atanh(self._outward) * (1 + 4 * ULP)

    @property
    def _outward(self) -> float:
        return min(1.0, self.tilt * _TILT_OUTWARD)

    @property
    def typical(self) -> float:
        """The mean number of coins, about."""
        return 1 + max(0.0, self.others - self.exposed * self.prob_exposed)

    @property
    def std_loss(self) -> float:
        """The standard deviation of the privacy loss of one fold, about: the scale of grids, never of a bound."""
        return 2 * self.tilt / math.sqrt(self.typical)

    def once(self) -> BinomialPair:
        """One fold."""
        return dataclasses.replace(self, folds=1)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergence of all folds at each order > 1 (both directions are equal)."""
        if math.isinf(self.eps_pure):
            return np.inf + symmetric.renyi(orders, np.zeros(1), np.ones(1))
        points, mass = _compact_law(self)
        return self.folds * np.fmin(symmetric.renyi(orders, self._outward * points, mass), self.eps_pure)

    def loss(self, *, interval: float = 1e-4) -> LossDistribution:
        """The privacy loss of all folds on multiples of `interval`, from above ("connect the dots")."""

        def on(tanh: np.ndarray) -> np.ndarray:
            return _law_on(self, tanh / self._outward)

        return symmetric.composed_loss(on, self.eps_pure, std=self.std_loss, folds=self.folds, interval=interval)


def _crowds(pair: BinomialPair) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of coins N and their probabilities; a block of crowds is replaced by its smallest, which dominates it."""
    trials, prob = pair.exposed, pair.prob_exposed
    reach = _WIDE * (math.sqrt(trials * prob * (1 - prob)) + 1)
    low = max(0, math.floor(trials * prob - reach))
    high = min(trials, math.ceil(trials * prob + reach))
    stride = math.ceil((high + 1 - low) / max(32, _POINTS / (_WIDE / 2 * math.sqrt(pair.typical) + 64)))
    starts = np.arange(low, high + 1, stride)
    gone = [np.minimum(starts + stride - 1, high)]
    mass = [np.add.reduceat(numerics.binomial_pmf(np.arange(low, high + 1), trials, prob), starts - low)]
    mass[0][0] += numerics.binomial_cdf(low - 1, trials, prob)
    outward = numerics.binomial_outward(trials)
    edge, step = high, stride
    while edge < trials:  # upper tail: ever larger blocks, each with all that is beyond
        step = max(step + 1, step * 9 // 8)
        beyond, edge = numerics.binomial_sf(edge, trials, prob), min(edge + step, trials)
        gone.append(np.array([edge]))
        mass.append(np.array([beyond]))
    sizes = 1 + np.maximum(pair.others - np.concatenate(gone), 0)
    return sizes, np.concatenate(mass) * outward


def _tosses(sizes: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|s| and its mass when N fair coins are tossed: every outcome near the middle, rings rounded up beyond.

    In large crowds outcomes near the middle are taken in blocks, which are rounded up as well.
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
    mass = np.where(real, mass, 0.0) * (_MASS_OUTWARD * numerics.binomial_outward(largest))
    if stride > 1:  # blocks weigh too much: what exceeds the crowd's own weight is taken from the smallest |s|
        most = probs[:, None] * _MASS_OUTWARD
        mass = -np.diff(np.minimum(np.cumsum(mass[:, ::-1], axis=1)[:, ::-1], most), axis=1, append=0.0)
    return (excess / n)[real], mass[real]


def _chunks(pair: BinomialPair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    sizes, probs = _crowds(pair)
    rows = max(1, _CHUNK // (min(8 * math.isqrt(int(sizes.max())), 2 * _NEAR) + 256))
    for i in range(0, len(sizes), rows):
        yield _tosses(sizes[i : i + rows], probs[i : i + rows])
    yield np.ones(1), np.full(1, _UNDERFLOW)


def _law_on(pair: BinomialPair, grid: np.ndarray) -> np.ndarray:
    """The law of |s| spread to a grid that starts at 0 and reaches 1, so that the mean of |s| is kept."""
    mass = np.zeros(len(grid))
    for points, probs in _chunks(pair):
        mass += symmetric.spread(points, probs, grid)
    return mass


@functools.lru_cache(maxsize=64)
def _compact(others: int, exposed: int, prob_exposed: float) -> tuple[np.ndarray, np.ndarray]:
    pair = BinomialPair(others=others, exposed=exposed, prob_exposed=prob_exposed, tilt=0.5)
    if others <= 64:
        points, mass = zip(*_chunks(pair), strict=True)
        law = np.concatenate(points), np.concatenate(mass)
    else:
        std = 1 / math.sqrt(pair.typical)
        fine = np.arange(0, min(_WIDE * std, 1.0), std / 128)
        coarse = np.geomspace(fine[-1], 1, 2 + math.ceil(-100 * math.log(fine[-1])))
        grid = np.unique(np.concatenate([fine, coarse]))
        law = grid, _law_on(pair, grid)
    for array in law:
        array.flags.writeable = False
    return law


def _compact_law(pair: BinomialPair) -> tuple[np.ndarray, np.ndarray]:
    """Points |s| and masses of a law that dominates the pair's, few enough for many orders; cached."""
    return _compact(pair.others, pair.exposed, pair.prob_exposed)
