from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.mechanisms.randomized_response import BinaryRandomizedResponse, RandomizedResponse, _toss_coins


def draw(r: RandomizedResponse, x: np.ndarray) -> jax.Array:
    return jax.jit(lambda x: r(x, key=jax.random.key(0)))(x)


def test_binary_is_the_textbook_coin() -> None:
    r = BinaryRandomizedResponse(0.5)
    p = math.exp(0.5) / (1 + math.exp(0.5))
    np.testing.assert_allclose(np.exp(r.log_density([0, 1], 1.0)), [1 - p, p])
    np.testing.assert_allclose(
        np.exp(r.log_density([0, 1], 0.25)), [0.25 * (1 - p) + 0.75 * p, 0.25 * p + 0.75 * (1 - p)]
    )
    assert r.blanket().gamma == pytest.approx(2 / (math.exp(0.5) + 1))
    np.testing.assert_allclose(r.blanket().log_density([0, 1]), math.log(0.5))


def test_binary_and_two_levels_have_one_law() -> None:
    binary, two = BinaryRandomizedResponse(0.7), RandomizedResponse(0.7, levels=2)
    x = np.linspace(0, 1, 11)
    for y in (0, 1):
        np.testing.assert_array_equal(binary.log_density(y, x), two.log_density(y, x))
    np.testing.assert_array_equal(binary.debiased_variance(x), two.debiased_variance(x))
    assert binary.blanket() == two.blanket()


def test_law_of_several_levels() -> None:
    r = RandomizedResponse(1.0, levels=5)
    gamma = 5 / (math.e + 4)
    assert r.gamma == pytest.approx(gamma)
    assert r.gamma + r.prob_truth == pytest.approx(1)
    law = np.exp(r.log_density(np.arange(5), 0.3))  # 0.3 lies at 1.2 levels: level 1 with .8, level 2 with .2
    np.testing.assert_allclose(law, gamma / 5 + (1 - gamma) * np.array([0, 0.8, 0.2, 0, 0]))
    assert np.all(r.log_density([-1, 5, 0.5, 1.2], 0.3) == -np.inf)


def test_reports_are_level_indices() -> None:
    report = np.asarray(draw(RandomizedResponse(1.0, levels=5), np.linspace(0, 1, 10_000, dtype=np.float32)))
    assert report.dtype == np.int32
    assert set(np.unique(report)) == set(range(5))


def test_rounding_alone_is_exact_at_the_levels() -> None:
    """At an eps where lies all but vanish the truth comes through, at both ends and between."""
    x = np.repeat(np.arange(5, dtype=np.float32) / 4, 2000)
    report = np.asarray(draw(RandomizedResponse(40.0, levels=5), x))
    np.testing.assert_array_equal(report, np.repeat(np.arange(5), 2000))


@pytest.mark.parametrize("prob", [0.0, 1e-12, 2.0**-32, 0.3, 1 - 2.0**-24, 1.0])
def test_the_simulated_coin_rounds_its_probability_up(prob: float) -> None:
    words = jnp.array([0, 1, int(0.3 * 2**32), 2**32 - 257, 2**32 - 1], jnp.uint32)
    single = float(np.float32(prob))
    threshold = 2**32 if single == 1 else math.ceil(single * 2**32)
    original = jax.random.bits
    try:
        jax.random.bits = lambda key, shape, dtype: words
        heads = np.asarray(_toss_coins(jnp.full(5, prob, jnp.float32), jax.random.key(0)))
    finally:
        jax.random.bits = original
    np.testing.assert_array_equal(heads, np.asarray(words, np.int64) < threshold)


@pytest.mark.parametrize("levels", [1, 0, -3, 2.0, 2.5, True, None, 2**25])
def test_bad_levels_are_refused(levels: object) -> None:
    with pytest.raises(ValueError, match="expected levels"):
        RandomizedResponse(1.0, levels=levels)
