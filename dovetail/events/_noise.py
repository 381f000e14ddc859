"""Noisy sums, and releases without noise."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dovetail import _validate
from dovetail.statements import Neighbors

__all__ = [
    "CorrelatedGaussian",
    "DataIndependent",
    "Gaussian",
    "Laplace",
    "NonPrivate",
    "ReplacedUsers",
    "SampledSubject",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
    """A vector query whose answer has N(0, std^2 I) added; std = 0 is no noise, and promises nothing.

    `sensitivity` is the L2 sensitivity under `neighbors`: a sum of vectors clipped to C has C under ADD_REMOVE and 2C
    under REPLACE_ONE. On samples of the users it must be of that kind: who is absent adds 0, who is there a vector of
    norm at most C.
    """

    std: float
    sensitivity: float
    neighbors: Neighbors

    def __post_init__(self) -> None:
        _validate.positive(sensitivity=self.sensitivity)
        _validate.non_negative(std=self.std)

    @property
    def mu(self) -> float:
        """Sensitivity over standard deviation, the one number that its privacy depends on; infinite without noise."""
        return self.sensitivity / self.std if self.std else float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian:
    """One round of a stream of vector sums whose noise takes back some of the noise of earlier rounds.

    Round t has the noise sum over j of coefficients[j] z_(t-j), where every z is N(0, std^2 I) and drawn once: the rows
    of C^-1 Z for the lower triangular Toeplitz matrix C^-1 of these coefficients. The first one is positive, the others
    are at most 0, so that no entry of C is negative. `sensitivity` is the L2 sensitivity of one round's sum under
    `neighbors`. All rounds of a stream have the same event, and participation `Separated`.
    """

    std: float
    sensitivity: float
    coefficients: tuple[float, ...]
    neighbors: Neighbors

    def __post_init__(self) -> None:
        _validate.positive(sensitivity=self.sensitivity)
        _validate.non_negative(std=self.std)
        first, *others = self.coefficients or (0.0,)
        _validate.positive(first_coefficient=first)
        for other in others:
            _validate.at_most(0, coefficient=other)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laplace:
    """`count` scalar queries on the same unit, each answered with Laplace noise of this scale."""

    scale: float  # of the noise: its mean absolute value
    sensitivity: float  # of each query, under `neighbors`
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
    """A release without a guarantee, and why: whatever contains it promises nothing."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataIndependent:
    """A release that has the same law whatever the data are."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSubject:
    """Noisy sums of clipped item gradients, seen from a subject with at most `items` items at `users_spanned` users.

    `items_per_user` caps its items at one user. `prob_user` = 1 is federation-wide Poisson sampling of items, each with
    `prob_item`. `noise` "sum" is one noise on the sum over all users, "user" noise of its own on every user's sum, all
    of which are seen. One round is `steps` such releases, each with a fresh sample and fresh noise. With `prob_user`
    below 1 users are drawn first. That hides a subject only at users that hold nobody else's records (`alone`): others'
    records in the sum show that a user was drawn.
    """

    std: float
    clip_norm: float
    items: int
    prob_item: float
    prob_user: float = 1.0
    users_spanned: int = 1
    noise: Literal["sum", "user"] = "sum"
    items_per_user: int | None = None
    steps: int = 1
    alone: bool = False

    def __post_init__(self) -> None:
        _validate.positive(std=self.std, clip_norm=self.clip_norm, prob_item=self.prob_item, prob_user=self.prob_user)
        _validate.at_most(1, prob_item=self.prob_item, prob_user=self.prob_user)
        _validate.integer(items=self.items, users_spanned=self.users_spanned, steps=self.steps)
        _validate.at_least(1, items=self.items, users_spanned=self.users_spanned, steps=self.steps)
        _validate.one_of(("sum", "user"), noise=self.noise)
        cap = _validate.not_none(items_per_user=self.items_per_user)
        _validate.integer(**cap)
        _validate.at_least(1, **cap)

    @property
    def most_users(self) -> int:
        """The most users at which the subject can have an item."""
        return min(self.users_spanned, self.items)

    @property
    def most_at_user(self) -> int:
        """The most items that the subject can have at one user."""
        return self.items if self.items_per_user is None else min(self.items_per_user, self.items)

    @property
    def most_items(self) -> int:
        """The most items that the subject can have in all, by all its caps."""
        return min(self.items, self.most_users * self.most_at_user)

    @property
    def neighbors(self) -> Neighbors:
        """Always ADD_REMOVE: a whole subject is there or not."""
        return Neighbors.ADD_REMOVE


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplacedUsers:
    """A sum of users' vectors, each clipped to `clip_norm`, with N(0, std^2 I), where `users` of them change together.

    They are those at which one subject has data, and each may be replaced by any other. In a round with `Poisson` or
    `FixedSize` participation as many of them are in the sum as were drawn.
    """

    std: float
    clip_norm: float
    users: int

    def __post_init__(self) -> None:
        _validate.positive(std=self.std, clip_norm=self.clip_norm)
        _validate.integer(users=self.users)
        _validate.at_least(1, users=self.users)

    @property
    def neighbors(self) -> Neighbors:
        """Always REPLACE_ONE: each of the users may be any other."""
        return Neighbors.REPLACE_ONE
