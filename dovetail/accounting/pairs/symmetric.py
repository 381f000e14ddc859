"""Pairs of laws that are each other's mirror image: their Renyi divergence, and the privacy loss of many copies.

Such a pair is ``P = (1 + s) w`` and ``Q = (1 - s) w`` for a symmetric law w of s on [-1, 1], and its privacy loss is
2 atanh(s); only the law of |s| matters. A mean-preserving spread of w gives a pair that dominates
(docs/proofs/coins.md), so a law may be moved to any grid of losses from above. Copies are composed there by an FFT; the
tail beyond Chernoff's bound and the rounding error of the transform are added to the infinite loss.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import logsumexp

from dovetail import _validate
from dovetail.accounting import loss_distributions, numerics
from dovetail.accounting.loss_distributions import Loss, LossDistribution, Side
from dovetail.statements import NotApplicable

__all__ = [
    "Folded",
    "SymmetricPair",
    "composed_loss",
    "folded_loss",
    "loss_below",
    "renyi",
    "repeated_loss",
    "resolution",
    "spread",
]

_CLOSEST_ORDER = 1 + 1e-6
_LARGEST_LOSS = 30.0  # of one copy; a grid of losses would not resolve more
_MOST_POINTS = 2**22
_LARGEST_DIRECT = 300.0  # cosh of more is summed in logarithms
_RENYI_OUTWARD = 1 + 1e-9
_TAIL = 1e-15
_PARTS, _LEAST_PARTS = 48.0, 6.0  # of the deviation of one fold's loss that an interval is, and may be at most
_MOST_FOLDS = 10**7
_DEVIATIONS, _MOST_LOSSES = 40, 2**20  # of a sum that is resolved, and the points that it may take


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricPair:
    """`folds` independent copies of the pair whose law of |s| has these points and masses, the largest loss eps_pure.

    Points ascend; where the last is 1, its mass is that of an infinite loss.

    Guarantees:
        Never below the pair itself, at any order, eps or number of folds.
    """

    points: np.ndarray
    mass: np.ndarray
    eps_pure: float
    folds: int = 1

    @property
    def std_loss(self) -> float:
        """The standard deviation of the privacy loss of one fold, about: the scale of grids, never of a bound."""
        finite = self.points < 1
        return 2 * math.sqrt(float(self.points[finite] ** 2 @ self.mass[finite]))

    def once(self) -> SymmetricPair:
        """One fold."""
        return dataclasses.replace(self, folds=1)

    def excess(self, t: np.ndarray) -> np.ndarray:
        """E[(s - t)_+] of one fold at each t >= 0."""
        return np.maximum(self.points - t[:, None], 0.0) @ self.mass / 2

    def dominates(self, other: SymmetricPair) -> bool:
        """Whether no eps has a larger delta by the other pair, of as many folds or fewer.

        A convex function that is at most a piecewise linear one at its kinks, the first and the last included, is so
        everywhere.
        """
        return (
            other.folds <= self.folds
            and other.points[-1] <= self.points[-1]
            and bool((other.excess(self.points) * (1 + 1e-12) <= self.excess(self.points)).all())
        )

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Upper bounds on the Renyi divergence of all folds at each order > 1 (both directions are equal)."""
        if math.isinf(self.eps_pure):
            return np.inf + renyi(orders, np.zeros(1), np.ones(1))
        return self.folds * np.fmin(renyi(orders, self.points, self.mass), self.eps_pure)

    def loss(self, *, interval: float = 1e-4) -> LossDistribution:
        """The privacy loss of all folds on multiples of `interval`, from above."""
        if math.isinf(self.eps_pure):
            return self._finite_loss(interval)

        def on(tanh: np.ndarray) -> np.ndarray:
            return spread(self.points, self.mass, tanh)

        return composed_loss(on, self.eps_pure, std=self.std_loss, folds=self.folds, interval=interval)

    def _finite_loss(self, interval: float) -> LossDistribution:
        """That of finite losses, with the rest of the mass as an infinite one."""
        points, mass = self.points[:-1], self.mass[:-1]
        most = 2 * math.atanh(float(points[-1])) * (1 + 1e-15)
        finite = dataclasses.replace(self, points=points, mass=mass, eps_pure=most).loss(interval=interval)
        lost = numerics.probability(self.folds * float(self.mass[-1]) * (1 + 1e-12))
        return LossDistribution(interval, tuple(side._replace(infinite=side.infinite + lost) for side in finite.sides))


class Folded(Protocol):
    """A pair that is known by one of its folds."""

    @property
    def folds(self) -> int:
        """How many independent copies there are."""

    @property
    def std_loss(self) -> float:
        """About the standard deviation of the privacy loss of one."""

    def once(self) -> Folded:
        """One of them."""

    def loss(self, *, interval: float) -> LossDistribution:
        """The privacy loss of all."""


def folded_loss(pair: Folded, *, interval: float) -> Loss:
    """The privacy loss of all folds on multiples of `interval`.

    On a grid that resolves one fold, they are left to whoever composes rounds: nothing is charged for it here.
    """
    if pair.folds > 1 and interval <= pair.std_loss / _LEAST_PARTS:
        return loss_distributions.copies(pair.once().loss(interval=interval), pair.folds)
    return pair.loss(interval=interval)


def loss_below(pair: SymmetricPair, *, interval: float) -> Loss:
    """The privacy loss of all folds of a pair, every loss rounded down in size to a multiple of `interval`.

    Of a symmetric law, |s| may be moved down: the pair itself is a spread of the result (docs/proofs/coins.md).
    """
    _validate.positive(interval=interval)
    if not interval <= pair.std_loss / _LEAST_PARTS:
        raise NotApplicable(f"a loss of about {pair.std_loss:.3g} is too small for a grid of {interval:.3g}")
    index = np.floor(2 * np.arctanh(pair.points) / interval * (1 - 1e-12)).astype(np.int64)
    mass = np.bincount(index, pair.mass) * (1 - 1e-12) / 2
    tanh = np.tanh(np.arange(len(mass)) * (interval / 2))
    upward, downward = mass * (1 + tanh), mass * (1 - tanh)
    probs = np.concatenate([downward[:0:-1], upward[:1] + downward[:1], upward[1:]])
    return loss_distributions.copies(LossDistribution(interval, (Side(1 - len(mass), probs, 0.0),)), pair.folds)


def resolution(pair: Folded) -> float:
    """An interval of privacy losses that resolves one fold, or all together where they are too many."""
    if 1 < pair.folds <= _MOST_FOLDS:
        return min(1e-3, pair.std_loss / _PARTS)
    return min(1e-4, pair.std_loss * math.sqrt(pair.folds) / 100)


def repeated_loss(pair: Folded, times: int) -> Loss:
    """The privacy loss of so many rounds of a pair, on a grid that resolves them and is not too large."""
    whole = pair.std_loss * math.sqrt(pair.folds * times)
    loss = folded_loss(pair, interval=max(resolution(pair), whole * _DEVIATIONS / _MOST_LOSSES))
    return loss_distributions.copies(loss, times) if times > 1 else loss


def spread(points: np.ndarray, mass: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """The masses of a law of |s| on a grid from 0 to its largest point or beyond; the mean of |s| is kept."""
    if grid[0] != 0 or points.max() > grid[-1] * (1 + 1e-12):
        raise ValueError(f"expected a grid from 0 to {points.max()} or beyond, got {grid[0]} to {grid[-1]}")
    right = np.clip(np.searchsorted(grid, points), 1, len(grid) - 1)
    part = np.clip((points - grid[right - 1]) / (grid[right] - grid[right - 1]), 0.0, 1.0)
    return np.bincount(right, mass * part, len(grid)) + np.bincount(right - 1, mass * (1 - part), len(grid))


def renyi(orders: np.ndarray, points: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """log E[sqrt(1 - s^2) cosh((2 order - 1) atanh s)] / (order - 1), from the excess over 1, rounded up.

    An order closer to 1 than `_CLOSEST_ORDER` costs what that order costs.
    """
    orders = np.asarray(orders, dtype=float)
    if orders.size and not orders.min() > 1:
        raise ValueError(f"expected every order > 1, got order={orders.min()}")
    orders = np.maximum(orders, _CLOSEST_ORDER)
    root = np.sqrt((1 - points) * (1 + points))
    z = (2 * orders[:, None] - 1) * np.arctanh(points)
    direct = z <= _LARGEST_DIRECT
    excess = root * 2 * np.sinh(np.where(direct, z, 0.0) / 2) ** 2 - points * points / (1 + root)
    near = np.where(direct, excess, 0.0) @ mass
    log_total = np.log1p(near)
    for row in np.flatnonzero(~direct.all(axis=1)):
        far = ~direct[row] & (mass > 0)
        log_far = logsumexp(z[row, far] - math.log(2) + np.log(root[far]) + np.log(mass[far]) + 1e-12)
        log_total[row] = np.logaddexp(log_total[row], log_far)
    return log_total / (orders - 1) * _RENYI_OUTWARD


def composed_loss(
    on: Callable[[np.ndarray], np.ndarray], eps_pure: float, *, std: float, folds: int, interval: float
) -> LossDistribution:
    """The privacy loss of `folds` copies on multiples of `interval`, from above ("connect the dots").

    `on(tanh)` is the law of |s| spread to these points, which reach beyond tanh(eps_pure/2). The folds are composed on
    a grid fine enough for one of them, whose loss has about this std, then the result is spread to `interval`; one
    alone goes there at once.
    """
    _validate.positive(interval=interval)
    if eps_pure > _LARGEST_LOSS:
        raise NotApplicable(f"no privacy-loss grid for a report with a loss of {eps_pure:.4g}")
    finer = interval / (std / 50) if std else math.inf
    if not finer <= _MOST_POINTS:
        raise NotApplicable(f"a loss of about {std:.3g} is too small for a grid of {interval:.3g}")
    parts = max(1, math.ceil(finer)) if folds > 1 else 1
    points = eps_pure / interval * parts
    if not points <= _MOST_POINTS:
        raise NotApplicable(f"a report's losses are too many to tell apart: {points:.3g} of them")
    tanh = np.tanh(np.arange(math.ceil(points) + 2) * (interval / parts / 2))
    half = on(tanh) / 2
    upward, downward = half * (1 + tanh), half * (1 - tanh)
    probs = np.concatenate([downward[:0:-1], upward[:1] + downward[:1], upward[1:]])
    lowest, probs, infinite = _self_compose(probs, folds)
    lowest, probs = _coarsen(lowest, probs, parts, interval)
    return LossDistribution(interval, (Side(lowest, probs, infinite),))


def _self_compose(probs: np.ndarray, folds: int) -> tuple[int, np.ndarray, float]:
    """Lowest index, probabilities and infinite mass of a sum of `folds` losses; the law is centred at index 0."""
    reach = len(probs) // 2
    if folds == 1:
        return -reach, probs, 0.0
    first, last = _chernoff(probs, folds)
    size = last - first + 1
    length = next_fast_len(max(size, len(probs)), real=True)
    summed, error = numerics.summed([(probs, folds)], length)
    summed = np.roll(summed, -(first + reach * folds))[:size]
    return first, summed, _TAIL * (1 + 1e-6) + math.sqrt(length) * error  # of all points together


def _chernoff(probs: np.ndarray, folds: int) -> tuple[int, int]:
    """Indices between which the sum of `folds` losses stays, but for a probability of `_TAIL`."""
    reach = len(probs) // 2
    index = np.arange(-reach, reach + 1)
    std = math.sqrt(float(index**2 @ probs)) + 1e-9
    best = math.sqrt(2 * math.log(2 / _TAIL)) / (std * math.sqrt(folds))  # of a Gaussian sum
    slopes = np.minimum(np.array([0.3, 0.7, 1.0, 1.4]) * best, 600 / reach)

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
