import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dovetail.accounting.releases import split_and_mix
from dovetail.mechanisms import skellam
from dovetail.mechanisms.skellam import Encoding

QUICK = {"xla_backend_optimization_level": "0"}  # compiles three times as fast
FINE = Encoding(clip_norm=2.0, scale=3e4, dim=10)
COARSE = Encoding(clip_norm=0.7, scale=11.3, dim=10)
HALVES = Encoding(clip_norm=math.sqrt(10) / 2, scale=1.0, dim=10, rounding_tail=0.9)  # refuses one rounding in six


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _encoded(encoding, x, keys):
    return jax.vmap(lambda key: encoding(x, key=key))(keys)


def encoded(encoding, x):
    """20,000 encodings of the same vector."""
    return np.asarray(_encoded(encoding, jnp.asarray(x, jnp.float32), jax.random.split(jax.random.key(0), 20_000)))


def conditional_law(encoding, x):
    """Every rounding of scale * x with its probability, and whether its norm passes."""
    value = encoding.scale * np.asarray(x, np.float64)
    low = np.floor(value)
    ups = np.array(list(itertools.product((0, 1), repeat=len(value))))
    prob = np.prod(np.where(ups, value - low, 1 - value + low), axis=1)
    rounded = low + ups
    return rounded, prob, np.linalg.norm(rounded, axis=1) <= encoding.norm


# ---------------------------------------------------------------- encoding


@pytest.mark.parametrize(
    "x",
    [
        np.full(10, 0.5),
        np.full(10, -0.5),
        np.linspace(-3, 3, 10),
        np.full(10, 1e30),
        np.full(10, 3e38),
        np.array([np.nan] + [1.0] * 9),
        np.array([np.inf] * 5 + [-np.inf] * 5),
        np.zeros(10),
    ],
    ids=str,
)
def test_no_encoded_vector_is_longer_than_the_accountant_presumes(x):
    for encoding in (HALVES, COARSE, FINE):
        norms = np.linalg.norm(encoded(encoding, x).astype(np.float64), axis=1)
        assert norms.max() <= encoding.norm
        assert encoding.norm == split_and_mix.rounded_norm(
            clip_norm=encoding.clip_norm, scale=encoding.scale, coordinates=10, rounding_tail=encoding.rounding_tail
        )
        if not (np.abs(x) < 1e18).all():
            assert norms.max() == 0


def test_rounding_has_the_conditional_law_and_not_the_plain_one():
    x = np.full(10, 0.5)
    rounded, prob, kept = conditional_law(HALVES, x)
    assert 0.1 < prob[~kept].sum() < 0.3
    law = np.bincount(rounded.sum(axis=1).astype(int), np.where(kept, prob, 0), minlength=11) / prob[kept].sum()
    plain = np.bincount(rounded.sum(axis=1).astype(int), prob, minlength=11)
    draws = np.bincount(encoded(HALVES, x).sum(axis=1), minlength=11)
    cells = law > 0
    assert draws[~cells].sum() == 0
    assert stats.chisquare(draws[cells], 20_000 * law[cells]).pvalue > 1e-3
    assert stats.binomtest(int(draws[~cells].sum()), 20_000, plain[~cells].sum()).pvalue < 1e-6


@pytest.mark.parametrize("tail", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("x", [np.full(10, 0.5), np.full(10, 0.2), np.linspace(-1.2, 0.9, 10)], ids=str)
def test_the_bias_of_conditional_rounding_is_within_its_bound(tail, x):
    norm = float(np.linalg.norm(x))
    encoding = Encoding(clip_norm=norm, scale=1.0, dim=10, rounding_tail=tail)
    rounded, prob, kept = conditional_law(encoding, x)
    refused = prob[~kept].sum()
    assert refused <= tail
    bias = float(np.linalg.norm(prob[kept] @ rounded[kept] / prob[kept].sum() - x))
    sharper = Encoding(clip_norm=norm, scale=1.0, dim=10, rounding_tail=float(refused) or 1e-12).bias
    assert bias <= sharper * (1 + 1e-9) + 1e-5
    assert sharper <= encoding.bias
    assert bias > 0.05 * sharper or refused < 1e-3, "the bound is of the right size"


def test_at_the_default_tail_the_bias_is_far_below_the_clip_norm():
    scale, _ = skellam.choose_resolution(clip_norm=1.0, dim=7850, num_users=1000, noise_std=8.0)
    assert Encoding(clip_norm=1.0, scale=scale, dim=7850).bias < 1e-5
    x = np.linspace(-1, 1, 10) / 4
    drawn = encoded(COARSE, x) / COARSE.scale
    z = (drawn.mean(axis=0) - x) / (drawn.std(axis=0, ddof=1) / math.sqrt(20_000) + 1e-9)
    assert np.abs(z).max() < 5, "10 coordinates, alpha below 1e-5"
    assert drawn.var(axis=0).max() <= 0.26 / COARSE.scale**2


def test_rounding_that_keeps_failing_goes_towards_zero(monkeypatch):
    monkeypatch.setattr(skellam, "toss_coins", lambda prob, words: prob > 0)  # always up
    x = jnp.asarray([0.5] * 8 + [-1.5, 1.0], jnp.float32)
    stuck = Encoding(clip_norm=2.3, scale=1.0, dim=10, rounding_tail=0.99)
    assert np.linalg.norm(np.ceil(x)) > stuck.norm
    encode = jax.jit(lambda x, key: stuck(x, key=key), compiler_options=QUICK)
    np.testing.assert_array_equal(encode(x, jax.random.key(0)), np.trunc(x))


def test_shorter_vectors_are_not_clipped_and_integers_are_kept():
    rest = [0.0] * 6
    assert (encoded(FINE, [0.5, -1.0, 1.25, 0.0, *rest]) == [15_000, -30_000, 37_500, 0, *rest]).all()
    np.testing.assert_allclose(encoded(FINE, [30.0, 0, -40.0, 0, *rest])[0], [36_000, 0, -48_000, 0, *rest], atol=1)


# ---------------------------------------------------------------- noise


def histogram(draws, reach):
    return np.bincount(np.clip(draws, -reach, reach) + reach, minlength=2 * reach + 1)


def skellam_cells(variance, reach):
    law = stats.skellam.pmf(np.arange(-reach, reach + 1), variance / 2, variance / 2)
    law[[0, -1]] += (1 - law.sum()) / 2
    return law


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def draws_of(variance, times, key):
    return skellam.draw_skellam(variance, (100_000,), key=key, times=times)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def at_once(variance, key):
    return skellam.draw_skellam(variance, (100_000,), key=key)


@pytest.mark.parametrize(
    ("variance", "times", "reach"),
    [(0.5, 1.0, 3), (0.5, 4.0, 6), (0.5, 120.0, 28), (0.5, 4000.0, 150), (1100.0, 2.0, 150)],
)
def test_noise_has_the_law_of_skellam(variance, times, reach):
    draws = histogram(np.asarray(draws_of(variance, times, jax.random.key(5))), reach)
    variance *= times
    assert stats.chisquare(draws, 1e5 * skellam_cells(variance, reach)).pvalue > 1e-3
    for wrong in (0.95, 1.05):
        assert stats.chisquare(draws, 1e5 * skellam_cells(wrong * variance, reach)).pvalue < 1e-4


def test_one_draw_is_the_sum_of_one():
    np.testing.assert_array_equal(at_once(0.5, jax.random.key(5)), draws_of(0.5, 1.0, jax.random.key(5)))
    np.testing.assert_array_equal(at_once(1100.0, jax.random.key(5)), draws_of(1100.0, 1.0, jax.random.key(5)))


def test_no_variance_is_no_noise():
    assert not np.asarray(draws_of(0.5, 0.0, jax.random.key(0))).any()
    assert not np.asarray(draws_of(1100.0, 0.0, jax.random.key(0))).any()
    assert not np.asarray(at_once(1e-20, jax.random.key(0))).any()


@pytest.mark.parametrize("variance", [1024.0, 1e4])
def test_a_rounded_gaussian_is_as_near_to_skellam_as_stated(variance):
    y = np.arange(-int(12 * variance**0.5), int(12 * variance**0.5) + 1)
    edges = np.append(y - 0.5, y[-1] + 0.5) / math.sqrt(variance - 1 / 12)
    distance = np.abs(stats.skellam.pmf(y, variance / 2, variance / 2) - np.diff(stats.norm.cdf(edges))).sum() / 2
    assert 0.05 < distance * variance < 0.06


def test_large_variances_neither_overflow_nor_shrink():
    for variance, times in ((1100.0, 1e11 / 1100), (0.5, 2e11)):
        draws = np.asarray(draws_of(variance, times, jax.random.key(1)), np.float64)
        assert draws.var() == pytest.approx(1e11, rel=0.02)
        assert abs(draws.mean()) < 5 * math.sqrt(1e11 / 1e5)


# ---------------------------------------------------------------- shares


split = jax.jit(skellam.split_into_shares, static_argnums=(1, 2), compiler_options=QUICK)


@pytest.mark.parametrize("modulus", [2, 16, 2**20, 2**32])
def test_shares_add_up_modulo_the_modulus(modulus):
    values = jnp.asarray([0, 1, -1, 7, -8, 2**31 - 1, -(2**31)], jnp.int32)
    shares = np.asarray(split(values, 5, modulus, key=jax.random.key(0)), np.uint64)
    assert shares.shape == (7, 5)
    assert shares.max() < modulus
    np.testing.assert_array_equal(shares.sum(axis=1) % modulus, np.asarray(values, np.int64) % modulus)


@pytest.mark.parametrize("value", [0, 5])
def test_all_shares_but_one_are_uniform_whatever_the_value(value):
    """Every pair of three shares, by chi-square over 8 x 8 cells; all three are not."""
    shares = np.asarray(split(jnp.full(40_000, value, jnp.int32), 3, 8, key=jax.random.key(2)))
    for a, b in ((0, 1), (0, 2), (1, 2)):
        cells = np.bincount(shares[:, a] * 8 + shares[:, b], minlength=64)
        assert stats.chisquare(cells).pvalue > 1e-3
    assert len(np.unique(shares @ [1, 8, 64])) == 64
    assert set((shares.sum(axis=1) % 8).tolist()) == {value}


def test_residues_are_centred():
    every = np.arange(-8, 8)
    np.testing.assert_array_equal(skellam.center(skellam.to_residues(jnp.asarray(every, jnp.int32)) & 15, 16), every)
    np.testing.assert_array_equal(skellam.center(jnp.arange(16, 32, dtype=jnp.uint32), 16), [*range(8), *range(-8, 0)])
    ends = jnp.asarray([2**31 - 1, -(2**31), 0, -1], jnp.int32)
    np.testing.assert_array_equal(skellam.center(skellam.to_residues(ends), 2**32), ends)


# ---------------------------------------------------------------- resolution


@pytest.mark.parametrize("dim", [1, 2, 10, 40, 650, 7850, 100_000])
@pytest.mark.parametrize("clip_norm", [0.5, 3.0])
def test_the_coarsest_scale_is_the_least_at_which_rounding_costs_two_thousandths(dim, clip_norm):
    """The accountant pays for the longest encoding: a finer scale would only cost bits, a coarser one budget."""
    coarsest = skellam._coarsest_scale(clip_norm, dim)
    norms = [Encoding(clip_norm=clip_norm, scale=at * coarsest, dim=dim).norm / (at * coarsest) for at in (0.99, 1)]
    assert norms[0] > clip_norm * (1 + skellam._ROUNDING_LOSS) > norms[1] * (1 - 1e-9)


@pytest.mark.parametrize(("dim", "num_users", "noise_std"), [(1, 100_000, 4.0), (40, 50, 2.0), (7850, 1000, 8.0)])
def test_scale_and_modulus_leave_room_and_waste_none(dim, num_users, noise_std):
    scale, modulus = skellam.choose_resolution(clip_norm=0.5, dim=dim, num_users=num_users, noise_std=noise_std)
    norm = Encoding(clip_norm=0.5, scale=scale, dim=dim).norm
    assert modulus & (modulus - 1) == 0
    assert 2 * (num_users * norm + 9 * noise_std * scale) < modulus
    assert 2 * (num_users * norm + 9 * noise_std * scale) * 1.03 > modulus
    assert norm <= scale * 0.5 * 1.002
    assert skellam.choose_resolution(
        clip_norm=0.5, dim=dim, num_users=num_users, noise_std=noise_std, scale=scale, modulus=modulus
    ) == (scale, modulus)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"modulus": 1000}, "expected modulus to be a power of two"),
        ({"modulus": 2**33}, "expected modulus to be a power of two up to 2\\^32"),
        ({"modulus": 2**16}, "expected modulus >= .* for the sum of 1000 users"),
        ({"scale": 100.0, "modulus": 2**16}, "expected modulus >= .* at scale=100"),
        ({"num_users": 10**8}, "got modulus=at most 2\\^32"),
        ({"scale": 1e5}, "expected scale \\* clip_norm \\+ sqrt\\(dim\\) < 65000"),
    ],
)
def test_sums_that_may_wrap_around_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        skellam.choose_resolution(**{"clip_norm": 1.0, "dim": 100, "num_users": 1000, "noise_std": 2.0, **given})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"clip_norm": 0.0}, "expected clip_norm > 0"),
        ({"scale": -1.0}, "expected scale > 0"),
        ({"dim": 0}, "expected dim >= 1"),
        ({"dim": 2.5}, "expected dim to be a whole number"),
        ({"rounding_tail": 1.0}, "expected 0 < rounding_tail < 1"),
    ],
)
def test_bad_encodings_are_refused(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        Encoding(**{"clip_norm": 1.0, "scale": 2.0, "dim": 3, **given})
