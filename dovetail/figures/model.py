"""What a figure holds: titles, axes and lines of numbers; nothing of how it is drawn.

`None` in `y` is a gap; a number that is not finite is one too. `x` may be text: then the figure has categories.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail import _validate

__all__ = ["STYLES", "Figure", "Line"]

STYLES = ("line", "dashed", "points", "bars")

Numbers = tuple[float | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """One series by its name.

    Arguments:
        x: numbers, or text for categories; not both.
        y: a value for each x, None for a gap.
        low: the lower ends of its error bars or band, one for each x; `high` are the upper ends.
        style: one of `STYLES`.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | None]
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    style: str = "line"

    def __post_init__(self) -> None:
        _validate.one_of(STYLES, style=self.style)
        object.__setattr__(self, "x", tuple(value if isinstance(value, str) else float(value) for value in self.x))
        if len({isinstance(value, str) for value in self.x}) > 1:
            raise ValueError(f"expected x to be all numbers or all text, got x={self.x!r}")
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is None and name != "y":
                continue
            if len(values) != len(self.x):
                raise ValueError(f"expected one value of {name} for each x, got {len(values)} for {len(self.x)} x")
            object.__setattr__(self, name, _none_where_not_finite(values))

    def to_json(self) -> dict[str, Any]:
        """Plain data; what is not finite is written as a gap."""
        return {
            "name": self.name,
            "x": [value if isinstance(value, str) or math.isfinite(value) else None for value in self.x],
            "y": list(self.y),
            "low": None if self.low is None else list(self.low),
            "high": None if self.high is None else list(self.high),
            "style": self.style,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Line:
        """The line that `to_json` wrote."""
        x = [math.nan if value is None else value for value in data["x"]]
        bounds = {name: data.get(name) for name in ("low", "high")}
        return cls(name=data["name"], x=x, y=data["y"], style=data.get("style", "line"), **bounds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """Lines over common axes.

    Guarantees:
        `from_json(to_json())` is the same figure, and `to_json` holds no number that JSON lacks.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    percent_y: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple(self.lines))

    def to_json(self) -> dict[str, Any]:
        """The figure as plain data, for `from_json`."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "lines"}
        return {**shown, "lines": [line.to_json() for line in self.lines]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        """The figure that `to_json` wrote."""
        return cls(
            title=data["title"],
            x_label=data["x_label"],
            y_label=data["y_label"],
            lines=[Line.from_json(line) for line in data["lines"]],
            log_x=data.get("log_x", False),
            log_y=data.get("log_y", False),
            percent_y=data.get("percent_y", False),
        )


def _none_where_not_finite(values: Sequence[float | None]) -> Numbers:
    """The values as floats; None for what is not finite."""
    shown = (None if value is None else float(value) for value in values)
    return tuple(value if value is not None and math.isfinite(value) else None for value in shown)
