"""Normal noise: the law, its tails, and that both numbers of a pair may be used."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from scipy import stats

from dovetail.mechanisms import LAPLACE_CUT, NORMAL_CUT, gaussian, skellam
from dovetail.mechanisms.gaussian import _exponential_from_words, fast_normal, normal, normal_pairs_from_words
from dovetail.mechanisms.laplace import laplace_from_bits
from dovetail.randomness import chacha

ALPHA = 1e-4
COUNT = 1 << 20


def drawn(count: int = COUNT, seed: int = 0, impl: Any = None) -> np.ndarray:
    return np.asarray(jax.jit(normal, static_argnums=1)(jax.random.key(seed, impl=impl), (count,)), np.float64)


def words(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.uint32)


def exactly(high: np.ndarray, low: np.ndarray, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The map in long doubles, from its definition."""
    u = (high.astype(np.longdouble) * 2**32 + low + 0.5) / np.longdouble(2) ** 64
    middle = (turn.astype(np.int64) + 2**29 & 2**30 - 1) - 2**29
    angle = (turn >> 30) * np.longdouble(math.pi / 2) + (middle + 0.5) * np.longdouble(math.pi) / 2**31
    reach = np.sqrt(-2 * np.log1p(u - 1))
    return reach * np.cos(angle), reach * np.sin(angle)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", chacha.key_implementation()], ids=str)
def test_it_is_normal_and_nothing_close_to_it(impl: Any) -> None:
    """Kolmogorov-Smirnov at alpha 1e-4: accepts the truth, rejects a scale that is off by 2 % and a shift of .02."""
    z = drawn(200_000, impl=impl)
    assert stats.kstest(z, "norm").pvalue > ALPHA
    assert stats.kstest(z * 1.02, "norm").pvalue < ALPHA
    assert stats.kstest(z + 0.02, "norm").pvalue < ALPHA


def test_moments_are_the_normal_ones() -> None:
    """A million draws: each moment within 4.5 of its standard errors."""
    z = drawn()
    for power, value, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(np.mean(z**power) - value) < 4.5 * math.sqrt(variance / COUNT), power


def test_tails_are_as_thick_as_they_should_be() -> None:
    """Counts beyond 2 to 4.5 standard deviations, by exact binomial tests; a tail of 2 % more scale is noticed."""
    z = np.abs(drawn())
    for cut in (2.0, 3.0, 4.0, 4.5):
        assert stats.binomtest(int((z > cut).sum()), COUNT, 2 * stats.norm.sf(cut)).pvalue > ALPHA
    assert stats.binomtest(int((1.02 * z > 3).sum()), COUNT, 2 * stats.norm.sf(3)).pvalue < ALPHA


def test_the_two_numbers_of_a_pair_have_nothing_to_do_with_each_other() -> None:
    one, other = drawn().reshape(2, -1)
    near = 4.5 / math.sqrt(len(one))
    for f in (lambda x: x, np.abs, np.square, np.sign):
        assert abs(np.corrcoef(f(one), f(other))[0, 1]) < near
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < near
    quadrants = np.bincount(2 * (one > 0) + (other > 0))
    assert stats.chisquare(quadrants).pvalue > ALPHA
    assert stats.kstest(one[:200_000], other[:200_000]).pvalue > ALPHA


def test_the_map_is_accurate_for_any_words() -> None:
    rng = np.random.default_rng(0)
    high, low, turn = rng.integers(0, 2**32, (3, 200_000), dtype=np.uint32)
    high[:50_000] >>= rng.integers(0, 32, 50_000, dtype=np.uint32)  # far out
    high[50_000:100_000] = ~(high[50_000:100_000] >> rng.integers(0, 32, 50_000, dtype=np.uint32))  # near the middle
    found = jax.jit(normal_pairs_from_words)(high, low, turn)
    truth = exactly(high, low, turn)
    reach = np.hypot(*truth)
    for one, other in zip(found, truth, strict=True):
        assert np.max(np.abs(np.asarray(one, np.longdouble) - other) / reach) < 4e-7
        assert np.max(np.abs(np.asarray(one, np.longdouble) / other - 1)) < 1e-6


def test_extreme_words_reach_beyond_nine_standard_deviations_and_stay_numbers() -> None:
    top = 2**32 - 1
    high, low = words(0, 0, 0, top, top, 2**31 - 1, 2**31), words(0, 1, top, top, 0, top, 0)
    reach = np.sqrt(2 * np.asarray(_exponential_from_words(high, low), np.float64))
    assert reach[0] == pytest.approx(NORMAL_CUT, rel=1e-6)
    assert pytest.approx(9.4926, abs=1e-3) == NORMAL_CUT
    assert np.all(np.diff(reach[:3]) < 0)
    assert reach[3] == pytest.approx(math.sqrt(2.0**-64), rel=1e-6, abs=0)
    assert reach[4] == pytest.approx(math.sqrt(2.0**-31), rel=1e-6)
    np.testing.assert_allclose(reach[5:], math.sqrt(2 * math.log(2)), rtol=1e-6)
    for turn in (0, 1, 2**29 - 1, 2**29, 2**30, 2**31, 3 << 30, top):
        pairs = np.array(normal_pairs_from_words(high, low, jnp.full(high.shape, turn, jnp.uint32)))
        assert np.isfinite(pairs).all()
        assert (pairs != 0).all()
        np.testing.assert_allclose(np.hypot(*pairs), reach, rtol=1e-6)
    straight = normal_pairs_from_words(words(0), words(0), words(0))
    assert float(straight[0][0]) > 9


def test_one_word_a_number_is_normal_too() -> None:
    """Kolmogorov-Smirnov at alpha 1e-4; pages have nothing to do with each other."""
    z = np.asarray(
        jax.jit(fast_normal, static_argnums=1)(jax.random.key(5, impl=chacha.key_implementation()), (100_000,)),
        np.float64,
    )
    assert len(np.unique(np.float32(z))) > 99_500
    assert stats.kstest(z, "norm").pvalue > ALPHA
    assert stats.kstest(z * 1.03, "norm").pvalue < ALPHA
    pages = z[: len(z) // 10 * 10].reshape(10, -1)
    assert np.max(np.abs(np.corrcoef(pages) - np.eye(10))) < 5 / math.sqrt(pages.shape[1])


def test_where_one_word_is_too_small_a_third_one_makes_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of a page are given: the least first word comes with a fresh one, others with eight bits more."""
    high, mixed, fresh = (
        jnp.tile(words(*values), 4) for values in ((0, 4095, 4096, 2**31), (0, 7, 2**32 - 1, 255), (0, 5, 6, 7))
    )
    given = {2 * len(high): jnp.concatenate([high, mixed]), len(high): fresh}
    monkeypatch.setattr(gaussian, "random_page", lambda key, number, count: given[count])
    low = jnp.tile(words(0, 5, (255 << 24) + (1 << 23), (255 << 24) + (1 << 23)), 4)
    turn = jnp.tile(words(128, 128, 2**32 - 128, 128), 4)
    expected = np.concatenate(normal_pairs_from_words(high, low, turn))
    np.testing.assert_allclose(fast_normal(jax.random.key(0), (32,)), expected, rtol=1e-6)
    assert np.max(np.hypot(*np.split(expected, 2))) == pytest.approx(NORMAL_CUT, rel=1e-6)


@pytest.mark.parametrize("shape", [(), later((1,)), (7,), (3, 5), (0,), later((2,)), later((2, 0, 3)), later((33, 2))])
def test_any_shape_and_keys_in_batches(shape: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    draw = jax.jit(normal, static_argnums=1)
    each = [draw(key, shape) for key in keys]
    assert {(one.shape, one.dtype) for one in each} == {(shape, jnp.dtype(jnp.float32))}
    np.testing.assert_allclose(jax.vmap(lambda key: normal(key, shape))(keys), jnp.stack(each), rtol=1e-6)
    if math.prod(shape):
        assert len(np.unique(np.stack(each))) == 4 * math.prod(shape)


@pytest.mark.parametrize("variance", [pytest.param(2.5e11, marks=pytest.mark.soak), 1e6])
def test_rounded_noise_takes_as_many_values_as_a_rounded_gaussian(variance: float) -> None:
    """Of n draws, the number of distinct ones is the sum over integers of 1 - (1 - p)^n, give or take its deviation."""
    count, std = 1_000_000, math.sqrt(variance)
    noise = np.asarray(skellam.draw_skellam(variance, (count,), key=jax.random.key(1)))
    edges = np.arange(-int(6 * std), int(6 * std) + 1)
    prob = stats.norm.pdf(edges / std) / std
    seen = -np.expm1(count * np.log1p(-prob))
    assert abs(len(np.unique(noise)) - seen.sum()) < 4.5 * math.sqrt((seen * (1 - seen)).sum())
    assert stats.chisquare(np.bincount(noise % 8, minlength=8)).pvalue > ALPHA, "no residue is preferred"


def test_laplace_noise_ends_where_it_says() -> None:
    ends = np.asarray(laplace_from_bits(words(0, 2**31, 2**31 - 1, 2**32 - 1)))
    np.testing.assert_allclose(ends[:2], [-LAPLACE_CUT, LAPLACE_CUT], rtol=1e-6)
    assert pytest.approx(22.18, abs=0.01) == LAPLACE_CUT
    assert np.isfinite(ends).all()
