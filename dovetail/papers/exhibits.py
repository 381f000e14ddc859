"""What a reproduction shows: rows of paper | claimed | certified | audited | ours, and figures drawn from them.

A paper is a list of parts, its tables and figures. A part gives its rows one by one, each computed when it is asked
for, and turns them into figures at the end. Everything is written as JSON and CSV after every row, so that a long
reproduction that is stopped leaves what it has.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.audit import LowerBound
from dovetail.figures import Figure, Line
from dovetail.files import write_json, write_table
from dovetail.statements import Statement, Verdict

if TYPE_CHECKING:
    from dovetail.papers.runner import Runner

__all__ = [
    "Curve",
    "Measurement",
    "Paper",
    "Part",
    "Row",
    "accuracy_figure",
    "curve_lines",
    "measured_mean",
    "sweep_lines",
    "write",
]

Curve = tuple[tuple[float, float], ...]  # points (x, y) of a training: mostly rounds and test accuracy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What we measured: the metric's name, and a value for each seed."""

    metric: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds, if there are several."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """The measurement as plain data, with mean and spread."""
        return {"metric": self.metric, "values": list(self.values), "mean": self.mean, "spread": self.spread}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a table, or one point of a figure.

    `paper` is what the paper prints, `claimed` its own formula recomputed, `certified` what we prove of the same run,
    `audited` what an attack shows at the least, `ours` what we measured. `series` and `x` place it in a figure. `extra`
    holds further columns, `config` the path of the config below the paper's folder, and `not_here` why something was
    not measured on this machine.
    """

    label: str
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)
    claimed: Statement | None = None
    certified: Statement | None = None
    audited: LowerBound | None = None
    ours: Measurement | None = None
    series: str = ""
    x: float | None = None
    curve: Curve = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: str | None = None
    seconds: float | None = None
    note: str = ""
    not_here: str | None = None

    def __post_init__(self) -> None:
        """Set the claim's verdict to refuted if the attack in this row shows a larger eps at no larger delta."""
        claimed = self.claimed
        audited = self.audited
        if claimed is None or audited is None or audited.delta < claimed.delta or audited.eps <= claimed.eps:
            return
        if claimed.verdict is not Verdict.CLAIMED_REFUTED:
            proof = claimed.proof.with_notes("the attack in this row passes it")
            refuted = dataclasses.replace(claimed, verdict=Verdict.CLAIMED_REFUTED, proof=proof)
            object.__setattr__(self, "claimed", refuted)

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form; what is infinite is null and said to be unbounded."""
        audited = self.audited
        return {
            "label": self.label,
            "paper": dict(self.paper),
            "claimed": None if self.claimed is None else self.claimed.without_users().to_json(),
            "certified": None if self.certified is None else self.certified.without_users().to_json(),
            "audited": None
            if audited is None
            else {
                "eps_lower": None if audited.is_unbounded else audited.eps,
                "unbounded": audited.is_unbounded,
                "delta": audited.delta,
                "confidence": audited.confidence,
                "trials": audited.trials,
                "attack": audited.attack,
            },
            "ours": None if self.ours is None else self.ours.to_json(),
            "series": self.series,
            "x": self.x,
            "curve": [list(point) for point in self.curve],
            "extra": {key: _none_if_not_finite(value) for key, value in self.extra.items()},
            "config": self.config,
            "seconds": self.seconds,
            "note": self.note,
            "not_here": self.not_here,
        }

    def to_cells(self) -> dict[str, Any]:
        """The row for a spreadsheet: values by the names of columns."""
        return {
            "label": self.label,
            "series": self.series,
            "x": self.x,
            **{f"paper {key}": value for key, value in self.paper.items()},
            "claimed eps": self.claimed and self.claimed.eps,
            "claimed delta": self.claimed and self.claimed.delta,
            "verdict": self.claimed and self.claimed.verdict.value,
            "certified eps": self.certified and self.certified.eps,
            "certified delta": self.certified and self.certified.delta,
            "audited eps at least": self.audited and self.audited.eps,
            "ours": self.ours and self.ours.mean,
            "ours, spread": self.ours and self.ours.spread,
            "metric": self.ours and self.ours.metric,
            **self.extra,
            "config": self.config,
            "not here": self.not_here,
            "note": self.note,
        }


def _none_if_not_finite(value: Any) -> Any:
    """The value; None for a float that is not finite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A table or figure of a paper, and how it is made.

    Arguments:
        key: the name of its files.
        rows: computes the rows one by one, on a runner.
        figures: draws the figures from all rows.
        notes: sentences below the table, from all rows.
    """

    key: str
    title: str
    caption: str
    rows: Callable[[Runner], Iterable[Row]]
    figures: Callable[[Sequence[Row]], Sequence[Figure]] = lambda rows: ()
    notes: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper's parts; `reference` is its key in `dovetail.references`, `minutes` what three seeds take by device."""

    name: str
    title: str
    citation: str
    reference: str
    parts: tuple[Part, ...]
    minutes: Mapping[str, float]


def write(part: Part, rows: Sequence[Row], out: Path, *, run: Mapping[str, Any], finished: bool) -> None:
    """Write a part's files: `<key>.json`, its rows and the lines of its figures as CSV.

    Arguments:
        run: how it was computed: version, machine, seeds, seconds.
        finished: whether all rows are there; figures and notes are made of them alone.
    """
    figures = list(part.figures(rows)) if finished else []
    data = {
        "key": part.key,
        "title": part.title,
        "caption": part.caption,
        "finished": finished,
        "run": dict(run),
        "figures": [figure.to_json() for figure in figures],
        "rows": [row.to_json() for row in rows],
        "notes": list(part.notes(rows)) if finished else [],
    }
    write_json(out / f"{part.key}.json", data)
    write_table(out / f"{part.key}.csv", [row.to_cells() for row in rows])
    if figures:
        points = [
            {"figure": figure.title, "line": line.name, "x": x, "y": y}
            for figure in figures
            for line in figure.lines
            for x, y in zip(line.x, line.y, strict=True)
        ]
        write_table(out / f"{part.key}-lines.csv", points)


def sweep_lines(
    rows: Sequence[Row], value: Callable[[Row], float | None], *, style: str = "line", suffix: str = ""
) -> tuple[Line, ...]:
    """One line for each series of the rows, over their x.

    Arguments:
        value: the height of a row's point; None is a gap, and a series of gaps alone has no line.
        style: how lines are drawn, one of `dovetail.figures.STYLES`.
        suffix: what is put behind the series' names.
    """
    names = dict.fromkeys(row.series for row in rows if row.x is not None)
    lines = []
    for name in names:
        placed = sorted((row for row in rows if row.series == name and row.x is not None), key=lambda row: row.x or 0.0)
        points = [(row, _none_if_not_finite(value(row))) for row in placed]
        if all(y is None for _, y in points):
            continue
        lines.append(
            Line(
                name=f"{name}{suffix}",
                x=tuple(float(row.x or 0.0) for row, _ in points),
                y=tuple(y for _, y in points),
                style=style,
            )
        )
    return tuple(lines)


def measured_mean(row: Row) -> float | None:
    """The mean over seeds of what we measured; None if nothing was."""
    return None if row.ours is None else row.ours.mean


def accuracy_figure(title: str, x_label: str, lines: Sequence[Line], **more: Any) -> Figure:
    """A figure of test accuracy in percent; `more` are other fields of `Figure`."""
    return Figure(title=title, x_label=x_label, y_label="test accuracy", percent_y=True, lines=lines, **more)


def curve_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    """One line per row that has a curve, named by the row's label."""
    return tuple(
        Line(name=row.label, x=tuple(x for x, _ in row.curve), y=tuple(y for _, y in row.curve))
        for row in rows
        if row.curve
    )
