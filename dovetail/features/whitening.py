"""Whitening on public images: few directions, equally strong, so that no round is spent on conditioning.

From the features of public or synthetic images come their mean and their r leading principal axes U with variances w:
z = (x - mean) U / sqrt(w + ridge w_1), scaled to unit norm. The axes are found by randomized subspace iteration (Halko,
Martinsson, Tropp 2011, Alg. 4.4) in float32: features are read in blocks, and the largest thing held is features x
(rank + a tenth), never a covariance.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate

__all__ = ["Axes", "normalize_rows", "principal_axes"]

_ITERATIONS = 2  # of the subspace
_LEAST_SPARE = 20  # dimensions of the subspace beyond the rank
_HIGH = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Axes:
    """Where features vary: their mean (features,), orthonormal directions (features, rank), and variances (rank,).

    Variances are falling.
    """

    mean: np.ndarray
    directions: np.ndarray
    variances: np.ndarray

    def whitening_function(self, ridge: float) -> Callable[[np.ndarray | jax.Array], jax.Array]:
        """The function from features (batch, features) to whitened ones (batch, rank) of unit norm."""
        _validate.non_negative(ridge=ridge)
        scale = np.sqrt(self.variances + ridge * self.variances[0])
        if not scale[-1] > 0:
            raise ValueError(f"expected features that vary in all directions, or else a ridge > 0, got ridge={ridge}")
        mean, matrix = jnp.asarray(self.mean), jnp.asarray(self.directions / scale)
        return lambda rows: _whiten_rows(rows, mean, matrix)


def principal_axes(blocks: Callable[[], Iterable[np.ndarray | jax.Array]], *, rank: int) -> Axes:
    """The leading `rank` principal axes of the rows of all blocks.

    Arguments:
        blocks: gives the blocks of rows, one after the other; it is called four times.

    Guarantees:
        Directions are orthonormal; each one's largest entry is positive.
        Variances are those of the rows along the directions.
    """
    _validate.integer(rank=rank)
    _validate.at_least(1, rank=rank)
    total, count = np.zeros(()), 0
    for block in blocks():
        total, count = total + np.asarray(jnp.sum(block, axis=0), np.float64), count + len(block)
    mean = (total / count).astype(np.float32)
    if rank > min(count - 1, len(mean)):
        raise ValueError(f"expected a rank below {min(count, len(mean) + 1)}, the images and features, got rank={rank}")
    width = min(len(mean), rank + max(_LEAST_SPARE, rank // 10))
    basis = jnp.asarray(np.random.default_rng(0).standard_normal((len(mean), width), dtype=np.float32))
    for _ in range(_ITERATIONS):
        image = jnp.zeros_like(basis)
        for block in blocks():
            image = _power_step(
                image, block, mean, basis
            ).block_until_ready()  # or blocks wait in memory for their turn
        basis = jnp.linalg.qr(image)[0]
    inner = np.zeros((width, width))
    for block in blocks():
        inner += np.asarray(_inner_products(block, mean, basis), dtype=np.float64)
    variances, rotation = np.linalg.eigh(inner / count)
    leading = np.argsort(variances)[::-1][:rank]
    directions = np.asarray(jnp.dot(basis, rotation[:, leading].astype(np.float32), precision=_HIGH))
    largest = directions[np.abs(directions).argmax(axis=0), np.arange(rank)]
    return Axes(
        mean=mean,
        directions=directions * np.where(largest < 0, np.float32(-1), np.float32(1)),
        variances=np.maximum(variances[leading], 0).astype(np.float32),
    )


@jax.jit
def normalize_rows(rows: jax.Array) -> jax.Array:
    """Rows (..., numbers) scaled to unit norm; a row of zeros stays zero."""
    norms = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / jnp.where(norms > 0, norms, 1.0)


@jax.jit
def _whiten_rows(rows: jax.Array, mean: jax.Array, matrix: jax.Array) -> jax.Array:
    """(rows - mean) @ matrix, scaled to unit norm."""
    return normalize_rows(jnp.dot(rows - mean, matrix, precision=_HIGH))


@functools.partial(jax.jit, donate_argnums=0)
def _power_step(image: jax.Array, block: jax.Array, mean: jax.Array, basis: jax.Array) -> jax.Array:
    """`image` plus C^T C basis, with C the rows of the block less the mean; the memory of `image` is used again."""
    centred = block - mean
    return image + jnp.dot(centred.T, jnp.dot(centred, basis, precision=_HIGH), precision=_HIGH)


@jax.jit
def _inner_products(block: jax.Array, mean: jax.Array, basis: jax.Array) -> jax.Array:
    """Sums over a block's rows, less the mean, of the products of their coordinates in the basis: (width, width)."""
    along = jnp.dot(block - mean, basis, precision=_HIGH)
    return jnp.dot(along.T, along, precision=_HIGH)
