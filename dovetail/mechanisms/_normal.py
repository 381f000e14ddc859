"""Standard normal noise with tails: as many random bits as they need.

`jax.random.normal` makes a float32 of 23 random bits, so that nothing beyond 5.4 standard deviations ever comes up and
a rounded Gaussian of large scale takes few values. Here a pair is r cos a and r sin a (Box and Muller 1958), where
r^2 / 2 = -log u has 64 random bits and the angle a has 32: floats near 0 and near 1 alike keep their precision. Large
draws are made page by page, so that words never leave the cache.

`NORMAL_CUT`, in standard deviations, is where this ends: u is at least 2^-65, so r is at most 9.49; a true pair is
farther out with probability 2^-65. Simulation only: floating-point noise is not for deployment.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dovetail._jax import jax, jnp, traced_once
from dovetail.mechanisms._words import by_page, page, pages_of

__all__ = ["NORMAL_CUT", "brief_normal", "normal", "pairs_from_words"]

NORMAL_CUT = math.sqrt(2 * 65 * math.log(2))  # no draw is farther out: 9.49
_SMALL = 2**12  # a smaller word, once in a million, needs more than eight further bits


def normal(key: jax.Array, shape: tuple[int, ...] = (), dtype: jax.typing.DTypeLike = np.float32) -> jax.Array:
    """Independent standard normal numbers of this shape, for a key of any kind.

    Guarantees:
        Normal up to the rounding of float32 and to NORMAL_CUT, beyond which a true pair lies with probability 2^-65.
        Finite, and never exactly 0.
    """
    return _drawn(key, shape, 3, lambda _, *words: pairs_from_words(*words)).astype(dtype)


def brief_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The same from little more than one word a number, for vectors of millions of them: angles have 24 bits.

    The others of the second word lengthen the first. Where that is too small for them to make a float32, a third word
    takes their place: pages without such pairs, almost all of them, do not draw it.

    Guarantees:
        Those of `normal`, with multiples of 2 pi / 2^24, off by half of one, as angles.
    """
    tails = jax.random.fold_in(key, 1)

    def pairs_of(i: jax.Array, high: jax.Array, mixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, small = (mixed << 24) | np.uint32(1 << 23), high < np.uint32(_SMALL)
        low = jax.lax.cond(jnp.any(small), lambda: jnp.where(small, page(tails, i, len(high)), low), lambda: low)
        return pairs_from_words(high, low, (mixed & ~np.uint32(255)) | np.uint32(128))

    return _drawn(key, shape, 2, pairs_of)


def _drawn(
    key: jax.Array, shape: tuple[int, ...], words: int, pairs_of: Callable[..., tuple[jax.Array, jax.Array]]
) -> jax.Array:
    """Numbers that come in pairs, each from so many words, page by page."""
    size = math.prod(shape)
    pages = pages_of(key, words * size // 2)
    pairs = 16 * math.ceil(
        size / (32 * pages)
    )  # words in whole vectors: an odd number takes CPUs fifteen times as long

    def draw(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pairs_of(i, *page(key, i, words * pairs).reshape(words, pairs))

    return by_page(draw, pages)[:size].reshape(shape)


@traced_once
def pairs_from_words(high: jax.Array, low: jax.Array, turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two independent standard normals for every three uniform 32-bit words."""
    reach, (across, along) = jnp.sqrt(2 * _exponential(high, low)), _on_circle(turn)
    return reach * across, reach * along


def _exponential(high: jax.Array, low: jax.Array) -> jax.Array:
    """-log u for u = (2^32 high + low + 1/2) / 2^64, with full relative precision at both ends.

    Above 1/2, where float32 cannot tell u from 1, it is -log(1 - v) for v = 1 - u, which the complements of the words
    give exactly: v / (1 - t) times -log t, with t the float next to 1 - v (Kahan's log1p).
    """
    upper = high >> 31 == 1
    flip = jnp.where(upper, np.uint32(2**32 - 1), np.uint32(0))
    small = ((low ^ flip).astype(jnp.float32) + 0.5) * 2.0**-64 + (high ^ flip).astype(jnp.float32) * 2.0**-32
    t = jnp.where(upper, 1 - small, small)
    gap = 1 - t
    log = -jnp.log(t)
    return jnp.where(upper, jnp.where(gap == 0, small, small * (log / jnp.where(gap == 0, 1, gap))), log)


def _on_circle(turn: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of a uniform angle: the upper two bits are quarter turns, the others up to an eighth either way.

    On [-pi / 4, pi / 4] polynomials are as good as float32 (those of Cephes, Moshier 1989).
    """
    middle = jax.lax.bitcast_convert_type(turn << 2, jnp.int32) >> 2  # of 30 bits, with a sign
    x = (middle.astype(jnp.float32) + 0.5) * np.float32(math.pi / 2**31)
    square = x * x
    sine = x + x * square * ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1)
    cosine = 1 + square * (
        ((2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2) * square - 0.5
    )
    swap, negative = (turn >> 30 & 1) == 1, turn >> 31 == 1
    one, other = jnp.where(swap, -sine, cosine), jnp.where(swap, cosine, sine)
    return jnp.where(negative, -one, one), jnp.where(negative, -other, other)
