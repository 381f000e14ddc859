"""From images to rows: blocks side by side, mirrored, whitened.

Blocks of features by name, and those that a user brings.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _imports
from dovetail.data import resolve
from dovetail.data.own_code import PerRecord
from dovetail.features import _cache, patches
from dovetail.features._settings import Features, Whitening
from dovetail.features.scatter import Scatter
from dovetail.features.synthetic import Synthetic
from dovetail.features.whitening import Axes, principal_axes, unit_rows

__all__ = [
    "Block",
    "Pipeline",
    "as_floats",
    "blocks_of",
    "chunks",
]

_AXES_VERSION = 2  # part of the axes' name: raise it whenever their computation changes
_CHUNK_BYTES, _MOST_ROWS = 1 << 28, 1024


class Pipeline:
    """The function from float32 records of a shape to their features; what it needs for that is made on first use."""

    def __init__(self, features: Features, shape: tuple[int, ...], folder: Path) -> None:
        if features.symmetric and len(shape) not in (2, 3):
            raise ValueError(f"expected images (height, width[, colours]) for symmetric, got records of {shape}")
        self._features, self._shape, self._folder = features, shape, folder
        self._blocks = blocks_of(features, shape)

    @functools.cached_property
    def identity(self) -> str:
        """What determines its values, for a cache."""
        whiten = self._features.whiten
        return self._plain_identity if whiten is None else f"{self._axes_name} ridge {whiten.ridge!r}"

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a record's features."""
        if not self._blocks:
            return self._shape
        whiten = self._features.whiten
        return (sum(block.size for block in self._blocks) if whiten is None else whiten.rank,)

    @property
    def declared(self) -> tuple[str, ...]:
        """What only the author of a function of one's own knows."""
        return tuple(line for block in self._blocks for line in block.declared)

    @property
    def chunk(self) -> int:
        """How many records to compute at a time, so that their features before whitening fit."""
        numbers = sum(block.size for block in self._blocks) or math.prod(self._shape)
        return max(1, min(_MOST_ROWS, _CHUNK_BYTES // (4 * numbers)))

    def apply(self, images: np.ndarray) -> np.ndarray:
        """Rows of float32 images."""
        if not self._blocks:
            return images
        rows = self._plain(images)
        return np.asarray(rows if self._features.whiten is None else self._whiten(rows))

    def _plain(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """Before whitening: every block at the same weight."""
        parts = [block.apply(images) for block in self._blocks]
        if self._features.symmetric:
            mirrored = np.ascontiguousarray(images[:, :, ::-1])
            parts = [unit_rows(a + b.apply(mirrored)) for a, b in zip(parts, self._blocks, strict=True)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1) / np.float32(math.sqrt(len(parts)))

    @property
    def _plain_identity(self) -> str:
        return f"{[block.identity for block in self._blocks]} symmetric {self._features.symmetric}"

    @property
    def variances(self) -> np.ndarray:
        """Those of the images that it whitens on, along its axes; falling."""
        return self._found_axes.variances

    @functools.cached_property
    def _whiten(self) -> Callable[[np.ndarray | jax.Array], jax.Array]:
        return self._found_axes.whitening(self._whitening.ridge)

    @property
    def _found_axes(self) -> Axes:
        return _cache.axes(self._folder, self._axes_name, self._axes)

    @property
    def _whitening(self) -> Whitening:
        if self._features.whiten is None:
            raise ValueError("expected features that are whitened, got whiten=None")
        return self._features.whiten

    def _axes(self) -> Axes:
        source = self._source
        images = chunks(source, self.chunk) if isinstance(source, np.ndarray) else source.chunks()
        plain = _cache.told((self._plain(chunk) for chunk in images), self._whitening.images, "whitening: features")
        size = 4 * self._whitening.images * sum(block.size for block in self._blocks)
        if _accelerator_has_room(2 * size):  # the other half: the basis, and what is made of it
            held = list(plain)
            return principal_axes(lambda: iter(held), rank=self._whitening.rank)
        with _cache.spooled(self._folder, plain) as again:
            return principal_axes(again, rank=self._whitening.rank)

    @functools.cached_property
    def _axes_name(self) -> str:
        source = self._source
        about = f"axes {_AXES_VERSION} {self._plain_identity} rank {self._whitening.rank}"
        return _cache.digest(about, source if isinstance(source, np.ndarray) else source.identity)

    @functools.cached_property
    def _source(self) -> Synthetic | np.ndarray:
        """Images to whiten on: synthetic ones, or the first of a public task's."""
        whiten = self._whitening
        if whiten.task is None:
            kind = whiten.on
            if kind == "synthetic":
                patched = "patches" in self._features.kind.split("+")
                kind = "leaves" if self._shape[2:] == (3,) else "strokes+leaves" if patched else "strokes"
            return Synthetic(kind=kind, shape=self._shape, count=whiten.images)
        images = resolve(whiten.task).load(folder=None).inputs[: whiten.images]
        if images.shape[1:] != self._shape:
            raise ValueError(f"expected whitening on records of {self._shape}, got {whiten.on!r} of {images.shape[1:]}")
        return images


def _accelerator_has_room(size: int) -> bool:
    """Whether so many bytes fit in what is left of an accelerator's memory; a CPU has none of its own."""
    said = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    return said is not None and size < said.get("bytes_limit", 0) - said.get("bytes_in_use", 0)


def chunks(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """All images as float32, `size` at a time."""
    for low in range(0, len(images), size):
        yield as_floats(images[low : low + size])


def as_floats(images: np.ndarray) -> np.ndarray:
    """Records as a model reads them: bytes as value / 255."""
    return images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)


_BATCH = 256
_ONE = "one record at a time"  # in the name of what is cached: once it was batches


class Block(Protocol):
    """A fixed function from float32 images to rows of features, each of unit norm or zero."""

    @property
    def identity(self) -> str:
        """What determines its values."""
        ...

    @property
    def size(self) -> int:
        """How many features there are."""
        ...

    @property
    def declared(self) -> tuple[str, ...]:
        """What only the author of its code knows."""
        ...

    def apply(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """Rows, float32."""
        ...


def blocks_of(features: Features, shape: tuple[int, ...]) -> list[Block]:
    """The blocks of these features for records of a shape; none for "none"."""
    if ":" in features.kind:
        return [_Plugged(features.kind, shape)]
    kinds = features.kind.split("+")
    found: list[Block] = [Scatter(shape)] if "scatter" in kinds else []
    if "patches" in kinds:
        sizes = features.patches or (patches.COLOUR if shape[2:] == (3,) else patches.GREY)
        found += [patches.Patches(shape=shape, side=side, filters=filters) for side, filters in sizes]
    return found


class _Plugged:
    """A function "module:object" from images to features, or an object with `apply` and `identity`.

    Guarantees:
        It gets one image at a time, as a batch of one.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name = name
        self._found = _imports.load(
            name,
            what="function for features",
            kind="function from images to features, or an object with `apply` and `identity`",
            accept=_is_function,
        )
        self._function: Callable[[np.ndarray], Any] = getattr(self._found, "apply", self._found)
        self._shape, self._per_record = shape, PerRecord(self._function, shape, name=name)

    @property
    def declared(self) -> tuple[str, ...]:
        """That it looks at one image, unless it is compiled for one."""
        if self._per_record.isolated:
            return ()
        return (f"the features {self._name!r} of a record depend on that record alone",)

    @functools.cached_property
    def identity(self) -> str:
        """Its own, or else its module's file and what it makes of two images of noise."""
        given = getattr(self._found, "identity", None)
        if isinstance(given, str):
            return f"{self._name} {_ONE} {given}"
        file = inspect.getsourcefile(inspect.unwrap(self._function))
        code = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
        return f"{self._name} {_ONE} {code} {_cache.digest(self._probed)}"

    @property
    def size(self) -> int:
        """As many features as it gives."""
        return self._probed.shape[1]

    def apply(self, images: np.ndarray) -> np.ndarray:
        """Its rows, scaled to unit norm."""
        parts = [self._rows(images[low : low + _BATCH]) for low in range(0, len(images), _BATCH)]
        return np.asarray(unit_rows(np.concatenate(parts)))

    @functools.cached_property
    def _probed(self) -> np.ndarray:
        return self._rows(np.random.default_rng(0).random((2, *self._shape), dtype=np.float32))

    def _rows(self, images: np.ndarray) -> np.ndarray:
        rows = np.asarray(self._per_record(images), dtype=np.float32)
        if rows.ndim != 2:
            raise ValueError(
                f"expected features of shape ({len(images)}, features) from {self._name!r}, got {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise ValueError(f"expected finite features from {self._name!r}, got NaN or infinite values")
        return rows


def _is_function(found: object) -> TypeGuard[Any]:
    if callable(getattr(found, "apply", None)):
        return isinstance(getattr(found, "identity", None), str)
    return callable(found)
