"""A run's folder -> `report.html`: the statement first, then everything it rests on and everything it leaves out."""

from __future__ import annotations

import datetime
import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail import __version__, references
from dovetail.figures import Figure, Line
from dovetail.files import write_atomically
from dovetail.folder import BANNER, RunFolder
from dovetail.report import _proof, _words
from dovetail.report._page import at_least, at_most, badge, details, escape, figures, number, page, section, tiles
from dovetail.statements import Statement, Verdict

__all__ = ["write"]

_BINS = 24
_HOW_TO_AUDIT = "Not audited. <code>dovetail run --audit</code> attacks one round exactly and shows the result here."


def write(folder: Path) -> Path:
    """Write the report of a finished run and return its path.

    Guarantees:
        The page holds the statement of privacy.json and no number that is not in the folder's files.
        It loads nothing and runs nothing. What raw updates were like is on a page of its own, `diagnostics.html`.
    """
    summary = json.loads((folder / "privacy.json").read_text())
    statement = Statement.from_json(summary["certified"])
    config = (folder / "config.toml").read_text()
    run = RunFolder(folder)
    diagnosed = _write_diagnostics(run)
    body = (
        _statement(statement, summary)
        + _trust(statement, summary, diagnostics=diagnosed)
        + section("Accuracy and budget", figures(_curves(run.metrics(), statement, config)))
        + section("Eps per user", figures(_histogram(statement.per_user)))
        + _beside(summary)
        + section("Audit", _audit(folder))
        + section("Config", f"<pre>{escape(config)}</pre>")
        + section("References", _references(summary))
    )
    made = datetime.datetime.fromtimestamp((folder / "privacy.json").stat().st_mtime, datetime.UTC)
    footer = f"dovetail {escape(__version__)} · run finished {made:%Y-%m-%d %H:%M} UTC"
    kind = f"privacy report of a training run on {tomllib.loads(config).get('task', {}).get('name', 'its data')}"
    target = folder / "report.html"
    write_atomically(target, page(_words.title(statement), body, kind=kind, footer=footer))
    return target


def _statement(statement: Statement, summary: dict[str, Any]) -> str:
    """What is promised, in words, with the run's few figures."""
    sound = statement.verdict is Verdict.CERTIFIED and not statement.warnings
    kind = "statement nothing" if statement.unbounded else "statement" if sound else "statement doubtful"
    verdict = _proof.judged(statement)
    warned = "".join(f'<p class="banner">Warning: {escape(text)}.</p>' for text in statement.warnings)
    first, rest = _words.sentences(statement), _words.meaning(statement)
    lead, more = " ".join(first[:2]), [" ".join(first[2:]), *rest]
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in more if text)
    planned = summary["planned_rounds"]
    rounds = f"{summary['rounds']:,}" + (f" of {planned:,}" if planned != summary["rounds"] else "")
    facts = [
        ("eps", "none" if statement.unbounded else at_most(statement.eps)),
        ("delta", "none" if statement.unbounded else at_most(statement.delta)),
        ("test accuracy", f"{summary['accuracy']:.2%}"),
        ("rounds", rounds),
        ("uploads", f"{summary['uploads']:,}"),
        ("protocol", summary["protocol"]["name"]),
    ]
    return (
        f"<h1>{escape(_words.title(statement))}</h1>"
        f'{warned}<div class="{kind}"><p class="lead">{escape(lead)} {verdict}</p>'
        f"{paragraphs}</div>{tiles(facts)}"
    )


def _trust(statement: Statement, summary: dict[str, Any], *, diagnostics: bool) -> str:
    """For whom, why, if what, and what not."""
    units = {name: Statement.from_json(data) for name, data in summary["units"].items()}
    local, shuffler = (summary.get(key) and Statement.from_json(summary[key]) for key in ("local", "shuffler"))
    left_out = _words.not_covered(statement, units, local=local, shuffler=shuffler, diagnostics=diagnostics)
    return (
        section("Who is protected", _proof.units(units))
        + section("The proof", _proof.tree(statement))
        + section("Assumptions", _proof.assumptions(statement))
        + section("What is not covered", "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in left_out) + "</ul>")
    )


def _beside(summary: dict[str, Any]) -> str:
    """What the paper claims, what the shuffler learns, what is left without trust."""
    titles = {
        "claimed": "What the protocol's paper claims",
        "shuffler": "What the shuffler learns",
        "local": "What remains if nobody is trusted",
    }
    return "".join(
        section(title, _proof.beside(Statement.from_json(summary[key])))
        for key, title in titles.items()
        if summary.get(key) is not None
    )


def _curves(metrics: list[dict[str, Any]], statement: Statement, config: str) -> list[Figure]:
    """Accuracy and what was spent, round by round."""
    if len(metrics) < 2:
        return []
    rounds = [line["round"] for line in metrics]
    accuracy = Line(name="", x=rounds, y=[line["accuracy"] for line in metrics])
    drawn = [
        Figure(title="Accuracy", x_label="round", y_label="test accuracy", lines=[accuracy], percent_y=True),
    ]
    spent = [line.get("eps") for line in metrics]
    if all(eps is None for eps in spent):
        return drawn
    lines = [Line(name="spent", x=[0, *rounds], y=[0.0, *spent])]
    target = tomllib.loads(config).get("privacy", {}).get("eps")
    if target is not None:
        lines.append(Line(name=f"budget: eps {number(target)}", x=[0, rounds[-1]], y=[target] * 2, style="dashed"))
    said = f"eps at delta {number(statement.delta)}"
    return [*drawn, Figure(title="Budget", x_label="round", y_label=said, lines=lines)]


def _histogram(per_user: Sequence[float] | None) -> list[Figure]:
    """How many users have which eps."""
    if not per_user:
        return []
    low, high = min(per_user), max(per_user)
    width = (high - low) / _BINS or max(abs(low), 1.0) / _BINS
    counts = [0] * _BINS
    for eps in per_user:
        counts[min(_BINS - 1, int((eps - low) / width))] += 1
    middles = [low + (i + 0.5) * width for i in range(_BINS)]
    bars = Line(name="", x=middles, y=counts, style="bars")
    title = f"Eps per user, {len(per_user):,} users"
    return [Figure(title=title, x_label="eps", y_label="users", lines=[bars])]


def _audit(folder: Path) -> str:
    """What attacks found, if any were made."""
    if not (folder / "audit.json").exists():
        return f"<p>{_HOW_TO_AUDIT}</p>"
    found = json.loads((folder / "audit.json").read_text())
    if found.get("reason"):
        return f"<p>Not audited: {escape(found['reason'])}.</p>"
    certified = Statement.from_json(found["certified"])
    lower = (
        "there is no guarantee: no finite eps holds"
        if found["unbounded"]
        else f"eps is at least {at_least(found['eps_lower'])}"
    )
    how = (
        f"in {found['trials']:,} trials, confidence {found['confidence']:g}" if found["trials"] else "computed exactly"
    )
    fits = (
        "The attack finds no more than the statement allows."
        if found["consistent"]
        else f"The attack finds more than is allowed: the proof or the code is wrong. {badge('claimed, refuted')}"
    )
    return (
        f"<p>One round, at delta {number(found['delta'])}: <b>{escape(lower)}</b> ({escape(how)}). Statement for it: "
        f"{_proof.promised(certified)}. {fits}</p>"
        f'<p class="small">Attack: {escape(found["attack"])}.</p>'
        + figures([Figure.from_json(found["figure"])] if found.get("figure") else [])
    )


def _write_diagnostics(run: RunFolder) -> bool:
    """The page of what raw updates were like, if that was asked for; not to be handed out."""
    drawn = _diagnostics(run.diagnostics())
    if drawn:
        body = f'<h1>Diagnostics</h1><p class="banner">{escape(BANNER)}</p>{drawn}'
        footer = f"dovetail {escape(__version__)}"
        write_atomically(
            run.path / "diagnostics.html", page("Diagnostics", body, kind="not for release", footer=footer)
        )
    return bool(drawn)


def _diagnostics(lines: list[dict[str, Any]]) -> str:
    """How large and how different the raw updates were."""
    titles = {"variance": "between-clients variance V_c", "scale": "update scale U_s"}
    lines = [line for line in lines if all(line.get(key) is not None for key in titles)]
    if len(lines) < 2:
        return ""
    rounds = [line["round"] for line in lines]
    drawn = [Line(name=title, x=rounds, y=[line[key] for line in lines]) for key, title in titles.items()]
    positive = all(math.isfinite(line[key]) and line[key] > 0 for line in lines for key in titles)
    figure = Figure(title="Raw updates", x_label="round", y_label="mean over coordinates", lines=drawn, log_y=positive)
    return figures([figure])


def _references(summary: dict[str, Any]) -> str:
    """What ran, as a list to read and as BibTeX to copy."""
    keys = ("certified", "claimed", "local", "shuffler")
    statements = [Statement.from_json(summary[key]) for key in keys if summary.get(key) is not None]
    cited = references.of(statements, summary["protocol"]["name"])
    items = "".join(f"<li>{_cited(entry)}</li>" for entry in cited)
    return f"<ul>{items}</ul>" + details("BibTeX", f"<pre>{escape(references.bibtex(cited))}</pre>")


def _cited(entry: references.Entry) -> str:
    said = escape(str(entry).replace("{", "").replace("}", ""))
    return f'{said} <a href="https://arxiv.org/abs/{entry.arxiv}">arXiv:{entry.arxiv}</a>' if entry.arxiv else said
