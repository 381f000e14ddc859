"""`comparison.json` -> `report.html`: every protocol at the same certified privacy, the most accurate first."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.compare import Comparison, Run, in_bytes
from dovetail.files import write_atomically
from dovetail.report import _proof
from dovetail.report._page import at_most, details, escape, figures, number, page, section, table, tiles

__all__ = ["comparison"]


def comparison(folder: Path) -> Path:
    """Write the page of a comparison and return its path."""
    found = Comparison.read(folder)
    heading = f"Accuracy at ({at_most(found.eps)}, {at_most(found.delta)})-DP"
    body = (
        f"<h1>{escape(heading)}</h1>"
        + _equal(found)
        + tiles(_facts(found))
        + section("Ranking", _ranking(found.runs))
        + section("Accuracy and cost", figures([found.figure()] if found.runs else []))
        + section("Not in the comparison", _left_out(found))
    )
    where = sorted({f"dovetail {run.version} · {run.machine}" for run in found.runs.values()})
    target = folder / "report.html"
    write_atomically(target, page(heading, body, kind="comparison of protocols", footer=escape("; ".join(where))))
    return target


def _equal(found: Comparison) -> str:
    """What is the same for all, and what is not."""
    return (
        f'<div class="statement doubtful"><p class="lead">The noise of every private protocol in the ranking is '
        f"calibrated to eps at most {at_most(found.eps)} at delta {at_most(found.delta)} for replacing one user over "
        f"the whole training. All protocols train the same model ({escape(found.model)}) on the same data "
        f"({escape(found.task)}). These are simulations with seeded noise, so that they can be repeated.</p>"
        "<p>The protocols differ in whom you must trust and in the adversary; the table shows both. At the same "
        "accuracy, the protocol that needs less trust is better. The bundled clip norms and server learning rates were "
        "tuned on MNIST's training images, and no statement accounts for that.</p>"
        "</div>"
    )


def _facts(found: Comparison) -> list[tuple[str, str]]:
    facts = [("task", found.task), ("model", found.model), ("seeds", str(found.seeds))]
    private = [name for name, run in found.runs.items() if run.private]
    alone = [name for name in private if found.runs[name].no_trusted_party]
    for title, names in (("most accurate", private), ("without a trusted party", alone)):
        if names:
            facts.append((title, f"{names[0]} {found.runs[names[0]].mean:.1%}"))
    if found.best_single_shuffler:
        facts.append(("best with one shuffler", found.best_single_shuffler))
    return facts


def _ranking(runs: Mapping[str, Run]) -> str:
    if not runs:
        return "<p>No protocol has been compared.</p>"
    head = ("", "protocol", "accuracy", "trusted party", "calibrated to", "if nobody is trusted",
            "sent per user and round", "rounds, server")  # fmt: skip
    rows = [_row(place, name, run) for place, (name, run) in enumerate(runs.items(), 1)]
    return table(head, rows, numbers=(0, 2, 6, 7))


def _row(place: int, name: str, run: Run) -> list[str]:
    spread = f"<br><small>± {statistics.stdev(run.accuracies):.2%}</small>" if len(run.accuracies) > 1 else ""
    messages = f"{number(run.costs.messages)} message{'s' * (run.costs.messages > 1)}"
    return [
        str(place),
        f"<b>{escape(name)}</b>{_settings(run.settings)}",
        f"<b>{run.mean:.2%}</b>{spread}",
        escape(run.trust),
        f"{_proof.promised(run.certified)}<br><small>against the {escape(run.certified.adversary)}</small>",
        _proof.promised(run.without_trust),
        f"{in_bytes(run.costs.bytes)}<br><small>{messages}</small>",
        f"{run.rounds}<br><small>{number(run.costs.server_seconds, 2)} s each</small>",
    ]


def _settings(settings: Mapping[str, Any]) -> str:
    """How the protocol was set, folded away."""
    items = "<br>".join(f"{escape(name)} = {escape(value)}" for name, value in settings.items())
    return details("settings", f'<p class="small">{items}</p>') if items else ""


def _left_out(found: Comparison) -> str:
    rows = [[f"<b>{escape(one.protocol)}</b>", escape(one.reason)] for one in found.outcomes if one.reason]
    return table(("protocol", "why"), rows) if rows else ""
