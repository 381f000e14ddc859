"""Models that train outside JAX: the engine clips and sums what their learner hands it, whatever that is."""

import dataclasses

import numpy as np
import pytest
from tiny import TASK_WITH_SUBJECTS

from dovetail import experiment
from dovetail.data import Model
from dovetail.experiment import config

CLIP, DIM = 0.5, 4


class Gradients:
    """A learner whose update of a client is the mean of its records' gradients, each far longer than the clip norm."""

    gradients, ignores_settings = True, False
    platform, notes, code, isolation = "host", (), (), None

    def __init__(self, scale):
        self.scale = scale

    def updates(self, settings, loss, parameters, inputs, labels, counts):
        rows = np.asarray(inputs, np.float32)
        used = np.arange(rows.shape[1]) < np.asarray(counts)[:, None]
        mean = np.where(used[..., None], rows, 0).sum(axis=1) / np.maximum(np.asarray(counts), 1)[:, None]
        return self.scale * np.concatenate([mean, np.ones((len(mean), 1), np.float32)], axis=1)

    def outputs(self, parameters, inputs):
        return np.zeros((len(inputs), 3), np.float32)

    def losses(self, loss, outputs, labels):
        return np.zeros(len(labels), np.float32)


def plan(protocol, *, scale, **settings):
    learner = Gradients(scale)
    model = Model(name="own", init=lambda key: np.zeros(DIM, np.float32), apply=learner.outputs, learner=learner)
    data = {
        "task": {"name": "tiny", "partition": "iid", "users": 6},
        "noise": "seeded",
        "cohort": {"kind": "everyone", "rounds": 1},
        "protocol": {"name": protocol, "clip_norm": CLIP, "noise_multiplier": 1e-6, **settings},
        "privacy": {"neighbors": "add-remove", "delta": 1e-5},
    }
    task = dataclasses.replace(TASK_WITH_SUBJECTS, model=model)
    return experiment.prepare(config.parse(data), task=task)


SETTINGS = {
    "central_sub": {"items_per_subject": 5, "sampling_rate": 0.5},
    "local_sub": {"items_per_subject": 5, "sampling_rate": 0.5, "steps": 1},
}


@pytest.mark.parametrize("scale", [100.0, 0.01])
@pytest.mark.parametrize("protocol", SETTINGS)
def test_every_record_is_clipped_by_itself(protocol, scale):
    ready = plan(protocol, scale=scale, **SETTINGS[protocol])
    users = np.arange(6, dtype=np.int32)
    moved = np.asarray(ready.step(ready.engine.start(), 0, users).params)
    rows, _ = ready.sampler.rows_in_sum(0, users)
    inputs = ready.dataset.inputs[rows[:, 0]]
    gradients = scale * np.concatenate([inputs, np.ones((len(inputs), 1), np.float32)], axis=1)
    norms = np.linalg.norm(gradients, axis=1)
    assert (norms > 10 * CLIP).all() if scale > 1 else (norms < CLIP / 5).all()
    expected = (gradients * np.minimum(1, CLIP / norms)[:, None]).sum(axis=0)
    sizes = ready.sampler.sum_divisor(0, learning_rate=0.1 if protocol == "local_sub" else 1.0)
    np.testing.assert_allclose(moved * sizes, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())
