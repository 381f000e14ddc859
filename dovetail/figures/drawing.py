"""A `Figure` as one SVG, inside a page or as a file; .png and .pdf are converted from the same SVG.

From top to bottom: title, name of the y axis, the plot, name of the x axis, legend; so nothing lies over the data, and
the height follows from what there is to show. Lines differ in colour and in marker, so that they can be told apart in
print and by those who do not see all colours. Figures with categories are drawn as rows, with their names at the left.
Colours are CSS variables of `STYLE`, with values for light, dark and print.

Lengths are in units of the SVG's viewBox (CSS pixels at its natural size), and y grows downwards. A drawing function
takes `lower_edge`, the y at which everything drawn so far ends, and returns its SVG elements and the new lower edge.
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

from dovetail.figures.axes import Axis, fit_axis, short_number
from dovetail.figures.model import Figure, Line

__all__ = ["STYLE", "check_drawable_file", "escape_xml", "render_svg", "save"]

_WIDTH, _PLOT_HEIGHT, _PAD = 440.0, 230.0, 8.0
_CHAR, _ROW = 7.2, 18.0  # of 13 px text: the width of a wide-ish character, the height of a row
_BAR_STEP, _ROW_GAP = 16.0, 8.0  # in a figure of categories: the height of a bar, and the space between two rows
_BAND_FROM = 13  # a line with at least so many points has a band instead of error bars
_MARKERS_UP_TO = 26  # a line with more points than this has markers on some of them only
_SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = 8
_MARKERS = (  # SVG paths around the point that they mark
    "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
    "m-2.8 -2.8h5.6v5.6h-5.6z",
    "m0 -3.8l3.6 6.4h-7.2z",
    "m0 -4l4 4l-4 4l-4 -4z",
    "m0 3.8l3.6 -6.4h-7.2z",
    "m-3.2 -3.2l6.4 6.4m0 -6.4l-6.4 6.4",
)


def _palette(lines: str, **others: str) -> dict[str, str]:
    """Colours by the names of their CSS variables; those of `lines`, separated by spaces, are named 0, 1, 2, ..."""
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


def _css_variables(palette: Mapping[str, str]) -> str:
    """The CSS rule that gives the variables `--dt-NAME` these colours."""
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
STYLE = f"{_css_variables(_LIGHT)}@media screen and (prefers-color-scheme: dark){{{_css_variables(_DARK)}}}{_RULES}"

_Point = tuple[float | str, float | None, float | None, float | None]  # x, y and the ends of its error bar
_Place = tuple[float, float, float | None, float | None] | None  # a `_Point` that both axes can show, or a gap


def render_svg(figure: Figure, *, style: bool = True) -> str:
    """The figure as an SVG element.

    Arguments:
        style: whether the element carries `STYLE`; False inside a page that holds it already.

    Guarantees:
        Whatever the lines hold (nothing, one point, equal or infinite values), the result is well-formed XML.
        No text of the figure is markup in it.
        The legend lies below the plot.
    """
    parts: list[str] = []
    lower_edge = _PAD + 6
    for text in _wrap_text(figure.title, 8.8):
        lower_edge += _ROW
        parts.append(f'<text class="dt-title" x="{_PAD}" y="{lower_edge - 4:.1f}">{escape_xml(text)}</text>')
    in_rows = _has_categories(figure)
    content, lower_edge = _draw_rows(figure, lower_edge) if in_rows else _draw_plane(figure, lower_edge)
    parts += content
    if not in_rows or (len(figure.lines) > 1 and not _is_named_by_lines(figure)):
        names, lower_edge = _draw_legend(figure.lines, lower_edge)
        parts += names
    return _svg_element(figure, parts, lower_edge + _PAD, style)


def check_drawable_file(path: Path) -> None:
    """Refuse a file of a kind that cannot be drawn here: to be asked before a long computation."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"cannot draw to {str(path)!r}: its name must end in .svg, .png or .pdf")
    if path.suffix != ".svg" and importlib.util.find_spec("vl_convert") is None:
        raise ModuleNotFoundError(
            f"a figure as {path.suffix} needs vl-convert: pip install 'dovetail-fl[plots]'; one as .svg needs nothing"
        )


def save(figure: Figure, path: Path) -> None:
    """Draw a figure into a file of the kind that its name says, .svg, .png or .pdf."""
    check_drawable_file(path)
    try:
        if path.suffix == ".svg":
            path.write_text(render_svg(figure), encoding="utf-8")
            return
        import vl_convert

        drawing = _in_light_colours(render_svg(figure))
        path.write_bytes(
            vl_convert.svg_to_png(drawing, scale=3) if path.suffix == ".png" else vl_convert.svg_to_pdf(drawing)
        )
    except OSError as error:
        raise ValueError(f"cannot draw to {str(path)!r}: {error.strerror}") from error


def _in_light_colours(drawing: str) -> str:
    """The SVG in light colours on white, for programs that know neither CSS variables nor the system's own font."""
    rules = re.sub(r"font:13px [^}]*", "font:13px sans-serif", _RULES)
    drawing = drawing.replace(
        f"<style>{STYLE}</style>", f'<style>{rules}</style><rect width="100%" height="100%" fill="#fff"/>'
    )
    return re.sub(r"var\(--dt-(\w+)\)", lambda match: _LIGHT[match[1]], drawing)


def _svg_element(figure: Figure, parts: Sequence[str], height: float, style: bool) -> str:
    """The whole `<svg>` of this height, with title and description for screen readers."""
    # ids are hashes of the content, so that a page can hold several figures and the same figure gives the same bytes
    mark = f"dt{zlib.crc32(json.dumps(figure.to_json(), sort_keys=True).encode()):08x}"
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if style else ""
    return (
        f'<svg{namespace} class="dt-figure" viewBox="0 0 {_WIDTH:.0f} {height:.0f}" '
        f'role="img" aria-labelledby="{mark}-title {mark}-desc">'
        f'<title id="{mark}-title">{escape_xml(figure.title or "Figure")}</title>'
        f'<desc id="{mark}-desc">{escape_xml(_describe(figure))}</desc>'
        + (f"<style>{STYLE}</style>" if style else "")
        + "".join(parts)
        + "</svg>"
    )


def _describe(figure: Figure) -> str:
    """The figure in words, for screen readers: how many values each line has, and from where to where."""
    sentences = [f"{figure.y_label} against {figure.x_label}."]
    for line in figure.lines:
        values = [value for value in line.y if value is not None]
        if not values:
            sentences.append(f"{line.name}: no values.")
        elif len(values) == 1:
            sentences.append(f"{line.name}: {_value_as_text(values[0], figure.percent_y)}.")
        else:
            low, high = (_value_as_text(value, figure.percent_y) for value in (min(values), max(values)))
            sentences.append(f"{line.name}: {len(values)} values from {low} to {high}.")
    return " ".join(sentences)


def _draw_legend(lines: Sequence[Line], lower_edge: float) -> tuple[list[str], float]:
    """The named lines with their marks, in rows as wide as the figure.

    Returns: SVG elements, and the y at which they end.
    """
    parts: list[str] = []
    most = int((_WIDTH - 2 * _PAD - 30) / _CHAR)
    named = [(i, line) for i, line in enumerate(lines) if line.name]
    if not named:
        return parts, lower_edge
    x, y = _PAD, lower_edge + 6 + _ROW
    for i, line in named:
        name = _shorten_text(line.name, most)
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
                parts.append(_draw_marker(i, x + 12, middle))
        tooltip = _tooltip_if_cut(line.name, most)
        parts.append(f'<text class="dt-name" x="{x + 29:.1f}" y="{y - 4:.1f}">{escape_xml(name)}{tooltip}</text>')
        x += needed
    return parts, y


# lines, points and bars over two axes


def _draw_plane(figure: Figure, lower_edge: float) -> tuple[list[str], float]:
    """A plot with two axes, drawn below `lower_edge`.

    Returns: SVG elements, and the y at which they end.
    """
    bars = [line for line in figure.lines if line.style == "bars"]
    width = _bar_width(bars)
    x_values = [
        x + shift
        for line in figure.lines
        for x in line.x
        if isinstance(x, float)
        for shift in _half_widths(line, width)
    ]
    x_axis = fit_axis(x_values, log=figure.log_x, tight=True)
    y_axis = fit_axis(_values_on_y(figure), log=figure.log_y, percent=figure.percent_y, zero=bool(bars))
    parts = []
    for text in _wrap_text(figure.y_label):
        lower_edge += _ROW
        parts.append(f'<text x="{_PAD}" y="{lower_edge - 3:.1f}">{escape_xml(text)}</text>')
    left = _PAD + _CHAR * max(len(label) for label in y_axis.labels) + 8
    right = _WIDTH - 2.5 * _PAD
    top = lower_edge + 10
    bottom = top + _PLOT_HEIGHT

    def to_x(value: float) -> float:
        return left + (right - left) * x_axis.position_of(value)

    def to_y(value: float) -> float:
        return bottom - (bottom - top) * y_axis.position_of(value)

    for tick, label in zip(y_axis.ticks, y_axis.labels, strict=True):
        y = to_y(tick)
        parts.append(f'<line class="dt-grid" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape_xml(label)}</text>')
    parts += _draw_x_ticks(x_axis, to_x, top, bottom)
    for i, line in enumerate(figure.lines):
        places = [_place_if_shown(point, x_axis, y_axis) for point in _points_of_line(line)]
        if line.style == "bars":
            parts += _draw_bars(i, places, bars.index(line), len(bars), width, to_x, to_y, y_axis)
        else:
            parts += _draw_line(i, line, places, to_x, to_y)
    if not any(y_axis.shows(y) for y in _values_on_y(figure)):
        centre = f'x="{(left + right) / 2:.1f}" y="{(top + bottom) / 2:.1f}"'
        parts.append(f'<text {centre} text-anchor="middle">nothing to show</text>')
    parts.append(f'<line class="dt-axis" x1="{left:.1f}" y1="{bottom:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"/>')
    names, lower_edge = _draw_label(figure.x_label, (left + right) / 2, bottom + 20)
    return parts + names, lower_edge


def _draw_label(label: str, middle: float, lower_edge: float) -> tuple[list[str], float]:
    """The name of an axis, centred at x = `middle` and drawn below `lower_edge`.

    Returns: SVG elements, and the y at which they end.
    """
    parts = []
    for text in _wrap_text(label):
        lower_edge += _ROW
        parts.append(f'<text x="{middle:.1f}" y="{lower_edge - 3:.1f}" text-anchor="middle">{escape_xml(text)}</text>')
    return parts, lower_edge


def _draw_x_ticks(x_axis: Axis, to_x: Callable[[float], float], top: float, bottom: float) -> Iterator[str]:
    """Grid lines at every tick; labels where they do not touch the one before.

    Arguments:
        to_x: from a value to its x in the drawing.
        top: the y at which the grid lines start.
        bottom: the y of the axis.
    """
    free = 0.0  # the x from which on there is no label yet
    for tick, label in zip(x_axis.ticks, x_axis.labels, strict=True):
        x = to_x(tick)
        half = _CHAR * len(label) / 2
        yield f'<line class="dt-grid" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}"/>'
        middle = min(x, _WIDTH - half - 1)
        if middle - half >= free:
            free = middle + half + 6
            yield f'<text x="{middle:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{escape_xml(label)}</text>'


def _place_if_shown(point: _Point, x_axis: Axis, y_axis: Axis) -> _Place:
    """The point if both axes show it, else a gap."""
    x, y, low, high = point
    if isinstance(x, str) or y is None or not (x_axis.shows(x) and y_axis.shows(y)):
        return None
    return x, y, low, high


def _draw_line(
    line_index: int, line: Line, places: list[_Place], to_x: Callable[[float], float], to_y: Callable[[float], float]
) -> Iterator[str]:
    """A line in its unbroken pieces, with band or error bars, and its markers.

    Arguments:
        line_index: its number in the figure, which decides its colour and marker.
        places: its points in order, None for a gap.
        to_x: from a value on the x axis to its x in the drawing; `to_y` likewise.
    """
    colour = line_index % _COLOURS
    dashed = " dt-dashed" if line.style == "dashed" else ""
    present = [place for place in places if place is not None]
    band = line.style != "points" and len(present) >= _BAND_FROM
    for is_gap, group in itertools.groupby(places, lambda place: place is None) if line.style != "points" else ():
        if is_gap:
            continue
        piece = [place for place in group if place is not None]
        if band and all(low is not None and high is not None for _, _, low, high in piece):
            edge = [(x, high) for x, _, _, high in piece] + [(x, low) for x, _, low, _ in reversed(piece)]
            path = " ".join(f"{to_x(x):.1f},{to_y(y or 0.0):.1f}" for x, y in edge)
            yield f'<polygon class="dt-band dt-f{colour}" points="{path}"/>'
        path = " ".join(f"{to_x(x):.1f},{to_y(y):.1f}" for x, y, _, _ in piece)
        if len(piece) > 1:
            yield f'<polyline class="dt-line dt-s{colour}{dashed}" points="{path}"/>'
    stride = 1 if line.style == "points" else max(1, math.ceil(len(present) / _MARKERS_UP_TO))
    for k, (x, y, low, high) in enumerate(present):
        if not band and low is not None and high is not None:
            yield _draw_error_bar(colour, to_x(x), to_y(low), to_y(high))
        if k % stride == 0 and not _is_reference(line):
            yield _draw_marker(line_index, to_x(x), to_y(y))


def _bar_width(bars: Sequence[Line]) -> float:
    """The width of a group of bars on the x axis: the smallest distance between two different x; 1 if there is one."""
    positions = sorted({x for line in bars for x in line.x if isinstance(x, float) and math.isfinite(x)})
    gaps = [after - before for before, after in itertools.pairwise(positions)]
    return min(gaps, default=1.0)


def _half_widths(line: Line, width: float) -> tuple[float, ...]:
    """What to add to the x of a point for the left and the right end of what is drawn there: a bar has a width."""
    return (-width / 2, width / 2) if line.style == "bars" else (0.0,)


def _draw_bars(
    line_index: int,
    places: list[_Place],
    index_in_group: int,
    bars_per_group: int,
    width: float,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    y_axis: Axis,
) -> Iterator[str]:
    """The bars of one line, from zero (or the foot of a logarithmic axis) to each value.

    Where several lines have bars, those of one x stand side by side in a group.

    Arguments:
        line_index: the line's number in the figure, which decides its colour.
        places: its points in order, None for a gap.
        index_in_group: this line's place in a group, of `bars_per_group`.
        width: of a whole group, in units of the x axis.
        to_x: from a value on the x axis to its x in the drawing; `to_y` likewise.
    """
    light = " dt-bar-light" if index_in_group % 2 else " dt-bar"
    colour = line_index % _COLOURS
    foot = to_y(y_axis.low if y_axis.log else 0.0)
    for place in places:
        if place is None:
            continue
        x, y, low, high = place
        left, right = to_x(x - width / 2), to_x(x + width / 2)
        group = (right - left) * (0.8 if bars_per_group > 1 else 1.0)
        bar_slot = group / bars_per_group
        start = (left + right - group) / 2 + index_in_group * bar_slot
        thick = max(bar_slot - min(1.0, bar_slot / 4), 0.5)
        top = min(to_y(y), foot)
        tall = abs(to_y(y) - foot)
        yield (
            f'<rect class="dt-f{colour} dt-s{colour}{light}" x="{start:.1f}" y="{top:.1f}" '
            f'width="{thick:.1f}" height="{tall:.1f}"/>'
        )
        if low is not None and high is not None:
            yield _draw_error_bar(colour, start + thick / 2, to_y(low), to_y(high))


# categories, a row each


def _is_named_by_lines(figure: Figure) -> bool:
    """Whether the lines are bars of one value each: their names are the categories."""
    return len(figure.lines) > 1 and all(line.style == "bars" and len(line.x) == 1 for line in figure.lines)


def _has_categories(figure: Figure) -> bool:
    """Whether the figure is over names rather than numbers."""
    return _is_named_by_lines(figure) or any(isinstance(x, str) for line in figure.lines for x in line.x)


def _draw_rows(figure: Figure, lower_edge: float) -> tuple[list[str], float]:
    """A row for each category, drawn below `lower_edge`: its name at the left, then its bars or points.

    Returns: SVG elements, and the y at which they end.
    """
    by_line = _is_named_by_lines(figure)
    rows: dict[str, list[tuple[int, _Point]]] = {}
    for i, line in enumerate(figure.lines):
        for point in _points_of_line(line):
            rows.setdefault(line.name if by_line else str(point[0]), []).append((i, point))
    has_bars = any(line.style == "bars" for line in figure.lines)
    values = fit_axis(_values_on_y(figure), log=figure.log_y, percent=figure.percent_y, zero=has_bars)
    left = min(_PAD + 8 + _CHAR * max((len(name) for name in rows), default=0), 0.4 * _WIDTH)
    right = _WIDTH - 2.5 * _PAD - 40
    names_end = int((left - _PAD - 8) / _CHAR + 1e-9)

    def to_x(value: float) -> float:
        return left + (right - left) * values.position_of(value)

    top = lower_edge + 8
    bottom = top + sum(_BAR_STEP * len(points) + _ROW_GAP for points in rows.values())
    parts = list(_draw_x_ticks(values, to_x, top, bottom))
    y = top + _ROW_GAP / 2
    for name, points in rows.items():
        middle = y + _BAR_STEP * len(points) / 2
        parts.append(
            f'<text class="dt-name" x="{left - 8:.1f}" y="{middle + 4:.1f}" text-anchor="end">'
            f"{escape_xml(_shorten_text(name, names_end))}{_tooltip_if_cut(name, names_end)}</text>"
        )
        for i, (_, value, low, high) in points:
            parts += _draw_value(0 if by_line else i, figure, (value, low, high), values, to_x, y + _BAR_STEP / 2)
            y += _BAR_STEP
        y += _ROW_GAP
    names, lower_edge = _draw_label(figure.y_label, (left + right) / 2, bottom + 20)
    return parts + names, lower_edge


def _draw_value(
    line_index: int,
    figure: Figure,
    point: tuple[float | None, float | None, float | None],
    values: Axis,
    to_x: Callable[[float], float],
    y: float,
) -> Iterator[str]:
    """One value of a row: a bar or a point, its error bar, and the number beside it.

    Arguments:
        line_index: the number of the line whose style, colour and marker it has; 0 where lines are the categories.
        point: value, and the ends of its error bar.
        values: the horizontal axis.
        to_x: from a value to its x in the drawing.
        y: the middle of the bar or point.
    """
    value, low, high = point
    colour = line_index % _COLOURS
    if value is None or not values.shows(value):
        yield f'<text x="{to_x(values.low) + 6:.1f}" y="{y + 4:.1f}">none</text>'
        return
    end = to_x(value)
    if figure.lines[line_index].style == "bars":
        foot = to_x(values.low if values.log else 0.0)
        light = " dt-bar-light" if line_index % 2 else " dt-bar"
        yield (
            f'<rect class="dt-f{colour} dt-s{colour}{light}" x="{min(foot, end):.1f}" y="{y - 5.5:.1f}" '
            f'width="{abs(end - foot):.1f}" height="11"/>'
        )
    else:
        yield _draw_marker(line_index, end, y)
    if low is not None and high is not None:
        a, b = to_x(low), to_x(high)
        path = f"M{a:.1f} {y:.1f}H{b:.1f}M{a:.1f} {y - 3:.1f}v6M{b:.1f} {y - 3:.1f}v6"
        yield f'<path class="dt-axis dt-error" d="{path}"/>'
        end = max(end, b)
    text = escape_xml(_value_as_text(value, figure.percent_y))
    yield f'<text class="dt-name" x="{end + 7:.1f}" y="{y + 4:.1f}">{text}</text>'


# what drawings are made of


def _points_of_line(line: Line) -> Iterator[_Point]:
    """x, y, low and high of each point; None for ends that the line does not have."""
    low = line.low or (None,) * len(line.x)
    high = line.high or (None,) * len(line.x)
    yield from zip(line.x, line.y, low, high, strict=True)


def _values_on_y(figure: Figure) -> Iterator[float]:
    """Every number that the y axis must hold."""
    for line in figure.lines:
        for _, *values in _points_of_line(line):
            yield from (value for value in values if value is not None)


def _is_reference(line: Line) -> bool:
    """Whether this is a dashed line at one height, to compare others with: it has no markers."""
    return line.style == "dashed" and len(line.y) > 1 and len(set(line.y)) == 1


def _draw_error_bar(colour: int, x: float, low: float, high: float) -> str:
    """A vertical error bar; `low` and `high` are the y of its ends in the drawing."""
    path = f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"
    return f'<path class="dt-error dt-s{colour}" d="{path}"/>'


def _draw_marker(line_index: int, x: float, y: float) -> str:
    """The marker of a line at this point: every line has its own shape until all are used, then they are hollow."""
    colour = line_index % _COLOURS
    fill = "dt-hollow" if line_index // len(_MARKERS) % 2 else f"dt-f{colour}"
    return f'<path class="dt-mark {fill} dt-s{colour}" d="M{x:.1f} {y:.1f}{_MARKERS[line_index % len(_MARKERS)]}"/>'


def _value_as_text(value: float, percent: bool) -> str:
    return f"{value:.1%}" if percent else short_number(value)


def _wrap_text(text: str, char_width: float = _CHAR) -> list[str]:
    """The text in lines that fit the figure's width, if a character is `char_width` wide."""
    return textwrap.wrap(text, int((_WIDTH - 2 * _PAD) / char_width))


def _shorten_text(text: str, max_chars: int) -> str:
    """The text in at most so many characters."""
    return text if len(text) <= max_chars else text[: max(1, max_chars - 1)] + "…"


def _tooltip_if_cut(text: str, max_chars: int) -> str:
    """The whole text for the pointer, where `_shorten_text` cuts it."""
    return f"<title>{escape_xml(text)}</title>" if len(text) > max_chars else ""


def escape_xml(text: str) -> str:
    """The text escaped for XML, inside an element or a quoted attribute, without the control characters XML forbids."""
    return html.escape("".join(c for c in text if c >= " " or c in "\t\n"))
