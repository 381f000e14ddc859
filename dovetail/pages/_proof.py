"""Statements as pages show them: in words, with a verdict in colour, and with all that they rest on."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from dovetail.pages import _words
from dovetail.statements import Statement

__all__ = ["Badge", "Shown", "badge", "shown"]

_COLOURS = {
    "certified": "good",
    "claimed, holds": "good",
    "claimed, unproven": "fair",
    "claimed, refuted": "bad",
    "no guarantee": "bad",
}


class Badge(NamedTuple):
    """A verdict: its word, and its colour, which is never green in doubt."""

    word: str
    colour: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """One statement for templates; `new` are the assumptions that what it is a premise of has not made already."""

    nothing: bool
    numbers: str
    badge: Badge
    unit: str
    span: str
    adversary: str
    neighbors: str
    key: str
    where: str
    links: tuple[tuple[str, str], ...]
    assumptions: tuple[str, ...]
    new: tuple[str, ...]
    premises: tuple[Shown, ...]

    @property
    def scope(self) -> str:
        """For whom, between which cases, how long."""
        return ", ".join(filter(None, (f"one {self.unit}", self.neighbors, self.span)))


def badge(verdict: str, *, doubtful: bool = False) -> Badge:
    """The badge of a verdict."""
    colour = _COLOURS.get(verdict, "fair")
    return Badge(verdict.removeprefix("claimed, "), "fair" if doubtful and colour == "good" else colour)


def shown(statement: Statement, *, said: tuple[str, ...] = ()) -> Shown:
    """A statement and its proof, where the assumptions `said` have been made already."""
    nothing = statement.unbounded
    return Shown(
        nothing=nothing,
        numbers=_words.numbers(statement),
        badge=badge("no guarantee" if nothing else statement.verdict.value, doubtful=bool(statement.warnings)),
        unit=statement.unit.value,
        span=statement.span,
        adversary=statement.adversary,
        neighbors=statement.neighbors.value,
        key=statement.proof.key,
        where=str(statement.proof),
        links=tuple(
            (one.key, one.url) for one in statement.proof.theorems if one.url and one.url.startswith("https://")
        ),
        assumptions=statement.assumptions,
        new=() if nothing else tuple(text for text in statement.assumptions if text not in said),
        premises=tuple(shown(premise, said=said + statement.assumptions) for premise in statement.premises),
    )
