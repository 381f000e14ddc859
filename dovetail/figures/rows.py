"""Figures with categories: one row for each, its name at the left, its values at their bars or points."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dovetail.figures._elements import (
    CHAR,
    LIGHT,
    PAD,
    ROW,
    WIDTH,
    Point,
    escaped,
    heights,
    hint,
    marker,
    number,
    points_of,
    shortened,
    wrapped,
)
from dovetail.figures.axes import Axis, axis
from dovetail.figures.model import Figure
from dovetail.figures.plane import x_ticks

__all__ = ["draw_rows", "has_categories", "named_by_lines"]


def named_by_lines(figure: Figure) -> bool:
    """Bars of one value each: their names are the categories."""
    return len(figure.lines) > 1 and all(line.style == "bars" and len(line.x) == 1 for line in figure.lines)


def has_categories(figure: Figure) -> bool:
    """Whether the figure is over names rather than numbers."""
    return named_by_lines(figure) or any(isinstance(x, str) for line in figure.lines for x in line.x)


def _rows(figure: Figure) -> list[tuple[str, list[tuple[int, Point]]]]:
    """By category the points of every line."""
    by_line = named_by_lines(figure)
    found: dict[str, list[tuple[int, Point]]] = {}
    for i, line in enumerate(figure.lines):
        for point in points_of(line):
            name = line.name if by_line else str(point[0])
            found.setdefault(name, []).append((i, point))
    return list(found.items())


def draw_rows(figure: Figure, below: float) -> tuple[list[str], float]:
    """The rows from this height on, and where they end."""
    rows = _rows(figure)
    has_bars, by_line = any(line.style == "bars" for line in figure.lines), named_by_lines(figure)
    values = axis(heights(figure), log=figure.log_y, percent=figure.percent_y, zero=has_bars)
    left = min(PAD + 8 + CHAR * max((len(name) for name, _ in rows), default=0), 0.4 * WIDTH)
    right = WIDTH - 2.5 * PAD - 40
    names_end = int((left - PAD - 8) / CHAR + 1e-9)

    def across(value: float) -> float:
        return left + (right - left) * values.share(value)

    step, gap = 16.0, 8.0
    top = below + 8
    bottom = top + sum(step * len(points) + gap for _, points in rows)
    parts = list(x_ticks(values, across, top, bottom))
    y = top + gap / 2
    for name, points in rows:
        middle = y + step * len(points) / 2
        parts.append(
            f'<text class="dt-name" x="{left - 8:.1f}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escaped(shortened(name, names_end))}{hint(name, names_end)}</text>"
        )
        for i, (_, value, low, high) in points:
            parts += _row(0 if by_line else i, figure, (value, low, high), values, across, y + step / 2)
            y += step
        y += gap
    below = bottom + 20
    for text in wrapped(figure.y_label):
        below += ROW
        parts.append(
            f'<text x="{(left + right) / 2:.1f}" y="{below - 3:.1f}" text-anchor="middle">{escaped(text)}</text>'
        )
    return parts, below


def _row(
    i: int,
    figure: Figure,
    point: tuple[float | None, float | None, float | None],
    values: Axis,
    across: Callable[[float], float],
    y: float,
) -> Iterator[str]:
    """One value: a bar or a point, its error bar, and the number beside it."""
    value, low, high = point
    colour = i % len(LIGHT)
    if value is None or not values.shows(value):
        yield f'<text x="{across(values.low) + 6:.1f}" y="{y + 4:.1f}">none</text>'
        return
    end = across(value)
    if figure.lines[i].style == "bars":
        foot = across(values.low if values.log else 0.0)
        light = " dt-bar-light" if i % 2 else " dt-bar"
        yield (
            f'<rect class="dt-f{colour} dt-s{colour}{light}" x="{min(foot, end):.1f}" y="{y - 5.5:.1f}" '
            f'width="{abs(end - foot):.1f}" height="11"/>'
        )
    else:
        yield marker(i, end, y)
    if low is not None and high is not None:
        a, b = across(low), across(high)
        path = f"M{a:.1f} {y:.1f}H{b:.1f}M{a:.1f} {y - 3:.1f}v6M{b:.1f} {y - 3:.1f}v6"
        yield f'<path class="dt-axis dt-error" d="{path}"/>'
        end = max(end, b)
    yield f'<text class="dt-name" x="{end + 7:.1f}" y="{y + 4:.1f}">{escaped(number(value, figure.percent_y))}</text>'
