"""Readers: other people's tables, arrays, datasets and folders as a `Dataset`.

`Sources` has the class methods of `Dataset`: `from_csv`, `from_pandas` and so on. Their keywords are those of
`TableOptions`, for what has named columns, or of `ArrayOptions`.

Nothing is ever scaled, encoded or filled in by statistics of the data: bounds, categories and classes are declared, and
thereby public. The one exception, a list of classes that was read off the data, is noted in every statement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, cast

if TYPE_CHECKING:
    from dovetail.data._base import Dataset

__all__ = ["ArrayOptions", "Sources", "TableOptions"]

Target = str | Sequence[str]
Kind = Literal["classes", "number", "labels"]
Method = TypeVar("Method", bound=Callable[..., Any])


class _Options(TypedDict, total=False):
    """Keywords of all readers.

    Arguments:
        name: what reports call the data; by default the name of the file.
        roster: the public list of all users, with data or without, which add-remove needs (docs/concepts/counts.md).
        classes: the values that the target may have; without, they are read off the data.
        kind: what labels are, where the first guess is wrong.
        test_share: the share of users that is held out for testing, by a public rule; or else there is `test`.
        test_seed: which users that are.
    """

    name: str | None
    roster: Sequence[Any] | None
    classes: Sequence[Any] | None
    kind: Kind | None
    test_share: float | None
    test_seed: int


class TableOptions(_Options, total=False):
    """Keywords of readers of named columns, beside `target`: the column to predict, or a list of columns of 0 and 1.

    Arguments:
        user: the column that says who holds a record, or one id per row, of any type; None makes every row a user. A
            table with a column that looks like an id must say which it is.
        subject: whom a record is about, in the same way.
        inputs: the columns to read: numbers, or true and false; all others by default.
        categories: by column, its public values.
        bounds: by column, its public range (low, high); without, numbers stay as they are.
        missing: which columns may lack values: "indicator" for all, a list of columns, or by column the public constant
            that stands for a missing value (without one the middle of the range, or none of the categories). Each such
            column has one more input, which is 1 where the value is missing.
    """

    user: str | Sequence[Any] | EllipsisType | None
    subject: str | Sequence[Any] | None
    inputs: str | Sequence[str] | None
    categories: Mapping[str, Sequence[Any]] | None
    bounds: Mapping[str, tuple[float, float]] | None
    missing: Literal["indicator"] | Sequence[str] | Mapping[str, Any] | None


class ArrayOptions(_Options, total=False):
    """Keywords of readers of arrays: `user` and `subject` are one id per record, of any type; None if unknown."""

    user: Sequence[Any] | None
    subject: Sequence[Any] | None


_DEFAULTS: dict[str, Any] = {"user": ..., "test_seed": 0}  # all other keywords: None; arrays also have user=None


def _with_keywords_of(options: type) -> Callable[[Method], Method]:
    """A decorator that spells out a method's `**options`, of this `TypedDict`, in its signature for `help`."""

    def spell_out(method: Method) -> Method:
        signature = inspect.signature(method)
        *first, _ = signature.parameters.values()
        keywords = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if options is ArrayOptions and name == "user" else _DEFAULTS.get(name),
                annotation=annotation.__forward_arg__,
            )
            for name, annotation in options.__annotations__.items()
        ]
        cast(Any, method).__signature__ = signature.replace(parameters=[*first, *keywords])
        return method

    return spell_out


class Sources:
    """Where a dataset may come from.

    A target of floating-point numbers is predicted as a number, a list of columns of 0 and 1 as labels of which several
    may apply, and any other as one of `classes`; `kind` overrides the first guess. Classes that are not declared are
    read off the data, sorted, and every statement then assumes that the list is public. Test records come from `test`,
    or from a share of users that is held out (`test_share`).

    Guarantees:
        Nothing is scaled, encoded or filled in by what the data hold; undeclared text, and a missing value in a column
        that may have none, is refused.
        A number in column c with bounds[c] = (low, high) is clipped to them and mapped to [-1, 1].
        No user's records are on both sides of `test_share`, and nobody's side depends on anyone else.
    """

    @classmethod
    @_with_keywords_of(TableOptions)
    def from_pandas(cls, frame: Any, *, target: Target, test: Any = None, **options: Unpack[TableOptions]) -> Dataset:
        """A data frame (pandas, polars), or a mapping from names to columns; `test` is another one.

        Arguments: `target`, and those of `TableOptions`.
        """
        from dovetail.data.readers.sources import from_table

        return from_table(frame, target=target, test=test, **options)

    @classmethod
    @_with_keywords_of(TableOptions)
    def from_csv(
        cls, path: str | Path, *, target: Target, test: str | Path | None = None, **options: Unpack[TableOptions]
    ) -> Dataset:
        """A CSV file with a header (.csv, .tsv, or either with .gz); `test` is another file. Needs no other package.

        Arguments: `target`, and those of `TableOptions`.
        """
        table = _read_table(path)
        options["name"] = options.get("name") or Path(path).name.partition(".")[0]
        return cls.from_pandas(table, target=target, test=None if test is None else _read_table(test), **options)

    @classmethod
    @_with_keywords_of(TableOptions)
    def from_parquet(
        cls, path: str | Path, *, target: Target, test: str | Path | None = None, **options: Unpack[TableOptions]
    ) -> Dataset:
        """A Parquet file, read by pyarrow; `test` is another file.

        Arguments: `target`, and those of `TableOptions`.
        """
        return cls.from_csv(path, target=target, test=test, **options)

    @classmethod
    @_with_keywords_of(TableOptions)
    def from_huggingface(
        cls, dataset: Any, *, target: Target, test: Any = None, **options: Unpack[TableOptions]
    ) -> Dataset:
        """One split of a Hugging Face dataset, or the name of a dataset; one name as `inputs`: a column of images.

        Classes that the dataset's schema names are declared thereby.

        Arguments: `target`, and those of `TableOptions`.
        """
        from dovetail.data.readers.sources import from_huggingface

        return from_huggingface(dataset, target=target, test=test, **options)

    @classmethod
    @_with_keywords_of(ArrayOptions)
    def from_arrays(
        cls, inputs: Any, labels: Any, *, test: tuple[Any, Any] | None = None, **options: Unpack[ArrayOptions]
    ) -> Dataset:
        """Arrays, taken as they are: uint8 (read as value / 255) or floats; `test` is (inputs, labels).

        Arguments: those of `ArrayOptions`.
        """
        from dovetail.data.readers.sources import from_arrays

        return from_arrays(inputs, labels, test=test, **options)

    @classmethod
    @_with_keywords_of(ArrayOptions)
    def from_torch(
        cls, dataset: Any, *, channels_first: bool = False, test: Any = None, **options: Unpack[ArrayOptions]
    ) -> Dataset:
        """A torch dataset of pairs (input, label); with `channels_first`, images (C, H, W) become (H, W, C).

        Arguments: those of `ArrayOptions`.
        """
        from dovetail.data.readers.sources import from_items

        return from_items(dataset, channels_first=channels_first, test=test, **options)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        user: Callable[[Path], Any] | None = None,
        subject: Callable[[Path], Any] | None = None,
        classes: Sequence[str] | None = None,
        size: tuple[int, int] | None = None,
        grey: bool = False,
        name: str | None = None,
        test: str | Path | None = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """Images in one folder per class, each as bytes of shape (height, width, 3) or, if `grey`, (height, width).

        Arguments:
            user: who holds an image, from its path; None makes every image a user.
            subject: whom an image is about, from its path.
            size: (height, width) to which images are resized; without, all must have one size.
            name: what reports call the data; by default the name of the folder.
            test: another folder.
        """
        from dovetail.data.readers.sources import from_folder

        return from_folder(
            folder,
            size=size,
            grey=grey,
            name=name,
            user=user,
            subject=subject,
            classes=classes,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )


def _read_table(path: str | Path) -> Any:
    """The table in a file; refuses what is not a path."""
    from dovetail.data.readers.tables import Table

    if not isinstance(path, str | Path):
        raise ValueError(f"expected the path of a file, got {type(path).__name__} (from_pandas takes data frames)")
    return Table.of(path)
