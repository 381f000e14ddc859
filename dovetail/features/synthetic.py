"""Images that nobody owns, drawn from a fixed seed: pen strokes and dead leaves.

Strokes (like digits and letters): one to three random cubic Bezier curves, drawn with a round pen of random width and
soft edges, white on black. Dead leaves (like photographs: Lee, Mumford, Huang 2001): random soft ellipses over each
other, with a little 1/f texture; their colours are muted, as those of most things are. Image i depends on the seed, on
i and on nothing else: ask for more and the first ones stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate

__all__ = ["CHUNK", "KINDS", "Synthetic", "leaf_images", "stroke_images"]

KINDS = ("strokes", "leaves", "strokes+leaves")
CHUNK = 256  # images that one generator draws

_VERSION = 2  # part of the identity: raise it whenever the images change
_LEAVES = 40
_POINTS = 40
_TEXTURE = 0.03
_TINT = 0.15  # standard deviation of a leaf's colours about its grey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synthetic:
    """A number of synthetic images of one shape, (side, side) in grey or (side, side, 3) in colour, values in [0, 1].

    Guarantees:
        The same settings give the same images; fewer of them are the first of more.
    """

    kind: str
    shape: tuple[int, ...]
    count: int = 24_000
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.one_of(KINDS, kind=self.kind)
        _validate.integer(count=self.count, seed=self.seed)
        _validate.at_least(1, count=self.count)
        if len(self.shape) not in (2, 3) or self.shape[0] != self.shape[1] or self.shape[2:] not in ((), (1,), (3,)):
            raise ValueError(f"expected square images, grey or in three colours, got records of {self.shape}")
        if "strokes" in self.kind and self.shape[2:] == (3,):
            raise ValueError(f"strokes are grey: images in colour are of kind 'leaves', not {self.kind!r}")

    @property
    def identity(self) -> str:
        """What determines the images, for a cache."""
        return f"{self.kind} {_VERSION} {self.shape} {self.count} {self.seed}"

    def chunks(self) -> Iterator[np.ndarray]:
        """The images, float32, at most `CHUNK` at a time; of strokes and leaves, by turns."""
        kinds = self.kind.split("+")
        for number, start in enumerate(range(0, self.count, CHUNK)):
            rng = np.random.default_rng([self.seed, number])
            side = self.shape[0]
            if kinds[number % len(kinds)] == "strokes":
                images = stroke_images(rng, side=side)
            else:
                images = leaf_images(rng, side=side, colours=3 if self.shape[2:] == (3,) else 1)
            yield images[: self.count - start].reshape(-1, *self.shape)


def stroke_images(rng: np.random.Generator, *, side: int) -> np.ndarray:
    """`CHUNK` images of one to three strokes, (CHUNK, side, side), float32 in [0, 1]."""
    scale = side / 28  # lengths below are for images of 28 x 28
    corners = rng.uniform(4, 24, (CHUNK, 3, 4, 2)) * scale
    radius = rng.uniform(0.8, 1.8, (CHUNK, 3)) * scale
    there = np.arange(3) < rng.integers(1, 4, (CHUNK, 1))
    points = _curve_points(corners.astype(np.float32))
    return np.asarray(_draw_curves(points, radius.astype(np.float32), there, np.arange(side, dtype=np.float32)))


def leaf_images(rng: np.random.Generator, *, side: int, colours: int) -> np.ndarray:
    """`CHUNK` images of dead leaves, (CHUNK, side, side) or, with 3 colours, (CHUNK, side, side, 3); in [0, 1]."""
    size = (CHUNK, _LEAVES)
    centres = rng.uniform(0, side, (*size, 2))
    radii = 2 + 14 * rng.uniform(size=size)[..., None] ** 3 * rng.uniform(0.5, 1.0, (*size, 2))
    angles = rng.uniform(0, math.pi, size)
    paint = rng.uniform(0, 1, (*size, 1))
    if colours == 3:
        paint = np.clip(paint + _TINT * rng.standard_normal((*size, 3)), 0, 1)
    noise = rng.standard_normal((CHUNK, side, side, colours))
    images = _draw_leaves(*(x.astype(np.float32) for x in (centres, radii, angles, paint, noise)))
    return np.asarray(images if colours == 3 else images[..., 0])


@jax.jit
def _curve_points(corners: jax.Array) -> jax.Array:
    """Points on cubic Bezier curves, (..., points, 2), from their four control points, (..., 4, 2)."""
    t = jnp.linspace(0, 1, _POINTS)
    weights = jnp.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])
    return jnp.einsum("kp,...kd->...pd", weights, corners, precision=jax.lax.Precision.HIGHEST)


@jax.jit
def _draw_curves(points: jax.Array, radius: jax.Array, is_drawn: jax.Array, place: jax.Array) -> jax.Array:
    """Images of curves: full ink where a curve's nearest point is within the pen's radius, less up to a pixel further.

    Arguments:
        points: (images, curves, points, 2), rows and columns in pixels.
        radius: the pen of each curve, (images, curves).
        is_drawn: which curves an image has, (images, curves).
        place: the positions of pixels along an axis.
    """
    vertical = (points[..., 0, None] - place) ** 2  # (batch, curve, point, row)
    horizontal = (points[..., 1, None] - place) ** 2
    nearest = jnp.min(vertical[..., :, None] + horizontal[..., None, :], axis=2)
    ink = jnp.clip(radius[..., None, None] + 0.5 - jnp.sqrt(nearest), 0, 1)
    return jnp.max(jnp.where(is_drawn[..., None, None], ink, 0), axis=1)


@jax.jit
def _draw_leaves(
    centres: jax.Array, radii: jax.Array, angles: jax.Array, paint: jax.Array, noise: jax.Array
) -> jax.Array:
    """Images of leaves over each other, the later ones in front, with a little 1/f texture.

    Arguments:
        centres: (images, leaves, 2), in pixels.
        radii: the two radii of each ellipse, (images, leaves, 2).
        angles: (images, leaves), in radians.
        paint: the colours of each leaf, (images, leaves, colours).
        noise: white noise that the texture is made of, (images, side, side, colours).
    """
    batch, side, _, colours = noise.shape
    place = jnp.arange(side, dtype=jnp.float32)

    def lay(leaf: int, images: jax.Array) -> jax.Array:
        y = place[:, None] - centres[:, leaf, 0, None, None]
        x = place - centres[:, leaf, 1, None, None]
        cos, sin = jnp.cos(angles[:, leaf, None, None]), jnp.sin(angles[:, leaf, None, None])
        long, short = radii[:, leaf, 0, None, None], radii[:, leaf, 1, None, None]
        far = jnp.sqrt(((x * cos + y * sin) / long) ** 2 + ((y * cos - x * sin) / short) ** 2)
        cover = jnp.clip((1 - far) * jnp.minimum(long, short) + 0.5, 0, 1)[..., None]
        return images * (1 - cover) + cover * paint[:, leaf, None, None, :]

    images = jax.lax.fori_loop(0, _LEAVES, lay, jnp.full((batch, side, side, colours), 0.5))
    frequency = jnp.hypot(jnp.fft.fftfreq(side)[:, None], jnp.fft.rfftfreq(side))
    weight = jnp.where(frequency > 0, 1 / (side * jnp.where(frequency > 0, frequency, 1)), 0)[..., None]
    texture = jnp.fft.irfft2(jnp.fft.rfft2(noise, axes=(1, 2)) * weight, s=(side, side), axes=(1, 2))
    texture = texture / jnp.std(texture, axis=(1, 2, 3), keepdims=True)
    return jnp.clip(images + _TEXTURE * texture, 0, 1)
