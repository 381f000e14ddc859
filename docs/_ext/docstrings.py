"""Docstrings as this project writes them.

`Guarantees:` becomes a list, a sentence a point; `Arguments:` and `Fields:` one of a name each; `References:` a line.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["format_lines", "setup"]

_CODE = re.compile(r"(``.*?``|`[^`]*`)")
_SECTION = re.compile(r"^(Guarantees|References|Arguments|Fields):\s*$")


def format_lines(lines: list[str]) -> list[str]:
    """The docstring's lines in reStructuredText."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        section = _SECTION.match(lines[at])
        at += 1
        if not section:
            out.append(_escape(lines[at - 1]))
            continue
        body = []
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
            body.append(_escape(lines[at].rstrip()))
            at += 1
        as_list = {"Guarantees": _points, "References": _paragraph}.get(section[1], _named_points)
        out += [f"**{section[1]}**", "", *as_list(body), ""]
    return out


def _escape(line: str) -> str:
    """A bar outside of code is a bar, such as that of a norm, and no markup."""
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in _CODE.split(line))


def _points(body: list[str]) -> list[str]:
    """One point for every run of lines that ends with a full stop."""
    points: list[str] = []
    fresh = True
    for line in filter(None, _paragraph(body)):
        points.append(f"- {line}" if fresh else f"  {line}")
        fresh = line.endswith(".")
    return points


def _paragraph(body: list[str]) -> list[str]:
    return [line.strip() for line in body]


def _named_points(body: list[str]) -> list[str]:
    """One point for every name at the margin of the section, with the lines that are indented more."""
    lines = [line for line in body if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    points = []
    for line in lines:
        name, colon, text = line.strip().partition(": ")
        starts = not line[margin:].startswith(" ") and colon
        points.append(f"- ``{name}``: {text}" if starts else f"  {line.strip()}")
    return points


def _process(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = format_lines(lines)


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
