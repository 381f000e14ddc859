"""What every command shares: the consoles, and options that mean the same everywhere."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["Colluders", "Delta", "Dim", "JsonFlag", "Settings", "Users", "err_console", "out_console", "print_json"]

_WIDE = None if sys.stdout.isatty() else 200  # tables in files and pipes are not cut to a screen that is not there
out_console, err_console = Console(soft_wrap=True, width=_WIDE), Console(stderr=True, soft_wrap=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Users = Annotated[int, typer.Option("--n", help="Users in a round.")]
Delta = Annotated[float, typer.Option("--delta", help="The delta of the statement.")]
Colluders = Annotated[int, typer.Option("--colluders", help="Users that are fake or collude.")]
Dim = Annotated[int, typer.Option("--dim", help="Coordinates of an update.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="A setting of the protocol.", metavar="KEY=VALUE")]


def print_json(value: Any) -> None:
    """One JSON value on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value) + "\n")
