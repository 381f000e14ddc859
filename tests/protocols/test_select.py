from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from scipy import stats

from dovetail.engine.devices import AXIS, make_mesh
from dovetail.mechanisms import BinaryRandomizedResponse
from dovetail.protocols.flame import _select
from dovetail.protocols.flame._select import signed_counts, top_candidates, top_mask

ALPHA = 1e-4


@functools.partial(jax.jit, static_argnums=1)
def select(x: jax.Array, k: int) -> tuple[jax.Array, _select.Selected]:
    return top_mask(x, k), top_candidates(x, k)


def oracle(x: np.ndarray, k: int) -> np.ndarray:
    """By a full sort: larger magnitude first, then lower index."""
    magnitude = np.abs(np.where(np.isnan(x), 0, x)).astype(np.float64)
    index = np.broadcast_to(np.arange(x.shape[-1]), x.shape)
    order = np.lexsort((index, -magnitude))[..., :k]
    chosen = np.zeros(x.shape, bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def vectors(dim: int) -> np.ndarray:
    """Twelve kinds of update, one in each row."""
    rng = np.random.default_rng(dim)
    normal = rng.normal(size=dim)
    pixels = rng.random(-(-dim // 10)) * (rng.random(-(-dim // 10)) < 0.2)
    rows = [
        normal,
        rng.standard_cauchy(dim),
        np.outer(pixels, rng.normal(size=10)).ravel()[:dim],
        normal * (rng.random(dim) < 0.03),
        np.zeros(dim),
        np.where(rng.random(dim) < 0.5, -0.0, 0.0),
        np.where(rng.random(dim) < 0.5, -3.0, 3.0),
        np.clip(normal, -0.5, 0.5),
        rng.integers(-3, 4, dim),
        rng.choice([np.nan, np.inf, -np.inf, 1.0, 0.0, -2.0], dim),
        normal * 1e-42,
        rng.choice([1e-45, -1e-45, 3e-45, 0.0, np.finfo(np.float32).max, np.finfo(np.float32).tiny], dim),
    ]
    return np.array(rows, np.float32)


def check(x: np.ndarray, k: int) -> None:
    """Mask and list against the sort: the right ones, each once, and no index out of range."""
    mask, (index, chosen) = jax.tree.map(np.asarray, select(x, k))
    np.testing.assert_array_equal(mask, oracle(x, k))
    assert index.shape == chosen.shape
    assert ((index >= 0) & (index < x.shape[1])).all()
    times = np.zeros(x.shape, int)
    np.add.at(times, (np.arange(len(x))[:, None], index), chosen)
    np.testing.assert_array_equal(times, mask)


@pytest.mark.parametrize(("dim", "k"), [(1, 1), (12, 5), later(64, 64), later(100, 10), (100, 100), later(7850, 157)])
def test_exactly_the_k_largest_are_selected(dim: int, k: int) -> None:
    check(vectors(dim), k)


def test_short_updates_take_the_long_way_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_select, "_SHORT", 0)
    check(vectors(37), 1)


@pytest.mark.parametrize("above", [0, 1, 20, 30, 39])
def test_larger_entries_behind_many_ties_are_not_crowded_out(above: int) -> None:
    """More of the 600 are equal to the fortieth than the lists hold."""
    x = np.ones((3, 600), np.float32)
    x[0, 600 - above :], x[1, :above], x[2, 300 : 300 + above] = 2, -2, np.linspace(2, 3, above)
    check(x, 40)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(pool=st.lists(st.floats(width=32), min_size=1, max_size=40), seed=st.integers(0, 2**32 - 1))
def test_any_mixture_of_floats_is_ranked_as_by_sorting(pool: list[float], seed: int) -> None:
    check(np.random.default_rng(seed).choice(np.array(pool, np.float32), (12, 100)), 10)


def test_it_works_under_vmap_in_a_loop_on_every_device() -> None:
    x = np.stack([vectors(100)] * 4)

    def of_device(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, marked: jax.Array) -> jax.Array:
            return marked.at[i].set(jax.vmap(lambda row: top_mask(row, 10))(x[i]))

        return jax.lax.fori_loop(0, len(x), step, jnp.zeros(x.shape, bool))

    split = PartitionSpec(AXIS)
    run = jax.shard_map(of_device, mesh=make_mesh(2), in_specs=split, out_specs=split, check_vma=False)
    np.testing.assert_array_equal(jax.jit(run)(x), oracle(x, 10))


@pytest.mark.parametrize("k", [0, 101, 2.0])
def test_an_impossible_k_is_refused(k: float) -> None:
    with pytest.raises(ValueError, match=r"expected .*k"):
        top_mask(jnp.zeros(100), k)


# Reports


counts = jax.jit(signed_counts, static_argnums=(1, 2), static_argnames="gamma")
KEYS, EVERYONE = jax.random.split(jax.random.key(1), 12), np.ones(12, bool)


def test_present_clients_report_k_coordinates_and_absent_ones_nothing() -> None:
    x, present = vectors(100), np.arange(12) % 3 > 0
    ones, zeros = counts(x, 10, 1.0, key=KEYS, present=present)
    assert ones.dtype == zeros.dtype == jnp.int32
    np.testing.assert_array_equal(ones + zeros, oracle(x, 10)[present].sum(axis=0))
    np.testing.assert_array_equal(sum(counts(x, 10, 1.0, key=KEYS, present=EVERYONE)), oracle(x, 10).sum(axis=0))


def test_with_a_key_a_client_neither_chunks_nor_places_matter() -> None:
    x, order = vectors(100), np.random.default_rng(0).permutation(12)
    whole = np.array(counts(x, 10, 1.0, key=KEYS, present=EVERYONE))
    chunks = [counts(x, 10, 1.0, key=KEYS, present=np.arange(12) // 4 == i) for i in range(3)]
    np.testing.assert_array_equal(whole, np.sum(np.array(chunks), axis=0))
    np.testing.assert_array_equal(whole, counts(x[order], 10, 1.0, key=KEYS[order], present=EVERYONE))


def test_values_beyond_the_clip_are_reported_as_they_are() -> None:
    x = np.zeros((12, 100), np.float32)
    x[:, :10] = [1, -1, 2, -2, np.inf, -np.inf, 1e30, -1e30, 5, -5]
    ones, zeros = counts(x, 10, 1.0, key=KEYS, present=EVERYONE)
    np.testing.assert_array_equal(ones[:10], [12, 0] * 5)
    np.testing.assert_array_equal(zeros[:10], [0, 12] * 5)


VALUES = np.array([-3.0, -1.0, -0.9, -0.5, -0.2, 0.2, 0.4, 0.7, 0.99, 2.0], np.float32)


def p_value(ones: np.ndarray, clients: int, eps_local: float | None) -> float:
    """Of the ones on `VALUES`, clipped to [-1, 1], if they are rounded, or reported at this budget."""
    position = (np.clip(VALUES.astype(np.float64), -1, 1) + 1) / 2
    prob = position if eps_local is None else np.exp(BinaryRandomizedResponse(eps_local).log_density(1, position))
    sure = (prob == 0) | (prob == 1)
    if (ones[sure] != clients * prob[sure]).any():
        return 0.0
    distance = (ones - clients * prob)[~sure] ** 2 / (clients * prob * (1 - prob))[~sure]
    return stats.chi2.sf(distance.sum(), len(distance))


@pytest.mark.parametrize(("eps_local", "dim"), [(None, 20), (0.5, 20), (0.5, 100)])
def test_reports_follow_the_law_of_randomized_response(eps_local: float | None, dim: int) -> None:
    clients = 40_000
    x = np.broadcast_to(np.append(VALUES, np.full(dim - 10, 0.1, np.float32)), (clients, dim))
    gamma = 0.0 if eps_local is None else BinaryRandomizedResponse(eps_local).gamma
    ones = np.asarray(counts(x, 10, 1.0, key=jax.random.split(jax.random.key(3), clients), gamma=gamma)[0])[:10]
    assert p_value(ones, clients, eps_local) > ALPHA
    for other in (0.45, 0.55) if eps_local else (5.0, 6.0):
        assert p_value(ones, clients, other) < 1e-9


def test_reports_of_clients_and_coordinates_are_independent() -> None:
    trials, x = 20_000, np.where(np.arange(12) < 6, 0.3, 0.0).astype(np.float32)[None]
    keys = jax.random.split(jax.random.key(5), (trials, 2))

    def bits_of_two(keys: jax.Array) -> jax.Array:
        return jnp.concatenate([signed_counts(x, 6, 1.0, key=key[None])[0][:6] for key in keys])

    bits = np.asarray(jax.jit(jax.vmap(bits_of_two))(keys))
    correlation = np.corrcoef(bits.T)[np.triu_indices(12, 1)]
    assert np.abs(correlation).max() * np.sqrt(trials) < stats.norm.isf(ALPHA / (2 * 66))


@pytest.mark.parametrize("nothing", [0.0, np.nan])
def test_one_key_gives_every_client_its_own_coins_where_it_has_nothing_to_say(nothing: float) -> None:
    ones, zeros = counts(np.full((400, 12), nothing, np.float32), 12, 1.0, key=jax.random.key(0))
    np.testing.assert_array_equal(ones + zeros, 400)
    assert stats.chi2.sf(((ones - 200) ** 2 / 100).sum(), 12) > ALPHA


@pytest.mark.parametrize("bad", [{"clip_value": 0.0}, {"gamma": -0.1}, {"gamma": 1.5}])
def test_impossible_reports_are_refused(bad: dict[str, float]) -> None:
    settings = {"clip_value": 1.0, **bad}
    with pytest.raises(ValueError, match=rf"expected .*{next(iter(bad))}"):
        signed_counts(jnp.zeros((2, 12)), 3, key=jax.random.key(0), **settings)
