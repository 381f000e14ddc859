"""JAX keys of 256 bits: ChaCha with 12 rounds (Bernstein 2008) as a keyed random function.

JAX's own keys have 64 bits, too few for noise that must stay secret. A ChaCha block's input is (counter, number, use,
0), and no two uses of a key share a block. A key folded with a number, or the n-th of a split, is the first half of
that number's block; `jax.random` reads whole blocks. So do large draws, a `stream_page` at a time: words that are
written before they are used. The stream of `stream_words` takes the first word of each block: that wastes most of it,
but XLA computes it where it is used, in one pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from dovetail._jax import jax, jnp, lax, trace_once

__all__ = ["BLOCK_WORDS", "KEY_WORDS", "NAME", "first_word", "key_implementation", "stream_page", "stream_words"]

NAME = "chacha12"
KEY_WORDS = 8
BLOCK_WORDS = 16
_ROUNDS = 12
_CONSTANTS = tuple(np.frombuffer(b"expand 32-byte k", "<u4").astype(np.uint32))
Word: TypeAlias = "jax.Array | np.uint32"
_STREAM, _FOLD, _SPLIT, _BLOCKS, _PAGES = (np.uint32(use) for use in range(5))
_COLUMNS = tuple((i, 4 + i, 8 + i, 12 + i) for i in range(4))
_DIAGONALS = tuple((i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4))


def stream_words(key: jax.Array, counter: jax.Array) -> jax.Array:
    """Words of the stream of a key, given as its eight words along the last axis; broadcasts against `counter`."""
    return first_word(key, counter, np.uint32(0), _STREAM)


def stream_page(key: jax.Array, page: Word, blocks: int, *, rounds: int = _ROUNDS) -> jax.Array:
    """A page: `blocks` whole blocks of a key, as one array, first the first words of all of them, then the second ones.

    Arguments:
        key: its eight words, uint32.
        page: of the page.
        blocks: how many blocks a page has.
        rounds: of the cipher; 12 but in tests.

    Guarantees:
        Pages of different numbers share no block.
        With 20 rounds the blocks are those of ChaCha20 (RFC 8439).
    """
    return _block(key, jax.lax.iota(jnp.uint32, blocks), page, _PAGES, rounds=rounds).ravel()


def first_word(key: jax.Array, counter: Word, number: Word, use: np.uint32, *, rounds: int = _ROUNDS) -> jax.Array:
    """The first word of the ChaCha block with this input.

    Guarantees:
        With 20 rounds that of ChaCha20 (RFC 8439), whose nonce is (number, use, 0).
    """
    return (
        _mix_rounds(*jnp.broadcast_arrays(*_initial_state(key, counter, number, use)), rounds=rounds)[0] + _CONSTANTS[0]
    )


def _initial_state(key: jax.Array, counter: Word, number: Word, use: np.uint32) -> tuple[Word, ...]:
    """The 16 words that go into a block: constants, key, counter, and a nonce of (number, use, 0)."""
    return (*_CONSTANTS, *(key[..., i] for i in range(KEY_WORDS)), counter, number, use, np.uint32(0))


@trace_once
def _mix_rounds(*state: jax.Array, rounds: int) -> tuple[jax.Array, ...]:
    """The 16 words of a state after all rounds, which are written out."""
    for _ in range(rounds // 2):
        state = _double_round(state)
    return state


def _double_round(state: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """One round on the columns of the state and one on its diagonals."""
    words = list(state)
    for places in (*_COLUMNS, *_DIAGONALS):
        mixed = _quarter_round(*(words[place] for place in places))
        for place, word in zip(places, mixed, strict=True):
            words[place] = word
    return tuple(words)


def _quarter_round(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
    """ChaCha's quarter round of four words.

    In `lax`: operators of arrays take five times as long to trace, and there are hundreds of them here.
    """
    for turn, back in ((16, 12), (8, 7)):
        a = lax.add(a, b)
        d = _rotate_left(lax.bitwise_xor(d, a), turn)
        c = lax.add(c, d)
        b = _rotate_left(lax.bitwise_xor(b, c), back)
    return a, b, c, d


def _rotate_left(words: jax.Array, bits: int) -> jax.Array:
    """Words with their bits rotated to the left; `bits` is from 1 to 31."""
    left, right = lax.shift_left(words, np.uint32(bits)), lax.shift_right_logical(words, np.uint32(32 - bits))
    return lax.bitwise_or(left, right)


def _seed_key(seed: jax.Array) -> jax.Array:
    """A key with the entropy of a seed, for `jax.random.key`; runs take theirs from the operating system."""
    return jnp.zeros(KEY_WORDS, jnp.uint32).at[0].set(seed.astype(jnp.uint32))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Random words of 8, 16, 32 or 64 bits, as `jax.random` asks for them; at most 2^32 words of 32 bits per key."""
    size = int(np.prod(shape, dtype=np.int64))
    if bit_width == 64:
        low, high = _random_bits(key, 32, (2, *shape)).astype(jnp.uint64)
        return (high << 32) | low
    if size > 2**32:
        raise ValueError(f"expected at most 2^32 random words per key, got {size}")
    counter = jax.lax.iota(jnp.uint32, -(-size // BLOCK_WORDS))
    words = _block(key, counter, jnp.uint32(0), _BLOCKS).ravel()[:size].reshape(shape)
    return words if bit_width == 32 else (words >> (32 - bit_width)).astype(f"uint{bit_width}")


def _block(key: jax.Array, counter: Word, number: Word, use: np.uint32, *, rounds: int = _ROUNDS) -> jax.Array:
    """The words of whole blocks, along a new first axis; the rounds are a loop, which compiles in no time.

    The rows of the state are arrays of their own, and diagonals are columns once rows are shifted.
    """
    return _blocks(*jnp.broadcast_arrays(*_initial_state(key, counter, number, use)), rounds=rounds)


@trace_once
def _blocks(*words: jax.Array, rounds: int) -> jax.Array:
    """The 16 words of whole blocks, along a new first axis, from the 16 words that go in."""
    start = tuple(jnp.stack(words[row : row + 4]) for row in range(0, BLOCK_WORDS, 4))

    def double_round(_: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """A round on the columns of the state, and one on its diagonals, which are columns once rows are shifted."""
        a, b, c, d = _quarter_round(*rows)
        a, b, c, d = _quarter_round(a, jnp.roll(b, -1, 0), jnp.roll(c, -2, 0), jnp.roll(d, -3, 0))
        return a, jnp.roll(b, 1, 0), jnp.roll(c, 2, 0), jnp.roll(d, 3, 0)

    rows = jax.lax.fori_loop(0, rounds // 2, double_round, start)
    return jnp.concatenate([after + before for after, before in zip(rows, start, strict=True)])


def _derive_key(key: jax.Array, number: jax.Array, use: np.uint32) -> jax.Array:
    """The first half of the block with this number and use as a key, along a new last axis."""
    return jnp.moveaxis(_block(key, jnp.uint32(0), number, use)[:KEY_WORDS], 0, -1)


def _fold_in(key: jax.Array, data: int) -> jax.Array:
    """The key that follows from a key and an integer, taken modulo 2^32, as `jax.random.fold_in` asks for it."""
    return _derive_key(key, jnp.asarray(data).astype(jnp.uint32), _FOLD)


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Keys in this shape that follow from a key, as `jax.random.split` asks for them."""
    numbers = jnp.arange(int(np.prod(shape, dtype=np.int64)), dtype=jnp.uint32).reshape(shape)
    return _derive_key(key, numbers, _SPLIT)


@functools.cache
def key_implementation() -> Any:
    """The implementation of `jax.random` for these keys, made once."""
    return jax.extend.random.define_prng_impl(
        key_shape=(KEY_WORDS,),
        seed=_seed_key,
        split=_split,
        random_bits=_random_bits,
        fold_in=_fold_in,
        name=NAME,
        tag=NAME,
    )
