"""`server.average` from config to `model.npz`: the mean of the last models, also after a kill, and stated."""

import json

import numpy as np
import pytest
from resuming import without_resuming
from tiny import TASK
from watchers import AfterRound

from dovetail.experiment import config as configs
from dovetail.experiment.training import prepare, run
from dovetail.experiment.verify import verify

BASE = {
    "task": {"name": "tiny"},
    "noise": "seeded",
    "cohort": {"kind": "everyone", "rounds": 6},
    "server": {"learning_rate": 5.0, "options": {"momentum": 0.5}, "average": 0.5},
    "protocol": {"name": "dp_fl", "clip_norm": 0.5, "noise_multiplier": 1.0},
    "privacy": {"neighbors": "add-remove"},
}


class _KilledError(Exception):
    """The process was killed here."""


def prepared(**server):
    return prepare(configs.parse({**BASE, "server": {**BASE["server"], **server}}), task=TASK)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    return run(prepared(), out=out, evaluate_every=2)


def test_the_released_model_is_the_mean_of_the_last_half(whole):
    ready, models = prepared(average=0.0), []
    training = ready.engine.start()
    for index in range(6):
        training = ready.step(training, index, ready.sampler.schedule.draw_users(index))
        models.append(np.array(training.params))
    mean = np.mean(models[3:], axis=0)
    assert np.abs(mean - models[-1]).max() > 1e-3
    np.testing.assert_allclose(whole.parameters["params"].ravel(), mean, atol=1e-6)
    with np.load(whole.out / "model.npz") as kept:
        np.testing.assert_array_equal(kept["params"], whole.parameters["params"])
    test = TASK.load()
    rows = np.append(test.test_inputs, np.ones((len(test.test_labels), 1)), axis=1)
    right = np.mean(np.argmax(rows @ whole.parameters["params"], axis=1) == test.test_labels)
    assert whole.accuracy == pytest.approx(right)
    lines = [json.loads(line) for line in (whole.out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["accuracy"] == whole.accuracy


def test_the_statement_says_so_costs_nothing_and_verifies(whole):
    plain = prepared(average=0.0).record(range(6)).certified_statement()
    (said,) = set(whole.statement.assumptions) - set(plain.assumptions)
    assert "mean of the models after the last 3 of 6 rounds" in said
    assert "post-processing" in str(whole.statement)
    assert (whole.statement.eps, whole.statement.delta) == (plain.eps, plain.delta)
    assert verify(whole.out).agrees
    stated = json.loads((whole.out / "privacy.json").read_text())
    stated["certified"]["assumptions"].remove(said)
    (whole.out / "privacy.json").write_text(json.dumps(stated))
    assert not verify(whole.out).agrees


@pytest.mark.parametrize("stop_at", [2, 5])
def test_a_killed_run_ends_with_the_same_mean(tmp_path, whole, stop_at):
    def kill(progress):
        if progress.round == stop_at:
            raise _KilledError

    ready = prepared()
    with pytest.raises(_KilledError):
        run(ready, out=tmp_path / "cut", checkpoint_every=2, callbacks=[AfterRound(kill)])
    resumed = run(ready, out=tmp_path / "cut", resume=True, checkpoint_every=2, evaluate_every=2)
    np.testing.assert_array_equal(resumed.parameters["params"], whole.parameters["params"])
    assert without_resuming(resumed.statement) == whole.statement
    assert resumed.accuracy == whole.accuracy
