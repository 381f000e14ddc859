"""Statistical tests use fixed seeds; a correct sampler fails one of them with probability ALPHA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from fractions import Fraction

import jax
import mpmath
import numpy as np
import pytest
from grids import later
from scipy import special, stats

from dovetail.accounting.releases import privunit as accounting
from dovetail.accounting.releases.privunit import Cap
from dovetail.mechanisms import privunit
from dovetail.mechanisms.privunit import PrivUnitRandomizer, UniformSphere
from dovetail.statements import NotApplicable

ALPHA = 1e-4
PLACES = [(2, 1.0), (3, 0.5), (3, 20.0), (7, 2.0), (50, 8.0), (7850, 4.0), (7850, 20.0), (1_000_000, 12.0)]


def unit(dim: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=dim)
    return x / np.linalg.norm(x)


def exact_mass(dim: int, threshold: float) -> mpmath.mpf:
    with mpmath.workdps(40):
        square = 1 - mpmath.mpf(threshold) ** 2
        return mpmath.betainc((mpmath.mpf(dim) - 1) / 2, 0.5, 0, square, regularized=True) / 2


def at_height(u: np.ndarray, t: float) -> np.ndarray:
    """A point of the sphere with <v, u> = t."""
    w = unit(len(u), seed=1)
    w -= u * (w @ u)
    return t * u + math.sqrt(1 - t * t) * w / np.linalg.norm(w)


def above(dim: int, t: np.ndarray) -> np.ndarray:
    """P(T >= t) for the height T of a uniform point of the sphere."""
    t = np.clip(t, -1, 1)
    tail = special.betaincc(0.5, (dim - 1) / 2, t * t) / 2
    return np.where(t >= 0, tail, 1 - tail)


def height_above(cap: Cap, t: np.ndarray) -> np.ndarray:
    """P(<v, u> >= t) for a report v on u."""
    mass, tail = above(cap.dim, np.asarray(cap.threshold)), above(cap.dim, t)
    inside = cap.prob * tail / mass
    return np.where(t >= cap.threshold, inside, cap.prob + (1 - cap.prob) * (tail - mass) / (1 - mass))


def p_value(cap: Cap, heights: np.ndarray) -> float:
    """Kolmogorov-Smirnov: whether these are heights of reports with this cap."""
    return stats.kstest(-heights, lambda minus: height_above(cap, -minus)).pvalue


@functools.partial(jax.jit, static_argnums=0)
def report(r: PrivUnitRandomizer, x: jax.Array, key: jax.Array) -> jax.Array:
    return r(x, key=key)


def draw(r: PrivUnitRandomizer, x: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Reports of `count` clients, who all have the same x if it is one vector."""
    inputs = np.broadcast_to(x.astype(np.float32), (count, r.dim))
    return np.asarray(report(r, inputs, jax.random.key(seed)), np.float64)


# The law


@pytest.mark.parametrize(("dim", "eps_local"), PLACES)
def test_the_largest_log_ratio_is_eps(dim: int, eps_local: float) -> None:
    r = PrivUnitRandomizer(eps_local, 2.0, dim)
    u, cap = unit(dim), r.cap
    heights = [-1.0, -(1 + cap.threshold) / 2, 0.0, cap.threshold / 2, (1 + cap.threshold) / 2, 1.0]
    y = np.stack([at_height(u, t) for t in heights])
    x = [2 * u, -2 * u, 0 * u, 0.6 * u, 2 * at_height(u, 0.1), np.full(dim, np.nan)]
    table = np.stack([r.log_density(y, value) for value in x])
    largest = max(np.max(a - b) for a, b in itertools.permutations(table, 2))
    assert largest == pytest.approx(accounting.eps(cap).eps, abs=1e-9)
    with mpmath.workdps(40):
        p, c = mpmath.mpf(cap.prob), exact_mass(dim, cap.threshold)
        exact = float(mpmath.log(p * (1 - c) / ((1 - p) * c)))
    assert largest == pytest.approx(exact, abs=1e-9)
    assert exact <= largest <= eps_local
    assert largest >= eps_local * (1 - 1e-6)


@pytest.mark.parametrize("eps_local", [0.5, 1.0, 3.0, 7.5, 12.0, 20.0])
@pytest.mark.parametrize("dim", [3, 50, 7850])
def test_every_eps_is_met_and_its_cap_is_as_likely_as_promised(eps_local: float, dim: int) -> None:
    r, u, count = PrivUnitRandomizer(eps_local, 1.0, dim), unit(dim), 300_000
    high, low = r.log_density(np.stack([u, -u]), u)
    assert eps_local * (1 - 1e-6) <= high - low <= eps_local
    words = np.random.default_rng(0).integers(2**32, size=(2, count), dtype=np.uint32)
    inside = int(np.sum(privunit._draw_whether_in_cap(r.cap, *words)))
    assert stats.binomtest(inside, count, r.cap.prob).pvalue > ALPHA
    assert stats.binomtest(inside, count, PrivUnitRandomizer(1.2 * eps_local, 1.0, dim).cap.prob).pvalue < ALPHA


@pytest.mark.parametrize(("dim", "eps_local"), PLACES)
@pytest.mark.parametrize("radius", [0.0, 0.3, 1.0])
def test_the_density_has_mass_one(dim: int, eps_local: float, radius: float) -> None:
    r = PrivUnitRandomizer(eps_local, 2.0, dim)
    u = unit(dim) if radius else np.eye(1, dim)[0]
    c = float(exact_mass(dim, r.cap.threshold))
    towards, away, rest = np.exp(r.log_density(np.stack([u, -u, at_height(u, 0.0)]), 2 * radius * u))
    assert towards * c + away * c + rest * (1 - 2 * c) == pytest.approx(1.0, abs=1e-9)


def test_the_density_is_a_mixture_of_both_caps() -> None:
    r, u = PrivUnitRandomizer(2.0, 1.5, 7), unit(7)
    inside, outside = np.exp(r.log_density(np.stack([u, -u]), 1.5 * u))
    y = np.stack([at_height(u, t) for t in (1, r.cap.threshold + 1e-9, r.cap.threshold - 1e-9, -1)])
    mixed = np.exp(r.log_density(y, 0.6 * u))  # r = .4: kept with probability .7
    np.testing.assert_allclose(mixed[:2], 0.7 * inside + 0.3 * outside)
    np.testing.assert_allclose(mixed[2:], [outside, 0.3 * inside + 0.7 * outside])
    np.testing.assert_array_equal(r.log_density(np.stack([0.9 * u, 0 * u, np.nan * u]), u), -np.inf)


def test_laws_broadcast() -> None:
    r = PrivUnitRandomizer(1.0, 1.0, 4)
    y, x = (np.stack([unit(4, seed) for seed in range(count)]) for count in (5, 3))
    table = r.log_density(y[:, None], x)
    assert table.shape == (5, 3)
    assert table[1, 2] == r.log_density(y[1], x[2])
    assert r.mean(x).shape == r.report_variance(x).shape == (3, 4)


@pytest.mark.parametrize(("dim", "eps_local"), PLACES)
def test_debias_inverts_the_exact_mean_and_the_variance_is_the_accountants(dim: int, eps_local: float) -> None:
    r, u = PrivUnitRandomizer(eps_local, 3.0, dim), unit(dim)
    for x, clipped in ((0 * u, 0 * u), (1.2 * u, 1.2 * u), (3 * u, 3 * u), (50 * u, 3 * u)):
        np.testing.assert_allclose(r.debias(r.mean(x)), clipped, rtol=1e-12, atol=1e-15)
        m, radius = accounting.mean_projection(r.cap), np.linalg.norm(clipped) / 3
        assert r.report_variance(x).sum() == pytest.approx(1 - (m * radius) ** 2, rel=1e-8)
    assert r.debiased_variance(3 * u).sum() == pytest.approx((3 * accounting.rms_error(r.cap)) ** 2, rel=1e-6)


# The blanket


@pytest.mark.parametrize(("dim", "eps_local"), [(2, 1.0), (7, 2.0), (50, 8.0)])
def test_the_blanket_is_exactly_the_infimum_of_the_densities(dim: int, eps_local: float) -> None:
    r = PrivUnitRandomizer(eps_local, 1.0, dim)
    blanket, y = r.blanket(), np.stack([unit(dim, seed) for seed in range(100, 300)])
    rng = np.random.default_rng(2)
    x = rng.normal(size=(100, dim))
    x *= rng.uniform(0, 1.5, size=(100, 1)) / np.linalg.norm(x, axis=1, keepdims=True)
    infimum = r.log_density(y[:, None], np.concatenate([x, -y[:1], y[:1]])).min(axis=1)
    np.testing.assert_allclose(infimum, math.log(blanket.gamma) + blanket.log_density(y), rtol=0, atol=1e-9)
    c = float(exact_mass(dim, r.cap.threshold))
    assert blanket.gamma == pytest.approx((1 - r.cap.prob) / (1 - c), rel=1e-9)
    assert blanket.log_density(2 * y[0]) == -np.inf


def test_dummies_are_uniform_on_the_sphere() -> None:
    blanket, count = UniformSphere(0.5, 5), 40_000
    sample = np.asarray(blanket.sample((4, count // 4), key=jax.random.key(3)), np.float64)
    assert sample.shape == (4, count // 4, 5)
    np.testing.assert_allclose(np.linalg.norm(sample, axis=-1), 1, atol=1e-6)
    flat = sample.reshape(-1, 5)
    for direction in (np.eye(5)[0], unit(5), unit(5, seed=1)):
        heights = flat @ direction
        assert stats.kstest(-heights, lambda minus: above(5, -minus)).pvalue > ALPHA / 3
        assert stats.kstest(-heights, lambda minus: above(6, -minus)).pvalue < 1e-9
    limit = stats.norm.isf(ALPHA / 10)
    assert np.all(np.abs(flat.mean(axis=0) - blanket.mean) < limit * math.sqrt(blanket.variance / count))
    assert blanket.variance == pytest.approx(np.mean(flat**2), rel=1e-6)


def test_a_sum_of_dummies_is_a_vector_that_grows_like_a_random_walk() -> None:
    counts = np.repeat([0, 1, 9], 5000).reshape(3, 5000)
    sums = np.asarray(UniformSphere(0.5, 5).sample_sum(counts, 12, key=jax.random.key(4)), np.float64)
    assert sums.shape == (3, 5000, 5)
    squares = np.sum(sums**2, axis=-1)
    np.testing.assert_array_equal(squares[0], 0)
    np.testing.assert_allclose(squares[1], 1, atol=1e-5)
    z = (squares[2].mean() - 9) / (squares[2].std() / math.sqrt(5000))
    assert abs(z) < stats.norm.isf(ALPHA / 2)


# The sampler


@pytest.mark.parametrize(
    ("dim", "count"), [(3, 40_000), (50, 20_000), pytest.param(7850, 2_000, marks=pytest.mark.soak)]
)
def test_heights_follow_the_exact_law_and_near_misses_are_rejected(dim: int, count: int) -> None:
    r, u = PrivUnitRandomizer(4.0, 1.0, dim), unit(dim)
    heights = draw(r, u, count) @ u
    assert p_value(r.cap, heights) > ALPHA
    for factor in (2 / 3, 3 / 2):
        assert p_value(PrivUnitRandomizer(4.0 * factor, 1.0, dim).cap, heights) < 1e-9
    moved = dataclasses.replace(r.cap, threshold=r.cap.threshold * 0.9)
    assert p_value(moved, heights) < 1e-9
    mass = accounting.cap_mass(dim=dim, threshold=r.cap.threshold)
    assert p_value(dataclasses.replace(r.cap, prob=mass), heights) < 1e-9


@pytest.mark.parametrize("eps_local", [later(0.5), 20.0, later(100.0)])
def test_heights_in_a_million_dimensions(eps_local: float) -> None:
    cap = PrivUnitRandomizer(eps_local, 1.0, 1_000_000).cap
    words = np.random.default_rng(0).integers(2**32, size=(3, 100_000), dtype=np.uint32)
    inside = privunit._draw_whether_in_cap(cap, *words[:2])
    heights, reach = (np.asarray(part, np.float64) for part in privunit._draw_heights(cap, inside, words[2]))
    np.testing.assert_allclose(heights**2 + reach**2, 1, atol=1e-6)
    assert p_value(cap, heights) > ALPHA
    # Inside the cap all heights crowd above the threshold: there too, and not only between the two sides.
    beyond = heights[np.asarray(inside)]
    tail = above(cap.dim, beyond) / above(cap.dim, np.asarray(cap.threshold))
    assert stats.kstest(tail, "uniform").pvalue > ALPHA
    assert stats.kstest(tail**1.06, "uniform").pvalue < 1e-9


@pytest.mark.parametrize(
    ("dim", "count", "first"),
    [(3, 10_000, -0.9), (3, 10_000, 1.0), (50, 10_000, -1e-9), (50, 10_000, 0.5), later(7850, 2_000, 0.1)],
)
def test_the_part_orthogonal_to_the_input_is_uniform(dim: int, count: int, first: float) -> None:
    u = np.append(first, math.sqrt(1 - first**2) * unit(dim - 1, seed=4))
    r = PrivUnitRandomizer(4.0, 1.0, dim)
    v = draw(r, u, count, seed=5)
    heights = v @ u
    across = (v - heights[:, None] * u) / np.sqrt(1 - heights**2)[:, None]
    for seed in (6, 7):
        side = unit(dim, seed)
        side -= u * (side @ u)
        parts = across @ (side / np.linalg.norm(side))
        assert stats.kstest(-parts, lambda minus: above(dim - 1, -minus)).pvalue > ALPHA / 2
        assert stats.kstest(-parts * 1.2, lambda minus: above(dim - 1, -minus)).pvalue < 1e-4
        assert stats.spearmanr(parts, heights).pvalue > ALPHA / 2
        assert stats.spearmanr(np.abs(parts), heights).pvalue > ALPHA / 2


@pytest.mark.parametrize("radius", [0.0, 0.4, 1.0, 7.0])
def test_unbiased_with_the_declared_covariance(radius: float) -> None:
    dim, count = 5, 60_000
    r, u = PrivUnitRandomizer(2.0, 1.5, dim), unit(dim)
    x, clipped = 1.5 * radius * u, 1.5 * min(radius, 1.0) * u
    v = draw(r, x, count, seed=8)
    limit = stats.norm.isf(ALPHA / 2 / dim)
    error = np.sqrt(r.debiased_variance(x) / count)
    assert np.all(np.abs(r.debias(v.mean(axis=0)) - clipped) < limit * error)
    if radius > 0:
        assert np.any(np.abs(1.1 * r.debias(v.mean(axis=0)) - clipped) > limit * error)
    squares = (v - r.mean(x)) ** 2
    deviation = (squares.mean(axis=0) - r.report_variance(x)) / (squares.std(axis=0) / math.sqrt(count))
    assert np.all(np.abs(deviation) < limit)
    wrong = (squares.mean(axis=0) - 1.05 * r.report_variance(x)) / (squares.std(axis=0) / math.sqrt(count))
    assert np.all(np.abs(wrong) > limit)
    total = np.sum((r.debias(v) - clipped) ** 2, axis=1)
    if radius == 0:  # the report has norm 1: nothing varies but the last float32 bit
        assert total.mean() == pytest.approx(r.debiased_variance(x).sum(), rel=1e-6)
        return
    z = (total.mean() - r.debiased_variance(x).sum()) / (total.std() / math.sqrt(count))
    assert abs(z) < stats.norm.isf(ALPHA / 2)


def test_the_mean_over_different_clients_is_unbiased() -> None:
    dim, count = 5, 60_000
    r, rng = PrivUnitRandomizer(2.0, 1.5, dim), np.random.default_rng(9)
    x = (rng.normal(loc=0.3, size=(count, dim)) * rng.uniform(0, 1.5, size=(count, 1))).astype(np.float32)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    assert 0.2 < np.mean(norms > 1.5) < 0.8
    clipped = x * np.minimum(1, 1.5 / norms)
    v = draw(r, x, count, seed=9)
    error = np.sqrt(r.debiased_variance(x).mean(axis=0) / count)
    z = (r.debias(v.mean(axis=0)) - clipped.mean(axis=0)) / error
    assert np.all(np.abs(z) < stats.norm.isf(ALPHA / 2 / dim))
    assert np.any(np.abs(1.2 * r.debias(v.mean(axis=0)) - clipped.mean(axis=0)) > stats.norm.isf(ALPHA / 2) * error)


def test_the_coin_of_the_cap_is_exact() -> None:
    cap = Cap(dim=10, threshold=0.2, prob=1 - 5 / 2**32 - 3 / 2**53)
    assert privunit._num_words_outside(cap) == 5 * 2**21 + 3
    low = np.array([0, 2**32 - 1, 0, (3 << 11) - 1, 3 << 11, 0], np.uint32)
    inside = privunit._draw_whether_in_cap(cap, np.array([0, 4, 5, 5, 5, 6], np.uint32), low)
    np.testing.assert_array_equal(inside, [False, False, False, False, True, True])
    for dim, eps_local in PLACES:
        r = PrivUnitRandomizer(eps_local, 1.0, dim)
        best = accounting.least_variance_cap(dim=dim, eps_local=eps_local)
        assert Fraction(r.cap.prob) == 1 - Fraction(privunit._num_words_outside(best), 2**53) <= Fraction(best.prob)
    assert privunit._num_words_outside(dataclasses.replace(cap, prob=0.1)) == math.ceil(Fraction(9, 10) * 2**53)


def test_two_dimensions_lose_nothing_to_cancellation() -> None:
    r = PrivUnitRandomizer(1.0, 1.0, 2)
    for u in (np.eye(2)[0], -np.eye(2)[0], np.eye(2)[1], unit(2)):
        v = draw(r, u, 100_000)
        np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1, atol=2e-6)
        assert p_value(r.cap, v @ u) > ALPHA / 4


@pytest.mark.parametrize("dim", [5, privunit._LONG])
def test_sums_are_those_of_the_reports(dim: int) -> None:
    """Of short and of long vectors; who is not present adds nothing, whatever it holds."""
    r, rng = PrivUnitRandomizer(8.0, 1.0, dim), np.random.default_rng(1)
    xs = rng.normal(size=(4, dim)).astype(np.float32)
    xs[0], xs[3] = 0, np.inf
    keys, present = jax.random.split(jax.random.key(2), 4), np.array([True, True, True, False])
    report = jax.jit(lambda x, key: r(x, key=key))
    reports = np.stack([np.asarray(report(x, key), np.float64) for x, key in zip(xs, keys, strict=True)])
    np.testing.assert_allclose(np.linalg.norm(reports, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(r.sum_reports(xs, present, keys=keys), reports[:3].sum(axis=0), atol=1e-6)


def test_a_million_dimensions_in_bounded_memory() -> None:
    dim, clients = 1_000_000, 3
    r = PrivUnitRandomizer(8.0, 1.0, dim)
    x = np.random.default_rng(0).normal(size=(clients, dim)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), clients)
    compiled = jax.jit(jax.vmap(lambda x, key: r(x, key=key))).lower(x, keys).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * x.nbytes
    v = np.asarray(compiled(x, keys), np.float64)
    np.testing.assert_allclose(np.linalg.norm(v, axis=1), 1, atol=1e-5)
    heights = np.sum(v * x, axis=1) / np.linalg.norm(x.astype(np.float64), axis=1)
    assert np.all(np.abs(heights) < 8 / math.sqrt(dim))
    assert np.all(heights > -4 / math.sqrt(dim))


# Inputs


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_an_input_without_a_finite_norm_counts_as_zero(bad: float) -> None:
    r, count = PrivUnitRandomizer(2.0, 1.0, 4), 100
    wild, zero = np.array([0.3, bad, 0.1, 0.0], np.float32), np.zeros(4, np.float32)
    np.testing.assert_array_equal(draw(r, wild, count), draw(r, zero, count))
    np.testing.assert_array_equal(r.log_density(unit(4), [0.3, np.nan, 0, 0]), r.log_density(unit(4), zero))


def test_zero_says_nothing_and_tiny_inputs_next_to_nothing() -> None:
    r = PrivUnitRandomizer(2.0, 1.0, 4)
    y = draw(r, unit(4), 100)
    np.testing.assert_array_equal(r.log_density(y, np.zeros(4)), r.log_density(-y, np.zeros(4)))
    for x in (np.full(4, 1e-30), np.full(4, 1e-20), np.array([1.5e-19, 1e-19, 1e-19, 1e-19])):
        np.testing.assert_array_equal(draw(r, x, 100), draw(r, np.zeros(4), 100))
    short = draw(r, 1e-10 * unit(4), 100)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)


def test_beyond_the_ball_is_its_boundary_whatever_the_scale() -> None:
    u = unit(4)
    for clip_norm in (1e-6, 1.0):
        r = PrivUnitRandomizer(2.0, clip_norm, 4)
        edge = draw(r, clip_norm * u, 100)
        np.testing.assert_allclose(draw(r, 1e9 * clip_norm * u, 100), edge, atol=1e-5)
        np.testing.assert_allclose(edge, draw(PrivUnitRandomizer(2.0, 1.0, 4), u, 100), atol=1e-5)
        np.testing.assert_array_equal(r.log_density(edge, 1e9 * clip_norm * u), r.log_density(edge, clip_norm * u))


def test_refusals() -> None:
    r = PrivUnitRandomizer(1.0, 1.0, 4)
    for shape in ((), (3,), (4, 5)):
        with pytest.raises(ValueError, match=r"expected x with 4 entries on its last axis, got shape="):
            r(np.zeros(shape), key=jax.random.key(0))
        with pytest.raises(ValueError, match=r"expected x with 4 entries"):
            r.mean(np.zeros(shape))
        with pytest.raises(ValueError, match=r"expected y with 4 entries"):
            r.log_density(np.zeros(shape), np.zeros(4))
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="expected clip_norm"):
            PrivUnitRandomizer(1.0, bad, 4)
    for dim in (1, 0, -3, 2.0):
        with pytest.raises(ValueError, match="expected dim"):
            PrivUnitRandomizer(1.0, 1.0, dim)
    with pytest.raises(NotApplicable, match="too small"):
        PrivUnitRandomizer(300.0, 1.0, 2)
