"""What commands share: the consoles, ways to print, and options that mean the same everywhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from dovetail import _validate
from dovetail.statements import Neighbors

if TYPE_CHECKING:
    from dovetail.parties.common.keys import PublicKey, ServiceKeys

__all__ = [
    "Authority",
    "Colluders",
    "Command",
    "Delta",
    "Dim",
    "Explain",
    "Group",
    "HeldOut",
    "JsonFlag",
    "Measures",
    "Overrides",
    "Participation",
    "Population",
    "Quiet",
    "Relation",
    "Rounds",
    "Settings",
    "TrustCode",
    "Users",
    "address_printer",
    "err_console",
    "flag",
    "key_id_from",
    "out_console",
    "parse_settings",
    "print_error",
    "print_guarantees",
    "print_json",
    "print_names",
    "print_result",
    "print_statement",
    "progress_console",
    "read_public_key",
    "relation_of",
    "strip_control_characters",
]

_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_CONTROLS |= dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))  # of direction


def strip_control_characters(text: str) -> str:
    """A text without what moves the cursor, colours, or turns the direction of writing."""
    return text.translate(_CONTROLS)


class _Console(Console):
    """A console that shows texts as they are: what others named holds no markup and no escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, soft_wrap=True, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(strip_control_characters(text), **options)


_WIDE = None if sys.stdout.isatty() else 200  # tables in files and pipes are not cut to a screen that is not there
out_console, err_console = _Console(width=_WIDE), _Console(stderr=True)
progress_console = _Console(stderr=True)  # what `--quiet` silences; errors and results stay


_LONGEST = 300  # characters of what a command does, in a list of commands
_COMPLETION = ("install_completion", "show_completion")


def flag(name: str, says: str) -> Any:
    """An option that is given or not: `--help` shows no type for it."""
    return typer.Option(name, help=says, metavar="")


class _PlainHelp:
    """A command whose `--help` shows no type for flags that typer adds itself, and no frames in files and pipes."""

    rich_markup_mode: Any

    def get_params(self, ctx: Any) -> Any:
        params = super().get_params(ctx)  # type: ignore[misc]
        for option in params:
            if getattr(option, "is_flag", False) or option.name in _COMPLETION:
                option.metavar = ""
        return params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        kept = self.rich_markup_mode
        self.rich_markup_mode = kept if sys.stdout.isatty() else None
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.rich_markup_mode = kept


class Command(_PlainHelp, typer.core.TyperCommand):
    """A single command."""


class Group(_PlainHelp, typer.core.TyperGroup):
    """A group of commands, which plain help shows by their panels as the framed one does."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panel = command.rich_help_panel if isinstance(command.rich_help_panel, str) else "Commands"
            panels.setdefault(panel, []).append((name, command.get_short_help_str(_LONGEST)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _silence_progress(quiet: bool) -> bool:
    """What `--quiet` does when it is parsed: commands have the parameter so that it is offered, and ignore it."""
    progress_console.quiet = quiet
    return quiet


JsonFlag = Annotated[bool, flag("--json", "Print one JSON object on stdout.")]
Explain = Annotated[bool, flag("--explain", "Also print every statement in full: theorems, assumptions, other units.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", help="Show no progress on stderr.", metavar="", callback=_silence_progress, expose_value=False
    ),
]
TrustCode = Annotated[
    bool, flag("--trust-code", "Import the code that the run names as module:name, also from its folder.")
]
Users = Annotated[int, typer.Option("--n", help="Number of users per round.")]
Population = Annotated[int | None, typer.Option(help="Number of users from which each round takes --n.")]
Participation = Annotated[
    str | None,
    typer.Option(
        help="How --n of the --population take part: fixed (exactly so many), poisson (on average), secret (on "
        "average, and all upload), separated (in turn, so that each comes rarely) or everyone. Default: fixed with "
        "--population, else everyone."
    ),
]
Colluders = Annotated[int, typer.Option("--colluders", help="Number of users assumed to be fake or to collude.")]
Relation = Annotated[
    str | None,
    typer.Option(
        "--neighbors", help="Which inputs are neighbours: replace-one or add-remove. Default: the protocol's."
    ),
]
Rounds = Annotated[int, typer.Option(min=1, help="Number of rounds that a user takes part in.")]
Delta = Annotated[float, typer.Option("--delta", help="The delta of the statement.")]
Dim = Annotated[int, typer.Option("--dim", help="Number of coordinates of an update.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set a protocol parameter; may be repeated.", metavar="KEY=VALUE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a config key, such as privacy.eps=2; may be repeated.", metavar="KEY=VALUE"),
]
LedgerName = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        help="The ledger of what all runs on the same people have spent: a file, the beginning of an automatic one's "
        "name, on or off. Default: on for data that are not published.",
    ),
]
CeilingOption = Annotated[
    str | None,
    typer.Option(
        "--ceiling",
        help="What all runs on the same people together may spend, such as 8 or 8,1e-5 (delta is 1e-4 unless given).",
        metavar="EPS[,DELTA]",
    ),
]
Measures = Annotated[
    list[str] | None,
    typer.Option(help="Add up a statistic beside updates: evaluation, labels or within_clip; may be repeated."),
]
HeldOut = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Share of users that evaluate the model instead of training it.")
]
Authority = Annotated[Path | None, typer.Option("--ca", help="Certificate of the authority to trust (PEM).")]


def print_json(value: Any) -> None:
    """One JSON value on stdout, and nothing else; a number that JSON has not, such as an infinite eps, is null."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def print_names(names: Sequence[str], *, as_json: bool) -> None:
    """What there is to choose from, one per line."""
    print_json(names) if as_json else out_console.print("\n".join(names))


def print_statement(title: str, statement: Any) -> None:
    """A statement under its title; None: there is none."""
    out_console.print(title, style="bold")
    out_console.print("  none" if statement is None else str(statement), markup=False, highlight=False)


def print_result(result: Any, *, explained: bool) -> None:
    """What a training guarantees: a few lines, and all of it below them if it is to be explained."""
    from dovetail.experiment.summary import guarantee_lines

    for line in guarantee_lines(result.quote, result.units, ask="--explain"):
        out_console.print(line, markup=False, highlight=False)
    if result.across_runs is not None:
        out_console.print(result.across_runs.sentence, markup=False, highlight=False)
    if explained:
        out_console.print(result.explain(), markup=False, highlight=False)


def print_guarantees(certified: Any, local: Any) -> None:
    """The privacy cost of a task for each user: against the analyzer, and if nobody is trusted."""
    out_console.print(str(certified), markup=False, highlight=False)
    out_console.print("If nobody is trusted:", highlight=False)
    out_console.print(str(local), markup=False, highlight=False)


def key_id_from(text: str) -> bytes:
    """The id of a key: in hex, or of the public key in a file."""
    if Path(text).is_file():
        return read_public_key(Path(text)).key_id
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ValueError(f"expected a key id in hex, or the file of a public key, got {text!r}") from error


def read_public_key(path: Path) -> PublicKey | ServiceKeys:
    """The public key in a file, or both of a service."""
    from dovetail.parties.common.files import read_json
    from dovetail.parties.common.keys import PublicKey, ServiceKeys

    if path.is_file() and b'"seal":{' in path.read_bytes():
        return read_json(path, ServiceKeys, "a service's public keys")
    return read_json(path, PublicKey, "a public key")


def print_error(words: str) -> None:
    """One line on stderr."""
    err_console.print(f"dovetail: {' '.join(words.split())}", style="red", markup=False, highlight=False)


def address_printer(name: str) -> Callable[[str], None]:
    """Says on stderr at which address a party listens."""
    return lambda address: err_console.print(f"{name} listens on {address}", markup=False, highlight=False)


def relation_of(text: str | None) -> Neighbors | None:
    """The neighbouring relation of this name, whose option was given; None lets the protocol choose its own."""
    if text is None:
        return None
    _validate.one_of([relation.value for relation in Neighbors], neighbors=text)
    return Neighbors(text)


def parse_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """The protocol's own settings: `clip_norm=1`, or `protocol.clip_norm=1` as a config spells it."""
    from dovetail.experiment.config import parse_override  # alone: configs know datasets, and those know JAX

    pairs = (parse_override(text) for text in texts or ())
    return {key.removeprefix("protocol."): value for key, value in pairs}
