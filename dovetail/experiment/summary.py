"""A result's guarantee in a few lines for a terminal, and in full for whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dovetail import wording
from dovetail.guarantee import Quote
from dovetail.numbers import at_most
from dovetail.statements import Statement, Trust, Unit

__all__ = ["explain", "guarantee_lines"]


def guarantee_lines(quote: Quote, units: Mapping[Unit, Statement], *, ask: str) -> list[str]:
    """What is guaranteed, who vouches for it, whom one must trust, and what other units have: a line each.

    Arguments:
        quote: the statements of the run.
        units: what is stated for an item, a user and a subject.
        ask: what shows all assumptions: "--explain".
    """
    statement = quote.certified
    lines = [
        f"guarantee: {wording.guarantee_in_words(statement)}",
        *(f"warning: {text}" for text in statement.warnings),
    ]
    if statement.is_unbounded:
        return lines
    count = len(statement.assumptions)
    held = f" if {count} assumption{'s hold' if count != 1 else ' holds'}: {ask} lists them" if count else ""
    lines.append(f"verdict: {wording.verdict_in_words(statement)}{held}")
    trusted = wording.trust_in_words(statement)
    if statement.trust is not Trust.LOCAL:
        trusted += f" If nobody can be trusted: {_numbers_in_short(quote.local)}."
    lines.append(f"trust: {trusted}")
    others = [
        f"one {unit.value}: {_numbers_in_short(other)}" for unit, other in units.items() if unit is not statement.unit
    ]
    return [*lines, f"others: {'; '.join(others)}"]


def _numbers_in_short(statement: Statement) -> str:
    """Numbers alone, or that there are none."""
    if statement.is_unbounded:
        return "no guarantee"
    return f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP"


def explain(quote: Quote, units: Mapping[Unit, Statement]) -> str:
    """Every statement of a run in full: theorems, assumptions, premises, other units, and what remains without trust.

    Arguments: as of `guarantee_lines`.
    """
    return "\n".join(_explanation_lines(quote, units))


def _explanation_lines(quote: Quote, units: Mapping[Unit, Statement]) -> Iterator[str]:
    yield str(quote.certified)
    known = quote.certified.assumptions
    for unit, statement in units.items():
        if unit is quote.certified.unit:
            continue
        yield f"For one {unit.value}:"
        yield f"  {statement.headline()}"
        yield f"  {'reason:' if statement.is_unbounded else 'by'} {statement.proof}"
        yield from (f"  if {assumption}" for assumption in statement.assumptions if assumption not in known)
    if quote.certified.trust is not Trust.LOCAL:
        yield "If nobody is trusted:"
        yield from (f"  {line}" for line in str(quote.local).splitlines())
    if quote.shuffler is not None:
        yield "What the shuffler learns:"
        yield from (f"  {line}" for line in str(quote.shuffler).splitlines())
