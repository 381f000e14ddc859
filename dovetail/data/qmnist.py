"""QMNIST: MNIST rebuilt from its source, with all 60,000 test images (Yadav, Bottou 2019).

The images, qmnist-{train,test}-images-idx3-ubyte, raw or as .gz, are read from the user's folder only, and only their
structure is checked. The labels, qmnist-{train,test}-labels-idx2-int, come from there or from a mirror and are verified
by their SHA-256: one row per record, column 0 the class, column 2 the writer (see `mnist_writers`).
"""

from __future__ import annotations

from pathlib import Path

from dovetail.data import idx
from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch

__all__ = ["LABEL_FILES", "TASK", "load"]

_SPLITS = ("train", "test")
_ORIGIN = Origin(
    name="qmnist",
    mirrors=(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
        "https://github.com/facebookresearch/qmnist/raw/master/",
    ),
)

LABEL_FILES = {
    split: RemoteFile(origin=_ORIGIN, name=f"qmnist-{split}-labels-idx2-int", size=1920012, sha256=sha256)
    for split, sha256 in (
        ("train", "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5"),
        ("test", "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd"),
    )
}


def load(*, folder: Path | None) -> Dataset:
    """QMNIST from the given folder: 60,000 images to train and 60,000 to test."""
    if folder is None:
        raise FileNotFoundError("expected a folder with the files of qmnist, got none (its images are not downloaded)")
    paths = []
    for split in _SPLITS:
        paths += [_images(folder, split), fetch(LABEL_FILES[split], folder=folder)]
    return idx.dataset(*paths)


def _images(folder: Path, split: str) -> Path:
    raw = folder / f"qmnist-{split}-images-idx3-ubyte"
    for path in (raw, raw.with_name(f"{raw.name}.gz")):
        if path.is_file():
            return path
    raise FileNotFoundError(f"expected {raw.name} or {raw.name}.gz of qmnist, got a folder without it: {folder}")


TASK = Task(name="qmnist", load=load, published=True)
