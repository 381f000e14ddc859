"""Sums of clients' vectors of which nobody sees the terms: whole numbers with Skellam noise.

`EncodedSum` is what all have in common: vectors that were scaled and rounded to whole numbers. `SkellamSum` is added up
from shares by aggregators, `SplitAndMix` from shares that shufflers mix. `CorrelatedSum` has the rounded Gaussian noise
of an aggregator, which takes back some of that of earlier rounds.
"""

from __future__ import annotations

import dataclasses

from dovetail import _validate
from dovetail.events._noise import CorrelatedGaussian
from dovetail.events._shuffled import AmongUsers
from dovetail.statements import Neighbors

__all__ = ["CorrelatedSum", "EncodedSum", "SkellamNoise", "SkellamSum", "SplitAndMix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedSum:
    """A sum of vectors that were scaled and rounded to whole numbers, before any noise.

    Vectors are clipped to the L2 norm `clip_norm`, multiplied by `scale` and rounded, where a plain rounding exceeds
    the norm that is enforced with probability at most `rounding_tail`. Under ADD_REMOVE a user that is removed uploads
    zero.
    """

    coordinates: int
    clip_norm: float
    scale: float
    rounding_tail: float = 1e-3
    neighbors: Neighbors = Neighbors.REPLACE_ONE

    def __post_init__(self) -> None:
        _validate.integer(coordinates=self.coordinates)
        _validate.at_least(1, coordinates=self.coordinates)
        _validate.positive(clip_norm=self.clip_norm, scale=self.scale)
        _validate.in_open_interval(0, 1, rounding_tail=self.rounding_tail)

    @property
    def norms_apart(self) -> int:
        """How many times the largest norm neighbours may be apart: 2 for one vector against another, 1 against zero."""
        return 2 if self.neighbors is Neighbors.REPLACE_ONE else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedSum(EncodedSum):
    """One round of a stream of such sums, with the rounding of one honest aggregator's correlated noise on them.

    That noise is sum over j of coefficients[j] z_(t-j), where every z is N(0, std^2 I) in whole numbers and drawn once;
    the first coefficient is positive, the others are at most 0 (`CorrelatedGaussian`). Whole numbers pass through the
    rounding unchanged, so that the round is post-processing of one without it.
    """

    std: float
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.with_sensitivity(1.0)

    def with_sensitivity(self, sensitivity: float) -> CorrelatedGaussian:
        """The round without rounding, where a user moves the sum of whole numbers by so much at the most."""
        return CorrelatedGaussian(
            std=self.std, sensitivity=sensitivity, coefficients=self.coefficients, neighbors=self.neighbors
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkellamNoise(EncodedSum):
    """Such a sum with Skellam noise, modulo `modulus`.

    `noise_variance` is the variance, in squares of whole numbers, of the noise on a coordinate which the adversary does
    not know. In a round with `Poisson` participation everyone uploads, and each decides secretly whether its data
    enter.
    """

    noise_variance: float
    modulus: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(modulus=self.modulus)
        _validate.at_least(2, modulus=self.modulus)
        _validate.positive(noise_variance=self.noise_variance)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkellamSum(SkellamNoise):
    """The noisy sum alone, from additive shares that were added up by parties of whom one is honest.

    `num_users` is the enforced minimum of uploads, whose noise is counted on: 0 where the honest aggregator adds the
    noise, so that none is needed. `colluders` of them are the adversary's, whose noise is not counted.
    """

    num_users: int
    colluders: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(num_users=self.num_users, colluders=self.colluders)
        _validate.non_negative(num_users=self.num_users, colluders=self.colluders)
        if self.num_users and self.num_users <= self.colluders:
            raise ValueError(
                f"expected fewer colluders than num_users={self.num_users}, got colluders={self.colluders}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAndMix(SkellamNoise, AmongUsers):
    """The noisy sum from additive shares that shufflers mix slot by slot, without seeing whose they are.

    `num_users` is the enforced minimum of uploads, of which `colluders` are the adversary's. `noise_variance` is that
    of the honest clients. `colluding_slots` of the `shares` slots are handled by shufflers that collude with the
    analyzer. A user that is removed uploads the shares of zero with its part of the noise.
    """

    shares: int
    colluding_slots: int = 0

    def __post_init__(self) -> None:
        SkellamNoise.__post_init__(self)
        AmongUsers.__post_init__(self)
        _validate.integer(shares=self.shares, colluding_slots=self.colluding_slots)
        _validate.at_least(1, shares=self.shares)
        _validate.non_negative(colluding_slots=self.colluding_slots)

    @property
    def slots(self) -> int:
        """The number of share slots whose permutation the analyzer does not know."""
        return max(0, self.shares - self.colluding_slots)
