"""Sets of coordinates as bits, and the passes over updates that find them.

An update is cut into up to 32 planes of equal length, its lanes: coordinate i is in lane i % lanes of plane i // lanes.
A set of coordinates is one word a lane, with bit j for plane j, so that marking whoever reaches a threshold is one
elementwise pass over the planes. XLA vectorises that pass; the same as a reduction it does not.
"""

from __future__ import annotations

import functools

from dovetail._jax import jax, jnp, lax

__all__ = ["PLANES", "before", "count", "magnitudes", "members", "num_lanes", "pick", "planes", "reaching", "total"]

PLANES = 32
_INFINITY = 0x7F800000


def magnitudes(x: jax.Array) -> jax.Array:
    """The bits of |x| as integers, which are ordered as |x| is; NaN counts as 0."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return jnp.where(bits > _INFINITY, 0, bits)


def num_lanes(dim: int) -> int:
    """The length of a plane, and the number of words of a set."""
    return -(-dim // PLANES)


def planes(xs: jax.Array) -> list[jax.Array]:
    """The magnitudes of xs, (clients, dim), in planes of shape (clients, lanes); the last is filled up with -1."""
    dim, lanes = xs.shape[1], num_lanes(xs.shape[1])
    *full, last = [magnitudes(xs[:, begin : begin + lanes]) for begin in range(0, dim, lanes)]
    return [*full, jnp.pad(last, ((0, 0), (0, lanes - last.shape[1])), constant_values=-1)]


def reaching(xs: jax.Array, threshold: jax.Array) -> jax.Array:
    """The coordinates whose magnitude reaches their client's threshold, (clients, lanes)."""
    bits = [
        jnp.where(plane >= threshold[:, None], jnp.uint32(2**j), jnp.uint32(0)) for j, plane in enumerate(planes(xs))
    ]
    return functools.reduce(jnp.bitwise_or, bits)


def before(cut: jax.Array, lanes: int) -> jax.Array:
    """The coordinates whose index is below their client's cut."""
    plane = lax.div(cut, jnp.int32(lanes))[:, None].astype(jnp.uint32)
    bit = jnp.where(plane < PLANES, jnp.left_shift(jnp.uint32(1), plane), jnp.uint32(0))
    lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    return (bit - 1) | jnp.where(lane < lax.rem(cut, jnp.int32(lanes))[:, None], bit, jnp.uint32(0))


def count(words: jax.Array) -> jax.Array:
    """The size of each client's set."""
    return jnp.sum(_ones(words), axis=1)


def total(rows: jax.Array) -> jax.Array:
    """The sum of each row, as int32; of an eighth of it at a time, for the sake of XLA's vectors."""
    eighth = rows.shape[1] // 8
    parts = [rows[:, i * eighth : (i + 1) * eighth].astype(jnp.int32) for i in range(8)]
    return jnp.sum(functools.reduce(jnp.add, parts), axis=1) + jnp.sum(rows[:, 8 * eighth :], axis=1, dtype=jnp.int32)


def members(words: jax.Array, slots: int) -> jax.Array:
    """The coordinates in each set, (clients, slots), lane by lane; what follows the last of them means nothing."""
    lanes = words.shape[1]
    ends = jnp.cumsum(_ones(words), axis=1)
    rank = lax.broadcasted_iota(jnp.int32, (1, slots), 1)
    # How many lanes end at or before this rank: by sixteenths at first, then by bisection. That is a loop, because XLA
    # computes `ends` again in every unrolled step.
    steps = max(0, lanes.bit_length() - 4)
    passed = [ends[:, lane - 1, None] <= rank for lane in range(2**steps, lanes + 1, 2**steps)]
    lane = functools.reduce(jnp.add, [step.astype(jnp.int32) for step in passed]) << steps

    def halve(step: jax.Array, lane: jax.Array) -> jax.Array:
        ahead = lane + jnp.left_shift(1, steps - 1 - step)
        passed = (ahead <= lanes) & (pick(ends, jnp.minimum(ahead, lanes) - 1) <= rank)
        return jnp.where(passed, ahead, lane)

    lane = jnp.minimum(lax.fori_loop(0, steps, halve, lane), lanes - 1)
    word = pick(words, lane)
    return _set_bit(word, rank - pick(ends, lane) + _ones(word)) * lanes + lane


def pick(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Entry index[i, j] of row i, for indices that are known to be valid."""
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def _ones(words: jax.Array) -> jax.Array:
    return lax.population_count(words).astype(jnp.int32)


def _set_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """The position of the set bit of this rank, counted from the lowest."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32(2**width - 1)
        higher = rank >= _ones(low)
        rank = jnp.where(higher, rank - _ones(low), rank)
        word = jnp.where(higher, word >> width, low)
        position = jnp.where(higher, position + width, position)
    return position
