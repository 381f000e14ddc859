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
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import logsumexp
from scipy.stats import binom

from dovetail import _validate
from dovetail.statements import NotApplicable

__all__ = ["Pair"]

_MASS_OUTWARD = 1 + 1e-10  # more than the error of a binomial probability, of interpolation and of a sum
_TILT_OUTWARD = 1 + 1e-15
_RENYI_OUTWARD = 1 + 1e-9
_UNDERFLOW = 1e-300  # put at |s| = 1 for every probability that may have underflowed
_CLOSEST_ORDER = 1 + 1e-6
_LARGEST_DIRECT = 300.0  # cosh of more is summed in logarithms
_WIDE = 12.0  # standard deviations that are resolved finely
_POINTS = 1_000_000  # outcomes that are resolved finely
_CHUNK = 2_000_000
_TAIL = 1e-15
_ULP = 2.0**-52


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
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
        tilt = min(1.0, self.tilt * _TILT_OUTWARD)
        return math.inf if tilt == 1 else 2 * math.atanh(tilt) * (1 + 4 * _ULP)

    @property
    def typical(self) -> float:
        """The mean number of coins, about."""
        return 1 + max(0.0, self.others - self.exposed * self.prob_exposed)

    @property
    def std_loss(self) -> float:
        """The standard deviation of the privacy loss of one fold, about: the scale of grids, never of a bound."""
        return 2 * self.tilt / math.sqrt(self.typical)

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergence of all folds at each order > 1 (both directions are equal)."""
        orders = np.asarray(orders, dtype=float)
        if orders.size and not orders.min() > 1:
            raise ValueError(f"expected every order > 1, got order={orders.min()}")
        if math.isinf(self.eps_pure):
            return np.full(orders.shape, np.inf)
        one = _renyi(np.maximum(orders, _CLOSEST_ORDER), *_compact_law(self), self.tilt * _TILT_OUTWARD)
        return self.folds * np.minimum(one * _RENYI_OUTWARD, self.eps_pure)

    def log_pmfs(self) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of P and Q of one fold, over outcomes of a pair that dominates it."""
        points, mass = _compact_law(self)
        tilted = np.concatenate([-points, points]) * min(1.0, self.tilt * _TILT_OUTWARD)
        with np.errstate(divide="ignore"):
            log_half = np.log(np.concatenate([mass, mass]) / 2)
            log_p, log_q = log_half + np.log1p(tilted), log_half + np.log1p(-tilted)
        seen = np.isfinite(log_half)
        return log_p[seen], log_q[seen]

    def loss(self, *, interval: float = 1e-4) -> PrivacyLossDistribution:
        """The privacy loss of all folds on multiples of `interval`, from above ("connect the dots").

        The folds are composed on a grid fine enough for one of them, then the result is spread to `interval`. Mass
        beyond Chernoff's bound and the rounding error of the Fourier transform are added to the infinite loss.
        """
        _validate.positive(interval=interval)
        if self.eps_pure > 30:
            raise NotApplicable(f"no privacy-loss grid for a report with a loss of {self.eps_pure:.4g}")
        parts = max(1, math.ceil(interval / (self.std_loss / 50)))
        probs = _loss_of_one(self, interval / parts)
        lowest, probs, infinite = _self_compose(probs, self.folds)
        lowest, probs = _coarsen(lowest, probs, parts, interval)
        return PrivacyLossDistribution(pld_pmf.DensePLDPmf(interval, lowest, probs, infinite, True))


def _crowds(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of coins N and their probabilities; a block of crowds is replaced by its smallest, which dominates it."""
    trials, prob = pair.exposed, pair.prob_exposed
    reach = _WIDE * (math.sqrt(trials * prob * (1 - prob)) + 1)
    low = max(0, math.floor(trials * prob - reach))
    high = min(trials, math.ceil(trials * prob + reach))
    stride = math.ceil((high + 1 - low) / max(128, _POINTS / (_WIDE / 2 * math.sqrt(pair.typical) + 64)))
    starts = np.arange(low, high + 1, stride)
    gone = [np.minimum(starts + stride - 1, high)]
    mass = [np.add.reduceat(binom.pmf(np.arange(low, high + 1), trials, prob), starts - low)]
    mass[0][0] += binom.cdf(low - 1, trials, prob)
    edge, step = high, stride
    while edge < trials:  # upper tail: ever larger blocks, each with all that is beyond
        step = max(step + 1, step * 9 // 8)
        beyond, edge = binom.sf(edge, trials, prob), min(edge + step, trials)
        gone.append(np.array([edge]))
        mass.append(np.array([beyond]))
    sizes = 1 + np.maximum(pair.others - np.concatenate(gone), 0)
    return sizes, np.concatenate(mass)


def _tosses(sizes: np.ndarray, probs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|s| and its mass when N fair coins are tossed: every outcome near the middle, rings rounded up beyond."""
    largest = int(sizes.max())
    near = min(largest // 2, math.ceil(_WIDE / 2 * math.sqrt(largest)))
    rings = [near + 1]
    while rings[-1] <= largest // 2:
        rings.append(rings[-1] + max(1, rings[-1] // 32))
    start = np.concatenate([np.arange(near + 1), rings])
    n = sizes[:, None]
    first, last = start[None, :-1], np.minimum(start[None, 1:] - 1, n // 2)
    middle = (n + 1) // 2
    excess = 2 * (middle + last) - n
    mass = np.where(excess == 0, 1, 2) * (last - first + 1) * binom.pmf(middle + first, n, 0.5) * probs[:, None]
    real = first <= n // 2
    return (excess / n)[real], mass[real] * _MASS_OUTWARD


def _chunks(pair: Pair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    sizes, probs = _crowds(pair)
    rows = max(1, _CHUNK // (8 * math.isqrt(int(sizes.max())) + 256))
    for i in range(0, len(sizes), rows):
        yield _tosses(sizes[i : i + rows], probs[i : i + rows])
    yield np.ones(1), np.full(1, _UNDERFLOW)


def _law_on(pair: Pair, grid: np.ndarray) -> np.ndarray:
    """The law of |s| spread to a grid that starts at 0 and reaches 1, so that the mean of |s| is kept."""
    mass = np.zeros(len(grid))
    for points, probs in _chunks(pair):
        right = np.clip(np.searchsorted(grid, points), 1, len(grid) - 1)
        part = np.clip((points - grid[right - 1]) / (grid[right] - grid[right - 1]), 0.0, 1.0)
        mass += np.bincount(right, probs * part, len(grid))
        mass += np.bincount(right - 1, probs * (1 - part), len(grid))
    return mass


@functools.lru_cache(maxsize=64)
def _compact(others: int, exposed: int, prob_exposed: float) -> tuple[np.ndarray, np.ndarray]:
    pair = Pair(others=others, exposed=exposed, prob_exposed=prob_exposed, tilt=0.5)
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


def _compact_law(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Points |s| and masses of a law that dominates the pair's, few enough for many orders; cached."""
    return _compact(pair.others, pair.exposed, pair.prob_exposed)


def _renyi(orders: np.ndarray, points: np.ndarray, mass: np.ndarray, tilt: float) -> np.ndarray:
    """log E[sqrt(1 - u^2) cosh((2 order - 1) atanh u)] / (order - 1) with u = tilt |s|, from the excess over 1."""
    u = tilt * points
    root = np.sqrt((1 - u) * (1 + u))
    z = (2 * orders[:, None] - 1) * np.arctanh(u)
    direct = z <= _LARGEST_DIRECT
    excess = root * 2 * np.sinh(np.where(direct, z, 0.0) / 2) ** 2 - u * u / (1 + root)
    near = np.where(direct, excess, 0.0) @ mass
    log_total = np.log1p(near)
    for row in np.flatnonzero(~direct.all(axis=1)):
        far = ~direct[row] & (mass > 0)
        log_far = logsumexp(z[row, far] - math.log(2) + np.log(root[far]) + np.log(mass[far]) + 1e-12)
        log_total[row] = np.logaddexp(log_total[row], log_far)
    return log_total / (orders - 1)


def _loss_of_one(pair: Pair, interval: float) -> np.ndarray:
    """P's probabilities of the losses -J interval .. J interval, by spreading s to tanh(j interval / 2) / tilt."""
    tilt = pair.tilt * _TILT_OUTWARD
    tanh = np.tanh(np.arange(math.ceil(pair.eps_pure / interval) + 2) * (interval / 2))
    half = _law_on(pair, tanh / tilt) / 2
    upward, downward = half * (1 + tanh), half * (1 - tanh)
    return np.concatenate([downward[:0:-1], upward[:1] + downward[:1], upward[1:]])


def _self_compose(probs: np.ndarray, folds: int) -> tuple[int, np.ndarray, float]:
    """Lowest index, probabilities and infinite mass of a sum of `folds` losses; the law is centred at index 0."""
    reach = len(probs) // 2
    if folds == 1:
        return -reach, probs, 0.0
    first, last = _chernoff(probs, folds)
    size = last - first + 1
    length = 1 << (max(size, len(probs)) - 1).bit_length()
    spectrum = np.fft.rfft(probs, length)
    summed = np.roll(np.fft.irfft(spectrum**folds, length), -(first + reach * folds))[:size]
    depth = 6 * math.log2(length)  # roundings on the way of one input to one output of the transform
    norm = math.sqrt(2 * float(np.sum(np.abs(spectrum) ** (2 * (folds - 1)))))
    error = _ULP * (folds * (depth + 4) + depth) * norm
    return first, np.maximum(summed, 0.0), _TAIL * (1 + 1e-6) + error


def _chernoff(probs: np.ndarray, folds: int) -> tuple[int, int]:
    """Indices between which the sum of `folds` losses stays, but for a probability of `_TAIL`."""
    reach = len(probs) // 2
    index = np.arange(-reach, reach + 1)
    std = math.sqrt(float(index**2 @ probs)) + 1e-9
    slopes = np.minimum(np.geomspace(0.5, 30, 24) / (std * math.sqrt(folds)), 600 / reach)

    def bound(sign: int) -> int:
        reached = [
            (folds * math.log(float(np.exp(slope * sign * index) @ probs)) + math.log(2 / _TAIL)) / slope
            for slope in slopes
        ]
        return min(reach * folds, math.ceil(min(reached)) + 1)

    return -bound(-1), bound(1)


def _coarsen(lowest: int, probs: np.ndarray, parts: int, interval: float) -> tuple[int, np.ndarray]:
    """Spread losses on multiples of interval/parts to multiples of interval, keeping the masses of P and of Q."""
    if parts == 1:
        return lowest, probs
    index = lowest + np.arange(len(probs))
    left = index // parts
    right_share = np.expm1(-(index - left * parts) * (interval / parts)) / math.expm1(-interval)
    start = int(left[0])
    size = int(left[-1]) - start + 2
    coarse = np.bincount(left - start, probs * (1 - right_share), size)
    coarse += np.bincount(left - start + 1, probs * right_share, size)
    return start, coarse
