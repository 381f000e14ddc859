"""Features: fixed functions of one record, which cost no privacy, between a task's data and its model.

Features come from a fixed transform (`scatter`), from patches of synthetic images (`patches`), from both, or from a
network that others trained on public data ("module:object"). They may be made blind to left and right, and whitened on
public or synthetic images. Nothing here reads a private record except to compute that record's own features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dovetail.data import Dataset
from dovetail.data.download import cache_folder
from dovetail.features import _cache
from dovetail.features._pipeline import Pipeline, chunks
from dovetail.features._settings import KINDS, Features, Whitening

__all__ = ["CONSTANT", "KINDS", "Features", "View", "Whitening", "of"]

CONSTANT = 0.3  # the constant feature of a linear model on features of unit norm

View = Callable[[np.ndarray], np.ndarray]  # a batch of float32 images -> images of the same shape


def of(
    dataset: Dataset, features: Features, *, views: Sequence[View] | None = None, cache: Path | None = None
) -> Dataset:
    """The dataset with every record replaced by its features, float32 of shape (records, features).

    With `views`, training records become (records, views, features): the features of each view of the record in turn.
    A view maps a batch of float32 images to images of the same shape, each from its own alone; the first one is usually
    the identity. Records for testing are not changed by views. A view with an `identity` (text that determines what it
    does) is found in the cache by it, another one by the images that it makes.

    Features are memory-mapped from `cache` (default: the folder "features" in Dovetail's cache), and computed first,
    chunk by chunk, if they are not there whole.

    Guarantees:
        A row depends on its own record, and on public or synthetic images, alone.
        Rows are finite, and of unit norm or zero up to rounding, unless the kind is "none".
    """
    if features.kind == "none" and views is None:
        return dataset
    if views is not None and not views:
        raise ValueError("expected at least one view, the identity, got views=()")
    shape, test_shape = dataset.inputs.shape[1:], dataset.test_inputs.shape[1:]
    if shape != test_shape:
        raise ValueError(f"expected records for testing of {shape}, got records of {test_shape}")
    folder = cache_folder() / "features" if cache is None else cache
    pipeline = Pipeline(features, shape, folder)
    test_inputs = dataset.test_inputs if features.kind == "none" else _rows(pipeline, dataset.test_inputs, folder)
    inputs = (
        _rows(pipeline, dataset.inputs, folder) if views is None else _views(pipeline, dataset.inputs, views, folder)
    )
    return dataclasses.replace(dataset, inputs=inputs, test_inputs=test_inputs)


def _rows(pipeline: Pipeline, images: np.ndarray, folder: Path) -> np.ndarray:
    def compute() -> Iterator[np.ndarray]:
        return map(pipeline.apply, chunks(images, pipeline.chunk))

    name = _cache.digest(pipeline.identity, images)
    return _cache.rows(folder, name, (len(images), *pipeline.row_shape), compute)


def _views(pipeline: Pipeline, images: np.ndarray, views: Sequence[View], folder: Path) -> np.ndarray:
    def seen(view: View) -> Iterator[np.ndarray]:
        for chunk in chunks(images, pipeline.chunk):
            found = np.asarray(view(chunk), dtype=np.float32)
            if found.shape != chunk.shape:
                raise ValueError(f"expected a view to keep the shape of images, {chunk.shape}, got {found.shape}")
            yield found

    def compute() -> Iterator[np.ndarray]:
        for batches in zip(*map(seen, views), strict=True):
            yield np.stack([pipeline.apply(batch) for batch in batches], axis=1)

    named = [getattr(view, "identity", None) or seen(view) for view in views]
    name = _cache.digest(f"{len(views)} views of {pipeline.identity}", images, *named)
    return _cache.rows(folder, name, (len(images), len(views), *pipeline.row_shape), compute)
