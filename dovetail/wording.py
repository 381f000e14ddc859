"""Statements in plain words: for whom, how much can change, how sure a guess can become, whom one must trust.

What eps means is said in three ways that must agree: a phrase for its size (`change_in_words`), the odds, and how often
a guess between the two cases can be right if both were equally likely before (`largest_certainty`). Randomized response
meets the last one, so it is the best that can be said.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR

from dovetail.numbers import at_most, round_to
from dovetail.statements import Neighbors, Statement, Trust, Unit, Verdict

__all__ = [
    "CHANGED",
    "DATA",
    "WHOSE",
    "attack_in_words",
    "certainty",
    "change_in_words",
    "guarantee_in_words",
    "largest_certainty",
    "percent",
    "trust_in_words",
    "verdict_in_words",
]

WHOSE = {
    Unit.ITEM: "one record",
    Unit.USER: "one user, including all of that user's data",
    Unit.SUBJECT: "one subject: all data about one person, at any number of users",
}
DATA = {Unit.ITEM: "that record", Unit.USER: "that user's data", Unit.SUBJECT: "that person's data"}
CHANGED = {Neighbors.REPLACE_ONE: "is replaced by any other", Neighbors.ADD_REMOVE: "is added or removed"}

_ONES = {Unit.ITEM: "one record", Unit.USER: "one user's data", Unit.SUBJECT: "one person's data"}
_WHETHER = {Neighbors.REPLACE_ONE: "was exchanged for any other", Neighbors.ADD_REMOVE: "was there at all"}
_BANDS = (  # up to which eps, and what then happens to what an adversary sees
    (0.1, "hardly changes"),
    (1.0, "changes little"),
    (3.0, "changes to a limited extent"),
    (10.0, "may change a lot, within a bound"),
    (math.inf, "may change so much that the bound rules out little"),
)
_LARGEST = 700.0  # exp of more is no float


def change_in_words(statement: Statement) -> str:
    """How much what an adversary sees may change, as a verb phrase that fits eps, and delta where it is large."""
    odds = (math.exp(min(statement.eps, _LARGEST)) + statement.delta) / max(1 - statement.delta, 1e-300)
    return next(phrase for most, phrase in _BANDS if math.log(odds) <= most * (1 + 1e-3))


def largest_certainty(statement: Statement) -> float:
    """The largest probability, under this statement, of guessing right which of two equally likely cases it was."""
    return min(1.0, certainty(statement.eps) + statement.delta / (1 + math.exp(min(statement.eps, _LARGEST))))


def certainty(eps: float) -> float:
    """How sure one can become of a case that seemed as likely as the other, where the odds change by e^eps."""
    return 1 / (1 + math.exp(-eps))


def percent(share: float, *, up: bool) -> str:
    """A probability as a percentage with one decimal, rounded up or down; up to 100% is "almost 100%" unless it is 1.

    A share within 1e-11 of a tenth of a percent counts as that tenth.
    """
    value = round_to(100 * share, 12, ROUND_CEILING if up else ROUND_FLOOR)
    tenths = math.ceil(10 * value - 1e-9) if up else math.floor(10 * value + 1e-9)
    if up and tenths >= 1000 and share < 1:
        return "almost 100%"
    return f"{tenths / 10:g}%"


def guarantee_in_words(statement: Statement) -> str:
    """The guarantee in one sentence: the numbers, for whom, and how often a guess can be right."""
    if statement.is_unbounded:
        return f"none for {WHOSE[statement.unit]}: {statement.proof}"
    span = f", over {statement.span}," if statement.span else ""
    return (
        f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP for one {statement.unit.value}: the "
        f"{statement.adversary}{span} can guess {_case_in_words(statement)} with at most "
        f"{percent(largest_certainty(statement), up=True)} certainty (a coin toss: 50%)"
    )


def verdict_in_words(statement: Statement) -> str:
    """Who vouches for the numbers, in a phrase."""
    match statement.verdict:
        case Verdict.REPRODUCIBLE | Verdict.DECLARED_REPRODUCIBLE:
            return f"{statement.verdict.value}: whoever knows the seed can subtract it"
        case Verdict.DECLARED:
            return "as declared: code from outside Dovetail has to do what its author says"
    return statement.verdict.value


def trust_in_words(statement: Statement) -> str:
    """Whom one must trust for the statement to hold, in a sentence."""
    match statement.trust:
        case Trust.CURATOR:
            return "You must trust the curator, who sees every update."
        case Trust.SHUFFLE:
            return "Shufflers are trusted as the assumptions state: only so many may collude with the analyzer."
        case Trust.SHARES:
            return "You must trust one of the aggregators, whichever it is: all others may collude with the analyzer."
        case Trust.LOCAL:
            return "You need not trust anybody."
    return "There is no guarantee, so there is nobody to trust for it."


def attack_in_words(statement: Statement, *, eps: float, delta: float, trials: int = 0) -> str:
    """What an attack achieved and what the statement allows, as certainties that everybody can compare.

    Arguments:
        statement: what the attack is held against, at the attack's delta or a smaller one.
        eps: the lower bound that the attack shows; infinite where no finite eps holds.
        delta: at which it does.
        trials: how many runs were counted; 0 for an exact attack.
    """
    if math.isinf(eps):
        found = "with certainty"
    else:
        found = f"with {'at least ' * bool(trials)}{percent(certainty(eps), up=False)} certainty"
    allowed = (
        "the statement guarantees nothing"
        if statement.is_unbounded
        else f"the statement allows at most {percent(certainty(statement.eps), up=True)}"
    )
    aside = f", not counting outcomes that occur with a probability of at most {at_most(delta)}" if delta > 0 else ""
    return (
        f"In plain words: the best attack that we ran can tell {found} {_case_in_words(statement)} (a coin toss: 50%); "
        f"{allowed}{aside}."
    )


def _case_in_words(statement: Statement) -> str:
    """What an adversary wonders: "whether one user's data was exchanged for any other"."""
    return f"whether {_ONES[statement.unit]} {_WHETHER[statement.neighbors]}"
