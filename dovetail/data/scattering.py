"""A fixed scattering transform: features that need no training and no data (Bruna, Mallat 2013; Tramer, Boneh 2021).

An image of 28 x 28 is padded to 32 x 32 by reflection and met by Morlet wavelets psi of two scales and eight angles:
S0 = x * phi, S1 = |x * psi| * phi, S2 = ||x * psi_0| * psi_1| * phi, with a Gaussian low-pass phi, each kept at every
fourth pixel. The 1 + 16 + 64 = 81 channels of 8 x 8 are normalised in 27 groups of 3 within each image and scaled to
unit norm. Everything depends on the one image alone, so the transform costs no privacy.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Dataset
from dovetail.data.download import cache_folder, into_cache

__all__ = ["CONSTANT", "NUM_FEATURES", "features", "transform"]

CONSTANT = 0.3  # the constant feature of the linear model on top
NUM_FEATURES = 81 * 8 * 8

_VERSION = 1  # part of the cache's key: raise it whenever the transform's values change
_LOG = logging.getLogger("dovetail")
_IMAGE, _SIDE, _STRIDE = 28, 32, 4
_ANGLES, _GROUPS = 8, 27
_VARIANCE_FLOOR = 1e-5
_BATCH_CPU, _BATCH_ACCELERATOR = 16, 512  # on a CPU a batch should stay in the cache


def features(dataset: Dataset, *, cache: Path | None = None) -> Dataset:
    """The dataset with every image replaced by its features, float32 of shape (records, 5184).

    The features are memory-mapped from `cache` (default: the folder "scattering" in Dovetail's cache), and computed
    first if they are not there whole.
    """
    folder = cache_folder() / "scattering" if cache is None else cache
    images, test_images = _images(dataset.inputs), _images(dataset.test_inputs)
    return dataclasses.replace(dataset, inputs=_cached(images, folder), test_inputs=_cached(test_images, folder))


@jax.jit
def transform(images: jax.Array) -> jax.Array:
    """The features of float32 images (batch, 28, 28) with values in [0, 1].

    Guarantees:
        Rows have unit norm; that of a black image is zero.
        A row depends on its own image only.
    """
    psi, low_pass = _filters()
    margin = (_SIDE - _IMAGE) // 2
    x = jnp.pad(images, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")
    first = _moduli(x[:, None], psi)
    second = _moduli(first[:, :_ANGLES, None], psi[_ANGLES:])
    second = second.reshape(len(x), _ANGLES * _ANGLES, _SIDE, _SIDE)
    signals = jnp.concatenate([x[:, None], first, second], axis=1)
    smooth = jnp.einsum("ih,bchw,jw->bcij", low_pass, signals, low_pass, precision=jax.lax.Precision.HIGHEST)
    groups = smooth.reshape(len(x), _GROUPS, -1)
    centred = groups - groups.mean(axis=-1, keepdims=True)
    scaled = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + _VARIANCE_FLOOR)
    rows = scaled.reshape(len(x), NUM_FEATURES)
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / jnp.where(norms > 0, norms, 1.0)


def _moduli(signals: jax.Array, filters: np.ndarray) -> jax.Array:
    """|signal * filter|, circular; filters are given by their (real) Fourier transforms."""
    return jnp.abs(jnp.fft.ifft2(jnp.fft.fft2(signals) * filters))


@functools.cache
def _filters() -> tuple[np.ndarray, np.ndarray]:
    """Fourier transforms of the 16 wavelets, fine scale first, and phi at every fourth pixel as an (8, 32) matrix."""
    psi = []
    for j in range(2):
        sigma, frequency = 0.8 * 2**j, 3 * math.pi / 4 / 2**j
        for k in range(_ANGLES):
            wave = _gabor(sigma, frequency, angle=math.pi * k / _ANGLES)
            envelope = _gabor(sigma, 0.0, angle=math.pi * k / _ANGLES)
            psi.append(np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real)
    sigma = 0.8 * 2
    offsets = np.arange(-2 * _SIDE, 3 * _SIDE)
    bell = np.exp(-(offsets**2) / (2 * sigma**2)) / math.sqrt(2 * math.pi * sigma**2)
    bell = bell.reshape(5, _SIDE).sum(axis=0)
    low_pass = np.stack([np.roll(bell, _STRIDE * i) for i in range(_SIDE // _STRIDE)])
    return np.stack(psi).astype(np.float32), low_pass.astype(np.float32)


def _gabor(sigma: float, frequency: float, *, angle: float) -> np.ndarray:
    """A plane wave under a Gaussian, `sigma` wide along the wave and 1/slant times that across it, made periodic."""
    slant = 4 / _ANGLES
    offsets = np.arange(-2 * _SIDE, 3 * _SIDE)
    rows, columns = np.meshgrid(offsets, offsets, indexing="ij")
    along = rows * math.cos(angle) + columns * math.sin(angle)
    across = columns * math.cos(angle) - rows * math.sin(angle)
    wave = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    periodic = wave.reshape(5, _SIDE, 5, _SIDE).sum(axis=(0, 2))
    return periodic * slant / (2 * math.pi * sigma**2)


def _images(inputs: np.ndarray) -> np.ndarray:
    if inputs.shape[1:] not in {(_IMAGE, _IMAGE), (_IMAGE, _IMAGE, 1)}:
        raise ValueError(f"expected grey images of {_IMAGE} x {_IMAGE} for scatter, got records of {inputs.shape[1:]}")
    return inputs.reshape(len(inputs), _IMAGE, _IMAGE)


def _cached(images: np.ndarray, folder: Path) -> np.ndarray:
    """The features of all images, from the file that is named after them, or into it."""
    key = hashlib.sha256(f"{_VERSION} {images.shape} {images.dtype}".encode())
    key.update(np.ascontiguousarray(images).data)
    path = folder / f"{key.hexdigest()[:32]}.npy"
    if path.exists():
        found = _load(path, len(images))
        if found is not None:
            return found
        _LOG.warning("refused the cached features %s: truncated or corrupt; they are computed anew", path)
    with into_cache(path) as stream:
        _write(stream, images)
    computed = _load(path, len(images))
    if computed is None:
        raise OSError(f"expected to read back the features just written, got a damaged file: {path}")
    return computed


def _load(path: Path, num_records: int) -> np.ndarray | None:
    try:
        found = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (num_records, NUM_FEATURES) and found.dtype == np.float32 else None


def _write(stream: IO[bytes], images: np.ndarray) -> None:
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(images), NUM_FEATURES)}
    np.lib.format.write_array_header_1_0(stream, header)
    for batch in _computed(images):
        stream.write(batch.data)


def _computed(images: np.ndarray) -> Iterator[np.ndarray]:
    """Features, batch by batch; the last batch is padded to the common size, so that there is one compilation."""
    size = _BATCH_CPU if jax.default_backend() == "cpu" else _BATCH_ACCELERATOR
    scale = np.float32(255 if images.dtype == np.uint8 else 1)
    for start in range(0, len(images), size):
        batch = images[start : start + size].astype(np.float32) / scale
        padded = np.pad(batch, ((0, size - len(batch)), (0, 0), (0, 0)))
        yield np.ascontiguousarray(transform(padded)[: len(batch)], dtype="<f4")
