"""Checks of arguments, with every bad-input sentence of the library worded once.

A check returns nothing, or raises `ValueError`. Each takes its values as keyword arguments, so that the message can
name them: ``positive(eps_local=-1.0)`` raises ``ValueError("expected eps_local > 0, got eps_local=-1.0")``. What may be
left open is checked if it is there: ``positive(**not_none(eps_local=None))`` passes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np

__all__ = [
    "SMALLEST_CLIP_NORM",
    "at_least",
    "at_most",
    "clip_norm",
    "finite",
    "finite_array",
    "in_brackets",
    "in_interval",
    "in_open_interval",
    "integer",
    "known_name",
    "non_negative",
    "not_none",
    "one_of",
    "positive",
]

SMALLEST_CLIP_NORM = 1e-9
_LONGEST_QUOTE = 120  # characters of a setting's meaning in an error


def _fail(expected: str, name: str, value: object) -> None:
    """Raise the error about a value: what was expected, and what it is."""
    raise ValueError(f"expected {expected}, got {name}={value!r}")


def not_none(**values: Any) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def finite(**values: float) -> None:
    """Each value is a real number, neither NaN nor infinite."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(value):
            _fail(f"{name} to be a finite number", name, value)


def positive(**values: float) -> None:
    """Each value is finite and > 0."""
    finite(**values)
    for name, value in values.items():
        if value <= 0:
            _fail(f"{name} > 0", name, value)


def clip_norm(**values: float) -> None:
    """Each value is a norm that float32 vectors can be clipped to.

    A coordinate below 2^-63 has a square that float32 flushes to zero: a vector of 2^30 such coordinates is 2^-48 long
    and is measured as zero. That is less than 4e-6 of the smallest norm here.
    """
    positive(**values)
    for name, value in values.items():
        if value < SMALLEST_CLIP_NORM:
            why = "float32 cannot measure shorter updates, and would not clip them"
            _fail(f"{name} >= {SMALLEST_CLIP_NORM:g} ({why})", name, value)


def non_negative(**values: float) -> None:
    """Each value is finite and >= 0."""
    finite(**values)
    for name, value in values.items():
        if value < 0:
            _fail(f"{name} >= 0", name, value)


def integer(**values: int) -> None:
    """Each value is of an integer type; True and 1.0 are not."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            _fail(f"{name} to be a whole number", name, value)


def at_least(bound: float, **values: float) -> None:
    """Each value is finite and >= bound."""
    finite(**values)
    for name, value in values.items():
        if value < bound:
            _fail(f"{name} >= {bound}", name, value)


def at_most(bound: float, **values: float) -> None:
    """Each value is finite and <= bound."""
    finite(**values)
    for name, value in values.items():
        if value > bound:
            _fail(f"{name} <= {bound}", name, value)


def in_open_interval(low: float, high: float, **values: float) -> None:
    """Each value lies strictly between low and high."""
    finite(**values)
    for name, value in values.items():
        if not low < value < high:
            _fail(f"{low} < {name} < {high}", name, value)


def in_interval(low: float, high: float, **values: float) -> None:
    """Each value lies in [low, high]."""
    finite(**values)
    for name, value in values.items():
        if not low <= value <= high:
            _fail(f"{low} <= {name} <= {high}", name, value)


def one_of(options: Collection[Any], **values: Any) -> None:
    """Each value is one of the options."""
    for name, value in values.items():
        if value not in options:
            _fail(f"{name} to be one of {', '.join(str(option) for option in options)}", name, value)


def known_name(
    kind: str, name: str, options: Iterable[str], *, meanings: Callable[[], Mapping[str, str]] | None = None
) -> None:
    """The name is one of the options; otherwise the nearest of them is suggested.

    Arguments:
        kind: what is named, as an error calls it: "protocol".
        name: the name to look for.
        options: the names that there are.
        meanings: tells what options mean, if asked; the error says it of the one that it suggests.
    """
    options = sorted(options)
    if name in options:
        return
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if not near:
        raise ValueError(f"unknown {kind} {name!r}: expected one of: {', '.join(options)}")
    meaning = None if meanings is None else meanings().get(near[0])
    raise ValueError(f"unknown {kind} {name!r}: did you mean {near[0]!r}?{in_brackets(meaning)}")


def in_brackets(meaning: str | None) -> str:
    """The first sentence of what a setting means, in brackets, for the end of an error; nothing where it is long."""
    sentence = (meaning or "").partition(". ")[0].removesuffix(".")
    return f" ({sentence})" if 0 < len(sentence) <= _LONGEST_QUOTE else ""


def finite_array(**arrays: np.ndarray) -> None:
    """No array holds a NaN or an infinity; the error says how many it has. Arrays of integers pass."""
    for name, array in arrays.items():
        if not np.issubdtype(array.dtype, np.floating):
            continue
        bad = int(array.size - np.count_nonzero(np.isfinite(array)))
        if bad:
            raise ValueError(f"expected {name} to be finite everywhere, got {bad} NaN or infinite values in {name}")
