"""A recipe: how rows of a table become a model's inputs, and how its outputs become answers.

A number with declared bounds (low, high) is clipped to them and becomes 2 (x - low) / (high - low) - 1, in [-1, 1];
without bounds it stays as it is. A declared category becomes as many zeros and ones as there are declared values. A
column that may lack values has one input more, which is 1 where a value is missing and a declared constant is in its
place. All of it is public, so a run's folder keeps it (`recipe.json`), and new rows are read like those that were
trained on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from dovetail import _validate
from dovetail.data._base import Dataset, Target, as_inputs
from dovetail.data.readers.tables import MissingValues, Table, as_python_value, is_table

__all__ = ["Answer", "InputColumn", "Recipe", "input_matrix", "recipe_of", "with_recipe"]

Value = bool | int | float | str

_MOST_CLASSES = 1000  # that are read off the data


class InputColumn(msgspec.Struct, frozen=True, kw_only=True):
    """A column that a model reads: numbers, within bounds if they are given, or one of the declared values.

    With `missing`, rows may lack a value: it is read as the constant `fill`, and the column's last input is 1. Without
    a constant its inputs are 0, which is the middle of the bounds, and none of the categories.
    """

    name: str
    bounds: tuple[float, float] | None = None
    categories: tuple[Value, ...] | None = None
    missing: bool = False
    fill: Value | None = None

    def __post_init__(self) -> None:
        if self.bounds is not None:
            _check_bounds(self.name, self.bounds)
        if self.categories is not None:
            if self.bounds is not None:
                raise ValueError(f"column {self.name!r} has bounds and categories: declare one of them")
            _check_declared(f"categories of column {self.name!r}", self.categories)
        if self.fill is not None:
            self._check_fill(self.fill)

    def _check_fill(self, fill: Value) -> None:
        """Refuse a constant that the column could not hold."""
        if self.categories is not None:
            if fill not in self.categories:
                raise ValueError(
                    f"expected missing={{{self.name!r}: ...}} to be one of the column's categories, got {fill!r}; "
                    f"missing=[{self.name!r}] makes a missing value none of them"
                )
        elif isinstance(fill, str) or not math.isfinite(fill):
            raise ValueError(f"expected missing={{{self.name!r}: ...}} to be a finite number, got {fill!r}")

    @property
    def width(self) -> int:
        """How many inputs the column makes."""
        return (1 if self.categories is None else len(self.categories)) + self.missing

    def read(self, table: Table) -> np.ndarray:
        """The inputs that this column of a table makes, float32 (rows, width)."""
        if not self.missing:
            return self._read_complete(table)
        inputs = np.zeros((table.rows, self.width), np.float32)
        gaps = table.missing_mask(self.name)
        if not gaps.all():
            inputs[~gaps, :-1] = self._read_complete(table.select_rows(self.name, ~gaps))
        if self.fill is not None:
            inputs[gaps, :-1] = self._read_complete(Table(name="missing", columns={self.name: [self.fill]}))
        inputs[gaps, -1] = 1
        return inputs

    def _read_complete(self, table: Table) -> np.ndarray:
        """The inputs that the column makes of a table in which it has no gaps."""
        if self.categories is not None:
            places = _category_places(table, self.name, self.categories, described_as="categories")
            return np.eye(len(self.categories), dtype=np.float32)[places]
        hint = f"; declare its values in categories={{{self.name!r}: [...]}} or leave it out of inputs"
        return _scale_to_bounds(table, self.name, self.bounds, hint=hint)[:, None]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a model answers: one of the classes, a number, or which labels apply.

    `size` is how many classes or labels there are (1 for a number), `columns` the table's columns of targets, and
    `classes` the values that answers have: for labels, the names of their columns.
    """

    kind: Target
    size: int
    classes: tuple[Value, ...] | None = None
    columns: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[Table],
        *,
        target: str | Sequence[str],
        kind: Target | None,
        classes: Sequence[Value] | None,
        bounds: tuple[float, float] | None = None,
    ) -> Answer:
        """The answer that the target columns of these tables, to train and to test on, ask for.

        Arguments:
            target: a column, or a list of columns of 0 and 1.
            kind: what labels are; by default numbers where all values are floating-point numbers, otherwise classes.
            classes: the values that the target may have; without, they are read off the tables.
            bounds: the public range of a number.
        """
        if kind is not None:
            _validate.one_of(get_args(Target), kind=kind)
        if not isinstance(target, str):
            if kind not in (None, "labels") or classes is not None or bounds is not None or not target:
                raise ValueError(
                    f"a list of targets are columns of 0 and 1, without kind, classes or bounds, got {list(target)}, "
                    f"kind={kind!r}, classes={classes} and bounds={bounds}"
                )
            return cls(kind="labels", size=len(target), classes=tuple(target), columns=tuple(target))
        if kind is None:
            numeric = all(table.kind(target) == "number" for table in tables)
            kind = "number" if numeric and classes is None else "classes"
            if kind == "number" and bounds is None:
                _refuse_zeros_and_ones(tables, target)
        if kind == "labels":
            raise ValueError(f"expected a list of columns of 0 and 1 for kind='labels', got target={target!r}")
        if kind == "number":
            if classes is not None:
                raise ValueError("classes are given, and kind='number': leave out one of them")
            if bounds is not None:
                _check_bounds(target, bounds)
            return cls(kind="number", size=1, columns=(target,), bounds=bounds)
        if bounds is not None:
            raise ValueError(f"expected bounds of numbers, got bounds of column {target!r}, which are classes")
        declared = (
            _classes_in(tables, target) if classes is None else tuple(as_python_value(value) for value in classes)
        )
        _check_declared(f"classes of column {target!r}", declared)
        if len(declared) < 2:
            raise ValueError(f"expected at least two classes in column {target!r}, got {len(declared)}")
        return cls(kind="classes", size=len(declared), classes=declared, columns=(target,))

    def read_labels(self, table: Table) -> np.ndarray:
        """The labels of a table's rows as a `Dataset` holds them: (rows,), or (rows, labels) for several."""
        if self.kind == "number":
            return _scale_to_bounds(table, self.columns[0], self.bounds)
        if self.kind == "classes":
            return _category_places(table, self.columns[0], self.classes or (), described_as="classes").astype(np.int32)
        columns = []
        for name in self.columns:
            column = table.numbers(name)
            if broken := int(np.count_nonzero((column != 0) & (column != 1))):
                raise ValueError(
                    f"expected 0 or 1 in column {name!r}, got {broken} of {table.rows} rows with another value"
                )
            columns.append(column.astype(np.float32))
        return np.stack(columns, axis=1)

    def decode(self, logits: np.ndarray) -> np.ndarray:
        """The answers that a model's outputs (rows, size) stand for: class values, numbers, or zeros and ones.

        Of two classes, a model may have one output, which is positive for the second.
        """
        if self.kind == "labels":
            return (logits > 0).astype(np.int32)
        if self.kind == "number":
            values = logits.reshape(len(logits), -1)[:, 0].astype(np.float64)
            if self.bounds is None:
                return values
            low, high = self.bounds
            return low + (values + 1) / 2 * (high - low)
        best = np.argmax(_class_logits(logits), axis=1)
        return best if self.classes is None else np.asarray(self.classes)[best]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """For every row the probability of each class (they add up to 1), or of each label."""
        if self.kind == "number":
            raise ValueError("a model of numbers gives no probabilities: use predict")
        if self.kind == "labels":
            return 0.5 * (1 + np.tanh(logits.astype(np.float64) / 2))
        logits = _class_logits(logits).astype(np.float64)
        raised = np.exp(logits - logits.max(axis=1, keepdims=True))
        return raised / raised.sum(axis=1, keepdims=True)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a trained model needs to know of its data: a record's shape and type, its columns if any, and the answer.

    `model` is the name of the model, once there is one: another of the same shapes is not taken for it.
    """

    shape: tuple[int, ...]
    dtype: Literal["uint8", "float32"]
    answer: Answer
    columns: tuple[InputColumn, ...] | None = None
    model: str | None = None

    def read_inputs(self, rows: Any) -> np.ndarray:
        """Rows as the model reads them.

        A table (a data frame, a file, a mapping) goes through the recipe; what else it holds is ignored. An array is
        taken as it is, like `Dataset.inputs`.
        """
        if is_table(rows):
            return self._inputs_from_table(Table.of(rows))
        inputs = as_inputs("inputs", np.asarray(rows))
        if inputs.shape[1:] != self.shape or inputs.ndim == 0:
            raise ValueError(f"expected inputs of shape (rows, {', '.join(map(str, self.shape))}), got {inputs.shape}")
        return inputs

    def _inputs_from_table(self, table: Table) -> np.ndarray:
        """The inputs of a table's rows, by the columns that the model was trained on."""
        if self.columns is None:
            size = math.prod(self.shape)
            if len(table.columns) != size or self.dtype == "uint8":
                raise ValueError(
                    f"expected an array of {self.dtype} of shape (rows, {', '.join(map(str, self.shape))}), for the "
                    f"model was not trained on a table, got {table.name} with {len(table.columns)} columns"
                )
            columns = tuple(InputColumn(name=name) for name in table.columns)
            return input_matrix(table, columns).reshape(-1, *self.shape)
        missing = [column.name for column in self.columns if column.name not in table.columns]
        if missing:
            names = ", ".join(map(repr, missing))
            raise ValueError(f"{table.name} lacks columns that the model was trained on: {names}")
        hint = "the model was trained without a rule for them, so leave these rows out, or train anew with missing="
        return input_matrix(table, self.columns, hint=hint)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `recipe.json`."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_json` wrote."""
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"expected a recipe that this version of the library wrote, got {error}") from error


def input_matrix(table: Table, columns: Sequence[InputColumn], *, hint: str | None = None) -> np.ndarray:
    """The inputs of a table's rows, float32, in the order of the columns.

    Arguments:
        hint: what to do about missing values, for the end of the message that names all columns that have some.
    """
    inputs = np.empty((table.rows, sum(column.width for column in columns)), np.float32)
    start = 0
    for column in columns:
        try:
            inputs[:, start : start + column.width] = column.read(table)
        except MissingValues as error:
            raise MissingValues(_describe_gaps(table, columns, hint)) from error
        start += column.width
    return inputs


_MOST_NAMED = 8  # columns that a message names


def _describe_gaps(table: Table, columns: Sequence[InputColumn], hint: str | None) -> str:
    """All columns in which values are missing and must not be, each with in how many rows, and what to do."""
    counts = {column.name: int(table.missing_mask(column.name).sum()) for column in columns if not column.missing}
    lacking = {name: count for name, count in counts.items() if count}
    listed = [f"{name!r} ({count} of {table.rows} rows)" for name, count in lacking.items()]
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    first = next(iter(lacking))
    hint = hint or (
        f"declare what stands for a missing value, missing={{{first!r}: a constant}}, missing=[{first!r}] for the "
        "middle of its range, or missing='indicator' for that in all columns; each such column gets one more input, "
        "which says that the value is missing. Nothing is filled in from the data"
    )
    return (
        f"expected a value in every row of the input columns of {table.name}, got some without one in "
        f"{', '.join(listed[:_MOST_NAMED])}{more}: {hint}"
    )


def recipe_of(dataset: Dataset) -> Recipe:
    """The recipe of a dataset as it was loaded: its own, or one that takes arrays of this shape as they are."""
    shape = dataset.inputs.shape[1:]
    if dataset.recipe is not None and dataset.recipe.shape == shape:
        return dataset.recipe
    dtype: Any = "uint8" if dataset.inputs.dtype == np.uint8 else "float32"
    return Recipe(shape=shape, dtype=dtype, answer=Answer(kind=dataset.target, size=dataset.num_classes))


def with_recipe(dataset: Dataset) -> Dataset:
    """The dataset with its recipe, before views or features change what its inputs are; nothing is copied."""
    copied = copy.copy(dataset)
    object.__setattr__(copied, "recipe", recipe_of(dataset))
    return copied


def _class_logits(logits: np.ndarray) -> np.ndarray:
    """Logits of all classes, also where a model of two classes has one output: the second less the first."""
    columns = logits.reshape(len(logits), -1)
    return np.concatenate([np.zeros_like(columns), columns], axis=1) if columns.shape[1] == 1 else columns


def _scale_to_bounds(table: Table, name: str, bounds: tuple[float, float] | None, *, hint: str = "") -> np.ndarray:
    """A column of numbers as float32; with bounds, clipped to them and mapped to [-1, 1].

    `hint` is what an error about text ends with.
    """
    numbers = table.numbers(name, hint=hint)
    if bounds is not None:
        low, high = bounds
        numbers = 2 * (np.clip(numbers, low, high) - low) / (high - low) - 1
    if beyond := int(np.count_nonzero(np.abs(numbers) > np.finfo(np.float32).max)):
        raise ValueError(
            f"expected numbers that float32 can hold in column {name!r}, got {beyond} of {table.rows} rows beyond it"
        )
    return numbers.astype(np.float32)


def _category_places(table: Table, name: str, declared: Sequence[Value], *, described_as: str) -> np.ndarray:
    """For every row the place of its value among the declared ones; refuses other values.

    `described_as` is what an error calls these: "classes".
    """
    place = {value: number for number, value in enumerate(declared)}
    places = np.array([place.get(value, -1) for value in table.values(name, like=declared)])
    if unknown := int(np.count_nonzero(places < 0)):
        raise ValueError(
            f"expected one of the {len(declared)} declared {described_as} in column {name!r} of {table.name}, got "
            f"{unknown} of {table.rows} rows with another value"
        )
    return places


def _classes_in(tables: Sequence[Table], target: str) -> tuple[Value, ...]:
    """The different values of the target in these tables, sorted."""
    values = {value for table in tables for value in table.values(target)}
    if len(values) > _MOST_CLASSES:
        raise ValueError(
            f"expected at most {_MOST_CLASSES} classes in column {target!r}, or kind='number', or classes=[...], got "
            f"{len(values)} different values"
        )
    if len({isinstance(value, str) for value in values}) != 1:
        raise ValueError(f"column {target!r} has text and numbers for classes: make them one type, or declare classes=")
    return tuple(sorted(values))


def _refuse_zeros_and_ones(tables: Sequence[Table], target: str) -> None:
    """Ask what to predict where a target of floating-point numbers has no values but 0 and 1: most likely classes."""
    if all(np.isin(table.numbers(target), (0.0, 1.0)).all() for table in tables):
        raise ValueError(
            f"column {target!r} has the values 0.0 and 1.0 alone, as floating-point numbers: pass kind='classes' to "
            "predict which of the two it is, or kind='number' to predict a number"
        )


def _check_bounds(name: str, bounds: tuple[float, float]) -> None:
    """Refuse bounds of a column that are not finite, or not low < high."""
    low, high = bounds
    _validate.finite(low=low, high=high)
    if not low < high:
        raise ValueError(f"expected bounds (low, high) with low < high of column {name!r}, got {bounds}")


def _check_declared(described_as: str, values: Sequence[Value]) -> None:
    """Refuse a declaration without values, or with one twice; `described_as` is what the error calls it."""
    if not values or len(set(values)) != len(values):
        raise ValueError(f"expected different {described_as}, got {list(values)}")
