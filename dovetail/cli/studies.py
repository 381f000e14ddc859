"""Commands over many trainings: `compare` and `reproduce`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._progress import steps
from dovetail.cli._shared import JsonFlag, Quiet, flag, out_console, print_json, progress_console
from dovetail.numbers import at_least, at_most

if TYPE_CHECKING:
    from dovetail.compare import Run

__all__ = ["compare", "reproduce"]


def compare(
    eps: Annotated[float, typer.Option(help="The certified eps of every protocol.")] = 1.0,
    delta: Annotated[float, typer.Option(help="The certified delta of every protocol.")] = 5e-6,
    task: Annotated[str, typer.Option(help='A task (see `dovetail data`) or "module:name".')] = "mnist",
    model: Annotated[str, typer.Option(help="The model: logistic or scatter.")] = "logistic",
    protocols: Annotated[
        str | None, typer.Option(help="Compare only these protocols, separated by commas.", metavar="A,B")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of training runs per protocol.")] = 3,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a config key for all protocols, such as cohort.size=500.", metavar="KEY=VALUE"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to; earlier results there at the same privacy are kept. Default: runs/compare-<time>."
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Train every protocol at the same certified privacy; writes comparison.json, comparison.csv and report.html."""
    from dovetail import compare as comparing
    from dovetail import pages
    from dovetail.engine import devices
    from dovetail.experiment import config

    devices.use_all_cores()
    names = tuple(name.strip() for name in protocols.split(",") if name.strip()) if protocols else ()
    overrides = [config.parse_override(text) for text in set_ or []]
    contenders = comparing.line_up(eps=eps, delta=delta, model=model, task=task, protocols=names, overrides=overrides)
    target = out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
    trained = sum(contender.config is not None for contender in contenders)
    with steps(trained * (seeds + 1)) as bar:
        comparison = comparing.compare(
            contenders, task=task, model=model, eps=eps, delta=delta, seeds=seeds, out=target, observe=bar.begin
        )
    pages.write_comparison_page(target)
    if as_json:
        print_json({**comparison.to_json(), "out": str(target)})
        return
    out_console.print(_ranking_table(comparison.runs, comparison.baseline))
    for outcome in comparison.outcomes:
        if outcome.reason:
            out_console.print(f"{outcome.protocol}: not run, {outcome.reason}", markup=False, highlight=False)
    if task != "mnist":
        out_console.print(
            "clip norms, learning rates and round sizes were tuned on MNIST, so read the ranking with care; "
            "--set cohort.size=N sets the round size of all protocols",
            highlight=False,
        )
    best = comparison.best_single_shuffler
    if best is not None:
        out_console.print(f"best with one shuffler: {best} ({comparison.runs[best].mean:.2%})", highlight=False)
    if guessing := [name for name, run in comparison.runs.items() if not run.beats_baseline]:
        warning = f"no better than a constant guess, so their order means nothing: {', '.join(guessing)}"
        out_console.print(warning, markup=False, highlight=False)
    out_console.print(f"report: {target / 'report.html'}", markup=False, highlight=False)


def _ranking_table(runs: Mapping[str, Run], baseline: float | None) -> Table:
    columns = ("protocol", "accuracy", "rounds", "eps", "verdict", "trusts", "eps without trust", "messages per user",
               "bytes per user and round", "server s")  # fmt: skip
    table = Table(*columns, box=None)
    for name, run in runs.items():
        if baseline is not None and not run.mean > baseline:
            table.add_row("best constant guess", f"{baseline:.2%}")
            baseline = None
        row = run.to_json()
        spread = f" +- {row['spread']:.2%}" if row["spread"] is not None else ""
        cells = (
            name,
            f"{run.mean:.2%}{spread}",
            str(run.rounds),
            _eps_cell(row["certified"]),
            run.certified.verdict.value,
            run.trust,
            _eps_cell(run.statement_without_trust.to_json()),
            f"{run.costs.messages:,}",
            f"{run.costs.bytes:,}",
            f"{run.costs.server_seconds:.3g}",
        )
        table.add_row(*cells)
    if baseline is not None:
        table.add_row("best constant guess", f"{baseline:.2%}")
    return table


def _eps_cell(statement: dict[str, Any]) -> str:
    return "unbounded" if statement["unbounded"] else at_most(statement["eps"])


def reproduce(
    paper: Annotated[str, typer.Argument(help="flame, apes, survey, geyer, subdp, or all.")],
    out: Annotated[Path, typer.Option(help="Folder for pages and data.")],
    quick: Annotated[bool, flag("--quick", "Fewer points: about 3 minutes per paper on 2 cores.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Number of training runs per config.")] = 1,
    parts: Annotated[str | None, typer.Option(help="Only these tables and figures.", metavar="A,B")] = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Recompute a paper's tables and figures: printed, claimed, certified, audited and measured values.

    Writes JSON and CSV for every table and figure, and report.html; for `all`, one folder per paper and index.html.
    """
    from dovetail import _validate, machine, pages, papers
    from dovetail.engine import devices

    _validate.known_name("paper", paper, [*papers.PAPERS, "all"])
    studies = list(papers.PAPERS.values()) if paper == "all" else [papers.PAPERS[paper]]
    only = tuple(key.strip() for key in parts.split(",")) if parts else ()
    keys = {part.key for study in studies for part in study.parts}
    for key in only:
        _validate.known_name("part", key, keys)
    studies = [study for study in studies if not only or any(part.key in only for part in study.parts)]
    devices.use_all_cores()
    if not quick and not only:
        place = "gpu" if machine.has_accelerator() else "cpu"
        minutes = seeds * sum(study.minutes[place] for study in studies) / 3
        progress_console.print(f"this takes about {max(1, round(minutes))} minutes here", highlight=False)
    folders = {study.name: out / study.name if paper == "all" else out for study in studies}
    total = sum(not only or part.key in only for study in studies for part in study.parts)
    if paper == "all":
        papers.write_index(out, list(folders))
    with steps(total) as bar:
        for study in studies:
            papers.reproduce(
                study, out=folders[study.name], quick=quick, seeds=seeds, only=only, observe=bar.say, begin=bar.begin
            )
            pages.write_paper_page(folders[study.name])
    page = out / "report.html"
    if paper == "all":
        page = pages.write_index_page(out)
    if as_json:
        print_json({"papers": {name: _read_exhibits(folder) for name, folder in folders.items()}, "page": str(page)})
        return
    for study in studies:
        out_console.print(_summary_table(study, folders[study.name]))
    out_console.print(f"report: {page}", markup=False, highlight=False)


def _read_exhibits(folder: Path) -> dict[str, Any]:
    facts = json.loads((folder / "paper.json").read_text(encoding="utf-8"))
    return {
        **facts,
        "exhibits": {
            key: json.loads((folder / f"{key}.json").read_text(encoding="utf-8")) for key in facts["exhibits"]
        },
    }


def _eps_with_verdict(statement: dict[str, Any]) -> str:
    """An eps with its verdict, unless that is the column's own."""
    return _eps_cell(statement) + ("" if statement["verdict"] == "certified" else f" ({statement['verdict']})")


def _summary_table(paper: Any, folder: Path) -> Table:
    """One line per row, for the terminal; the page has everything."""
    table = Table(paper.name, "paper", "claimed", "certified", "audited", "ours", box=None)
    for exhibit in _read_exhibits(folder)["exhibits"].values():
        table.add_section()
        table.add_row(exhibit["title"], style="bold")
        for row in exhibit["rows"]:
            claimed = row["claimed"] and f"{_eps_cell(row['claimed'])} {row['claimed']['verdict'].partition(', ')[2]}"
            audited = row["audited"] and (
                "unbounded" if row["audited"]["unbounded"] else f">= {at_least(row['audited']['eps_lower'])}"
            )
            ours = row["ours"] and f"{row['ours']['mean']:.4g}"
            printed = ", ".join(f"{key} {value:g}" for key, value in row["paper"].items())
            cells = (
                row["label"],
                printed,
                claimed,
                row["certified"] and _eps_with_verdict(row["certified"]),
                audited,
                ours,
            )
            table.add_row(*(cell or ("not run" if row["not_here"] else "") for cell in cells))
    return table
