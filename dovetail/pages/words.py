"""What pages say of a statement: in sentences that a reviewer can sign, with what it does not say.

A `StatementView` is what templates show of one: its verdict in colour and all that it rests on. Numbers have few
characters; bounds are rounded outward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN
from typing import NamedTuple

from dovetail.figures.axes import short_number
from dovetail.numbers import round_to
from dovetail.statements import TUNING_ASSUMPTION, Neighbors, Statement, Trust, Verdict
from dovetail.wording import CHANGED, DATA, WHOSE, change_in_words, largest_certainty, percent, trust_in_words

__all__ = [
    "Badge",
    "StatementView",
    "at_least",
    "at_most",
    "badge",
    "eps_and_delta",
    "largest_power",
    "meaning_of_numbers",
    "not_covered",
    "number",
    "statement_in_sentences",
    "title",
    "trust_in_words",
    "view_of",
    "who_is_protected",
]

_COLLUSION = {
    Trust.SHUFFLE: "more shufflers than the assumptions allow",
    Trust.SHARES: "all aggregators",
}
_FALSE_ALARMS = 0.01  # the false-positive rate for which pages say how often a test can be right
_COLOURS = {
    "certified": "good",
    "claimed, holds": "good",
    "claimed, unproven": "fair",
    "claimed, refuted": "bad",
    "no guarantee": "bad",
}


def number(value: float | None, digits: int = 4, *, rounding: str = ROUND_HALF_EVEN) -> str:
    """A number in few characters, without a trailing zero; a dash for None.

    Arguments:
        digits: how many significant digits are kept.
        rounding: a rounding mode of `decimal`; bounds are rounded outward.
    """
    if value is None:
        return "-"
    value = round_to(value, digits, rounding)
    return short_number(value) if value == 0 or not 1e-3 <= abs(value) < 1e3 else f"{value:g}"


def at_most(value: float) -> str:
    """An upper bound in few characters, rounded up."""
    return number(value, rounding=ROUND_CEILING)


def at_least(value: float) -> str:
    """A lower bound in few characters, rounded down."""
    return number(value, rounding=ROUND_FLOOR)


def eps_and_delta(statement: Statement) -> str:
    """Text like "(0.9, 1e-05)-DP" with both numbers rounded up; "no guarantee" where eps is infinite."""
    if statement.is_unbounded:
        return "no guarantee"
    return f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP"


def title(statement: Statement) -> str:
    """The heading of a run's page: what is promised, and to whom."""
    if statement.is_unbounded:
        return "No guarantee"
    return f"{eps_and_delta(statement)} for one {statement.unit.value}"


def who_is_protected(statement: Statement) -> str:
    """Who is protected, and between which two cases one cannot tell: "one record; that record is replaced ..."."""
    return f"{WHOSE[statement.unit]}; {DATA[statement.unit]} {CHANGED[statement.neighbors]}"


def statement_in_sentences(statement: Statement) -> list[str]:
    """The statement in full, a sentence or two each: who is protected, how much, trusting whom, by which theorem.

    The first two are the page's lead. There are two if nothing is guaranteed: that, and the reason.
    """
    span = f" over {statement.span}" if statement.span else ""
    if statement.is_unbounded:
        return [
            f"There is no guarantee for {WHOSE[statement.unit]}, against the {statement.adversary}{span}.",
            f"Reason: {statement.proof}.",
        ]
    count = len(statement.assumptions)
    holds = f"It holds under the {count} assumptions below." if count > 1 else "It holds under the assumption below."
    reproducible = statement.verdict in (Verdict.REPRODUCIBLE, Verdict.DECLARED_REPRODUCIBLE)
    protects = f"This training protects {WHOSE[statement.unit]}."
    if reproducible:
        protects = (
            f"This was a simulation with noise from a known seed: whoever knows the seed can subtract the noise. "
            f"With secret noise it would protect {WHOSE[statement.unit]}."
        )
    paragraphs = [
        protects,
        f"If {DATA[statement.unit]} {CHANGED[statement.neighbors]}, what the {statement.adversary} sees{span} "
        f"{change_in_words(statement)}: it is differentially private with eps = {at_most(statement.eps)} and "
        f"delta = {at_most(statement.delta)}.",
        trust_in_words(statement),
        f"Proof: {statement.proof}." + (f" {holds}" if count else ""),
    ]
    if statement.per_user:
        low, high = min(statement.per_user), max(statement.per_user)
        paragraphs.insert(
            2,
            f"Each of the {len(statement.per_user):,} users has an eps of its own, from {at_most(low)} to "
            f"{at_most(high)}; the eps above is the largest.",
        )
    return paragraphs


def meaning_of_numbers(statement: Statement) -> list[str]:
    """What eps and delta mean for an adversary, a paragraph each: a guess, odds, a test; none if unbounded."""
    if statement.is_unbounded:
        return []
    factor = math.exp(min(statement.eps, 700.0))
    odds = at_most(factor) if statement.eps < 700 else "more than 1e304"
    return [
        f"In plain words: a guess between the two cases, both equally likely before, is right at most "
        f"{percent(largest_certainty(statement), up=True)} of the time; a coin toss is right 50% of the time.",
        f"What eps means: whatever the adversary knew before, its odds between the two cases change by a factor of at "
        f"most e^eps = {odds}"
        + (
            f"; delta allows for exceptions: the probability of any event in one case exceeds {odds} times its "
            f"probability in the other by at most {at_most(statement.delta)}."
            if statement.delta > 0
            else ", without exception."
        ),
        f"A test with a false-positive rate of {_FALSE_ALARMS:.0%} has a true-positive rate of at most "
        f"{_percent(largest_power(statement))}.",
    ]


def largest_power(statement: Statement, false_alarms: float = _FALSE_ALARMS) -> float:
    """The largest true-positive rate that a test which tells two neighbours apart can have under this statement.

    Arguments:
        false_alarms: the test's false-positive rate.
    """
    by_alarm = math.exp(min(statement.eps, 700.0)) * false_alarms + statement.delta
    by_miss = 1 - math.exp(-statement.eps) * max(0.0, 1 - false_alarms - statement.delta)
    return min(1.0, by_alarm, by_miss)


def _percent(rate: float) -> str:
    """A rate as a percentage with two decimals, rounded up."""
    return f"{math.ceil(rate * 1e4 - 1e-9) / 100:.4g}%"


def not_covered(
    statement: Statement,
    units: Mapping[str, Statement],
    *,
    local: Statement | None,
    shuffler: Statement | None,
    diagnostics: bool,
    private_test: bool = False,
) -> list[str]:
    """What a reader might think the statement covers, although it does not.

    Arguments:
        units: what is stated of other units, by their name.
        local: what remains of the guarantee if nobody is trusted.
        shuffler: what the shuffler learns from the reports.
        diagnostics: whether figures of raw updates lie beside the report.
        private_test: whether the statement covers the people whose records the scores are of.
    """
    limits = [f"Anybody who sees more than the {statement.adversary}."]
    if statement.verdict in (Verdict.REPRODUCIBLE, Verdict.DECLARED_REPRODUCIBLE):
        limits.append("Anybody who knows the seed, which is in config.toml and in the config below.")
    if statement.verdict in (Verdict.DECLARED, Verdict.DECLARED_REPRODUCIBLE):
        limits.append("Code from outside Dovetail that does not do what it declares: only its author has checked that.")
    if statement.trust is Trust.CURATOR:
        limits.append("The curator itself: it sees every update in the clear.")
    if local is not None and statement.trust in _COLLUSION:
        left = (
            f"no guarantee remains ({local.proof})"
            if local.is_unbounded
            else f"only the local guarantee of {eps_and_delta(local)} remains"
        )
        limits.append(f"Collusion of the analyzer with {_COLLUSION[statement.trust]}: then {left}.")
    if shuffler is not None:
        tells = (
            f"there is no guarantee about what it sees ({shuffler.proof})"
            if shuffler.is_unbounded
            else f"what it sees of the reports is {eps_and_delta(shuffler)}"
        )
        limits.append(f"The shuffler's own view: it knows who takes part and when; {tells}.")
    for name, other in units.items():
        if other.is_unbounded and name != statement.unit.value:
            limits.append(f"One {name} instead of one {statement.unit.value}: {other.proof}.")
    if statement.neighbors is Neighbors.REPLACE_ONE:
        limits.append("Whether somebody took part at all: the two cases differ in the data, not in who takes part.")
    if TUNING_ASSUMPTION in statement.assumptions:
        limits.append("Choices made by looking at the private data, such as learning rate, model, or number of rounds.")
    limits.append("Other uses of the same data: their privacy costs add up.")
    limits.append("Side channels: timing, memory, network traffic, and anybody with access to the machine.")
    if not private_test:
        limits.append("The test data, on which the accuracy was measured: it is assumed to be public.")
    if diagnostics:
        limits.append(
            "diagnostics.jsonl and diagnostics.html, which are computed from raw updates: do not release them."
        )
    return limits


class Badge(NamedTuple):
    """A verdict: its word, and its colour: "good" (green), "fair" or "bad"; never green in doubt."""

    word: str
    colour: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatementView:
    """One statement for templates, all of it as text.

    `nothing` says that there is no guarantee; `key` and `where` are the theorem's, `links` its names and addresses.
    `new` are the assumptions that the page has not listed yet, and `premises` the statements that this one rests on.
    """

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
    premises: tuple[StatementView, ...]

    @property
    def scope(self) -> str:
        """For whom, between which cases, how long: "one user, replace-one, 60 rounds"."""
        return ", ".join(filter(None, (f"one {self.unit}", self.neighbors, self.span)))


def badge(verdict: str, *, doubtful: bool = False) -> Badge:
    """The badge of a verdict.

    Arguments:
        verdict: the value of a `Verdict`, or "no guarantee".
        doubtful: whether there are warnings, so that it must not be green.
    """
    colour = _COLOURS.get(verdict, "fair")
    return Badge(verdict.removeprefix("claimed, "), "fair" if doubtful and colour == "good" else colour)


def view_of(statement: Statement, *, assumed: tuple[str, ...] = ()) -> StatementView:
    """What templates show of a statement and of its proof.

    Arguments:
        assumed: assumptions that the page has listed already; they are not repeated under premises.
    """
    nothing = statement.is_unbounded
    return StatementView(
        nothing=nothing,
        numbers=eps_and_delta(statement),
        badge=badge("no guarantee" if nothing else statement.verdict.value, doubtful=bool(statement.warnings)),
        unit=statement.unit.value,
        span=statement.span,
        adversary=statement.adversary,
        neighbors=statement.neighbors.value,
        key=statement.proof.key,
        where=str(statement.proof),
        links=tuple(
            (theorem.key, theorem.url)
            for theorem in statement.proof.theorems
            if theorem.url and theorem.url.startswith("https://")
        ),
        assumptions=statement.assumptions,
        new=() if nothing else tuple(text for text in statement.assumptions if text not in assumed),
        premises=tuple(view_of(premise, assumed=assumed + statement.assumptions) for premise in statement.premises),
    )
