"""A run's folder -> `report.html`: the statement first, then everything it rests on and everything it leaves out."""

from __future__ import annotations

import datetime
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail import __version__, references
from dovetail.experiment.folder import BANNER, RunFolder
from dovetail.experiment.result import spell_interval, spell_score
from dovetail.figures import Figure, Line
from dovetail.pages import review, words
from dovetail.pages.declarations import declarations, name_of
from dovetail.pages.words import at_least, at_most, number, view_of
from dovetail.protocols import PROTOCOLS
from dovetail.statements import Statement, Verdict
from dovetail.templating import draw_inline, write_page
from dovetail.wording import attack_in_words

__all__ = ["write"]

_BINS = 24  # of the histogram of users' own eps
_OTHERS = {
    "claimed": "What the protocol's paper claims",
    "shuffler": "What the shuffler learns",
    "local": "What remains if nobody is trusted",
}


def write(folder: Path) -> Path:
    """Write the report of a finished run and return its path.

    Guarantees:
        The page holds the statement of privacy.json and no number that is not in the folder's files.
        It loads nothing and runs nothing. What raw updates were like is on a page of its own, `diagnostics.html`.
    """
    summary = json.loads((folder / "privacy.json").read_text(encoding="utf-8"))
    statement = Statement.from_json(summary["certified"])
    others = {key: Statement.from_json(summary[key]) for key in _OTHERS if summary.get(key) is not None}
    config = (folder / "config.toml").read_text(encoding="utf-8")
    recipe = folder / "recipe.json"
    origin = summary.get("origin") or {}
    run = RunFolder(folder)
    finished = datetime.datetime.fromtimestamp((folder / "privacy.json").stat().st_mtime, datetime.UTC)
    return write_page(
        folder / "report.html",
        "run.html.jinja",
        title=words.title(statement),
        name=name_of(origin, tomllib.loads(config)),
        declared=declarations(origin, json.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None),
        version=__version__,
        finished=f"{finished:%Y-%m-%d %H:%M}",
        **_promise(statement),
        **_scope(statement, others, summary, diagnostics=_write_diagnostics(run)),
        facts=_facts(statement, summary),
        across=_across_runs(statement, summary.get("across_runs")),
        ran=review.run_facts(statement, summary),
        **_review(statement, others, summary),
        curves=draw_inline(_figures(run.read_metrics(), statement, config)),
        histogram=draw_inline(_eps_histogram(statement.per_user)),
        audit=_audit(folder),
        config=config,
        **_references([statement, *map(others.get, ("claimed", "local", "shuffler"))], summary["protocol"]["name"]),
    )


def _across_runs(statement: Statement, found: Mapping[str, Any] | None) -> dict[str, Any]:
    """What this run and all runs on the same people have spent, as values of the template: `text` and `statements`.

    Arguments:
        statement: the run's own.
        found: the value of "across_runs" in `privacy.json`; None where no ledger counted the run.
    """
    if found is None:
        text = "No ledger counted this run: what other runs on the same people have spent adds to its statement."
        return {"text": text, "statements": []}
    spent = [Statement.from_json(data) for data in found["spent"]]
    own = words.eps_and_delta(statement)
    text = f"On these people, this run spent {own}"
    if found["runs"] == 1:
        text += ", and it is the first in its ledger."
    else:
        totals = " and ".join(f"{words.eps_and_delta(total)} for one {total.unit.value}" for total in spent)
        without = len(found["without_bound"])
        all_runs = f"all {found['runs']} runs in its ledger together have spent"
        text += (
            f"; {all_runs} {totals}." if not without else f"; {all_runs} without bound, {without} promising nothing."
        )
        if without and spent:
            text += f" The others together: {totals}."
    if found["ceiling"] is not None:
        ceiling = found["ceiling"]
        text += f" Their ceiling is ({at_most(ceiling['eps'])}, {at_most(ceiling['delta'])})."
    return {"text": text, "statements": [view_of(total) for total in spent] if found["runs"] > 1 else []}


def _review(statement: Statement, others: Mapping[str, Statement], summary: dict[str, Any]) -> dict[str, Any]:
    """What a reviewer goes through before signing, as values of the template `run.html.jinja` by name.

    Arguments:
        others: the statements `claimed`, `shuffler` and `local` of `privacy.json`, those that it has.
        summary: the content of `privacy.json`.
    """
    origin = summary.get("origin") or {}
    protocol = summary["protocol"]
    settings = {key: value for key, value in protocol.items() if isinstance(value, str | int | float)}
    return {
        "parties": review.party_boxes(statement, protocol, local=others.get("local"), shuffler=others.get("shuffler")),
        "setting": origin.get("setting"),
        "exposure": review.exposure_in_words(statement, origin.get("setting")),
        "mechanism": [
            (key, value if isinstance(value, str | bool) else number(value)) for key, value in settings.items()
        ],
        "checklist": review.checklist(statement, origin),
        "tuning": review.tuning_in_words(statement, summary),
    }


def _promise(statement: Statement) -> dict[str, Any]:
    """What is guaranteed, in words, as values of the template by name."""
    sound = statement.verdict is Verdict.CERTIFIED and not statement.warnings
    sentences = words.statement_in_sentences(statement)
    return {
        "certified": view_of(statement),
        "warnings": statement.warnings,
        "standing": "nothing" if statement.is_unbounded else "" if sound else "doubtful",
        "lead": " ".join(sentences[:2]),
        "paragraphs": [text for text in (" ".join(sentences[2:]), *words.meaning_of_numbers(statement)) if text],
    }


def _facts(statement: Statement, summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The boxes at the top of the page: titles and values, as text."""
    planned = summary["planned_rounds"]
    return [
        ("eps", "none" if statement.is_unbounded else at_most(statement.eps)),
        ("delta", "none" if statement.is_unbounded else at_most(statement.delta)),
        *_score(summary),
        ("rounds", f"{summary['rounds']:,}" + (f" of {planned:,}" if planned != summary["rounds"] else "")),
        ("uploads", f"{summary['uploads']:,}"),
        ("protocol", summary["protocol"]["name"]),
    ]


def _score(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Boxes for the first score of accuracy, R2 and loss, and for that of the best constant guess if there is one."""
    if (private := summary.get("evaluation")) is not None:
        return _private_score(summary, private)
    if summary.get("accuracy") is not None:
        name = "accuracy"
        beside = summary.get("baseline", {})
        ours = f"{summary['accuracy']:.2%}"
        guess = f"{beside['accuracy']:.2%}" if beside else ""
    else:
        name, beside = ("R2", summary["baseline"]) if summary["metrics"].get("r2") is not None else ("loss", {})
        score = summary["metrics"][name.lower()]
        ours = "not a number" if score is None else number(score)
        guess = number(beside["r2"]) if beside else ""
    return [(f"test {name}", ours), *([(beside["rule"], guess)] if guess else [])]


def _private_score(summary: dict[str, Any], private: dict[str, Any]) -> list[tuple[str, str]]:
    """Boxes for private scores with their intervals, and for the best constant guess."""
    titles = {"accuracy": "accuracy", "auc": "AUC", "r2": "R2", "rmse": "RMSE"}
    shown = [name for name in titles if summary["metrics"].get(name) is not None]
    boxes = [
        (titles[name], f"{spell_score(name, summary['metrics'][name])} ({spell_interval(name, private)})")
        for name in shown
    ]
    guess = summary["baseline"]
    return [*boxes, (guess["rule"], spell_score(shown[0], guess[shown[0]]))]


def _scope(
    statement: Statement, others: Mapping[str, Statement], summary: dict[str, Any], *, diagnostics: bool
) -> dict[str, Any]:
    """Statements for other units, what is not covered, and other statements, as values of the template by name.

    Arguments:
        others: as in `_review`.
        diagnostics: whether a page of diagnostics lies beside the report.
    """
    units = {name: Statement.from_json(data) for name, data in summary["units"].items()}
    local = others.get("local")
    shuffler = others.get("shuffler")
    return {
        "promises": {name: view_of(promise) for name, promise in units.items()},
        "not_covered": words.not_covered(
            statement,
            units,
            local=local,
            shuffler=shuffler,
            diagnostics=diagnostics,
            private_test=summary.get("evaluation") is not None,
        ),
        "others": [(_OTHERS[key], view_of(other)) for key, other in others.items()],
    }


def _figures(metrics: list[dict[str, Any]], statement: Statement, config: str) -> list[Figure]:
    """Figures of the score and of the spent eps over the rounds; none where fewer than two rounds were evaluated.

    Arguments:
        metrics: the lines of `metrics.jsonl`.
        config: the content of `config.toml`.
    """
    if len(metrics) < 2:
        return []
    rounds = [line["round"] for line in metrics]
    figures = _quality_figures(rounds, metrics)
    spent = [line.get("eps") for line in metrics]
    if all(eps is None for eps in spent):
        return figures
    lines = [Line(name="spent", x=[0, *rounds], y=[0.0, *spent])]
    target = tomllib.loads(config).get("privacy", {}).get("eps")
    if target is not None:
        lines.append(Line(name=f"budget: eps {number(target)}", x=[0, rounds[-1]], y=[target] * 2, style="dashed"))
    y_label = f"eps at delta {number(statement.delta)}"
    return [*figures, Figure(title="Budget", x_label="round", y_label=y_label, lines=lines)]


def _quality_figures(rounds: list[int], metrics: list[dict[str, Any]]) -> list[Figure]:
    """A figure of the accuracy over the rounds; of the loss where some round has no accuracy."""
    if all(line["accuracy"] is not None for line in metrics):
        accuracy = Line(name="", x=rounds, y=[line["accuracy"] for line in metrics])
        return [Figure(title="Accuracy", x_label="round", y_label="test accuracy", lines=[accuracy], percent_y=True)]
    finite = [line for line in metrics if (line["metrics"] or {}).get("loss") is not None]
    loss = Line(name="", x=[line["round"] for line in finite], y=[line["metrics"]["loss"] for line in finite])
    return [Figure(title="Loss", x_label="round", y_label="test loss", lines=[loss])] if len(finite) > 1 else []


def _eps_histogram(per_user: Sequence[float] | None) -> list[Figure]:
    """A histogram of users' own eps; no figure where all have the same statement."""
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


def _audit(folder: Path) -> dict[str, Any] | None:
    """What attacks on the run found, from `audit.json`, as the template shows it; None if none were made."""
    if not (folder / "audit.json").exists():
        return None
    finding = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
    if finding.get("reason"):
        return {"reason": finding["reason"]}
    counted = f"in {finding['trials']:,} trials, confidence {finding['confidence']:g}"
    certified = Statement.from_json(finding["certified"])
    eps = math.inf if finding["unbounded"] else finding["eps_lower"]
    return {
        "reason": None,
        "in_words": attack_in_words(certified, eps=eps, delta=finding["delta"], trials=finding["trials"]),
        "delta": number(finding["delta"]),
        "lower": "there is no guarantee: no finite eps holds"
        if finding["unbounded"]
        else f"eps is at least {at_least(finding['eps_lower'])}",
        "how": counted if finding["trials"] else "computed exactly",
        "certified": view_of(certified),
        "consistent": finding["consistent"],
        "attack": finding["attack"],
        "figures": draw_inline([Figure.from_json(finding["figure"])] if finding.get("figure") else []),
    }


def _write_diagnostics(run: RunFolder) -> bool:
    """Write `diagnostics.html` from the run's diagnostics, if it has any; returns whether it was written."""
    figures = _diagnostic_figures(run.read_diagnostics())
    if figures:
        view = {"version": __version__, "banner": BANNER, "charts": draw_inline(figures)}
        write_page(run.path / "diagnostics.html", "diagnostics.html.jinja", title="Diagnostics", **view)
    return bool(figures)


def _diagnostic_figures(lines: list[dict[str, Any]]) -> list[Figure]:
    """A figure of how large and how different the raw updates were; none with fewer than two rounds of them."""
    titles = {"variance": "between-clients variance V_c", "scale": "update scale U_s"}
    lines = [line for line in lines if all(line.get(key) is not None for key in titles)]
    if len(lines) < 2:
        return []
    rounds = [line["round"] for line in lines]
    series = [Line(name=title, x=rounds, y=[line[key] for line in lines]) for key, title in titles.items()]
    positive = all(math.isfinite(line[key]) and line[key] > 0 for line in lines for key in titles)
    return [Figure(title="Raw updates", x_label="round", y_label="mean over coordinates", lines=series, log_y=positive)]


def _references(statements: Iterable[Statement | None], protocol: str) -> dict[str, Any]:
    """The references of statements and protocol, as values of the template: a list to read, and BibTeX to copy."""
    protocol_class = PROTOCOLS.get(protocol)
    entries = references.works_cited_by(statements, protocol_class.references if protocol_class else ())
    cited = [{"text": str(entry).replace("{", "").replace("}", ""), "arxiv": entry.arxiv} for entry in entries]
    return {"cited": cited, "bibtex": references.bibtex(entries)}
