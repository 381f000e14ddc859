"""Figures as data, and how to draw them.

`Figure` and `Line` are plain records that go to JSON and back; `render_svg` draws one by hand, without a dependency:
real text, colours for light, dark and print. `save` writes one to a file. Every figure that Dovetail shows is one.
"""

from __future__ import annotations

from dovetail.figures.drawing import STYLE, check_drawable_file, render_svg, save
from dovetail.figures.model import STYLES, Figure, Line

__all__ = ["STYLE", "STYLES", "Figure", "Line", "check_drawable_file", "render_svg", "save"]
