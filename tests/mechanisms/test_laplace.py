from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms.laplace import LaplaceRandomizer, add_laplace, laplace_from_bits

ALPHA = 1e-4


def test_gamma_and_blanket_are_the_published_ones() -> None:
    blanket = LaplaceRandomizer(2.0, low=-1.0, high=3.0).blanket()
    assert blanket.gamma == pytest.approx(math.exp(-1.0))
    y = np.linspace(-9, 9, 31)
    np.testing.assert_allclose(blanket.log_density(y), stats.laplace(1.0, 2.0).logpdf(y))


def test_scale_is_right_and_near_misses_are_rejected() -> None:
    r = LaplaceRandomizer(0.5, low=-1.0, high=1.0)
    report = jax.jit(lambda x: r(x, key=jax.random.key(0)))(np.full(100_000, 0.25, np.float32))
    noise = np.asarray(report, np.float64) - 0.25

    def p_value(factor: float) -> float:
        return stats.kstest(noise, stats.laplace(0.0, factor * 4.0).cdf).pvalue

    assert p_value(1.0) > ALPHA
    assert p_value(2 / 3) < 1e-9
    assert p_value(3 / 2) < 1e-9


def test_no_word_gives_infinite_noise() -> None:
    words = jnp.array([0, 1, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF], jnp.uint32)
    noise = np.asarray(jax.jit(laplace_from_bits)(words))
    assert np.all(np.isfinite(noise))
    assert noise[0] == pytest.approx(-32 * math.log(2))
    np.testing.assert_array_equal(noise[3:], -noise[:3])


def test_personal_scales_broadcast() -> None:
    scales = np.array([[0.1], [10.0]], np.float32)
    draw = jax.jit(lambda x, scales: add_laplace(x, scales, key=jax.random.key(0)))
    report = np.asarray(draw(np.zeros((2, 50_000), np.float32), scales))
    np.testing.assert_allclose(np.abs(report).mean(axis=1), [0.1, 10.0], rtol=4 / math.sqrt(50_000))


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ((1.0, 1.0), "expected low < high, got low=1.0, high=1.0"),
        ((2.0, 1.0), "expected low < high, got low=2.0, high=1.0"),
        ((math.nan, 1.0), "expected low to be a finite number, got low=nan"),
        ((0.0, math.inf), "expected high to be a finite number, got high=inf"),
        ((-math.inf, 0.0), "expected low to be a finite number, got low=-inf"),
    ],
)
def test_bad_interval_is_refused(box: tuple[float, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LaplaceRandomizer(1.0, *box)
