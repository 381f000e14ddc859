from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms import _words

ALPHA = 1e-4


def test_words_are_those_of_jax() -> None:
    keys = jax.random.split(jax.random.key(7), (3, 2))
    expected = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (1001,))))(keys)
    np.testing.assert_array_equal(jax.jit(_words.random_words, static_argnums=1)(keys, 1001), expected)
    stored = jax.jit(lambda key: _words.random_words(key, 1001, stored=True))(keys[0, 0])
    np.testing.assert_array_equal(stored, expected[0, 0])


def test_other_generators_serve_too() -> None:
    keys = jax.random.split(jax.random.key(7, impl="rbg"), 2)
    np.testing.assert_array_equal(_words.random_words(keys, 9), jax.vmap(lambda key: jax.random.bits(key, (9,)))(keys))


@pytest.mark.parametrize("prob", [0.0, 1e-6, 0.3, 0.5, 1.0])
def test_a_coin_comes_up_as_often_as_it_should(prob: float) -> None:
    words = jax.random.bits(jax.random.key(0), (1_000_000,))
    heads = int(_words.toss_coins(np.full(1_000_000, prob, np.float32), words).sum())
    assert stats.binomtest(heads, 1_000_000, prob).pvalue > ALPHA


def test_a_coin_is_never_rarer_than_asked() -> None:
    words = np.array([0, 1, 2**31, 2**31 + 1, 2**32 - 1], np.uint32)
    assert _words.toss_coins(np.float32(2.0**-33), words).tolist() == [True, False, False, False, False]
    assert _words.toss_coins(np.float32(0.5), words).tolist() == [True, True, False, False, False]
    assert _words.toss_coins(np.float32(1.0), words).all()
    assert not _words.toss_coins(np.float32(0.0), words).any()
