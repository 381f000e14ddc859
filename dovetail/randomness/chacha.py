"""JAX keys of 256 bits: ChaCha with 12 rounds (Bernstein 2008) as a keyed random function.

JAX's own keys have 64 bits, too few for noise that must stay secret. A word here is the first word of the ChaCha block
whose input is (counter, number, use, 0): words of a stream count in `counter`; a key folded with a number, or the
n-th of a split, is the stream of that number under a use of its own. Taking one word of a block's sixteen wastes most
of it, yet is faster: XLA makes one pass of it, and would compute sixteen words sixteen times.
"""

from __future__ import annotations

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

__all__ = ["IMPL", "KEY_WORDS", "NAME", "first_word", "words"]

NAME = "chacha12"
KEY_WORDS = 8
_ROUNDS = 12
_CONSTANTS = tuple(np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32))
_STREAM, _FOLD, _SPLIT = (np.uint32(use) for use in range(3))
_COLUMNS = tuple((i, 4 + i, 8 + i, 12 + i) for i in range(4))
_DIAGONALS = tuple((i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4))


def words(key: jax.Array, counter: jax.Array) -> jax.Array:
    """Words of the stream of a key, given as its eight words along the last axis; broadcasts against `counter`."""
    return first_word(key, counter, np.uint32(0), _STREAM)


def first_word(
    key: jax.Array, counter: jax.Array, number: jax.Array | np.uint32, use: np.uint32, *, rounds: int = _ROUNDS
) -> jax.Array:
    """The first word of the ChaCha block with this input.

    Guarantees:
        With 20 rounds that of ChaCha20 (RFC 8439), whose nonce is (number, use, 0).
    """
    state = [*_CONSTANTS, *(key[..., i] for i in range(KEY_WORDS)), counter, number, use, np.uint32(0)]
    for _ in range(rounds // 2):
        for places in (*_COLUMNS, *_DIAGONALS):
            mixed = _quarter_round(*(state[place] for place in places))
            for place, word in zip(places, mixed, strict=True):
                state[place] = word
    return state[0] + _CONSTANTS[0]


def _quarter_round(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
    for turn, back in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, turn)
        c = c + d
        b = _rotated(b ^ c, back)
    return a, b, c, d


def _rotated(x: jax.Array, by: int) -> jax.Array:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _seeded(seed: jax.Array) -> jax.Array:
    """A key with the entropy of a seed, for `jax.random.key`; runs take theirs from the operating system."""
    return jnp.zeros(KEY_WORDS, jnp.uint32).at[0].set(seed.astype(jnp.uint32))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    size = int(np.prod(shape, dtype=np.int64))
    if bit_width == 64:
        low, high = _random_bits(key, 32, (2, *shape)).astype(jnp.uint64)
        return (high << 32) | low
    drawn = words(key, jax.lax.iota(jnp.uint32, size)).reshape(shape)
    return drawn if bit_width == 32 else (drawn >> (32 - bit_width)).astype(f"uint{bit_width}")


def _fold_in(key: jax.Array, data: int) -> jax.Array:
    return first_word(key, jnp.arange(KEY_WORDS, dtype=jnp.uint32), jnp.asarray(data).astype(jnp.uint32), _FOLD)


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    numbers = jnp.arange(int(np.prod(shape, dtype=np.int64)), dtype=jnp.uint32).reshape(*shape, 1)
    return first_word(key, jnp.arange(KEY_WORDS, dtype=jnp.uint32), numbers, _SPLIT)


IMPL = jax.extend.random.define_prng_impl(
    key_shape=(KEY_WORDS,),
    seed=_seeded,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name=NAME,
    tag=NAME,
)
