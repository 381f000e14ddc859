"""Pairs of laws that are each other's mirror image: made from curves, their Renyi divergence, the loss of many copies.

Such a pair is ``P = (1 + s) w`` and ``Q = (1 - s) w`` for a symmetric law w of s on [-1, 1], and its privacy loss is
2 atanh(s); only the law of |s| matters. A mean-preserving spread of w gives a pair that dominates
(docs/proofs/coins.md), so a law may be moved to any grid of losses from above. Copies are composed there by an FFT; the
tail beyond Chernoff's bound and the rounding error of the transform are added to the infinite loss.

**From a curve to a pair.** An upper bound on delta(eps) becomes a symmetric pair, so that it composes
(`pair_dominating_curve`). In t = tanh(eps/2), a symmetric pair has ``delta(eps)/(1 + e^eps) = E[(s - t)_+]``, convex in
t, and so is the left side for any pair. A curve that bounds both directions of a release is asked at some eps; the
lower convex hull of the points, mirrored to t < 0, is still above both, and it is the curve of a symmetric pair: its
kinks are the law of s (docs/proofs/blanket-composition.md). `sampled_pair` does so for a round on a secret sample of
fixed size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from scipy.fft import next_fast_len
from scipy.special import logsumexp

from dovetail import _validate
from dovetail.accounting import loss_distributions, numerics
from dovetail.accounting.loss_distributions import Loss, LossDistribution, Side
from dovetail.statements import NotApplicable

__all__ = [
    "COARSE",
    "FINE",
    "LARGEST_LOSS",
    "MANY_FOLDS",
    "Folded",
    "Nodes",
    "SymmetricPair",
    "composed_loss",
    "composition_interval",
    "folded_loss",
    "law_of_lower_hull",
    "loss_rounded_down",
    "nodes_for",
    "pair_dominating_curve",
    "renyi",
    "repeated_loss",
    "sampled_pair",
    "spread_to_grid",
    "upper_envelope",
]

_CLOSEST_ORDER = 1 + 1e-6  # orders closer to 1 cost what this one costs
_LARGEST_GRID_LOSS = 30.0  # of one copy; a grid of losses would not resolve more
_MOST_POINTS = 2**22  # of a grid of losses
_LARGEST_DIRECT = 300.0  # cosh of more is summed in logarithms
_RENYI_OUTWARD = 1 + 1e-9  # more than the rounding errors of a divergence
_TAIL = 1e-15  # probability of a sum outside of its window, charged as an infinite loss
_PARTS = 48.0  # intervals to one standard deviation of one fold's loss
_LEAST_PARTS = 6.0  # the fewest of them that resolve one fold
_MOST_FOLDS = 10**7  # of more, all together are resolved instead of one
_DEVIATIONS = 40  # width of the window in which a sum is resolved, in its standard deviations
_MOST_LOSSES = 2**20  # points that a sum may take
_OUTWARD = 1 + 1e-10  # more than the error of the slopes between nodes
LARGEST_LOSS = 20.0  # beyond, tanh is too close to 1
_LEAST_DRAWN = 1e-60  # a delta of a sampled round that is not told from a smaller one
_LARGEST_EXPONENT = 700.0  # of a loss that is asked about: e^loss is computed


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricPair:
    """`folds` independent copies of the pair whose law of |s| has these points and masses, rounded up.

    Points ascend within [0, 1]; `points` and `mass` have the same length, and a mass above 0 at 1 is that of an
    infinite loss. `eps_pure` is the largest loss of one copy. The arrays are shared: do not write to them.

    Guarantees:
        Never below the pair itself, at any order, eps or number of folds.
    """

    points: np.ndarray
    mass: np.ndarray
    eps_pure: float
    folds: int = 1

    @property
    def std_loss(self) -> float:
        """About the standard deviation of the privacy loss of one fold: to choose grids by, never for a bound."""
        finite = self.points < 1
        return 2 * math.sqrt(float(self.points[finite] ** 2 @ self.mass[finite]))

    def one_fold(self) -> SymmetricPair:
        """The pair of one of the copies."""
        return dataclasses.replace(self, folds=1)

    def excess(self, tanh: np.ndarray) -> np.ndarray:
        """E[(s - t)_+] of one fold at each t >= 0: delta(eps)/(1 + e^eps) at t = tanh(eps/2)."""
        return np.maximum(self.points - tanh[:, None], 0.0) @ self.mass / 2

    def dominates(self, other: SymmetricPair) -> bool:
        """Whether this pair has as many folds or more, and at every eps a delta that is no smaller than the other's.

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
        """The privacy loss of all folds, rounded up to multiples of `interval`."""
        if math.isinf(self.eps_pure):
            return self._loss_with_infinite_atom(interval)

        def on(tanh: np.ndarray) -> np.ndarray:
            return spread_to_grid(self.points, self.mass, tanh)

        return composed_loss(on, self.eps_pure, std=self.std_loss, folds=self.folds, interval=interval)

    def _loss_with_infinite_atom(self, interval: float) -> LossDistribution:
        """The loss of a pair whose last point is 1: that of the other points, with that point's mass as infinite."""
        points, mass = self.points[:-1], self.mass[:-1]
        most = 2 * math.atanh(float(points[-1])) * (1 + 1e-15)
        finite = dataclasses.replace(self, points=points, mass=mass, eps_pure=most).loss(interval=interval)
        lost = numerics.as_probability_bound(self.folds * float(self.mass[-1]) * (1 + 1e-12))
        return LossDistribution(interval, tuple(side._replace(infinite=side.infinite + lost) for side in finite.sides))


class Folded(Protocol):
    """A dominating pair of several independent copies (folds) of one pair, which has both directions alike."""

    @property
    def folds(self) -> int:
        """How many independent copies there are."""

    @property
    def std_loss(self) -> float:
        """About the standard deviation of the privacy loss of one copy."""

    def one_fold(self) -> Folded:
        """The pair of one of the copies."""

    def loss(self, *, interval: float) -> LossDistribution:
        """The privacy loss of all copies, rounded up to multiples of `interval`."""


def folded_loss(pair: Folded, *, interval: float) -> Loss:
    """The privacy loss of all folds, rounded up to multiples of `interval`.

    On a grid that resolves one fold, they are left to whoever composes rounds: nothing is charged for it here.

    Arguments:
        pair: whose losses are asked for.
        interval: of the grid of losses.
    """
    if pair.folds > 1 and interval <= pair.std_loss / _LEAST_PARTS:
        return loss_distributions.self_compose(pair.one_fold().loss(interval=interval), pair.folds)
    return pair.loss(interval=interval)


def loss_rounded_down(pair: SymmetricPair, *, interval: float) -> Loss:
    """The privacy loss of all folds of a pair, every loss rounded down in size to a multiple of `interval`.

    Of a symmetric law, |s| may be moved down: the pair itself is a spread of the result (docs/proofs/coins.md).

    Arguments:
        pair: whose losses are rounded down; all of them must be finite.
        interval: between neighbouring losses of the grid, at most a sixth of the std of one fold's loss.

    Returns: a loss for `lower_eps`; its `eps` and `delta` bound nothing.
    """
    _validate.positive(interval=interval)
    if not interval <= pair.std_loss / _LEAST_PARTS:
        raise NotApplicable(f"a loss of about {pair.std_loss:.3g} is too small for a grid of {interval:.3g}")
    index = np.floor(2 * np.arctanh(pair.points) / interval * (1 - 1e-12)).astype(np.int64)
    mass = np.bincount(index, pair.mass) * (1 - 1e-12) / 2
    tanh = np.tanh(np.arange(len(mass)) * (interval / 2))
    upward, downward = mass * (1 + tanh), mass * (1 - tanh)
    probs = np.concatenate([downward[:0:-1], upward[:1] + downward[:1], upward[1:]])
    return loss_distributions.self_compose(LossDistribution(interval, (Side(1 - len(mass), probs, 0.0),)), pair.folds)


def composition_interval(pair: Folded) -> float:
    """The interval that losses should be composed on: it resolves one fold, or all together if there are too many."""
    if 1 < pair.folds <= _MOST_FOLDS:
        return min(1e-3, pair.std_loss / _PARTS)
    return min(1e-4, pair.std_loss * math.sqrt(pair.folds) / 100)


def repeated_loss(pair: Folded, times: int) -> Loss:
    """The privacy loss of so many rounds of a pair, on a grid that resolves them and is not too large.

    Arguments:
        pair: of one round.
        times: how many rounds there are.
    """
    whole = pair.std_loss * math.sqrt(pair.folds * times)
    loss = folded_loss(pair, interval=max(composition_interval(pair), whole * _DEVIATIONS / _MOST_LOSSES))
    return loss_distributions.self_compose(loss, times) if times > 1 else loss


def spread_to_grid(points: np.ndarray, mass: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """A law of |s| moved to a grid: each mass goes to the two neighbours of its point, so that its mean is kept.

    Arguments:
        points: values of |s|.
        mass: the mass at each of them.
        grid: ascending points from 0 on, which reach the largest of the values.

    Returns: the mass at each point of the grid.
    """
    if grid[0] != 0 or points.max() > grid[-1] * (1 + 1e-12):
        raise ValueError(f"expected a grid from 0 to {points.max()} or beyond, got {grid[0]} to {grid[-1]}")
    right = np.clip(np.searchsorted(grid, points), 1, len(grid) - 1)
    part = np.clip((points - grid[right - 1]) / (grid[right] - grid[right - 1]), 0.0, 1.0)
    return np.bincount(right, mass * part, len(grid)) + np.bincount(right - 1, mass * (1 - part), len(grid))


def renyi(orders: np.ndarray, points: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The Renyi divergence of the symmetric pair of this law of |s| at every order, rounded up.

    It is log E[sqrt(1 - s^2) cosh((2 order - 1) atanh s)] / (order - 1), computed from the excess over 1 so that small
    divergences keep their digits. An order closer to 1 than `_CLOSEST_ORDER` costs what that order costs.

    Arguments:
        orders: above 1.
        points: values of |s|, below 1.
        mass: the mass at each of them.
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
    law_on: Callable[[np.ndarray], np.ndarray], eps_pure: float, *, std: float, folds: int, interval: float
) -> LossDistribution:
    """The privacy loss of `folds` copies, rounded up to multiples of `interval` ("connect the dots").

    `on(tanh)` is the law of |s| spread to these points, which reach beyond tanh(eps_pure/2). The folds are composed on
    a grid fine enough for one of them, whose loss has about this std, then the result is spread to `interval`; one
    alone goes there at once.

    Arguments:
        law_on: takes an ascending grid of tanh(loss/2) from 0 on, and returns the mass of |s| spread to each point.
        eps_pure: the largest loss of one copy.
        std: about the standard deviation of that loss.
        folds: how many copies there are.
        interval: of the grid of losses.
    """
    _validate.positive(interval=interval)
    if eps_pure > _LARGEST_GRID_LOSS:
        raise NotApplicable(f"no privacy-loss grid for a report with a loss of {eps_pure:.4g}")
    finer = interval / (std / 50) if std else math.inf
    if not finer <= _MOST_POINTS:
        raise NotApplicable(f"a loss of about {std:.3g} is too small for a grid of {interval:.3g}")
    parts = max(1, math.ceil(finer)) if folds > 1 else 1
    points = eps_pure / interval * parts
    if not points <= _MOST_POINTS:
        raise NotApplicable(f"a report's losses are too many to tell apart: {points:.3g} of them")
    tanh = np.tanh(np.arange(math.ceil(points) + 2) * (interval / parts / 2))
    half = law_on(tanh) / 2
    upward, downward = half * (1 + tanh), half * (1 - tanh)
    probs = np.concatenate([downward[:0:-1], upward[:1] + downward[:1], upward[1:]])
    lowest, probs, infinite = _self_compose(probs, folds)
    lowest, probs = _coarsen_grid(lowest, probs, parts, interval)
    return LossDistribution(interval, (Side(lowest, probs, infinite),))


def _self_compose(probs: np.ndarray, folds: int) -> tuple[int, np.ndarray, float]:
    """The sum of `folds` independent losses, rounded up.

    Arguments:
        probs: the law of one loss, at the indices -n, ..., n (an odd number of them).
        folds: how many are summed.

    Returns: the lowest index, the probabilities from it on, and the mass that is charged as an infinite loss.
    """
    half_width = len(probs) // 2
    if folds == 1:
        return -half_width, probs, 0.0
    first, last = _chernoff_range(probs, folds)
    size = last - first + 1
    length = next_fast_len(max(size, len(probs)), real=True)
    summed, error = numerics.law_of_sum([(probs, folds)], length)
    summed = np.roll(summed, -(first + half_width * folds))[:size]
    return first, summed, _TAIL * (1 + 1e-6) + math.sqrt(length) * error  # of all points together


def _chernoff_range(probs: np.ndarray, folds: int) -> tuple[int, int]:
    """(first, last) index between which the sum of `folds` losses stays, but for a probability of `_TAIL`."""
    half_width = len(probs) // 2
    index = np.arange(-half_width, half_width + 1)
    std = math.sqrt(float(index**2 @ probs)) + 1e-9
    best = math.sqrt(2 * math.log(2 / _TAIL)) / (std * math.sqrt(folds))  # of a Gaussian sum
    slopes = np.minimum(np.array([0.3, 0.7, 1.0, 1.4]) * best, 600 / half_width)

    def bound(sign: int) -> int:
        """How far from 0 the sum may be on the side of this sign, by Chernoff's bound at the best slope."""
        reached = [
            (folds * math.log(float(np.exp(slope * sign * index) @ probs)) + math.log(2 / _TAIL)) / slope
            for slope in slopes
        ]
        return min(half_width * folds, math.ceil(min(reached)) + 1)

    return -bound(-1), bound(1)


def _coarsen_grid(lowest: int, probs: np.ndarray, parts: int, interval: float) -> tuple[int, np.ndarray]:
    """Spread losses on multiples of interval/parts to multiples of interval, keeping the masses of P and of Q.

    Both in and out, `lowest` is the index of the first probability, in units of the grid it is on.
    """
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


class Nodes(NamedTuple):
    """At which eps a curve is asked: in two steps, each up to some eps, and beyond in a fixed ratio.

    Steps and their ends are in standard deviations of the loss.
    """

    fine: float  # the first step ...
    fine_to: float  # ... up to here
    middle: float
    middle_to: float
    ratio: float  # of one eps to the one before it, beyond `middle_to`
    least: float = 1e-290  # stands for every delta that may have underflowed, or that does not matter

    def eps_nodes(self, std: float, eps_pure: float) -> np.ndarray:
        """The eps to ask about, rising between 0 and `eps_pure`, when the loss has about this standard deviation."""
        std = min(std, eps_pure / 4)
        steps = [np.arange(self.fine, self.fine_to, self.fine), np.arange(self.fine_to, self.middle_to, self.middle)]
        count = math.ceil(math.log(max(1.0, eps_pure / (std * self.middle_to))) / math.log(self.ratio))
        nodes = np.unique(std * np.concatenate([*steps, self.middle_to * self.ratio ** np.arange(count + 1)]))
        nodes = nodes[np.diff(nodes, prepend=0.0) > 1e-6 * std]
        return nodes[nodes < eps_pure * (1 - 1e-6)]


FINE = Nodes(0.1, 5.5, 0.25, 9.0, 1.2)
COARSE = Nodes(0.3, 4.8, 0.6, 9.0, 1.5)
MANY_FOLDS = 1000  # folds, of whose sum the bulk of one decides
_FINE_BULK = Nodes(0.1, 3.5, 0.3, 6.0, 1.3, least=1e-50)
_COARSE_BULK = Nodes(0.3, 3.3, 0.8, 6.0, 1.5, least=1e-50)


def nodes_for(folds: int, *, coarse: bool = False) -> Nodes:
    """At which eps to ask a curve that is composed `folds` times: of many folds, less about the tails."""
    _validate.at_least(1, folds=folds)
    if folds < MANY_FOLDS:
        return COARSE if coarse else FINE
    return _COARSE_BULK if coarse else _FINE_BULK


def pair_dominating_curve(
    delta_at: Callable[[float], float],
    *,
    eps_pure: float,
    folds: int = 1,
    nodes: Nodes = FINE,
    least: float | None = None,
) -> SymmetricPair:
    """A symmetric pair that dominates, in both directions, every pair whose delta(eps) is at most this curve.

    `delta_at(eps)` holds at every eps in [0, eps_pure), and beyond delta is 0. Below `least` the curve is not asked.

    Arguments:
        delta_at: the curve, an upper bound in both directions.
        eps_pure: from which on delta is 0.
        folds: how many independent copies the pair has.
        nodes: where the curve is asked.
        least: a delta below which it is not asked; that of the nodes if None.

    Guarantees:
        Never below any pair that the curve bounds; equal to the curve where it was asked, if it is that of a pair.
    """
    if not 0 < eps_pure <= LARGEST_LOSS:
        raise NotApplicable(f"no pair for a report with a loss of {eps_pure:.4g}")
    least = nodes.least if least is None else least
    eps, deltas = [0.0], [delta_at(0.0)]
    for node in nodes.eps_nodes(math.sqrt(2 * math.pi) * deltas[0], eps_pure):  # of a Gaussian loss, its deviation
        eps.append(float(node))
        deltas.append(max(delta_at(float(node)), least))
        if deltas[-1] <= least:
            break
    eps.append(eps_pure)
    deltas.append(0.0)
    return _pair_of_lower_hull(
        np.tanh(np.array(eps) / 2) * (1 + 1e-15), np.array(deltas) / (1 + np.exp(eps)), folds=folds
    )


def sampled_pair(
    delta_at: Callable[[float], float], *, prob: float, eps_pure: float, std: float, nodes: Nodes = FINE
) -> SymmetricPair:
    """The symmetric pair of a round on a secret sample of fixed size, in which a user is drawn with this probability.

    `delta_at(eps)` bounds both directions of the round itself under replacement, whose loss has about this std and is
    at most `eps_pure`, which may be infinite. Of the sampled round delta is ``prob delta_at(log1p(expm1(eps) / prob))``
    (docs/proofs/fixed-size.md). It is asked at nodes of the round's own eps; a loss beyond `LARGEST_LOSS`, or
    less likely than 1e-60, counts as infinite, which is a point at 1.

    Arguments:
        delta_at: the curve of a round with everyone, in both directions.
        prob: how probably a user is in the sample.
        eps_pure: the largest loss of such a round, or infinite.
        std: about the standard deviation of its loss.
        nodes: where the curve is asked.

    Guarantees:
        Never below the sampled round, at any eps, in either direction and composed; at prob = 1 that of the round.
    """
    _validate.in_interval(0, 1, prob=prob)
    _validate.positive(prob=prob, eps_pure=min(eps_pure, LARGEST_LOSS), std=std)
    eps, deltas = [0.0], [delta_at(0.0) * prob]
    inner = nodes.eps_nodes(std, min(eps_pure, _LARGEST_EXPONENT))
    inner = np.append(inner, eps_pure) if eps_pure < _LARGEST_EXPONENT else inner
    end = 1.0
    for node, outer in zip(inner, _sampled_loss(prob, inner) * (1 + 8 * numerics.ULP), strict=True):
        if outer > LARGEST_LOSS:
            break
        if node == eps_pure:
            end = math.tanh(outer / 2) * (1 + 4e-15)
            break
        eps.append(float(outer))
        deltas.append(max(delta_at(float(node)) * prob, _LEAST_DRAWN))
        if deltas[-1] <= _LEAST_DRAWN:
            break
    t = np.append(np.tanh(np.array(eps) / 2) * (1 + 2e-15), end)
    excess = np.append(np.array(deltas) * (1 + 4 * numerics.ULP) / (1 + np.exp(eps)), 0.0)
    return _pair_of_lower_hull(t, excess, folds=1)


def _sampled_loss(prob: float, loss: np.ndarray) -> np.ndarray:
    """ln(1 + prob (e^loss - 1)): the sampled round's loss where the round's own is `loss`, between 0 and 700.

    To within 4 ULP at any prob, which `sampled_pair` rounds out by twice as much.
    """
    return np.log1p(prob * np.expm1(loss))


def _pair_of_lower_hull(tanh: np.ndarray, excess: np.ndarray, *, folds: int) -> SymmetricPair:
    """The pair of the lower hull of points (t, E[(s - t)_+]) at rising t = tanh(eps/2) >= 0; its arrays are read-only.

    The first t is 0, the last the largest |s|: 1 where a loss may be infinite.
    """
    points, mass = law_of_lower_hull(tanh, excess)
    for array in (points, mass):
        array.flags.writeable = False
    last = float(points[-1])
    most = 2 * math.atanh(last) * (1 + 1e-15) if last < 1 else math.inf
    return SymmetricPair(points=points, mass=mass, eps_pure=most, folds=folds)


def upper_envelope(first: SymmetricPair, second: SymmetricPair) -> SymmetricPair:
    """A pair that dominates both of these, of as many folds: the chords of the larger of their curves.

    Guarantees:
        Never below either of them, at any eps.
    """
    if first.folds != second.folds:
        raise ValueError(f"expected pairs of as many folds, got {first.folds} and {second.folds}")
    t = np.unique(np.concatenate([[0.0], first.points, second.points]))
    excess = np.maximum(first.excess(t), second.excess(t)) * (1 + 1e-13)
    excess[-1] = 0.0
    points, mass = law_of_lower_hull(t, excess)
    return SymmetricPair(points=points, mass=mass, eps_pure=max(first.eps_pure, second.eps_pure), folds=first.folds)


def law_of_lower_hull(tanh: np.ndarray, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The law of |s| whose E[(s - t)_+] is the lower convex hull of these points, rounded up.

    For t < 0 the points are mirrored: E[(s + t)_+] = t + E[(s - t)_+].

    Arguments:
        tanh: rising, from 0 on.
        excess: E[(s - t)_+] at each of them; 0 at the last.

    Returns: the points of |s|, rising from 0 on, and the mass at each.
    """
    both = np.concatenate([-tanh[:0:-1], tanh]), np.concatenate([(tanh + excess)[:0:-1], excess])
    ends = numerics.lower_hull(*both)
    slopes = np.append(np.diff(ends[:, 1]) / np.diff(ends[:, 0]), 0.0)
    right = np.flatnonzero(ends[:, 0] > 0)
    mass = 2 * (slopes[right] - slopes[right - 1])
    middle = max(0.0, 1 - float(mass.sum()))
    return np.append(0.0, ends[right, 0]), np.append(middle, mass) * _OUTWARD
