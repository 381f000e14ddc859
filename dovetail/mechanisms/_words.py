"""Random words at the speed of the vector unit, and coins made of them.

`jax.random.bits` runs threefry's rounds as a loop over arrays on CPUs; written out they are one pass, five to ten times
as fast, and the words are the same (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"). Keys of
`randomness.chacha` are read in the same way, or by whole blocks, page by page: what a large draw needs at a time fits
the cache of a core.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dovetail._jax import jax, jnp, materialize, trace_once
from dovetail.randomness import chacha

__all__ = ["PAGE", "draw_by_page", "num_pages", "random_page", "random_words", "toss_coins"]

PAGE = 3 * 2**13  # words that fit the cache of a core, with what is made of them
_FEW = 2**10  # so few words are faster made one by one, from whole blocks though they are

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def random_words(keys: jax.Array, count: int, *, stored: bool = False) -> jax.Array:
    """`count` random words (uint32) for each key, along a new last axis.

    XLA computes the words where they are used. If that place is no plain loop over the words (a scatter, say, which
    flattens its indices), or there are many of them, it is faster to have them `stored` first: page by page.

    Guarantees:
        Up to 2^32 words per key; for JAX's own keys those of `jax.random.bits` of the same length.
        What is stored and what is not are different words, but for JAX's own keys.
    """
    impl = _generator_name(keys)
    if stored:
        words = jax.vmap(lambda key: _draw_pages(key, count))(keys.reshape(-1))
    elif impl not in _STREAMS:
        words = jax.vmap(lambda key: jax.random.bits(key, (count,)))(keys.reshape(-1))
    else:
        return _STREAMS[impl](jax.random.key_data(keys)[..., None, :], jax.lax.iota(jnp.uint32, count))
    return words.reshape(*keys.shape, count)


def random_page(key: jax.Array, page: jax.Array | int, count: int) -> jax.Array:
    """`count` random words (uint32) of the page with this number, written to memory before they are used.

    `count` is a multiple of 16, and the same for all pages of a key.

    Guarantees:
        Pages of one length share no word, up to 2^32 words per key.
    """
    impl = _generator_name(key)
    page = jnp.asarray(page, jnp.uint32)
    if impl not in _STREAMS:
        return jax.random.bits(jax.random.fold_in(key, page), (count,))
    data = jax.random.key_data(key)
    begin = page * np.uint32(count)
    if impl == chacha.NAME and count >= _FEW:
        return chacha.stream_page(data, page, count // chacha.BLOCK_WORDS)
    return materialize(lambda _: _STREAMS[impl](data, jax.lax.iota(jnp.uint32, count) + begin), (count,), jnp.uint32)


def _draw_pages(key: jax.Array, count: int) -> jax.Array:
    """`count` random words, page by page, with nothing recomputed where they are used."""
    if _generator_name(key) not in _STREAMS:
        return jax.random.bits(key, (count,))
    number = num_pages(key, count)
    size = 16 * math.ceil(count / (16 * number))
    return draw_by_page(lambda i: (random_page(key, i, size),), number)[:count]


def num_pages(key: jax.Array, count: int) -> int:
    """On how many pages so many words are: JAX's own keys, which are fast enough, have one."""
    return max(1, math.ceil(count / PAGE)) if _generator_name(key) == chacha.NAME else 1


def draw_by_page(draw: Callable[[jax.Array], tuple[jax.Array, ...]], number: int) -> jax.Array:
    """What is drawn on so many pages, arrays of one length and type on each: all of it, one after the other.

    A core has one page in its cache at a time, an accelerator takes all of them at once; the numbers are the same.
    """
    if number == 1 or jax.default_backend() != "cpu":
        return jnp.stack(jax.vmap(draw)(jnp.arange(number)), axis=1).ravel()

    def write(i: jax.Array, pages: jax.Array) -> jax.Array:
        """All pages with the arrays of page i written to their places."""
        for place, part in enumerate(draw(i)):
            pages = jax.lax.dynamic_update_slice(pages, part[None, None], (i, place, 0))
        return pages

    like = jax.eval_shape(draw, jnp.int32(0))
    empty = jnp.zeros((number, len(like), *like[0].shape), like[0].dtype)
    return jax.lax.fori_loop(0, number, write, empty).ravel()


def _generator_name(keys: jax.Array) -> str:
    """The name of the keys' generator."""
    return str(jax.random.key_impl(keys))


def _threefry_words(key: jax.Array, counter: jax.Array) -> jax.Array:
    """Words of JAX's own keys, the same as those of `jax.random.bits`; broadcasts keys against counters."""
    first, second = _threefry(key[..., 0], key[..., 1], jnp.zeros_like(counter), counter)
    return first ^ second


_STREAMS = {"threefry2x32": _threefry_words, chacha.NAME: chacha.stream_words}


@trace_once
def _threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both words of Threefry-2x32 with 20 rounds, for the key (key0, key1) and the counter (x0, x1), all uint32."""
    schedule = (key0, key1, key0 ^ key1 ^ _PARITY)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def toss_coins(prob: jax.Array, words: jax.Array) -> jax.Array:
    """True with this probability, rounded up to a multiple of 2^-32, and to 1 within 2^-24 of it; one word a coin.

    Privacy rests on the coin that comes up for a lie: rounded this way, it is never rarer than promised.
    """
    scaled = prob * 2.0**32
    top = 2.0**32 - 256
    return (words < jnp.ceil(jnp.minimum(scaled, top)).astype(jnp.uint32)) | (scaled > top)
