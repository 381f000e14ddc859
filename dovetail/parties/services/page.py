"""The analyzer's page for people: where the training stands, what was spent, how good the model is."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.numbers import at_most
from dovetail.statements import Statement

__all__ = ["status_page"]

_WIDTH, _HEIGHT = 560, 160
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .25rem .75rem .25rem 0 }
.bar { background: #e6e8eb; height: .75rem; border-radius: .375rem; overflow: hidden }
.bar div { background: #3b6fb6; height: 100% } pre { white-space: pre-wrap; background: #f5f6f7; padding: 1rem }
svg { width: 100%; height: auto; background: #f5f6f7 } .quiet { color: #59636e }
"""


def status_page(facts: Mapping[str, Any]) -> str:
    """The page for what `Analyzer.privacy` says."""
    spent, budget = facts["spent"], facts["budget"]
    history = facts["history"]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<meta name="viewport" content="width=device-width"><title>Dovetail: {_text(facts["task"])}</title>
<style>{_STYLE}</style></head><body>
<h1>{_text(facts["task"])}</h1>
<p class="quiet">{_text(facts["protocol"])}, task {_text(facts["task_id"][:16])}…</p>
<p>Round {facts["rounds_reserved"]} of {facts["rounds"]}; {_latest(history)}.</p>
<h2>Privacy</h2>
<p>{_spent(spent, budget)}</p>{_bar(spent["eps"], budget["eps"])}
<pre>{_text(str(Statement.from_json(facts["statement"])))}</pre>
<h2>Accuracy</h2>
{_curve([(one["round"], one["accuracy"]) for one in history if one["accuracy"] is not None])}
<h2>Rounds</h2>
<table><tr><th>round</th><th>outcome</th><th>clients</th><th>accuracy</th></tr>
{"".join(_row(one) for one in reversed(history))}</table>
<p class="quiet">For machines: <a href="/v1/privacy">/v1/privacy</a></p>
</body></html>"""


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(eps: float | None) -> str:
    return "no guarantee" if eps is None else f"eps {at_most(eps)}"


def _latest(history: Sequence[Mapping[str, Any]]) -> str:
    if not history:
        return "no round has ended yet"
    last = history[-1]
    return f"round {last['round']} was {_text(last['outcome'])} with {last['uploads']} clients"


def _spent(spent: Mapping[str, Any], budget: Mapping[str, Any]) -> str:
    promised = "no budget was set" if budget["eps"] is None else f"the budget is {_number(budget['eps'])}"
    return f"Spent: {_number(spent['eps'])} at delta {at_most(budget['delta'])}; {promised}."


def _bar(spent: float | None, budget: float | None) -> str:
    if spent is None or budget is None:
        return ""
    return f'<div class="bar"><div style="width: {min(100.0, 100 * spent / budget):.1f}%"></div></div>'


def _curve(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return '<p class="quiet">No model has been released yet.</p>'
    last = max(round for round, _ in points)
    places = " ".join(f"{_WIDTH * round / last:.1f},{_HEIGHT * (1 - accuracy):.1f}" for round, accuracy in points)
    end_round, end = points[-1]
    return (
        f'<svg viewBox="0 -4 {_WIDTH} {_HEIGHT + 8}" role="img" aria-label="accuracy by round">'
        f'<polyline points="{places}" fill="none" stroke="#3b6fb6" stroke-width="2"/></svg>'
        f"<p>{end:.1%} after round {end_round}.</p>"
    )


def _row(one: Mapping[str, Any]) -> str:
    accuracy = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
    return (
        f"<tr><td>{one['round']}</td><td>{_text(one['outcome'])}</td><td>{one['uploads']}</td><td>{accuracy}</td></tr>"
    )
