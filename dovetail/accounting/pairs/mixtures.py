"""The privacy loss of a randomly shifted Gaussian, on a grid, from above.

The pair is ``P = sum_i w_i N(c_i, 1)`` against ``Q = N(0, 1)`` with shifts c_i >= 0. Its loss rises with the outcome x,
so the line is cut where the loss crosses multiples of the interval. What P and Q put on a piece is moved to its two
ends, keeping both masses, and from there to the grid in the same way: each move is a spread of the likelihood ratio,
and the spread pair dominates (docs/proofs/subjects.md). Where the cuts lie matters to tightness, never to soundness;
rounding errors are estimated from above and moved to larger losses.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy.special import ndtr

from dovetail import _validate
from dovetail.accounting.loss_distributions import LossDistribution, Side
from dovetail.statements import NotApplicable

__all__ = ["ShiftLaw", "interval_for", "loss"]

_FAR = 9.2  # standard deviations beyond which a Gaussian has a mass of 2e-20, which is counted as an infinite loss
_NEGLIGIBLE = 1e-19  # a probability that is charged and not resolved
_MOST_SHIFTS = 400  # of a law; more are taken together
_LARGEST_SHIFT = 1000.0  # beyond, eps is in the hundreds of thousands, and losses are too many to tell apart
_MOST_CUTS = 40_000  # of the line of outcomes
_BLOCK = 4096  # outcomes that are computed at once, for memory's sake
_ULP = 2.0**-52


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShiftLaw:
    """The law of a shift c >= 0, in standard deviations of the noise.

    P is the law of the outcome N(c, 1) with a random c, Q that of N(0, 1).
    """

    shifts: np.ndarray  # ascending
    weights: np.ndarray  # the probability of each
    lost: float = 0.0  # the probability of shifts that are larger, charged as an infinite loss

    @classmethod
    def dominating(cls, shifts: np.ndarray, weights: np.ndarray) -> ShiftLaw:
        """A law with few shifts that dominates this one, whose shifts ascend from 0 or more.

        Guarantees:
            Every shift is rounded up, at most to the next of its group; what is rarer than 1e-19 at the top is lost,
            and what is rarer than that at the bottom is rounded up as well.
        """
        if len(shifts) != len(weights) or not len(shifts) or shifts[0] < 0 or np.any(np.diff(shifts) <= 0):
            raise ValueError(
                f"expected ascending shifts >= 0, each with a weight, got {len(shifts)} shifts, {len(weights)} weights"
            )
        last = len(weights) - int(np.searchsorted(np.cumsum(weights[::-1]), _NEGLIGIBLE))
        last = max(1, last)
        if shifts[last - 1] > _LARGEST_SHIFT:
            raise NotApplicable(
                f"a shift of {shifts[last - 1]:.3g} standard deviations is more than the {_LARGEST_SHIFT:g} that are "
                "resolved: the noise is too small"
            )
        first = min(int(np.searchsorted(np.cumsum(weights), _NEGLIGIBLE)), last - 1)
        lost = float(np.sum(weights[last:])) * (1 + 1e-9) + 1e-300
        kept, mass = shifts[first:last], weights[first:last].copy()
        mass[0] += float(np.sum(weights[:first]))
        if len(kept) > _MOST_SHIFTS:
            positive = kept[kept > 0]
            ends = np.geomspace(positive[0], positive[-1], _MOST_SHIFTS)
            group = np.where(kept > 0, 1 + np.searchsorted(ends, kept * (1 - 1e-12)), 0)
            starts = np.flatnonzero(np.diff(group, prepend=-1))
            largest = kept[np.append(starts[1:], len(kept)) - 1]
            kept, mass = largest, np.add.reduceat(mass, starts)
        return cls(shifts=kept, weights=mass, lost=lost)

    @functools.cached_property
    def _log_weights(self) -> np.ndarray:
        """log(w_i) - c_i^2 / 2: with c_i x added, the logarithm of the i-th term of dP/dQ at x."""
        with np.errstate(divide="ignore"):
            return np.log(self.weights) - self.shifts**2 / 2

    def loss_at(self, x: np.ndarray) -> np.ndarray:
        """log dP/dQ at every outcome, which rises with the outcome; right to `_loss_error`."""
        return np.concatenate([self._loss_at(x[start : start + _BLOCK]) for start in range(0, len(x), _BLOCK)])

    def _loss_at(self, x: np.ndarray) -> np.ndarray:
        exponent = self._log_weights + np.multiply.outer(x, self.shifts)
        largest = exponent.max(axis=1)
        return largest + np.log(np.exp(exponent - largest[:, None]).sum(axis=1))

    def masses_and_errors(self, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What P puts between neighbouring cuts (one number fewer than cuts), and the relative error of each."""
        mass = np.empty(len(cuts) - 1)
        whole = np.empty(len(cuts) - 1)
        for start in range(0, len(mass), _BLOCK):
            between, tail = _masses_between(np.subtract.outer(cuts[start : start + _BLOCK + 1], self.shifts))
            mass[start : start + _BLOCK] = between @ self.weights
            whole[start : start + _BLOCK] = tail @ self.weights
        return mass, _relative_error(whole, mass)

    def mass_below(self, x: float) -> float:
        """P(outcome <= x), to a few roundings."""
        return float(ndtr(x - self.shifts) @ self.weights)

    def mass_above(self, x: float) -> float:
        """P(outcome > x), to a few roundings, without what is `lost`."""
        return float(ndtr(self.shifts - x) @ self.weights)

    @functools.cached_property
    def range_of_outcomes(self) -> tuple[float, float]:
        """(low, high): outcomes between which P stays, but for a negligible probability on either side."""
        low, high = float(self.shifts[0]), float(self.shifts[-1]) + _FAR
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if self.mass_above(middle) <= _NEGLIGIBLE else (middle, high)
        return float(self.shifts[0]) - _FAR, high

    @functools.cached_property
    def std_and_width_of_loss(self) -> tuple[float, float]:
        """About the std and the width of the loss under P: to choose a grid by, never for a bound."""
        x = np.linspace(*self.range_of_outcomes, 801)
        losses = self.loss_at(x)
        mass, _ = self.masses_and_errors(x)
        mass /= mass.sum()
        middle = (losses[1:] + losses[:-1]) / 2
        variance = float(mass @ (middle - mass @ middle) ** 2)
        return math.sqrt(max(variance, 1e-30)), max(float(losses[-1] - losses[0]), 1e-15)


def interval_for(std: float, width: float, *, num_releases: int) -> float:
    """An interval for so many releases whose losses have this std and lie within this width: a power of two.

    It is about 1/16 of the std (1/128 for one release), for the error of the grid is of second order; powers of two
    change rarely, so that losses computed for some rounds serve for more of them.

    Arguments:
        std: of the loss of one release, the narrowest of several.
        width: of the losses of one release, the largest of several.
        num_releases: how many are composed.
    """
    _validate.positive(std=std, width=width, releases=num_releases)
    wanted = max(std / (16 * max(1.0, 8 / math.sqrt(num_releases))), width / 2**15)
    return 2.0 ** round(math.log2(wanted))


def loss(law: ShiftLaw, *, interval: float) -> LossDistribution:
    """The privacy loss of one release in both directions, rounded up to multiples of `interval`.

    The first side is P against Q (a subject is removed), the second Q against P (it is added).

    Arguments:
        law: of the shift, in standard deviations.
        interval: of the grid of losses.

    Guarantees:
        Never below the exact hockey-stick divergence of the pair, in either direction, at any eps.
    """
    _validate.positive(interval=interval)
    return LossDistribution(interval, (_loss_when_removed(law, interval), _loss_when_added(law, interval)))


def _loss_when_removed(law: ShiftLaw, interval: float) -> Side:
    """The loss of P against Q, rounded up; it rises with the outcome."""
    cuts = _cut_outcomes(law, *law.range_of_outcomes, interval)
    losses, error = law.loss_at(cuts), _loss_error(law, cuts)
    p, p_error = law.masses_and_errors(cuts)
    q, q_error = _null_masses_and_errors(cuts)
    at, mass = _move_to_ends(p, q, losses, p_error, q_error + error)
    at, mass = np.append(at, losses[0]), np.append(mass, law.mass_below(cuts[0]))
    return _move_to_grid(at + error, mass, law.mass_above(cuts[-1]) * (1 + 1e-9) + law.lost, interval)


def _loss_when_added(law: ShiftLaw, interval: float) -> Side:
    """The loss of Q against P, rounded up; it falls with the outcome."""
    cuts = _cut_outcomes(law, -_FAR, _FAR, interval)
    losses, error = law.loss_at(cuts), _loss_error(law, cuts)
    p, p_error = law.masses_and_errors(cuts)
    q, q_error = _null_masses_and_errors(cuts)
    at, mass = _move_to_ends(q[::-1], p[::-1], -losses[::-1], q_error[::-1], p_error[::-1] + error)
    tail = float(ndtr(-_FAR)) * (1 + 1e-9)
    at, mass = np.append(at, -losses[-1]), np.append(mass, tail)
    return _move_to_grid(at + error, mass, tail, interval)


def _cut_outcomes(law: ShiftLaw, low: float, high: float, interval: float) -> np.ndarray:
    """Rising outcomes from low to high, both included, between which the loss grows by about `interval`.

    Where they lie exactly matters to tightness alone.
    """
    x = np.linspace(low, high, 2001)
    losses = np.maximum.accumulate(law.loss_at(x))
    count = min(_MOST_CUTS, math.floor(losses[-1] / interval) - math.ceil(losses[0] / interval) + 1)
    if count < 1:
        return np.array([low, high])
    wanted = np.linspace(math.ceil(losses[0] / interval), math.floor(losses[-1] / interval), count) * interval
    near = np.interp(wanted, losses, x)
    here = law.loss_at(near)
    slope = (x[1] - x[0]) / 64
    rise = (law.loss_at(near + slope) - here) / slope
    with np.errstate(divide="ignore", invalid="ignore"):
        nearer = near + np.clip((wanted - here) / rise, -16 * slope, 16 * slope)
    nearer = np.where(np.isfinite(nearer), nearer, near)
    return np.unique(np.concatenate([[low], nearer[(nearer > low) & (nearer < high)], [high]]))


def _move_to_ends(
    upper: np.ndarray, lower: np.ndarray, losses: np.ndarray, upper_error: np.ndarray, other_error: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The mass of every piece of the line moved to its two ends, so that both laws keep their masses.

    Arguments:
        upper: the masses of the pieces under the law that the loss is of.
        lower: their masses under the other law.
        losses: the loss at all cuts, rising: one more than pieces.
        upper_error: the relative error of the upper masses.
        other_error: the relative error of everything else in the ratio of the two laws.

    Returns: losses and the masses at them, rounded up, two for each piece.
    """
    left, right = losses[:-1], losses[1:]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.exp(left + np.log(lower) - np.log(upper))
        to_right = (1 - ratio + 2 * (upper_error + other_error)) / -np.expm1(np.minimum(left - right, 0.0))
    to_right = np.where(np.isfinite(to_right), np.clip(to_right, 0.0, 1.0), 1.0)  # unknown: to the larger loss
    mass = np.where(upper > 0, upper * (1 + 2 * upper_error), 0.0)
    return np.concatenate([left, right]), np.concatenate([mass * (1 - to_right), mass * to_right])


def _move_to_grid(losses: np.ndarray, mass: np.ndarray, infinite: float, interval: float) -> Side:
    """Masses at any losses, each moved to the two multiples of the interval around it; rounded up."""
    scaled = losses / interval
    scaled = scaled + 4 * _ULP * np.abs(scaled)
    left = np.floor(scaled).astype(np.int64)
    to_right = np.clip(np.expm1(-(scaled - left) * interval) / math.expm1(-interval), 0.0, 1.0)
    lowest = int(left.min())
    size = int(left.max()) - lowest + 2
    probs = np.bincount(left - lowest, mass * (1 - to_right), size)
    probs = probs + np.bincount(left - lowest + 1, mass * to_right, size)
    return Side(lowest, probs * (1 + 1e-13), min(1.0, infinite))


def _null_masses_and_errors(cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What Q = N(0, 1) puts between neighbouring cuts, and the relative error of each."""
    mass, whole = _masses_between(cuts[:, None])
    return mass[:, 0], _relative_error(whole[:, 0], mass[:, 0])


def _masses_between(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A standard Gaussian's mass between the points of neighbouring rows, and the tail that it was subtracted from.

    The smaller tail is taken, below or above the point, so that little cancels.
    """
    below, above = ndtr(points), ndtr(-points)
    left = points[:-1] > 0
    mass = np.where(left, above[:-1] - above[1:], below[1:] - below[:-1])
    return np.maximum(mass, 0.0), np.where(left, above[:-1], below[1:])


def _relative_error(whole: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The relative error of a difference of two numbers below `whole`, each right to some ulps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(mass > 0, 64 * _ULP * whole / mass, np.inf)


def _loss_error(law: ShiftLaw, cuts: np.ndarray) -> float:
    """An upper estimate of the rounding error of a loss between the first and the last cut."""
    largest = float(law.shifts[-1])
    farthest = max(abs(float(cuts[0])), abs(float(cuts[-1])))
    return 16 * _ULP * (2 + farthest * largest + largest**2 + math.log(len(law.shifts)))
