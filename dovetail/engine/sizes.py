"""Clients in classes of similar size: a round costs what its records cost, and not what its largest client does.

Every client of a chunk is computed with as many rows as the widest of them. So clients are sorted into classes, at
first by doubling numbers of records; neighbours are joined again while that costs little, as each class is a part of
the compiled program of its own. Which class a client is in changes the speed of a round and nothing else.
"""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["MOST_CLASSES", "SizeClass", "size_classes"]

MOST_CLASSES = 8
_SPARE = 1.25  # computing so many times the rows that doubling classes would is fine, if it saves a class
_SMALL = 1 << 22  # numbers that are computed as fast in one class


@dataclasses.dataclass(frozen=True, eq=False)
class SizeClass:
    """Clients of at most `width` records, at least 1, by their numbers, ascending."""

    width: int
    members: np.ndarray


def size_classes(counts: np.ndarray, *, numbers: int, most: int | None = None) -> list[SizeClass]:
    """The classes of clients with these counts of records, the smallest first; a record has so many `numbers`.

    With `most` there are up to so many classes, whatever they save; without, what is small stays in one.

    Guarantees:
        Every client is in one class, and no class is empty.
        Without `most`, all classes together have at most 2.5 times as many rows as there are records and clients, or
        there are `MOST_CLASSES` of them, or one with few numbers.
    """
    width = max(1, int(counts.max()))
    if most is None and len(counts) * width * numbers <= _SMALL:
        most = 1
    level = np.ceil(np.log2(np.maximum(counts, 1))).astype(int)
    classes = [np.flatnonzero(level == at) for at in np.unique(level)]
    widths = [max(1, int(counts[members].max())) for members in classes]
    least = sum(len(members) * width for members, width in zip(classes, widths, strict=True))
    rows, limit = least, most or MOST_CLASSES
    while len(classes) > 1:
        added = [len(classes[i]) * (widths[i + 1] - widths[i]) for i in range(len(classes) - 1)]
        at = int(np.argmin(added))
        if len(classes) <= limit and (most is not None or rows + added[at] > _SPARE * least):
            break
        rows += added[at]
        classes[at : at + 2] = [np.sort(np.concatenate(classes[at : at + 2]))]
        del widths[at]
    return [SizeClass(width, members) for width, members in zip(widths, classes, strict=True)]
