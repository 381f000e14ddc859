"""MNIST with the people who wrote it: 539 writers of the 60,000 training images (Yadav, Bottou 2019).

QMNIST traced every image of MNIST back to its form in NIST's Special Database 19. Its table of training labels has one
row per record, in MNIST's order: column 0 is the class, column 2 the writer. The images are MNIST's own; both datasets'
files are verified by their SHA-256, and may lie in one folder. Writers are numbered 0, 1, ... in the order of their
NIST numbers, which have gaps. A writer wrote 19 to 131 of the images. The test images' writers are not used.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from dovetail.data import idx, mnist, qmnist
from dovetail.data._base import Dataset, Task
from dovetail.data.download import fetch

__all__ = ["TASK", "load"]

_CLASS, _WRITER = 0, 2


def load(*, folder: Path | None) -> Dataset:
    """MNIST, in the order of its files, and each training image's writer as its subject."""
    data = mnist.load(folder=folder)
    return dataclasses.replace(data, subjects=_writers(fetch(qmnist.LABEL_FILES["train"], folder=folder), data.labels))


def _writers(path: Path, labels: np.ndarray) -> np.ndarray:
    """The writer of each record, numbered densely; refuses a table that is not about these records."""
    table = idx.read(path)
    if table.ndim != 2 or table.shape[1] <= _WRITER:
        raise ValueError(f"expected a subject column (column {_WRITER}), got labels of shape {table.shape} in {path}")
    if len(table) != len(labels):
        raise ValueError(f"expected one row for each of {len(labels)} records, got {len(table)} rows in {path}")
    wrong = int(np.count_nonzero(table[:, _CLASS] != labels))
    if wrong:
        raise ValueError(f"expected the classes of MNIST in column {_CLASS}, got {wrong} other classes in {path}")
    return np.unique(table[:, _WRITER], return_inverse=True)[1].astype(np.int32)


TASK = Task(name="mnist-writers", load=load, published=True)
