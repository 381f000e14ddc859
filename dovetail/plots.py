"""Figures of the accountants, and how figures become files: .svg by our own hand, .png and .pdf by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _validate
from dovetail.accounting import amplify
from dovetail.figures import Figure, Line, svg

__all__ = ["amplification", "save", "trade_offs"]

_SUFFIXES = (".svg", ".png", ".pdf")
_MARKERS = "osD^vX"


def amplification(*, num_users: int, eps_local: float, delta: float, over: str = "n") -> Figure:
    """Every applicable bound against the number of users (over="n") or the local budget (over="eps-local")."""
    _validate.one_of(("n", "eps-local"), over=over)
    if over == "n":
        points = np.unique(np.geomspace(max(2, num_users / 100), num_users * 100, 13).astype(int)).tolist()
        tables = [amplify.table(eps_local, num_users=point, delta=delta) for point in points]
    else:
        points = np.geomspace(eps_local / 10, eps_local * 10, 13).tolist()
        tables = [amplify.table(point, num_users=num_users, delta=delta) for point in points]
    lines = []
    for i, row in enumerate(tables[0]):
        eps = [bound.eps if (bound := table[i].bound) else None for table in tables]
        if any(value is not None and math.isfinite(value) for value in eps):
            lines.append(Line(name=row.name, x=points, y=eps))
    return Figure(
        title=f"Amplification at delta {delta:g}, "
        + (f"eps_local {eps_local:g}" if over == "n" else f"{num_users} users"),
        x_label="users" if over == "n" else "eps_local",
        y_label="eps after the shuffle",
        lines=lines,
        log_x=True,
        log_y=True,
    )


def trade_offs(curves: Mapping[str, Sequence[tuple[float, float]]], *, title: str) -> Figure:
    """Curves of delta against eps, by name; a single point stands as a mark."""
    lines = [
        Line(
            name=name,
            x=[eps for eps, _ in points],
            y=[delta for _, delta in points],
            style="points" if len(points) == 1 else "dashed" if name == "claimed" else "line",
        )
        for name, points in curves.items()
    ]
    return Figure(title=title, x_label="eps", y_label="delta", lines=lines, log_y=True)


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into a file of the kind that its name says."""
    try:
        if path.suffix not in _SUFFIXES:
            raise ValueError(f"unknown kind {path.suffix!r}")
        if path.suffix == ".svg":
            path.write_text(svg(figure))
        else:
            _rendered(figure).savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a file to draw to (.svg, .png or .pdf), got {str(path)!r} ({error})") from error


def _rendered(figure: Figure) -> Any:
    """The same figure by matplotlib, without a display."""
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(8, 5), layout="constrained")
    axes = canvas.add_subplot()
    for i, line in enumerate(figure.lines):
        y = [math.nan if value is None else value for value in line.y]
        errors = _errors(line) if line.low is not None and line.high is not None else None
        if line.style == "bars":
            axes.bar(line.x, y, yerr=errors, label=line.name, alpha=0.8)
            continue
        ink = {"line": "-", "dashed": "--", "points": "none"}[line.style]
        axes.errorbar(line.x, y, yerr=errors, linestyle=ink, marker=_MARKERS[i % 6], markersize=4, label=line.name)
    axes.set(title=figure.title, xlabel=figure.x_label, ylabel=figure.y_label)
    if figure.log_x:
        axes.set_xscale("log")
    if figure.log_y:
        axes.set_yscale("log")
    if figure.percent_y:
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.grid(alpha=0.3)
    if any(line.name for line in figure.lines):
        axes.legend(fontsize=8)
    return canvas


def _errors(line: Line) -> list[list[float]]:
    """How far error bars reach down and up."""
    reach = []
    for bound in (line.low, line.high):
        pairs = zip(line.y, bound or (), strict=True)
        reach.append([0.0 if y is None or end is None else abs(end - y) for y, end in pairs])
    return reach
