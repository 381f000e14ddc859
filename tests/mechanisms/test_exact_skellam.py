"""The table against laws in exact and high precision, the sampler against the table, and what surrounds the noise."""

from __future__ import annotations

import decimal
import itertools
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from dovetail.mechanisms import exact_skellam
from dovetail.mechanisms.exact import ExactSampler
from dovetail.mechanisms.exact_skellam import BITS, ExactSkellam, _skellam_law, encode, split_into_shares
from dovetail.mechanisms.skellam import Encoding

ALPHA = 1e-4


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


def pmf_of(variance: float) -> np.ndarray:
    """The table's own law of magnitudes."""
    below = _skellam_law(variance).table.below
    return np.array([(high - low) / 2**BITS for low, high in itertools.pairwise([0, *below])])


def bessel(k: int, variance: Decimal) -> Decimal:
    """I_k by its series, every term of which is positive."""
    half = variance / 2
    term = half**k / math.factorial(k)
    total, m = term, 0
    while term > total * Decimal("1e-140"):
        m += 1
        term *= half * half / (m * (m + k))
        total += term
    return total


@pytest.mark.parametrize("variance", [1e-9, 1.0, 20.0, 300.0])
def test_the_table_is_the_skellam_law_in_high_precision(variance: float) -> None:
    """Every entry of the distribution function is within the proven distance of the exact one."""
    law = _skellam_law(variance)
    with decimal.localcontext(prec=150, Emin=-(10**9), Emax=10**9):
        v, below, unit = Decimal(variance), Decimal(0), Decimal(2) ** -BITS
        for k, entry in enumerate(law.table.below):
            below += (1 if k == 0 else 2) * bessel(k, v) * (-v).exp()
            assert abs(entry * unit - below) <= Decimal(law.distance)
        assert 1 - below <= Decimal(law.distance)
    assert law.distance <= 2.0**-253


@pytest.mark.parametrize("variance", [1e-9, 1.0, 20.0, 1e5])
def test_the_distance_is_no_less_than_what_its_parts_add_up_to(variance: float) -> None:
    """Those of the module's page: the start and what is beyond the table, rounding, and the table's entries."""
    law = _skellam_law(variance)
    last = len(law.table.below) - 1
    unit = Fraction(1, 2**BITS)
    parts = Fraction(2 * last + 3, 2**264) + (max(last, Fraction(variance) / 2) + 2 * (last + 1)) * unit
    assert parts <= Fraction(law.distance) <= parts * (1 + Fraction(1, 2**20))


@pytest.mark.parametrize("variance", [1e-9, 0.3, 50.0, 1e4, 1e7])
def test_the_table_agrees_with_scipy(variance: float) -> None:
    pmf = pmf_of(variance)
    reference = special.ive(np.arange(len(pmf)), variance) * np.where(np.arange(len(pmf)) == 0, 1, 2)
    assert np.abs(pmf - reference).max() <= 1e-10 * reference.max()
    assert pmf.sum() == pytest.approx(1, abs=1e-12)


def test_a_wrong_start_would_be_noticed() -> None:
    """A recurrence that starts too low is off by what it leaves out: the distance is not for any start."""
    with decimal.localcontext(prec=150):
        v, weights = Decimal(20), exact_skellam._skellam_weights(Fraction(20), 40)
        exact = bessel(0, v) * (-v).exp()
        error = abs(Decimal(weights[0]) / (weights[0] + 2 * sum(weights[1:])) - exact)
    assert _skellam_law(20.0).distance * 1e20 < error


@pytest.mark.parametrize("variance", [5e-324, 1e-300, 1e-9, 1.0, 1e7, 2.0**26, 2.0**29])
def test_the_distance_is_tiny(variance: float) -> None:
    assert 0 < ExactSkellam(variance).distance <= 2.0**-240


@pytest.mark.parametrize("variance", [1e7, 2.0**29])
def test_draws_of_large_variances_have_them(variance: float) -> None:
    """The sum of 10,000 squares, within the law's quantiles ALPHA and 1 - ALPHA; 8 % more is beyond."""
    square = float(np.sum(ExactSkellam(variance)(10_000, sampler=seeded()).astype(np.float64) ** 2)) / variance
    assert ALPHA < stats.chi2.cdf(square, 10_000) < 1 - ALPHA
    assert stats.chi2.cdf(1.08 * square, 10_000) > 1 - ALPHA


@pytest.mark.parametrize("variance", [0.5, 8.0, 5000.0])
def test_draws_follow_the_skellam_law_and_no_other(variance: float) -> None:
    """Chi-square over cells of mass 1/20 at least, accepted at alpha = 1e-4; a variance off by 10 % is rejected."""
    draws = ExactSkellam(variance)(40_000, sampler=seeded(1))

    def p_value(at: float) -> float:
        law = stats.skellam(at / 2, at / 2)
        edges = np.unique([law.ppf(q) for q in np.arange(0.05, 1, 0.05)])
        share = np.diff(np.concatenate([[0], law.cdf(edges), [1]]))
        counts = np.bincount(np.searchsorted(edges, draws), minlength=len(share))
        return stats.chisquare(counts, share * len(draws)).pvalue

    assert draws.dtype == np.int64
    assert p_value(variance) > ALPHA
    assert p_value(1.1 * variance) < 1e-9
    assert p_value(variance / 1.1) < 1e-9


def test_refusals() -> None:
    for variance in (0.0, -1.0, math.nan, math.inf, 2.0**30):
        with pytest.raises(ValueError, match="expected variance"):
            ExactSkellam(variance)


# Encoding and shares


def test_encoding_is_that_of_the_simulation_without_its_float32() -> None:
    encoding = Encoding(clip_norm=1.0, scale=50.0, dim=6)
    x = np.array([0.5, -0.31, 0.0, 0.123, -0.7, 1e-3])
    sampler = seeded(2)
    drawn = np.array([encode(encoding, x, sampler=sampler) for _ in range(3000)])
    assert set(np.unique(drawn - np.floor(50 * x))) == {0, 1}
    error = np.abs(drawn.mean(axis=0) / 50 - x)
    assert (error <= 4.9 * drawn.std(axis=0) / 50 / math.sqrt(3000) + encoding.bias).all(), "alpha = 1e-5 in all"
    long = encode(encoding, 1e6 * x, sampler=sampler)
    assert np.linalg.norm(long) == pytest.approx(50.0, abs=math.sqrt(6))


def test_the_norm_is_enforced_on_the_integers() -> None:
    """Rounding that always goes up is too long each time; after eight attempts everything is rounded towards zero."""
    encoding = Encoding(clip_norm=10.0, scale=1.0, dim=400, rounding_tail=0.9)
    x = np.full(400, 0.4)
    assert (np.ceil(x) ** 2).sum() > encoding.norm**2
    requests = []

    def up(count: int) -> bytes:
        requests.append(count)
        return bytes(count)

    np.testing.assert_array_equal(encode(encoding, x, sampler=ExactSampler(up)), np.zeros(400))
    assert requests == [4 * 400] * 8
    sampler = seeded(3)
    for scale in (0.1, 0.4, 100.0):
        drawn = encode(encoding, scale * np.random.default_rng(0).normal(size=400), sampler=sampler)
        assert (drawn**2).sum() <= encoding.norm**2


@pytest.mark.parametrize("x", [np.full(3, np.nan), np.array([np.inf, 0, 1]), np.full(3, 1e300)])
def test_what_has_no_norm_counts_as_zero(x: np.ndarray) -> None:
    np.testing.assert_array_equal(encode(Encoding(clip_norm=1.0, scale=9.0, dim=3), x, sampler=seeded()), 0)


def test_shares_add_up_and_all_but_one_are_uniform() -> None:
    values = np.arange(-3000, 3000)
    shares = split_into_shares(values, 3, 16, sampler=seeded(4))
    assert shares.dtype == np.uint32
    assert shares.max() < 16
    np.testing.assert_array_equal(shares.sum(axis=1) % 16, values % 16)
    for pair in ((0, 1), (0, 2), (1, 2)):
        cells = np.bincount(shares[:, pair[0]] * 16 + shares[:, pair[1]], minlength=256)
        assert stats.chisquare(cells).pvalue > ALPHA
    wide = split_into_shares(values, 2, 2**32, sampler=seeded(5))
    np.testing.assert_array_equal(wide.sum(axis=1, dtype=np.uint32), values.astype(np.uint32))
