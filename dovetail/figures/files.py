"""How figures become files: .svg by our own hand, .png and .pdf by matplotlib, which the extra `plots` installs."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

from dovetail.figures.drawing import svg
from dovetail.figures.model import Figure, Line

__all__ = ["check", "save"]

_SUFFIXES = (".svg", ".png", ".pdf")
_MARKERS = "osD^vX"


def check(path: Path) -> None:
    """Refuse a file of a kind that cannot be drawn here: to be asked before a long computation."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(_refusal(path, f"unknown kind {path.suffix!r}"))
    if path.suffix != ".svg" and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"a figure as {path.suffix} needs matplotlib: pip install 'dovetail-fl[plots]'; one as .svg needs nothing"
        )


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into a file of the kind that its name says."""
    check(path)
    try:
        if path.suffix == ".svg":
            path.write_text(svg(figure))
        else:
            _rendered(figure).savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(_refusal(path, error)) from error


def _refusal(path: Path, reason: object) -> str:
    return f"expected a file to draw to (.svg, .png or .pdf), got {str(path)!r} ({reason})"


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
