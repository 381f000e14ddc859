"""Rows that are run, and the table that they make.

A row is a config, run once for each seed, beside what its paper printed. A row that cannot be run here says why. The
table is written as Markdown and JSON after every row, so that a long reproduction that is stopped leaves what it has.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail import experiment
from dovetail.config import read
from dovetail.folder import write_atomically
from dovetail.statements import Statement

__all__ = ["Outcome", "Row", "Table", "reproduce"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table: a preset with overrides, and what the paper prints for it."""

    name: str
    preset: str
    overrides: tuple[tuple[str, Any], ...] = ()
    printed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    not_here: str | None = None  # why it is not run on this machine
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A paper's rows, and lines of text about what is recomputed and not run."""

    title: str
    rows: tuple[Row, ...]
    recomputed: Callable[[], list[str]] = list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a row: one result a seed."""

    row: Row
    results: tuple[experiment.Result, ...]

    @property
    def accuracies(self) -> list[float]:
        """One for each seed."""
        return [result.accuracy for result in self.results]

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form; figures are of the first seed where they do not depend on it."""
        facts: dict[str, Any] = {
            "name": self.row.name,
            "preset": self.row.preset,
            "overrides": dict(self.row.overrides),
            "printed": dict(self.row.printed),
            "not_here": self.row.not_here,
            "note": self.row.note,
        }
        if not self.results:
            return facts
        first = self.results[0]
        return {
            **facts,
            "accuracies": self.accuracies,
            "mean": statistics.fmean(self.accuracies),
            "spread": statistics.stdev(self.accuracies) if len(self.results) > 1 else None,
            "rounds": first.rounds,
            "uploads": first.uploads,
            "certified": first.statement.to_json(),
            "claimed": None if first.quote.claimed is None else first.quote.claimed.to_json(),
            "units": {unit.value: statement.to_json() for unit, statement in first.units.items()},
        }

    def cells(self) -> list[str]:
        """The row as text."""
        printed = ", ".join(f"{key} {value:g}" for key, value in self.row.printed.items()) or "-"
        if not self.results:
            return [self.row.name, printed, f"not run: {self.row.not_here}", "", "", "", ""]
        first = self.results[0]
        mean = f"{statistics.fmean(self.accuracies):.2%}"
        if len(self.results) > 1:
            mean += f" +- {statistics.stdev(self.accuracies):.2%}"
        units = "; ".join(f"{unit.value} {_numbers(statement)}" for unit, statement in first.units.items())
        return [
            self.row.name,
            printed,
            mean,
            f"{first.rounds}, {first.uploads}",
            _numbers(first.statement),
            "-"
            if first.quote.claimed is None
            else f"{_numbers(first.quote.claimed)} {first.quote.claimed.verdict.value}",
            units,
        ]


_HEAD = ("", "paper", "ours", "rounds, uploads", "certified", "the paper's accounting", "certified by unit")


def reproduce(
    table: Table, *, out: Path, seeds: int, observe: Callable[[str], None] = lambda text: None
) -> list[Outcome]:
    """Run every row for every seed and write `table.md` and `table.json` into `out`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(table, (), out)
    except OSError as error:
        raise ValueError(f"expected a folder that can be written to, got {str(out)!r} ({error.strerror})") from error
    outcomes: list[Outcome] = []
    for row in table.rows:
        results = []
        for seed in range(0 if row.not_here else seeds):
            observe(f"{row.name}, seed {seed}")
            config = read(row.preset, [*row.overrides, ("seed", seed)])
            results.append(experiment.run(experiment.prepare(config)))
        outcomes.append(Outcome(row=row, results=tuple(results)))
        write(table, outcomes, out)
    observe("what is recomputed")
    write(table, outcomes, out, table.recomputed())
    return outcomes


def write(table: Table, outcomes: Sequence[Outcome], out: Path, lines: Sequence[str] = ()) -> None:
    """The table so far."""
    rows = [list(_HEAD), ["---"] * len(_HEAD), *(outcome.cells() for outcome in outcomes)]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in rows)
    notes = [f"- {outcome.row.name}: {outcome.row.note}" for outcome in outcomes if outcome.row.note]
    parts = [f"# {table.title}", text, "\n".join(notes), "\n".join(lines)]
    write_atomically(out / "table.md", ("\n\n".join(part for part in parts if part) + "\n").encode())
    data = {"title": table.title, "rows": [outcome.to_json() for outcome in outcomes], "recomputed": list(lines)}
    write_atomically(out / "table.json", (json.dumps(data, indent=2) + "\n").encode())


def _numbers(statement: Statement) -> str:
    return "nothing" if statement.unbounded else f"({statement.eps:.4g}, {statement.delta:.2g})"
