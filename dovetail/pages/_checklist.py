"""What has to be true for the statement to hold, and who has to make sure of it: a list to tick off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dovetail.statements import TUNING_ASSUMPTION, Neighbors, Statement, Unit

__all__ = ["Item", "items", "owner_of", "tuning"]

_RULES = (  # the first that fits
    ("enrolment operator", ("whoever enrols users", "public roster", "place in the list of budgets")),
    ("aggregator operators", ("aggregators is honest", "by the aggregators", "aggregators draw", "aggregator")),
    (
        "shuffler operators",
        ("shuffler", "every share of every coordinate is permuted", "a round counts only users whose shares"),
    ),
    (
        "client vendor",
        ("users draw", "every user repeats", "uploads either all", "a user counts", "drop out", "AES-128", "a client"),
    ),
    ("curator", ("the curator", "the server adds", "each record joins", "records of a subject are used")),
    ("operator of the training", ("whoever runs the simulation", "floating-point", "noise key", "the seed")),
)
_ANALYST = "analyst"


class Item(NamedTuple):
    """One box to tick: what must hold, and who makes sure of it."""

    text: str
    owner: str


def owner_of(assumption: str) -> str:
    """Who has to make sure of it; the analyst of whatever is about data and choices."""
    return next((owner for owner, words in _RULES if any(word in assumption for word in words)), _ANALYST)


def items(statement: Statement, origin: Mapping[str, Any]) -> list[Item]:
    """Every assumption of the statement, and what releasing this page takes for granted besides."""
    found = [Item(text, owner_of(text)) for text in statement.assumptions]
    if origin:
        hidden = ["records"] if statement.unit is not Unit.ITEM or statement.neighbors is Neighbors.ADD_REMOVE else []
        hidden += ["users"] if statement.neighbors is Neighbors.ADD_REMOVE else []
        if hidden:
            numbers = f"the number{'s' * (len(hidden) > 1)} of {' and '.join(hidden)} on this page"
            found.append(
                Item(
                    f"{numbers} may be public: the guarantee does not hide {'them' * (len(hidden) > 1) or 'it'}",
                    _ANALYST,
                )
            )
        if "hmac_sha256" in (origin.get("data") or {}):
            found.append(Item("the key of the data's fingerprint is kept, and not handed out", "owner of the data"))
    found.append(Item("other releases from the same data are added to the privacy budget", "owner of the data"))
    return found


def tuning(statement: Statement, summary: Mapping[str, Any]) -> str:
    """What it cost to choose the settings."""
    told = summary.get("tuning")
    if told is None:
        if TUNING_ASSUMPTION in statement.assumptions:
            return (
                "Nothing was spent on tuning: settings are assumed to be chosen without the private data. If they were "
                "chosen by looking at them, that cost is not in eps."
            )
        return "Nothing is assumed of how settings were chosen."
    trials = told.get("trials")
    count = f"{len(trials)} trials" if trials else f"{told['mean_trials']:g} trials on average, the number kept secret"
    return (
        f"Settings were chosen by {told['by']} among {count}, by {told['score']} on {told['public']}, which are taken "
        "to be public. The eps of this page covers all trials, not the chosen one alone."
    )
