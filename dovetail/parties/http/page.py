"""The analyzer's page for people: where the training stands, what was spent, how good the model is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.numbers import at_most
from dovetail.statements import Statement
from dovetail.templating import render

__all__ = ["status_page"]

_WIDTH, _HEIGHT = 560, 160


def status_page(facts: Mapping[str, Any]) -> str:
    """The page for what `Analyzer.privacy` says."""
    spent, budget, history = facts["spent"]["eps"], facts["budget"]["eps"], facts["history"]
    return render(
        "status.html.jinja",
        task=facts["task"],
        protocol=facts["protocol"],
        task_id=facts["task_id"][:16],
        reserved=facts["rounds_reserved"],
        rounds=facts["rounds"],
        spent=_number(spent),
        delta=at_most(facts["budget"]["delta"]),
        budget=None if budget is None else _number(budget),
        share=None if spent is None or budget is None else f"{min(100.0, 100 * spent / budget):.1f}",
        statement=str(Statement.from_json(facts["statement"])),
        curve=_curve([(one["round"], one["accuracy"]) for one in history if one["accuracy"] is not None]),
        history=[
            {"reason": None, **one, "accuracy": "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"}
            for one in history
        ],
    )


def _number(eps: float | None) -> str:
    return "no guarantee" if eps is None else f"eps {at_most(eps)}"


def _percent(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.1%}"


def _curve(points: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
    """Accuracy by round, as the points of a line; None before the first model."""
    if not points:
        return None
    end, accuracy = points[-1]
    last = max(round for round, _ in points)
    places = (f"{_WIDTH * round / last:.1f},{_HEIGHT * (1 - height):.1f}" for round, height in points)
    return {
        "width": _WIDTH,
        "height": _HEIGHT,
        "points": " ".join(places),
        "round": end,
        "accuracy": f"{accuracy:.1%}",
    }
