"""What was computed once: features as memory-mapped files, axes of a whitening, each named after all it depends on.

A file of the cache is complete or is not there; one that was damaged since is computed anew, and the log says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from dovetail.data.download import open_cache_file
from dovetail.features.whitening import Axes
from dovetail.files import make_folder

__all__ = ["cached_axes", "cached_rows", "digest", "log_progress", "spool"]

Rows = TypeVar("Rows", bound=np.ndarray | jax.Array)

_LOG = logging.getLogger("dovetail")
_BLOCK = 1 << 24  # bytes that are hashed at a time
_SECONDS = 10.0  # between two words about progress


def digest(*parts: str | np.ndarray | Iterable[np.ndarray]) -> str:
    """A name, 32 hexadecimal digits, for what depends on these texts, arrays, and arrays that come in chunks.

    The same array in other chunks has another name.
    """
    hasher = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            hasher.update(f"{len(part)} {part}".encode())
            continue
        for array in [part] if isinstance(part, np.ndarray) else part:
            hasher.update(f"{array.dtype.str}{array.shape}".encode())
            step = max(1, _BLOCK // max(1, array[:1].nbytes))
            for low in range(0, len(array), step):
                hasher.update(np.ascontiguousarray(array[low : low + step]).data)
    return hasher.hexdigest()[:32]


def cached_rows(
    folder: Path, name: str, shape: tuple[int, ...], compute: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """The float32 array of this name, memory-mapped.

    Arguments:
        folder: where the file is.
        shape: the shape of the array.
        compute: gives the array in chunks along its first axis; called if the file is not there whole.
    """
    path = folder / f"{name}.npy"
    if path.exists():
        mapped = _open_mapped(path, shape)
        if mapped is not None:
            return mapped
        _LOG.warning("refused the cached features %s: truncated or corrupt; they are computed anew", path)
    with open_cache_file(path) as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": shape})
        for chunk in log_progress(compute(), shape[0], "features"):
            stream.write(np.ascontiguousarray(chunk, dtype="<f4").data)
    computed = _open_mapped(path, shape)
    if computed is None:
        raise OSError(f"{path} was damaged while it was written: is the disk full?")
    return computed


def cached_axes(folder: Path, name: str, compute: Callable[[], Axes]) -> Axes:
    """The axes of this name, read from `folder`, or computed and written to it if they are not there whole."""
    path = folder / f"{name}.npz"
    if path.exists():
        try:
            with np.load(path) as arrays:
                return Axes(**{part: arrays[part] for part in ("mean", "directions", "variances")})
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
            _LOG.warning("refused the cached axes %s: truncated or corrupt; they are computed anew", path)
    computed = compute()
    with open_cache_file(path) as stream:
        np.savez(stream, mean=computed.mean, directions=computed.directions, variances=computed.variances)
    return computed


@contextlib.contextmanager
def spool(folder: Path, chunks: Iterable[np.ndarray | jax.Array]) -> Iterator[Callable[[], Iterator[np.ndarray]]]:
    """Keep chunks of rows in a file of `folder` that has no name and goes with the block.

    Inside the block a function gives the chunks, float32, from the first on, as often as it is called; only one of its
    iterators may be in use at a time.
    """
    make_folder(folder)
    with tempfile.TemporaryFile(dir=folder) as stream:
        shapes = []
        for chunk in chunks:
            shapes.append(chunk.shape)
            stream.write(np.ascontiguousarray(chunk, dtype=np.float32).data)

        def again() -> Iterator[np.ndarray]:
            stream.seek(0)
            for shape in shapes:
                yield np.frombuffer(stream.read(4 * int(np.prod(shape))), np.float32).reshape(shape)

        yield again


def log_progress(chunks: Iterable[Rows], total: int, what: str) -> Iterator[Rows]:
    """Pass the chunks on; every `_SECONDS` the log says how many of `total` rows of `what` are done."""
    start = logged = time.monotonic()
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk)
        now = time.monotonic()
        if now - logged > _SECONDS:
            logged = now
            _LOG.info("%s of %d of %d images, %.0f a second", what, done, total, done / (now - start))


def _open_mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The array in a file, memory-mapped; None if the file is damaged or holds another."""
    try:
        mapped = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return mapped if mapped.shape == shape and mapped.dtype == np.float32 else None
