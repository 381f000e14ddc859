"""A paper's data files -> `report.html`; all papers -> `index.html`.

Each table and figure of the paper stands beside what we computed: paper | claimed | certified | audited | ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dovetail import references
from dovetail.figures import Figure
from dovetail.files import write_atomically
from dovetail.report._page import at_least, badge, details, escape, figures, number, page, section, table, tiles
from dovetail.report._proof import judged, promised
from dovetail.report._words import numbers
from dovetail.statements import Statement

__all__ = ["index", "reproduction"]

_MANY = 14  # rows beyond which a table is folded away,
_MANY_BESIDE_A_FIGURE = 6  # and where a figure shows them too
_COLUMNS = ("", "paper", "claimed (recomputed)", "certified", "audited", "ours")
_EXPLAINED = (
    "<p><b>Paper</b> is the printed value. <b>Claimed</b> is the paper's own formula, recomputed, with our verdict: "
    f"{badge('claimed, holds')} we can prove it, {badge('claimed, unproven')} we know of no proof, "
    f"{badge('claimed, refuted')} an attack or an argument shows it to be wrong. <b>Certified</b> is what we can prove "
    "for the same run. <b>Audited</b> is a lower bound on eps, shown by an attack. <b>Ours</b> is what we "
    "measured.</p>"
)


def reproduction(folder: Path) -> Path:
    """Write the page of one paper and return its path."""
    paper = _read(folder)
    if paper is None:
        raise ValueError(f"expected a folder with a reproduced paper, got {str(folder)!r}")
    exhibits = list(_exhibits(folder, paper))
    back = '<p><a href="../index.html">All papers</a></p>' if (folder.parent / "index.json").exists() else ""
    body = (
        f"<h1>{escape(paper['title'])}</h1>"
        f'<p class="lead">{escape(paper["citation"])}</p>{back}'
        + tiles(_claims(exhibits) + _facts(exhibits))
        + _EXPLAINED
        + "".join(_exhibit(exhibit) for exhibit in exhibits)
        + section("Reference", _reference(paper))
    )
    target = folder / "report.html"
    write_atomically(
        target,
        page(paper["title"], body, kind="reproduction of a paper", footer=escape(f"dovetail {paper['version']}")),
    )
    return target


def index(folder: Path) -> Path:
    """Write the page of all papers that were reproduced and return its path."""
    names = json.loads((folder / "index.json").read_text())["papers"]
    cards, footer = [], ""
    for name in names:
        paper = _read(folder / name)
        if paper is None:
            continue
        cards.append(_card(name, paper, list(_exhibits(folder / name, paper))))
        footer = escape(f"dovetail {paper['version']}")
    body = f'<h1>Papers reproduced</h1>{_EXPLAINED}<div class="cards">{"".join(cards)}</div>'
    target = folder / "index.html"
    write_atomically(target, page("Papers reproduced", body, kind="reproductions", footer=footer))
    return target


def _read(folder: Path) -> dict[str, Any] | None:
    """What was reproduced, or None if it is not there or was stopped."""
    if not (folder / "paper.json").exists():
        return None
    paper: dict[str, Any] = json.loads((folder / "paper.json").read_text())
    return paper if paper.get("exhibits") else None


def _exhibits(folder: Path, paper: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in paper["exhibits"]:
        if (folder / f"{key}.json").exists():
            yield json.loads((folder / f"{key}.json").read_text())


def _claims(exhibits: list[dict[str, Any]]) -> list[tuple[str, str]]:
    words = {"claimed, holds": "hold", "claimed, unproven": "are unproven", "claimed, refuted": "are refuted"}
    return [(f"claims that {words[verdict]}", str(count)) for verdict, count in _verdicts(exhibits).items()]


def _facts(exhibits: list[dict[str, Any]]) -> list[tuple[str, str]]:
    facts = []
    best = _most_accurate(exhibits)
    if best is not None:
        facts.append(("best accuracy, ours", f"{best:.1%}"))
    facts.append(("tables and figures", str(len(exhibits))))
    return facts


def _rows(exhibits: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for exhibit in exhibits:
        yield from exhibit["rows"]


def _verdicts(exhibits: list[dict[str, Any]]) -> dict[str, int]:
    """How many claims hold, are unproven, are refuted; in this order."""
    counts = Counter(row["claimed"]["verdict"] for row in _rows(exhibits) if row.get("claimed"))
    order = ("claimed, holds", "claimed, unproven", "claimed, refuted")
    return {verdict: counts[verdict] for verdict in order if counts[verdict]}


def _most_accurate(exhibits: list[dict[str, Any]]) -> float | None:
    found = [row["ours"]["mean"] for row in _rows(exhibits) if row.get("ours") and row["ours"]["metric"] == "accuracy"]
    return max(found, default=None)


def _exhibit(exhibit: dict[str, Any]) -> str:
    rows = [_cells(row) for row in exhibit["rows"]]
    head, rows = _without_empty(rows)
    shown = table(head, rows) if rows else ""
    if len(rows) > (_MANY_BESIDE_A_FIGURE if exhibit["figures"] else _MANY):
        shown = details(f"Show all {len(rows)} rows", shown)
    notes = "".join(f"<li>{escape(note)}</li>" for note in exhibit.get("notes", []))
    unfinished = "" if exhibit.get("finished", True) else '<p class="banner">Not finished: rows are missing.</p>'
    return section(
        exhibit["title"],
        f"<p>{escape(exhibit['caption'])}</p>{unfinished}"
        + figures([Figure.from_json(figure) for figure in exhibit["figures"]])
        + shown
        + (f"<ul>{notes}</ul>" if notes else "")
        + (f"<p><small>{_run(exhibit['run'])}</small></p>" if exhibit.get("run") else ""),
    )


def _run(run: dict[str, Any]) -> str:
    """How a part was computed; parts of one page may come from several runs."""
    return ("quick run, " if run.get("quick") else "") + _footer(run)


def _without_empty(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without columns that hold nothing."""
    kept = [i for i in range(len(_COLUMNS)) if i == 0 or any(row[i] != "-" for row in rows)]
    return [_COLUMNS[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _cells(row: dict[str, Any]) -> list[str]:
    return [_label(row), _paper(row), _claimed(row), _certified(row), _audited(row), _ours(row)]


def _label(row: dict[str, Any]) -> str:
    under = [f"{escape(name)} {_shown(value)}" for name, value in (row.get("extra") or {}).items() if value is not None]
    if row.get("seconds"):
        under.append(f"{number(row['seconds'], 2)} s")
    text = f"<b>{escape(row['label'])}</b>"
    if row.get("note"):
        text += f"<br><small>{escape(row['note'])}</small>"
    return text + (details("more", f'<p class="small">{"; ".join(under)}</p>') if under else "")


def _paper(row: dict[str, Any]) -> str:
    return (
        "<br>".join(f"{escape(name)} {_value(name, value)}" for name, value in (row.get("paper") or {}).items()) or "-"
    )


def _claimed(row: dict[str, Any]) -> str:
    if not row.get("claimed"):
        return "-"
    statement = Statement.from_json(row["claimed"])
    folded = details("why", f'<p class="small">{escape(statement.theorem.where)}</p>')
    said = f'<span class="dp">{escape(numbers(statement))}</span> {judged(statement)}'
    return f"{said}<br><small>{escape(_scope(statement))}</small>{folded}"


def _certified(row: dict[str, Any]) -> str:
    if not row.get("certified"):
        return "-"
    statement = Statement.from_json(row["certified"])
    shown = promised(statement)
    folded = details("why", f'<p class="small">{escape(statement.theorem.where)}</p>')
    return f"{shown}<br><small>{escape(_scope(statement))}</small>{folded}"


def _scope(statement: Statement) -> str:
    return ", ".join(filter(None, (f"one {statement.unit.value}", statement.neighbors.value, statement.span)))


def _audited(row: dict[str, Any]) -> str:
    found = row.get("audited")
    if not found:
        return "-"
    lower = "no guarantee" if found["unbounded"] else f"eps ≥ {at_least(found['eps_lower'])}"
    how = f"{found['trials']:,} trials, confidence {found['confidence']:g}" if found["trials"] else "exact"
    return f"{lower}<br><small>at delta {number(found['delta'])}, {how}</small>"


def _ours(row: dict[str, Any]) -> str:
    if row.get("not_here"):
        return f"<small>not run here: {escape(row['not_here'])}</small>"
    ours = row.get("ours")
    if not ours:
        return "-"
    spread = "" if ours.get("spread") is None else f" ± {_value(ours['metric'], ours['spread'])}"
    return f"<b>{_value(ours['metric'], ours['mean'])}</b>{spread}<br><small>{escape(ours['metric'])}</small>"


def _value(name: str, value: Any) -> str:
    """Accuracies as percentages, other numbers in few characters."""
    if "accuracy" in name and isinstance(value, int | float) and abs(value) <= 1:
        return f"{value:.2%}"
    return _shown(value)


def _shown(value: Any) -> str:
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else escape(value)


def _card(name: str, paper: dict[str, Any], exhibits: list[dict[str, Any]]) -> str:
    verdicts = " ".join(
        f'<span class="dp">{count} {badge(verdict)}</span>' for verdict, count in _verdicts(exhibits).items()
    )
    facts = [f"<p>{escape(fact)}: <b>{escape(value)}</b></p>" for fact, value in _facts(exhibits)]
    return (
        f'<div class="card"><h2><a href="{escape(name)}/report.html">{escape(paper["title"])}</a></h2>'
        f'<p class="small">{escape(paper["citation"])}</p>'
        + (f"<p>{verdicts}</p>" if verdicts else "")
        + f"{''.join(facts)}</div>"
    )


def _reference(paper: dict[str, Any]) -> str:
    try:
        found = references.entry(paper["reference"])
    except ValueError:
        return f"<p>{escape(paper['citation'])}</p>"
    return f"<p>{escape(found)}</p>" + details("BibTeX", f"<pre>{escape(found.bibtex())}</pre>")


def _footer(paper: dict[str, Any]) -> str:
    facts = [f"dovetail {paper.get('version', '')}", paper.get("machine", "")]
    if paper.get("seconds"):
        facts.append(f"{number(paper['seconds'], 3)} s")
    if paper.get("seeds"):
        facts.append(f"{paper['seeds']} seed{'s' * (paper['seeds'] > 1)}")
    return " · ".join(escape(fact) for fact in facts if fact)
