"""The picture of synthetic images in `docs/concepts/features.md`: `python docs/_ext/synthetic_picture.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dovetail.features.synthetic import Synthetic

__all__ = ["picture"]

PICTURE = Path(__file__).parents[1] / "concepts" / "synthetic.png"
COLUMNS, ROWS, GAP, SCALE = 14, 1, 2, 2


def picture() -> np.ndarray:
    """A row each of strokes, of leaves in grey and of leaves in colour, as bytes (height, width, 3)."""
    kinds = [("strokes", (32, 32)), ("leaves", (32, 32)), ("leaves", (32, 32, 3))]
    sources = [Synthetic(kind=kind, shape=shape, count=COLUMNS * ROWS) for kind, shape in kinds]
    grey_or_colour = [next(source.chunks()).reshape(COLUMNS * ROWS, 32, 32, -1) for source in sources]
    tiles = [np.broadcast_to(images, (COLUMNS * ROWS, 32, 32, 3)) for images in grey_or_colour]
    framed = np.pad(np.concatenate(tiles), ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=1)
    side = 32 + GAP
    sheet = framed.reshape(-1, COLUMNS, side, side, 3).swapaxes(1, 2).reshape(-1, COLUMNS * side, 3)
    return np.round(255 * sheet[:-GAP, :-GAP]).astype(np.uint8).repeat(SCALE, axis=0).repeat(SCALE, axis=1)


if __name__ == "__main__":
    from PIL import Image

    Image.fromarray(picture()).save(PICTURE)
