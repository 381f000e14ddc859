"""Clients of unequal size are computed apart, which may change the speed of a round and nothing else."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import later

from dovetail.data._base import Clients, Dataset
from dovetail.engine import Engine, Performance, linear, rounds
from dovetail.engine.chunks import MOST_CLASSES, size_classes
from dovetail.events import Everyone
from dovetail.learners import client, models
from dovetail.learners.client import ClientUpdate, local_update, visiting_order
from dovetail.learners.server import ServerSettings
from dovetail.protocols import Cohort, build
from dovetail.randomness import Randomness

COUNTS = np.array([1, 1, 12, 0, 1, 1, 9, 10, 12, 1], np.int32)
CLASSES, FEATURES = 3, 5


def rows_of(classes):
    return sum(len(one.members) * one.width for one in classes)


@pytest.mark.parametrize("most", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(5))
def test_everybody_is_in_one_class_that_has_room(seed, most):
    counts = np.random.default_rng(seed).pareto(0.7, 300).astype(np.int32)
    classes = size_classes(counts, numbers=10**6, most=most)
    np.testing.assert_array_equal(np.sort(np.concatenate([one.members for one in classes])), np.arange(300))
    assert 1 <= len(classes) <= (most or MOST_CLASSES)
    for one in classes:
        assert one.width == max(1, counts[one.members].max())
    if len(classes) < (most or MOST_CLASSES):
        assert rows_of(classes) <= 2.5 * np.maximum(counts, 1).sum()


def test_one_large_client_is_alone_and_equals_stay_together():
    counts = np.append(np.full(2000, 10), 5000)
    small, large = size_classes(counts, numbers=20)
    assert (small.width, len(small.members)) == (10, 2000)
    assert large.members.tolist() == [2000]
    assert len(size_classes(np.full(5000, 600) - np.arange(5000) % 2, numbers=784)) == 1
    assert len(size_classes(COUNTS, numbers=5)) == 1, "what is small is not worth another program"


@pytest.mark.parametrize(("clients", "batch"), [(200, 10), (3, 10), (1000, 1)])
def test_classes_of_local_steps_cost_little_more_than_the_best_eight(clients, batch):
    counts = np.clip(np.random.default_rng(clients).lognormal(3, 1, clients).astype(np.int32), 0, 400)
    classes = size_classes(counts, numbers=10**6, batch=batch)
    np.testing.assert_array_equal(np.sort(np.concatenate([one.members for one in classes])), np.arange(clients))
    assert [one.width for one in classes] == [max(1, counts[one.members].max()) for one in classes]
    assert len(classes) <= MOST_CLASSES
    padded = sum(len(one.members) * -(-one.width // batch) for one in classes)
    assert padded <= 1.4 * (-(-np.maximum(counts, 1) // batch)).sum()
    assert len(size_classes(np.full(2000, 10), numbers=10**6, batch=batch)) == 1


def trained(protocol, settings, update, model, *, size_classes, fast=True, diagnostics=False):
    rng = np.random.default_rng(0)
    total = int(COUNTS.sum())
    inputs = rng.normal(size=(total, FEATURES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, total).astype(np.int32)
    data = Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=CLASSES)
    data, built = models.build(model, data)
    cohort = Cohort(participation=Everyone(), size=len(COUNTS), min_size=0)
    dim = jax.flatten_util.ravel_pytree(built.init(jax.random.key(0)))[0].size
    engine = Engine(
        model=built,
        dataset=data,
        clients=Clients(records=rng.permutation(total).astype(np.int32), counts=COUNTS),
        update=update,
        protocol=build(protocol, settings).settle(cohort, dim),
        server=ServerSettings(optimizer="sgd", learning_rate=0.5).build(),
        cohort_size=len(COUNTS),
        randomness=Randomness.from_seed(1),
        performance=Performance(size_classes=size_classes, fast=fast, chunk=2),
        diagnostics=diagnostics,
    )
    training = engine.start()
    for index, left in enumerate((2, 7)):  # without the largest, without one of the others
        users = np.delete(np.arange(len(COUNTS), dtype=np.int32), left)
        training = engine.step(training, users, index=index, capacity=len(COUNTS))
    return np.asarray(training.params), engine, training.diagnostics


NOISY = {"clip_norm": 0.3, "noise_multiplier": 0.5}
FEDAVG = ClientUpdate(update="fedavg", epochs=2, batch=4, learning_rate=0.3)


@pytest.mark.parametrize(
    ("protocol", "settings", "update", "model", "more", "strategies"),
    [
        ("dp_fl", NOISY, ClientUpdate(), "logistic", {}, ["linear"] * 2),
        ("dp_fl", NOISY, FEDAVG, "mlp", {"diagnostics": True}, ["general"] * 2),
        ("dp_fl", {"clip": "median", "noise_multiplier": 0.5}, ClientUpdate(), "mlp", {}, ["clipped", "scaled"]),
        ("ss_simple", {"clip_value": 0.1, "eps_local": 3.0}, FEDAVG, "logistic", {"fast": False}, ["general"] * 2),
    ],
    ids=["linear", "general", "median", "faithful"],
)
def test_classes_change_no_model(protocol, settings, update, model, more, strategies):
    (one, _, seen), (several, engine, also_seen) = (
        trained(protocol, settings, update, model, size_classes=most, **more) for most in (1, len(strategies))
    )
    assert [work.strategy for work in engine._classes] == strategies
    assert np.abs(one).max() > 0.01
    np.testing.assert_allclose(several, one, atol=2e-5)
    np.testing.assert_allclose(np.asarray(also_seen), np.asarray(seen), rtol=1e-4)


def test_clients_one_after_the_other_cost_what_they_have_and_give_the_same_model(monkeypatch):
    together, engine, _ = trained("dp_fl", NOISY, FEDAVG, "mlp", size_classes=1)
    assert [work.one_by_one for work in engine._classes] == [True]
    monkeypatch.setattr(rounds, "trains_one_by_one", lambda *_, **__: False)
    apart, engine, _ = trained("dp_fl", NOISY, FEDAVG, "mlp", size_classes=2)
    assert [work.one_by_one for work in engine._classes] == [False] * 2
    np.testing.assert_allclose(apart, together, atol=2e-5)


@pytest.mark.parametrize(("clients", "devices", "chunk"), [(200, 2, 7), (5, 4, 3), (1, 2, 1), (0, 2, 2), (23, 3, 4)])
def test_devices_cost_about_the_same(clients, devices, chunk):
    costs = np.random.default_rng(0).lognormal(0, 1, 500).astype(int)
    users = np.random.default_rng(1).permutation(500)[:clients]
    sharder = rounds.ClientSharder([], [], SimpleNamespace(size=devices), costs=costs)
    chunks = -(-clients // (devices * chunk))
    places = sharder._balanced_places(users, (chunks, devices, chunk))
    assert len(set(places.tolist())) == clients
    assert places.max(initial=-1) < chunks * devices * chunk
    work = np.bincount(places // chunk % devices, weights=costs[users], minlength=devices)
    assert np.ptp(work) <= costs[users].max(initial=0)


@pytest.mark.parametrize("more", [later({"update": "fedavg"}), {"update": "fedprox", "mu": 0.3}])
def test_a_loop_of_many_steps_is_those_steps(more, monkeypatch):
    """Of linear models: unrolled, and in a loop whose last batch is not full."""
    update = ClientUpdate(epochs=2, batch=5, learning_rate=0.1, **more)
    unrolled, engine, _ = trained("dp_fl", NOISY, update, "logistic", size_classes=2)
    assert [work.strategy for work in engine._classes] == ["linear"] * 2
    monkeypatch.setattr(linear, "_UNROLLED", 2)
    looped, engine, _ = trained("dp_fl", NOISY, update, "logistic", size_classes=2)
    assert [work.strategy for work in engine._classes] == ["linear"] * 2
    np.testing.assert_allclose(looped, unrolled, atol=2e-5)


def test_many_steps_with_one_record_are_neither_unrolled_nor_beside_sums_that_do_not_fit():
    """They take the general way, and its sum fits that of clients who go another."""
    update = ClientUpdate(update="fedavg", epochs=65, batch=1, learning_rate=0.01)
    one, engine, _ = trained("dp_fl", NOISY, update, "logistic", size_classes=1)
    assert [work.strategy for work in engine._classes] == ["linear"]
    several, engine, _ = trained("dp_fl", NOISY, update, "logistic", size_classes=2)
    assert [work.strategy for work in engine._classes] == ["scaled", "linear"]
    np.testing.assert_allclose(several, one, atol=2e-5)


def test_the_order_of_a_clients_records_does_not_depend_on_its_class():
    key = jax.random.key(7)
    narrow, wide = (visiting_order(jnp.int32(9), records, key=key) for records in (12, 100))
    np.testing.assert_array_equal(narrow[:9], wide[:9])
    assert sorted(narrow[:9].tolist()) == list(range(9))


def test_a_gradient_of_many_records_is_summed_in_blocks(monkeypatch):
    rng = np.random.default_rng(4)
    inputs, labels = jnp.asarray(rng.normal(size=(23, 4)), jnp.float32), jnp.asarray(rng.integers(0, 3, 23))
    params = jnp.asarray(rng.normal(size=12), jnp.float32)
    update = local_update(ClientUpdate(), lambda flat, x: x @ flat.reshape(4, 3))
    at_once = update(params, inputs, labels, jnp.int32(21))
    monkeypatch.setattr(client, "_AT_ONCE", 8)
    np.testing.assert_allclose(update(params, inputs, labels, jnp.int32(21)), at_once, atol=1e-6)
    np.testing.assert_array_equal(update(params, inputs, labels, jnp.int32(0)), 0)
