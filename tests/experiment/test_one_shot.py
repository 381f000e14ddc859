"""`client.update = "moments"` from config to `model.npz`: one round, any protocol that sums updates, a linear model."""

import dataclasses

import numpy as np
import pytest
from tiny import TASK

from dovetail.experiment import config as configs
from dovetail.experiment.training import prepare, run
from dovetail.experiment.verify import verify

BASE = {
    "task": {"name": "tiny"},
    "noise": "seeded",
    "cohort": {"kind": "everyone", "rounds": 1},
    "client": {"update": "moments"},
    "server": {"optimizer": "ridge"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 1e-6},
}


def parsed(**changes):
    return configs.parse(BASE, [(key.replace("__", "."), value) for key, value in changes.items()])


def prepared(task=TASK, **changes):
    return prepare(parsed(**changes), task=task)


def estimate(plan):
    """The estimated mean vector of the one round."""
    training = plan.step(plan.engine.start(), 0, plan.sampler.schedule.draw_users(0))
    return np.array(training.params)


def regression(inputs, labels, weights, ridge):
    """Weighted ridge regression, by NumPy."""
    z = np.append(inputs, np.ones((len(inputs), 1)), axis=1).astype(np.float64)
    gram, cross = (z.T * weights) @ z / len(z), (z.T * weights) @ (np.eye(3)[labels] - 1 / 3) / len(z)
    values = np.linalg.eigvalsh(gram)
    return np.linalg.solve(gram + ridge * values.mean() * np.eye(len(gram)), cross)


@pytest.mark.parametrize("clip_norm", [100.0, 0.5])
def test_without_noise_the_model_is_weighted_ridge_regression(clip_norm):
    data = TASK.load()
    plan = prepared(protocol__clip_norm=clip_norm, server__options={"share": 0.1})
    reach = np.linalg.norm(np.append(data.inputs, np.ones((300, 1)), axis=1), axis=1)
    weights = np.minimum(1, clip_norm / (reach * np.hypot(reach, np.sqrt(2 / 3))))
    expected = regression(data.inputs, data.labels, weights, 0.1)
    result = run(plan)
    np.testing.assert_allclose(result.parameters["params"], expected, rtol=2e-3, atol=2e-4)
    rows = np.append(data.test_inputs, np.ones((100, 1)), axis=1)
    right = np.mean(np.argmax(rows @ result.parameters["params"], axis=1) == data.test_labels)
    assert result.accuracy == pytest.approx(right)


@pytest.mark.parametrize("users", [None, 60])
def test_all_ways_add_up_to_the_same_and_no_user_adds_more_than_the_clip_norm(users):
    dealt = {} if users is None else {"task__users": users, "task__partition": "iid"}
    plans = [prepared(**dealt), prepared(**dealt, performance__fast=False), prepared(**dealt, performance__chunk=7)]
    first, *others = [estimate(plan) for plan in plans]
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-5)
    assert np.linalg.norm(first) <= 1.0 + 1e-4
    alone = prepared(**dealt)
    one = alone.engine.step(alone.engine.start(), np.array([3]), index=0, capacity=1)
    size = 300 if users is None else users
    assert np.linalg.norm(np.asarray(one.params)) * size == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("users", [None, 60])
def test_places_where_nobody_is_add_nothing(users):
    """They are read as the first user's."""
    dealt = {} if users is None else {"task__users": users, "task__partition": "iid"}
    plan = prepared(**dealt, performance__chunk=16)
    few = np.array([3, 5], np.int32)
    exactly, roomy = (
        np.asarray(plan.engine.step(plan.engine.start(), few, index=0, capacity=capacity).params)
        for capacity in (2, 60)
    )
    np.testing.assert_allclose(roomy, exactly, rtol=1e-5, atol=1e-7)
    first = np.asarray(plan.engine.step(plan.engine.start(), np.array([0], np.int32), index=0, capacity=1).params)
    assert np.abs(first).max() > 1e-3, "the first user's would show"


def test_a_record_that_is_no_number_adds_nothing():
    def load(*, folder=None):
        data = TASK.load()
        data.inputs[5] = 1e30  # its square is not finite
        return data

    poisoned = estimate(prepared(dataclasses.replace(TASK, load=load)))
    plan = prepared()
    without = np.flatnonzero(plan.sampler.clients.records != 5)
    assert len(without) == 299
    kept = plan.engine.step(plan.engine.start(), without, index=0, capacity=300)
    np.testing.assert_allclose(poisoned, np.asarray(kept.params), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("protocol", ["dp_fl", "split_and_mix"])
def test_digits_at_two_are_learned_in_one_round(protocol, tmp_path):
    config = configs.parse({**BASE, "task": {"name": "digits"}, "protocol": {"name": protocol}}, [("privacy.eps", 2.0)])
    result = run(prepare(config), out=tmp_path / "run")
    assert result.accuracy > 0.3  # the most frequent class has a tenth
    assert (result.rounds, result.planned_rounds) == (1, 1)
    assert result.statement.eps <= 2.0
    assert any("uploads once" in said for said in result.statement.assumptions)
    assert result.parameters["params"].shape == (65, 10)
    verify(tmp_path / "run")


def test_local_noise_and_projections_serve_too():
    for changes in (
        {"protocol": {"name": "ldp_fl", "clip_norm": 1.0, "noise_multiplier": 1.0}},
        {"client__project": 2},
    ):
        result = run(prepared(**changes))
        assert np.all(np.isfinite(result.parameters["params"]))
        assert result.parameters["params"].shape == (4, 3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cohort__rounds": 2}, "rounds = 1"),
        ({"server__optimizer": "sgd"}, "'ridge'"),
        ({"client__update": "fedsgd"}, "'moments'"),
        ({"task__model": "mlp"}, "linear model"),
        ({"server__average": 0.5}, "takes no steps"),
        ({"client__project": 3}, "project=3"),
        ({"client__weight": 0.0}, "weight"),
        ({"protocol": {"name": "central_sub"}, "privacy__eps": 1.0}, "'fedsgd'"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        prepared(**changes)
