from __future__ import annotations

import decimal
import functools
import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from dovetail.mechanisms.laplace import ClipLaplace, draw_clip_laplace, invert_mean_report, mean_report
from dovetail.statements import NotApplicable

ALPHA = 1e-4
EPS = [0.05, 1.0, 4.0, 20.0]
BOUNDS = [1.0, 1.001, 1.5, 3.0]


@functools.partial(jax.jit, static_argnums=0)
def draw(r: ClipLaplace, x: jax.Array, key: jax.Array) -> jax.Array:
    return r(x, key=key)


def truncated(r: ClipLaplace, x: float) -> tuple:
    """pdf and cdf of the truncated Laplace law, from scipy: independent of our formulas."""
    law = stats.laplace(x, r.scale)
    low, high = law.cdf(-r.output_bound), law.cdf(r.output_bound)
    return lambda y: law.pdf(y) / (high - low), lambda y: (law.cdf(y) - low) / (high - low)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    eps=st.floats(0.01, 30), widening=st.floats(0, 5), x=st.floats(-1, 1), other=st.floats(-1, 1), y=st.floats(-1, 1)
)
def test_no_pair_of_inputs_exceeds_eps_for_any_bound(
    eps: float, widening: float, x: float, other: float, y: float
) -> None:
    r = ClipLaplace(eps, bound=1.0 + widening)
    report = y * r.output_bound
    assert r.log_density(report, x) - r.log_density(report, other) <= eps + 1e-12 * max(1, eps)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("eps", EPS)
def test_corners_reach_eps_for_any_bound(eps: float, bound: float) -> None:
    r = ClipLaplace(eps, bound=bound)
    assert r.log_density(bound, 1.0) - r.log_density(bound, -1.0) == pytest.approx(eps, abs=1e-9)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("eps", EPS)
def test_blanket_against_a_numeric_minimum(eps: float, bound: float) -> None:
    r, blanket = ClipLaplace(eps, bound=bound), ClipLaplace(eps, bound=bound).blanket()
    for y in np.linspace(-bound, bound, 9):
        found = optimize.minimize_scalar(lambda x, y=y: r.log_density(y, x), bounds=(-1, 1), method="bounded")
        numeric = min(found.fun, *r.log_density(y, np.linspace(-1, 1, 2001)))
        assert math.log(blanket.gamma) + blanket.log_density(y) == pytest.approx(numeric, abs=1e-9)


def test_gamma_at_the_tight_box_is_that_of_a_coin_at_half_eps() -> None:
    assert ClipLaplace(3.0).blanket().gamma == pytest.approx(2 / (1 + math.exp(1.5)), rel=1e-14)
    assert ClipLaplace(3.0, bound=50.0).blanket().gamma == pytest.approx(math.exp(-1.5), rel=1e-9)


@pytest.mark.parametrize("eps", EPS)
def test_density_is_the_truncated_laplace(eps: float) -> None:
    r = ClipLaplace(eps, low=-0.1, high=0.1, bound=0.17)
    for x in (-0.1, 0.03, 0.1):
        pdf, _ = truncated(r, x)
        y = np.linspace(-0.17, 0.17, 101)
        np.testing.assert_allclose(np.exp(r.log_density(y, x)), pdf(y), rtol=1e-9)
        assert np.all(r.log_density([-0.1701, 0.1701], x) == -np.inf)


@pytest.mark.parametrize("x", [-0.1, 0.03, 0.1])
@pytest.mark.parametrize("eps", EPS)
def test_sampler_against_scipy(eps: float, x: float) -> None:
    r = ClipLaplace(eps, low=-0.1, high=0.1)
    sample = np.asarray(draw(r, np.full(100_000, x, np.float32), jax.random.key(5)), np.float64)
    assert stats.kstest(sample, truncated(r, x)[1]).pvalue > ALPHA
    assert np.all(np.abs(sample) <= 0.1)


def test_an_extreme_eps_stays_inside_and_finite() -> None:
    for eps in (1e-6, 1e3, 1e6):
        r = ClipLaplace(eps, low=-0.1, high=0.1)  # float32(0.1) > 0.1
        x = np.array([-0.1, 0.0, 0.1] * 1000, np.float32)
        report = np.asarray(draw(r, x, jax.random.key(0)), np.float64)
        assert np.all(np.abs(report) <= 0.1)


# The mean and its inverse


def oracle_mean(x: float, eps: float, bound: float) -> float:
    """E[y | x] from the textbook formula with 60 digits, C = 1."""
    with decimal.localcontext(prec=60):
        scale = Decimal(2) / Decimal(eps)
        u, a = Decimal(x) / scale, Decimal(bound) / scale
        sinh, cosh = (u.exp() - (-u).exp()) / 2, (u.exp() + (-u).exp()) / 2
        return float(scale * (u * a.exp() - (1 + a) * sinh) / (a.exp() - cosh))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("eps", [1e-6, *EPS, 200.0])
def test_mean_is_stable(eps: float, bound: float) -> None:
    x = np.linspace(-1, 1, 41)
    exact = np.array([oracle_mean(v, eps, bound) for v in x])
    np.testing.assert_allclose(ClipLaplace(eps, bound=bound).mean(x), exact, rtol=1e-12, atol=1e-30)
    single = mean_report(jnp.asarray(x, jnp.float32), eps, 1.0, bound)
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, exact, rtol=3e-6, atol=1e-7 * exact.max())


def test_mean_at_the_corner_is_the_published_one() -> None:
    assert ClipLaplace(0.05).mean(1.0) == pytest.approx(0.0083, abs=1e-4)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("eps", EPS)
def test_debias_inverts_the_mean(eps: float, bound: float) -> None:
    r = ClipLaplace(eps, low=-0.1, high=0.1, bound=0.1 * bound)
    x = np.linspace(-0.1, 0.1, 2001)
    estimate = r.debias(r.mean(x))
    np.testing.assert_allclose(estimate, x, rtol=0, atol=1e-6 * 0.1)
    assert np.all(np.diff(estimate) > 0)
    single = np.asarray(r.debias(jnp.asarray(r.mean(x), jnp.float32)))
    np.testing.assert_allclose(single, x, rtol=0, atol=5e-4 * 0.1)
    assert np.all(np.diff(single) >= 0)


def test_debias_is_clamped_beyond_the_attainable_means() -> None:
    for bound in (1.0, 2.0):
        r = ClipLaplace(0.05, bound=bound)
        np.testing.assert_array_equal(r.debias(np.array([-5.0, -0.2, 0.0, 0.2, 5.0])), [-1, -1, 0, 1, 1])


def test_calibrate_solves_for_a_mixture_of_budgets() -> None:
    budgets = np.linspace(0.05, 8, 300)
    solve = jax.jit(lambda m, e: invert_mean_report(m, e, 0.1, 0.1))
    for g in (-0.1, -0.04, 0.0, 0.02, 0.0999):
        mean = mean_report(g, budgets, 0.1, 0.1).mean()
        assert invert_mean_report(mean, budgets, 0.1, 0.1) == pytest.approx(g, abs=1e-7)
        traced = solve(np.float32(mean), budgets.astype(np.float32))
        assert float(traced) == pytest.approx(g, abs=5e-5)


def test_calibrate_agrees_with_a_root_finder() -> None:
    budgets = np.array([0.3, 1.0, 7.0])
    root = optimize.brentq(lambda g: mean_report(g, budgets, 1.0, 1.0).mean() - 0.2, -1, 1, xtol=1e-13)
    assert invert_mean_report(0.2, budgets, 1.0, 1.0) == pytest.approx(root, abs=1e-7)


def test_perturb_takes_personal_budgets() -> None:
    budgets = np.array([[0.5], [6.0]], np.float32)
    draw = jax.jit(lambda x, budgets: draw_clip_laplace(x, budgets, 1.0, 1.0, key=jax.random.key(0)))
    sample = np.asarray(draw(np.full((2, 50_000), 0.5, np.float32), budgets), np.float64)
    for row, eps in zip(sample, (0.5, 6.0), strict=True):
        assert stats.kstest(row, truncated(ClipLaplace(eps), 0.5)[1]).pvalue > ALPHA


# What is refused


@pytest.mark.parametrize("box", [(0.0, 1.0), (-1.0, 2.0), (-1.0, 0.9999), (1.0, -1.0), (0.0, 0.0), (math.nan, 1.0)])
def test_any_box_but_a_symmetric_one_is_refused(box: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ClipLaplace(1.0, *box)


@pytest.mark.parametrize("bound", [0.99, -1.0, 0.0, math.inf, math.nan])
def test_a_bound_below_the_box_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="expected bound"):
        ClipLaplace(1.0, bound=bound)
    with pytest.raises(ValueError, match="expected bound"):
        draw_clip_laplace(0.0, 1.0, 1.0, bound, key=jax.random.key(0))


def test_the_asymmetric_box_really_breaks_the_bound() -> None:
    """Why it is refused: inputs in [0, 1], outputs in [-3, 3], scale 1 / eps: the log-ratio at y = 1 exceeds eps."""
    eps = 1.0
    low, high = (stats.laplace(x, 1 / eps) for x in (0.0, 1.0))
    log_mass = [math.log(law.cdf(3.0) - law.cdf(-3.0)) for law in (low, high)]
    assert high.logpdf(1.0) - log_mass[1] - (low.logpdf(1.0) - log_mass[0]) > eps + 0.02


def test_one_report_cannot_be_debiased() -> None:
    with pytest.raises(NotApplicable, match="report_variance"):
        ClipLaplace(1.0).debiased_variance(0.0)
