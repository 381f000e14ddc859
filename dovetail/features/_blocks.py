"""Blocks of features by name, and those that a user brings."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import jax
import numpy as np

from dovetail import _imports
from dovetail.data.own_code import PerRecord
from dovetail.features import _cache, patches
from dovetail.features._settings import Features
from dovetail.features.scatter import Scatter
from dovetail.features.whitening import unit_rows

__all__ = ["Block", "blocks_of"]

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
