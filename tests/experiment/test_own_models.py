"""Regression, several labels, own losses, metrics and functions, from `train` to the report."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import dovetail
from dovetail import pages
from dovetail.data import Dataset, Model
from dovetail.engine import scoring
from dovetail.learners import functions
from dovetail.statements import Verdict

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(2400, 5)).astype(np.float32)
SLOPES = np.array([1, -2, 0.5, 0, 1.5], np.float32)
EVERYONE = {"cohort.kind": "everyone", "cohort.rounds": 40, "server.learning_rate": 0.2, "noise": "seeded"}


def dataset(target):
    noise = 0.3 * np.random.default_rng(1).normal(size=2400)
    labels = {
        "number": (INPUTS @ SLOPES + noise + 2).astype(np.float32),
        "labels": (INPUTS[:, :3] + noise[:, None] > 0.5).astype(np.float32),
        "classes": (INPUTS @ SLOPES + noise > 1).astype(np.int32),
    }[target]
    width = {"number": 1, "labels": 3, "classes": 2}[target]
    return Dataset(
        inputs=INPUTS[:2000],
        labels=labels[:2000],
        test_inputs=INPUTS[2000:],
        test_labels=labels[2000:],
        num_classes=width,
        target=target,
    )


def test_regression_without_and_with_privacy():
    data = dataset("number")
    free = dovetail.train(data, protocol="fedavg", settings=EVERYONE)
    private = dovetail.train(data, protocol="dp_fl", eps=4.0, settings={**EVERYONE, "protocol.clip_norm": 4.0})
    assert free.metrics["r2"] > 0.95
    assert free.metrics["r2"] > private.metrics["r2"] > 0.8
    assert private.statement.eps <= 4
    assert free.accuracy is None is free.auc
    assert free.baseline == {
        "rule": "mean baseline",
        "r2": 0.0,
        "rmse": pytest.approx(np.std(data.test_labels), rel=1e-5),
        "mae": pytest.approx(np.mean(np.abs(data.test_labels - data.test_labels.mean())), rel=1e-5),
    }
    assert free.metrics["loss"] == pytest.approx(free.metrics["rmse"] ** 2, rel=1e-4)
    assert free.metrics["r2"] == pytest.approx(1 - (free.metrics["rmse"] / free.baseline["rmse"]) ** 2)


def test_several_labels_and_a_bundled_model_by_name():
    result = dovetail.train(
        dataset("labels"),
        model="mlp",
        protocol="fedavg",
        settings={
            "task.partition": "iid",
            "task.users": 20,
            "cohort.kind": "everyone",
            "cohort.rounds": 2,
            "client.update": "fedavg",
        },
    )
    assert result.accuracy > 0.85 > result.baseline["accuracy"] > 0.5
    assert len(result.metrics["recall"]) == 3


def test_one_logit_serves_two_classes_as_two_do():
    data = dataset("classes")
    one = Model(name="one", init=lambda key: jnp.zeros((5, 1)), apply=lambda w, x: x @ w)
    two = Model(
        name="two", init=lambda key: jnp.zeros((5, 1)), apply=lambda w, x: jnp.concatenate([0 * (x @ w), x @ w], axis=1)
    )
    found = [dovetail.train(data, model=model, protocol="fedavg", settings=EVERYONE).metrics for model in (one, two)]
    for name in ("loss", "accuracy", "auc", "macro_f1"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-5)
    assert found[0]["auc"] > 0.95


@pytest.mark.parametrize("protocol", ["central_sub", "local_sub"])
def test_records_are_protected_under_regression_with_an_own_loss(protocol):
    def absolute(outputs, labels):
        return jnp.abs(outputs[:, 0] - labels)

    settings = {
        "task.partition": "iid",
        "task.users": 10,
        "task.records": 300,
        "cohort.kind": "everyone",
        "cohort.rounds": 30,
        "privacy.unit": "item",
        "privacy.neighbors": "add-remove",
        "client.learning_rate": 1.0,
    }
    if protocol == "central_sub":
        settings["server.learning_rate"] = 0.5
    task = dovetail.Task(name="published", load=lambda *, folder: dataset("number"), published=True)
    result = dovetail.train(task, loss=absolute, protocol=protocol, eps=8.0, settings=settings)
    assert result.metrics["r2"] > 0.3
    assert result.metrics["loss"] == pytest.approx(result.metrics["mae"], rel=1e-4)
    assert result.statement.eps <= 8


def test_own_metrics_are_in_the_result_the_log_and_the_report(tmp_path):
    def within_one(outputs, labels):
        return np.mean(np.abs(outputs[:, 0] - labels) < 1)

    data = dataset("number")
    run = tmp_path / "run"
    result = dovetail.train(data, metrics={"within_one": within_one}, protocol="fedavg", settings=EVERYONE, out=run)
    assert 0.9 < result.metrics["within_one"] <= 1
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["metrics"] == result.metrics
    stated = json.loads((run / "privacy.json").read_text())
    assert stated["baseline"] == result.baseline
    page = pages.write(run).read_text()
    assert "test R2" in page
    assert "mean baseline" in page
    with pytest.raises(ValueError, match="'r2' is the name of a built-in metric: give your own metric another name"):
        dovetail.train(data, metrics={"r2": within_one}, protocol="fedavg", settings=EVERYONE)


@pytest.mark.parametrize("target", ["number", "classes"])
def test_a_training_that_diverges_is_written_as_json(tmp_path, target):
    wild = Model(name="wild", init=lambda key: jnp.ones((5, 1)), apply=lambda w, x: jnp.exp(500 * jnp.abs(x @ w)))
    settings = {**EVERYONE, "cohort.rounds": 3}
    result = dovetail.train(dataset(target), model=wild, protocol="fedavg", settings=settings, out=tmp_path / "run")
    assert not np.isfinite(result.metrics["loss"])

    def refuse(name):
        raise ValueError(name)

    for file in ("metrics.jsonl", "privacy.json"):
        text = (tmp_path / "run" / file).read_text()
        for part in text.splitlines() if file == "metrics.jsonl" else [text]:
            assert json.loads(part, parse_constant=refuse)["metrics"]["loss"] is None
    pages.write(tmp_path / "run")


def least_squares(parameters, records):
    """A client's own fit, halfway from the model that it was given."""
    x = np.column_stack([records.inputs, np.ones(len(records.inputs))])
    fit, *_ = np.linalg.lstsq(x, records.labels, rcond=None)
    return {
        "bias": (parameters["bias"] + fit[-1]) / 2,
        "slope": (parameters["slope"] + fit[:-1]) / 2,
    }


def test_any_function_of_parameters_and_records_trains():
    own = functions.model(
        {"slope": np.zeros(5), "bias": np.zeros(())},
        update=least_squares,
        predict=lambda parameters, inputs: inputs @ parameters["slope"] + parameters["bias"],
    )
    settings = {"task.partition": "iid", "task.users": 50, "cohort.kind": "everyone", "cohort.rounds": 5}
    data = dataset("number")
    free = dovetail.train(data, model=own, protocol="fedavg", settings=settings)
    assert free.metrics["r2"] > 0.95
    np.testing.assert_allclose(free.parameters["slope"], SLOPES, atol=0.1)
    private = dovetail.train(data, model=own, protocol="privunit", eps=8.0, settings=settings)
    assert private.statement.eps <= 8
    assert private.statement.verdict is Verdict.DECLARED
    line = "the function least_squares computes each user's update from that user's records alone"
    assert line in private.statement.assumptions and line in private.quote.local.assumptions
    with pytest.raises(ValueError, match=r"model 'own' trains by its own function and ignores client.learning_rate"):
        dovetail.train(data, model=own, protocol="fedavg", settings={**settings, "client.learning_rate": 0.5})
    item = {"privacy.unit": "item", "privacy.neighbors": "add-remove"}
    with pytest.raises(ValueError, match="'central_sub' needs a model with gradients"):
        dovetail.train(data, model=own, protocol="central_sub", eps=8.0, settings={**settings, **item})


def test_chunks_do_not_change_what_a_function_trains():
    own = functions.model(
        {"slope": np.zeros(5), "bias": np.zeros(())},
        update=least_squares,
        predict=lambda parameters, inputs: inputs @ parameters["slope"] + parameters["bias"],
    )
    settings = {"task.partition": "iid", "task.users": 50, "cohort.rounds": 2, "cohort.kind": "everyone"}
    found = [
        dovetail.train(
            dataset("number"),
            model=own,
            protocol="dp_fl",
            eps=8.0,
            settings={**settings, "noise": "seeded", "performance.chunk": chunk},
        ).parameters["slope"]
        for chunk in (1, 7, 50)
    ]
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, atol=1e-5)


def test_what_parties_cannot_train_is_refused():
    from dovetail.experiment.config import parse
    from dovetail.experiment.population import load_data_for_parties

    task = dovetail.Task(name="own", load=lambda *, folder: dataset("number"))
    config = parse({"task": {"name": "own"}, "protocol": {"name": "fedavg"}})
    with pytest.raises(ValueError, match="parties train JAX models on classes by cross-entropy"):
        load_data_for_parties(config, task=task)


def test_partitions_by_class_and_moments_refuse_numbers():
    settings = {**EVERYONE, "task.partition": "dirichlet", "task.users": 10}
    with pytest.raises(ValueError, match="goes by classes, and these data have target 'number'"):
        dovetail.train(dataset("number"), protocol="fedavg", settings=settings)
    with pytest.raises(ValueError, match=r"client.update = 'moments' needs classes and no loss of the model's own"):
        dovetail.train(dataset("number"), protocol="fedavg", settings={**EVERYONE, "client.update": "moments"})
    with pytest.raises(ValueError, match=r"expected a dovetail\.Model, a module of PyTorch.*, got a int"):
        dovetail.train(dataset("number"), model=3, protocol="fedavg", settings=EVERYONE)


def test_scores_of_classes_by_hand():
    labels = np.array([0, 0, 1, 1, 2])
    predicted = np.array([0, 1, 1, 1, 0])
    found = scoring._scores_of_classes(np.eye(4)[predicted], labels, 4)
    assert found["accuracy"] == 3 / 5
    assert found["recall"] == [1 / 2, 1, 0, None]
    assert found["macro_f1"] == pytest.approx((2 * 1 / 4 + 2 * 2 / 5 + 0) / 3)
