"""The command that shows runs side by side: `runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._shared import JsonFlag, flag, out_console, print_json
from dovetail.numbers import at_most

__all__ = ["runs"]

_DEFAULT = Path("runs")


def runs(
    places: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of runs, or to search for runs; a name may be one in runs/. Default: runs."),
    ] = None,
    compare: Annotated[
        bool, flag("--compare", "Show what differs between these runs: settings, and what came out.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the scores into this file (.svg; .png and .pdf).")] = None,
    over: Annotated[str, typer.Option(help="What to plot scores against: rounds or eps.")] = "rounds",
    as_json: JsonFlag = False,
) -> None:
    """List runs with what they state; compare them, or plot how their scores grew."""
    from dovetail import figures
    from dovetail.watching import runs as reading

    if plot is not None:
        figures.check_file(plot)
    shown = [run for place in places or [_DEFAULT] for run in reading.find_runs(_folder(place))]
    if compare and len(shown) < 2:
        raise ValueError(f"--compare needs two runs or more, got {len(shown)}")
    if plot is not None:
        figures.save(
            reading.figure(shown if compare else [run for run in shown if len(run.metrics) > 1], over=over), plot
        )
    if as_json:
        facts: dict[str, Any] = {"runs": [run.row() for run in shown]}
        if compare:
            facts["differences"] = reading.differences(shown)
        print_json({**facts, "plot": None if plot is None else str(plot)})
        return
    if not shown:
        searched = ", ".join(map(str, places or [_DEFAULT]))
        out_console.print(f"no runs in {searched}", markup=False, highlight=False)
    elif compare:
        out_console.print(_differences_table(shown, reading.differences(shown)))
    else:
        out_console.print(_runs_table(shown))
    if plot is not None:
        out_console.print(f"plot: {plot}", markup=False, highlight=False)


def _folder(place: Path) -> Path:
    """The folder itself, or the one of this name among the runs."""
    return _DEFAULT / place if not place.exists() and (_DEFAULT / place).is_dir() else place


def _runs_table(runs: list[Any]) -> Table:
    table = Table("name", "task", "protocol", "statement", "score", "baseline", "rounds", "s/round", "ended", box=None)
    for run in runs:
        row = run.row()
        seconds = row["seconds_per_round"]
        cells = (
            row["name"],
            row["task"],
            row["protocol"],
            _statement_cell(run),
            f"{row['score']} {_number(row['score'], row['value'])}" if row["score"] else "-",
            _number(row["score"], row["baseline"]),
            str(row["rounds"]),
            "-" if seconds is None else f"{seconds:.3g}",
            f"{run.when:%Y-%m-%d %H:%M}" if run.summary is not None else "-",
        )
        table.add_row(*cells)
    return table


def _statement_cell(run: Any) -> str:
    """The numbers of a statement with the neighbours and the unit that they are for."""
    statement = run.statement
    if statement is None:
        return f"none: {run.state}"
    if statement.is_unbounded:
        return "no guarantee"
    numbers = f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP"
    return f"{numbers}, {statement.neighbors.value}, per {statement.unit.value}, {statement.trust.value}"


def _number(score: str | None, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if score == "accuracy" else f"{value:.4g}"


def _differences_table(runs: list[Any], differences: dict[str, list[Any]]) -> Table:
    table = Table("", *(run.name for run in runs), box=None)
    for key, values in differences.items():
        if key == "assumptions":
            values = ["see report.html"] * len(values)
        table.add_row(key, *(_cell(key, value) for value in values))
    return table


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return at_most(value) if key in ("certified eps", "delta") else f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
