"""How pages are made: Jinja2 templates of `dovetail/templates`, filled with plain data.

Whatever comes in is text and is escaped, unless it is `Markup`; a name that a template does not know is an error.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["Markup", "render"]

_TEMPLATES = Environment(
    loader=PackageLoader("dovetail", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **view: Any) -> str:
    """The template, filled with these values."""
    return _TEMPLATES.get_template(template).render(view)
