"""The table against laws in exact and high precision, the sampler against the table, and what surrounds the noise."""

from __future__ import annotations

import bisect
import decimal
import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
from scipy import stats

from dovetail.mechanisms import exact_skellam
from dovetail.mechanisms.exact import ExactSampler
from dovetail.mechanisms.exact_skellam import ExactSkellam, _poisson, encode, split
from dovetail.mechanisms.skellam import Encoding

ALPHA = 1e-4


def seeded(seed: int = 0) -> ExactSampler:
    return ExactSampler(np.random.default_rng(seed).bytes)


def scripted(*words: int, then: int = 0) -> ExactSampler:
    """A sampler whose first request is answered with these words, and later ones with `then` over and over."""
    answers = itertools.chain([np.array(words, "<u8").tobytes()], itertools.repeat(None))

    def entropy(count: int) -> bytes:
        first = next(answers)
        return first if first is not None else np.full(count // 8, then, "<u8").tobytes()

    return ExactSampler(entropy)


def pmf_of(variance: float) -> tuple[int, np.ndarray]:
    """The table's own law."""
    table = _poisson(variance)
    steps = [high - low for low, high in itertools.pairwise([0, *table.below])]
    return table.first, np.array([step / 2**exact_skellam._BITS for step in steps])


@pytest.mark.parametrize("variance", [1e-9, 1.0, 20.0, 3000.0])
def test_the_table_is_the_poisson_law_in_high_precision(variance: float) -> None:
    """Every entry of the distribution function is within the proven distance of the exact one."""
    table = _poisson(variance)
    with decimal.localcontext(prec=150, Emin=-(10**9), Emax=10**9):
        rate = Decimal(variance) / 2
        term, below = (-rate).exp(), Decimal(0)
        unit, bound = Decimal(2) ** -exact_skellam._BITS, Decimal(table.distance)
        for k in range(table.first + len(table.below)):
            below += term
            term = term * rate / (k + 1)
            if k >= table.first:
                assert abs(table.below[k - table.first] * unit - below) <= bound
        assert 1 - below <= bound
    assert table.distance <= 2.0**-281


@pytest.mark.parametrize("variance", [1e-9, 0.3, 50.0, 1e4, 1e7])
def test_the_table_agrees_with_scipy(variance: float) -> None:
    first, pmf = pmf_of(variance)
    reference = stats.poisson.pmf(first + np.arange(len(pmf)), variance / 2)
    assert np.abs(pmf - reference).max() <= 1e-7 * reference.max(), "its logarithms lose digits at large rates"
    assert pmf.sum() == pytest.approx(1, abs=1e-12)


def test_the_mode_of_a_large_rate_is_that_of_stirlings_series() -> None:
    first, pmf = pmf_of(1e7)
    mode = 5_000_000
    assert pmf[mode - first] == pytest.approx(math.exp(-1 / (12 * mode)) / math.sqrt(2 * math.pi * mode), rel=1e-13)


@pytest.mark.parametrize("variance", [1e-300, 1e-9, 1.0, 1e7])
def test_the_distance_covers_two_poissons_and_is_tiny(variance: float) -> None:
    assert ExactSkellam(variance).distance == 2 * _poisson(variance).distance
    assert 0 < ExactSkellam(variance).distance <= 2.0**-240


def test_a_table_for_ten_million_gives_draws_of_that_variance() -> None:
    square = float(np.sum(ExactSkellam(1e7)(10_000, sampler=seeded()).astype(np.float64) ** 2)) / 1e7
    assert ALPHA < stats.chi2.cdf(square, 10_000) < 1 - ALPHA
    assert stats.chi2.cdf(1.08 * square, 10_000) > 1 - ALPHA


def test_draws_have_the_law_of_the_table_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a table of 10 bits, all 1024 uniforms are tried: every value comes as often as the table says."""
    monkeypatch.setattr(exact_skellam, "_BITS", 10)
    monkeypatch.setattr(exact_skellam, "_UPPER", 4)
    table = _poisson.__wrapped__(3.0)
    drawn = [int(table.draw(1, scripted(u >> 6, then=u & 63))[0]) - table.first for u in range(1024)]
    np.testing.assert_array_equal(
        np.bincount(drawn, minlength=len(table.below)), np.diff([0, *table.below]).astype(np.int64)
    )
    assert len({entry >> 6 for entry in table.below}) < len(table.below), "some entries share their upper bits"


def test_ties_are_resolved_by_further_bits() -> None:
    table = _poisson(1000.0)
    words = table.upper[[400, 460, 500, 520]]
    for rest in (0, 2**64 - 1, 0x0123456789ABCDEF):
        drawn = table.draw(4, scripted(*words, then=rest))
        low = int("".join(f"{rest:016x}" * 5), 16) & ((1 << 267) - 1)
        expected = [bisect.bisect_right(table.below, int(word) << 267 | low) + table.first for word in words]
        np.testing.assert_array_equal(drawn, expected)


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
    assert requests == [8 * 400] * 8
    sampler = seeded(3)
    for scale in (0.1, 0.4, 100.0):
        drawn = encode(encoding, scale * np.random.default_rng(0).normal(size=400), sampler=sampler)
        assert (drawn**2).sum() <= encoding.norm**2


@pytest.mark.parametrize("x", [np.full(3, np.nan), np.array([np.inf, 0, 1]), np.full(3, 1e300)])
def test_what_has_no_norm_counts_as_zero(x: np.ndarray) -> None:
    np.testing.assert_array_equal(encode(Encoding(clip_norm=1.0, scale=9.0, dim=3), x, sampler=seeded()), 0)


def test_shares_add_up_and_all_but_one_are_uniform() -> None:
    values = np.arange(-3000, 3000)
    shares = split(values, 3, 16, sampler=seeded(4))
    assert shares.dtype == np.uint32
    assert shares.max() < 16
    np.testing.assert_array_equal(shares.sum(axis=1) % 16, values % 16)
    for pair in ((0, 1), (0, 2), (1, 2)):
        cells = np.bincount(shares[:, pair[0]] * 16 + shares[:, pair[1]], minlength=256)
        assert stats.chisquare(cells).pvalue > ALPHA
    wide = split(values, 2, 2**32, sampler=seeded(5))
    np.testing.assert_array_equal(wide.sum(axis=1, dtype=np.uint32), values.astype(np.uint32))
