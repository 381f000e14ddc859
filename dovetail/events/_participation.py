"""Who took part in a round."""

from __future__ import annotations

import dataclasses

from dovetail import _validate

__all__ = ["Disjoint", "Everyone", "FixedSize", "Participation", "Poisson"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Everyone:
    """Every user takes part, or nothing is claimed from not taking part."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disjoint:
    """The rounds of one epoch use disjoint batches, fixed without looking at the data."""

    epoch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FixedSize:
    """A uniformly random subset of `size` of `population` users, secret from the adversary."""

    size: int
    population: int

    def __post_init__(self) -> None:
        _validate.integer(size=self.size, population=self.population)
        _validate.at_least(1, size=self.size)
        _validate.at_most(self.population, size=self.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisson:
    """Every user takes part independently with probability `prob`, secret from the adversary."""

    prob: float

    def __post_init__(self) -> None:
        _validate.in_interval(0, 1, prob=self.prob)


Participation = Everyone | Disjoint | FixedSize | Poisson
