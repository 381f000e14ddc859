"""What was run, in privacy terms: plain data that protocols emit and accountants read.

A `Round` is one release: a mechanism (`Gaussian`, `Laplace`, `NonPrivate`) and who took part in it (`Everyone`,
`Disjoint`, `FixedSize`, `Poisson`). Sensitivities are those of the event's own neighbouring relation, never of a
convention that an accountant may or may not share. No event holds user data.
"""

from __future__ import annotations

import dataclasses

from dovetail import _validate
from dovetail.statements import Neighbors, Scope

__all__ = [
    "Disjoint",
    "Everyone",
    "FixedSize",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NonPrivate",
    "Participation",
    "Poisson",
    "Round",
    "View",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
    """A vector query answered with N(0, std^2 I).

    `sensitivity` is the L2 sensitivity under `neighbors`: a sum of vectors clipped to C has C under ADD_REMOVE and 2C
    under REPLACE_ONE.
    """

    std: float
    sensitivity: float
    neighbors: Neighbors

    def __post_init__(self) -> None:
        _validate.positive(sensitivity=self.sensitivity)
        _validate.non_negative(std=self.std)

    @property
    def mu(self) -> float:
        """Sensitivity over standard deviation: the one number that a Gaussian's privacy depends on."""
        return self.sensitivity / self.std if self.std else float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laplace:
    """`count` scalar queries on the same unit, each answered with Laplace noise of this scale."""

    scale: float
    sensitivity: float
    count: int
    neighbors: Neighbors

    def __post_init__(self) -> None:
        _validate.positive(sensitivity=self.sensitivity, scale=self.scale)
        _validate.integer(count=self.count)
        _validate.at_least(1, count=self.count)

    @property
    def eps_each(self) -> float:
        """The pure eps of one of the scalar queries."""
        return self.sensitivity / self.scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class NonPrivate:
    """A release without a guarantee."""

    reason: str


Mechanism = Gaussian | Laplace | NonPrivate


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One release: what was run and who took part."""

    mechanism: Mechanism
    participation: Participation


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """One round as one adversary sees it."""

    round: Round
    scope: Scope
