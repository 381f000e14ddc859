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
from dovetail.papers.exhibits import Measurement, Paper, Part, Row, write
from dovetail.papers.runner import Runner

__all__ = ["PAPERS", "Measurement", "Paper", "Part", "Row", "Runner", "reproduce", "write_index"]

PAPERS: Mapping[str, Paper] = {module.PAPER.name: module.PAPER for module in (flame, apes, survey, geyer, subdp)}


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
    """Compute a paper's parts and write them into `out`.

    Arguments:
        quick: whether parts leave out what takes long.
        seeds: how often each config is trained.
        only: the keys of the parts to compute, all if empty; other parts that lie in `out` already stay.
        begin: called with the title of each part before it is computed.
        observe: called with the name of each training or measurement before it is run.

    Returns: the rows of each computed part, by its key.
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
    done = _parts_in(paper, out, only)

    def write_facts(seconds: float = 0.0) -> None:
        exhibits = [part.key for part in paper.parts if part.key in done]
        write_json(out / "paper.json", {**facts, "exhibits": exhibits, "seconds": seconds})

    make_folder(out)
    write_facts()
    begun = time.perf_counter()
    computed: dict[str, list[Row]] = {}
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
        computed[part.key] = rows
        done.append(part.key)
        write_facts(time.perf_counter() - begun)
    return computed


def _parts_in(paper: Paper, out: Path, only: Sequence[str]) -> list[str]:
    """The keys of this paper's parts that `out` holds already and that `only` does not name; none without `only`."""
    if not only or not (out / "paper.json").is_file():
        return []
    try:
        before = json.loads((out / "paper.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"paper.json in {str(out)!r} was not written by `dovetail reproduce`: {error}") from error
    return [key for key in before.get("exhibits", ()) if before.get("paper") == paper.name and key not in only]


def write_index(out: Path, names: Sequence[str]) -> None:
    """Write down which papers lie in `out`, each in the folder of its name."""
    make_folder(out)
    write_json(out / "index.json", {"papers": list(names)})
