"""Data files -> a page: `report.html` of a comparison or of a paper, and `index.html` of all papers.

A comparison has every protocol at the same certified privacy, the most accurate first. Each table and figure of a paper
stands beside what we computed: paper | claimed | certified | audited | ours.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail import references
from dovetail.compare import Comparison, Run, bytes_in_words
from dovetail.figures import Figure
from dovetail.pages.words import at_least, at_most, badge, number, view_of
from dovetail.statements import Statement
from dovetail.templating import draw_inline, write_page

__all__ = ["write_comparison_page", "write_index_page", "write_paper_page"]

_MANY = 14  # a table with more rows is folded away;
_MANY_BESIDE_A_FIGURE = 6  # so is one with more than this where a figure shows the same
_COLUMNS = {
    "paper": "paper",
    "claimed": "claimed (recomputed)",
    "certified": "certified",
    "audited": "audited",
    "ours": "ours",
}
_CLAIMS = {"claimed, holds": "hold", "claimed, unproven": "are unproven", "claimed, refuted": "are refuted"}


def write_comparison_page(folder: Path) -> Path:
    """Write the page of a comparison and return its path."""
    compared = Comparison.read(folder)
    eps, delta = at_most(compared.eps), at_most(compared.delta)
    return write_page(
        folder / "report.html",
        "comparison.html.jinja",
        title=f"Accuracy at ({eps}, {delta})-DP",
        eps=eps,
        delta=delta,
        task=compared.task,
        model=compared.model,
        facts=_comparison_facts(compared),
        ranking=[_comparison_row(name, run) for name, run in compared.runs.items()],
        charts=draw_inline([compared.figure()] if compared.runs else []),
        left_out=[outcome for outcome in compared.outcomes if outcome.reason],
        made_by=sorted({f"dovetail {run.version} · {run.machine}" for run in compared.runs.values()}),
    )


def _comparison_facts(compared: Comparison) -> list[tuple[str, str]]:
    """The boxes at the top of a comparison's page: titles and values, as text."""
    facts = [("task", compared.task), ("model", compared.model), ("seeds", str(compared.seeds))]
    if compared.baseline is not None:
        facts.append(("best constant guess", f"{compared.baseline:.1%}"))
    private = [name for name, run in compared.runs.items() if run.is_private and run.beats_baseline]
    alone = [name for name in private if compared.runs[name].needs_no_trusted_party]
    for title, names in (("most accurate", private), ("without a trusted party", alone)):
        if names:
            facts.append((title, f"{names[0]} {compared.runs[names[0]].mean:.1%}"))
    if compared.best_single_shuffler:
        facts.append(("best with one shuffler", compared.best_single_shuffler))
    return facts


def _comparison_row(name: str, run: Run) -> dict[str, Any]:
    """A protocol's line in the ranking, as the template shows it."""
    return {
        "protocol": name,
        "settings": run.settings,
        "accuracy": f"{run.mean:.2%}",
        "learned": run.beats_baseline,
        "spread": f"{statistics.stdev(run.accuracies):.2%}" if len(run.accuracies) > 1 else None,
        "trust": run.trust,
        "certified": view_of(run.certified),
        "without_trust": view_of(run.statement_without_trust),
        "size": bytes_in_words(run.costs.bytes),
        "messages": f"{number(run.costs.messages)} message{'s' * (run.costs.messages > 1)}",
        "rounds": run.rounds,
        "seconds": number(run.costs.server_seconds, 2),
    }


def write_paper_page(folder: Path) -> Path:
    """Write the page of one paper and return its path."""
    paper = _read_paper(folder)
    if paper is None:
        raise ValueError(f"{str(folder)!r} holds no reproduced paper: no paper.json with exhibits")
    exhibits = list(_read_exhibits(folder, paper))
    claims = [(f"claims that {_CLAIMS[verdict]}", str(count)) for verdict, count in _verdicts(exhibits).items()]
    return write_page(
        folder / "report.html",
        "paper.html.jinja",
        title=paper["title"],
        version=paper["version"],
        citation=paper["citation"],
        has_index=(folder.parent / "index.json").exists(),
        facts=claims + _paper_boxes(exhibits),
        exhibits=[_exhibit_view(exhibit) for exhibit in exhibits],
        reference=_bibliography_entry(paper),
    )


def write_index_page(folder: Path) -> Path:
    """Write the page of all papers that were reproduced and return its path."""
    names = json.loads((folder / "index.json").read_text(encoding="utf-8"))["papers"]
    papers = {name: paper for name in names if (paper := _read_paper(folder / name)) is not None}
    return write_page(
        folder / "index.html",
        "papers.html.jinja",
        title="Papers reproduced",
        version=next((paper["version"] for paper in reversed(papers.values())), None),
        cards=[_paper_card(name, paper, list(_read_exhibits(folder / name, paper))) for name, paper in papers.items()],
    )


def _read_paper(folder: Path) -> dict[str, Any] | None:
    """The content of `paper.json`; None if there is none, or no part of the paper was finished."""
    if not (folder / "paper.json").exists():
        return None
    paper: dict[str, Any] = json.loads((folder / "paper.json").read_text(encoding="utf-8"))
    return paper if paper.get("exhibits") else None


def _read_exhibits(folder: Path, paper: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The content of each part's JSON file (see `papers.exhibits.write`), in the paper's order."""
    for key in paper["exhibits"]:
        if (folder / f"{key}.json").exists():
            yield json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))


def _paper_boxes(exhibits: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Boxes for a paper: its best accuracy, if anything was trained, and how many parts it has."""
    facts = []
    best = _most_accurate(exhibits)
    if best is not None:
        facts.append(("best accuracy, ours", f"{best:.1%}"))
    facts.append(("tables and figures", str(len(exhibits))))
    return facts


def _rows_of_all_parts(exhibits: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows of all parts, as `papers.exhibits.Row.to_json` gives them."""
    for exhibit in exhibits:
        yield from exhibit["rows"]


def _verdicts(exhibits: list[dict[str, Any]]) -> dict[str, int]:
    """How many of the paper's claims hold, are unproven and are refuted, in this order; without those that none are."""
    counts = Counter(row["claimed"]["verdict"] for row in _rows_of_all_parts(exhibits) if row.get("claimed"))
    return {verdict: counts[verdict] for verdict in _CLAIMS if counts[verdict]}


def _most_accurate(exhibits: list[dict[str, Any]]) -> float | None:
    """The largest mean accuracy that we measured in any row; None where nothing was trained."""
    ours = (row["ours"] for row in _rows_of_all_parts(exhibits) if row.get("ours"))
    return max((result["mean"] for result in ours if result["metric"] == "accuracy"), default=None)


def _paper_card(name: str, paper: dict[str, Any], exhibits: list[dict[str, Any]]) -> dict[str, Any]:
    """A paper's card on the index page, as the template shows it."""
    return {
        "name": name,
        "title": paper["title"],
        "citation": paper["citation"],
        "verdicts": [(badge(verdict), count) for verdict, count in _verdicts(exhibits).items()],
        "facts": _paper_boxes(exhibits),
    }


def _exhibit_view(exhibit: dict[str, Any]) -> dict[str, Any]:
    """A table or figure of a paper, as the template shows it; columns that no row fills are left out."""
    rows = [_row_view(row) for row in exhibit["rows"]]
    return {
        "title": exhibit["title"],
        "caption": exhibit["caption"],
        "finished": exhibit.get("finished", True),
        "figures": draw_inline(Figure.from_json(figure) for figure in exhibit["figures"]),
        "folded": len(rows) > (_MANY_BESIDE_A_FIGURE if exhibit["figures"] else _MANY),
        "columns": {name: head for name, head in _COLUMNS.items() if any(row[name] for row in rows)},
        "rows": rows,
        "notes": exhibit.get("notes", []),
        "run": _origin_in_words(exhibit["run"]) if exhibit.get("run") else None,
    }


def _origin_in_words(run: dict[str, Any]) -> str:
    """How a part was computed, as text: version, machine, seconds, seeds. Parts of a page may differ in that."""
    facts = [f"dovetail {run.get('version', '')}", run.get("machine", "")]
    if run.get("seconds"):
        facts.append(f"{number(run['seconds'], 3)} s")
    if run.get("seeds"):
        facts.append(f"{run['seeds']} seed{'s' * (run['seeds'] > 1)}")
    return ("quick run, " if run.get("quick") else "") + " · ".join(fact for fact in facts if fact)


def _row_view(row: dict[str, Any]) -> dict[str, Any]:
    """A row's cells by their columns; None where there is nothing to say."""
    more = [f"{name} {_text(value)}" for name, value in (row.get("extra") or {}).items() if value is not None]
    if row.get("seconds"):
        more.append(f"{number(row['seconds'], 2)} s")
    claimed, certified = (
        view_of(Statement.from_json(row[key])) if row.get(key) else None for key in ("claimed", "certified")
    )
    return {
        "label": row["label"],
        "note": row.get("note"),
        "more": more,
        "paper": [(name, _value_as_text(name, value)) for name, value in (row.get("paper") or {}).items()],
        "claimed": claimed,
        "certified": certified,
        "audited": _audit_cell(row["audited"]) if row.get("audited") else None,
        "ours": _ours_cell(row),
    }


def _audit_cell(finding: dict[str, Any]) -> dict[str, str]:
    """What an attack shows at the least, at which delta, and whether by counting or exactly."""
    return {
        "lower": "no guarantee" if finding["unbounded"] else f"eps ≥ {at_least(finding['eps_lower'])}",
        "delta": number(finding["delta"]),
        "how": f"{finding['trials']:,} trials, confidence {finding['confidence']:g}" if finding["trials"] else "exact",
    }


def _ours_cell(row: dict[str, Any]) -> dict[str, Any] | None:
    """What we measured, or why it was not measured here; None where there was nothing to measure."""
    ours = row.get("ours")
    if row.get("not_here") or not ours:
        return {"not_here": row["not_here"]} if row.get("not_here") else None
    return {
        "not_here": None,
        "metric": ours["metric"],
        "mean": _value_as_text(ours["metric"], ours["mean"]),
        "spread": None if ours.get("spread") is None else _value_as_text(ours["metric"], ours["spread"]),
    }


def _value_as_text(name: str, value: Any) -> str:
    """A value as text: accuracies as percentages, other numbers in few characters; `name` tells which it is."""
    if "accuracy" in name and isinstance(value, int | float) and abs(value) <= 1:
        return f"{value:.2%}"
    return _text(value)


def _text(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _bibliography_entry(paper: dict[str, Any]) -> references.Entry | None:
    """The bibliography's entry for the paper; None if it has none."""
    try:
        return references.find_entry(paper["reference"])
    except ValueError:
        return None
