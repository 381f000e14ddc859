"""A `Figure` as one SVG, written by hand, inside a page or as a file; .png and .pdf are converted from the same SVG.

From top to bottom: title, name of the y axis, the plot, name of the x axis, legend; so nothing lies over the data, and
the height follows from what there is to show. Lines differ in colour and in marker, so that they can be told apart in
print and by those who do not see all colours. Figures with categories are drawn as rows, with their names at the left.
Colours are CSS variables of `STYLE`, with values for light, dark and print.
"""

from __future__ import annotations

import html
import importlib.util
import itertools
import json
import math
import re
import textwrap
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dovetail.figures.axes import Axis, axis, short
from dovetail.figures.model import Figure, Line

__all__ = ["STYLE", "check_file", "escape", "save", "svg"]

_WIDTH, _PLOT_HEIGHT, _PAD = 440.0, 230.0, 8.0
_CHAR, _ROW = 7.2, 18.0  # of 13 px text: the width of a wide-ish character, the height of a row
_BAR_STEP, _ROW_GAP = 16.0, 8.0  # of rows of categories
_BAND_FROM, _MARKERS_UP_TO = 13, 26  # points of a line
_SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = 8
_MARKERS = (
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
    "m-2.8 -2.8h5.6v5.6h-5.6z",
    "m0 -3.8l3.6 6.4h-7.2z",
    "m0 -4l4 4l-4 4l-4 -4z",
    "m0 3.8l3.6 -6.4h-7.2z",
    "m-3.2 -3.2l6.4 6.4m0 -6.4l-6.4 6.4",
)


def _palette(lines: str, **others: str) -> dict[str, str]:
    return {**others, **{str(i): colour for i, colour in enumerate(lines.split())}}


_LIGHT = _palette(
    "#0b62c4 #c4491c #0b7f5c #8442d6 #a87400 #c02f74 #3d8fb8 #59616b",
    ink="#1b1f24",
    soft="#59616b",
    grid="#dfe3e8",
    paper="#ffffff",
)
_DARK = _palette(
    "#6cb0ff #ff9166 #4cd3a4 #c09bff #f0bf4c #ff8fc0 #8fd8f7 #b4bcc6",
    ink="#e8ebef",
    soft="#a9b2bd",
    grid="#343b44",
    paper="#14181d",
)


def _variables(palette: Mapping[str, str]) -> str:
    return ".dt-figure{" + ";".join(f"--dt-{name}:{colour}" for name, colour in palette.items()) + "}"


_RULES = (
    ".dt-figure{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    ".dt-figure text{fill:var(--dt-soft)}.dt-figure .dt-title{fill:var(--dt-ink);font-weight:600;font-size:15px}"
    ".dt-figure .dt-name{fill:var(--dt-ink)}.dt-grid{stroke:var(--dt-grid)}.dt-axis{stroke:var(--dt-soft)}"
    ".dt-line{fill:none;stroke-width:2;stroke-linejoin:round}.dt-dashed{stroke-dasharray:6 4}"
    ".dt-band{opacity:.18;stroke:none}.dt-error{stroke-width:1.25;fill:none}.dt-mark{stroke-width:1.5}"
    + "".join(f".dt-s{i}{{stroke:var(--dt-{i})}}.dt-f{i}{{fill:var(--dt-{i})}}" for i in range(_COLOURS))
    + ".dt-hollow{fill:var(--dt-paper)}.dt-bar{fill-opacity:.85}.dt-bar-light{fill-opacity:.35}"
)
STYLE = f"{_variables(_LIGHT)}@media screen and (prefers-color-scheme: dark){{{_variables(_DARK)}}}{_RULES}"

_Point = tuple[float | str, float | None, float | None, float | None]  # x, y and the ends of its error bar
_Place = tuple[float, float, float | None, float | None] | None  # a point that both axes show, or a gap


def svg(figure: Figure, *, style: bool = True) -> str:
    """The figure as an SVG element.

    Arguments:
        style: whether the element carries `STYLE`; False inside a page that holds it already.

    Guarantees:
        Whatever the lines hold (nothing, one point, equal or infinite values), the result is well-formed XML.
        No text of the figure is markup in it.
        The legend lies below the plot.
    """
    parts: list[str] = []
    below = _PAD + 6
    for text in _wrap(figure.title, 8.8):
        below += _ROW
        parts.append(f'<text class="dt-title" x="{_PAD}" y="{below - 4:.1f}">{escape(text)}</text>')
    in_rows = _has_categories(figure)
    content, below = _draw_rows(figure, below) if in_rows else _draw_plane(figure, below)
    parts += content
    if not in_rows or (len(figure.lines) > 1 and not _is_named_by_lines(figure)):
        names, below = _draw_legend(figure.lines, below)
        parts += names
    return _element(figure, parts, below + _PAD, style)


def check_file(path: Path) -> None:
    """Refuse a file of a kind that cannot be drawn here: to be asked before a long computation."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"cannot draw to {str(path)!r}: its name must end in .svg, .png or .pdf")
    if path.suffix != ".svg" and importlib.util.find_spec("vl_convert") is None:
        raise ModuleNotFoundError(
            f"a figure as {path.suffix} needs vl-convert: pip install 'dovetail-fl[plots]'; one as .svg needs nothing"
        )


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into a file of the kind that its name says, .svg, .png or .pdf."""
    check_file(path)
    try:
        if path.suffix == ".svg":
            path.write_text(svg(figure))
            return
        import vl_convert

        drawing = _in_light_colours(svg(figure))
        path.write_bytes(
            vl_convert.svg_to_png(drawing, scale=3) if path.suffix == ".png" else vl_convert.svg_to_pdf(drawing)
        )
    except OSError as error:
        raise ValueError(f"cannot draw to {str(path)!r}: {error.strerror}") from error


def _in_light_colours(drawing: str) -> str:
    """The same on white paper, for programs that know neither CSS variables nor the system's own font."""
    rules = re.sub(r"font:13px [^}]*", "font:13px sans-serif", _RULES)
    drawing = drawing.replace(
        f"<style>{STYLE}</style>", f'<style>{rules}</style><rect width="100%" height="100%" fill="#fff"/>'
    )
    return re.sub(r"var\(--dt-(\w+)\)", lambda match: _LIGHT[match[1]], drawing)


def _element(figure: Figure, parts: Sequence[str], height: float, style: bool) -> str:
    mark = f"dt{zlib.crc32(json.dumps(figure.to_json(), sort_keys=True).encode()):08x}"
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
    return (
        f'<svg{namespace} class="dt-figure" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" '
        f'role="img" aria-labelledby="{mark}-title {mark}-desc">'
        f'<title id="{mark}-title">{escape(figure.title or "Figure")}</title>'
        f'<desc id="{mark}-desc">{escape(_describe(figure))}</desc>'
        + (f"<style>{STYLE}</style>" if style else "")
        + "".join(parts)
        + "</svg>"
    )


def _describe(figure: Figure) -> str:
    """The figure in words, for those who hear it."""
    sentences = [f"{figure.y_label} against {figure.x_label}."]
    for line in figure.lines:
        values = [value for value in line.y if value is not None]
        if not values:
            sentences.append(f"{line.name}: no values.")
        elif len(values) == 1:
            sentences.append(f"{line.name}: {_number(values[0], figure.percent_y)}.")
        else:
            low, high = (_number(value, figure.percent_y) for value in (min(values), max(values)))
            sentences.append(f"{line.name}: {len(values)} values from {low} to {high}.")
    return " ".join(sentences)


def _draw_legend(lines: Sequence[Line], below: float) -> tuple[list[str], float]:
    """Names with their mark, in rows as wide as the figure."""
    parts: list[str] = []
    most = int((_WIDTH - 2 * _PAD - 30) / _CHAR)
    named = [(i, line) for i, line in enumerate(lines) if line.name]
    if not named:
        return parts, below
    x, y = _PAD, below + 6 + _ROW
    for i, line in named:
        name = _shorten(line.name, most)
        needed = 30 + _CHAR * len(name) + 12
        if x > _PAD and x + needed - 12 > _WIDTH - _PAD:
            x, y = _PAD, y + _ROW
        colour = i % _COLOURS
        middle = y - 8
        if line.style == "bars":
            light = " dt-bar-light" if sum(other.style == "bars" for other in lines[:i]) % 2 else " dt-bar"
            box = f'x="{x + 4:.1f}" y="{middle - 5:.1f}" width="16" height="10"'
            parts.append(f'<rect class="dt-f{colour} dt-s{colour}{light}" {box}/>')
        else:
            if line.style != "points":
                dashed = " dt-dashed" if line.style == "dashed" else ""
                ends = f"{x:.1f},{middle:.1f} {x + 24:.1f},{middle:.1f}"
                parts.append(f'<polyline class="dt-line dt-s{colour}{dashed}" points="{ends}"/>')
            if not _is_reference(line):
                parts.append(_marker(i, x + 12, middle))
        parts.append(
            f'<text class="dt-name" x="{x + 29:.1f}" y="{y - 4:.1f}">{escape(name)}{_tooltip(line.name, most)}</text>'
        )
        x += needed
    return parts, y


# lines, points and bars over two axes


def _draw_plane(figure: Figure, below: float) -> tuple[list[str], float]:
    """The plot from this height on, and where it ends."""
    bars = [line for line in figure.lines if line.style == "bars"]
    width = _bar_width(bars)
    x_values = [
        x + shift for line in figure.lines for x in line.x if isinstance(x, float) for shift in _reach(line, width)
    ]
    x_axis = axis(x_values, log=figure.log_x, tight=True)
    y_axis = axis(_values_on_y(figure), log=figure.log_y, percent=figure.percent_y, zero=bool(bars))
    parts = []
    for text in _wrap(figure.y_label):
        below += _ROW
        parts.append(f'<text x="{_PAD}" y="{below - 3:.1f}">{escape(text)}</text>')
    left = _PAD + _CHAR * max(len(label) for label in y_axis.labels) + 8
    right = _WIDTH - 2.5 * _PAD
    top = below + 10
    bottom = top + _PLOT_HEIGHT

    def across(value: float) -> float:
        return left + (right - left) * x_axis.share(value)

    def up(value: float) -> float:
        return bottom - (bottom - top) * y_axis.share(value)

    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = up(tick)
        parts.append(f'<line class="dt-grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    parts += _draw_x_ticks(x_axis, across, top, bottom)
    for i, line in enumerate(figure.lines):
        places = [_place(point, x_axis, y_axis) for point in _points(line)]
        if line.style == "bars":
            parts += _draw_bars(i, places, bars.index(line), len(bars), width, across, up, y_axis)
        else:
            parts += _draw_line(i, line, places, across, up)
    if not any(y_axis.shows(y) for y in _values_on_y(figure)):
        centre = f'x="{(left + right) / 2:.1f}" y="{(top + bottom) / 2:.1f}"'
        parts.append(f'<text {centre} text-anchor="middle">nothing to show</text>')
    parts.append(f'<line class="dt-axis" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>')
    names, below = _draw_label(figure.x_label, (left + right) / 2, bottom + 20)
    return parts + names, below


def _draw_label(label: str, middle: float, below: float) -> tuple[list[str], float]:
    """The name of an axis, centred, from this height on, and where it ends."""
    parts = []
    for text in _wrap(label):
        below += _ROW
        parts.append(f'<text x="{middle:.1f}" y="{below - 3:.1f}" text-anchor="middle">{escape(text)}</text>')
    return parts, below


def _draw_x_ticks(x_axis: Axis, across: Callable[[float], float], top: float, bottom: float) -> Iterator[str]:
    """Grid lines at every tick; labels where they do not touch the one before."""
    free = 0.0
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = across(tick)
        half = _CHAR * len(label) / 2
        yield f'<line class="dt-grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
        middle = min(x, _WIDTH - half - 1)
        if middle - half >= free:
            free = middle + half + 6
            yield f'<text x="{middle:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escape(label)}</text>'


def _place(point: _Point, x_axis: Axis, y_axis: Axis) -> _Place:
    """The point if both axes show it, else a gap."""
    x, y, low, high = point
    if isinstance(x, str) or y is None or not (x_axis.shows(x) and y_axis.shows(y)):
        return None
    return x, y, low, high


def _draw_line(
    i: int, line: Line, places: list[_Place], across: Callable[[float], float], up: Callable[[float], float]
) -> Iterator[str]:
    """A line in its unbroken pieces, with band or error bars, and its markers."""
    colour = i % _COLOURS
    dashed = " dt-dashed" if line.style == "dashed" else ""
    present = [place for place in places if place is not None]
    band = line.style != "points" and len(present) >= _BAND_FROM
    for is_gap, group in itertools.groupby(places, lambda place: place is None) if line.style != "points" else ():
        if is_gap:
            continue
        piece = [place for place in group if place is not None]
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
            yield _error_bar(colour, across(x), up(low), up(high))
        if k % stride == 0 and not _is_reference(line):
            yield _marker(i, across(x), up(y))


def _bar_width(bars: Sequence[Line]) -> float:
    """The smallest distance between two bars of a line."""
    places = sorted({x for line in bars for x in line.x if isinstance(x, float) and math.isfinite(x)})
    gaps = [after - before for before, after in itertools.pairwise(places)]
    return min(gaps, default=1.0)


def _reach(line: Line, width: float) -> tuple[float, ...]:
    """How far a point reaches to the left and right of its x."""
    return (-width / 2, width / 2) if line.style == "bars" else (0.0,)


def _draw_bars(
    i: int,
    places: list[_Place],
    which: int,
    of: int,
    width: float,
    across: Callable[[float], float],
    up: Callable[[float], float],
    y_axis: Axis,
) -> Iterator[str]:
    """Bars from zero (or the foot of a logarithmic axis), those of several lines side by side."""
    light = " dt-bar-light" if which % 2 else " dt-bar"
    colour = i % _COLOURS
    foot = up(y_axis.low if y_axis.log else 0.0)
    for place in places:
        if place is None:
            continue
        x, y, low, high = place
        left, right = across(x - width / 2), across(x + width / 2)
        group = (right - left) * (0.8 if of > 1 else 1.0)
        share = group / of
        start = (left + right - group) / 2 + which * share
        thick = max(share - min(1.0, share / 4), 0.5)
        top, tall = min(up(y), foot), abs(up(y) - foot)
        yield (
            f'<rect class="dt-f{colour} dt-s{colour}{light}" x="{start:.1f}" y="{top:.1f}" '
            f'width="{thick:.1f}" height="{tall:.1f}"/>'
        )
        if low is not None and high is not None:
            yield _error_bar(colour, start + thick / 2, up(low), up(high))


# categories, a row each


def _is_named_by_lines(figure: Figure) -> bool:
    """Whether the lines are bars of one value each: their names are the categories."""
    return len(figure.lines) > 1 and all(line.style == "bars" and len(line.x) == 1 for line in figure.lines)


def _has_categories(figure: Figure) -> bool:
    """Whether the figure is over names rather than numbers."""
    return _is_named_by_lines(figure) or any(isinstance(x, str) for line in figure.lines for x in line.x)


def _draw_rows(figure: Figure, below: float) -> tuple[list[str], float]:
    """The rows from this height on, and where they end: the name at the left, values at their bars or points."""
    by_line = _is_named_by_lines(figure)
    rows: dict[str, list[tuple[int, _Point]]] = {}
    for i, line in enumerate(figure.lines):
        for point in _points(line):
            rows.setdefault(line.name if by_line else str(point[0]), []).append((i, point))
    has_bars = any(line.style == "bars" for line in figure.lines)
    values = axis(_values_on_y(figure), log=figure.log_y, percent=figure.percent_y, zero=has_bars)
    left = min(_PAD + 8 + _CHAR * max((len(name) for name in rows), default=0), 0.4 * _WIDTH)
    right = _WIDTH - 2.5 * _PAD - 40
    names_end = int((left - _PAD - 8) / _CHAR + 1e-9)

    def across(value: float) -> float:
        return left + (right - left) * values.share(value)

    top = below + 8
    bottom = top + sum(_BAR_STEP * len(points) + _ROW_GAP for points in rows.values())
    parts = list(_draw_x_ticks(values, across, top, bottom))
    y = top + _ROW_GAP / 2
    for name, points in rows.items():
        middle = y + _BAR_STEP * len(points) / 2
        parts.append(
            f'<text class="dt-name" x="{left - 8:.1f}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escape(_shorten(name, names_end))}{_tooltip(name, names_end)}</text>"
        )
        for i, (_, value, low, high) in points:
            parts += _draw_value(0 if by_line else i, figure, (value, low, high), values, across, y + _BAR_STEP / 2)
            y += _BAR_STEP
        y += _ROW_GAP
    names, below = _draw_label(figure.y_label, (left + right) / 2, bottom + 20)
    return parts + names, below


def _draw_value(
    i: int,
    figure: Figure,
    point: tuple[float | None, float | None, float | None],
    values: Axis,
    across: Callable[[float], float],
    y: float,
) -> Iterator[str]:
    """One value of a row: a bar or a point, its error bar, and the number beside it."""
    value, low, high = point
    colour = i % _COLOURS
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
        yield _marker(i, end, y)
    if low is not None and high is not None:
        a, b = across(low), across(high)
        path = f"M{a:.1f} {y:.1f}H{b:.1f}M{a:.1f} {y - 3:.1f}v6M{b:.1f} {y - 3:.1f}v6"
        yield f'<path class="dt-axis dt-error" d="{path}"/>'
        end = max(end, b)
    yield f'<text class="dt-name" x="{end + 7:.1f}" y="{y + 4:.1f}">{escape(_number(value, figure.percent_y))}</text>'


# what drawings are made of


def _points(line: Line) -> Iterator[_Point]:
    low = line.low or (None,) * len(line.x)
    high = line.high or (None,) * len(line.x)
    yield from zip(line.x, line.y, low, high, strict=True)


def _values_on_y(figure: Figure) -> Iterator[float]:
    """Every number that the y axis must hold."""
    for line in figure.lines:
        for _, *values in _points(line):
            yield from (value for value in values if value is not None)


def _is_reference(line: Line) -> bool:
    """Whether this is a dashed line at one height, to compare others with: it has no markers."""
    return line.style == "dashed" and len(line.y) > 1 and len(set(line.y)) == 1


def _error_bar(colour: int, x: float, low: float, high: float) -> str:
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    return f'<path class="dt-error dt-s{colour}" d="{path}"/>'


def _marker(i: int, x: float, y: float) -> str:
    """One of six shapes, hollow for every second six."""
    colour = i % _COLOURS
    fill = "dt-hollow" if i // 6 % 2 else f"dt-f{colour}"
    return f'<path class="dt-mark {fill} dt-s{colour}" d="M{x:.1f} {y:.1f}{_MARKERS[i % len(_MARKERS)]}"/>'


def _number(value: float, percent: bool) -> str:
    return f"{value:.1%}" if percent else short(value)


def _wrap(text: str, char: float = _CHAR) -> list[str]:
    """The text in lines that fit the width."""
    return textwrap.wrap(text, int((_WIDTH - 2 * _PAD) / char))


def _shorten(text: str, most: int) -> str:
    """The text in at most so many characters."""
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def _tooltip(text: str, most: int) -> str:
    """The whole text for the pointer, where `_shorten` cuts it."""
    return f"<title>{escape(text)}</title>" if len(text) > most else ""


def escape(text: str) -> str:
    """The text as a part of XML, without the control characters that XML forbids."""
    return html.escape("".join(c for c in text if c >= " " or c in "\t\n"))
