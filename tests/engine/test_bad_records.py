"""No record can hurt another: whoever has no finite update counts as zero, on every path of every protocol.

A user with such a record is compared, from the same keys, with one that has no records at all: it is there, it is
randomized and counted, and its update is zero. Data are arguments of an engine's program, so that one program runs
both worlds, and all kinds of bad records.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine, Performance
from dovetail.engine.rounds import first_parameters
from dovetail.events import Everyone
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import ServerSettings
from dovetail.protocols import PROTOCOLS, Cohort, build, fill_settings
from dovetail.randomness import Randomness
from dovetail.sampling import Items, RoundSample
from dovetail.shufflers import ShuffledReports

USERS, WIDTH, FEATURES, CLASSES = 6, 3, 5, 3
SCALARS = ("binary_sum", "real_sum")  # one number a user
SIGNS = np.array([1, -1, 1, 1, -1], np.float32)
NOT_NUMBERS = {"nan": np.float32(np.nan), "inf": np.float32(np.inf), "huge": np.float32(3e38)}
DENORMAL = np.float32(1e-42)

SETTINGS = [
    (name, settings, number)
    for name, cls in PROTOCOLS.items()
    for number, settings in enumerate(cls.variants(cls.only_dim or 18, USERS))
]


class Path(NamedTuple):
    """How clients' work is added up: what decides between the ways, and the way that is then taken by `dp_fl`."""

    model: str
    records: int
    update: str
    fast: bool
    strategy: str


PATHS = [
    Path("logistic", 1, "fedsgd", True, "linear"),
    Path("logistic", WIDTH, "fedavg", True, "linear"),
    Path("mlp", 1, "fedsgd", True, "clipped"),
    Path("mlp", WIDTH, "fedavg", True, "general"),
    Path("logistic", 1, "fedsgd", False, "general"),
    Path("mlp", WIDTH, "fedavg", False, "general"),
]


def short(number, name, settings, path):
    """Whether it is in `make test`: two variants of each protocol a fast or the slow path, every path one of a kind.

    `dp_fl` has a sum that paths can form without each update, `ss_simple` needs each; the rest is in `make soak`.
    """
    if name == "ss_simple":
        return path in (PATHS[0], PATHS[3], PATHS[4])
    return path == PATHS[4 * (number % 2)] or (name == "dp_fl" and "clip" not in settings)


def cases():
    """Everything that differs: items and numbers have ways of their own, and few of them."""
    for number, (name, settings, variant) in enumerate(SETTINGS):
        for path in PATHS:
            if name in (*SCALARS, "central_sub", "local_sub") and path.records > 1:
                continue
            if name in SCALARS and path.model == "mlp":
                continue
            if path == PATHS[-1] and name not in ("dp_fl", "ss_simple"):
                continue  # from updates on the same as the path before it
            label = "-".join([name, *(v for v in settings.values() if isinstance(v, str)), path.model, path.update])
            marks = (
                [] if short(number, name, settings, path) and (variant < 2 or name == "dp_fl") else [pytest.mark.soak]
            )
            yield pytest.param(name, settings, path, id=f"{label}-{'fast' if path.fast else 'slow'}", marks=marks)


def dataset():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(USERS * WIDTH, FEATURES)).astype(np.float32)
    labels = rng.integers(0, CLASSES, len(inputs)).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=CLASSES)


def table(records):
    """User 0, whom absent ones are read as, will be the bad one; user 3 has one record."""
    counts = np.full(USERS, records, np.int32)
    counts[3] = 1
    return Clients.from_rows(np.arange(USERS * WIDTH).reshape(USERS, WIDTH)[:, :records], counts)


def slope(params, inputs):
    """One parameter, two classes in use."""
    rise = inputs[:, 0] * params
    return jnp.stack([rise, -rise, jnp.full_like(rise, -1.0)], axis=1)


def model_of(name, path, data):
    if name in SCALARS:
        return Model(name="slope", init=lambda key: jnp.zeros(1), apply=slope)
    if path.model == "logistic":
        return models.linear("logistic", data, constant=1.0)
    return models.mlp(data, hidden=(4,))


UPDATES = {"fedsgd": ClientUpdate(), "fedavg": ClientUpdate(update="fedavg", batch=2, epochs=2, learning_rate=0.5)}


class Bench:
    """An engine whose records can be changed without another program."""

    def __init__(self, name, settings, path):
        self.path, data = path, dataset()
        model = model_of(name, path, data)
        cohort = Cohort(participation=Everyone(), size=USERS, min_size=USERS)
        dim = len(first_parameters(model, 0)[0])
        self.engine = Engine(
            model=model,
            dataset=data,
            clients=table(path.records),
            update=UPDATES[path.update],
            protocol=build(name, fill_settings(name, dim, settings)).settle(cohort, dim),
            server=ServerSettings(optimizer="sgd", learning_rate=1.0).build(),
            cohort_size=USERS,
            randomness=Randomness.from_seed(5),
            performance=Performance(fast=path.fast, chunk=2 if name in SCALARS else 4),
            diagnostics=path.records > 1,
        )
        self.data = self.engine._data
        self.steps = self.engine._protocol.private_steps

    def round(self, record=None, *, holds=True):
        """The model and the diagnostics after a round in which user 0's first record is this one, or it has none."""
        inputs, counts = np.array(self.data.inputs), np.array(self.data.counts)
        if record is not None:
            inputs[0] = record
        if not holds:
            counts[0] = 0
        self.engine._data = self.engine.place(self.data._replace(inputs=inputs, counts=counts))
        items = None
        if self.steps:
            first = np.asarray(self.data.rows)[np.asarray(self.data.starts)]
            rows = np.tile(np.stack([first, first + 1], axis=1)[:, None], (1, self.steps, 1))
            rows[0, :, 0] = rows[0, :, 0] if holds else -1
            items = Items(rows.astype(np.int32), np.ones((USERS, self.steps), np.float32))
        users = np.arange(USERS, dtype=np.int32)
        drawn = RoundSample(users, USERS, items=items)
        after = self.engine.step(self.engine.start(), users, index=0, capacity=USERS, sample=drawn)
        return np.asarray(after.params), after.diagnostics


@pytest.mark.parametrize(("name", "settings", "path"), list(cases()))
def test_a_bad_record_counts_as_an_update_of_zero(name, settings, path):
    bench = Bench(name, settings, path)
    if name == "dp_fl" and "clip" not in settings:
        assert bench.engine._classes[0].strategy == path.strategy
    nothing, nothing_seen = bench.round(holds=False)
    usual, _ = bench.round()
    assert np.isfinite(nothing).all()
    if name not in SCALARS and name != "apes":
        assert np.abs(usual - nothing).max() > 1e-6, "a record that is a number counts"
    for kind, bad in NOT_NUMBERS.items():
        params, seen = bench.round(bad * SIGNS)
        np.testing.assert_allclose(params, nothing, atol=1e-6, err_msg=kind)
        np.testing.assert_allclose(seen, nothing_seen, rtol=1e-5, err_msg=kind)
    tiny, zero = bench.round(DENORMAL * SIGNS)[0], bench.round(0 * SIGNS)[0]
    np.testing.assert_allclose(tiny, zero, atol=1e-6)
    assert np.isfinite(tiny).all()


@functools.cache
def plain(path):
    return Bench("fedavg", {}, path)


@pytest.mark.parametrize("path", [path for path in PATHS if path.fast], ids=lambda path: f"{path.model}-{path.update}")
def test_a_model_that_no_update_fits_stays_as_it_is(path):
    """Parameters near the largest float: every user's gradient or step overflows, and nobody's update counts."""
    engine = plain(path).engine
    start = engine.start()
    huge = np.full(engine.dim, 3e38, np.float32) * np.resize(SIGNS, engine.dim)
    after = engine.step(
        start._replace(params=engine.place(huge)), np.arange(USERS, dtype=np.int32), index=0, capacity=USERS
    )
    assert np.isfinite(after.params).all()


def test_what_is_not_valid_is_not_added_whatever_it_holds():
    value = jnp.array([[1.0, 2.0], [jnp.nan, jnp.inf], [3.0, 4.0]])
    protocol = build("fedavg", {})
    for valid in (jnp.array([1.0, 0.0, 1.0]), jnp.array([True, False, True])):
        np.testing.assert_array_equal(protocol.tally(ShuffledReports(None, value, valid), 2), [4, 6])
        each = jnp.broadcast_to(valid[:, None], value.shape)
        np.testing.assert_array_equal(protocol.tally(ShuffledReports(None, value, each), 2), [4, 6])


def test_a_number_beyond_float32_never_reaches_an_engine():
    inputs = np.full((2, FEATURES), 1e39)
    with pytest.raises(ValueError, match="got 10 values beyond it in inputs"):
        Dataset(inputs=inputs, labels=[0, 1], test_inputs=inputs[:1], test_labels=[0], num_classes=2)
