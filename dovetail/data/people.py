"""Whose data these are: a fingerprint that two readings of the same people's data have in common.

It is made of the ids of subjects, or else of users, or else of all rows; their order does not count, nor what is read
of the rows, which of them are held out, or which columns are inputs. It is for the memory of the process that read the
data: what is written down is keyed first (`experiment.spending`), for anyone could try guesses on a bare hash.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.data.readers.tables import Table

if TYPE_CHECKING:
    from dovetail.data._base import Dataset

__all__ = ["fingerprint_ids", "fingerprint_records", "fingerprint_table", "with_people"]


def fingerprint_ids(ids: Iterable[str]) -> bytes:
    """The fingerprint of the set of these ids; 17 and 17.0 are one id."""
    digest = hashlib.blake2b(b"ids", digest_size=32)
    for name in sorted({text.removesuffix(".0") for text in ids}):
        digest.update(len(name.encode()).to_bytes(8) + name.encode())
    return digest.digest()


def fingerprint_table(table: Table) -> bytes:
    """The fingerprint of a table's rows in all of its columns, in any order of either.

    A number counts by its value, however it is spelled; text by its letters.
    """
    return fingerprint_records(*(_cells_as_uint64(table.columns[name]) for name in sorted(table.columns)))


def fingerprint_records(*arrays: np.ndarray) -> bytes:
    """The fingerprint of records, in any order; each array has one row for each of them."""
    parts = [np.ascontiguousarray(array.reshape(len(array), -1)) for array in arrays]
    rows = []
    for number in range(len(parts[0])):
        row = hashlib.blake2b(digest_size=16)
        for part in parts:
            row.update(part[number].data)
        rows.append(row.digest())
    return hashlib.blake2b(b"rows" + b"".join(sorted(rows)), digest_size=32).digest()


def with_people(dataset: Dataset) -> Dataset:
    """The dataset with the fingerprint of its people, by its records where its reader left none; nothing is copied."""
    if dataset.people is not None:
        return dataset
    copied = copy.copy(dataset)
    inputs = dataset.inputs.reshape(len(dataset.labels), -1)
    object.__setattr__(copied, "people", fingerprint_records(inputs, dataset.labels))
    return copied


def _cells_as_uint64(column: Sequence[Any] | np.ndarray) -> np.ndarray:
    """A column as 64 bits for each cell: the number that it holds or spells, or a hash of its text."""
    try:
        numbers = np.asarray(column).astype(np.float64) + 0.0  # which makes -0.0 and 0.0 one
    except (TypeError, ValueError):
        texts, cells = np.unique([str(value) for value in column], return_inverse=True)
        hashed = b"".join(hashlib.blake2b(str(text).encode(), digest_size=8).digest() for text in texts)
        return np.frombuffer(hashed, np.uint64)[cells]
    numbers[np.isnan(numbers)] = np.nan
    return numbers.view(np.uint64)
