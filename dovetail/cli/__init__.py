"""The command line: parse, call, print.

Bad input ends in one sentence on stderr and exit status 2. With ``--json`` stdout holds one JSON object and nothing
else; progress and logs go to stderr. Commands import what they need when they run, so that `--help` and completion
answer at once.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from dovetail import __version__
from dovetail.cli import (
    accounts,
    audits,
    choices,
    explanations,
    fleets,
    operators,
    parties,
    predictions,
    reports,
    runs,
    studies,
    tasks,
    training,
    tuning,
    users,
)
from dovetail.cli._shared import (
    Command,
    Group,
    err_console,
    flag,
    out_console,
    print_error,
    progress_console,
    strip_control_characters,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="dovetail",
    help="Train models on data that stays with its owners, and prove a bound on what can leak.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS: dict[str, tuple[Callable[..., None] | typer.Typer, ...]] = {  # as `dovetail -h` shows them
    "Train": (training.run, tuning.tune, predictions.predict, runs.runs, training.data, explanations.help_),
    "Privacy": (
        choices.choose,
        accounts.calibrate,
        accounts.account,
        training.verify,
        reports.report,
        audits.audit,
    ),
    "Deploy": (
        tasks.keys,
        tasks.task,
        users.client,
        parties.shuffler,
        parties.aggregator,
        parties.analyzer,
        operators.party,
        fleets.fleet,
    ),
    "Research": (studies.compare, studies.reproduce, training.bench),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, rich_help_panel=_panel)
        else:
            name = _command.__name__.rstrip("_").replace("_", "-")  # `help_` is `help`
            app.command(name, rich_help_panel=_panel)(_command)
for _group in (app, accounts.account, tasks.task, users.client, operators.party, fleets.fleet):
    _group.info.cls = Group
    for _registered in _group.registered_commands:
        _registered.cls = Command


def main() -> None:
    """Entry point: one sentence and exit 2 for bad input."""
    # or JAX takes three quarters of a GPU at once, and 3.4 GB of the host's memory with it
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe on Windows may not know every letter that a user's file has
        sys.stdout.reconfigure(errors="replace")
    logging.basicConfig(level=logging.WARNING, handlers=[_log_handler()])
    try:
        _command_tree()(prog_name="dovetail")
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print_error(str(error))
        sys.exit(2)


def _log_handler() -> logging.Handler:
    """Wrapped to a terminal's width; one line each in a file, where one searches for them."""
    handler: logging.Handler
    if err_console.is_terminal:
        handler = RichHandler(console=err_console, show_time=False, show_path=False, markup=False)
        handler.setFormatter(_Printable("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_Printable("%(levelname)s %(message)s"))
    return handler


class _Printable(logging.Formatter):
    """What others said is quoted in logs, and logs are looked at in terminals."""

    def format(self, record: logging.LogRecord) -> str:
        return strip_control_characters(super().format(record))


@functools.cache
def _command_tree() -> Any:
    """The tree of commands: whoever calls `main` more than once need not make it anew."""
    return typer.main.get_command(app)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, flag("--version", "Print the version and exit.")] = False) -> None:
    progress_console.quiet = False  # unless the command is told otherwise
    if version:
        out_console.print(__version__)
        raise typer.Exit
