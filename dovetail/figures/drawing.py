"""A `Figure` as one inline SVG, written by hand.

From top to bottom: title, name of the y axis, the plot, name of the x axis, legend; so nothing lies over the data, and
the height follows from what there is to show. Lines differ in colour and in marker, so that they can be told apart in
print and by those who do not see all colours. Figures with categories are drawn as rows, with their names at the left.
Colours are CSS variables of `STYLE`, with values for light, dark and print.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

from dovetail.figures._elements import (
    CHAR,
    LIGHT,
    PAD,
    ROW,
    STYLE,
    WIDTH,
    escaped,
    hint,
    is_reference,
    marker,
    number,
    shortened,
    wrapped,
)
from dovetail.figures.model import Figure, Line
from dovetail.figures.plane import draw_plane
from dovetail.figures.rows import draw_rows, has_categories, named_by_lines

__all__ = ["STYLE", "svg"]


def svg(figure: Figure, *, style: bool = True) -> str:
    """The figure as an SVG element; `style=False` inside a page that holds `STYLE` already.

    Guarantees:
        Whatever the lines hold (nothing, one point, equal or infinite values), the result is well-formed XML.
        No text of the figure is markup in it.
        The legend lies below the plot.
    """
    parts: list[str] = []
    below = PAD + 6
    for text in wrapped(figure.title, 8.8):
        below += ROW
        parts.append(f'<text class="dt-title" x="{PAD}" y="{below - 4:.1f}">{escaped(text)}</text>')
    categories = has_categories(figure)
    content, below = draw_rows(figure, below) if categories else draw_plane(figure, below)
    parts += content
    if not categories or (len(figure.lines) > 1 and not named_by_lines(figure)):
        names, below = _legend(figure.lines, below)
        parts += names
    return _element(figure, parts, below + PAD, style)


def _element(figure: Figure, parts: Sequence[str], height: float, style: bool) -> str:
    mark = f"dt{zlib.crc32(json.dumps(figure.to_json(), sort_keys=True).encode()):08x}"
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
    return (
        f'<svg{namespace} class="dt-figure" viewBox="0 0 {WIDTH:.0f} {height:.0f}" '
        f'role="img" aria-labelledby="{mark}-title {mark}-desc">'
        f'<title id="{mark}-title">{escaped(figure.title or "Figure")}</title>'
        f'<desc id="{mark}-desc">{escaped(_described(figure))}</desc>'
        + (f"<style>{STYLE}</style>" if style else "")
        + "".join(parts)
        + "</svg>"
    )


def _described(figure: Figure) -> str:
    """The figure in words, for those who hear it."""
    said = [f"{figure.y_label} against {figure.x_label}."]
    for line in figure.lines:
        values = [value for value in line.y if value is not None]
        if not values:
            said.append(f"{line.name}: no values.")
        elif len(values) == 1:
            said.append(f"{line.name}: {number(values[0], figure.percent_y)}.")
        else:
            low, high = (number(value, figure.percent_y) for value in (min(values), max(values)))
            said.append(f"{line.name}: {len(values)} values from {low} to {high}.")
    return " ".join(said)


def _legend(lines: Sequence[Line], below: float) -> tuple[list[str], float]:
    """Names with their mark, in rows as wide as the figure."""
    parts, x, y = [], PAD, below + 6
    most = int((WIDTH - 2 * PAD - 30) / CHAR)
    named = [(i, line) for i, line in enumerate(lines) if line.name]
    if not named:
        return [], below
    y += ROW
    for i, line in named:
        name = shortened(line.name, most)
        needed = 30 + CHAR * len(name) + 12
        if x > PAD and x + needed - 12 > WIDTH - PAD:
            x, y = PAD, y + ROW
        colour, middle = i % len(LIGHT), y - 8
        if line.style == "bars":
            light = " dt-bar-light" if sum(other.style == "bars" for other in lines[:i]) % 2 else " dt-bar"
            box = f'x="{x + 4:.1f}" y="{middle - 5:.1f}" width="16" height="10"'
            parts.append(f'<rect class="dt-f{colour} dt-s{colour}{light}" {box}/>')
        else:
            if line.style != "points":
                dashed = " dt-dashed" if line.style == "dashed" else ""
                ends = f"{x:.1f},{middle:.1f} {x + 24:.1f},{middle:.1f}"
                parts.append(f'<polyline class="dt-line dt-s{colour}{dashed}" points="{ends}"/>')
            if not is_reference(line):
                parts.append(marker(i, x + 12, middle))
        parts.append(
            f'<text class="dt-name" x="{x + 29:.1f}" y="{y - 4:.1f}">{escaped(name)}{hint(line.name, most)}</text>'
        )
        x += needed
    return parts, y
