"""Folders of images, one folder per class; Pillow reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.data._base import Dataset
from dovetail.data.readers.sources import from_arrays
from dovetail.data.readers.tables import needed

__all__ = ["from_folder"]

_ENDINGS = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp")


def from_folder(
    folder: str | Path,
    *,
    user: Callable[[Path], Any] | None = None,
    subject: Callable[[Path], Any] | None = None,
    classes: Sequence[str] | None = None,
    size: tuple[int, int] | None = None,
    grey: bool = False,
    test: str | Path | None = None,
    test_share: float | None = None,
    test_seed: int = 0,
) -> Dataset:
    """Images as bytes, (height, width, 3) or, if `grey`, (height, width)."""
    files, labels = _listed(Path(folder))
    other = None
    if test is not None:
        test_files, test_labels = _listed(Path(test))
        other = _read(test_files, size, grey), test_labels
    return from_arrays(
        _read(files, size, grey),
        labels,
        user=None if user is None else [str(user(file)) for file in files],
        subject=None if subject is None else [str(subject(file)) for file in files],
        classes=classes,
        test=other,
        test_share=test_share,
        test_seed=test_seed,
    )


def _listed(folder: Path) -> tuple[list[Path], list[str]]:
    """All images under the folders of a folder, and the name of that folder for each."""
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, one folder per class, got {str(folder)!r}")
    pairs = [
        (file, inside.name)
        for inside in sorted(folder.iterdir())
        if inside.is_dir()
        for file in sorted(inside.rglob("*"))
        if file.suffix.lower() in _ENDINGS
    ]
    if not pairs:
        raise ValueError(f"expected images in one folder per class, got none in {str(folder)!r}")
    return [file for file, _ in pairs], [label for _, label in pairs]


def _read(files: Sequence[Path], size: tuple[int, int] | None, grey: bool) -> np.ndarray:
    image = needed("PIL.Image", of="Dataset.from_folder", install="pillow")
    found = []
    for file in files:
        with image.open(file) as opened:
            converted = opened.convert("L" if grey else "RGB")
            found.append(np.asarray(converted if size is None else converted.resize((size[1], size[0]))))
    shapes = {one.shape[:2] for one in found}
    if len(shapes) != 1:
        raise ValueError(
            f"expected images of one size, or size=(height, width), got {len(shapes)} sizes in {len(found)} images"
        )
    return np.stack(found)
