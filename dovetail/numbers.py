"""How bounds are printed: what is promised at most is rounded up, what is shown at least is rounded down."""

from __future__ import annotations

import decimal
import math

__all__ = ["at_least", "at_most", "round_to"]


def round_to(value: float, digits: int, rounding: str) -> float:
    """The value rounded to so many significant digits.

    Arguments:
        value: any number; what is not finite is returned as it is.
        digits: significant digits.
        rounding: a rounding mode of `decimal`, such as ROUND_CEILING.
    """
    if not math.isfinite(value):
        return float(value)
    return float(decimal.Context(prec=digits, rounding=rounding).create_decimal(repr(float(value))))


def at_most(value: float, digits: int = 4) -> str:
    """An upper bound as text: rounded up to so many significant digits."""
    return f"{round_to(value, digits, decimal.ROUND_CEILING):.{digits}g}"


def at_least(value: float, digits: int = 4) -> str:
    """A lower bound as text: rounded down to so many significant digits."""
    return f"{round_to(value, digits, decimal.ROUND_FLOOR):.{digits}g}"
