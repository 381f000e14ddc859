"""Runs on features: a config's are in the plan, in the statement, and in what a resumed run must share."""

import sys
import tomllib

import numpy as np
import pytest
from tiny import TASK
from watchers import AfterRound

from dovetail import experiment
from dovetail.data import Dataset, Task
from dovetail.experiment import config, population

OWN = """
import numpy as np
from dovetail.data import Task
from tiny import load
def doubled(records):
    return np.concatenate([records, -records**2], axis=1)
PUBLIC = Task(name="public", load=load)
"""
BASE = {
    "noise": "seeded",
    "task": {"name": "tiny", "features": "own_features:doubled"},
    "cohort": {"kind": "everyone", "rounds": 4},
    "protocol": {"name": "dp_fl", "clip_norm": 0.5, "noise_multiplier": 3.0},
}
WHITEN = {"on": "own_features:PUBLIC", "rank": 3, "ridge": 0.1, "images": 200}


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "own_features.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_features", raising=False)


def plan(*overrides):
    return experiment.prepare(config.parse(BASE, overrides), task=TASK)


def test_a_model_reads_features_and_the_statement_says_what_is_taken_as_public():
    ready = plan(("task.whiten", WHITEN))
    assert ready.dataset.inputs.shape == (300, 3)
    assert ready.model.constant == 0.3
    assert plan().dataset.inputs.shape == (300, 6)
    result = experiment.run(ready)
    said = " ".join(result.statement.assumptions)
    assert "the features 'own_features:doubled' were made without the private data" in said
    assert "the images of 'own_features:PUBLIC', on which features were whitened, are public" in said
    assert result.accuracy > 0.6  # guessing gives a third


def test_a_resumed_run_has_the_same_features(tmp_path):
    def stop(progress):
        if progress.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(
            plan(("task.whiten", WHITEN)), out=tmp_path / "run", callbacks=[AfterRound(stop)], checkpoint_every=1
        )
    with pytest.raises(ValueError, match=r"task\.whiten\.ridge was 0\.1 and is 0\.2"):
        experiment.run(plan(("task.whiten", {**WHITEN, "ridge": 0.2})), out=tmp_path / "run", resume=True)
    source = tmp_path / "own_features.py"
    source.write_text(OWN + "# changed\n")
    del sys.modules["own_features"]
    with pytest.raises(ValueError, match=r"own code\.own_features was"):
        experiment.run(plan(("task.whiten", WHITEN)), out=tmp_path / "run", resume=True)
    source.write_text(OWN)
    del sys.modules["own_features"]
    assert experiment.run(plan(("task.whiten", WHITEN)), out=tmp_path / "run", resume=True).rounds == 4


def test_a_config_keeps_its_features():
    task = {
        "name": "mnist",
        "features": "scatter+patches",
        "patches": [[5, 20]],
        "symmetric": True,
        "whiten": {"rank": 7},
    }
    asked = config.parse({**BASE, "task": task})
    written = tomllib.loads(config.to_toml(asked))
    assert written["task"]["whiten"] == {"on": "synthetic", "rank": 7, "ridge": 0.01, "images": 24000}
    assert config.parse(written) == asked


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (("task.features", "scater"), "unknown features 'scater': did you mean 'scatter'"),
        (("task.whiten", {"rnk": 3}), "unknown key of task.whiten 'rnk': did you mean 'rank'"),
        (("task.whiten", {"rank": 0}), "expected rank >= 1, got rank=0"),
        (("task.whiten", {"rank": "all"}), "task.whiten.rank must be a whole number, got 'all'"),
        (("task.whiten", True), "task.whiten must be a table, got True"),
        (("task.whiten", {"on": "tiny"}), "task.whiten needs public data, and on='tiny' are those of the task"),
        (("task.patches", [[5, 20]]), "expected sides and filters with features of patches"),
        (("task.patches", [5, 20]), "must be a list"),
        (("task.model", "scatter"), "model = 'scatter' has features of its own: with features="),
        (("task.model", "cnn"), "expected images"),
    ],
)
def test_features_that_cannot_be_are_one_sentence(override, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        plan(override)
    assert "\n" not in str(caught.value)


def test_a_task_with_a_model_of_its_own_gets_features_too():
    inputs = np.random.default_rng(0).random((8, 28, 28), dtype=np.float32)
    labels = np.arange(8, dtype=np.int32) % 2
    data = Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=2)
    short = config.parse({**BASE, "task": {"name": "mine", "model": "scatter"}})
    found, _, model = population.load_data_for_parties(short, task=Task(name="mine", load=lambda *, folder: data))
    own_model, _, same = population.load_data_for_parties(
        short, task=Task(name="mine", load=lambda *, folder: data, model=model)
    )
    np.testing.assert_array_equal(own_model.inputs, found.inputs)
    assert found.inputs.shape == (8, 5184)
    assert same is model
