"""`comparison.json` -> `report.html`: every protocol at the same certified privacy, the most accurate first."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from dovetail.compare import Comparison, Run, in_bytes
from dovetail.pages import _page
from dovetail.pages._numbers import at_most, number
from dovetail.pages._proof import shown

__all__ = ["comparison"]


def comparison(folder: Path) -> Path:
    """Write the page of a comparison and return its path."""
    found = Comparison.read(folder)
    eps, delta = at_most(found.eps), at_most(found.delta)
    return _page.write(
        folder / "report.html",
        "comparison.html.jinja",
        title=f"Accuracy at ({eps}, {delta})-DP",
        eps=eps,
        delta=delta,
        task=found.task,
        model=found.model,
        facts=_facts(found),
        ranking=[_row(name, run) for name, run in found.runs.items()],
        drawn=_page.drawn([found.figure()] if found.runs else []),
        left_out=[one for one in found.outcomes if one.reason],
        made_by=sorted({f"dovetail {run.version} · {run.machine}" for run in found.runs.values()}),
    )


def _facts(found: Comparison) -> list[tuple[str, str]]:
    facts = [("task", found.task), ("model", found.model), ("seeds", str(found.seeds))]
    if found.baseline is not None:
        facts.append(("best constant guess", f"{found.baseline:.1%}"))
    private = [name for name, run in found.runs.items() if run.private and run.beats_baseline]
    alone = [name for name in private if found.runs[name].no_trusted_party]
    for title, names in (("most accurate", private), ("without a trusted party", alone)):
        if names:
            facts.append((title, f"{names[0]} {found.runs[names[0]].mean:.1%}"))
    if found.best_single_shuffler:
        facts.append(("best with one shuffler", found.best_single_shuffler))
    return facts


def _row(name: str, run: Run) -> dict[str, Any]:
    return {
        "protocol": name,
        "settings": run.settings,
        "accuracy": f"{run.mean:.2%}",
        "learned": run.beats_baseline,
        "spread": f"{statistics.stdev(run.accuracies):.2%}" if len(run.accuracies) > 1 else None,
        "trust": run.trust,
        "certified": shown(run.certified),
        "without_trust": shown(run.without_trust),
        "size": in_bytes(run.costs.bytes),
        "messages": f"{number(run.costs.messages)} message{'s' * (run.costs.messages > 1)}",
        "rounds": run.rounds,
        "seconds": number(run.costs.server_seconds, 2),
    }
