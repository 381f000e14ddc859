"""The gradients of one parameter for each of some clients, as they are or as products, to be measured and added up.

A client with records k = 1..K has the gradient sum_k l_k r_k^T of a dense kernel. What is measured is one rounding of
it, and what is added up, scaled by the factor s of its clipping, is another. With u the unit of float32 and A the sum
of |l_k| |r_k|, either is within A n u / (1 - n u) of the exact one, n = K for what is measured (each product of two
numbers takes part in at most K roundings) and K + 1 for what is added up, where r_k is multiplied by s. Where records
cancel, A may be far above the gradient's norm. So a client is clipped by the norm that was measured plus a bound on how
far the two are apart, the `spread`: what it adds is no longer than the clip norm, up to the rounding of that norm.
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


class Formed(NamedTuple):
    """The gradients of one parameter, first axis the client."""

    values: jax.Array

    def square(self, clip_norm: Any) -> jax.Array:
        """Their squared norms, in units of the clip norm."""
        return jnp.sum((self.values / clip_norm) ** 2, axis=tuple(range(1, self.values.ndim)))

    def spread(self, clip_norm: Any) -> Any:
        """None: what is measured is what is added up."""
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
            return self._reach(clip_norm) ** 2
        return jax.lax.map(lambda one: _square(one[0], one[1], clip_norm), (self.left, self.right))

    def spread(self, clip_norm: Any) -> Any:
        """A bound on how far two roundings of them are apart, in units of the clip norm."""
        records = self.left.shape[1]
        return (2 * records + 4) * _UNIT * self._reach(clip_norm) if records > 1 else 0.0

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        left, right = self.left, self.right * _beside(factor, self.right)
        left, right = (where(factor > 0, side).reshape(-1, side.shape[-1]) for side in (left, right))
        return jnp.matmul(left.T, right, precision=jax.lax.Precision.HIGHEST)

    def _reach(self, clip_norm: Any) -> jax.Array:
        """The sum of the products' norms."""
        left, right = (linear.lengths(side.reshape(-1, side.shape[-1])) for side in self)
        return jnp.sum((left * right / clip_norm).reshape(self.left.shape[:2]), axis=1)


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


def factor_of(gradients: Sequence[Formed | Outer], present: jax.Array, clip_norm: Any) -> jax.Array:
    """By how much each client's gradient shrinks; 0 for clients that do not count."""
    square = sum(gradient.square(clip_norm) for gradient in gradients)
    spread = sum(gradient.spread(clip_norm) for gradient in gradients)
    return jnp.where(present, clip_factor(jnp.sqrt(square) + spread, 1.0), 0.0)


def _beside(factor: jax.Array, values: jax.Array) -> jax.Array:
    return factor.reshape(-1, *[1] * (values.ndim - 1))


def where(keep: jax.Array, values: jax.Array) -> jax.Array:
    """Each client's values, or zeros where it is not kept, whatever the values."""
    return jnp.where(_beside(keep, values), values, 0.0)
