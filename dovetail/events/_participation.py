"""Who took part in a round.

`secret` says whether the sample is hidden from the adversary, `prob_drawn` how probably a user is in it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from dovetail import _validate

__all__ = ["Disjoint", "Everyone", "FixedSize", "Participation", "Poisson"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everyone:
    """Every user takes part in the round, or nothing is gained from those who do not."""

    secret: ClassVar[bool] = False
    prob_drawn: ClassVar[float] = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disjoint:
    """One batch of an epoch, whose batches are disjoint and were fixed without looking at the data.

    Rounds with the same `epoch` are of the same epoch: a user is in one of them at most.
    """

    secret: ClassVar[bool] = False
    prob_drawn: ClassVar[float] = 1.0

    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSize:
    """A uniformly random subset of `size` of `population` users, secret from the adversary."""

    secret: ClassVar[bool] = True

    size: int
    population: int

    def __post_init__(self) -> None:
        _validate.integer(size=self.size, population=self.population)
        _validate.at_least(1, size=self.size)
        _validate.at_most(self.population, size=self.size)

    @property
    def prob_drawn(self) -> float:
        """The probability that a user is in the sample: its size over the population."""
        return self.size / self.population


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every user takes part independently with probability `prob`, secret from the adversary."""

    secret: ClassVar[bool] = True

    prob: float

    def __post_init__(self) -> None:
        _validate.in_interval(0, 1, prob=self.prob)

    @property
    def prob_drawn(self) -> float:
        """The probability that a user is in the sample."""
        return self.prob


Participation = Everyone | Disjoint | FixedSize | Poisson
