"""What every drawing is made of: sizes, colours, markers, error bars, and text that fits."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence

from dovetail.figures.axes import short
from dovetail.figures.model import Figure, Line

__all__ = [
    "CHAR",
    "LIGHT",
    "PAD",
    "PLOT_HEIGHT",
    "ROW",
    "STYLE",
    "WIDTH",
    "Point",
    "error",
    "escaped",
    "heights",
    "hint",
    "is_reference",
    "marker",
    "number",
    "points_of",
    "shortened",
    "wrapped",
]

WIDTH, PLOT_HEIGHT, PAD = 440.0, 230.0, 8.0
CHAR, ROW = 7.2, 18.0  # of 13 px text: the width of a wide-ish character, the height of a row

LIGHT = ("#0b62c4", "#c4491c", "#0b7f5c", "#8442d6", "#a87400", "#c02f74", "#3d8fb8", "#59616b")
_DARK = ("#6cb0ff", "#ff9166", "#4cd3a4", "#c09bff", "#f0bf4c", "#ff8fc0", "#8fd8f7", "#b4bcc6")


def _variables(colours: Sequence[str], ink: str, soft: str, grid: str, paper: str) -> str:
    named = {"ink": ink, "soft": soft, "grid": grid, "paper": paper}
    named.update({str(i): colour for i, colour in enumerate(colours)})
    return ".dt-figure{" + ";".join(f"--dt-{name}:{colour}" for name, colour in named.items()) + "}"


STYLE = (
    _variables(LIGHT, "#1b1f24", "#59616b", "#dfe3e8", "#ffffff")
    + "@media screen and (prefers-color-scheme: dark){"
    + _variables(_DARK, "#e8ebef", "#a9b2bd", "#343b44", "#14181d")
    + "}"
    + ".dt-figure{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    + ".dt-figure text{fill:var(--dt-soft)}.dt-figure .dt-title{fill:var(--dt-ink);font-weight:600;font-size:15px}"
    + ".dt-figure .dt-name{fill:var(--dt-ink)}.dt-grid{stroke:var(--dt-grid)}.dt-axis{stroke:var(--dt-soft)}"
    + ".dt-line{fill:none;stroke-width:2;stroke-linejoin:round}.dt-dashed{stroke-dasharray:6 4}"
    + ".dt-band{opacity:.18;stroke:none}.dt-error{stroke-width:1.25;fill:none}.dt-mark{stroke-width:1.5}"
    + "".join(f".dt-s{i}{{stroke:var(--dt-{i})}}.dt-f{i}{{fill:var(--dt-{i})}}" for i in range(len(LIGHT)))
    + ".dt-hollow{fill:var(--dt-paper)}.dt-bar{fill-opacity:.85}.dt-bar-light{fill-opacity:.35}"
)


Point = tuple[float | str, float | None, float | None, float | None]


def points_of(line: Line) -> Iterator[Point]:
    """x, y, low and high of every point."""
    low = line.low or (None,) * len(line.x)
    high = line.high or (None,) * len(line.x)
    yield from zip(line.x, line.y, low, high, strict=True)


def heights(figure: Figure) -> Iterator[float]:
    """Every number that the y axis must hold."""
    for line in figure.lines:
        for _, *values in points_of(line):
            yield from (value for value in values if value is not None)


def is_reference(line: Line) -> bool:
    """A dashed line at one height, to compare others with: it has no markers."""
    return line.style == "dashed" and len(line.y) > 1 and len(set(line.y)) == 1


def error(colour: int, x: float, low: float, high: float) -> str:
    """An upright error bar."""
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    return f'<path class="dt-error dt-s{colour}" d="{path}"/>'


def marker(i: int, x: float, y: float) -> str:
    """One of six shapes, hollow for every second six."""
    colour = i % len(LIGHT)
    fill = "dt-hollow" if i // 6 % 2 else f"dt-f{colour}"
    shapes = (
        "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
        "m-2.8 -2.8h5.6v5.6h-5.6z",
        "m0 -3.8l3.6 6.4h-7.2z",
        "m0 -4l4 4l-4 4l-4 -4z",
        "m0 3.8l3.6 -6.4h-7.2z",
        "m-3.2 -3.2l6.4 6.4m0 -6.4l-6.4 6.4",
    )
    return f'<path class="dt-mark {fill} dt-s{colour}" d="M{x:.1f} {y:.1f}{shapes[i % len(shapes)]}"/>'


def number(value: float, percent: bool) -> str:
    """A value as text."""
    return f"{value:.1%}" if percent else short(value)


def wrapped(text: str, char: float = CHAR) -> list[str]:
    """The text in lines that fit the width."""
    return textwrap.wrap(text, int((WIDTH - 2 * PAD) / char))


def shortened(text: str, most: int) -> str:
    """The text in at most so many characters."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def hint(text: str, most: int) -> str:
    """The whole text for the pointer, where `shortened` cut it."""
    return f"<title>{escaped(text)}</title>" if len(text) > most else ""


def escaped(text: str) -> str:
    """Escaped, without the control characters that XML forbids."""
    return html.escape("".join(c for c in text if c >= " " or c in "\t\n"))
