"""Reports that hide in a crowd: what a client sends (`Report`), and the ways in which reports are mixed.

`Shuffled` is one report per user and coordinate; `PaddedBernoulli` and `PaddedTopk` are FLAME's protocols with dummies;
`Personalized` has a budget for every user. All are stated for users that are replaced.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

from dovetail import _validate
from dovetail.statements import Neighbors

__all__ = ["AmongUsers", "Crowd", "PaddedBernoulli", "PaddedTopk", "Personalized", "Report", "Shuffled"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One local randomizer in privacy terms: eps_local, and what kind it is.

    `generic` is any eps_local-LDP randomizer, `laplace` Laplace noise on inputs in [0, 1], `rr` randomized response
    among `levels` levels. `cap` reports are uniform on a set of outcomes, a cap of the sphere, or on the rest of them;
    the set depends on the input, its share of all outcomes, `cap_mass`, does not (PrivUnit).
    """

    kind: Literal["generic", "laplace", "rr", "cap"]
    eps_local: float
    levels: int = 2
    cap_mass: float | None = None

    def __post_init__(self) -> None:
        _validate.one_of(("generic", "laplace", "rr", "cap"), kind=self.kind)
        _validate.positive(eps_local=self.eps_local)
        _validate.integer(levels=self.levels)
        _validate.at_least(2, levels=self.levels)
        if (self.cap_mass is not None) != (self.kind == "cap"):
            raise ValueError(
                f"expected a cap_mass for kind='cap' and for no other, got kind={self.kind!r}, cap_mass={self.cap_mass}"
            )
        _validate.positive(**_validate.not_none(cap_mass=self.cap_mass))
        _validate.at_most(0.5, **_validate.not_none(cap_mass=self.cap_mass))

    @property
    def mass(self) -> float:
        """Which part of all outcomes an input makes likely: one level of several, or the cap."""
        return 1 / self.levels if self.cap_mass is None else self.cap_mass

    @property
    def gamma(self) -> float:
        """Blanket probability: with it a report is a draw that does not depend on its sender's input."""
        match self.kind:
            case "laplace":
                return math.exp(-self.eps_local / 2)
            case "rr" | "cap":
                return 1 / (self.mass * math.exp(self.eps_local) + 1 - self.mass)
        return math.exp(-self.eps_local)


class _ByReplacement:
    """Stated for users that are replaced: a user more would show in the number of messages."""

    @property
    def neighbors(self) -> Neighbors:
        """Always REPLACE_ONE."""
        return Neighbors.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class AmongUsers(_ByReplacement):
    """A crowd to hide in, some of which may be fake or collude with the adversary."""

    num_users: int  # all users of the round, the victim and the colluders included
    colluders: int = 0  # of these, the ones that are fake or collude

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, colluders=self.colluders)
        _validate.at_least(2, num_users=self.num_users)
        _validate.non_negative(colluders=self.colluders)
        if self.honest < 2:
            raise ValueError(f"expected at least 2 honest users, got {self.honest} of num_users={self.num_users}")

    @property
    def honest(self) -> int:
        """Users that neither collude nor are fake."""
        return self.num_users - self.colluders


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Crowd(AmongUsers):
    """Reports on `coordinates` coordinates, each shuffled on its own."""

    coordinates: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(coordinates=self.coordinates)
        _validate.at_least(1, coordinates=self.coordinates)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffled(_Crowd):
    """Every user sends one report per coordinate; each coordinate is shuffled independently and uniformly."""

    report: Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Padded(_Crowd):
    """Each coordinate's reports are padded with dummies up to `pad_to`; a surplus is dropped uniformly.

    Dummies are drawn from the blanket, the part of a report's law that is the same for every input. `num_users` is the
    most that a round admits.
    """

    report: Report
    pad_to: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(pad_to=self.pad_to)
        if self.pad_to - self.colluders < 2:
            raise ValueError(
                f"expected pad_to - colluders >= 2, got pad_to={self.pad_to} and colluders={self.colluders}"
            )


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
    """SS-Topk: a user reports its `top` largest coordinates, and sends dummies on `decoys` others."""

    top: int
    decoys: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(top=self.top, decoys=self.decoys)
        _validate.in_interval(1, self.coordinates, top=self.top)
        _validate.in_interval(0, self.coordinates - self.top, decoys=self.decoys)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Personalized(_ByReplacement):
    """Every user has a public budget of its own for each coordinate; coordinates are shuffled independently.

    `clip_laplace` is Clip-Laplace whose reports stay in the box of its inputs (A = C). With a `threshold`, a share of
    half the box's width, reports closer to its centre are replaced by draws around the centre at the smallest budget.
    """

    kind: Literal["clip_laplace", "laplace", "rr"]
    eps_locals: tuple[float, ...]
    coordinates: int = 1
    levels: int = 2
    colluders: int = 0
    threshold: float = 0.0

    def __post_init__(self) -> None:
        _validate.one_of(("clip_laplace", "laplace", "rr"), kind=self.kind)
        _validate.in_interval(0, 1, threshold=self.threshold)
        if self.threshold and (self.kind != "clip_laplace" or self.threshold == 1):
            raise ValueError(
                f"expected a threshold < 1 for clip_laplace, 0 for others, got {self.threshold} for kind={self.kind!r}"
            )
        _validate.integer(coordinates=self.coordinates, levels=self.levels, colluders=self.colluders)
        _validate.at_least(1, coordinates=self.coordinates)
        _validate.at_least(2, levels=self.levels)
        if not self.eps_locals or not min(self.eps_locals) > 0 or not math.isfinite(sum(self.eps_locals)):
            raise ValueError(f"expected every eps_local > 0, got {min(self.eps_locals, default=None)}")
        if len(self.eps_locals) - self.colluders < 2:
            raise ValueError(
                f"expected at least 2 honest users, got {len(self.eps_locals)} users with colluders={self.colluders}"
            )

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        return self._hash  # kept: of a million budgets it takes a while


Crowd = Shuffled | PaddedBernoulli | PaddedTopk
