"""The command line: parse, call, print.

Bad input ends in one sentence on stderr and exit status 2. With ``--json`` stdout holds one JSON object and nothing
else; progress and logs go to stderr.
"""

from __future__ import annotations

import contextlib
import json
import logging
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dovetail import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="dovetail",
    help="Train models on data that stays with its owners, and prove what leaked.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out, _err = Console(soft_wrap=True), Console(stderr=True, soft_wrap=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
DEFAULT_PRESET, FALLBACK_PRESET = "mnist", "digits"


def main() -> None:
    """Entry point: one sentence and exit 2 for bad input."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=_err, show_time=False, show_path=False, markup=False)],
    )
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        _err.print(f"dovetail: {' '.join(str(error).split())}", style="red", markup=False, highlight=False)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        _out.print(__version__)
        raise typer.Exit


@app.command()
def run(
    config: Annotated[
        str | None, typer.Argument(help="A TOML file or a preset (see --presets). Default: mnist.", metavar="[CONFIG]")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key: --set privacy.eps=2.", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: runs/<config>-<time>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between checkpoints.")] = 10,
    presets: Annotated[bool, typer.Option("--presets", help="List the bundled configs.")] = False,
    coordinator: Annotated[
        str | None, typer.Option(help="host:port of process 0, to train with several processes (jax.distributed).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many processes train together.")] = 1,
    process_id: Annotated[int, typer.Option(min=0, help="Which of them this is.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Train a model; writes config.toml, metrics.jsonl, privacy.json, model.npz and report.html."""
    from dovetail import config as configs
    from dovetail import experiment, report
    from dovetail.simulate import devices

    if presets:
        _print_json(configs.presets()) if as_json else _out.print("\n".join(configs.presets()))
        return
    if resume and out is None:
        raise ValueError("expected --out with --resume, got none")
    devices.use_all_cores()
    if coordinator is not None:
        devices.join(coordinator, processes=processes, process_id=process_id)
    overrides = [configs.parse_override(text) for text in set_ or []]
    source = config or (str(out / "config.toml") if resume and out is not None else DEFAULT_PRESET)
    with _err.status("loading data and calibrating the noise"):
        try:
            plan = experiment.prepare(configs.read(source, overrides))
        except FileNotFoundError as error:
            if source != DEFAULT_PRESET or config is not None:
                raise
            _err.print(f"{error}; training on the bundled digits instead", markup=False, highlight=False)
            plan = experiment.prepare(configs.read(FALLBACK_PRESET, overrides))
    target = out or Path("runs") / f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    with _progress_bar(len(plan.rounds)) as observe:
        result = experiment.run(plan, out=target, resume=resume, checkpoint_every=checkpoint_every, observe=observe)
    if process_id != 0:
        return
    report.write(target)
    if as_json:
        _print_json(result.to_json())
        return
    _out.print(f"test accuracy {result.accuracy:.2%} after {_rounds(result)}", highlight=False)
    _out.print(str(result.statement), markup=False, highlight=False)
    _out.print(_unit_table(result.units))
    _out.print(f"written to {target}", markup=False, highlight=False)


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="A task; without it, the list.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the files already are.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Fetch and verify a dataset."""
    from dovetail.tasks import TASKS, resolve

    if name is None:
        _print_json(sorted(TASKS)) if as_json else _out.print("\n".join(sorted(TASKS)))
        return
    with _err.status(f"loading {name}"):
        dataset = resolve(name).load(folder=folder)
    facts = {
        "task": name,
        "records": len(dataset.labels),
        "test_records": len(dataset.test_labels),
        "shape": list(dataset.inputs.shape[1:]),
        "classes": dataset.num_classes,
        "subjects": None if dataset.subjects is None else len(set(dataset.subjects.tolist())),
    }
    if as_json:
        _print_json(facts)
        return
    _out.print(
        f"{name}: {facts['records']} records and {facts['test_records']} for testing, shape {facts['shape']}, "
        f"{facts['classes']} classes, {facts['subjects'] or 'no known'} subjects, verified",
        highlight=False,
    )


@app.command()
def bench(
    name: Annotated[str | None, typer.Argument(help="A benchmark; without it, the list.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run one benchmark: every figure is a ratio inside this run."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    if not folder.is_dir():
        raise FileNotFoundError("expected the benchmarks of a source checkout, got an installation without them")
    names = sorted(file.stem for file in folder.glob("*.py") if not file.stem.startswith("_"))
    if name is None:
        _print_json(names) if as_json else _out.print("\n".join(names))
        return
    from dovetail import _validate

    _validate.known("benchmark", name, names)
    sys.path.insert(0, str(folder))
    sys.argv = [str(folder / f"{name}.py"), *(["--json"] if as_json else [])]
    runpy.run_path(sys.argv[0], run_name="__main__")


@app.command()
def reproduce(
    paper: Annotated[str, typer.Argument(help="geyer or subdp.")],
    out: Annotated[Path, typer.Option(help="Folder for table.md and table.json.")],
    quick: Annotated[bool, typer.Option("--quick", help="The shortest rows only.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row.")] = 1,
    as_json: JsonFlag = False,
) -> None:
    """Run a paper's experiments: what it printed, what is certified, what we measure."""
    from dovetail import _validate, papers
    from dovetail.simulate import devices

    _validate.known("paper", paper, papers.PAPERS)
    devices.use_all_cores()
    table = papers.PAPERS[paper](quick=quick)
    total, done = len(table.rows) * seeds + 1, 0
    with Progress(
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=_err,
        transient=True,
    ) as bar:
        task = bar.add_task("", total=total)

        def observe(text: str) -> None:
            nonlocal done
            bar.update(task, completed=done, description=text)
            done += 1

        outcomes = papers.reproduce(table, out=out, seeds=seeds, observe=observe)
    if as_json:
        _print_json({"paper": paper, "rows": [outcome.to_json() for outcome in outcomes], "out": str(out)})
        return
    _out.print((out / "table.md").read_text(), markup=False, highlight=False)
    _out.print(f"written to {out}", markup=False, highlight=False)


account = typer.Typer(help="Privacy of bounds and protocols, without running anything.", no_args_is_help=True)
app.add_typer(account, name="account")

Users = Annotated[int, typer.Option("--n", help="Users in a round.")]
Delta = Annotated[float, typer.Option("--delta", help="The delta of the statement.")]
Colluders = Annotated[int, typer.Option("--colluders", help="Users that are fake or collude.")]
Dim = Annotated[int, typer.Option("--dim", help="Coordinates of an update.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting of the protocol.", metavar="KEY=VALUE")]


@account.command()
def amplify(
    n: Users,
    eps_local: Annotated[float, typer.Option("--eps-local", help="The budget of one report.")],
    delta: Delta,
    bound: Annotated[str | None, typer.Option(help="One bound only.")] = None,
    randomizer: Annotated[
        str, typer.Option(help="generic, laplace or rr2: what the best bound must hold for.")
    ] = "generic",
    colluders: Colluders = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw every bound into this file (.svg, .png, .pdf).")] = None,
    over: Annotated[str, typer.Option(help="What the plot runs over: n or eps-local.")] = "n",
    as_json: JsonFlag = False,
) -> None:
    """Every amplification bound: its eps, or why it does not apply."""
    from dovetail import _validate, plots
    from dovetail.accounting import amplify as amplification
    from dovetail.statements import NotApplicable

    _validate.integer(n=n)
    _validate.at_least(2, n=n)
    _validate.positive(eps_local=eps_local)
    _validate.in_open_interval(0, 1, delta=delta)
    if bound is not None:
        _validate.known("bound", bound, amplification.BOUNDS)
    rows = [
        row
        for row in amplification.table(eps_local, num_users=n, delta=delta, colluders=colluders)
        if bound is None or row.name == bound
    ]
    try:
        best = amplification.best(_report(randomizer, eps_local), num_users=n, delta=delta, colluders=colluders)
    except NotApplicable:
        best = None
    if plot is not None:
        plots.amplification(plot, num_users=n, eps_local=eps_local, delta=delta, over=over)
    if as_json:
        facts = {"n": n, "eps_local": eps_local, "delta": delta, "colluders": colluders}
        _print_json({**facts, "bounds": [_row(row) for row in rows], "best": _row(best) if best else None})
        return
    table = Table("bound", "eps", "theorem, or why it does not apply")
    for row in rows:
        table.add_row(row.name, f"{row.bound.eps:.5g}" if row.bound else "-", row.reason or row.theorem.where)
    _out.print(table)
    if best and best.bound:
        said = f"smallest for a {randomizer} report: {best.name}, eps {best.bound.eps:.5g} at delta {delta:g}"
    else:
        said = f"no bound improves on eps_local for a {randomizer} report"
    _out.print(said, highlight=False)


@account.command("protocol")
def account_protocol(
    name: Annotated[str, typer.Argument(help="A protocol.")],
    n: Users,
    dim: Dim,
    delta: Delta,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which a user takes part.")] = 1,
    population: Annotated[int | None, typer.Option(help="Users from whom a round draws --n in secret.")] = None,
    colluders: Colluders = 0,
    set_: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """Certified, claimed and local statements of a protocol."""
    from dovetail import quotes

    with _err.status("accounting"):
        quote = quotes.quote(name, _quote_plan(n, dim, delta, rounds, population, colluders, set_))
    if as_json:
        _print_json(quote.to_json())
        return
    _print_quote(quote)


@app.command()
def calibrate(
    name: Annotated[str, typer.Argument(help="A protocol.")],
    n: Users,
    dim: Dim,
    eps: Annotated[float, typer.Option("--eps", help="The central target.")],
    delta: Delta,
    parameter: Annotated[
        str | None, typer.Option(help="eps_local, noise_multiplier, beta or pad_to; by default the noise.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which a user takes part.")] = 1,
    colluders: Colluders = 0,
    set_: Settings = None,
    as_json: JsonFlag = False,
) -> None:
    """The parameter that meets a central target, never on the unsafe side."""
    from dovetail import quotes

    plan = _quote_plan(n, dim, delta, rounds, None, colluders, set_)
    with _err.status("calibrating"):
        chosen, value, quote = quotes.calibrate(name, plan, eps=eps, parameter=parameter)
    if as_json:
        _print_json({**quote.to_json(), "parameter": chosen, "value": value})
        return
    _out.print(f"{chosen} = {value:.8g}", highlight=False)
    _print_quote(quote)


def _quote_plan(
    n: int, dim: int, delta: float, rounds: int, population: int | None, colluders: int, set_: list[str] | None
) -> Any:
    from dovetail import config, quotes
    from dovetail.events import Everyone, FixedSize

    participation = Everyone() if population is None else FixedSize(size=n, population=population)
    settings = dict(config.parse_override(text) for text in set_ or [])
    return quotes.Plan(
        num_users=n,
        dim=dim,
        delta=delta,
        rounds=rounds,
        colluders=colluders,
        participation=participation,
        settings=settings,
    )


def _print_quote(quote: Any) -> None:
    for title in ("certified", "claimed", "local", "shuffler"):
        statement = getattr(quote, title)
        _out.print(title, style="bold")
        _out.print("  nothing" if statement is None else str(statement), markup=False, highlight=False)


def _report(randomizer: str, eps_local: float) -> Any:
    from dovetail import _validate
    from dovetail.events import Report

    _validate.one_of(("generic", "laplace", "rr2"), randomizer=randomizer)
    kinds: dict[str, Any] = {"generic": "generic", "laplace": "laplace", "rr2": "rr"}
    return Report(kind=kinds[randomizer], eps_local=eps_local)


def _row(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "eps": None if row.bound is None else row.bound.eps,
        "applicable": row.bound is not None,
        "reason": row.reason,
        "theorem": row.theorem.where,
    }


@contextlib.contextmanager
def _progress_bar(rounds: int) -> Iterator[Any]:
    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task("", total=rounds)

        def observe(progress: Any) -> None:
            said = ""
            if progress.accuracy is not None:
                spent = progress.spent
                eps = (
                    f"({spent.eps:.3g}, {spent.delta:.2g})-DP"
                    if spent and spent.eps < float("inf")
                    else "no finite eps"
                )
                said = f"accuracy {progress.accuracy:.2%}, {eps}"
            bar.update(task, completed=progress.round, description=said)

        yield observe


def _unit_table(units: Any) -> Table:
    """What a run promises for each unit, or nothing, and why."""
    table = Table("for one", "certified", "neighbours", "against the", "by, or why nothing", box=None)
    for unit, statement in units.items():
        numbers = "nothing" if statement.unbounded else f"({statement.eps:.4g}, {statement.delta:.3g})-DP"
        why = statement.theorem.where if statement.unbounded else statement.theorem.key
        cells = (unit.value, numbers, statement.neighbors.value, statement.adversary, why)
        table.add_row(*(escape(cell) for cell in cells))
    return table


def _rounds(result: Any) -> str:
    text = f"{result.rounds} rounds ({result.seconds_per_round:.3g} s each, {result.uploads} uploads)"
    if result.rounds < result.planned_rounds:
        text += f" of {result.planned_rounds} planned: the next would exceed the budget or too few users took part"
    return text


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    main()
