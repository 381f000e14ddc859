"""Sums of clients' vectors of which nobody sees the terms: whole numbers with Skellam noise.

`SkellamNoise` is what both have in common; `SkellamSum` is added up from shares by aggregators, `SplitAndMix` from
shares that shufflers mix.
"""

from __future__ import annotations

import dataclasses

from dovetail import _validate
from dovetail.events._shuffled import AmongUsers
from dovetail.statements import Neighbors

__all__ = ["SkellamNoise", "SkellamSum", "SplitAndMix"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkellamNoise:
    """A sum of scaled and rounded vectors with Skellam noise, modulo `modulus`.

    Vectors are clipped to the L2 norm `clip_norm`, multiplied by `scale` and rounded to whole numbers, where a plain
    rounding exceeds the norm that is enforced with probability at most `rounding_tail`. `noise_variance` is the
    variance, in squares of whole numbers, of the noise on a coordinate which the adversary does not know. In a round
    with `Poisson` participation everyone uploads, and each decides secretly whether its data enter. Under ADD_REMOVE a
    user that is removed uploads zero.
    """

    coordinates: int
    clip_norm: float
    scale: float
    noise_variance: float
    modulus: int
    rounding_tail: float = 1e-3
    neighbors: Neighbors = Neighbors.REPLACE_ONE

    def __post_init__(self) -> None:
        _validate.integer(coordinates=self.coordinates, modulus=self.modulus)
        _validate.at_least(1, coordinates=self.coordinates)
        _validate.at_least(2, modulus=self.modulus)
        _validate.positive(clip_norm=self.clip_norm, scale=self.scale, noise_variance=self.noise_variance)
        _validate.in_open_interval(0, 1, rounding_tail=self.rounding_tail)

    @property
    def norms_apart(self) -> int:
        """How many times the largest norm neighbours may be apart: 2 for one vector against another, 1 against zero."""
        return 2 if self.neighbors is Neighbors.REPLACE_ONE else 1


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
