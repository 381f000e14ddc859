"""Docstrings as this project writes them: `Guarantees:` becomes a list, a sentence a point, `References:` a line."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["formatted", "setup"]

_CODE = re.compile(r"(``.*?``|`[^`]*`)")
_SECTION = re.compile(r"^(Guarantees|References):\s*$")


def formatted(lines: list[str]) -> list[str]:
    """The docstring's lines in reStructuredText."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        found = _SECTION.match(lines[at])
        at += 1
        if not found:
            out.append(_escaped(lines[at - 1]))
            continue
        body = []
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
            body.append(_escaped(lines[at].strip()))
            at += 1
        out += [f"**{found[1]}**", "", *(_points(body) if found[1] == "Guarantees" else body), ""]
    return out


def _escaped(line: str) -> str:
    """A bar outside of code is a bar, such as that of a norm, and no markup."""
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in _CODE.split(line))


def _points(body: list[str]) -> list[str]:
    """One point for every run of lines that ends with a full stop."""
    points: list[str] = []
    fresh = True
    for line in filter(None, body):
        points.append(f"- {line}" if fresh else f"  {line}")
        fresh = line.endswith(".")
    return points


def _process(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = formatted(lines)


def setup(app: Any) -> dict[str, bool]:
    """For Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
