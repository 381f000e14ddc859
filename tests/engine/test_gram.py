"""Norms by Gram matrices are upper bounds, close ones, and clip like the gradients themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.data._base import Clients, Dataset
from dovetail.engine import Engine, Performance, linear
from dovetail.events import Everyone
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import ServerSettings
from dovetail.mechanisms.gaussian import clip_factor
from dovetail.protocols import Cohort, build
from dovetail.randomness import Randomness

USERS, ROWS, FEATURES, CLASSES, CONSTANT = 200, 7, 40, 10, 0.3
ALL_ROWS = np.arange(USERS * ROWS).reshape(USERS, -1)
EVERYBODY = Clients.from_rows(ALL_ROWS)


@jax.jit
def bounds(known, residuals):
    """Of clients that hold all these rows."""
    return linear.bound_gradient_norms(known, residuals, jnp.full(len(residuals), residuals.shape[1]))


def exact(inputs, residuals):
    """Norms of the gradients, formed in double precision."""
    rows = np.concatenate([inputs, np.full((*inputs.shape[:2], 1), CONSTANT)], axis=2).astype(np.float64)
    return np.linalg.norm(np.einsum("nkf,nkc->nfc", rows, residuals.astype(np.float64)), axis=(1, 2))


def random(rng):
    return rng.normal(size=(USERS, ROWS, FEATURES)), rng.normal(size=(USERS, ROWS, CLASSES))


def alike(rng):
    """Views that are the same but for a little, and residuals alike: the usual case."""
    inputs = rng.normal(size=(USERS, 1, FEATURES)) + 0.1 * rng.normal(size=(USERS, ROWS, FEATURES))
    return inputs, rng.normal(size=(USERS, 1, CLASSES)) + 0.1 * rng.normal(size=(USERS, ROWS, CLASSES))


def cancelling(rng, difference):
    """Nearly equal views with residuals that add up to nothing."""
    inputs = rng.normal(size=(USERS, 1, FEATURES)) + difference * rng.normal(size=(USERS, ROWS, FEATURES))
    residuals = rng.normal(size=(USERS, ROWS, CLASSES))
    return inputs, residuals - residuals.mean(axis=1, keepdims=True)


def opposite(rng):
    """Pairs x, x and r, -r exactly, and one row left over that is tiny."""
    inputs, residuals = np.repeat(rng.normal(size=(USERS, 4, FEATURES)), 2, axis=1)[:, :ROWS], np.zeros((1, 1, 1))
    residuals = (
        np.repeat(rng.normal(size=(USERS, 4, CLASSES)), 2, axis=1)[:, :ROWS] * (-1.0) ** np.arange(ROWS)[:, None]
    )
    residuals[:, -1] *= 1e-5
    return inputs, residuals


CASES = {
    "random": random,
    "alike": alike,
    "nearly": functools.partial(cancelling, difference=1e-3),
    "more nearly": functools.partial(cancelling, difference=1e-5),
    "equal": functools.partial(cancelling, difference=0.0),
    "opposite": opposite,
}


def case(name, scale=1.0):
    inputs, residuals = CASES[name](np.random.default_rng(1))
    inputs, residuals = (scale * inputs).astype(np.float32), (residuals / scale).astype(np.float32)
    known = linear.products_of_rows(inputs.reshape(-1, FEATURES), EVERYBODY, constant=CONSTANT)
    return known, inputs, residuals


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e12])
@pytest.mark.parametrize("name", CASES)
def test_a_norm_is_never_below_that_of_what_is_added(name, scale):
    known, inputs, residuals = case(name, scale)
    reach = np.sum(known.lengths.astype(np.float64) * np.linalg.norm(residuals, axis=2), axis=1)
    assert np.all(np.asarray(bounds(known, residuals), np.float64) >= exact(inputs, residuals) + 2.0**-23 * reach)


@pytest.mark.parametrize("name", ["random", "alike"])
def test_in_ordinary_cases_it_is_close(name):
    known, inputs, residuals = case(name)
    assert np.all(bounds(known, residuals) <= exact(inputs, residuals) * (1 + 1e-3))


def test_without_the_bound_on_rounding_it_would_be_below(monkeypatch):
    monkeypatch.setattr(linear, "rounding_bound", lambda rows, classes: 0.0)
    monkeypatch.setattr(linear, "CANCELLED", np.inf)
    for name in ("nearly", "more nearly"):
        known, inputs, residuals = case(name)
        bare = np.asarray(
            jax.jit(lambda known, r: linear.bound_gradient_norms(known, r, jnp.full(USERS, ROWS)))(known, residuals)
        )
        assert np.mean(bare < exact(inputs, residuals)) > 0.1
        if name == "more nearly":
            assert np.min(bare / exact(inputs, residuals)) < 0.5


def test_lengths_are_rounded_up_and_padding_is_nothing():
    inputs = np.random.default_rng(0).normal(size=(6, FEATURES)).astype(np.float32)
    known = linear.products_of_rows(
        inputs, Clients.from_rows(np.array([[0, 1, 2], [3, 3, 3]]), np.array([3, 1])), constant=CONSTANT
    )
    truth = np.sqrt(np.sum(inputs.astype(np.float64) ** 2, axis=1) + CONSTANT**2)
    assert np.all(known.lengths[0] >= truth[:3])
    np.testing.assert_allclose(known.lengths[0], truth[:3], rtol=3e-7)
    np.testing.assert_array_equal(known.lengths[1, 1:], 0)
    assert np.count_nonzero(known.cosines[1]) == 1
    np.testing.assert_allclose(np.diagonal(known.cosines[0]), 1, atol=3e-7)


def test_a_client_with_a_row_beside_which_coefficients_would_be_lost_has_no_finite_norm():
    inputs = np.ones((4, FEATURES), np.float32)
    inputs[1] *= 2.0**100
    known = linear.products_of_rows(inputs, Clients.from_rows(np.array([[0, 1], [2, 3]])), constant=CONSTANT)
    np.testing.assert_array_equal(np.isfinite(known.lengths), [[True, False], [True, True]])
    found = np.asarray(bounds(known, np.full((2, 2, CLASSES), 2.0**-110, np.float32)))
    np.testing.assert_array_equal(np.isfinite(found), [False, True])


def test_it_serves_where_it_pays_and_its_bound_is_small():
    assert linear.uses_gram(2, 10)
    assert linear.uses_gram(16, 10)
    assert not linear.uses_gram(1, 10)
    assert not linear.uses_gram(17, 10)
    assert not linear.uses_gram(16, 1000)
    assert linear.rounding_bound(7, 10) < 4e-5


@functools.cache
def summed(products, clip_norm=0.5):
    def total(weights, chunk, known):
        chunk = chunk._replace(products=known if products else None)
        return linear.scaled_sum(weights, CONSTANT, chunk, ClientUpdate(), lambda norm: clip_factor(norm, clip_norm))

    return jax.jit(total)


def chunk_of(inputs, counts=None):
    labels = np.random.default_rng(2).integers(0, CLASSES, inputs.shape[:2]).astype(np.int32)
    return linear.Chunk(jnp.asarray(inputs), jnp.asarray(labels), jnp.asarray(counts))


def test_the_sum_is_that_of_the_explicit_form():
    rng = np.random.default_rng(3)
    inputs = alike(rng)[0].astype(np.float32)
    counts = rng.integers(0, ROWS + 1, USERS).astype(np.int32)
    known = linear.products_of_rows(
        inputs.reshape(-1, FEATURES), Clients.from_rows(ALL_ROWS, counts), constant=CONSTANT
    )
    weights = jnp.asarray(rng.normal(size=(FEATURES + 1, CLASSES)), jnp.float32)
    fast, slow = (summed(products)(weights, chunk_of(inputs, counts), known) for products in (True, False))
    assert np.abs(slow).max() > 0.1
    np.testing.assert_allclose(fast, slow, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("rows", [2, 7, 16])
def test_no_client_adds_more_than_the_clip_norm(size, rows):
    """Nearly equal records with different labels: where a bare difference cancels."""
    rng = np.random.default_rng(2)
    inputs = (size * (rng.normal(size=(1, FEATURES)) + 1e-6 * rng.normal(size=(rows, FEATURES)))).astype(np.float32)
    one = Clients.from_rows(np.arange(rows)[None])
    known = linear.products_of_rows(inputs, one, constant=CONSTANT)
    weights = jnp.asarray(rng.normal(size=(FEATURES + 1, CLASSES)) / size, jnp.float32)
    total = summed(True)(weights, chunk_of(inputs[None], np.array([rows])), known)
    assert 0 < np.linalg.norm(np.asarray(total, np.float64)) <= 0.5 * (1 + 1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_client_without_a_finite_norm_adds_nothing(bad):
    inputs = alike(np.random.default_rng(3))[0].astype(np.float32)
    weights = jnp.zeros((FEATURES + 1, CLASSES))
    counts = np.full(USERS, ROWS)
    without = counts.copy()
    without[5] = 0
    known = linear.products_of_rows(
        inputs.reshape(-1, FEATURES), Clients.from_rows(ALL_ROWS, without), constant=CONSTANT
    )
    expected = summed(True)(weights, chunk_of(inputs, without), known)
    inputs = inputs.copy()  # what was asked for may still be under way, on the array itself
    inputs[5, 2, :3] = bad
    known = linear.products_of_rows(inputs.reshape(-1, FEATURES), EVERYBODY, constant=CONSTANT)
    np.testing.assert_allclose(summed(True)(weights, chunk_of(inputs, counts), known), expected, atol=1e-5)


def test_padding_that_is_no_number_meets_nobody():
    """A client of one record that is no number pads its row with it; one that is not there reads somebody's."""
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(4, FEATURES)).astype(np.float32)
    inputs[0] = np.nan
    index, weights = np.array([[0, 0, 0], [1, 2, 3]]), jnp.zeros((FEATURES + 1, CLASSES))
    known = linear.products_of_rows(inputs, Clients.from_rows(index, np.array([1, 3])), constant=CONSTANT)
    both = summed(True)(weights, chunk_of(inputs[index], np.array([1, 3])), known)
    alone = summed(True)(weights, chunk_of(inputs[index], np.array([0, 3])), known)
    assert np.isfinite(both).all()
    np.testing.assert_allclose(both, alone, atol=1e-6)


def test_local_steps_have_no_products():
    known, inputs, _ = case("alike")
    chunk = chunk_of(inputs, np.full(USERS, ROWS))._replace(products=known)
    with pytest.raises(ValueError, match="fedsgd"):
        linear.scaled_sum(jnp.zeros((FEATURES + 1, CLASSES)), 1.0, chunk, ClientUpdate(update="fedavg"), jnp.ones_like)


def engine(data, clients, **settings):
    built = models.linear("logistic", data, constant=CONSTANT)
    cohort = Cohort(participation=Everyone(), size=20, min_size=20)
    return Engine(
        model=built,
        dataset=data,
        clients=clients,
        update=settings.pop("update", ClientUpdate()),
        protocol=build("dp_fl", {"clip_norm": 0.3, "noise_multiplier": 1e-6}).settle(cohort, 5 * 7),
        server=ServerSettings(optimizer="sgd", learning_rate=1.0).build(),
        cohort_size=20,
        randomness=Randomness.from_seed(3),
        performance=Performance(**settings),
    )


def trained(engine):
    training = engine.start()
    for index in range(3):
        training = engine.step(training, np.arange(20, dtype=np.int32), index=index, capacity=20)
    return np.asarray(training.params)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_training_on_views_is_training_on_more_records(dtype):
    rng = np.random.default_rng(4)
    inputs = rng.integers(0, 256, (60, 6)).astype(dtype)
    labels = rng.integers(0, 5, 30).astype(np.int32)
    few = {"test_inputs": inputs, "test_labels": np.zeros(60), "num_classes": 5}
    data = Dataset(inputs=inputs, labels=labels, views=2, **few)
    clients = Clients.from_rows(rng.permutation(30)[:20, None])
    viewed = engine(data, clients)
    assert viewed._data.products[0] is not None
    more = Dataset(inputs=inputs, labels=np.repeat(labels, 2), **few)
    plain = engine(more, clients.with_views(2), fast=False)
    assert plain._data.products[0] is None
    np.testing.assert_allclose(trained(viewed), trained(plain), rtol=1e-3, atol=1e-4)
    assert engine(data, clients, update=ClientUpdate(update="fedavg"))._data.products[0] is None
