"""Commands of operators: `party`."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.cli._shared import Authority, flag, out_console

__all__ = ["party"]

party = typer.Typer(help="Look after services that run.", no_args_is_help=True)


@party.command("status")
def party_status(
    url: Annotated[list[str], typer.Argument(help="Addresses of services.", metavar="URL...")],
    ca: Authority = None,
    keys: Annotated[
        Path | None, typer.Option(help="Folder with the keys of a shuffler or aggregator: its counts are told, too.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON.")] = False,
) -> None:
    """Print whether services answer, whether they can work, and where their training stands; exit 1 if one cannot."""
    found = [_look(one, ca, keys) for one in url]
    if as_json:
        out_console.print_json(json.dumps(found))
    else:
        for one in found:
            words = [one["url"], "ready" if one["ready"] else "not ready" if one["healthy"] else "does not answer"]
            words += [] if one["round"] is None else [f"round {one['round']}{_until(one)}"]
            words += [f"{name}: {count}" for name, count in sorted((one["counts"] or {}).items())]
            out_console.print("; ".join(words), highlight=False, markup=False, soft_wrap=True)
    if not all(one["ready"] for one in found):
        raise typer.Exit(1)


def _until(told: dict[str, Any]) -> str:
    """Until when a round is open."""
    if told["over"] or not told["closes"]:
        return ", over" if told["over"] else ""
    return f", closes {datetime.datetime.fromtimestamp(told['closes'], datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def _look(url: str, ca: Path | None, keys: Path | None) -> dict[str, Any]:
    import contextlib

    from dovetail.parties.common.keys import KeyRing
    from dovetail.parties.common.links import IntermediaryLink, Rejected, Unreachable

    told: dict[str, Any] = {"url": url, "healthy": False, "ready": False}
    told |= dict.fromkeys(("round", "over", "closes", "counts"))
    key = None if keys is None else KeyRing(keys, "sign").current()
    with contextlib.closing(IntermediaryLink(url, ca=ca, key=key, timeout=10.0)) as link:
        with contextlib.suppress(Unreachable, Rejected):
            told["healthy"] = link.answers("/healthz")
            told["ready"] = link.answers("/readyz")
        with contextlib.suppress(Unreachable, Rejected):
            status = link.status()
            told |= {"round": status.round, "over": status.over, "closes": status.closes}
        if key is not None:
            with contextlib.suppress(Unreachable, Rejected):
                told["counts"] = link.counts()
    return told
