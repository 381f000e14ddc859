"""The door to the templates: a page is written from plain data and from figures, which are SVG of our own."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dovetail.figures import STYLE, Figure, svg
from dovetail.files import write_atomically
from dovetail.templating import Markup, render

__all__ = ["drawn", "write"]


def drawn(figures: Iterable[Figure]) -> list[Markup]:
    """Figures as parts of a page."""
    return [Markup(svg(figure, style=False)) for figure in figures]  # `svg` escapes whatever text they hold


def write(target: Path, template: str, *, title: str, **view: Any) -> Path:
    """Fill the template, write the page and return its path."""
    page = render(template, title=title, figure_style=Markup(STYLE), **view)
    write_atomically(target, page.encode())
    return target
