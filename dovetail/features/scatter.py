"""A fixed scattering transform: features that need no training and no data (Bruna, Mallat 2013; Tramer, Boneh 2021).

An image of 28 x 28 is padded to 32 x 32 by reflection, one of 32 x 32 is taken as it is; Morlet wavelets psi of two
scales and eight angles meet it: S0 = x * phi, S1 = |x * psi| * phi, S2 = ||x * psi_0| * psi_1| * phi, with a Gaussian
low-pass phi, each kept at every fourth pixel. Moduli of the coarse wavelets, psi_1, vary slowly and are taken at every
second pixel. That makes 1 + 16 + 64 = 81 channels of 8 x 8, of every colour. They are normalised in groups within each
image (grey: three channels a group; colour: the three colours of a channel) and scaled to unit norm. Everything depends
on the one image alone, so the transform costs no privacy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.features.batches import apply_in_batches, on_one_core

__all__ = ["Scatter", "scatter_transform"]

_VERSION = 2  # part of the identity: raise it whenever the transform's values change
_SIDES = (28, 32)
_SIDE = 32
_STRIDE = 4
_ANGLES = 8
_CHANNELS = 81
_GROUP = 3 * 8 * 8
_HALVES = (slice(0, 16), slice(16, 32))
_VARIANCE_FLOOR = 1e-5


@dataclasses.dataclass(frozen=True)
class Scatter:
    """The transform of images of one shape: (28 or 32, the same) in grey, with a last axis of 3 in colour."""

    shape: tuple[int, ...]
    declarations: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        side, *rest = self.shape
        if len(self.shape) not in (2, 3) or side not in _SIDES or rest not in ([side], [side, 1], [side, 3]):
            raise ValueError(
                "expected images of 28 x 28 or 32 x 32, grey or in three colours, for scatter, "
                f"got records of {self.shape}"
            )

    @property
    def identity(self) -> str:
        """What determines the features of an image, for a cache."""
        return f"scatter {_VERSION}"

    @property
    def size(self) -> int:
        """How many features there are."""
        return _CHANNELS * 8 * 8 * self._colours

    def apply(self, images: np.ndarray) -> np.ndarray | jax.Array:
        """The features of float32 images `(batch, *shape)` with values in [0, 1]."""
        flat = self.shape if self._colours == 3 else self.shape[:2]
        return apply_in_batches(
            scatter_transform,
            images.reshape(len(images), *flat),
            cpu_batch=4 if self._colours == 3 else 16,
            accelerator_batch=256,
        )

    @property
    def _colours(self) -> int:
        """How many colours images have: 1 or 3."""
        return 3 if self.shape[2:] == (3,) else 1


@on_one_core
def scatter_transform(images: jax.Array) -> jax.Array:
    """The features of float32 images, (batch, side, side) or (batch, side, side, 3), with values in [0, 1].

    Guarantees:
        Rows have unit norm; that of a black image is zero.
        A row depends on its own image only.
    """
    if images.ndim == 3:
        smooth = _scattering_channels(images)
    else:
        planes = jnp.moveaxis(images, -1, 1)
        smooth = _scattering_channels(planes.reshape(-1, *planes.shape[2:])).reshape(len(images), 3, _CHANNELS, -1)
        smooth = jnp.swapaxes(smooth, 1, 2)
    groups = smooth.reshape(len(images), -1, _GROUP)
    centred = groups - groups.mean(axis=-1, keepdims=True)
    scaled = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + _VARIANCE_FLOOR)
    rows = scaled.reshape(len(images), -1)
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / jnp.where(norms > 0, norms, 1.0)


def _scattering_channels(planes: jax.Array) -> jax.Array:
    """S0, S1 and S2 of grey images (batch, side, side): (batch, 81, 8, 8), in this order."""
    psi, low_pass, coarse_low_pass = _fourier_filters()
    margin = (_SIDE - planes.shape[1]) // 2
    x = jnp.pad(planes, ((0, 0), (margin, margin), (margin, margin)), mode="reflect")[:, None]
    spectrum = jnp.fft.fft2(x)
    fine = _modulus(jnp.fft.ifft2(_multiply_filters(spectrum, psi[:_ANGLES])))
    parents = jnp.concatenate([spectrum, jnp.fft.fft2(fine)], axis=1)[:, :, None]  # what psi_1 meets: x, |x * psi_0|
    coarse = _modulus(jnp.fft.ifft2(_at_every_second_pixel(parents, psi[_ANGLES:])))
    coarse = coarse.reshape(len(x), -1, *coarse.shape[-2:])
    return jnp.concatenate(
        [_smooth(jnp.concatenate([x, fine], axis=1), low_pass), _smooth(coarse, coarse_low_pass)], axis=1
    )


def _modulus(signals: jax.Array) -> jax.Array:
    """The modulus of complex signals, without XLA's guards against overflow, which images cannot cause."""
    return jnp.sqrt(signals.real**2 + signals.imag**2)


def _multiply_filters(spectra: jax.Array, filters: np.ndarray) -> jax.Array:
    """Complex spectra times real filters, which a complex product would compute with twice the work."""
    return jax.lax.complex(spectra.real * filters, spectra.imag * filters)


def _at_every_second_pixel(spectra: jax.Array, filters: np.ndarray) -> jax.Array:
    """The Fourier transforms of filtered signals at every second row and column: the mean over four quarters."""
    quarters = [(..., rows, columns) for rows in _HALVES for columns in _HALVES]
    first, *others = (_multiply_filters(spectra[quarter], filters[quarter] / 4) for quarter in quarters)
    return sum(others, first)


def _smooth(signals: jax.Array, low_pass: np.ndarray) -> jax.Array:
    """Signals (batch, channels, side, side) * phi at every fourth pixel of the image: (batch, channels, 8, 8)."""
    return jnp.einsum("ih,bchw,jw->bcij", low_pass, signals, low_pass, precision=jax.lax.Precision.HIGHEST)


@functools.cache
def _fourier_filters() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fourier transforms of the 16 wavelets, fine scale first, and phi at every fourth pixel as two matrices.

    The first, (8, 32), is for signals at every pixel; the second, (8, 16), for those at every second one. The arrays
    are cached: do not write to them.
    """
    psi = []
    for j in range(2):
        sigma = 0.8 * 2**j
        frequency = 3 * math.pi / 4 / 2**j
        for k in range(_ANGLES):
            wave = _gabor_wavelet(sigma, frequency, angle=math.pi * k / _ANGLES)
            envelope = _gabor_wavelet(sigma, 0.0, angle=math.pi * k / _ANGLES)
            psi.append(np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real)
    sigma = 0.8 * 2
    offsets = np.arange(-2 * _SIDE, 3 * _SIDE)
    bell = np.exp(-(offsets**2) / (2 * sigma**2)) / math.sqrt(2 * math.pi * sigma**2)
    bell = bell.reshape(5, _SIDE).sum(axis=0)
    low_pass = np.stack([np.roll(bell, _STRIDE * i) for i in range(_SIDE // _STRIDE)])
    return np.stack(psi).astype(np.float32), low_pass.astype(np.float32), (2 * low_pass[:, ::2]).astype(np.float32)


def _gabor_wavelet(sigma: float, frequency: float, *, angle: float) -> np.ndarray:
    """A plane wave under a Gaussian, `sigma` wide along the wave and 1/slant times that across it, made periodic."""
    slant = 4 / _ANGLES
    offsets = np.arange(-2 * _SIDE, 3 * _SIDE)
    rows, columns = np.meshgrid(offsets, offsets, indexing="ij")
    along = rows * math.cos(angle) + columns * math.sin(angle)
    across = columns * math.cos(angle) - rows * math.sin(angle)
    wave = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2) + 1j * frequency * along)
    periodic = wave.reshape(5, _SIDE, 5, _SIDE).sum(axis=(0, 2))
    return periodic * slant / (2 * math.pi * sigma**2)
