"""What the owner of a table declares about its columns: checked, and missed where something depends on it.

A declaration is public and comes from outside the data. Messages and warnings here look at the data and go to their
owner alone: nothing of them enters a run's files.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _validate
from dovetail.data.readers.recipes import Answer, InputColumn, Value
from dovetail.data.readers.tables import Table, as_python_value

__all__ = ["check_types", "input_columns", "refuse_unclear_users", "warn_of_ids", "warn_of_ranges"]

# fmt: off
_ID_WORDS = frozenset((
    "account", "annotator", "client", "clientid", "customer", "device", "driver", "employee", "household", "id",
    "ids", "member", "owner", "participant", "patient", "patientid", "people", "person", "pid", "player",
    "respondent", "speaker", "student", "subject", "subjectid", "uid", "user", "userid", "username", "worker",
    "writer",
))
# fmt: on
_MOST_NAMED = 8  # columns that a warning names
_PACKAGE = str(Path(__file__).parents[2])


def check_types(
    *, target: Any, user: Any, subject: Any, inputs: Any, categories: Any, bounds: Any, classes: Any, missing: Any
) -> None:
    """Refuse keywords of a reader that are of another type than they must be, each in a sentence."""
    if not isinstance(target, str):
        _check_list("target", target, "a column, or a list of columns of 0 and 1")
    for name, ids in (("user", user), ("subject", subject)):
        if not (ids is None or ids is ... or isinstance(ids, str)):
            _check_list(name, ids, "a column, or a list with one id for each row")
    if not isinstance(inputs, str | None):
        _check_list("inputs", inputs, "a list of columns")
    if isinstance(classes, str):
        raise ValueError(
            f"expected classes=[...], the list of values that the target may have, got classes={classes!r}"
        )
    for name, declared, example in (
        ("categories", categories, "{'city': ['Oslo', 'Rome']}"),
        ("bounds", bounds, "{'age': (0, 100)}"),
    ):
        if not isinstance(declared, Mapping | None):
            raise ValueError(f"expected {name} by column, such as {name}={example}, got {name}={declared!r}")
    for column, values in (categories or {}).items():
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise ValueError(
                f"expected a list of values in categories={{{column!r}: [...]}}, got {values!r} for column {column!r}"
            )
    for column, pair in (bounds or {}).items():
        if isinstance(pair, str) or not hasattr(pair, "__len__") or len(pair) != 2 or any(map(_is_no_number, pair)):
            raise ValueError(
                f"expected two numbers in bounds={{{column!r}: (low, high)}}, got {pair!r} for column {column!r}"
            )
    if isinstance(missing, str) and missing != "indicator":
        raise ValueError(
            f"expected missing='indicator' for all columns, a list of columns or constants by column, got {missing!r}: "
            f"for one column write missing=[{missing!r}]"
        )
    if missing is not None and not isinstance(missing, str | Mapping):
        _check_list("missing", missing, "'indicator', a list of columns, or constants by column")


def _check_list(name: str, value: Any, expected: str) -> None:
    """Refuse a value that has no length and cannot be gone through."""
    if not (hasattr(value, "__len__") and hasattr(value, "__iter__")):
        raise ValueError(f"expected {name} to be {expected}, got {name}={value!r}")


def _is_no_number(value: Any) -> bool:
    """Whether this is none of Python's or NumPy's real numbers."""
    return isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating)


def input_columns(
    names: Sequence[str],
    categories: Mapping[str, Sequence[Any]],
    bounds: Mapping[str, tuple[float, float]],
    missing: str | Sequence[str] | Mapping[str, Any] | None,
    *,
    targets: Sequence[str],
) -> tuple[InputColumn, ...]:
    """How each input column `names` is read; refuses a declaration about a column that is not an input or a target."""
    if not names:
        raise ValueError("no column is left for inputs: name some with inputs=")
    fills = _fill_values(missing, names)
    for what, declared in (("categories", categories), ("bounds", bounds), ("missing", fills)):
        for name in declared:
            if what == "missing" and name in targets:
                raise ValueError(
                    f"a missing target cannot be filled in: leave rows without {name!r} out of the table, and {name!r} "
                    "out of missing="
                )
            if not (what == "bounds" and name in targets):
                _validate.known_name(f"input column in {what}", name, names)
    return tuple(
        InputColumn(
            name=name,
            bounds=None if name not in bounds else (float(bounds[name][0]), float(bounds[name][1])),
            categories=None if name not in categories else tuple(as_python_value(value) for value in categories[name]),
            missing=name in fills,
            fill=fills.get(name),
        )
        for name in names
    )


def _fill_values(
    missing: str | Sequence[str] | Mapping[str, Any] | None, names: Sequence[str]
) -> dict[str, Value | None]:
    """The columns that may lack values, each with the constant that stands for one, None for the middle."""
    if missing is None:
        return {}
    if isinstance(missing, Mapping):
        return {name: as_python_value(fill) for name, fill in missing.items()}
    return dict.fromkeys(names if isinstance(missing, str) else missing)


def refuse_unclear_users(table: Table, spoken_for: Sequence[str]) -> None:
    """Refuse a table without `user=` if a column looks like ids and has some value twice: most likely a person's.

    `spoken_for` are columns that are known to be something else.
    """
    for name in table.columns:
        if name in spoken_for or not _looks_like_ids(name):
            continue
        values = table.ids_as_text(name)
        if len(set(values)) < len(values):
            raise ValueError(
                f"the column {name!r} of {table.name} looks like ids, and {len(values) - len(set(values))} of its rows "
                f"repeat one: pass user={name!r} to protect a user with all of its rows, or user=None if every row "
                "counts as one user"
            )


def _looks_like_ids(name: str) -> bool:
    """Whether a column's name has a word in it that ids have."""
    words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", str(name)).lower())
    return not _ID_WORDS.isdisjoint(words)


def warn_of_ids(columns: Sequence[InputColumn]) -> None:
    """Warn of columns that look like ids and are read as numbers, though nobody named or declared them as inputs."""
    names = [
        column.name
        for column in columns
        if column.bounds is None and column.categories is None and _looks_like_ids(column.name)
    ]
    if names:
        _warn(
            f"{_list_columns(names)} look{'s' if len(names) == 1 else ''} like ids and will be read as numbers, from "
            "which a model learns nothing about other people. List the columns to read in inputs=[...]; or, if this is "
            f"a quantity, declare its range, bounds={{{names[0]!r}: (low, high)}}"
        )


def warn_of_ranges(
    table: Table, columns: Sequence[InputColumn], inputs: np.ndarray, answer: Answer, labels: np.ndarray
) -> None:
    """Warn of columns of numbers that are large and have no declared range, the target among them.

    Arguments:
        inputs: what the columns of the table were read as, (rows, inputs).
        labels: the same of the target.
    """
    names, start = [], 0
    for column in columns:
        values = inputs[:, start : start + 1]
        start += column.width
        if column.bounds is None and column.categories is None and np.abs(values).max(initial=0) > 1:
            names.append(column.name)
    if answer.kind == "number" and answer.bounds is None and np.abs(labels).max(initial=0) > 1:
        names.append(answer.columns[0])
    if names:
        _warn(
            f"no range is declared for {_list_columns(names)} of {table.name}, with numbers beyond [-1, 1]: they are "
            "used as they are, and large ones can keep a model from learning anything. Declare what is known without "
            f"looking at the data, bounds={{{names[0]!r}: (low, high), ...}}: numbers are then clipped to their range "
            "and mapped to [-1, 1]"
        )


def _list_columns(names: Sequence[str]) -> str:
    """Columns by name, the first few of them."""
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"column{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:_MOST_NAMED]))}{more}"


def _warn(message: str) -> None:
    """A warning that points at the first caller outside the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
