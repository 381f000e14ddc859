"""Commands that train, check, fetch and measure: `run`, `verify`, `data`, `bench`."""

from __future__ import annotations

import runpy
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._progress import live_page, rounds_bar
from dovetail.cli._shared import (
    CeilingOption,
    Explain,
    JsonFlag,
    LedgerName,
    Overrides,
    Quiet,
    TrustCode,
    err_console,
    flag,
    out_console,
    print_json,
    print_names,
    print_result,
    progress_console,
)

__all__ = ["bench", "data", "run", "verify"]

DEFAULT_PRESET, FALLBACK_PRESET = "headline", "digits"
_INTERRUPTED = 130
_NOT_LEARNED = (
    "it did not learn: no better than a constant guess; `dovetail choose` shows which protocols need less noise"
)
_RANKS_ONLY = (
    "it tells the classes apart (see its AUC), but cut at one half it is right no more often than a constant guess, as "
    "is usual where one class is rare: choose a threshold of your own on its probabilities"
)


def run(
    config: Annotated[
        str | None, typer.Argument(help="A TOML file or a preset (see --presets). Default: headline.")
    ] = None,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: runs/<config>-<time>.")] = None,
    resume: Annotated[bool, flag("--resume", "Continue from the last checkpoint in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Rounds between checkpoints.")] = 10,
    presets: Annotated[bool, flag("--presets", "List the bundled configs.")] = False,
    coordinator: Annotated[
        str | None, typer.Option(help="host:port of process 0, for training with several processes (jax.distributed).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that train together.")] = 1,
    process_id: Annotated[int, typer.Option(min=0, help="Index of this process, starting at 0.")] = 0,
    audit: Annotated[
        bool,
        flag(
            "--audit",
            "At the end, attack one round exactly and add the result to the report; takes seconds to minutes.",
        ),
    ] = False,
    live: Annotated[
        bool, flag("--live", "Also write live.html, a page that reloads itself and shows where the training stands.")
    ] = False,
    ledger: LedgerName = None,
    ceiling: CeilingOption = None,
    force: Annotated[bool, flag("--force", "Train even where noise will drown the updates.")] = False,
    explain: Explain = False,
    verbose: Annotated[
        bool, flag("--verbose", "Also say how clients are computed: which strategy, for which sizes, and why.")
    ] = False,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Train a model. Writes the config, metrics, statement, ledger, model, recipe of its inputs, and a report."""
    from dovetail import experiment
    from dovetail.engine import devices
    from dovetail.experiment import config as configs
    from dovetail.experiment.outlook import Outlook
    from dovetail.experiment.result import headline, separates_classes

    if presets:
        _print_presets(configs.preset_titles(), as_json=as_json)
        return
    if resume and out is None:
        raise ValueError("--resume needs --out, the folder of the run to go on with")
    if resume and out is not None and (out / "privacy.json").exists():
        _say_finished(out, as_json=as_json)
        return
    devices.use_all_cores()
    if coordinator is not None:
        devices.join_processes(coordinator, processes=processes, process_id=process_id)
    source = config or (str(out / "config.toml") if resume and out is not None else DEFAULT_PRESET)
    plan = _prepare(source, set_ or [], fall_back=config is None and source == DEFAULT_PRESET, resume=resume)
    outlook = Outlook.of(plan)
    outlook.refuse_if_hopeless(force=force or resume)
    if verbose:
        for line in plan.engine.describe_strategies():
            err_console.print(line, markup=False, highlight=False)
    target = out or Path("runs") / f"{Path(source).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        is_seeded = plan.sampler.schedule.randomness.is_reproducible
        with rounds_bar(plan.num_rounds, reproducible=is_seeded, opening=outlook.describe()) as bar:
            watchers = [bar, *(live_page(target) if live else ())]
            result = experiment.run(
                plan,
                out=target,
                resume=resume,
                checkpoint_every=checkpoint_every,
                callbacks=watchers,
                ledger=ledger,
                ceiling=ceiling,
            )
    except KeyboardInterrupt:
        _say_interrupted(target, config, set_ or [])
        raise typer.Exit(_INTERRUPTED) from None
    if process_id != 0:
        return
    _write_report(plan, target, audit=audit)
    if as_json:
        print_json({**result.to_json(), **_uploads_per_user(plan, result.uploads)})
        return
    out_console.print(
        f"test {headline(result.metrics, result.baseline, result.evaluation)} after {_rounds_in_words(result)}",
        highlight=False,
    )
    if result.beats_baseline is False:
        verdict = _RANKS_ONLY if separates_classes(result.metrics) else _NOT_LEARNED
        out_console.print(verdict, markup=False, highlight=False)
    print_result(result, explained=explain)
    out_console.print(_cost_if_deployed(plan, result.uploads), markup=False, highlight=False)
    out_console.print(f"report: {target / 'report.html'}", markup=False, highlight=False)


def _cost_if_deployed(plan: Any, uploads: int) -> str:
    """What the same rounds would cost users if parties were real."""
    from dovetail import compare

    costs = _costs_of_round(plan)
    each = _uploads_per_user(plan, uploads)
    volume = compare.bytes_in_words(each["bytes_per_user"])
    return f"simulated on one machine: deployed, {costs}, {each['uploads_per_user']:.3g} times or {volume} in all"


def _uploads_per_user(plan: Any, uploads: int) -> dict[str, float]:
    """How often a user uploads over the whole training, and how many bytes that would be: means over all users."""
    times = uploads / plan.sampler.schedule.population
    return {"uploads_per_user": times, "bytes_per_user": times * _costs_of_round(plan).bytes}


def _costs_of_round(plan: Any) -> Any:
    """What a round would cost if parties were real."""
    from dovetail import compare

    return compare.costs(plan.sampler.protocol, plan.sampler.schedule.num_uploads_of(0), plan.engine.dim)


def _say_interrupted(folder: Path, config: str | None, overrides: Sequence[str]) -> None:
    """How to go on after Ctrl-C: with the same config and changes, whose modules may lie beside it."""
    from dovetail.experiment.folder import RunFolder

    if RunFolder(folder).is_resumable:
        changes = [word for text in overrides for word in ("--set", text)]
        words = ["dovetail", "run", *([config] if config else []), *changes, "--resume", "--out", str(folder)]
        message = f"interrupted; to continue from the last checkpoint: {shlex.join(words)}"
    else:
        message = f"interrupted before the first checkpoint: there is nothing to resume in {str(folder)!r}"
    err_console.print(message, markup=False, highlight=False)


def _say_finished(folder: Path, *, as_json: bool) -> None:
    """Say that a run to be resumed has ended, after what a kill may have left undone: checkpoint and settlement."""
    from dovetail.experiment.folder import RunFolder
    from dovetail.experiment.spending import settle_finished_run

    run = RunFolder(folder)
    run.delete_checkpoint()  # a kill may have left the checkpoint
    settle_finished_run(run)
    if as_json:
        print_json({**run.read_privacy(), "finished": True, "out": str(folder)})
        return
    message = f"the run in {str(folder)!r} is finished: nothing to resume, and nothing was changed"
    out_console.print(message, markup=False, highlight=False)


def verify(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    quiet: Quiet = False,
    data_key: Annotated[
        Path | None,
        typer.Option(help="The key of the data's fingerprint: check that --data, or the config's data, are the run's."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Data to check: a Dataset, a Task or a function that returns one.", metavar="MODULE:OBJECT"),
    ] = None,
    trust_code: TrustCode = False,
    as_json: JsonFlag = False,
) -> None:
    """Recompute a run's statements from its ledger; exits with status 1 if privacy.json, or the data, disagree."""
    from dovetail.experiment.verify import import_data
    from dovetail.experiment.verify import verify as verify_run

    with progress_console.status("accounting"):
        given = None if data is None else import_data(data)
        verification = verify_run(run, data=given, data_key=data_key, trust_code=trust_code)
    if as_json:
        print_json(verification.to_json())
    else:
        out_console.print(str(verification.statement), markup=False, highlight=False)
        for difference in verification.differences:
            out_console.print(f"differs: {difference}", markup=False, highlight=False)
        if verification.missing:
            missing = ", ".join(verification.missing)
            out_console.print(f"not in the folder, so not checked: {missing}", markup=False, highlight=False)
        verdict = "agrees" if verification.agrees else "does not agree"
        ledger = f"the ledger of {verification.rounds} round{'s' * (verification.rounds != 1)}"
        out_console.print(f"privacy.json {verdict} with {ledger}", markup=False, highlight=False)
        if verification.data_checked:
            out_console.print(f"data: {verification.data or 'the same as in the run'}", markup=False, highlight=False)
    if not verification.agrees:
        raise typer.Exit(1)


def _print_presets(described: Mapping[str, str], *, as_json: bool) -> None:
    if as_json:
        print_json(list(described))
        return
    table = Table.grid(padding=(0, 2))
    for name, what in described.items():
        table.add_row(name, what)
    out_console.print(table)


def _prepare(source: str, overrides: Sequence[str], *, fall_back: bool, resume: bool) -> Any:
    """The plan of a config; if its data are not there, that of the bundled digits."""
    from dovetail import experiment
    from dovetail.experiment import config as configs
    from dovetail.experiment.training import refuse_nameless_task

    changes = [configs.parse_override(text) for text in overrides]
    if resume:
        refuse_nameless_task(configs.read(source, changes).task.name)
    with progress_console.status("loading data and calibrating the noise"):
        try:
            return experiment.prepare(configs.read(source, changes))
        except FileNotFoundError as error:
            if not fall_back:
                raise
            err_console.print(f"{error}; training on the bundled digits instead", markup=False, highlight=False)
            return experiment.prepare(configs.read(FALLBACK_PRESET, changes))


def _write_report(plan: Any, folder: Path, *, audit: bool) -> None:
    """Write the report at once, and again with the attack on one round in it if that is asked for."""
    from dovetail import pages

    pages.write(folder)
    if audit:
        from dovetail.audit import curves

        with progress_console.status("attacking one round"):
            curves.write_audit(plan, folder)
        pages.write(folder)


def data(
    name: Annotated[str | None, typer.Argument(help="A task; omit it to list all tasks.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder that already holds the files.")] = None,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Fetch and verify a dataset."""
    from dovetail.data import TASKS, resolve
    from dovetail.engine import scoring

    if name is None:
        print_names(sorted(TASKS), as_json=as_json)
        return
    with progress_console.status(f"loading {name}"):
        dataset = resolve(name).load(folder=folder)
    facts = {
        "task": name,
        "records": len(dataset.labels),
        "test_records": len(dataset.test_labels),
        "shape": list(dataset.inputs.shape[1:]),
        "classes": dataset.num_classes,
        "majority": scoring.baseline_scores(dataset).get("accuracy"),
        "subjects": None if dataset.subjects is None else len(set(dataset.subjects.tolist())),
        "users": None if dataset.users is None else len(set(dataset.users.tolist())),
    }
    if as_json:
        print_json(facts)
        return
    guess = "labels are numbers"
    if facts["majority"] is not None:
        guess = f"majority-class baseline: {facts['majority']:.2%} of the test records"
    out_console.print(
        f"{name}: {facts['records']} training and {facts['test_records']} test records, shape {facts['shape']}, "
        f"{facts['classes']} classes, {facts['subjects'] or 'no known'} subjects, verified; {guess}",
        highlight=False,
    )


def bench(
    name: Annotated[str | None, typer.Argument(help="A benchmark; omit it to list all benchmarks.")] = None,
    options: Annotated[
        list[str] | None, typer.Argument(help="Its own options, after --; -- --help lists them.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run one benchmark. It compares alternatives within the same run and prints ratios."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    if not folder.is_dir():
        raise FileNotFoundError("benchmarks are part of a source checkout, and this is an installation without them")
    files = {file.stem.rstrip("_"): file for file in folder.glob("*.py") if not file.stem.startswith("_")}
    if name is None:
        print_names(sorted(files), as_json=as_json)
        return
    from dovetail import _validate

    _validate.known_name("benchmark", name, sorted(files))
    sys.path.insert(0, str(folder))
    sys.argv = [str(files[name]), *(["--json"] if as_json else []), *(options or [])]
    runpy.run_path(sys.argv[0], run_name="__main__")


def _rounds_in_words(result: Any) -> str:
    text = f"{result.rounds} rounds ({result.seconds_per_round:.3g} s each, {result.uploads} uploads)"
    if result.charged_rounds > result.rounds:
        text += f" of {result.planned_rounds} planned: it was ended early, and {result.charged_rounds} are charged"
    elif result.rounds < result.planned_rounds:
        text += (
            f" of {result.planned_rounds} planned: the next round would exceed the budget, or too few users took part"
        )
    return text
