"""Who sees what: the parties of each model of trust in the order in which data flow, as in docs/threat-model.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dovetail.pages import _words
from dovetail.statements import Statement, Trust

__all__ = ["Party", "exposure", "parties"]

_USERS = "their own records and updates, and every released model"
_FEW = "to follow the protocol; the checklist says how many may be fake or collude"
_TO_USERS = {
    Trust.CURATOR: "with nothing: the curator clips what they send",
    Trust.LOCAL: "with their own noise, which protects each of them alone",
    Trust.SHUFFLE: _FEW,
    Trust.SHARES: _FEW,
    Trust.NONE: "with nothing",
}
_MODELS = "every released model, the statement, and how many users each round had"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Party:
    """One box of the picture: what it sees, what it must be trusted with, and what holds against it."""

    name: str
    sees: str
    trusted: str
    holds: str


def parties(
    statement: Statement, protocol: Mapping[str, Any], *, local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    """Users first, the public last; between them whoever the model of trust has."""
    certified = _words.numbers(statement)
    users = Party(
        name="Users", sees=_USERS, trusted=_TO_USERS[statement.trust], holds=f"about other users: {certified}"
    )
    public = Party(name="Public", sees=_MODELS, trusted="with nothing", holds=certified)
    between = {
        Trust.CURATOR: _curator,
        Trust.LOCAL: _server,
        Trust.SHUFFLE: _shuffled,
        Trust.SHARES: _shared,
        Trust.NONE: _nobody,
    }[statement.trust]
    return [users, *between(statement, protocol, local, shuffler), public]


def _curator(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [
        Party(
            name="Curator",
            sees="every user's update in the clear, and whose it is",
            trusted="to clip, to add the noise, to keep the updates to itself and to release the models alone",
            holds="no guarantee",
        )
    ]


def _server(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [
        Party(
            name="Server",
            sees="every user's report, with the noise that the user has added, and whose it is",
            trusted="with nothing",
            holds=_words.numbers(statement),
        )
    ]


def _shuffled(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    many = protocol.get("shufflers")
    follows = "one that follows the protocol" if many else "if it follows the protocol"
    kept = "" if shuffler is None else f"{follows}: {_words.numbers(shuffler)}"
    broken = "all of them together" if many else "if it does not, or colludes with the analyzer"
    dishonest = "" if local is None else f"{broken}: {_words.numbers(local)}"
    first = Party(
        name=f"{many} shufflers" if many else "Shuffler",
        sees="who uploads and when; sealed messages" + (", of every value some of the shares" if many else ""),
        trusted="to permute, to enforce the minimum number of users, not to collude beyond what the checklist allows",
        holds="; ".join(filter(None, (kept, dishonest))) or "not stated",
    )
    second = Party(
        name="Analyzer",
        sees="all messages in random order, without names; how many users a round had",
        trusted="not to collude with a shuffler beyond what the checklist allows",
        holds=_words.numbers(statement),
    )
    return [first, second]


def _shared(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    together = "" if local is None else f"; all of them with the analyzer: {_words.numbers(local)}"
    first = Party(
        name=f"{protocol['aggregators']} aggregators" if protocol.get("aggregators") else "Aggregators",
        sees="who uploads and when; of every value one share each, which alone looks random",
        trusted="one of them, whichever it is: not to collude, to add up every user once, and to forget the shares",
        holds=f"all but one of them with the analyzer: {_words.numbers(statement)}{together}",
    )
    second = Party(
        name="Analyzer",
        sees="the sum over all users, noise included; how many users a round had",
        trusted="with nothing, as long as one aggregator is honest",
        holds=_words.numbers(statement),
    )
    return [first, second]


def _nobody(
    statement: Statement, protocol: Mapping[str, Any], local: Statement | None, shuffler: Statement | None
) -> list[Party]:
    return [Party(name="Server", sees="every user's update", trusted="with everything", holds="no guarantee")]


def exposure(statement: Statement, setting: str | None) -> list[str]:
    """What was at risk before any noise was added: where raw data were collected."""
    if setting == "simulation":
        first = (
            "This was a simulation: the raw data of all users were collected on one machine. Whoever could read that "
            "machine, its backups or its memory could read them, and no noise protects them there."
        )
    else:
        first = "Raw records stay with the users, who compute their updates themselves."
    deployed = {
        Trust.CURATOR: "Deployed, the curator would collect every user's update in the clear, but no raw records.",
        Trust.LOCAL: "Deployed, only reports that users have randomized would leave their devices.",
        Trust.SHUFFLE: "Deployed, only sealed reports would leave the users' devices.",
        Trust.SHARES: "Deployed, only shares would leave the users' devices, each of them random by itself.",
        Trust.NONE: "Deployed, a server would collect every user's update in the clear.",
    }[statement.trust]
    return [first, deployed]
