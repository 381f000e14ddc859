"""Defaults for a dataset: from public numbers alone, written out, and never in place of what the caller sets."""

import numpy as np
import pytest

import dovetail
from dovetail.data import Dataset
from dovetail.experiment import config as configs
from dovetail.experiment import defaults, training
from dovetail.experiment.outlook import noise_ratio_of
from dovetail.learners import functions

SEEDED = {"noise": "seeded"}


def regression(seed: int = 0, users: int = 400, width: int = 5) -> Dataset:
    """A table of numbers; another seed gives other values of the same shape."""
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(-1, 1, (users, width)).astype(np.float32)
    labels = inputs @ rng.uniform(-0.4, 0.4, width) + 0.3
    return Dataset.from_arrays(inputs, labels, test=(inputs[:100], labels[:100]), kind="number")


def plan_of(data: Dataset, monkeypatch, **arguments):
    """The plan that `train` makes, which is not run."""
    made = []
    monkeypatch.setattr(training, "run", lambda plan, **settings: made.append(plan))
    dovetail.train(data, **{"eps": 2.0, **arguments})
    return made[0]


@pytest.mark.parametrize("protocol", ["dp_fl", "secagg", "ldp_fl", "split_and_mix"])
def test_settings_do_not_depend_on_values(protocol, monkeypatch):
    first, other = (plan_of(regression(seed), monkeypatch, protocol=protocol) for seed in (0, 1))
    assert first.config == other.config
    assert first.config.server.optimizer == "adam"
    assert first.config.protocol["clip_norm"] == 0.3
    assert first.config.cohort.rounds == defaults.ROUNDS


def test_steps_shrink_where_noise_is_long(monkeypatch):
    steps = {}
    for users, eps in ((4000, 2.0), (400, 2.0), (400, 0.5)):
        plan = plan_of(regression(users=users), monkeypatch, eps=eps)
        ratio = noise_ratio_of(plan.sampler, dim=plan.engine.dim)
        protocol = plan.sampler.protocol
        by_hand = protocol.noise_multiplier * protocol.clip_norm / users * plan.engine.dim**0.5 / protocol.clip_norm
        assert ratio == pytest.approx(by_hand)
        steps[users, eps] = plan.config.server.learning_rate
    assert steps[4000, 2.0] > steps[400, 2.0] > steps[400, 0.5]


def test_what_the_caller_sets_stays(monkeypatch):
    for settings, expected in (
        ({"cohort.rounds": 7}, {"rounds": 7, "optimizer": "adam", "clip_norm": 0.3}),
        ({"server.learning_rate": 0.5}, {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": None}),
        ({"server": {"learning_rate": 0.5}}, {"optimizer": "sgd", "learning_rate": 0.5, "clip_norm": None}),
        ({"server.optimizer": "yogi"}, {"optimizer": "yogi", "learning_rate": 1.0, "clip_norm": None}),
        ({"clip_norm": 0.7}, {"optimizer": "adam", "clip_norm": 0.7, "average": 0.5}),
        ({"protocol.clip_norm": 0.7, "server.average": 0.0}, {"clip_norm": 0.7, "average": 0.0}),
        ({"cohort.kind": "poisson", "cohort.size": 50}, {"kind": "poisson", "size": 50, "rounds": defaults.ROUNDS}),
        ({"cohort.size": 50, "cohort.epochs": 2}, {"kind": "disjoint", "epochs": 2, "rounds": None}),
    ):
        config = plan_of(regression(), monkeypatch, settings=settings).config
        found = {
            **{key: getattr(config.cohort, key) for key in ("kind", "size", "rounds", "epochs")},
            **{key: getattr(config.server, key) for key in ("optimizer", "learning_rate", "average")},
            "clip_norm": config.protocol.get("clip_norm"),
        }
        assert {key: found[key] for key in expected} == expected, settings


def test_the_folder_says_what_was_chosen_and_repeats_it(tmp_path):
    data = regression()
    settings = {**SEEDED, "cohort.rounds": 5}
    result = dovetail.train(data, eps=2.0, settings=settings, out=tmp_path / "run")
    written = configs.read(tmp_path / "run" / "config.toml")
    assert written.server.optimizer == "adam"
    assert 0 < written.server.learning_rate <= 0.1
    chosen = {
        "server.optimizer": written.server.optimizer,
        "server.learning_rate": written.server.learning_rate,
        "server.average": written.server.average,
        "protocol.clip_norm": written.protocol["clip_norm"],
    }
    again = dovetail.train(data, eps=2.0, settings={**settings, **chosen})
    for name, value in result.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], value)


def test_a_declared_range_of_the_target_shortens_steps(monkeypatch):
    rng = np.random.default_rng(0)
    columns = {name: rng.uniform(0, 10, 500) for name in ("age", "price")}
    steps = []
    for bounds in ({"age": (0, 10)}, {"age": (0, 10), "price": (0, 10)}):
        data = Dataset.from_pandas(columns, user=None, target="price", bounds=bounds, test_share=0.2)
        steps.append(plan_of(data, monkeypatch).config.server.learning_rate)
    assert steps[0] / steps[1] == pytest.approx(2, rel=0.05)


def test_the_rule_for_classes_and_numbers_linear_or_not():
    def learned(target: str, dim: int, linear: bool = False) -> dict:
        return defaults.Learned(target=target, dim=dim, is_linear=linear, has_known_scale=True).server_settings(0.5)

    assert learned("classes", 50, linear=True) == {"optimizer": "adam", "learning_rate": 0.033, "average": 0.2}
    assert learned("labels", 50) == {"optimizer": "adam", "learning_rate": 0.03, "average": 0.0}
    assert learned("classes", 100_000)["learning_rate"] == 0.003
    assert learned("number", 50) == {"optimizer": "adam", "learning_rate": 0.025, "average": 0.5}
    assert learned("number", 50, linear=True)["learning_rate"] == 0.017


def test_functions_and_local_steps_are_followed_as_they_are(monkeypatch):
    plan = plan_of(regression(), monkeypatch, settings={"client.update": "fedavg"})
    assert (plan.config.server.optimizer, plan.config.server.learning_rate) == ("sgd", 1.0)
    model = functions.model(
        {"slope": np.zeros(5)},
        update=lambda parameters, records: parameters,
        predict=lambda parameters, inputs: inputs @ parameters["slope"],
    )
    plan = plan_of(regression(), monkeypatch, model=model)
    assert (plan.config.server.optimizer, plan.config.cohort.rounds) == ("sgd", defaults.ROUNDS)


@pytest.mark.parametrize("kind", ["number", "classes"])
def test_a_table_is_learned_without_settings(kind):
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1, 1, (2000, 5)).astype(np.float32)
    inputs[:, 0] = 0.9  # as badly scaled as bounds allow
    labels = inputs @ np.array([0.1, 0.4, -0.3, 0.2, 0.1]) + 0.3
    if kind == "classes":
        labels = (labels > 0.5).astype(np.int32)
    data = Dataset.from_arrays(inputs, labels, test=(inputs[:500], labels[:500]), kind=kind)
    result = dovetail.train(data, eps=2.0, settings=SEEDED)
    assert result.beats_baseline
    assert (result.metrics["r2"] if kind == "number" else result.auc) > 0.9
