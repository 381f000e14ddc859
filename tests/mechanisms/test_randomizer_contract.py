"""What every local randomizer owes, checked for all of them.

Statistical tests use fixed seeds and state their level: a correct randomizer fails one with probability ALPHA.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, stats

from dovetail.mechanisms import (
    RANDOMIZERS,
    BinaryRandomizedResponse,
    ClipLaplace,
    GaussianRandomizer,
    LaplaceRandomizer,
    LocalRandomizer,
    PrivUnitRandomizer,
    RandomizedResponse,
)

ALPHA = 1e-4
SAMPLES = 100_000

PURE = [
    LaplaceRandomizer(0.05),
    LaplaceRandomizer(1.0),
    LaplaceRandomizer(8.0, low=-0.3, high=2.0),
    ClipLaplace(0.05, low=-0.1, high=0.1),
    ClipLaplace(1.0),
    ClipLaplace(1.0, bound=1.5),
    ClipLaplace(20.0, low=-0.1, high=0.1),
    ClipLaplace(4.0, low=-2.0, high=2.0, bound=6.0),
    BinaryRandomizedResponse(0.01),
    BinaryRandomizedResponse(0.5),
    BinaryRandomizedResponse(6.0),
    RandomizedResponse(0.5, levels=3),
    RandomizedResponse(3.0, levels=17),
]
ALL = [*PURE, GaussianRandomizer(std=0.7, clip_norm=1.3), PrivUnitRandomizer(2.0, clip_norm=1.3, dim=8)]
ONE_OF_EACH = list({type(r): r for r in ALL}.values())


@pytest.fixture(params=PURE, ids=repr)
def pure(request: pytest.FixtureRequest) -> LocalRandomizer:
    return request.param


@pytest.fixture(params=ALL, ids=repr)
def randomizer(request: pytest.FixtureRequest) -> LocalRandomizer:
    return request.param


def inputs(r: LocalRandomizer, count: int = 41) -> np.ndarray:
    return np.linspace(*r.domain, count)


def output_interval(r: LocalRandomizer) -> tuple[float, float]:
    """An interval that holds all but e^-40 of the reports."""
    if isinstance(r, ClipLaplace):
        return -r.output_bound, r.output_bound
    assert isinstance(r, LaplaceRandomizer)
    return r.low - 40 * r.scale, r.high + 40 * r.scale


def outputs(r: LocalRandomizer) -> np.ndarray:
    if r.num_reports is not None:
        return np.arange(r.num_reports)
    return np.union1d(np.linspace(*output_interval(r), 2001), inputs(r))


def expectation(r: LocalRandomizer, x: float, function) -> float:
    """E[function(report)] by summation, or by quadrature of exp(log_density)."""
    if r.num_reports is not None:
        y = np.arange(r.num_reports)
        return float(np.sum(function(y) * np.exp(r.log_density(y, x))))
    low, high = output_interval(r)
    cuts = np.unique(np.clip([low, x - 5 * r.scale, x - r.scale, x, x + r.scale, x + 5 * r.scale, high], low, high))
    pieces = [
        integrate.quad(lambda y: function(y) * math.exp(r.log_density(y, x)), a, b, epsabs=1e-13, epsrel=1e-12)[0]
        for a, b in itertools.pairwise(cuts)
    ]
    return math.fsum(pieces)


@functools.partial(jax.jit, static_argnums=0)
def report(r: LocalRandomizer, x: jax.Array, key: jax.Array) -> jax.Array:
    return r(x, key=key)


def draw(r: LocalRandomizer, x: float, seed: int = 0) -> np.ndarray:
    shape = (SAMPLES // r.dim, r.dim) if isinstance(r, PrivUnitRandomizer) else (SAMPLES,)
    return np.asarray(report(r, np.full(shape, x, np.float32), jax.random.key(seed)), np.float64)


def p_value(r: LocalRandomizer, sample: np.ndarray, x: float) -> float:
    """Whether the sample comes from r's exact law on x: chi-square for integers, Kolmogorov-Smirnov for reals."""
    if r.num_reports is not None:
        levels = np.arange(r.num_reports)
        counts = np.bincount(sample.astype(int), minlength=r.num_reports)
        return stats.chisquare(counts, SAMPLES * np.exp(r.log_density(levels, x))).pvalue
    kink = np.clip(x, *r.domain)  # a float32 x may lie a hair outside, where a jump of the density would spoil the rule
    grid = np.union1d(np.linspace(*output_interval(r), 100_001), [kink])
    cdf = integrate.cumulative_trapezoid(np.exp(r.log_density(grid, x)), x=grid, initial=0.0)
    assert cdf[-1] == pytest.approx(1.0, abs=1e-5)
    return stats.kstest(sample, lambda y: np.interp(y, grid, cdf)).pvalue


# The law


def test_largest_log_ratio_is_eps_local(pure: LocalRandomizer) -> None:
    log_density = pure.log_density(outputs(pure)[:, None], inputs(pure))
    largest = np.max(log_density.max(axis=1) - log_density.min(axis=1))
    assert largest <= pure.eps_local + 1e-12 * max(1.0, pure.eps_local)
    assert largest == pytest.approx(pure.eps_local, abs=1e-9)


def test_density_has_mass_one(pure: LocalRandomizer) -> None:
    for x in inputs(pure, 5):
        assert expectation(pure, x, lambda y: 1.0 + 0 * y) == pytest.approx(1.0, abs=1e-9)


def test_mean_and_variance_are_those_of_the_density(pure: LocalRandomizer) -> None:
    for x in inputs(pure, 7):
        mean = expectation(pure, x, lambda y: y)
        centred = expectation(pure, x, lambda y, mean=mean: (y - mean) ** 2)
        assert pure.mean(x) == pytest.approx(mean, rel=1e-7, abs=1e-10)
        assert pure.report_variance(x) == pytest.approx(centred, rel=1e-7)
        if pure.affine:
            assert pure.debiased_variance(x) == pytest.approx(centred / pure.slope**2, rel=1e-7)


def test_laws_broadcast(pure: LocalRandomizer) -> None:
    y, x = outputs(pure)[:5], inputs(pure, 7)
    table = pure.log_density(y[:, None], x)
    assert table.shape == (len(y), 7)
    assert table[1, 2] == pure.log_density(y[1], x[2])
    assert pure.mean(x).shape == pure.report_variance(x).shape == (7,)


# The blanket


def test_blanket_is_exactly_the_infimum_of_the_densities(pure: LocalRandomizer) -> None:
    y, blanket = outputs(pure), pure.blanket()
    infimum = pure.log_density(y[:, None], inputs(pure, 201)).min(axis=1)
    np.testing.assert_allclose(infimum, math.log(blanket.gamma) + blanket.log_density(y), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pure", [r for r in ONE_OF_EACH if r in PURE], ids=repr)
def test_blanket_law_and_sampler(pure: LocalRandomizer) -> None:
    blanket = pure.blanket()
    sample = np.asarray(jax.jit(lambda key: blanket.sample((SAMPLES // 4, 4), key=key))(jax.random.key(1)), np.float64)
    assert sample.shape == (SAMPLES // 4, 4)
    z = (sample.mean() - blanket.mean) / math.sqrt(blanket.variance / SAMPLES)
    assert abs(z) < stats.norm.isf(ALPHA / 2)
    if pure.num_reports is not None:
        y = np.arange(pure.num_reports)
        assert np.exp(blanket.log_density(y)).sum() == pytest.approx(1.0)
        assert stats.chisquare(np.bincount(sample.astype(int).ravel(), minlength=len(y))).pvalue > ALPHA
    else:
        assert p_value(pure, sample.ravel(), blanket.x) > ALPHA


# The sampler


def test_sampler_follows_the_exact_law(pure: LocalRandomizer) -> None:
    low, high = pure.domain
    for seed, place in enumerate((0.0, 0.3, 1.0)):
        x = float(np.float32(low + place * (high - low)))
        assert p_value(pure, draw(pure, x, seed), x) > ALPHA


@pytest.mark.parametrize("factor", [2 / 3, 3 / 2])
@pytest.mark.parametrize(
    "truth",
    [LaplaceRandomizer(1.0), ClipLaplace(1.0), ClipLaplace(4.0, bound=3.0), BinaryRandomizedResponse(0.5)],
    ids=repr,
)
def test_sampler_test_rejects_a_near_miss(truth: LocalRandomizer, factor: float) -> None:
    miss = type(truth)(**{**_fields(truth), "eps_local": truth.eps_local * factor})
    x = truth.domain[1]
    assert p_value(truth, draw(truth, x), x) > ALPHA
    assert p_value(miss, draw(truth, x), x) < 1e-9


@pytest.mark.parametrize("truth", [BinaryRandomizedResponse(1.0), RandomizedResponse(1.0, levels=5)], ids=repr)
def test_chi_square_rejects_ten_per_cent_of_eps(truth: LocalRandomizer) -> None:
    miss = type(truth)(**{**_fields(truth), "eps_local": truth.eps_local * 1.1})
    assert p_value(miss, draw(truth, 1.0), 1.0) < 1e-9


def test_debias_is_unbiased(pure: LocalRandomizer) -> None:
    for seed, x in enumerate(inputs(pure, 4)):
        x = float(np.float32(x))
        mean = draw(pure, x, seed).mean()
        if pure.affine:
            z = (pure.debias(mean) - x) / math.sqrt(pure.debiased_variance(x) / SAMPLES)
        else:
            z = (mean - pure.mean(x)) / math.sqrt(pure.report_variance(x) / SAMPLES)
            assert pure.debias(pure.mean(x)) == pytest.approx(np.clip(x, *pure.domain), abs=1e-6 * pure.domain[1])
        assert abs(z) < stats.norm.isf(ALPHA / 2)


def test_every_report_is_in_the_support(pure: LocalRandomizer) -> None:
    for x in (*pure.domain, sum(pure.domain) / 2):
        assert np.all(np.isfinite(pure.log_density(draw(pure, x), x)))


# Inputs


def test_inputs_outside_the_domain_are_clamped(pure: LocalRandomizer) -> None:
    low, high = pure.domain
    key = jax.random.key(3)
    wild = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30], np.float32)
    tame = np.array([(low + high) / 2, high, low, high, low], np.float32)
    np.testing.assert_array_equal(report(pure, wild, key), report(pure, tame, key))
    y = outputs(pure)[3 % len(outputs(pure))]
    np.testing.assert_array_equal(
        pure.log_density(y, wild), pure.log_density(y, [(low + high) / 2, high, low, high, low])
    )


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8)])
def test_vectorised_over_leading_shapes(randomizer: LocalRandomizer, shape: tuple[int, ...]) -> None:
    x = np.linspace(*randomizer.domain, math.prod(shape), dtype=np.float32).reshape(shape)
    reports = jax.eval_shape(lambda x: randomizer(x, key=jax.random.key(0)), x)
    assert reports.shape == shape
    assert reports.dtype == (jnp.float32 if randomizer.num_reports is None else jnp.int32)


def test_scalars_and_integers_are_inputs(pure: LocalRandomizer) -> None:
    for x, shape in ((0.25, ()), (np.array([0, 1, 1]), (3,))):
        assert jax.eval_shape(lambda x=x: pure(x, key=jax.random.key(0))).shape == shape


@pytest.mark.parametrize("randomizer", ONE_OF_EACH, ids=repr)
def test_jit_and_vmap_change_nothing(randomizer: LocalRandomizer) -> None:
    x = np.linspace(*randomizer.domain, 24, dtype=np.float32).reshape(3, 8)
    keys = jax.random.split(jax.random.key(7), 3)
    one_by_one = np.stack([randomizer(row, key=key) for row, key in zip(x, keys, strict=True)])
    jitted = jax.jit(jax.vmap(lambda r, row, key: r(row, key=key), in_axes=(None, 0, 0)), static_argnums=0)
    np.testing.assert_allclose(jitted(randomizer, x, keys), one_by_one, rtol=1e-5, atol=1e-5)


def test_noise_depends_on_the_key_alone(randomizer: LocalRandomizer) -> None:
    first, again, other = (draw(randomizer, float(np.mean(randomizer.domain)), seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    assert len(np.unique(first)) > 1


# The object


def test_frozen_hashable_and_plain(randomizer: LocalRandomizer) -> None:
    twin = type(randomizer)(**_fields(randomizer))
    assert twin == randomizer
    assert hash(twin) == hash(randomizer)
    assert type(randomizer.eps_local) is float
    with pytest.raises(AttributeError):
        randomizer.eps_local = 2.0


def test_debias_keeps_the_kind_of_array(randomizer: LocalRandomizer) -> None:
    mean = np.linspace(*randomizer.domain, 5)
    single = jax.eval_shape(randomizer.debias, mean.astype(np.float32))
    assert single.dtype == jnp.float32
    assert single.shape == mean.shape
    assert isinstance(randomizer.debias(mean), np.ndarray)
    assert randomizer.debias(mean).dtype == np.float64


def test_a_numpy_scalar_does_not_promote_float32_data() -> None:
    with jax.enable_x64(True):
        one = np.float64(1.0)
        for r in (
            LaplaceRandomizer(one),
            ClipLaplace(one),
            GaussianRandomizer(one, one),
            PrivUnitRandomizer(one, one, np.int64(3)),
        ):
            x = np.zeros(3, np.float32)
            assert jax.eval_shape(lambda x, r=r: r(x, key=jax.random.key(0)), x).dtype == jnp.float32


def test_registry_names_every_randomizer() -> None:
    assert set(RANDOMIZERS) == {"rr2", "rr", "laplace", "clip_laplace", "gaussian", "privunit"}
    assert {type(r) for r in ALL} == set(RANDOMIZERS.values())


@pytest.mark.parametrize("eps_local", [0.0, -1.0, math.nan, math.inf, None, "1"])
@pytest.mark.parametrize("name", ["rr2", "rr", "laplace", "clip_laplace", "privunit"])
def test_bad_eps_local_is_refused(name: str, eps_local: object) -> None:
    extra = {"rr": {"levels": 3}, "privunit": {"clip_norm": 1.0, "dim": 4}}.get(name, {})
    with pytest.raises(ValueError, match=r"expected eps_local .* got eps_local="):
        RANDOMIZERS[name](eps_local=eps_local, **extra)


def test_a_traced_eps_local_is_refused() -> None:
    with pytest.raises(ValueError, match="expected eps_local"):
        jax.jit(lambda eps: LaplaceRandomizer(eps)(0.0, key=jax.random.key(0)))(1.0)


def _fields(r: LocalRandomizer) -> dict[str, object]:
    return {field.name: getattr(r, field.name) for field in dataclasses.fields(r) if field.init}
