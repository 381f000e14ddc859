"""The gradients of one parameter for each of some clients, as they are or as products, to be measured and added up.

A client with records k = 1..K has the gradient sum_k l_k r_k^T of a dense kernel. Its norm is that of the gradient as
it is formed, in blocks that are forgotten; what is added up is one product over the records of all clients. Records may
cancel, and then two roundings of one gradient may be further apart than it is long. With u the unit of float32, s the
factor of clipping and A = sum_k |l_k| |r_k|:

- alone, the gradient as it is formed is within A n u / (1 - n u) of the exact one with n = K, and what the client adds
  within s A n u / (1 - n u) of s times the exact one with n = K + 1. The `spread`, (2 K + 4) u A, covers both and its
  own rounding, and is added to the norm;
- among others, the client's parts may be added to different partial sums, whose other terms are then rounded as
  coarsely as numbers of size s A are. So a client whose records cancel to less than a sixteenth is left to the general
  way, and s A is at most 16 clip norms. (To shorten it here and not there would tell which way is gone, and so how many
  records the largest client has.)
- s r_k may be flushed to zero while what it cancels is not: an error of at most 2^-126 |l_k| per column. A client with
  |l_k| above 2^80 is left to the general way, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail.engine import linear
from dovetail.mechanisms.gaussian import clip_factor

__all__ = ["Formed", "Outer", "factor_of", "of_kernel", "where"]

_BLOCK = 1 << 20  # numbers of a gradient that are formed at a time
_UNIT = 2.0**-24  # half the distance of neighbouring float32 numbers, relative
_CANCELLED = 16.0  # how many times its own length a client's gradient may be the sum of
_LONGEST = 2.0**80


class Formed(NamedTuple):
    """The gradients of one parameter, first axis the client."""

    values: jax.Array

    def square(self, clip_norm: Any) -> jax.Array:
        """Their squared norms, in units of the clip norm."""
        return jnp.sum((self.values / clip_norm) ** 2, axis=tuple(range(1, self.values.ndim)))

    def reach(self, clip_norm: Any) -> Any:
        """Zero: nothing cancels in what is added up."""
        return 0.0

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        return jnp.sum(where(factor > 0, self.values * _beside(factor, self.values)), axis=0)


class Outer(NamedTuple):
    """The gradients sum_k left_k right_k^T of one kernel, from (clients, records, numbers)."""

    left: jax.Array
    right: jax.Array

    def square(self, clip_norm: Any) -> jax.Array:
        """Their squared norms, in units of the clip norm."""
        if self.left.shape[1] == 1:
            return self._lengths(clip_norm)[:, 0] ** 2
        return jax.lax.map(lambda one: _square(one[0], one[1], clip_norm), (self.left, self.right))

    def reach(self, clip_norm: Any) -> Any:
        """The sums of the norms of what may cancel, in units of the clip norm; infinite where products may be lost."""
        if self.left.shape[1] == 1:
            return 0.0
        short = jnp.max(jnp.abs(self.left), axis=(1, 2)) * math.sqrt(self.left.shape[2]) <= _LONGEST
        return jnp.where(short, jnp.sum(self._lengths(clip_norm), axis=1), jnp.inf)

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        left, right = self.left, self.right * _beside(factor, self.right)
        left, right = (where(factor > 0, side).reshape(-1, side.shape[-1]) for side in (left, right))
        return jnp.matmul(left.T, right, precision=jax.lax.Precision.HIGHEST)

    def _lengths(self, clip_norm: Any) -> jax.Array:
        """The norms of all products, in units of the clip norm."""
        left, right = (linear.lengths(side.reshape(-1, side.shape[-1])) for side in self)
        return (left * right / clip_norm).reshape(self.left.shape[:2])


def _square(left: jax.Array, right: jax.Array, clip_norm: Any) -> jax.Array:
    """The squared norm of left^T right over clip_norm, a few rows of it at a time."""
    records, rows = left.shape
    blocks = math.ceil(rows * right.shape[1] / _BLOCK)
    size = math.ceil(rows / blocks)
    cut = jnp.pad(left, [(0, 0), (0, blocks * size - rows)]).reshape(records, blocks, size).swapaxes(0, 1)

    def square(block: jax.Array) -> jax.Array:
        formed = jnp.matmul(block.T, right, precision=jax.lax.Precision.HIGHEST) / clip_norm
        return jnp.sum(jax.lax.optimization_barrier(jnp.sum(formed * formed, axis=1)))

    return jnp.sum(jax.lax.map(square, cut))


def of_kernel(left: jax.Array | None, slope: jax.Array, *, records: int) -> Formed | Outer:
    """A parameter's gradients from the inputs of its kernel (None: a bias) and the gradients of its outputs."""
    slope = slope.reshape(len(slope), -1, slope.shape[-1])
    if left is None:
        return Formed(slope.sum(axis=1))
    left = left.reshape(len(left), -1, left.shape[-1])
    return Outer(left, slope) if left.shape[1] == records else Formed(jnp.einsum("npi,npo->nio", left, slope))


def factor_of(
    gradients: Sequence[Formed | Outer], present: jax.Array, clip_norm: Any, *, records: Any = 1
) -> tuple[jax.Array, jax.Array]:
    """By how much each client's gradient shrinks, with so many records of its own, and whose is to be formed instead.

    It is 0 for clients that do not count, and for those to be formed: their records cancel to less than a sixteenth,
    or products of them are lost.
    """
    norm = jnp.sqrt(sum(gradient.square(clip_norm) for gradient in gradients))
    reach = sum(gradient.reach(clip_norm) for gradient in gradients)
    spread = (2 * records + 4) * _UNIT * reach
    kept = present & (reach / _CANCELLED <= norm + spread)
    return jnp.where(kept, clip_factor(norm + spread, 1.0), 0.0), present & ~kept


def _beside(factor: jax.Array, values: jax.Array) -> jax.Array:
    return factor.reshape(-1, *[1] * (values.ndim - 1))


def where(keep: jax.Array, values: jax.Array) -> jax.Array:
    """Each client's values, or zeros where it is not kept, whatever the values."""
    return jnp.where(_beside(keep, values), values, 0.0)
