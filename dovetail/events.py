"""What was run, in privacy terms: plain data that protocols emit and accountants read.

A `Round` is one release: a mechanism (noise, a shuffled round, a sum by shares or over a subject's items) and who took
part in it (`Everyone`, `Disjoint`, `FixedSize`, `Poisson`). Sensitivities are those of the event's own neighbouring
relation, never of a convention that an accountant may or may not share. No event holds user data.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from dovetail import _validate
from dovetail.statements import Neighbors, Scope

__all__ = [
    "Crowd",
    "Disjoint",
    "Everyone",
    "FixedSize",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NonPrivate",
    "PaddedBernoulli",
    "PaddedTopk",
    "Participation",
    "Personalized",
    "Poisson",
    "Report",
    "Round",
    "SampledSubject",
    "Shuffled",
    "SplitAndMix",
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
class Report:
    """One local randomizer in privacy terms: `generic` stands for any eps_local-LDP randomizer."""

    kind: Literal["generic", "laplace", "rr"]
    eps_local: float
    levels: int = 2

    def __post_init__(self) -> None:
        _validate.one_of(("generic", "laplace", "rr"), kind=self.kind)
        _validate.positive(eps_local=self.eps_local)
        _validate.integer(levels=self.levels)
        _validate.at_least(2, levels=self.levels)

    @property
    def gamma(self) -> float:
        """Blanket probability: the share of reports that say nothing about their sender."""
        match self.kind:
            case "laplace":
                return math.exp(-self.eps_local / 2)
            case "rr":
                return self.levels / (math.exp(self.eps_local) + self.levels - 1)
        return math.exp(-self.eps_local)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Crowd:
    """What every shuffled mechanism has: a crowd, some of which may be fake or collude with the adversary."""

    num_users: int
    colluders: int = 0
    coordinates: int = 1

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, colluders=self.colluders, coordinates=self.coordinates)
        _validate.at_least(2, num_users=self.num_users)
        _validate.at_least(1, coordinates=self.coordinates)
        _validate.non_negative(colluders=self.colluders)
        if self.honest < 2:
            raise ValueError(f"expected at least 2 honest users, got {self.honest} of num_users={self.num_users}")

    @property
    def honest(self) -> int:
        """Users that neither collude nor are fake."""
        return self.num_users - self.colluders

    @property
    def neighbors(self) -> Neighbors:
        """Shuffled mechanisms are stated for replacement."""
        return Neighbors.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffled(_Crowd):
    """Every user sends one report a coordinate; each coordinate is shuffled independently and uniformly."""

    report: Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Padded(_Crowd):
    """Reports of a coordinate are padded with blanket draws up to `pad_to`; a surplus is dropped uniformly."""

    report: Report
    pad_to: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(pad_to=self.pad_to)
        if self.pad_to - self.colluders < 2:
            raise ValueError(f"expected pad_to - colluders >= 2, got pad_to={self.pad_to}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedBernoulli(_Padded):
    """SS-Double, repaired: a user reports each coordinate independently with probability `inclusion`."""

    inclusion: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.positive(inclusion=self.inclusion)
        _validate.at_most(1, inclusion=self.inclusion)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedTopk(_Padded):
    """SS-Topk: a user reports its `top` largest coordinates and blanket draws on `decoys` others."""

    top: int
    decoys: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(top=self.top, decoys=self.decoys)
        _validate.in_interval(1, self.coordinates, top=self.top)
        _validate.in_interval(0, self.coordinates - self.top, decoys=self.decoys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personalized:
    """Every user has a public budget of its own for each coordinate; coordinates are shuffled independently.

    `clip_laplace` is Clip-Laplace whose reports stay in the box of its inputs (A = C).
    """

    kind: Literal["clip_laplace", "laplace", "rr"]
    eps_locals: tuple[float, ...]
    coordinates: int = 1
    levels: int = 2
    colluders: int = 0

    def __post_init__(self) -> None:
        _validate.one_of(("clip_laplace", "laplace", "rr"), kind=self.kind)
        _validate.integer(coordinates=self.coordinates, levels=self.levels, colluders=self.colluders)
        _validate.at_least(1, coordinates=self.coordinates)
        _validate.at_least(2, levels=self.levels)
        if not self.eps_locals or not min(self.eps_locals) > 0 or not math.isfinite(sum(self.eps_locals)):
            raise ValueError(f"expected every eps_local > 0, got {min(self.eps_locals, default=None)}")
        if len(self.eps_locals) - self.colluders < 2:
            raise ValueError(f"expected at least 2 honest users, got {len(self.eps_locals) - self.colluders}")

    @property
    def neighbors(self) -> Neighbors:
        """Shuffled mechanisms are stated for replacement."""
        return Neighbors.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAndMix:
    """One sum of vectors by split-and-mix, in privacy terms.

    `num_users` is the enforced minimum of uploads, of which `colluders` are the adversary's. `noise_variance` is that
    of the honest clients' noise on a coordinate of the scaled integer sum. `colluding_slots` of the `shares` slots are
    handled by shufflers that collude with the analyzer. `rounding_tail` is that of `rounded_norm`.
    """

    num_users: int
    coordinates: int
    clip_norm: float
    scale: float
    noise_variance: float
    modulus: int
    shares: int
    colluders: int = 0
    colluding_slots: int = 0
    rounding_tail: float = 1e-3

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, coordinates=self.coordinates, modulus=self.modulus)
        _validate.integer(shares=self.shares, colluders=self.colluders, colluding_slots=self.colluding_slots)
        _validate.at_least(1, coordinates=self.coordinates, shares=self.shares)
        _validate.at_least(2, num_users=self.num_users, modulus=self.modulus)
        _validate.non_negative(colluders=self.colluders, colluding_slots=self.colluding_slots)
        _validate.positive(clip_norm=self.clip_norm, scale=self.scale, noise_variance=self.noise_variance)
        _validate.in_open_interval(0, 1, rounding_tail=self.rounding_tail)
        if self.honest < 2:
            raise ValueError(f"expected at least 2 honest users, got {self.honest} of num_users={self.num_users}")

    @property
    def honest(self) -> int:
        """Users that neither collude nor are fake."""
        return self.num_users - self.colluders

    @property
    def slots(self) -> int:
        """Share slots whose permutation the analyzer does not know."""
        return max(0, self.shares - self.colluding_slots)

    @property
    def neighbors(self) -> Neighbors:
        """Shuffled mechanisms are stated for replacement."""
        return Neighbors.REPLACE_ONE


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
        if self.items_per_user is not None:
            _validate.integer(items_per_user=self.items_per_user)
            _validate.at_least(1, items_per_user=self.items_per_user)

    @property
    def most_users(self) -> int:
        """Users at which the subject can have an item."""
        return min(self.users_spanned, self.items)

    @property
    def most_at_user(self) -> int:
        """Items that the subject can have at one user."""
        return self.items if self.items_per_user is None else min(self.items_per_user, self.items)

    @property
    def most_items(self) -> int:
        """Items that the subject can have in all, by all its caps."""
        return min(self.items, self.most_users * self.most_at_user)

    @property
    def neighbors(self) -> Neighbors:
        """Subjects are added or removed."""
        return Neighbors.ADD_REMOVE


Crowd = Shuffled | PaddedBernoulli | PaddedTopk
Mechanism = Gaussian | Laplace | NonPrivate | Crowd | Personalized | SplitAndMix | SampledSubject


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
