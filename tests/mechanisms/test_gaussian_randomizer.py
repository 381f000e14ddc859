from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms.gaussian import GaussianRandomizer, clip_l2
from dovetail.statements import NotApplicable

ALPHA = 1e-4


def test_it_is_no_pure_randomizer() -> None:
    r = GaussianRandomizer(std=2.0, clip_norm=1.5)
    assert r.eps_local == math.inf
    assert r.sensitivity == 3.0
    with pytest.raises(NotApplicable, match="no finite eps_local"):
        r.blanket()


def test_log_density_is_the_joint_one_of_the_clipped_vector() -> None:
    r = GaussianRandomizer(std=0.7, clip_norm=1.0)
    y = np.array([[0.1, -0.4, 2.0], [0.0, 0.0, 0.0]])
    expected = stats.multivariate_normal([0.6, 0.8, 0.0], 0.49 * np.eye(3)).logpdf(y)
    np.testing.assert_allclose(r.log_density(y, [3.0, 4.0, 0.0]), expected)


def test_scale_is_right_and_near_misses_are_rejected() -> None:
    r, x = GaussianRandomizer(std=0.7, clip_norm=1.0), np.array([0.3, -0.4], np.float32)
    report = jax.jit(lambda x: r(x, key=jax.random.key(0)))(np.tile(x, (50_000, 1)))
    noise = np.asarray(report - x, np.float64).ravel()
    assert stats.kstest(noise, stats.norm(0, 0.7).cdf).pvalue > ALPHA
    assert stats.kstest(noise, stats.norm(0, 0.7 * 2 / 3).cdf).pvalue < 1e-9
    assert stats.kstest(noise, stats.norm(0, 0.7 * 3 / 2).cdf).pvalue < 1e-9


def test_mean_and_variance() -> None:
    r = GaussianRandomizer(std=0.7, clip_norm=5.0)
    np.testing.assert_allclose(r.mean([6.0, 8.0]), [3.0, 4.0])
    np.testing.assert_allclose(r.debiased_variance(np.zeros((2, 3))), np.full((2, 3), 0.49))
    np.testing.assert_array_equal(r.debias(np.ones(3)), np.ones(3))


def clip_in_jax(x: np.ndarray, clip_norm: float) -> jax.Array:
    return jax.jit(clip_l2, static_argnums=1)(jnp.asarray(x), clip_norm)


@pytest.mark.parametrize("clip", [clip_l2, clip_in_jax])
def test_clip_l2(clip) -> None:
    x = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [1e-30, 0.0]], np.float32)
    np.testing.assert_allclose(clip(x, 1.0), [[0.6, 0.8], [0.3, 0.4], [0, 0], [1e-30, 0]], rtol=1e-6)
    tiny = np.array([3e-25, 4e-25], np.float32)
    np.testing.assert_allclose(clip(tiny, 1e-25), [0.6e-25, 0.8e-25], rtol=1e-6)


def test_clipped_norms_never_exceed_the_bound_beyond_rounding() -> None:
    x = np.random.default_rng(0).normal(size=(200, 1000)) * np.logspace(-3, 6, 200)[:, None]
    clipped = jax.jit(lambda x: clip_l2(x, 0.3))(x.astype(np.float32))
    norms = np.linalg.norm(np.asarray(clipped, np.float64), axis=-1)
    assert norms.max() <= 0.3 * (1 + 1e-6)


@pytest.mark.parametrize("clip", [clip_l2, clip_in_jax])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_vector_without_a_finite_norm_counts_as_zero(clip, bad: float) -> None:
    x = np.array([[1.0, bad], [0.1, 0.2]], np.float32)
    np.testing.assert_allclose(clip(x, 1.0), [[0, 0], [0.1, 0.2]], rtol=1e-6)


def test_gradient_at_zero_is_finite() -> None:
    gradient = jax.jit(jax.grad(lambda x: clip_l2(x, 1.0).sum()))
    np.testing.assert_array_equal(gradient(jnp.zeros(3)), np.ones(3))
    assert np.all(np.isfinite(gradient(jnp.array([3.0, 4.0, 0.0]))))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bad_parameters_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="expected std"):
        GaussianRandomizer(std=bad, clip_norm=1.0)
    with pytest.raises(ValueError, match="expected clip_norm"):
        GaussianRandomizer(std=1.0, clip_norm=bad)
