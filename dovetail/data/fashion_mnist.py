"""Fashion-MNIST: 60,000 and 10,000 grey images of clothes, 28 x 28, ten classes (Xiao, Rasul, Vollgraf 2017).

The four original files, each verified by its SHA-256; Debian carries them as `dataset-fashion-mnist`.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.data import idx
from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch_all

__all__ = ["FILES", "TASK", "load"]

_ORIGIN = Origin(
    name="fashion-mnist",
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    installed=(Path("/usr/share/datasets/fashion-mnist"),),
)

FILES = tuple(
    RemoteFile(origin=_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("train-images-idx3-ubyte", 47040016, "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
        ("train-labels-idx1-ubyte", 60008, "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
        ("t10k-images-idx3-ubyte", 7840016, "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
        ("t10k-labels-idx1-ubyte", 10008, "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
    )
)


def load(*, folder: Path | None) -> Dataset:
    """Fashion-MNIST, in the order of its files."""
    return idx.dataset(*fetch_all(FILES, folder=folder))


TASK = Task(name="fashion-mnist", load=load, published=True)
