"""Features: fixed functions of one record, which cost no privacy, between a task's data and its model.

Features come from a fixed transform (`scatter`), from patches of synthetic images (`patches`), from both, or from a
network that others trained on public data ("module:object"). They may be made blind to left and right, and whitened on
public or synthetic images. Nothing here reads a private record except to compute that record's own features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dovetail.data import Dataset
from dovetail.data.download import cache_folder
from dovetail.features import cache as files
from dovetail.features.pipeline import KINDS, Features, Pipeline, Whitening, as_floats, float_chunks

__all__ = ["CONSTANT", "KINDS", "Features", "Pipeline", "Whitening", "apply", "as_floats", "build_pipeline"]

CONSTANT = 0.3  # the constant feature of a linear model on features of unit norm


def apply(dataset: Dataset, features: Features, *, cache: Path | None = None) -> Dataset:
    """The dataset with every record, or every view of it, replaced by its features: rows of float32.

    Arguments:
        features: which features.
        cache: the folder that features are memory-mapped from; they are computed first, chunk by chunk, if they are not
            there whole. By default it is the folder "features" in Dovetail's cache.

    Guarantees:
        A row depends on its own record, and on public or synthetic images, alone; of a function of one's own that JAX
        cannot compile this is `declared` in the dataset.
        Rows are finite, and of unit norm or zero up to rounding, unless the kind is "none".
    """
    if features.kind == "none":
        return dataset
    shape, test_shape = dataset.inputs.shape[1:], dataset.test_inputs.shape[1:]
    if shape != test_shape:
        raise ValueError(f"expected test records of shape {shape}, as those to train on, got {test_shape}")
    folder = _cache_folder(cache)
    pipeline = Pipeline(features, shape, folder)
    inputs, test_inputs = (
        _cached_feature_rows(pipeline, images, folder) for images in (dataset.inputs, dataset.test_inputs)
    )
    declared = (*dataset.declared, *pipeline.declarations)
    return dataclasses.replace(dataset, inputs=inputs, test_inputs=test_inputs, declared=declared)


def build_pipeline(features: Features, shape: tuple[int, ...], *, cache: Path | None = None) -> Pipeline:
    """The function from float32 records of this shape to their features, which are not cached.

    Arguments:
        cache: the folder of what is computed once, such as axes of a whitening; by default that of `apply`.
    """
    return Pipeline(features, shape, _cache_folder(cache))


def _cache_folder(cache: Path | None) -> Path:
    """The folder of cached features: the given one, or the default."""
    return cache_folder() / "features" if cache is None else cache


def _cached_feature_rows(pipeline: Pipeline, images: np.ndarray, folder: Path) -> np.ndarray:
    """The features of these images (as they are stored), memory-mapped from the cache; computed if not there."""

    def compute() -> Iterator[np.ndarray]:
        return map(pipeline.apply, float_chunks(images, pipeline.chunk_size))

    name = files.digest(pipeline.identity, images)
    return files.cached_rows(folder, name, (len(images), *pipeline.row_shape), compute)
