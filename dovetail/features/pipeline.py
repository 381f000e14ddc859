"""Which features, in plain data (`Features`), and the function from images to rows that computes them (`Pipeline`).

A pipeline is blocks of features side by side, mirrored if asked for, whitened if asked for. Blocks are those by name,
and those that a user brings.
"""

from __future__ import annotations

import dataclasses
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

from dovetail import _imports, _validate
from dovetail.data import resolve
from dovetail.data.own_code import PerRecord
from dovetail.features import cache, patches, synthetic
from dovetail.features.scatter import Scatter
from dovetail.features.synthetic import Synthetic
from dovetail.features.whitening import Axes, normalize_rows, principal_axes

__all__ = [
    "KINDS",
    "Block",
    "Features",
    "Pipeline",
    "Whitening",
    "as_floats",
    "blocks_of",
    "float_chunks",
]

_AXES_VERSION = 2  # part of the axes' name: raise it whenever their computation changes
_CHUNK_BYTES = 1 << 28  # of features before whitening that are held at a time
_MOST_ROWS = 1024  # of a chunk
_BATCH = 256  # records that a user's own function is given in a row, still one by one
_ONE = "one record at a time"  # in the name of what is cached: once it was batches


KINDS = ("none", "scatter", "patches", "scatter+patches")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)  # slots: or msgspec leaves out the defaults
class Whitening:
    """Whitening of features by directions and variances that are found on public images."""

    on: str = "synthetic"
    """Which images: `synthetic` (strokes; with patches strokes and leaves; in colour leaves), `strokes`, `leaves`,
    `strokes+leaves`, or the name of a task whose training images are thereby declared public."""
    rank: int = 600
    """Number of directions."""
    ridge: float = 0.01
    """Variances are raised by this times the largest."""
    images: int = 24_000
    """How many of the images are used, from the first."""

    def __post_init__(self) -> None:
        _validate.integer(rank=self.rank, images=self.images)
        _validate.at_least(1, rank=self.rank)
        _validate.at_least(2, images=self.images)
        _validate.non_negative(ridge=self.ridge)

    @property
    def task(self) -> str | None:
        """The task whose images it reads; None if they are synthetic."""
        return None if self.on in ("synthetic", *synthetic.KINDS) else self.on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """A fixed function of one record: its kind ("module:object" for one's own), and what is done with its values.

    `patches` are pairs (side of a patch, number of filters), by default those that `features.patches` lists for grey or
    colour. With `symmetric`, the features of a record and of its mirror image are added.
    """

    kind: str = "none"
    symmetric: bool = False
    patches: tuple[tuple[int, int], ...] | None = None
    whiten: Whitening | None = None

    def __post_init__(self) -> None:
        if ":" not in self.kind:
            _validate.known_name("features", self.kind, KINDS)
        if self.kind == "none" and (self.symmetric or self.whiten is not None):
            raise ValueError("features='none' cannot be symmetric or whitened: choose other features")
        if self.patches is not None and ("patches" not in self.kind.split("+") or not self.patches):
            raise ValueError(f"expected sides and filters with features of patches, got patches={self.patches!r}")

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement about a training on these features takes for granted."""
        lines = []
        if ":" in self.kind:
            lines.append(f"the features {self.kind!r} were made without the private data")
        if self.whiten is not None and self.whiten.task is not None:
            lines.append(f"the images of {self.whiten.task!r}, on which features were whitened, are public")
        return tuple(lines)


class Pipeline:
    """The function from float32 records of one shape to their features; what it needs for that is made on first use.

    Arguments:
        features: which features.
        shape: the shape of a record.
        folder: where axes of a whitening are cached.
    """

    def __init__(self, features: Features, shape: tuple[int, ...], folder: Path) -> None:
        if features.symmetric and len(shape) not in (2, 3):
            raise ValueError(f"expected images (height, width[, colours]) for symmetric, got records of {shape}")
        self._features = features
        self._shape = shape
        self._folder = folder
        self._blocks = blocks_of(features, shape)

    @functools.cached_property
    def identity(self) -> str:
        """What determines the features of a record, for a cache."""
        whiten = self._features.whiten
        return self._blocks_identity if whiten is None else f"{self._axes_name} ridge {whiten.ridge!r}"

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a record's features."""
        if not self._blocks:
            return self._shape
        whiten = self._features.whiten
        return (sum(block.size for block in self._blocks) if whiten is None else whiten.rank,)

    @property
    def declarations(self) -> tuple[str, ...]:
        """What only the author of a function of one's own knows: that it looks at one record; else empty."""
        return tuple(line for block in self._blocks for line in block.declarations)

    @property
    def chunk_size(self) -> int:
        """How many records to compute at a time, so that their features before whitening fit."""
        numbers = sum(block.size for block in self._blocks) or math.prod(self._shape)
        return max(1, min(_MOST_ROWS, _CHUNK_BYTES // (4 * numbers)))

    def apply(self, images: np.ndarray) -> np.ndarray:
        """The features of float32 images, a row for each."""
        if not self._blocks:
            return images
        rows = self._block_rows(images)
        return np.asarray(rows if self._features.whiten is None else self._compiled_whiten(rows))

    def _block_rows(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """The features before whitening: the blocks side by side, all of the same norm, rows of unit norm or less."""
        parts = [block.apply(images) for block in self._blocks]
        if self._features.symmetric:
            mirrored = np.ascontiguousarray(images[:, :, ::-1])
            parts = [normalize_rows(a + b.apply(mirrored)) for a, b in zip(parts, self._blocks, strict=True)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1) / np.float32(math.sqrt(len(parts)))

    @property
    def _blocks_identity(self) -> str:
        """What determines the features before whitening, for a cache."""
        return f"{[block.identity for block in self._blocks]} symmetric {self._features.symmetric}"

    @property
    def variances(self) -> np.ndarray:
        """The variances, (rank,) and falling, along the whitening's axes, of the images that it whitens on."""
        return self._whitening_axes.variances

    @functools.cached_property
    def _compiled_whiten(self) -> Callable[[np.ndarray | jax.Array], jax.Array]:
        return self._whitening_axes.whitening_function(self._whitening.ridge)

    @property
    def _whitening_axes(self) -> Axes:
        """The axes to whiten with, from the cache or computed."""
        return cache.cached_axes(self._folder, self._axes_name, self._compute_axes)

    @property
    def _whitening(self) -> Whitening:
        """The settings of the whitening; refuses features without one."""
        if self._features.whiten is None:
            raise ValueError("these features are not whitened: set whiten")
        return self._features.whiten

    def _compute_axes(self) -> Axes:
        """The principal axes of the features of the images to whiten on.

        These features are read several times: an accelerator with room holds them, otherwise they are spooled to a
        file.
        """
        source = self._whitening_images
        images = float_chunks(source, self.chunk_size) if isinstance(source, np.ndarray) else source.chunks()
        plain = cache.log_progress(
            (self._block_rows(chunk) for chunk in images), self._whitening.images, "whitening: features"
        )
        size = 4 * self._whitening.images * sum(block.size for block in self._blocks)
        if _accelerator_has_room(2 * size):  # the other half: the basis, and what is made of it
            blocks = list(plain)
            return principal_axes(lambda: iter(blocks), rank=self._whitening.rank)
        with cache.spool(self._folder, plain) as again:
            return principal_axes(again, rank=self._whitening.rank)

    @functools.cached_property
    def _axes_name(self) -> str:
        """The name of the axes in the cache, by all that they depend on."""
        source = self._whitening_images
        about = f"axes {_AXES_VERSION} {self._blocks_identity} rank {self._whitening.rank}"
        return cache.digest(about, source if isinstance(source, np.ndarray) else source.identity)

    @functools.cached_property
    def _whitening_images(self) -> Synthetic | np.ndarray:
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
            raise ValueError(
                f"whitening on {whiten.on!r} is for records of {images.shape[1:]}, and these are of {self._shape}"
            )
        return images


def _accelerator_has_room(size: int) -> bool:
    """Whether `size` bytes fit in what is left of an accelerator's memory; False on a CPU, without its own."""
    memory = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    return memory is not None and size < memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)


def float_chunks(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """All images as float32, `size` at a time."""
    for low in range(0, len(images), size):
        yield as_floats(images[low : low + size])


def as_floats(images: np.ndarray) -> np.ndarray:
    """Records as a model reads them: bytes as value / 255."""
    return images.astype(np.float32) / np.float32(255 if images.dtype == np.uint8 else 1)


class Block(Protocol):
    """A fixed function from float32 images to rows of features, each of unit norm or zero."""

    @property
    def identity(self) -> str:
        """What determines the features of an image, for a cache."""
        ...

    @property
    def size(self) -> int:
        """How many features there are."""
        ...

    @property
    def declarations(self) -> tuple[str, ...]:
        """What only the author of its code knows; empty for blocks of the package."""
        ...

    def apply(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """The features of float32 images, a row for each."""
        ...


def blocks_of(features: Features, shape: tuple[int, ...]) -> list[Block]:
    """The blocks of these features for records of a shape; none for "none"."""
    if ":" in features.kind:
        return [_OwnBlock(features.kind, shape)]
    kinds = features.kind.split("+")
    blocks: list[Block] = [Scatter(shape)] if "scatter" in kinds else []
    if "patches" in kinds:
        sizes = features.patches or (patches.COLOUR if shape[2:] == (3,) else patches.GREY)
        blocks += [patches.Patches(shape=shape, side=side, filters=filters) for side, filters in sizes]
    return blocks


class _OwnBlock:
    """A function "module:object" from images to features, or an object with `apply` and `identity`.

    Guarantees:
        It gets one image at a time, as a batch of one.
    """

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self._name = name
        self._loaded = _imports.import_named(
            name,
            what="function for features",
            kind="function from images to features, or an object with `apply` and `identity`",
            accept=_is_function,
        )
        self._function: Callable[[np.ndarray], Any] = getattr(self._loaded, "apply", self._loaded)
        self._shape = shape
        self._per_record = PerRecord(self._function, shape, name=name)

    @property
    def declarations(self) -> tuple[str, ...]:
        """That the function looks at one image at a time, unless JAX compiles it for one: then nothing."""
        if self._per_record.is_isolated:
            return ()
        return (f"the features {self._name!r} of a record depend on that record alone",)

    @functools.cached_property
    def identity(self) -> str:
        """What determines the features of an image, for a cache.

        That is the object's own `identity`, or else the content of the function's file and what it makes of two images
        of noise.
        """
        identity = getattr(self._loaded, "identity", None)
        if isinstance(identity, str):
            return f"{self._name} {_ONE} {identity}"
        file = inspect.getsourcefile(inspect.unwrap(self._function))
        code = hashlib.sha256(Path(file).read_bytes() if file else b"").hexdigest()
        return f"{self._name} {_ONE} {code} {cache.digest(self._probe_rows)}"

    @property
    def size(self) -> int:
        """How many features the function gives."""
        return self._probe_rows.shape[1]

    def apply(self, images: np.ndarray) -> np.ndarray:
        """The function's rows for these images, scaled to unit norm."""
        parts = [self._checked_rows(images[low : low + _BATCH]) for low in range(0, len(images), _BATCH)]
        return np.asarray(normalize_rows(np.concatenate(parts)))

    @functools.cached_property
    def _probe_rows(self) -> np.ndarray:
        """The function's rows for two images of noise."""
        return self._checked_rows(np.random.default_rng(0).random((2, *self._shape), dtype=np.float32))

    def _checked_rows(self, images: np.ndarray) -> np.ndarray:
        """What the function makes of these images; refuses what is not a row of finite numbers for each."""
        rows = np.asarray(self._per_record(images), dtype=np.float32)
        if rows.ndim != 2:
            raise ValueError(
                f"expected features of shape ({len(images)}, features) from {self._name!r}, got {rows.shape}"
            )
        if not np.isfinite(rows).all():
            broken = int(np.count_nonzero(~np.isfinite(rows).all(axis=1)))
            raise ValueError(f"the features {self._name!r} of {broken} of {len(rows)} records are not finite numbers")
        return rows


def _is_function(value: object) -> TypeGuard[Any]:
    """Whether this is a function, or an object with `apply` and a text `identity`."""
    if callable(getattr(value, "apply", None)):
        return isinstance(getattr(value, "identity", None), str)
    return callable(value)
