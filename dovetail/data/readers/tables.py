"""A table of named columns, wherever it comes from: CSV, Parquet, a data frame, a Hugging Face dataset, a mapping.

CSV needs the standard library alone: its cells stay text until it is known what a column is for. A column is numbers
(or true and false), or it is text; missing values are refused, with the column and how many rows lack one, unless who
reads the column fills its gaps.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import gzip
import importlib
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dovetail import _validate

__all__ = ["Kind", "MissingValues", "Table", "as_python_value", "import_optional", "is_table"]

Kind = Literal["truth", "whole", "number", "text"]

_MISSING = frozenset(("", "na", "n/a", "nan", "none", "null"))  # in CSV, in any case
_TRUTHS = frozenset(("true", "false"))
_DELIMITERS = ",;\t|"
_CSV, _PARQUET = (".csv", ".tsv", ".csv.gz", ".tsv.gz"), (".parquet", ".pq")


class MissingValues(ValueError):  # noqa: N818 - it says what is there
    """A column in which some rows lack a value, where every row needs one."""


def import_optional(module: str, *, needed_by: str, install: str) -> Any:
    """Import an optional package; if it is not there, say what to install.

    Arguments:
        needed_by: what needs it, for the message.
        install: the name that pip knows it by.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(f"{needed_by} needs {module.partition('.')[0]}: pip install {install}") from error


def as_python_value(value: Any) -> Any:
    """A NumPy scalar as Python's own, which JSON can hold; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def is_table(source: object) -> bool:
    """Whether this has named columns, or is the path of a file that has."""
    return isinstance(source, str | Path | Mapping | Table) or hasattr(source, "columns") or _is_arrow(source)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Columns of one length by name, with at least one row.

    `name` is what messages call the table. With `text` all cells are strings, as in CSV, not yet read as numbers.
    """

    name: str
    columns: Mapping[str, Sequence[Any] | np.ndarray]
    text: bool = False

    def __post_init__(self) -> None:
        lengths = {len(column) for column in self.columns.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"expected columns of one length and at least one row in {self.name}, got lengths {sorted(lengths)}"
            )

    @classmethod
    def of(cls, source: object) -> Table:
        """The table in a file, a data frame, a Hugging Face dataset or a mapping from names to columns."""
        if isinstance(source, Table):
            return source
        if isinstance(source, str | Path):
            return _read_file(Path(source))
        if hasattr(source, "column_names"):
            names = source.column_names
            if isinstance(names, Mapping):  # a dictionary of splits
                raise ValueError(f"expected one split, such as dataset['train'], got several: {', '.join(names)}")
            return cls(name="the dataset", columns={name: _to_sequence(source[name]) for name in names})  # type: ignore[index]
        if isinstance(source, Mapping):
            return cls(name="the mapping", columns={str(key): column for key, column in source.items()})
        if hasattr(source, "columns"):
            named = {name: source[name] for name in source.columns}  # type: ignore[index]
            return cls(name="the data frame", columns={str(name): np.asarray(named[name]) for name in named})
        raise ValueError(f"expected a data frame, a mapping of columns or a file, got {type(source).__name__}")

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return len(next(iter(self.columns.values())))

    def column(self, name: str) -> Sequence[Any] | np.ndarray:
        """The column of this name as it came."""
        _validate.known_name(f"column of {self.name}", name, self.columns)
        return self.columns[name]

    def missing_mask(self, name: str) -> np.ndarray:
        """A mask of the rows in which a column has no value."""
        column = self.column(name)
        if isinstance(column, np.ndarray) and column.dtype.kind in "biufUSM":
            return np.asarray(column != column) if column.dtype.kind in "fM" else np.zeros(len(column), bool)
        is_gap = (text.lower() in _MISSING for text in column) if self.text else map(_is_missing, column)
        return np.fromiter(is_gap, bool, len(column))

    def select_rows(self, name: str, rows: np.ndarray) -> Table:
        """The table of one column, with the rows of a mask; at least one."""
        column = self.column(name)
        kept = column[rows] if isinstance(column, np.ndarray) else list(itertools.compress(column, rows))
        return Table(name=self.name, columns={name: kept}, text=self.text)

    def kind(self, name: str) -> Kind:
        """What a column holds; whole numbers and truths are numbers too."""
        column = self._complete_column(name)
        if isinstance(column, np.ndarray) and column.dtype.kind in "biuf":
            return {"b": "truth", "i": "whole", "u": "whole", "f": "number"}[column.dtype.kind]  # type: ignore[return-value]
        if self.text:
            return _kind_of_texts(column)
        kinds = {_kind_of(value) for value in column}
        for kind in ("text", "number", "whole"):
            if kind in kinds:
                return kind
        return "truth"

    def numbers(self, name: str, *, hint: str = "") -> np.ndarray:
        """A column of numbers, or of true and false, as float64; refuses text, and what is missing or infinite.

        Arguments:
            hint: what to do about text, for the end of that message.
        """
        if self.text and (read := _finite_numbers(self.column(name))) is not None:
            return read
        column = self._complete_column(name)
        kind = self.kind(name)
        if kind == "text":
            if _is_time(column[0]):
                raise ValueError(
                    f"expected numbers in column {name!r} of {self.name}, got dates or times in its {self.rows} rows: "
                    "make numbers of them first, such as days since a fixed date, or leave the column out of inputs"
                )
            raise ValueError(
                f"expected numbers in column {name!r} of {self.name}, got text in its {self.rows} rows{hint}"
            )
        if self.text and kind == "truth":
            column = [text.lower() == "true" for text in column]
        numbers = np.asarray(column).astype(np.float64)
        if broken := int(np.count_nonzero(~np.isfinite(numbers))):
            raise ValueError(
                f"expected finite numbers in column {name!r} of {self.name}, got {broken} of {self.rows} rows with NaN "
                "or infinity"
            )
        return numbers

    def values(self, name: str, *, like: Sequence[Any] | None = None) -> list[Any]:
        """A column's values as Python's own (bool, int, float, str); those of CSV are read as what they look like.

        Arguments:
            like: values that those of CSV are compared with: if all are text, so they stay.
        """
        column = self._complete_column(name)
        if not self.text:
            return column.tolist() if isinstance(column, np.ndarray) else [as_python_value(value) for value in column]
        if like is not None and all(isinstance(value, str) for value in like):
            return list(column)
        match self.kind(name):
            case "truth":
                return [text.lower() == "true" for text in column]
            case "whole":
                return [int(text) for text in column]
            case "number":
                return [float(text) for text in column]
        return list(column)

    def ids_as_text(self, name: str) -> list[str]:
        """A column of ids of any type, as text; refuses missing ones."""
        column = self._complete_column(name)
        return [str(value) for value in (column.tolist() if isinstance(column, np.ndarray) else column)]

    def _complete_column(self, name: str) -> Sequence[Any] | np.ndarray:
        """The column of this name as it came; refuses one in which a value is missing."""
        if missing := int(np.count_nonzero(self.missing_mask(name))):
            raise MissingValues(
                f"expected a value in every row of column {name!r} of {self.name}, got {missing} of {self.rows} rows "
                "without one"
            )
        return self.column(name)


def _read_file(path: Path) -> Table:
    """The table in a CSV or Parquet file."""
    name = path.name.lower()
    if not path.is_file():
        raise FileNotFoundError(f"expected a file of rows at {str(path)!r}, and there is none")
    if name.endswith(_CSV):
        return _read_csv(path)
    if name.endswith(_PARQUET):
        table = import_optional("pyarrow.parquet", needed_by="a Parquet file", install="pyarrow").read_table(path)
        return Table(name=repr(path.name), columns={name: table[name].to_numpy() for name in table.column_names})
    raise ValueError(f"expected a file that ends in {', '.join(_CSV + _PARQUET)}, got {path.name!r}")


def _read_csv(path: Path) -> Table:
    """The rows under a header; the delimiter is the one of , ; tab and | that is in the header most often."""
    content = path.read_bytes()
    if path.name.lower().endswith(".gz"):
        content = gzip.decompress(content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 in {path.name!r}, got byte {error.start} that is not") from error
    header = text.partition("\n")[0]
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=max(_DELIMITERS, key=header.count))
    names = [name.strip() for name in next(rows, [])]
    if not all(names) or len(set(names)) != len(names) or not names:
        raise ValueError(f"expected a header of different names in {path.name!r}, got {names}")
    cells: list[list[str]] = []
    for row in rows:
        if len(row) != len(names):
            if not row:
                continue
            raise ValueError(
                f"expected {len(names)} cells in every row of {path.name!r}, got {len(row)} in line {rows.line_num}"
            )
        cells.append(row)
    if not cells:
        raise ValueError(f"expected rows under the header of {path.name!r}, got none")
    columns = {
        name: [cell.strip() for cell in column] for name, column in zip(names, zip(*cells, strict=True), strict=True)
    }
    return Table(name=repr(path.name), columns=columns, text=True)


def _to_sequence(column: Any) -> Sequence[Any] | np.ndarray:
    """A column of a Hugging Face dataset as an array, or as a list."""
    return column.to_numpy() if hasattr(column, "to_numpy") else list(column)  # the first is Arrow's


def _is_arrow(source: object) -> bool:
    """Whether this has named columns as Arrow's tables and Hugging Face's datasets have."""
    return hasattr(source, "column_names")


def _is_missing(value: Any) -> bool:
    """Whether a cell that is no text holds no value: None, NaN, or pandas's NA and NaT."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating) and bool(value != value)


def _is_time(value: Any) -> bool:
    """Whether this is a date, a time or a span of time, of Python, NumPy or pandas."""
    return isinstance(value, np.datetime64 | np.timedelta64 | datetime.date | datetime.time | datetime.timedelta)


def _kind_of(value: Any) -> Kind:
    """What one value is; what is no number is text."""
    if isinstance(value, bool | np.bool_):
        return "truth"
    if isinstance(value, int | np.integer):
        return "whole"
    return "number" if isinstance(value, float | np.floating) else "text"


def _kind_of_texts(column: Sequence[str] | np.ndarray) -> Kind:
    """The one kind that every cell of a CSV column can be read as; no cell may be missing."""
    if all(text.lower() in _TRUTHS for text in column):
        return "truth"
    try:
        for text in column:
            float(text)
    except ValueError:
        return "text"
    return "whole" if all(map(_is_whole, column)) else "number"


def _finite_numbers(column: Sequence[str] | np.ndarray) -> np.ndarray | None:
    """Texts as numbers in one pass, float64; None if any of them is not a finite number."""
    try:
        numbers = np.fromiter(map(float, column), np.float64, len(column))
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def _is_whole(text: str) -> bool:
    """Whether a text is a whole number: digits, with or without a sign."""
    return text.removeprefix("-").removeprefix("+").isdigit()
