from __future__ import annotations

import decimal
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms import deployed
from dovetail.mechanisms.deployed import DiscreteGaussian, DiscreteLaplace, ExactRandomizedResponse
from dovetail.mechanisms.exact import ExactSampler

ALPHA = 1e-4


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


# Randomized response


@pytest.mark.parametrize("levels", [2, 3, 5, 64])
@pytest.mark.parametrize("eps", [1e-6, 0.01, 0.1, 0.5, 1.0, math.pi, 10.0, 20.0, 100.0, 500.0])
def test_the_implemented_coin_is_on_the_safe_side(eps: float, levels: int) -> None:
    r = ExactRandomizedResponse(eps, levels)
    with decimal.localcontext(prec=400):
        exact = (Decimal(r.likelihood_ratio.numerator) / Decimal(r.likelihood_ratio.denominator)).ln()
        assert exact <= Decimal(eps)
        assert Decimal(eps) - exact < Decimal("1e-12")
        assert exact <= Decimal(r.eps_implemented)
    assert eps - 1e-12 <= r.eps_implemented <= eps
    assert r.prob_truth.denominator & (r.prob_truth.denominator - 1) == 0  # dyadic


def test_the_ratio_is_that_of_the_law() -> None:
    r = ExactRandomizedResponse(1.5, 4)
    lie = (1 - r.prob_truth) / 4
    assert r.likelihood_ratio == (r.prob_truth + lie) / lie
    assert float(r.prob_truth) == pytest.approx(r.law.prob_truth, rel=1e-15)


@pytest.mark.parametrize("x", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("levels", [2, 5])
def test_reports_follow_the_law(levels: int, x: float) -> None:
    r = ExactRandomizedResponse(1.0, levels)
    report = r(np.full(100_000, x), sampler=seeded())
    counts = np.bincount(report, minlength=levels)

    def p_value(law) -> float:
        return stats.chisquare(counts, 100_000 * np.exp(law.log_density(np.arange(levels), x))).pvalue

    assert report.dtype == np.int64
    assert p_value(r.law) > ALPHA
    if x != 0.3:
        assert p_value(ExactRandomizedResponse(1.1, levels).law) < 1e-9


def test_shapes_and_wild_inputs() -> None:
    r = ExactRandomizedResponse(30.0, 3)
    report = r([[np.nan, np.inf, -np.inf], [0.5, 2.0, -1.0]], sampler=seeded())
    np.testing.assert_array_equal(report, [[1, 2, 0], [1, 2, 0]])
    assert r(0.5, sampler=seeded()).shape == ()
    assert r(np.zeros((0, 3)), sampler=seeded()).shape == (0, 3)


def test_a_hundred_thousand_responses_on_one_half_are_fair() -> None:
    ones = int(ExactRandomizedResponse(1.0)(np.full(100_000, 0.5), sampler=seeded()).sum())
    assert stats.binomtest(ones, 100_000, 0.5).pvalue > ALPHA
    assert stats.binomtest(ones, 100_000, 0.49).pvalue < ALPHA


# Discrete Laplace


def test_laplace_sensitivity_counts_the_rounding() -> None:
    assert DiscreteLaplace(1.0, Fraction(1, 10), 0.0, 1.0).sensitivity == 10
    assert DiscreteLaplace(1.0, Fraction(3, 10), 0.0, 1.0).sensitivity == 4
    assert DiscreteLaplace(1.0, Fraction(3, 10), -1.0, 1.0).sensitivity == 8
    assert DiscreteLaplace(0.25, Fraction(1, 10), 0.0, 1.0).scale == 40


@pytest.mark.parametrize("spacing", [Fraction(1, 8), Fraction(3, 10)])
@pytest.mark.parametrize("eps", [0.1, 2.0])
def test_laplace_log_ratio_is_never_above_eps(eps: float, spacing: Fraction) -> None:
    r = DiscreteLaplace(eps, spacing, -1.0, 1.0)
    y = np.arange(-60, 61)
    table = r.log_density(y[:, None], np.linspace(-1, 1, 81))
    largest = np.max(table.max(axis=1) - table.min(axis=1))
    assert largest <= eps + 1e-12
    if spacing == Fraction(1, 8):
        assert largest == pytest.approx(eps, abs=1e-9)
    wide = np.arange(-5000, 5001)
    np.testing.assert_allclose(np.exp(r.log_density(wide[:, None], [-1.0, 0.03, 1.0])).sum(axis=0), 1, rtol=1e-9)


def test_laplace_reports_follow_the_law() -> None:
    r = DiscreteLaplace(1.5, Fraction(1, 4))
    x, size = 0.4, 20_000
    report = r(np.full(size, x), sampler=seeded(3))
    y = np.arange(-12, 16)

    def p_value(law: DiscreteLaplace) -> float:
        expected = size * np.exp(law.log_density(y, x))
        observed = np.array([np.count_nonzero(report == k) for k in y])
        rest = size - expected.sum(), size - observed.sum()
        return stats.chisquare(np.append(observed, rest[1]), np.append(expected, rest[0])).pvalue

    assert report.dtype == np.int64
    assert p_value(r) > ALPHA
    assert p_value(DiscreteLaplace(1.5 * 1.15, Fraction(1, 4))) < 1e-6
    z = (r.debias(report.mean()) - x) / math.sqrt(r.debiased_variance(x) / size)
    assert abs(z) < stats.norm.isf(ALPHA / 2)
    assert np.var(report * 0.25) == pytest.approx(float(r.debiased_variance(x)), rel=0.08)


def test_laplace_variance_is_that_of_its_law() -> None:
    r = DiscreteLaplace(2.0, Fraction(1, 3), -1.0, 2.0)
    y = np.arange(-400, 401)
    for x in (-1.0, 0.11, 1.9):
        law = np.exp(r.log_density(y, x))
        mean = np.sum(law * y)
        assert r.debias(mean) == pytest.approx(x, abs=1e-12)
        assert r.debiased_variance(x) == pytest.approx(np.sum(law * (y - mean) ** 2) / 9, rel=1e-9)


def test_laplace_clamps_wild_inputs() -> None:
    r = DiscreteLaplace(500.0, Fraction(1, 2), -1.0, 2.0)
    np.testing.assert_array_equal(r([np.nan, np.inf, -1e300], sampler=seeded()), [1, 4, -2])


# Discrete Gaussian


def test_gaussian_sensitivity_counts_the_rounding() -> None:
    r = DiscreteGaussian(std=2.0, clip_norm=1.0, dim=100, spacing=Fraction(1, 1000))
    assert r.norm_bound >= 1000 + 10
    assert float(r.norm_bound) == pytest.approx(1010, rel=1e-9)
    assert r.sensitivity == pytest.approx(2.02, rel=1e-9)
    assert r.rho == pytest.approx(2.02**2 / (2 * 2.0**2), rel=1e-9)
    assert Fraction(r.rho) >= (2 * r.norm_bound) ** 2 / (2 * r.sigma_squared)


def test_gaussian_reports_follow_the_law() -> None:
    r = DiscreteGaussian(std=0.75, clip_norm=4.0, dim=2, spacing=Fraction(1, 2))
    report = r(np.tile([1.0, -1.5], (8000, 1)), sampler=seeded(5))
    assert report.dtype == np.int64
    assert report.shape == (8000, 2)
    noise = (report - np.array([2, -3])).ravel()
    z = np.arange(-4, 5)

    def p_value(variance: float) -> float:
        law = np.exp(-(z**2) / (2 * variance)) / np.exp(-(np.arange(-60, 61) ** 2) / (2 * variance)).sum()
        observed = np.array([np.count_nonzero(noise == k) for k in z])
        pooled = np.append(observed, noise.size - observed.sum())
        return stats.chisquare(pooled, noise.size * np.append(law, 1 - law.sum())).pvalue

    assert p_value(2.25) > ALPHA
    assert p_value(2.25 * 1.2) < 1e-6
    np.testing.assert_allclose(r.debias(report.mean(axis=0)), [1.0, -1.5], atol=4 * 0.75 / math.sqrt(8000))


def test_gaussian_rounding_is_unbiased_and_within_the_bound() -> None:
    r = DiscreteGaussian(
        std=1e-3, clip_norm=1.0, dim=50, spacing=Fraction(1, 16)
    )  # noise below the grid: rounding only
    x = np.random.default_rng(0).normal(size=(300, 50))
    report = r(x, sampler=seeded())
    assert max(int(row @ row) for row in report) <= r.norm_bound**2
    clipped = x / np.linalg.norm(x, axis=1, keepdims=True)
    assert np.abs(r.debias(report) - clipped).max() <= 1 / 16
    assert np.abs((r.debias(report) - clipped).mean()) < 4 * (0.5 / 16) / math.sqrt(x.size)


def test_gaussian_enforces_the_bound_on_the_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    r = DiscreteGaussian(std=1e-3, clip_norm=1.0, dim=4, spacing=Fraction(1, 10))
    monkeypatch.setattr(deployed, "round_at_random", lambda position, sampler: np.full(position.shape, 10**9))
    report = r([[0.75, 0.0, -0.25, 0.0]], sampler=seeded())
    np.testing.assert_array_equal(report, [[7, 0, -2, 0]])


@pytest.mark.parametrize(("rounded", "kept"), [([12, 0, 0, 0], True), ([0, 0, -12, 1], False), ([7, 7, 7, 0], False)])
def test_gaussian_keeps_what_is_as_long_as_the_bound_and_nothing_longer(
    monkeypatch: pytest.MonkeyPatch, rounded: list[int], kept: bool
) -> None:
    """Ten steps of clip norm, and two for the rounding of four entries: a squared length of 144."""
    r = DiscreteGaussian(std=1e-3, clip_norm=1.0, dim=4, spacing=Fraction(1, 10))
    monkeypatch.setattr(deployed, "round_at_random", lambda position, sampler: np.array([rounded]))
    report = r([[0.75, 0.0, -0.25, 0.0]], sampler=seeded())
    np.testing.assert_array_equal(report, [rounded if kept else [7, 0, -2, 0]])


def test_gaussian_wild_inputs() -> None:
    r = DiscreteGaussian(std=1e-3, clip_norm=1.0, dim=2, spacing=Fraction(1, 8))
    np.testing.assert_array_equal(r([[np.nan, 1.0], [np.inf, 0.0], [1e300, 0.0]], sampler=seeded()), np.zeros((3, 2)))
    for bad in (np.zeros(3), np.zeros(()), np.zeros((2, 1))):
        with pytest.raises(ValueError, match="axis of 2 entries"):
            r(bad, sampler=seeded())


# What is refused


def test_numpy_scalars_are_numbers() -> None:
    assert DiscreteLaplace(np.float32(0.5), Fraction(1, 2)).scale == 4
    assert DiscreteGaussian(np.float32(0.5), np.float64(1.0), 3, Fraction(1, 2)).sigma_squared == 1


@pytest.mark.parametrize("eps", [0.0, -1.0, math.nan, math.inf])
def test_bad_eps_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="expected eps_local"):
        ExactRandomizedResponse(eps)
    with pytest.raises(ValueError, match="expected eps_local"):
        DiscreteLaplace(eps, Fraction(1, 2))


def test_bad_shapes_of_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="expected levels >= 2"):
        ExactRandomizedResponse(1.0, 1)
    with pytest.raises(ValueError, match="expected spacing to be a positive Fraction"):
        DiscreteLaplace(1.0, 0.1)
    with pytest.raises(ValueError, match="expected low < high"):
        DiscreteLaplace(1.0, Fraction(1, 2), 1.0, 0.0)
    with pytest.raises(ValueError, match="expected scale <="):
        DiscreteLaplace(1e-9, Fraction(1, 10**9))
    with pytest.raises(ValueError, match="expected clip_norm > 0"):
        DiscreteGaussian(1.0, 0.0, 3, Fraction(1, 2))
    with pytest.raises(ValueError, match="expected std > 0"):
        DiscreteGaussian(-1.0, 1.0, 3, Fraction(1, 2))
    with pytest.raises(ValueError, match="expected dim >= 1"):
        DiscreteGaussian(1.0, 1.0, 0, Fraction(1, 2))
