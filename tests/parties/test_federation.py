import numpy as np
import pytest

from dovetail import experiment
from dovetail.engine import chunks
from dovetail.experiment.config import parse
from dovetail.parties import federation
from dovetail.randomness import Randomness
from dovetail.sampling import RoundSample

USERS = 5
NOISE = Randomness.from_os(0)  # which nothing here adds


@pytest.fixture
def config():
    return parse(
        {
            "task": {"name": "digits", "model": "logistic", "partition": "iid", "users": USERS},
            "cohort": {"kind": "everyone", "rounds": 1},
            "client": {"update": "fedavg", "epochs": 2, "batch": 10, "learning_rate": 1.0},
            "server": {"optimizer": "sgd", "learning_rate": 1.0},
            "protocol": {"name": "fedavg"},
            "privacy": {"delta": 1e-5},
        }
    )


@pytest.fixture(params=[True, False], ids=["one order", "own orders"])
def same_order(request, monkeypatch):
    """Whether both sides visit a user's records as they lie there, or each in a random order of its own."""
    if request.param:
        for module in (chunks, federation):
            monkeypatch.setattr(module, "visiting_order", lambda count, records, *, key: np.arange(records))
    return request.param


def test_users_train_as_in_the_simulation(config, same_order):
    engine, fleet = experiment.prepare(config).engine, federation.load_federation(config)
    for user in range(USERS):
        training = engine.start()
        first = np.array(training.params)
        np.testing.assert_array_equal(first, fleet.initial)
        alone = RoundSample(np.array([user]), 1)
        after = engine.step(training, alone.users, index=0, capacity=1, sample=alone, randomness=NOISE)
        distance = np.linalg.norm(fleet.train(user)(first) - (np.asarray(after.params) - first))
        assert (distance < 1e-5) == same_order
    assert engine.metrics(after)["accuracy"] == pytest.approx(fleet.learning().evaluate(np.asarray(after.params)))


def test_users_send_the_moments_of_the_simulation():
    config = parse(
        {
            "task": {"name": "digits", "partition": "iid", "users": USERS},
            "cohort": {"kind": "everyone", "rounds": 1},
            "client": {"update": "moments", "project": 10},
            "server": {"optimizer": "ridge"},
            "protocol": {"name": "fedavg"},
        }
    )
    engine, fleet = experiment.prepare(config).engine, federation.load_federation(config)
    assert engine.dim == fleet.dim == len(fleet.initial) == 66 + 110
    drawn = RoundSample(np.array([2]), 1)
    after = engine.step(engine.start(), np.array([2]), index=0, capacity=1, sample=drawn, randomness=NOISE)
    np.testing.assert_allclose(fleet.train(2)(fleet.initial), np.asarray(after.params), rtol=1e-4, atol=1e-5)
    assert fleet.learning().evaluate(engine.model_arrays(after)["params"].ravel()) == pytest.approx(
        engine.metrics(after)["accuracy"]
    )


def test_a_user_measures_its_own_records(config):
    learned = federation.load_federation(config)
    facts = learned.measure(3)(learned.initial)
    rows = learned.clients.records_of(3)
    counts = np.bincount(learned.dataset.labels[rows], minlength=learned.dataset.num_classes)
    assert np.array_equal(facts["labels"], counts)
    assert 0 <= facts["accuracy"] <= 1
    assert facts["loss"] == pytest.approx(np.log(learned.dataset.num_classes), rel=0.5)
