"""Why a number holds: theorems, what they spend of delta, and where to read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from dovetail.numbers import at_most

__all__ = ["Proof", "Spent", "Theorem"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theorem:
    """A published or proven result, and where to find it."""

    key: str  # short, for tables and for `references.entries_of_theorem`: "BW18.thm8"
    where: str  # a citation in words
    url: str | None = None

    @property
    def proof(self) -> Proof:
        """The proof that needs this theorem alone."""
        return Proof(theorems=(self,))


class Spent(NamedTuple):
    """A part of delta that a proof spends beside the noise, and what it pays for."""

    delta: float
    on: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """Why a number holds: the theorems in the order of their use, what they spend of delta, and remarks.

    `missing` is why there is none: nothing is proven, and no number is promised.
    """

    theorems: tuple[Theorem, ...] = ()
    spent: tuple[Spent, ...] = ()
    notes: tuple[str, ...] = ()
    missing: str | None = None

    @property
    def key(self) -> str:
        """A short name for tables: the keys of its theorems, joined by +; "none" without any."""
        return "+".join(theorem.key for theorem in self.theorems) or "none"

    @property
    def url(self) -> str | None:
        """Where to read the first of the theorems that can be read somewhere."""
        return next((theorem.url for theorem in self.theorems if theorem.url), None)

    def __str__(self) -> str:
        if self.missing is not None:
            return self.missing
        spent = (f"{at_most(part.delta, 3)} of delta covers {part.on}" for part in self.spent)
        return "; ".join((*(theorem.where for theorem in self.theorems), *self.notes, *spent))

    def then(self, *theorems: Theorem) -> Proof:
        """This proof with these theorems added at its end, even if it names them already."""
        return dataclasses.replace(self, theorems=self.theorems + theorems)

    def after(self, *theorems: Theorem) -> Proof:
        """This proof with these theorems put before its own; what it names already is not added again."""
        first = tuple(theorem for theorem in dict.fromkeys(theorems) if theorem not in self.theorems)
        return dataclasses.replace(self, theorems=first + self.theorems)

    def with_notes(self, *notes: str) -> Proof:
        """This proof with these remarks added after its own."""
        return dataclasses.replace(self, notes=self.notes + notes)

    def with_spent(self, *parts: Spent) -> Proof:
        """This proof with these parts of delta added to what it spends; parts of 0 are left out."""
        return dataclasses.replace(self, spent=self.spent + tuple(part for part in parts if part.delta))

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON, which `from_json` reads back."""
        return {
            "theorems": [dataclasses.asdict(theorem) for theorem in self.theorems],
            "spent": [part._asdict() for part in self.spent],
            "notes": list(self.notes),
            "missing": self.missing,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Proof:
        """The proof that `to_json` wrote."""
        return cls(
            theorems=tuple(Theorem(**theorem) for theorem in data["theorems"]),
            spent=tuple(Spent(**part) for part in data["spent"]),
            notes=tuple(data["notes"]),
            missing=data["missing"],
        )
