"""One biased coin among fair ones, whose number is a sum of unequal coins: the pair of personalised clones.

The victim's coin shows heads with probability ``E/(E+1)``, E = e^eps_local, and hides among C fair coins,
C ~ PoissonBinomial(probs). Where the outcomes are cut into regions of fixed probability, C has a law of its own in each
(`Hiding`). More clones never hurt, so every approximation takes fewer: upper tails of C move down, lower tails are
charged in full.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification.clones import CloneCounts, binomial_counts, expected_delta
from dovetail.accounting.numerics import ULP
from dovetail.statements import NotApplicable

__all__ = ["MANY", "SOME", "Coins", "Hiding", "PoissonBinomialPair", "by_limit", "clone_counts", "coarser"]

_TINY = 1e-290  # masses below this are charged, not carried
MANY, _CLASSES = 20_000, 128  # coins, of which more are taken in classes
_MOST_TRIALS = 2**19  # of a binomial count in one piece
SOME, _NARROW = 1000, 0.03  # coins, and deviation over mean, of a count whose law is bounded and not computed
_BERRY_ESSEEN = 0.5600001
_PARTS, _DEVIATIONS, _SLOPES = 4, (17.0, 6.0), 48
_SHALLOW = 1e-60  # masses below this are charged where there are many coins
_DEPTH = 300.0  # nats of tail mass that are resolved


class Coins(NamedTuple):
    """Probabilities, rising, and how many users have each."""

    probs: np.ndarray
    counts: np.ndarray

    @property
    def mean(self) -> float:
        """Of the number of heads."""
        return float(self.probs @ self.counts)

    @property
    def std(self) -> float:
        """Of the number of heads, about."""
        return math.sqrt(float((self.probs * (1 - self.probs)) @ self.counts))

    def every(self) -> np.ndarray:
        """The probability of every user."""
        return np.repeat(self.probs, self.counts)


Hiding = tuple[tuple[float, Coins], ...]  # (probability of a region of outcomes, clone probabilities in it)


@dataclasses.dataclass(frozen=True, eq=False)
class PoissonBinomialPair:
    """A coin of bias eps_local that hides among clones; delta is the same in both directions."""

    hiding: Hiding
    eps_local: float
    bounded: bool = False  # whether laws of clones may be bounded and not computed

    def __post_init__(self) -> None:
        _validate.positive(eps_local=self.eps_local)

    @functools.cached_property
    def laws(self) -> list[tuple[float, CloneCounts]]:
        """The number of clones in each region."""
        return [(mass, coarser(clone_counts(coins, bounded=self.bounded))) for mass, coins in self.hiding]

    def delta(self, eps: float) -> float:
        """delta at eps, rounded up."""
        _validate.non_negative(eps=eps)
        terms = (mass * expected_delta(law, eps=eps, eps_local=self.eps_local) for mass, law in self.laws)
        return numerics.probability(math.fsum(terms) * (1 + 1e-14))


def clone_counts(coins: Coins | np.ndarray, *, bounded: bool = False) -> CloneCounts:
    """The law of the number of heads, by direct convolution of positive numbers: no transform, no cancellation.

    Where coins are many, or if it may be, it is `bounded` instead, which costs some of the tails' precision.

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    if not isinstance(coins, Coins):
        coins = Coins(*np.unique(np.asarray(coins, dtype=float), return_counts=True))
    _validate.finite_array(probs=coins.probs)
    if ((coins.probs < 0) | (coins.probs > 1)).any():
        raise ValueError(f"expected probabilities, got values from {coins.probs.min()} to {coins.probs.max()}")
    if (bounded or coins.counts.sum() > MANY) and 2 * _PARTS <= coins.std <= _NARROW * coins.mean:
        return by_limit(coins)
    if coins.counts.sum() > MANY:
        return _by_classes(coins)
    probs = coins.every()
    rows = np.stack([1 - probs, probs], axis=1) if len(probs) else np.ones((1, 1))
    while len(rows) > 1 and rows.shape[1] <= 64:
        if len(rows) % 2:
            rows = np.concatenate([rows, np.eye(1, rows.shape[1])])
        a, b = rows[::2], rows[1::2]
        rows = np.zeros((len(a), 2 * a.shape[1] - 1))
        for j in range(a.shape[1]):
            rows[:, j : j + a.shape[1]] += a[:, j : j + 1] * b
    return _convolved([_trim(row, 0, 0.0, _TINY) for row in rows], _TINY, len(probs))


def _convolved(parts: list[tuple[np.ndarray, int, float]], least: float, trials: int) -> CloneCounts:
    """The law of the sum of independent counts, two by two."""
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [_trim(np.convolve(a, b), i + j, lost + more, least) for (a, i, lost), (b, j, more) in pairs] + odd
    weights, first, below = parts[0]
    outward = 1 + 1e-15 * (trials + 64)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights * outward, below=below, above=0.0)


def _by_classes(coins: Coins) -> CloneCounts:
    """Users of similar probabilities as a binomial count of the least of them."""
    summed = np.cumsum(np.sqrt(coins.probs) * coins.counts)
    cuts = np.unique(np.searchsorted(summed, summed[-1] * np.arange(1, _CLASSES) / _CLASSES))
    parts = []
    for probs, counts in zip(np.split(coins.probs, cuts), np.split(coins.counts, cuts), strict=True):
        if len(probs) and (prob := float(probs[0])) > 0:
            for trials in _portions(int(counts.sum())):
                law = binomial_counts(trials, prob, tail=_SHALLOW)
                weights = law.weights.copy()
                weights[-1] += law.above
                parts.append((weights, int(law.counts[0]), law.below))
    parts.sort(key=lambda part: len(part[0]))
    return _convolved(parts or [(np.ones(1), 0, 0.0)], _SHALLOW, int(coins.counts.sum()))


def by_limit(coins: Coins) -> CloneCounts:
    """The law of many heads by bounds on its lower tails, on counts that are a fourth of the deviation apart.

    P(C <= k) is at most Phi((k - mean) / std) + .56 / std (Berry and Esseen's theorem with Shevtsova's constant, as
    E|X - p|^3 <= p (1 - p) for a coin X), and at most E e^(slope (k - C)) for every slope > 0 (Chernoff). A law with
    larger lower tails has fewer heads, and so has one that is rounded down (docs/proofs/blankets.md).

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    mean, std, slack = coins.mean, coins.std, ULP * (len(coins.probs) + 16)
    if not std >= 2 * _PARTS:
        raise NotApplicable(f"expected many coins, whose heads deviate by more than {2 * _PARTS}, got {std:.3g}")
    step = int(std / _PARTS)
    first = max(0, math.floor(mean - _DEVIATIONS[0] * std))
    counts = np.arange(first, mean + _DEVIATIONS[1] * std, step, dtype=np.int64)
    slopes = np.linspace(0.25, _DEVIATIONS[0] + 2.0, _SLOPES) / std
    log_mean = np.log1p(np.multiply.outer(np.expm1(-slopes), coins.probs)) @ coins.counts  # of e^(-slope C)
    upward = np.multiply.outer(counts - 1.0, slopes)
    chernoff = np.exp(np.minimum((upward * (1 + slack) + log_mean * (1 - slack)).min(axis=1), 0.0))
    low, deviation = mean * (1 - slack), std * (1 + slack)
    gauss = ndtr((counts - 1.0 - low) / np.where(counts - 1.0 < low, deviation, std * (1 - slack)))
    fewer = np.minimum(chernoff, gauss * (1 + 1e-12) + _BERRY_ESSEEN / (std * (1 - slack))) * (counts > 0)
    fewer = np.maximum.accumulate(np.minimum(fewer, 1.0))
    weights = np.diff(fewer, append=1.0) * (1 + 1e-12)
    return CloneCounts(counts=counts, weights=weights, below=float(fewer[0]) * (1 + 1e-12), above=0.0)


def _portions(trials: int) -> list[int]:
    """So many trials in portions whose counts are few enough to be told apart one by one."""
    whole, rest = divmod(trials, _MOST_TRIALS)
    return [_MOST_TRIALS] * whole + [rest] * (rest > 0)


def _trim(masses: np.ndarray, first: int, lost: float, least: float) -> tuple[np.ndarray, int, float]:
    """Drop negligible ends: below, the mass is charged; above, it moves down to the last count kept."""
    keep = np.flatnonzero(masses > least)
    i, j = int(keep[0]), int(keep[-1]) + 1
    kept = masses[i:j].copy()
    kept[-1] += masses[j:].sum()
    return kept, first + i, lost + float(masses[:i].sum()) + len(masses) * _TINY


def _core(law: CloneCounts, least: float) -> CloneCounts:
    """The law without ends whose counts weigh less than this each."""
    weights, first, below = _trim(law.weights, int(law.counts[0]), law.below, least)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights, below=below, above=0.0)


def coarser(law: CloneCounts, *, parts: int = 8) -> CloneCounts:
    """Counts rounded down, to so many parts of their deviation in the bulk and a whole one beyond; never up."""
    if np.any(np.diff(law.counts) != 1):
        return law  # as `by_limit` made it
    law = _core(law, math.exp(-_DEPTH))
    counts, masses = law.counts, law.weights
    mean = float(counts @ masses) / masses.sum()
    deviation = math.sqrt(float((counts - mean) ** 2 @ masses))
    if deviation < 2 * parts:
        return law
    fine, coarse = int(deviation / parts), int(deviation)
    start = np.where(abs(counts - mean) < 8 * deviation, counts // fine * fine, counts // coarse * coarse)
    values, where = np.unique(np.maximum(start, counts[0]), return_inverse=True)
    return CloneCounts(counts=values, weights=np.bincount(where, masses), below=law.below, above=0.0)
