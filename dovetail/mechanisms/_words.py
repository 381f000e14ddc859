"""Random words at the speed of the vector unit, and coins made of them.

`jax.random.bits` runs threefry's rounds as a loop over arrays on CPUs; written out they are one pass, five to ten times
as fast, and the words are the same (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Keys of
`randomness.chacha` are read in the same way.
"""

from __future__ import annotations

import numpy as np

from dovetail._jax import jax, jnp
from dovetail.randomness import chacha

__all__ = ["bits", "coin"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def bits(keys: jax.Array, count: int, *, stored: bool = False) -> jax.Array:
    """`count` random words (uint32) for each key, along a new last axis.

    XLA computes the words where they are used. If that place is no plain loop over the words (a scatter, say, which
    flattens its indices), it is faster to have them `stored` first.

    Guarantees:
        Up to 2^32 words per key; for JAX's own keys those of `jax.random.bits` of the same length.
    """
    impl = str(jax.random.key_impl(keys))
    if impl not in _STREAMS:
        drawn = jax.vmap(lambda key: jax.random.bits(key, (count,)))(keys.reshape(-1))
        return drawn.reshape(*keys.shape, count)
    data = jax.random.key_data(keys)[..., None, :]

    def draw(begin: jax.Array | int) -> jax.Array:
        return _STREAMS[impl](data, jax.lax.iota(jnp.uint32, count) + jnp.uint32(begin))

    if not stored:
        return draw(0)
    # A loop of one turn, whose length the barrier hides from XLA: the one thing that it does not fuse.
    once = jax.lax.optimization_barrier(jnp.int32(1))
    return jax.lax.fori_loop(0, once, lambda i, _: draw(i), jnp.zeros((*keys.shape, count), jnp.uint32))


def _threefry_words(key: jax.Array, counter: jax.Array) -> jax.Array:
    first, second = _threefry(key[..., 0], key[..., 1], jnp.zeros_like(counter), counter)
    return first ^ second


_STREAMS = {"threefry2x32": _threefry_words, chacha.NAME: chacha.words}


def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds."""
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def coin(prob: jax.Array, words: jax.Array) -> jax.Array:
    """True with this probability, rounded up to a multiple of 2^-32 (and to 1 within 2^-24 of it).

    Privacy rests on the coin that comes up for a lie: rounded this way, it is never rarer than promised.
    """
    scaled = prob * 2.0**32
    top = 2.0**32 - 256
    return (words < jnp.ceil(jnp.minimum(scaled, top)).astype(jnp.uint32)) | (scaled > top)
