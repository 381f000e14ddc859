"""The command that shows runs side by side, and what they have spent together: `runs`."""

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
    spent: Annotated[
        bool, flag("--spent", "Show what all runs on the same people have spent together, by their ledger.")
    ] = False,
    ledger: Annotated[
        str | None,
        typer.Option(help="With --spent or --ceiling: a ledger's file, or the beginning of its name. Default: all."),
    ] = None,
    ceiling: Annotated[
        str | None,
        typer.Option(
            help="Set what all runs of --ledger together may spend, such as 8 or 8,1e-5; a run beyond it is refused.",
            metavar="EPS[,DELTA]",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List runs with what they state; compare them, plot how their scores grew, or add up what they have spent."""
    if spent or ledger is not None or ceiling is not None:
        if places or compare or plot is not None:
            raise ValueError(
                "--spent, --ledger and --ceiling are about ledgers: leave out folders, --compare and --plot"
            )
        _show_spent(ledger, ceiling, as_json=as_json)
        return
    from dovetail import figures
    from dovetail.watching import runs as reading

    if plot is not None:
        figures.check_drawable_file(plot)
    shown = [run for place in places or [_DEFAULT] for run in reading.find_runs(_run_folder(place))]
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


def _show_spent(name: str | None, ceiling: str | None, *, as_json: bool) -> None:
    """Show one ledger with its runs, or all in the user's folder; set the one's ceiling first, if that is asked."""
    from dovetail.experiment import ledgers as kept

    if name is None and ceiling is not None:
        raise ValueError("--ceiling needs --ledger: which ledger's runs shall stay below it?")
    if name is not None:
        ledger = kept.resolve_ledger(name)
        if ceiling is not None:
            ledger.set_ceiling(kept.parse_ceiling(ceiling))
        elif not ledger.exists:
            raise ValueError(
                f"there is no ledger {name!r}: `dovetail runs --spent` lists those in the user's folder, and a run "
                "makes a new one with --ledger FILE"
            )
        _print_ledger(ledger, as_json=as_json)
        return
    ledgers = kept.find_ledgers()
    if as_json:
        print_json({"ledgers": [{**ledger.total_spent().to_json(), "path": str(ledger.path)} for ledger in ledgers]})
    elif not ledgers:
        where = kept.ledger_folder() or "the user's folder: DOVETAIL_LEDGERS is off"
        out_console.print(f"no ledgers in {where}", markup=False, highlight=False)
    else:
        table = Table("ledger", "runs", "last run", "spent together", "ceiling", box=None)
        for ledger in ledgers:
            together = ledger.total_spent()
            totals = ", ".join(_numbers_with_scope(statement) for statement in together.spent) or "-"
            last = max((run.time for run in ledger.runs()), default="-")
            total = "no guarantee" if together.without_bound else totals
            table.add_row(ledger.name, str(together.runs), last, total, str(together.ceiling or "-"))
        out_console.print(table)


def _print_ledger(ledger: Any, *, as_json: bool) -> None:
    """All runs of a ledger, and what they have spent together: however they were chosen, and if all was fixed."""
    together, runs, fixed = ledger.total_spent(), ledger.runs(), ledger.total_if_fixed()
    if as_json:
        rows = [run.to_json() for run in runs]
        facts = {"path": str(ledger.path), "if_fixed": None if fixed is None else fixed.to_json(), "list": rows}
        print_json({**together.to_json(), **facts})
        return
    if runs:
        table = Table("began (UTC)", "what", "task", "protocol", "spent", "folder", box=None)
        for run in runs:
            cell = "no guarantee" if run.spending.reason_without_bound else _numbers_with_scope(run.spending.statement)
            cell += "" if run.ended else ", reserved: not ended"
            table.add_row(run.time, run.what, run.task, run.protocol, cell, run.folder or "-")
        out_console.print(table)
    out_console.print(together.sentence, markup=False, highlight=False)
    for statement in together.spent:
        out_console.print(str(statement), markup=False, highlight=False)
    if fixed is not None and (len(together.spent) != 1 or fixed.eps < together.spent[0].eps * 0.999):
        said = "if noise, cohorts and numbers of rounds of all runs were fixed before the first"
        out_console.print(f"{_numbers_with_scope(fixed)} {said}", markup=False, highlight=False)
    if together.ceiling is not None:
        out_console.print(f"ceiling: {together.ceiling}", markup=False, highlight=False)


def _numbers_with_scope(statement: Any) -> str:
    """The numbers of a statement with the neighbours and the unit that they are for."""
    numbers = f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP"
    return f"{numbers}, {statement.neighbors.value}, per {statement.unit.value}"


def _run_folder(place: Path) -> Path:
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
            f"{row['score']} {_score_cell(row['score'], row['value'])}" if row["score"] else "-",
            _score_cell(row["score"], row["baseline"]),
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
    return f"{_numbers_with_scope(statement)}, {statement.trust.value}"


def _score_cell(score: str | None, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2%}" if score == "accuracy" else f"{value:.4g}"


def _differences_table(runs: list[Any], differences: dict[str, list[Any]]) -> Table:
    table = Table("", *(run.name for run in runs), box=None)
    for key, values in differences.items():
        if key == "assumptions":
            values = ["see report.html"] * len(values)
        table.add_row(key, *(_difference_cell(key, value) for value in values))
    return table


def _difference_cell(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return at_most(value) if key in ("certified eps", "delta") else f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
