"""Numbers in few characters; bounds are rounded outward."""

from __future__ import annotations

import decimal

from dovetail import numbers
from dovetail.figures.axes import short

__all__ = ["at_least", "at_most", "number"]


def number(value: float | None, digits: int = 4, *, rounding: str = decimal.ROUND_HALF_EVEN) -> str:
    """A number in few characters, without a trailing zero; a dash for none."""
    if value is None:
        return "-"
    shown = numbers.rounded(value, digits, rounding)
    return short(shown) if shown == 0 or not 1e-3 <= abs(shown) < 1e3 else f"{shown:g}"


def at_most(value: float) -> str:
    """An upper bound in few characters, rounded up."""
    return number(value, rounding=decimal.ROUND_CEILING)


def at_least(value: float) -> str:
    """A lower bound in few characters, rounded down."""
    return number(value, rounding=decimal.ROUND_FLOOR)
