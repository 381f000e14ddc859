"""How pages are made: Jinja2 templates of `dovetail/templates`, filled with plain data and with figures.

Whatever comes in is text and is escaped, unless it is `Markup`; a name that a template does not know is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dovetail.figures import STYLE, Figure, render_svg
from dovetail.files import write_atomically

__all__ = ["Markup", "draw_inline", "render", "write_page"]

_TEMPLATES = Environment(
    loader=PackageLoader("dovetail", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **view: Any) -> str:
    """The text of a template of `dovetail/templates`, by its file's name, filled with these values."""
    return _TEMPLATES.get_template(template).render(view)


def draw_inline(figures: Iterable[Figure]) -> list[Markup]:
    """Figures as SVG to be put into a page of `write_page`, which has the style for them."""
    return [
        Markup(render_svg(figure, style=False)) for figure in figures
    ]  # `render_svg` escapes whatever text they hold


def write_page(target: Path, template: str, *, title: str, **view: Any) -> Path:
    """Fill a template of a whole page, write it whole or not at all, and return its path."""
    page = render(template, title=title, figure_style=Markup(STYLE), **view)
    write_atomically(target, page.encode())
    return target
