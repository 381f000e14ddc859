"""The idx format of MNIST and its kin, read strictly.

A file is: two zero bytes, a type byte (0x08 unsigned bytes, 0x0C big-endian int32), the number of dimensions, each
dimension as a big-endian uint32, then exactly the values. Anything else is refused with one sentence: a file that is
nearly right is a file that was damaged.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data._base import Dataset

__all__ = ["dataset", "parse", "read"]

_DTYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_MAX_DIMS = 4
_SIDE, _NUM_CLASSES = 28, 10


def parse(content: bytes, *, source: str) -> np.ndarray:
    """The array an idx file holds, in native byte order; `source` names the file in an error."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _DTYPES or not 1 <= content[3] <= _MAX_DIMS:
        magic = content[:4].hex() or "nothing"
        raise ValueError(f"expected an idx file of uint8 or int32 values, got a file starting with {magic} in {source}")
    dtype, num_dims = _DTYPES[content[2]], content[3]
    header = 4 + 4 * num_dims
    if len(content) < header:
        raise ValueError(f"expected an idx header of {header} bytes, got {len(content)} bytes in {source}")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", count=num_dims, offset=4))
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        raise ValueError(f"expected {expected} bytes for an idx array {shape}, got {len(content)} bytes in {source}")
    values = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def read(path: Path) -> np.ndarray:
    """The array in an idx file, raw or gzipped (by the suffix .gz)."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"expected a whole gzip file, got {error} in {path}") from error
    return parse(content, source=str(path))


def dataset(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Dataset:
    """Four idx files as a `Dataset`: images of 28 x 28, ten classes; of a table of labels, column 0 is the class."""
    return Dataset(
        inputs=_images(train_images),
        labels=_classes(train_labels),
        test_inputs=_images(test_images),
        test_labels=_classes(test_labels),
        num_classes=_NUM_CLASSES,
    )


def _images(path: Path) -> np.ndarray:
    images = read(path)
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE):
        raise ValueError(
            f"expected uint8 images of {_SIDE} x {_SIDE}, got {images.dtype} of shape {images.shape} in {path}"
        )
    return images


def _classes(path: Path) -> np.ndarray:
    labels = read(path)
    if labels.ndim > 2 or labels.size == 0:
        raise ValueError(f"expected one label or one row of labels per record, got shape {labels.shape} in {path}")
    return np.ascontiguousarray(labels[:, 0] if labels.ndim == 2 else labels, dtype=np.int32)
