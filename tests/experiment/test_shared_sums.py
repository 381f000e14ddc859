"""Trainings by `secagg`: few users with aggregators' noise and dropouts, many with their own, rounds of any size."""

import dataclasses

import numpy as np
import pytest
from tiny import TASK

from dovetail import experiment
from dovetail.experiment import config
from dovetail.experiment.verify import verify
from dovetail.statements import Trust

SILOS = {
    "noise": "seeded",
    "task": {"name": "tiny", "partition": "iid", "users": 5},
    "cohort": {"kind": "everyone", "rounds": 6, "dropout": 0.4, "colluders": 3},
    "server": {"learning_rate": 1.0},
    "protocol": {"name": "secagg", "clip_norm": 1.0, "noise_multiplier": 8.0, "noise": "aggregators"},
    "privacy": {"delta": 1e-5},
}


def plan(*overrides):
    return experiment.prepare(config.parse(SILOS, overrides), task=TASK)


def test_five_silos_with_dropouts_and_colluders_void_no_round(tmp_path):
    ready = plan()
    result = experiment.run(ready, out=tmp_path / "run")
    assert len(ready.engine.round_logs) == 6, "every round released something"
    assert min(len(ready.sampler.schedule.draw_users(index)) for index in range(6)) < 5, "users did drop out"
    assert result.statement.trust is Trust.SHARES
    assert verify(tmp_path / "run").agrees
    nobody_drops = experiment.run(plan(("cohort.dropout", 0.0), ("cohort.colluders", 0)))
    assert result.statement.eps == nobody_drops.statement.eps


def test_users_own_noise_needs_a_minimum_where_users_drop_out():
    with pytest.raises(ValueError, match=r"with dropout=0\.4 set cohort\.min_size"):
        plan(("protocol.noise", "users"))


@pytest.mark.parametrize("fast", [True, False])
def test_the_noise_of_a_round_is_that_of_all_aggregators(fast):
    """The step of a round without users is noise alone: 3 aggregators, every coordinate of 200 rounds."""
    ready = plan(("protocol.aggregators", 3), ("performance.fast", fast), ("cohort.rounds", 200))
    nobody = np.zeros(0, np.int64)
    moved = [
        np.asarray(ready.engine.step(ready.engine.start(), nobody, index=index, capacity=5).params) - ready.engine.first
        for index in range(200)
    ]
    expected = ready.sampler.protocol.noise_std(5, ready.engine.dim)
    assert expected == pytest.approx(8.0 * np.sqrt(3) / 5)
    assert np.std(moved) == pytest.approx(expected, rel=5 / np.sqrt(2 * np.size(moved)))


def test_rounds_may_differ_in_size_if_the_first_is_the_largest():
    sizes = (("cohort", {"kind": "fixed", "size": [5, 3, 2], "rounds": 3}),)
    shrinking = plan(*sizes)
    result = experiment.run(shrinking)
    assert [ran.cohort.size for ran in shrinking.engine.round_logs] == [5, 3, 2]
    equal = experiment.run(plan(("cohort", {"kind": "everyone", "rounds": 3})))
    assert result.statement.eps == pytest.approx(equal.statement.eps, rel=1e-9), "who takes part is seen"
    large = dataclasses.replace(shrinking.sampler.schedule.cohort(1), size=500)
    with pytest.raises(ValueError, match="for the sum of 500 users"):
        shrinking.sampler.protocol.view(large, shrinking.engine.dim, neighbors=result.statement.neighbors)
