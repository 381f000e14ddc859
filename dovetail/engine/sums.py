"""Sums over chunks of clients, in which no chunk is rounded to the size of the sum.

A float32 sum of many chunks loses the last digits of each, and which are lost depends on all chunks before it: one user
more or less then moves the sum by more than its own update (docs/proofs/float-sums.md). Here every sum is a pair, what
float32 holds of it and what was rounded off, by Knuth's two-sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["ChunkSums", "add", "begin", "finish"]


class ChunkSums(NamedTuple):
    """A tree of sums, and a tree like it of what was rounded off each (zero for integers, which are exact)."""

    sums: Any
    rest: Any


def begin(like: Any) -> ChunkSums:
    """Sums of nothing yet, zeros of the shapes and types of the leaves of `like`."""
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return ChunkSums(zero, zero)


def add(total: ChunkSums, part: Any) -> ChunkSums:
    """The total with one part more, a tree like its sums.

    Guarantees:
        The two numbers of a float sum add up to the exact one but for 2^-46 of the largest sum, for each part.
    """
    sums = jax.tree.map(jnp.add, total.sums, part)
    rest = jax.tree.map(_rounding_error, total.sums, part, sums, total.rest)
    return ChunkSums(sums, rest)


def finish(total: ChunkSums) -> Any:
    """The sums, each rounded once."""
    return jax.tree.map(jnp.add, total.sums, total.rest)


def _rounding_error(before: jax.Array, part: jax.Array, after: jax.Array, rest: jax.Array) -> jax.Array:
    """What has been rounded off one sum so far: `rest`, and what `after` = `before` + `part` lost (Knuth's two-sum)."""
    if not jnp.issubdtype(after.dtype, jnp.floating):
        return rest
    taken = after - before
    return rest + ((before - (after - taken)) + (part - taken))
