"""Figures: data to JSON and back, axes, and SVG that is well-formed whatever the lines hold."""

import json
import math
import random
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest

from dovetail.audit import curves
from dovetail.figures import STYLES, Figure, Line, render_svg, save
from dovetail.figures.axes import fit_axis, short_number
from dovetail.pages import plots

SVG = "{http://www.w3.org/2000/svg}"


def figure(*lines, **more):
    return Figure(**{"title": "Title", "x_label": "x", "y_label": "y", "lines": lines, **more})


def line(x, y, **more):
    return Line(**{"name": "one", "x": x, "y": y, **more})


def parsed(drawn):
    return ElementTree.fromstring(render_svg(drawn))


def marks(drawn, tag):
    return parsed(drawn).findall(f"{SVG}{tag}")


def texts(drawn):
    return [element.text for element in marks(drawn, "text")]


# data


def test_json_is_exactly_the_contract():
    drawn = figure(line([1, 2], [0.5, None], low=[0.4, None], high=[0.6, None], style="dashed"), log_x=True)
    assert drawn.to_json() == {
        "title": "Title",
        "x_label": "x",
        "y_label": "y",
        "log_x": True,
        "log_y": False,
        "percent_y": False,
        "lines": [
            {
                "name": "one",
                "x": [1.0, 2.0],
                "y": [0.5, None],
                "low": [0.4, None],
                "high": [0.6, None],
                "style": "dashed",
            }
        ],
    }


@pytest.mark.parametrize(
    "drawn",
    [
        figure(),
        figure(line([], [])),
        figure(line(np.arange(3), np.ones(3, np.float32), style="points"), log_y=True, percent_y=True),
        figure(line(["a", "b"], [1, 2], style="bars")),
    ],
)
def test_json_and_back_is_the_same_figure(drawn):
    assert Figure.from_json(json.loads(json.dumps(drawn.to_json(), allow_nan=False))) == drawn


def test_what_json_lacks_is_a_gap():
    drawn = figure(line([1, 2, math.nan], [math.inf, math.nan, 1.0]))
    assert drawn.lines[0].to_json()["y"] == [None, None, 1.0]
    assert drawn.lines[0].to_json()["x"] == [1.0, 2.0, None]
    again = Figure.from_json(json.loads(json.dumps(drawn.to_json(), allow_nan=False)))
    assert again.to_json() == drawn.to_json()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": [1]}, "expected one value of y for each x, got 1 for 2 x"),
        ({"high": [1, 2, 3]}, "expected one value of high for each x, got 3 for 2 x"),
        ({"style": "dotted"}, "expected style to be one of line, dashed, points, bars, got style='dotted'"),
        ({"x": ["a", 1]}, "expected x to be all numbers or all text"),
    ],
)
def test_bad_lines_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Line(**{"name": "one", "x": [1, 2], "y": [1, 2], **wrong})


# axes


@pytest.mark.parametrize(
    ("values", "options", "labels"),
    [
        ([0, 10], {}, ["0", "2", "4", "6", "8", "10"]),
        ([0.11, 0.34], {}, ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]),
        ([-3, 7], {}, ["-4", "-2", "0", "2", "4", "6", "8"]),
        ([0.52, 0.91], {"percent": True}, ["50%", "60%", "70%", "80%", "90%", "100%"]),
        ([30, 60000], {}, ["0", "20,000", "40,000", "60,000"]),
        ([1e-6, 1e-2], {"log": True}, ["1e-6", "1e-5", "1e-4", "0.001", "0.01"]),
        ([3, 40], {"log": True}, ["2", "5", "10", "20", "50"]),
        ([5], {"zero": True}, ["0", "1", "2", "3", "4", "5"]),
        ([], {}, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([], {"log": True}, ["1", "2"]),
    ],
)
def test_ticks_are_round(values, options, labels):
    assert list(fit_axis(values, **options).labels) == labels


def test_every_value_has_its_place_on_any_axis():
    """2,000 seeded axes: ends enclose the values, ticks rise, places keep the order."""
    rng = random.Random(0)
    for _ in range(2000):
        log, tight = rng.random() < 0.5, rng.random() < 0.5
        scale = 10 ** rng.uniform(-140, 140) if log else 10 ** rng.uniform(-200, 200)
        values = [
            scale * 10 ** rng.uniform(-4, 4) * (1 if log else rng.choice((1, -1))) for _ in range(rng.randint(1, 6))
        ]
        found = fit_axis(values, log=log, tight=tight)
        assert found.low < found.high
        assert found.low <= min(values) * (1 + 1e-9 * math.copysign(1, min(values)))
        assert found.high >= max(values) * (1 - 1e-9 * math.copysign(1, max(values)))
        assert 2 <= len(found.ticks) <= 12
        assert list(found.ticks) == sorted(set(found.ticks))
        assert all(0 <= found.position_of(value) <= 1 for value in values)
        low, high = sorted((min(values), max(values)))
        assert found.position_of(low) <= found.position_of(high)


def test_short_numbers():
    assert [short_number(value) for value in (0, 0.25, 60000, 1e-6, 2.5e7, -1e-4)] == [
        "0",
        "0.25",
        "60,000",
        "1e-6",
        "2.5e7",
        "-1e-4",
    ]


# drawing


def test_coordinates_are_those_of_the_values():
    drawn = figure(line([0, 5, 10], [0, 10, 5]))
    root = parsed(drawn)
    left, bottom, right = (
        float(root.findall(f"{SVG}line[@class='dt-axis']")[0].get(name)) for name in ("x1", "y1", "x2")
    )
    points = root.find(f"{SVG}polyline").get("points").split()
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points)
    assert x0 == pytest.approx(left, abs=0.1)
    assert x2 == pytest.approx(right, abs=0.1)
    assert x1 == pytest.approx((left + right) / 2, abs=0.1)
    assert y0 == pytest.approx(bottom, abs=0.1)
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)
    assert y1 < y2 < y0, "up is more"


def test_a_log_axis_is_logarithmic():
    root = parsed(figure(line([1, 2, 3], [0.01, 0.1, 1.0]), log_y=True))
    heights = [float(point.split(",")[1]) for point in root.find(f"{SVG}polyline").get("points").split()]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.15)


def test_a_gap_breaks_the_line():
    whole, broken = (figure(line([1, 2, 3, 4], [1, 2, y, 4])) for y in (3, None))
    legend = 1
    assert len(marks(whole, "polyline")) == 1 + legend
    assert len(marks(broken, "polyline")) == 1 + legend
    assert len(marks(broken, "path")) == len(marks(whole, "path")) - 1
    twice = figure(line([1, 2, 3, 4, 5], [1, 2, None, 4, 5]))
    assert len(marks(twice, "polyline")) == 2 + legend


def test_what_a_log_axis_lacks_is_a_gap():
    drawn = figure(line([1, 2, 3, 4, 5], [1, 2, 0, 4, 5]), log_y=True)
    assert len(marks(drawn, "polyline")) == 2 + 1


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("logs", [(False, False), (True, True)])
@pytest.mark.parametrize(
    "lines",
    [
        [],
        [([], [])],
        [([3], [2])],
        [([1, 1, 1], [2, 2, 2])],
        [([1, 2], [math.inf, math.nan])],
        [([1, 2], [1e308, -1e308])],
        [([1e-310, 1], [5e-324, 1])],
        [([0, -1], [0, -5])],
        [([0.0], [0.0])],
        [(["a", "b"], [1, None])],
        [([1, 2, 3], [i, i + 1, i]) for i in range(12)],
    ],
    ids=["none", "empty", "one", "equal", "infinite", "huge", "tiny", "negative", "zero", "names", "twelve"],
)
def test_any_lines_can_be_drawn(style, logs, lines):
    drawn = figure(
        *(Line(name=f"line {i}", x=x, y=y, low=y, high=y, style=style) for i, (x, y) in enumerate(lines)),
        log_x=logs[0],
        log_y=logs[1],
    )
    for number in re.findall(r'(?<= [xy])[12]?="([^"]*)"', render_svg(drawn)):
        assert -1 <= float(number) <= 1000, "inside the picture"
    assert "nan" not in render_svg(drawn).replace("finance", "")
    assert "inf" not in re.sub(r"<(title|desc|text)[^>]*>[^<]*", "", render_svg(drawn))
    assert parsed(drawn).get("role") == "img"


def test_a_figure_without_values_says_so():
    assert "nothing to show" in texts(figure(line([1], [None])))
    assert "nothing to show" in texts(figure(line([1], [0.0]), log_y=True))
    assert "nothing to show" not in texts(figure(line([1], [0.0])))


def test_no_text_is_markup():
    evil = "<script>alert('x')</script> & \"quoted\" \x00\x1b ]]>"
    root = parsed(figure(line([1, 2], [1, 2], name=evil), title=evil, x_label=evil, y_label=evil))
    assert not [element for element in root.iter() if element.tag.endswith("script")]
    assert "<script>alert('x')</script>" in root.find(f"{SVG}title").text
    rows = parsed(figure(line([evil], [1], style="bars")))
    assert not [element for element in rows.iter() if element.tag.endswith("script")]


def test_it_can_be_heard():
    root = parsed(figure(line([1, 2], [0.25, 0.5]), percent_y=True))
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert root.get("aria-labelledby") == f"{title.get('id')} {desc.get('id')}"
    assert desc.text == "y against x. one: 2 values from 25.0% to 50.0%."


def test_the_legend_lies_below_the_plot_and_within_the_picture():
    drawn = figure(*(line([1, 2], [i, i + 1], name=f"a rather long name, number {i}") for i in range(12)))
    root = parsed(drawn)
    _, _, width, height = map(float, root.get("viewBox").split())
    floor = float(root.findall(f"{SVG}line[@class='dt-axis']")[0].get("y1"))
    names = [element for element in root.findall(f"{SVG}text") if element.get("class") == "dt-name"]
    assert len(names) == 12
    for name in names:
        assert floor < float(name.get("y")) < height
        assert float(name.get("x")) + 6 * len(name.text) < width


def test_lines_differ_in_marker_as_well_as_in_colour():
    drawn = figure(*(line([1], [1], name=str(i), style="points") for i in range(12)))
    seen = {
        (element.get("class"), re.sub(r"^M[\d.]+ [\d.]+", "", element.get("d"))) for element in marks(drawn, "path")
    }
    assert len(seen) == 12
    shapes = {(css.split()[1] == "dt-hollow", shape) for css, shape in seen}
    assert len(shapes) == 12, "in black and white as well"


def test_many_points_have_a_band_and_few_have_bars():
    for count, tag in ((5, "dt-error"), (40, "dt-band")):
        x = list(range(count))
        drawn = render_svg(figure(line(x, x, low=[v - 1 for v in x], high=[v + 1 for v in x])), style=False)
        assert (f'class="{tag} ' in drawn) is True
        other = {"dt-error": "dt-band", "dt-band": "dt-error"}[tag]
        assert f'class="{other} ' not in drawn


def test_bars_begin_at_zero_and_names_stand_beside_their_values():
    drawn = figure(*(line([i], [0.5 + i / 10], name=f"p{i}", style="bars") for i in range(3)), percent_y=True)
    rows = marks(drawn, "rect")
    widths = [float(row.get("width")) for row in rows]
    assert widths[1] / widths[0] == pytest.approx(0.6 / 0.5, rel=0.01)
    assert {"p0", "p1", "p2", "50.0%", "60.0%", "70.0%"} <= set(texts(drawn))


# files


def test_figures_are_saved_as_what_their_name_says(tmp_path):
    drawn = figure(
        line([1, 2], [1, None], low=[0.5, None], high=[2, None]),
        line([1, 2], [1, 2], name="b", style="bars"),
        log_y=True,
    )
    for suffix, begin in ((".svg", b"<svg xmlns"), (".png", b"\x89PNG"), (".pdf", b"%PDF")):
        save(drawn, tmp_path / f"figure{suffix}")
        assert (tmp_path / f"figure{suffix}").read_bytes().startswith(begin)
    for wrong in ("figure.gif", "figure", "no/such/folder.svg", "no/such/folder.png"):
        with pytest.raises(ValueError, match="cannot draw to "):
            save(drawn, tmp_path / wrong)


def test_without_a_converter_a_picture_says_what_to_install_and_svg_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    drawn = figure(line([1, 2], [1, 2]))
    for name in ("figure.png", "figure.pdf"):
        with pytest.raises(ModuleNotFoundError, match=r"needs vl-convert: pip install 'dovetail-fl\[plots\]'"):
            save(drawn, tmp_path / name)
        assert not (tmp_path / name).exists()
    save(drawn, tmp_path / "figure.svg")


def test_amplification_draws_every_bound_that_applies():
    drawn = plots.amplification_figure(num_users=200, eps_local=1.0, delta=1e-4)
    names = [one.name for one in drawn.lines]
    assert {"clones23-numerical", "blanket-hoeffding-generic"} <= set(names)
    assert "erlingsson19" not in names, "it needs eps_local below 1/2"
    best = next(one for one in drawn.lines if one.name == "clones23-numerical")
    assert best.y[0] is None, "two users are too few"
    known = [y for y in best.y if y is not None]
    assert known == sorted(known, reverse=True)
    with pytest.raises(ValueError, match="expected over to be one of n, eps-local"):
        plots.amplification_figure(num_users=1000, eps_local=1.0, delta=1e-6, over="delta")


def test_a_single_point_of_a_trade_off_is_a_mark():
    drawn = curves.draw_curves({"certified": [(1.0, 1e-6), (0.5, 1e-4)], "counted": [(0.3, 1e-2)]}, title="t")
    assert [(one.name, one.style) for one in drawn.lines] == [("certified", "line"), ("counted", "points")]
