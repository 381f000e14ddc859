"""Statements as HTML: the proof tree, the assumptions, the table of units."""

from __future__ import annotations

from collections.abc import Mapping

from dovetail.report._page import badge, details, escape, table
from dovetail.report._words import numbers
from dovetail.statements import Statement

__all__ = ["assumptions", "beside", "judged", "promised", "tree", "units"]


def tree(statement: Statement) -> str:
    """The statement, its theorem and what it rests on, as nested lists."""
    return f'<ul class="tree">{_node(statement, said=())}</ul>'


def _node(statement: Statement, said: tuple[str, ...]) -> str:
    span = f", {escape(statement.span)}" if statement.span else ""
    scope = f"one {statement.unit.value}{span}; against the {escape(statement.adversary)}; {statement.neighbors.value}"
    new = [] if statement.unbounded else [text for text in statement.assumptions if text not in said]
    inner = "".join(_node(premise, said + statement.assumptions) for premise in statement.premises)
    return (
        f"<li><p>{promised(statement)}</p>"
        f'<p class="small">{scope}</p>'
        f"<p>{'reason:' if statement.unbounded else 'by'} {escape(statement.theorem.where)}</p>"
        + (details(f"if {len(new)} assumption{'s hold' if len(new) > 1 else ' holds'}", _list(new)) if new else "")
        + (details("which follows from", f"<ul>{inner}</ul>", opened=True) if inner else "")
        + "</li>"
    )


def promised(statement: Statement) -> str:
    """The numbers and what they are worth."""
    if statement.unbounded:
        return badge("no guarantee")
    return f'<b class="dp">{escape(numbers(statement))}</b> {judged(statement)}'


def judged(statement: Statement) -> str:
    """What a statement is worth: its verdict, and green only if nothing speaks against its numbers."""
    return badge("no guarantee" if statement.unbounded else statement.verdict.value, doubtful=bool(statement.warnings))


def _list(texts: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def assumptions(statement: Statement) -> str:
    """What must be true, to be checked one by one."""
    if not statement.assumptions:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in statement.assumptions)
    return f'<p>Check each of these; the numbers cannot show whether they hold.</p><ul class="checklist">{items}</ul>'


def units(statements: Mapping[str, Statement]) -> str:
    """What the run guarantees for an item, a user and a subject."""
    rows = []
    for name, statement in statements.items():
        said = "; ".join((statement.theorem.where, *(f"if {text}" for text in statement.assumptions)))
        folded = details(escape(statement.theorem.key), f'<p class="small">{escape(said)}</p>')
        by = escape(statement.theorem.where) if statement.unbounded else folded
        shown = promised(statement)
        rows.append([f"one {escape(name)}", shown, statement.neighbors.value, escape(statement.adversary), by])
    return table(("unit", "guarantee", "neighbours", "adversary", "theorem or reason"), rows)


def beside(statement: Statement) -> str:
    """Another statement about the same run, in short and in full."""
    span = f", {escape(statement.span)}" if statement.span else ""
    return (
        f"<p>{promised(statement)}<br>"
        f'<span class="small">against the {escape(statement.adversary)}{span}</span></p>'
        f"<p>{escape(statement.theorem.where)}</p>" + details("In full", tree(statement))
    )
