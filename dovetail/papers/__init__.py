"""The papers' experiments as configs, tables and figures: what was printed, what holds, what we measured.

One file per paper, each a `Paper`: its parts compute rows on a `Runner`; `reproduce` runs them and writes the data that
`dovetail.pages` draws.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dovetail import __version__, machine
from dovetail.files import make_folder, write_json
from dovetail.papers import apes, flame, geyer, subdp, survey
from dovetail.papers._exhibit import Measured, Paper, Part, Row, write
from dovetail.papers._runner import Runner

__all__ = ["PAPERS", "Measured", "Paper", "Part", "Row", "Runner", "reproduce", "write_index"]

PAPERS: Mapping[str, Paper] = {one.PAPER.name: one.PAPER for one in (flame, apes, survey, geyer, subdp)}


def reproduce(
    paper: Paper,
    *,
    out: Path,
    quick: bool,
    seeds: int,
    only: Sequence[str] = (),
    begin: Callable[[str], None] = lambda title: None,
    observe: Callable[[str], None] = lambda text: None,
) -> dict[str, list[Row]]:
    """Compute every part of a paper, or those in `only`, and write it into `out`; other parts that lie there stay.

    `begin` hears which part is next, `observe` what is computed for it.
    """
    facts = {
        "paper": paper.name,
        "title": paper.title,
        "citation": paper.citation,
        "reference": paper.reference,
        "quick": quick,
        "seeds": seeds,
        "version": __version__,
        "machine": machine.describe(),
    }
    done = _kept(paper, out, only)

    def note(seconds: float = 0.0) -> None:
        exhibits = [part.key for part in paper.parts if part.key in done]
        write_json(out / "paper.json", {**facts, "exhibits": exhibits, "seconds": seconds})

    make_folder(out)
    note()
    begun = time.perf_counter()
    found: dict[str, list[Row]] = {}
    runner = Runner(out, quick=quick, seeds=seeds, observe=observe)
    for part in paper.parts:
        if only and part.key not in only:
            continue
        begin(part.title)
        rows: list[Row] = []
        run = {key: facts[key] for key in ("quick", "seeds", "version", "machine")}
        started = time.perf_counter()
        for row in part.rows(runner):
            rows.append(row)
            write(part, rows, out, run=run, finished=False)
        write(part, rows, out, run={**run, "seconds": time.perf_counter() - started}, finished=True)
        found[part.key] = rows
        done.append(part.key)
        note(time.perf_counter() - begun)
    return found


def _kept(paper: Paper, out: Path, only: Sequence[str]) -> list[str]:
    """Parts of this paper that lie in the folder already and are not asked for again."""
    if not only or not (out / "paper.json").is_file():
        return []
    try:
        before = json.loads((out / "paper.json").read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a folder of `dovetail reproduce`, got {str(out)!r} ({error})") from error
    return [key for key in before.get("exhibits", ()) if before.get("paper") == paper.name and key not in only]


def write_index(out: Path, names: Sequence[str]) -> None:
    """Which papers lie in `out`, each in the folder of its name."""
    make_folder(out)
    write_json(out / "index.json", {"papers": list(names)})
