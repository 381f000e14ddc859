"""Lines, points and bars over two axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from dovetail.figures._elements import (
    CHAR,
    LIGHT,
    PAD,
    PLOT_HEIGHT,
    ROW,
    WIDTH,
    Point,
    error,
    escaped,
    heights,
    is_reference,
    marker,
    points_of,
    wrapped,
)
from dovetail.figures.axes import Axis, axis
from dovetail.figures.model import Figure, Line

__all__ = ["draw_plane", "x_ticks"]

_BAND_FROM, _MARKERS_UP_TO = 13, 26

_Shown = tuple[float, float, float | None, float | None] | None


def draw_plane(figure: Figure, below: float) -> tuple[list[str], float]:
    """The plot from this height on, and where it ends."""
    bars = [line for line in figure.lines if line.style == "bars"]
    width = _bar_width(bars)
    x_values = [
        x + shift for line in figure.lines for x in line.x if isinstance(x, float) for shift in _reach(line, width)
    ]
    x_axis = axis(x_values, log=figure.log_x, tight=True)
    y_axis = axis(heights(figure), log=figure.log_y, percent=figure.percent_y, zero=bool(bars))
    parts = []
    for text in wrapped(figure.y_label):
        below += ROW
        parts.append(f'<text x="{PAD}" y="{below - 3:.1f}">{escaped(text)}</text>')
    left = PAD + CHAR * max(len(label) for label in y_axis.labels) + 8
    right, top = WIDTH - 2.5 * PAD, below + 10
    bottom = top + PLOT_HEIGHT

    def across(value: float) -> float:
        return left + (right - left) * x_axis.share(value)

    def up(value: float) -> float:
        return bottom - (bottom - top) * y_axis.share(value)

    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = up(tick)
        parts.append(f'<line class="dt-grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escaped(label)}</text>')
    parts += x_ticks(x_axis, across, top, bottom)
    for i, line in enumerate(figure.lines):
        shown = [_shown(point, x_axis, y_axis) for point in points_of(line)]
        if line.style == "bars":
            parts += _bars(i, shown, bars.index(line), len(bars), width, across, up, y_axis)
        else:
            parts += _drawn(i, line, shown, across, up)
    if not any(y_axis.shows(y) for y in heights(figure)):
        place = f'x="{(left + right) / 2:.1f}" y="{(top + bottom) / 2:.1f}"'
        parts.append(f'<text {place} text-anchor="middle">nothing to show</text>')
    parts.append(f'<line class="dt-axis" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>')
    below = bottom + 20
    for text in wrapped(figure.x_label):
        below += ROW
        middle = (left + right) / 2
        parts.append(f'<text x="{middle:.1f}" y="{below - 3:.1f}" text-anchor="middle">{escaped(text)}</text>')
    return parts, below


def x_ticks(x_axis: Axis, across: Callable[[float], float], top: float, bottom: float) -> Iterator[str]:
    """Grid lines at every tick; labels where they do not touch the one before."""
    free = 0.0
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x, half = across(tick), CHAR * len(label) / 2
        yield f'<line class="dt-grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
        middle = min(x, WIDTH - half - 1)
        if middle - half >= free:
            free = middle + half + 6
            yield f'<text x="{middle:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escaped(label)}</text>'


def _shown(point: Point, x_axis: Axis, y_axis: Axis) -> _Shown:
    """The point if it has a place, else a gap."""
    x, y, low, high = point
    if isinstance(x, str) or y is None or not (x_axis.shows(x) and y_axis.shows(y)):
        return None
    return x, y, low, high


def _drawn(
    i: int, line: Line, shown: list[_Shown], across: Callable[[float], float], up: Callable[[float], float]
) -> Iterator[str]:
    """A line in its unbroken pieces, with band or error bars, and its markers."""
    colour, dashed = i % len(LIGHT), " dt-dashed" if line.style == "dashed" else ""
    present = [point for point in shown if point is not None]
    band = line.style != "points" and len(present) >= _BAND_FROM
    for piece in _pieces(shown) if line.style != "points" else ():
        if band and all(low is not None and high is not None for _, _, low, high in piece):
            edge = [(x, high) for x, _, _, high in piece] + [(x, low) for x, _, low, _ in reversed(piece)]
            path = " ".join(f"{across(x):.1f},{up(y or 0.0):.1f}" for x, y in edge)
            yield f'<polygon class="dt-band dt-f{colour}" points="{path}"/>'
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y, _, _ in piece)
        if len(piece) > 1:
            yield f'<polyline class="dt-line dt-s{colour}{dashed}" points="{path}"/>'
    stride = 1 if line.style == "points" else max(1, math.ceil(len(present) / _MARKERS_UP_TO))
    for k, (x, y, low, high) in enumerate(present):
        if not band and low is not None and high is not None:
            yield error(colour, across(x), up(low), up(high))
        if k % stride == 0 and not is_reference(line):
            yield marker(i, across(x), up(y))


def _pieces(shown: list[_Shown]) -> Iterator[list[tuple[float, float, float | None, float | None]]]:
    piece = []
    for point in shown:
        if point is not None:
            piece.append(point)
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _bar_width(bars: Sequence[Line]) -> float:
    """The smallest distance between two bars of a line."""
    places = sorted({x for line in bars for x in line.x if isinstance(x, float) and math.isfinite(x)})
    gaps = [after - before for before, after in itertools.pairwise(places)]
    return min(gaps, default=1.0)


def _reach(line: Line, width: float) -> tuple[float, ...]:
    return (-width / 2, width / 2) if line.style == "bars" else (0.0,)


def _bars(
    i: int,
    shown: list[_Shown],
    which: int,
    of: int,
    width: float,
    across: Callable[[float], float],
    up: Callable[[float], float],
    y_axis: Axis,
) -> Iterator[str]:
    """Bars from zero (or the foot of a logarithmic axis), those of several lines side by side."""
    light = " dt-bar-light" if which % 2 else " dt-bar"
    colour, foot = i % len(LIGHT), up(y_axis.low if y_axis.log else 0.0)
    for point in shown:
        if point is None:
            continue
        x, y, low, high = point
        left, right = across(x - width / 2), across(x + width / 2)
        group = (right - left) * (0.8 if of > 1 else 1.0)
        share = group / of
        start, thick = (left + right - group) / 2 + which * share, max(share - min(1.0, share / 4), 0.5)
        top, tall = min(up(y), foot), abs(up(y) - foot)
        yield (
            f'<rect class="dt-f{colour} dt-s{colour}{light}" x="{start:.1f}" y="{top:.1f}" '
            f'width="{thick:.1f}" height="{tall:.1f}"/>'
        )
        if low is not None and high is not None:
            yield error(colour, start + thick / 2, up(low), up(high))
