"""Handwritten digits, 8 x 8, 1,797 of them, bundled with the package (Alpaydin, Kaynak 1998): nothing to download.

They are the test images of a set of the UCI repository, in the order of scikit-learn's copy (CC BY 4.0; see
`bundled/DIGITS-LICENSE.txt`). Pixels are scaled to [0, 1]. The split, four fifths to train and one fifth to test, is
one fixed permutation.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import numpy as np

from dovetail.data._base import Dataset, Task

__all__ = ["TASK", "load"]

_BRIGHTEST = 16
_SPLIT_SEED = 0


def load(*, folder: Path | None = None) -> Dataset:
    """The digits; `folder` is not needed."""
    with resources.files("dovetail.data").joinpath("bundled/digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["pixels"].T, arrays["labels"]
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    images = (images[order] / _BRIGHTEST).astype(np.float32).reshape(-1, 8, 8)
    labels = labels[order].astype(np.int32)
    cut = len(labels) * 4 // 5
    return Dataset(
        inputs=images[:cut],
        labels=labels[:cut],
        test_inputs=images[cut:],
        test_labels=labels[cut:],
        num_classes=10,
    )


TASK = Task(name="digits", load=load, published=True)
