"""The command that chooses settings: `tune`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dovetail.cli._shared import (
    CeilingOption,
    Explain,
    JsonFlag,
    LedgerName,
    Overrides,
    Quiet,
    flag,
    out_console,
    print_json,
    print_result,
    progress_console,
)

__all__ = ["tune"]


def tune(
    config: Annotated[str, typer.Argument(help="A TOML file or a preset (see `dovetail run --presets`).")],
    space: Annotated[
        list[str],
        typer.Option(help="Values of a config key to choose from; may be repeated.", metavar="KEY=VALUE,VALUE"),
    ],
    eps: Annotated[float, typer.Option(help="The certified eps of all trials together.")],
    delta: Annotated[float | None, typer.Option(help="The delta of the statement. Default: the config's.")] = None,
    trials: Annotated[
        float | None,
        typer.Option(help="Number of trials; on average, by selection. Default: as many as there are settings."),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="selection: the best of a random number of trials, for a trusted curator. composition: all trials. "
            "auto: selection where there is a curator."
        ),
    ] = "auto",
    eta: Annotated[
        float, typer.Option(help="Shape of the random number of trials: 0 is logarithmic, 1 geometric.")
    ] = 0.0,
    score: Annotated[
        str | None,
        typer.Option(
            help="What to choose by: accuracy, auc, macro_f1, r2, rmse, mae, loss, or a metric of the task's own. "
            "Default: r2 for numbers, otherwise accuracy."
        ),
    ] = None,
    public_test: Annotated[
        bool, flag("--public-test", "Declare that the task's test records, which trials are scored on, are public.")
    ] = False,
    seed: Annotated[int | None, typer.Option(help="The seed of everything public. Default: the config's.")] = None,
    set_: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to. Default: runs/tune-<config>-<time>.")] = None,
    ledger: LedgerName = None,
    ceiling: CeilingOption = None,
    explain: Explain = False,
    quiet: Quiet = False,
    as_json: JsonFlag = False,
) -> None:
    """Choose settings by training with several, under one statement that covers everything that was tried."""
    from dovetail import pages
    from dovetail.engine import devices
    from dovetail.experiment import config as configs
    from dovetail.experiment.result import headline
    from dovetail.experiment.tuning import parse_space, run_trials

    changes = [configs.parse_override(text) for text in set_ or []]
    options = {"privacy.delta": delta, "seed": seed}
    changes += [(key, value) for key, value in options.items() if value is not None]
    base = configs.read(config, changes)
    target = out or Path("runs") / f"tune-{Path(config).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    devices.use_all_cores()
    with progress_console.status("calibrating the noise and training"):
        tuning = run_trials(
            base,
            parse_space(space),
            eps=eps,
            public_test=public_test,
            number=trials,
            by=by,  # type: ignore[arg-type]
            eta=eta,
            score=score,
            out=target,
            ledger=ledger,
            ceiling=ceiling,
        )
    pages.write(target)
    if as_json:
        print_json(tuning.result.to_json())
        return
    _print_trials(tuning.facts)
    result = tuning.result
    out_console.print(f"chosen: {_setting_in_words(tuning.best_setting)}", markup=False, highlight=False)
    scores = headline(result.metrics, result.baseline)
    out_console.print(f"test {scores} after {result.rounds} rounds", highlight=False)
    print_result(result, explained=explain)
    out_console.print(f"report: {target / 'report.html'}", markup=False, highlight=False)


def _print_trials(facts: Mapping[str, Any]) -> None:
    """All trials where all are counted; by selection, how many there are on average and nothing else."""
    if facts["trials"] is None:
        summary = (
            f"the best of a random number of trials, {facts['mean_trials']:.3g} on average; the others stay secret"
        )
        out_console.print(summary, markup=False, highlight=False)
        return
    table = Table("setting", facts["score"], box=None)
    for trial in facts["trials"]:
        table.add_row(
            _setting_in_words(trial["setting"]), "none" if trial["score"] is None else f"{trial['score']:.4g}"
        )
    out_console.print(table)


def _setting_in_words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in setting.items())
