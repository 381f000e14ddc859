"""The doors into a `Dataset`: `from_csv`, `from_pandas` and so on, each a class method with its own keywords.

What they share: `user` and `subject` say who holds a record and whom it is about (ids of any type); with `user=None`
every row counts as one user, and a table with a column that looks like an id must say which it is. `roster` is the
public list of all users, with data or without, which add-remove needs (docs/concepts/counts.md). `target` is what is to
be predicted, `inputs` which columns to read (all others by default: numbers, or true and false). `bounds` and
`categories` declare public ranges and values; without bounds, numbers stay as they are. Test records come from `test`,
or from a share of users that is held out by a public rule (`test_share`, `test_seed`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dovetail.data._base import Dataset

__all__ = ["Sources"]

Ids = str | Sequence[Any] | None
Bounds = Mapping[str, tuple[float, float]] | None
Categories = Mapping[str, Sequence[Any]] | None
Asked = Literal["classes", "number", "labels"] | None


class Sources:
    """Where a dataset may come from.

    A target of floating-point numbers is predicted as a number, a list of columns of 0 and 1 as labels of which several
    may apply, and any other as one of `classes`; `kind` overrides the first guess. Classes that are not declared are
    read off the data, sorted, and every statement then assumes that the list is public.

    Guarantees:
        Nothing is scaled, encoded or filled in by what the data hold; a missing value or undeclared text is refused.
        A number in column c with bounds[c] = (low, high) is clipped to them and mapped to [-1, 1].
        No user's records are on both sides of `test_share`, and nobody's side depends on anyone else.
    """

    @classmethod
    def from_pandas(
        cls,
        frame: Any,
        *,
        target: str | Sequence[str],
        user: Ids | EllipsisType = ...,
        subject: Ids = None,
        roster: Sequence[Any] | None = None,
        inputs: Sequence[str] | None = None,
        categories: Categories = None,
        bounds: Bounds = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        test: Any = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """A data frame (pandas, polars), or a mapping from names to columns; `test` is another one."""
        from dovetail.data.readers.sources import from_table

        return from_table(
            frame,
            target=target,
            user=user,
            subject=subject,
            roster=roster,
            inputs=inputs,
            categories=categories,
            bounds=bounds,
            classes=classes,
            kind=kind,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        target: str | Sequence[str],
        user: Ids | EllipsisType = ...,
        subject: Ids = None,
        roster: Sequence[Any] | None = None,
        inputs: Sequence[str] | None = None,
        categories: Categories = None,
        bounds: Bounds = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        test: str | Path | None = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """A CSV file with a header (.csv, .tsv, or either with .gz); `test` is another file. Needs no other package."""
        return cls.from_pandas(
            _table(path),
            target=target,
            user=user,
            subject=subject,
            roster=roster,
            inputs=inputs,
            categories=categories,
            bounds=bounds,
            classes=classes,
            kind=kind,
            test=None if test is None else _table(test),
            test_share=test_share,
            test_seed=test_seed,
        )

    @classmethod
    def from_parquet(
        cls,
        path: str | Path,
        *,
        target: str | Sequence[str],
        user: Ids | EllipsisType = ...,
        subject: Ids = None,
        roster: Sequence[Any] | None = None,
        inputs: Sequence[str] | None = None,
        categories: Categories = None,
        bounds: Bounds = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        test: str | Path | None = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """A Parquet file, read by pyarrow; `test` is another file."""
        return cls.from_csv(
            path,
            target=target,
            user=user,
            subject=subject,
            roster=roster,
            inputs=inputs,
            categories=categories,
            bounds=bounds,
            classes=classes,
            kind=kind,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )

    @classmethod
    def from_huggingface(
        cls,
        dataset: Any,
        *,
        target: str | Sequence[str],
        user: Ids | EllipsisType = ...,
        subject: Ids = None,
        roster: Sequence[Any] | None = None,
        inputs: str | Sequence[str] | None = None,
        categories: Categories = None,
        bounds: Bounds = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        test: Any = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """One split of a Hugging Face dataset, or the name of a dataset; one name as `inputs`: a column of images.

        Classes that the dataset's schema names are declared thereby.
        """
        from dovetail.data.readers.sources import from_huggingface

        return from_huggingface(
            dataset,
            target=target,
            user=user,
            subject=subject,
            roster=roster,
            inputs=inputs,
            categories=categories,
            bounds=bounds,
            classes=classes,
            kind=kind,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )

    @classmethod
    def from_arrays(
        cls,
        inputs: Any,
        labels: Any,
        *,
        user: Sequence[Any] | None = None,
        subject: Sequence[Any] | None = None,
        roster: Sequence[Any] | None = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        test: tuple[Any, Any] | None = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """Arrays, taken as they are: uint8 (read as value / 255) or floats; `test` is (inputs, labels)."""
        from dovetail.data.readers.sources import from_arrays

        return from_arrays(
            inputs,
            labels,
            user=user,
            subject=subject,
            roster=roster,
            classes=classes,
            kind=kind,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )

    @classmethod
    def from_torch(
        cls,
        dataset: Any,
        *,
        user: Sequence[Any] | None = None,
        subject: Sequence[Any] | None = None,
        roster: Sequence[Any] | None = None,
        classes: Sequence[Any] | None = None,
        kind: Asked = None,
        channels_first: bool = False,
        test: Any = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """A torch dataset of pairs (input, label); with `channels_first`, images (C, H, W) become (H, W, C)."""
        from dovetail.data.readers.sources import from_items

        return from_items(
            dataset,
            user=user,
            subject=subject,
            roster=roster,
            classes=classes,
            kind=kind,
            channels_first=channels_first,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )

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
        test: str | Path | None = None,
        test_share: float | None = None,
        test_seed: int = 0,
    ) -> Dataset:
        """Images in one folder per class, as bytes; `user` and `subject` are functions of an image's path."""
        from dovetail.data.readers.folders import from_folder

        return from_folder(
            folder,
            user=user,
            subject=subject,
            classes=classes,
            size=size,
            grey=grey,
            test=test,
            test_share=test_share,
            test_seed=test_seed,
        )


def _table(path: str | Path) -> Any:
    from dovetail.data.readers.tables import Table

    if not isinstance(path, str | Path):
        raise ValueError(f"expected the path of a file, got {type(path).__name__} (from_pandas takes data frames)")
    return Table.of(path)
