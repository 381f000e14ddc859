"""The command that writes a run's page again, and its entry for a registry: `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli._shared import JsonFlag, out_console, print_json

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    registry: Annotated[
        Path | None,
        typer.Option(help="Also write the run's entry for a public registry of deployments to this JSON file."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write report.html of a finished run again, from the files in its folder."""
    from dovetail import pages
    from dovetail.files import write_json

    entry = pages.registry(run)  # refuses what is no finished run
    page = pages.write(run)
    if registry is not None:
        write_json(registry, entry)
    if as_json:
        print_json({"report": str(page), "registry": entry})
        return
    out_console.print(f"report: {page}", markup=False, highlight=False)
    if registry is not None:
        missing = ", ".join(entry["to_fill"])
        out_console.print(f"registry: {registry}; for you to fill in: {missing}", markup=False, highlight=False)
