"""Privacy-loss distributions on one grid: many copies of a release, several releases together, one drawn of several.

The distributions of single releases are dp-accounting's (`from_dp_accounting`), or those of `symmetric` and `mixtures`,
rounded up; sums of them are `tilting`'s. A release may have several distributions, where its loss depends on something
fixed but unknown about the victim: then the worst counts. Losses that are rounded down instead have a `lower_eps`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting._dp_accounting import pld, pld_pmf
from dovetail.accounting.numerics import ULP
from dovetail.accounting.tilting import LossPart, Total, TotalBelow
from dovetail.statements import Theorem

__all__ = [
    "PRIVACY_LOSS",
    "Composition",
    "Loss",
    "LossDistribution",
    "Side",
    "compose",
    "from_dp_accounting",
    "loss_of_mixture",
    "self_compose",
    "symmetrize",
    "worst_delta",
    "worst_eps",
]

PRIVACY_LOSS = Theorem(
    key="DGKMPS22",
    where="privacy-loss distributions, rounded up (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022)",
    url="https://arxiv.org/abs/2207.04380",
)

_OUTWARD = 1 + 1e-9  # more than the rounding errors of an eps or a delta
_ROUNDINGS = 256  # of a tail, whose logarithm is above -50, and of what is made of it
_SUM_ERROR = 1e-13  # of a sum of as many probabilities as a distribution may have
_LEAST = 1e-300  # stands for a delta that may have underflowed


class Side(NamedTuple):
    """The privacy loss of one neighbour against the other.

    `probs[i]` is the probability of a loss of `lowest + i` intervals, `infinite` that of an infinite loss.
    """

    lowest: int
    probs: np.ndarray
    infinite: float


@dataclasses.dataclass(frozen=True, eq=False)
class LossDistribution:
    """The privacy loss of one release on multiples of an interval, rounded up (for `lower_eps` alone: down).

    `sides` has one entry where both directions have the same loss, else two. Arrays are shared: do not write to them.
    """

    interval: float
    sides: tuple[Side, ...]

    def side_in_direction(self, direction: int) -> Side:
        """The loss of the first neighbour against the second (0), or the other way round (1)."""
        return self.sides[min(direction, len(self.sides) - 1)]

    def eps(self, delta: float) -> float:
        """The smallest eps at this delta, rounded up; infinite where there is none."""
        return Composition([(self, 1)]).eps(delta)

    def delta(self, eps: float) -> float:
        """The smallest delta at this eps, rounded up."""
        return Composition([(self, 1)]).delta(eps)


class Composition:
    """Independent releases, each with how often it is made; its delta and eps are those of the worse direction.

    Guarantees:
        Never below the exact composition of the releases' distributions, at any delta and any number of releases.
    """

    def __init__(self, parts: Sequence[tuple[LossDistribution, int]]) -> None:
        self.parts = tuple(parts)
        self._interval = self.parts[0][0].interval
        for loss, _ in self.parts:
            if loss.interval != self._interval:
                raise ValueError(
                    f"expected releases on one grid, got intervals of {self._interval} and {loss.interval}"
                )

    @property
    def _parts_by_direction(self) -> list[list[LossPart]]:
        """For each direction the parts of the sum; one direction where all releases have one side."""
        count = max(len(loss.sides) for loss, _ in self.parts)
        return [
            [LossPart(*loss.side_in_direction(index), times) for loss, times in self.parts] for index in range(count)
        ]

    @functools.cached_property
    def _totals_by_direction(self) -> tuple[Total, ...]:
        return tuple(Total(parts, self._interval) for parts in self._parts_by_direction)

    def lower_eps(self, delta: float) -> float:
        """An eps at which the exact delta is still above this one; for releases whose losses were rounded *down*.

        For losses that were rounded up it would bound nothing. 0 where none is known.
        """
        _validate.in_open_interval(0, 1, delta=delta)
        return max(TotalBelow(parts, self._interval).lower_eps(delta) for parts in self._parts_by_direction)

    def eps(self, delta: float) -> float:
        """The smallest eps at this delta, rounded up; infinite where there is none."""
        _validate.in_open_interval(0, 1, delta=delta)
        return max(numerics.as_eps_bound(direction.eps(delta)) for direction in self._totals_by_direction)

    def delta(self, eps: float) -> float:
        """The smallest delta at this eps, rounded up."""
        _validate.non_negative(eps=eps)
        return max(numerics.as_probability_bound(direction.delta(eps)) for direction in self._totals_by_direction)


Loss: TypeAlias = LossDistribution | Composition


def from_dp_accounting(loss: pld.PrivacyLossDistribution) -> LossDistribution:
    """dp-accounting's distribution of one release, with the roundings of its own arithmetic.

    It takes deltas at the multiples of the interval as differences of tails, each right to some roundings r of the
    tail, and probabilities as differences of deltas over the interval, right to r times the mass from the loss before
    on. To each probability that much is added, and r / (1 - e^-interval) of the one before: mass that moves up by one
    interval adds 1 - e^-interval of itself to every delta below. Larger measures, under both neighbours, have larger
    deltas everywhere, and so do their compositions.
    """
    sides = (loss._pmf_remove,) if loss._symmetric else (loss._pmf_remove, loss._pmf_add)
    return LossDistribution(float(sides[0]._discretization), tuple(_round_side_up(side) for side in sides))


def _round_side_up(pmf: pld_pmf.PLDPmf) -> Side:
    """One side of dp-accounting's distribution, with its rounding errors added as `from_dp_accounting` says."""
    dense = pmf.to_dense_pmf()
    probs = np.asarray(dense._probs, dtype=float)
    infinite = float(dense._infinity_mass)
    interval = float(dense._discretization)
    relative = _ROUNDINGS * ULP
    tails = np.cumsum(probs[::-1])[::-1] + infinite
    larger = np.append(probs, 0.0)
    larger[0] += relative * tails[0]
    larger[1:] += relative * (tails + probs / -math.expm1(-interval))
    return Side(int(dense._lower_loss), larger, infinite * (1 + relative))


def symmetrize(loss: LossDistribution) -> LossDistribution:
    """The symmetric pair that has this one's deltas, of its first direction, at every eps >= 0.

    A symmetric pair has e^-loss as much of minus a loss as of that loss, and what is left at 0: then
    ``delta(-eps) = 1 - e^-eps + e^-eps delta(eps)``. Masses that are rounded up, with a sum of 1 or more, have deltas
    that are no smaller (docs/proofs/fixed-size.md).

    Guarantees:
        Its deltas at eps >= 0 are those of `loss`, and at -eps never below what symmetry makes of them.
    """
    lowest, probs, infinite = loss.sides[0]
    above = probs[max(0, 1 - lowest) :] if lowest <= 1 else np.concatenate([np.zeros(lowest - 1), probs])
    away = loss.interval * np.arange(1.0, len(above) + 1)
    below = above * np.exp(-away) * (1 + ULP * (away + 8))
    middle = max(0.0, 1.0 - (float(above.sum()) + float(below.sum()) + infinite)) + _SUM_ERROR
    both = np.concatenate([below[::-1], [middle], above])
    return LossDistribution(loss.interval, (Side(-len(above), both, infinite),))


def self_compose(loss: Loss, times: int) -> Composition:
    """So many independent copies of a release.

    Arguments:
        loss: of one release, or of several together.
        times: how many independent copies there are.
    """
    _validate.integer(times=times)
    _validate.at_least(1, times=times)
    return Composition([(part, times * count) for part, count in _parts_of(loss)])


def compose(losses: Sequence[Loss]) -> Composition:
    """The composition of all of these releases, which share one grid."""
    if not losses:
        raise ValueError("expected at least one release, got none")
    return Composition([part for loss in losses for part in _parts_of(loss)])


def _as_composition(loss: Loss) -> Composition:
    """This composition, or that of one release alone."""
    return loss if isinstance(loss, Composition) else Composition([(loss, 1)])


def _parts_of(loss: Loss) -> tuple[tuple[LossDistribution, int], ...]:
    return loss.parts if isinstance(loss, Composition) else ((loss, 1),)


def loss_of_mixture(parts: Sequence[tuple[float, LossDistribution | None]], *, interval: float) -> LossDistribution:
    """The loss of one of several releases, drawn at random, where it is seen which was drawn; rounded up.

    Arguments:
        parts: the weight and the loss of every release; None for one that loses nothing. Weights sum to 1.
        interval: of the grid, which all losses must share.
    """
    _validate.positive(interval=interval)
    if all(loss is None for _, loss in parts):
        raise ValueError("expected a release with a loss, got none")
    both = []
    for index in range(2):
        sides = [(weight, *loss.side_in_direction(index)) for weight, loss in parts if loss is not None]
        low = min(0, *(lowest for _, lowest, _, _ in sides))
        high = max(0, *(lowest + len(law) for _, lowest, law, _ in sides))
        probs = np.zeros(high - low + 1)
        infinite = 0.0
        for weight, lowest, law, lost in sides:
            probs[lowest - low : lowest - low + len(law)] += weight * law
            infinite += weight * lost
        probs[-low] += sum(weight for weight, loss in parts if loss is None)
        both.append(Side(low, probs * (1 + 1e-14), infinite * (1 + 1e-12)))
    return LossDistribution(interval, tuple(both))


def worst_eps(losses: Sequence[Loss], *, delta: float) -> float:
    """The largest eps at this delta, rounded up; infinite where none is large enough.

    Arguments:
        losses: all that are possible, of which one is the victim's.
        delta: at which eps is asked for.
    """
    return max(numerics.as_eps_bound(_as_composition(loss).eps(delta) * _OUTWARD) for loss in losses)


def worst_delta(losses: Sequence[Loss], *, eps: float) -> float:
    """The largest delta at this eps, rounded up; what may have underflowed is not 0.

    Arguments:
        losses: all that are possible, of which one is the victim's.
        eps: at which delta is asked for.
    """
    return max(
        numerics.as_probability_bound(max(_as_composition(loss).delta(eps) * _OUTWARD, _LEAST)) for loss in losses
    )
