"""Patches of synthetic images as features (after Coates, Lee, Ng 2011): nobody trained them, nobody's data is in them.

A dictionary is a number of random patches of synthetic images, contrast-normalised, ZCA-whitened and of unit norm.
Every patch of an image is treated in the same way and correlated with the dictionary: relu(a - 1/4) and relu(-a - 1/4),
averaged over nine overlapping windows of half the image's height and width; of these numbers the square root, centred
within the image and scaled to unit norm. Everything depends on the one image and a fixed seed alone.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate
from dovetail.features.batches import apply_in_batches, on_one_core
from dovetail.features.synthetic import Synthetic
from dovetail.features.whitening import normalize_rows

__all__ = ["COLOUR", "GREY", "Dictionary", "Patches", "filter_responses", "mean_windows", "sample_dictionary"]

COLOUR = ((4, 600), (6, 800), (8, 600))  # (side of a patch, filters)
GREY = ((5, 400), (8, 400))

_VERSION = 2  # part of the identity: raise it whenever the values change
_IMAGES = 4096
_PATCHES_OF_EACH = 24
_WINDOWS = 3  # along each axis
_THRESHOLD = 0.25  # of a correlation, below which a patch does not respond
_CONTRAST = 10 / 255**2  # added to the variance of a patch's pixels, which are in [0, 1]; flatter ones are no filters
_RIDGE = 0.01  # added to the variances that whitening divides by
_FLAT = 1e-4  # a patch whose squared norm after whitening is far below this has no direction: it is taken as zero
_HIGH = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """Filters for patches of `side` x `side` pixels, with the whitening that comes before them.

    `whiten` (values, values) multiplies contrast-normalised patches (patches, values), with values = side x side x
    colours; `filters` are (number, values), of unit norm.
    """

    side: int
    whiten: np.ndarray
    filters: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patches:
    """Features of images of one shape: responses to a dictionary of `filters` synthetic patches, `side` pixels wide."""

    shape: tuple[int, ...]
    side: int
    filters: int
    declarations: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _validate.integer(side=self.side, filters=self.filters)
        _validate.at_least(1, filters=self.filters)
        _validate.in_interval(2, self.shape[0] // 2, side=self.side)
        if self.filters > _IMAGES:
            raise ValueError(f"expected at most {_IMAGES} filters, got filters={self.filters}")
        self._synthetic_source()

    @property
    def identity(self) -> str:
        """What determines the features of an image, for a cache."""
        return f"patches {_VERSION} {self.side} {self.filters} {self._synthetic_source().identity}"

    @property
    def size(self) -> int:
        """How many features there are."""
        return 2 * _WINDOWS**2 * self.filters

    def apply(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """The features of float32 images `(batch, *shape)` with values in [0, 1]."""
        filters = sample_dictionary(self._synthetic_source(), side=self.side, filters=self.filters)
        tensor = images.reshape(len(images), *self.shape[:2], -1)
        return apply_in_batches(
            functools.partial(_compiled_filter_responses, filters), tensor, cpu_batch=4, accelerator_batch=128
        )

    def _synthetic_source(self) -> Synthetic:
        """The images that filters are cut from; refuses shapes that there are none for."""
        kind = "leaves" if self.shape[2:] == (3,) else "strokes+leaves"
        return Synthetic(kind=kind, shape=self.shape, count=_IMAGES, seed=1)


@functools.lru_cache(maxsize=8)
def sample_dictionary(source: Synthetic, *, side: int, filters: int) -> Dictionary:
    """A dictionary of random patches that are not flat, and the whitening that patches of all kinds ask for.

    Arguments:
        source: the images that patches are cut from.
        side: the side of a patch, in pixels.
        filters: how many patches the dictionary has, each of another image.

    The result is cached: do not write to its arrays.
    """
    rng = np.random.default_rng([source.seed, side, filters])
    samples = []
    for images in source.chunks():
        tensor = images.reshape(len(images), *images.shape[1:3], -1)
        rows, columns = rng.integers(0, images.shape[1] - side + 1, (2, len(images), _PATCHES_OF_EACH))
        near = np.arange(side)
        where = (np.arange(len(images))[:, None, None, None], (rows[..., None] + near)[..., None])
        samples.append(tensor[*where, (columns[..., None] + near)[..., None, :]].reshape(rows.size, -1))
    raw = np.concatenate(samples).astype(np.float64)
    normal = np.asarray(_normalise(raw))
    variances, axes = np.linalg.eigh(normal.T @ normal / len(normal))
    whiten = (axes / np.sqrt(np.maximum(variances, 0) + _RIDGE)) @ axes.T
    lively = rng.permutation(np.flatnonzero(raw.var(axis=1) > _CONTRAST))
    of_each_image = np.sort(np.unique(lively // _PATCHES_OF_EACH, return_index=True)[1])
    if len(of_each_image) < filters:
        raise ValueError(f"expected at most {len(of_each_image)} filters of side {side}, got filters={filters}")
    picked = normal[lively[of_each_image[:filters]]] @ whiten
    picked /= np.linalg.norm(picked, axis=1, keepdims=True)
    return Dictionary(side=side, whiten=whiten.astype(np.float32), filters=picked.astype(np.float32))


def filter_responses(images: jax.Array, side: int, whiten: jax.Array, filters: jax.Array) -> jax.Array:
    """The features (batch, 18 x filters) of images (batch, height, width, colours).

    Arguments:
        side: the side of a patch, in pixels.
        whiten: what normalised patches are multiplied by, (values, values).
        filters: the dictionary, (filters, values), of unit norm.

    Guarantees:
        Rows have unit norm; that of an image of one colour is zero.
        A row depends on its own image only.
    """
    batch, height, width, _ = images.shape
    rows, columns = height - side + 1, width - side + 1
    shifts = [images[:, i : i + rows, j : j + columns] for i in range(side) for j in range(side)]
    patches = jnp.stack(shifts, axis=3).reshape(batch * rows * columns, -1)
    white = jnp.dot(_normalise(patches), whiten, precision=_HIGH)
    white = white / jnp.sqrt(jnp.sum(white**2, axis=1, keepdims=True) + _FLAT)
    responses = jnp.dot(white, filters.T, precision=_HIGH).reshape(batch, rows, columns, -1)
    down, across = mean_windows(rows), mean_windows(columns)
    pools = [
        jnp.einsum("pi,bijf,qj->bpqf", down, jnp.maximum(sign * responses - _THRESHOLD, 0), across, precision=_HIGH)
        for sign in (1, -1)
    ]
    roots = jnp.sqrt(jnp.concatenate(pools, axis=1).reshape(batch, -1))
    return normalize_rows(roots - roots.mean(axis=1, keepdims=True))


def mean_windows(places: int) -> np.ndarray:
    """Weights (3, places) of three means over an axis: of places in its first half, its middle half, its last half."""
    middle = (np.arange(places) + 0.5) / places
    inside = np.stack([(low <= middle) & (middle < low + 0.5) for low in np.linspace(0, 0.5, _WINDOWS)])
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)


_filter_responses_on_one_core = on_one_core(filter_responses, static_argnums=1)


def _compiled_filter_responses(filters: Dictionary, images: np.ndarray) -> jax.Array:
    """`filter_responses` with the arrays of a dictionary, compiled for one core."""
    return _filter_responses_on_one_core(images, filters.side, filters.whiten, filters.filters)


def _normalise(patches):  # type: ignore[no-untyped-def]  # NumPy in, NumPy out; JAX in, JAX out
    """Patches (patches, values), each less its mean and divided by about its standard deviation."""
    centred = patches - patches.mean(axis=1, keepdims=True)
    return centred / ((centred**2).mean(axis=1, keepdims=True) + _CONTRAST) ** 0.5
