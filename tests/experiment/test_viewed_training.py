"""Views of a user's own records: more of its records to training, and nothing to privacy."""

import jax
import numpy as np
import pytest
from tiny import TASK

from dovetail.audit.training.attacker import Attacker, AttackerView
from dovetail.audit.training.canaries import Canaries
from dovetail.data import Dataset, Task
from dovetail.experiment import config as configs
from dovetail.experiment.training import prepare, run
from dovetail.statements import Unit


def images(*, folder=None):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60).astype(np.int32)
    inputs = rng.uniform(0, 0.4, (60, 6, 6)).astype(np.float32)
    inputs[labels == 1, :, 2:4] += 0.5
    return Dataset(
        inputs=inputs[:40], labels=labels[:40], test_inputs=inputs[40:], test_labels=labels[40:], num_classes=2
    )


IMAGES = Task(name="images", load=images, published=True)
BASE = {
    "task": {"name": "images"},
    "noise": "seeded",
    "cohort": {"kind": "everyone", "rounds": 4},
    "protocol": {"name": "dp_fl", "clip_norm": 0.5, "noise_multiplier": 1.0},
    "privacy": {"neighbors": "add-remove"},
}


def prepared(views=(), **overrides):
    changed = [("client.views", list(views)), *((key.replace("__", "."), value) for key, value in overrides.items())]
    return prepare(configs.parse(BASE, changed), task=IMAGES)


def test_views_change_the_model_and_not_the_statement():
    plain, viewed = prepared(), prepared(["flip", "shift:1"])
    assert viewed.engine._data.products is not None
    assert viewed.record(range(4)).certified_statement() == plain.record(range(4)).certified_statement()
    fast, one = run(viewed), run(plain)
    slow = run(prepared(["flip", "shift:1"], performance__fast=False))
    assert np.abs(fast.parameters["params"] - one.parameters["params"]).max() > 1e-3
    np.testing.assert_allclose(fast.parameters["params"], slow.parameters["params"], atol=1e-4)


def test_local_steps_of_other_models_take_views():
    settings = {"task__model": "cnn", "client__update": "fedavg", "client__batch": 2}
    assert run(prepared(["flip"], cohort__rounds=1, **settings)).rounds == 1


@pytest.mark.soak
def test_shuffled_reports_take_views():
    local = {"protocol": {"name": "ss_simple", "clip_value": 0.1, "eps_local": 1.0}, "privacy.neighbors": "replace-one"}
    config = configs.parse(BASE, [("client.views", ["flip"]), ("cohort.rounds", 1), *local.items()])
    assert run(prepare(config, task=IMAGES)).rounds == 1


def test_a_deployed_user_computes_what_the_simulated_one_does():
    ready = prepared(["flip"])
    federation = pytest.importorskip("dovetail.parties.federation")
    held = federation.Federation(
        config=ready.config, dataset=ready.dataset, clients=ready.sampler.clients, model=ready.model
    )
    params = np.zeros(held.dim, np.float32)
    inputs = images().inputs[ready.sampler.clients.records[3]]
    label = images().labels[ready.sampler.clients.records[3]]
    rows = np.append((inputs.ravel() + inputs[:, ::-1].ravel()) / 2, 1.0)
    expected = np.outer(rows, np.eye(2)[label] - 0.5)
    np.testing.assert_allclose(held.train(3)(params).reshape(-1, 2), expected, atol=1e-6)


def test_protocols_that_clip_records_refuse_views():
    config = configs.parse(
        {
            **BASE,
            "protocol": {"name": "central_sub", "clip_norm": 0.5, "noise_multiplier": 1.0, "items_per_subject": 1},
            "cohort": {"kind": "poisson", "rounds": 2, "size": 10},
            "client": {"views": ["flip"]},
        }
    )
    with pytest.raises(ValueError, match="'central_sub' clips every record by itself"):
        prepare(config, task=IMAGES)


def test_views_need_images():
    with pytest.raises(ValueError, match="expected images"):
        prepare(configs.parse({**BASE, "client": {"views": ["flip"]}}), task=TASK)


def test_an_attacker_explains_what_is_released_with_views():
    """The released sum less what everybody adds is noise alone, which the attacker's own model of a user must give."""
    hidden = Canaries(coins=np.array([True, False, True, True]), unit=Unit.USER, swapped=False, seed=0, clip_norm=0.5)
    config = configs.parse(BASE, [("client.views", ["flip"]), ("protocol.noise_multiplier", 1e-3)])
    ready = prepare(config, task=IMAGES, guests=hidden)
    attacker, training = Attacker(ready, hidden), ready.engine.start()
    before = np.asarray(training.params).copy()
    users = ready.sampler.schedule.draw_users(0)
    states = jax.tree.map(np.array, (training.protocol, training.server))  # a step consumes what it starts from
    after = ready.step(training, 0, hidden.contributing_users(users, ready.sampler.schedule.population))
    seen = AttackerView(0, users, before, np.asarray(after.params), *states)
    first = 2 * attacker.mean_and_half_difference_of_worlds(seen)[0]
    rest = attacker.released_sum(seen) - attacker.sum_of_others(seen) - hidden.coins @ first
    assert np.linalg.norm(first, axis=1).min() > 0.3
    assert np.abs(rest).max() < 0.01
