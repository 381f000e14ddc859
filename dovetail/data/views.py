"""Views of an image: shifted, turned, mirrored, enlarged; what a client may train on beside the image itself.

A client averages its gradient over all views of all its records and clips the mean once, so views cost no privacy: what
it uploads is still one clipped vector (De et al. 2022). A view is a function from a batch of images (batch, height,
width[, channels]) to a batch of the same shape; pixels between pixels are bilinear, those from outside repeat the edge.
A list of views is written as text: "shift:1" is four shifts by one pixel, "rotate:8" two turns by 8 degrees, "flip" the
mirror image, "zoom:1.1" an enlarged one, and "module:name" a function of one's own or a list of such functions, which
get one image at a time, as a batch of one (`data.own_code`). The image itself is always the first view.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _imports, _validate
from dovetail.data._base import Dataset
from dovetail.data.own_code import PerRecord

__all__ = ["KINDS", "View", "add_views", "flip", "parse_views", "rotate", "same", "shift", "zoom"]

View = Callable[[jax.Array], jax.Array]
KINDS = ("flip", "rotate", "shift", "zoom")

_LARGEST = 4 << 30  # bytes of all views of all records, which are held
_BATCH = 512


def same(images: jax.Array) -> jax.Array:
    """The images as they are."""
    return images


def flip(images: jax.Array) -> jax.Array:
    """The mirror image: left and right exchanged."""
    return images[:, :, ::-1]


def shift(rows: int, columns: int) -> View:
    """The view that moves images down and right by whole pixels, exactly."""
    _validate.integer(rows=rows, columns=columns)

    def shift_images(images: jax.Array) -> jax.Array:
        return _shift_axis(_shift_axis(images, -rows, axis=1), -columns, axis=2)

    return shift_images


def rotate(degrees: float) -> View:
    """The view that turns images counter-clockwise about their centre."""
    _validate.finite(degrees=degrees)
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))

    def rotate_images(images: jax.Array) -> jax.Array:
        down, right = _offsets_from_centre(images.shape)
        return _read_bilinearly(images, cosine * down + sine * right, cosine * right - sine * down)

    return rotate_images


def zoom(factor: float) -> View:
    """The view that enlarges images by this factor about their centre; what leaves the frame is lost."""
    _validate.positive(factor=factor)

    def zoom_images(images: jax.Array) -> jax.Array:
        down, right = _offsets_from_centre(images.shape)
        return _read_bilinearly(images, down / factor, right / factor)

    return zoom_images


def parse_views(views: Sequence[str]) -> tuple[View, ...]:
    """The views that a list of texts ("shift:1") names, the image itself first.

    Guarantees:
        An empty list is the image alone.
    """
    return (same, *(view for text in views for view in _parse_view_text(text)))


def add_views(dataset: Dataset, views: Sequence[str]) -> Dataset:
    """The dataset with all these views of every training record as rows of its inputs, one after the other.

    Bytes stay bytes, rounded to the nearest. All views are held in memory, at most 4 GiB; more are refused.

    Guarantees:
        Views of one's own get one record at a time; what JAX cannot compile of them is `declared` in the dataset.
    """
    applied = parse_views(views)
    if len(applied) == 1:
        return dataset
    if dataset.views != 1:
        raise ValueError(f"the dataset has views={dataset.views} already: add all views at once")
    inputs = dataset.inputs
    if inputs.nbytes * len(applied) > _LARGEST:
        raise ValueError(
            f"expected views of at most {_LARGEST >> 30} GiB in all, got {len(applied)} views of "
            f"{inputs.nbytes / 2**30:.1f} GiB of records"
        )
    if inputs.ndim not in (3, 4) and any(_kind_of(text) in KINDS for text in views):
        raise ValueError(
            f"expected images (height, width[, channels]) for views, got records of shape {inputs.shape[1:]}"
        )
    rows = np.empty((len(inputs), len(applied), *inputs.shape[1:]), inputs.dtype)
    rows[:, 0] = inputs
    declared = dataset.declared
    names = [text for text in views for _ in _parse_view_text(text)]
    for number, (text, view) in enumerate(zip(names, applied[1:], strict=True), start=1):
        apply: Callable[[np.ndarray], Any] = jax.jit(view)
        if _kind_of(text) not in KINDS:
            apply = own = PerRecord(view, inputs.shape[1:], name=text)
            declared += () if own.is_isolated else (f"the view {text!r} of a record depends on that record alone",)
        for low in range(0, len(inputs), _BATCH):
            batch = inputs[low : low + _BATCH]
            rows[low : low + _BATCH, number] = _in_type_of(batch, apply(batch.astype(np.float32)))
    return dataclasses.replace(
        dataset,
        inputs=rows.reshape(-1, *inputs.shape[1:]),
        views=len(applied),
        declared=tuple(dict.fromkeys(declared)),
    )


def _in_type_of(batch: np.ndarray, viewed: Any) -> np.ndarray:
    """A view of a batch in the batch's own type, bytes rounded to the nearest; refuses another shape."""
    rows = np.asarray(viewed)
    if rows.shape != batch.shape:
        raise ValueError(f"expected a view to keep the shape {batch.shape[1:]} of a record, got {rows.shape[1:]}")
    return np.clip(np.rint(rows), 0, 255) if batch.dtype == np.uint8 else rows


def _kind_of(text: str) -> str:
    """The kind of view that a text names: one of `KINDS`, or the module of the user's own."""
    return text.partition(":")[0]


def _parse_view_text(text: str) -> Sequence[View]:
    """The views that one text of a list names."""
    kind, separator, amount = text.partition(":")
    if kind not in KINDS:
        if not separator:
            _validate.known_name("view", kind, KINDS)
        loaded = _imports.import_named(
            text, what="view", kind="function of images, or a list of them", accept=_are_views
        )
        return loaded if isinstance(loaded, list | tuple) else (loaded,)
    if kind == "flip":
        if separator:
            raise ValueError(f"expected view 'flip' without an amount, got {text!r}")
        return (flip,)
    try:
        number = float(amount)
    except ValueError as error:
        raise ValueError(f"expected view '{kind}:AMOUNT' with a number, got {text!r}") from error
    _validate.positive(amount=number)
    if kind == "rotate":
        return rotate(number), rotate(-number)
    if kind == "zoom":
        return (zoom(number),)
    if number != int(number):
        raise ValueError(f"expected view 'shift:AMOUNT' by whole pixels, got {text!r}")
    by = int(number)
    return shift(by, 0), shift(-by, 0), shift(0, by), shift(0, -by)


def _are_views(value: object) -> TypeGuard[View | list[View] | tuple[View, ...]]:
    candidates = value if isinstance(value, list | tuple) else (value,)
    return len(candidates) > 0 and all(callable(view) for view in candidates)


def _shift_axis(images: jax.Array, places: int, *, axis: int) -> jax.Array:
    """Images in which place i of an axis shows what was at i + by; beyond the edge, the edge is repeated."""
    size = images.shape[axis]
    return jnp.take(images, np.clip(np.arange(size) + places, 0, size - 1), axis=axis)


def _offsets_from_centre(shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How far down and right of the centre each pixel is, (height, width)."""
    height, width = shape[1:3]
    down, right = np.meshgrid(np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2, indexing="ij")
    return down, right


def _read_bilinearly(images: jax.Array, down: np.ndarray, right: np.ndarray) -> jax.Array:
    """Images whose pixels are read elsewhere, bilinearly; beyond the edge, the edge is repeated.

    Arguments:
        down: for each pixel (height, width), how far below the centre it is read.
        right: how far to the right of it.
    """
    height, width = images.shape[1:3]
    row = np.clip(down + (height - 1) / 2, 0, height - 1)
    column = np.clip(right + (width - 1) / 2, 0, width - 1)
    top, left = np.floor(row).astype(np.int32), np.floor(column).astype(np.int32)
    bottom, far = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    shape = (height, width, *[1] * (images.ndim - 3))
    weight_bottom = jnp.asarray((row - top).astype(np.float32).reshape(shape))
    weight_far = jnp.asarray((column - left).astype(np.float32).reshape(shape))
    upper = (1 - weight_far) * images[:, top, left] + weight_far * images[:, top, far]
    lower = (1 - weight_far) * images[:, bottom, left] + weight_far * images[:, bottom, far]
    return (1 - weight_bottom) * upper + weight_bottom * lower
