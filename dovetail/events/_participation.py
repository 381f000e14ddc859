"""Who took part in a round.

`secret` says whether the sample is hidden from the adversary, `prob_drawn` how probably a user is in it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from dovetail import _validate

__all__ = ["Disjoint", "Everyone", "FixedSize", "Participation", "Poisson", "Separated"]


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separated:
    """One round of a stream in which every user takes part rarely: at most `uploads` times, `separation` rounds apart.

    Who comes when was fixed without looking at the data. Rounds with the same `stream` belong together; all `rounds`
    that were planned are charged, whether they were run or not.
    """

    secret: ClassVar[bool] = False
    prob_drawn: ClassVar[float] = 1.0

    uploads: int
    separation: int
    rounds: int
    stream: int = 0

    def __post_init__(self) -> None:
        _validate.integer(uploads=self.uploads, separation=self.separation, rounds=self.rounds, stream=self.stream)
        _validate.at_least(1, uploads=self.uploads, separation=self.separation, rounds=self.rounds)
        _validate.at_least(0, stream=self.stream)

    @property
    def most_uploads(self) -> int:
        """How often one user can take part at the most: so many rounds may leave room for fewer than `uploads`."""
        return min(self.uploads, math.ceil(self.rounds / self.separation))


Participation = Everyone | Disjoint | FixedSize | Poisson | Separated
