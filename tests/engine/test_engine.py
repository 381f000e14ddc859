"""Fast paths, chunks and devices may change speed, never the model."""

import functools
import gc
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import diagonal
from jax.flatten_util import ravel_pytree

from dovetail.data._base import Clients, Dataset
from dovetail.engine import Engine, Performance, linear, rounds
from dovetail.events import Everyone
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import ServerSettings
from dovetail.mechanisms.gaussian import clip_factor
from dovetail.protocols import Cohort, build
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.randomness import Randomness
from dovetail.sampling import RoundSample

NUM_CLIENTS, WIDTH, FEATURES, CLASSES = 37, 9, 12, 4


def dataset(dtype=np.float32):
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (200, 3, 4)).astype(np.uint8)
    inputs = inputs if dtype is np.uint8 else (inputs / 255).astype(np.float32)
    labels = rng.integers(0, CLASSES, 200).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs[:50], test_labels=labels[:50], num_classes=CLASSES)


def clients(width=WIDTH):
    rng = np.random.default_rng(1)
    counts = rng.integers(1, width + 1, NUM_CLIENTS).astype(np.int32)
    return Clients.from_rows(rng.integers(0, 200, (NUM_CLIENTS, width)), counts)


UPDATES = {
    "fedsgd": ClientUpdate(),
    "fedavg": ClientUpdate(update="fedavg", epochs=2, batch=4, learning_rate=0.5),
    "fedprox": ClientUpdate(update="fedprox", epochs=2, batch=4, learning_rate=0.5, mu=0.4),
}
PROTOCOLS = {
    "fedavg": {},
    "dp_fl": {"clip_norm": 0.3, "noise_multiplier": 1.0},
    "ldp_fl": {"randomizer": "laplace", "clip_value": 0.1, "eps_local": 1.0},
}


SHUFFLED = {
    "ss_simple": {"clip_value": 0.1, "eps_local": 1.0},
    "ss_double": {"clip_value": 0.1, "eps_local": 1.0, "beta": 0.4},
    "apes": {"clip_value": 0.1, "budgets": [2.0, 8.0]},
}
COHORT = Cohort(participation=Everyone(), size=NUM_CLIENTS, min_size=NUM_CLIENTS)


def dim_of(model):
    return len(ravel_pytree(model.init(jax.random.key(0)))[0])


def train(
    *,
    model="logistic",
    update="fedavg",
    protocol="dp_fl",
    data=None,
    rounds=3,
    width=WIDTH,
    settings=None,
    diagnostics=False,
    **performance,
):
    data = data or dataset()
    data, built = models.build(model, data)
    if isinstance(protocol, str):
        protocol = build(protocol, settings or {**PROTOCOLS, **SHUFFLED}[protocol])
    engine = Engine(
        model=built,
        dataset=data,
        clients=clients(width),
        update=UPDATES[update],
        protocol=protocol.settle(COHORT, dim_of(built)),
        server=ServerSettings(optimizer="sgd", learning_rate=0.7, options={"momentum": 0.9}).build(),
        cohort_size=20,
        randomness=Randomness.from_seed(3),
        performance=Performance(**performance),
        diagnostics=diagnostics,
    )
    training = engine.start()
    for index in range(rounds):
        users = np.sort(np.random.default_rng(index).choice(NUM_CLIENTS, 20 + index, replace=False)).astype(np.int32)
        training = engine.step(training, users, index=index, capacity=25)
    return np.asarray(training.params), engine, training


@functools.cache
def baseline(protocol):
    return train(protocol=protocol, model="mlp")[0]


SHORT = {("explicit", "fedsgd"), ("few", "fedavg"), ("one-record", "fedsgd"), ("one-record", "fedprox")}
LINEAR = [
    pytest.param(
        *(update, protocol, width),
        # "few" is one batch an epoch; fedprox is fedavg and its term
        marks=[] if (kind, update) in SHORT else [pytest.mark.soak],
        id=f"{kind}-{update}-{protocol}",
    )
    for kind, width in (("explicit", WIDTH), ("few", 3), ("one-record", 1))
    for update, protocol in [("fedsgd", "fedavg"), *((update, "dp_fl") for update in UPDATES)]
]


@pytest.mark.parametrize(("update", "protocol", "width"), LINEAR)
def test_the_linear_forms_equal_the_general_path(update, protocol, width):
    slow, engine, _ = train(update=update, protocol=protocol, width=width, fast=False)
    assert engine._classes[0].strategy == "general"
    fast, engine, _ = train(update=update, protocol=protocol, width=width, fast=True)
    assert engine._classes[0].strategy == "linear"
    assert np.abs(slow).max() > 0.01
    np.testing.assert_allclose(fast, slow, atol=2e-5)


@pytest.mark.parametrize(
    ("protocol", "performance"), diagonal(["dp_fl", "ldp_fl"], [{"chunk": 7}, {"devices": 1, "chunk": 5}])
)
def test_results_depend_on_neither_chunks_nor_devices(protocol, performance):
    base = baseline(protocol)
    other, _, _ = train(protocol=protocol, model="mlp", **performance)
    np.testing.assert_allclose(other, base, atol=3e-5)


def test_clients_side_by_side_train_as_one_after_the_other(monkeypatch):
    monkeypatch.setattr(rounds, "trains_one_by_one", lambda *_, **__: False)
    np.testing.assert_allclose(train(model="mlp")[0], baseline("dp_fl"), atol=3e-5)


@functools.cache
def clipped_sum(update):
    """One program a number of records."""
    scaling = functools.partial(clip_factor, clip_norm=0.5)
    return jax.jit(lambda weights, chunk: linear.scaled_sum(weights, 1.0, chunk, UPDATES[update], scaling))


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_no_client_adds_more_than_the_clip_norm(size, width):
    """Nearly equal records with different labels: where a norm computed as a difference would cancel."""
    rng = np.random.default_rng(2)
    base = rng.normal(size=(1, FEATURES))
    inputs = (size * (base + 1e-6 * rng.normal(size=(width, FEATURES)))).astype(np.float32)
    weights = jnp.asarray(rng.normal(size=(FEATURES + 1, CLASSES)) / size, jnp.float32)
    for update in ("fedsgd", "fedavg"):
        chunk = linear.Chunk(
            jnp.asarray(inputs)[None], jnp.arange(width)[None] % CLASSES, jnp.full((1,), width, jnp.int32)
        )
        total = clipped_sum(update)(weights, chunk)
        assert np.linalg.norm(np.asarray(total, np.float64)) <= 0.5 * (1 + 1e-5)


def test_there_are_two_devices_to_test_with():
    assert len(jax.devices()) == 2


def test_pixels_and_floats_are_read_alike():
    as_bytes, _, _ = train(data=dataset(np.uint8))
    as_floats, _, _ = train(data=dataset())
    np.testing.assert_allclose(as_bytes, as_floats, atol=1e-5)


def test_a_round_of_nobody_is_a_round_of_noise():
    _, engine, _ = train(rounds=0)
    start, moved = np.asarray(engine.start().params), []
    for index in range(400):
        after = engine.step(engine.start(), np.zeros(0, np.int32), index=index, capacity=25)
        moved.append((np.asarray(after.params) - start) / 0.7 * 20)
    noise = np.concatenate(moved)
    error = 4.5 / np.sqrt(2 * noise.size)
    assert error < 0.06
    assert np.isfinite(noise).all()
    assert noise.std() == pytest.approx(0.3, rel=error), "clip_norm x noise_multiplier, over the public size"


def test_a_larger_draw_than_planned_is_taken_whole():
    _, engine, _ = train(rounds=0, protocol="fedavg")
    everyone = np.arange(NUM_CLIENTS, dtype=np.int32)
    planned = engine.step(engine.start(), everyone, index=0, capacity=NUM_CLIENTS)
    surprised = engine.step(engine.start(), everyone, index=0, capacity=5)
    np.testing.assert_allclose(planned.params, surprised.params, atol=1e-6)


def test_noise_differs_from_round_to_round_and_seed_to_seed():
    _, engine, _ = train(rounds=0)
    nobody = np.zeros(0, np.int32)
    one, two = (np.asarray(engine.step(engine.start(), nobody, index=i, capacity=5).params) for i in (0, 1))
    again = np.asarray(engine.step(engine.start(), nobody, index=0, capacity=5).params)
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - two).max() > 1e-3


def test_accuracy_counts_what_the_model_gets_right():
    _, engine, training = train(protocol="fedavg", rounds=3)
    inputs, labels = dataset().test_inputs.reshape(50, -1), dataset().test_labels
    weights = engine.model_arrays(training)["params"]
    by_hand = (np.argmax(inputs @ weights[:-1] + weights[-1], axis=1) == labels).mean()
    assert engine.metrics(training)["accuracy"] == pytest.approx(by_hand)


def test_an_engine_is_let_go_with_its_data():
    """A study of a hundred trainings must not keep a hundred copies of its data."""
    _, engine, training = train(protocol="dp_fl", rounds=1)
    engine.metrics(training)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None


def test_too_many_devices_are_refused():
    with pytest.raises(ValueError, match=r"expected devices in 1\.\.2, got devices=3"):
        train(devices=3)


WORKER = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
sys.path.insert(0, sys.argv[4])
import numpy as np
from test_engine import train
assert len(jax.devices()) == 2 and len(jax.local_devices()) == 1
chosen = {"dp_fl": "logistic", "ldp_fl": "mlp"}
params = {name: train(protocol=name, model=model)[2].params for name, model in chosen.items()}
if sys.argv[2] == "0":
    np.savez(sys.argv[3], **{name: np.asarray(value.addressable_data(0)) for name, value in params.items()})
"""


@pytest.mark.soak  # a shorter form, from the command line, is in tests/cli/test_cli.py
def test_two_processes_train_the_model_of_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent.parent), str(here.parent)])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(rank), str(tmp_path / "model.npz"), str(here)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=180)
        assert worker.returncode == 0, errors[-2000:]
    together = np.load(tmp_path / "model.npz")
    np.testing.assert_allclose(together["dp_fl"], train(protocol="dp_fl")[0], atol=2e-5)
    np.testing.assert_allclose(together["ldp_fl"], train(protocol="ldp_fl", model="mlp")[0], atol=3e-5)


@pytest.mark.parametrize("protocol", ["ss_simple", "apes"])
def test_the_faithful_path_trains_the_same_model(protocol):
    """Where a protocol says that both paths agree from the same keys; absent clients send nothing in either."""
    quick, _, _ = train(protocol=protocol, update="fedsgd")
    faithful, _, _ = train(protocol=protocol, update="fedsgd", fast=False)
    other_chunks, _, _ = train(protocol=protocol, update="fedsgd", fast=False, chunk=3)
    np.testing.assert_allclose(quick, faithful, atol=2e-5)
    np.testing.assert_allclose(faithful, other_chunks, atol=2e-5)
    assert np.abs(quick).max() > 1e-3


def test_dummies_differ_between_the_paths_and_little_else_does():
    quick, faithful = (train(protocol="ss_double", update="fedsgd", fast=fast)[0] for fast in (True, False))
    assert 0 < np.abs(quick - faithful).max() < 2.0


ADAPTIVE = {"clip": "adaptive", "clip_norm": 0.02, "noise_multiplier": 0.5, "std_count": 1.0}
MEDIAN = {"clip": "median", "clip_norm": 5.0, "noise_multiplier": 1e-6}


@pytest.mark.parametrize("settings", [ADAPTIVE, MEDIAN], ids=["adaptive", "median"])
def test_clip_norms_that_move_depend_on_neither_chunks_nor_paths(settings):
    base, _, training = train(settings=settings, update="fedsgd")
    other, _, again = train(settings=settings, update="fedsgd", fast=False, chunk=4)
    np.testing.assert_allclose(other, base, atol=3e-5)
    np.testing.assert_allclose(training.protocol.clip_norm, again.protocol.clip_norm, rtol=1e-5)
    assert abs(float(training.protocol.clip_norm) / settings["clip_norm"] - 1) > 0.05, "it moved"


def test_the_median_is_that_of_the_round_and_clips_it():
    """Almost no noise, one round: the same as clipping each user's update, seen alone, to the median of their norms."""
    params, _, training = train(settings=MEDIAN, rounds=1)
    free, one, _ = train(protocol="fedavg", rounds=0)
    users = np.sort(np.random.default_rng(0).choice(NUM_CLIENTS, 20, replace=False)).astype(np.int32)
    alone = []
    for user in users:
        moved = one.step(one.start(), np.array([user], np.int32), index=0, capacity=25)
        alone.append((np.asarray(moved.params) - free) / 0.7 * 20)
    norms = np.linalg.norm(alone, axis=1)
    assert float(training.protocol.clip_norm) == pytest.approx(np.median(norms), rel=1e-4)
    clipped = np.array(alone) * np.minimum(1, np.median(norms) / norms)[:, None]
    np.testing.assert_allclose((params - free) / 0.7 * 20, clipped.sum(axis=0), atol=1e-4)


def test_a_rounds_noise_scale_reaches_its_noise():
    nobody = np.zeros(0, np.int32)
    _, engine, _ = train(rounds=0)
    one, four = (
        np.asarray(
            engine.step(engine.start(), nobody, index=0, capacity=5, sample=RoundSample(nobody, 20, scale)).params
        )
        for scale in (1.0, 4.0)
    )
    start = np.asarray(engine.start().params)
    np.testing.assert_allclose(four - start, 4 * (one - start), rtol=1e-5, atol=1e-7)


class Counting(DpFl):
    """What is released is the number of clients whose updates were added up, in every coordinate."""

    def tally_of_sum(self, total, count, *, key):
        return jnp.full_like(total, count)

    def estimate(self, tally, size, state, *, key):
        return tally, state


@pytest.mark.parametrize(
    ("model", "width", "update", "strategy"),
    [
        ("logistic", WIDTH, "fedavg", "linear"),
        ("mlp", 1, "fedsgd", "clipped"),
    ],
)
def test_every_sum_counts_the_first_client_and_no_padding(model, width, update, strategy):
    protocol = Counting(clip_norm=0.3, noise_multiplier=1.0)
    with_first, engine, _ = train(model=model, width=width, update=update, protocol=protocol, rounds=1, fast=True)
    assert engine._classes[0].strategy == strategy
    moved = with_first - train(model=model, width=width, update=update, protocol=protocol, rounds=0)[0]
    np.testing.assert_allclose(moved, 0.7 * 20, rtol=1e-5)  # 20 users, among them user 0, at a server's rate of .7


def test_a_draw_beyond_the_capacity_costs_time_alone():
    """What is drawn may be more than the users that it comes from: records of them."""
    users = np.arange(30, dtype=np.int32)
    _, engine, _ = train(rounds=0, chunk=4)
    few, many = (
        np.asarray(
            engine.step(engine.start(), users[:2], index=0, capacity=capacity, sample=RoundSample(users, 30)).params
        )
        for capacity in (1, 40)
    )
    np.testing.assert_array_equal(few, many)


def test_diagnostics_depend_on_neither_path_nor_chunks_nor_the_protocol():
    """The first round's raw updates are the same under any protocol; absent users do not count."""
    found = [
        train(protocol=protocol, rounds=1, diagnostics=True, fast=fast, chunk=chunk)[2].diagnostics
        for protocol, fast, chunk in (("dp_fl", True, None), ("dp_fl", False, 3), ("fedavg", True, 7))
    ]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4)
    assert min(found[0]) > 0


def test_norms_that_no_square_can_hold_still_clip():
    """A residual of about 1e-20 on an input of 1e18: the square underflows, the product of norms does not."""
    clip_norm = 1e-4
    weights = jnp.zeros((5, 3)).at[0, 0].set(50e-18)
    record = linear.Chunk(jnp.zeros((1, 1, 4)).at[0, 0, 0].set(1e18), jnp.zeros((1, 1), jnp.int32), jnp.ones(1, int))
    total = linear.scaled_sum(weights, 1.0, record, ClientUpdate(), lambda norm: clip_factor(norm, clip_norm))
    assert 0 < np.linalg.norm(np.asarray(total, np.float64)) <= clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e18, 1e37, 1.5e38])
def test_lengths_are_right_where_squares_are_not_numbers(scale):
    rows = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32) * np.float32(scale)
    truth = np.linalg.norm(rows.astype(np.float64), axis=1)
    np.testing.assert_allclose(jax.jit(linear.row_norms)(rows), truth, rtol=1e-5)
    huge = np.full((1, 3), np.inf, np.float32)
    assert not np.isfinite(linear.row_norms(huge)).any()
