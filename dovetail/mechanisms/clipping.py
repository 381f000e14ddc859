"""Scaling a vector down to a norm, by the factor alone: for sums of vectors that are never formed one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["clip_factor"]


def clip_factor(norm: jax.Array, clip_norm: float) -> jax.Array:
    """min(1, clip_norm / norm).

    Guarantees:
        norm * factor <= clip_norm up to rounding; a norm of zero gives 1, a norm of NaN or infinity gives 0.
    """
    inside = norm <= clip_norm
    factor = jnp.where(inside, 1.0, clip_norm / jnp.where(inside, 1.0, norm))
    return jnp.where(jnp.isfinite(norm), factor, 0.0)
