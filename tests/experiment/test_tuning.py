"""Settings chosen by training with several: one statement covers all that was tried."""

import dataclasses
import json
import math
import types
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tiny
from tiny import TASK

import dovetail
from dovetail import pages
from dovetail.accounting.releases import selection
from dovetail.data import Dataset, Task
from dovetail.experiment import config, tuning
from dovetail.experiment.tuning import Space, parse_space
from dovetail.experiment.verify import verify
from dovetail.statements import TUNING_ASSUMPTION, NotApplicable

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "privacy.schema.json").read_text())
BASE = {
    "task": {"name": "tiny:TASK"},
    "cohort": {"kind": "everyone", "rounds": 4},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"delta": 1e-5},
}
SPACE = Space(axes={"protocol.clip_norm": (0.5, 1.0), "server.learning_rate": (0.5,)})


def tuned(*overrides, space=SPACE, eps=2.0, public_test=True, **more):
    return tuning.run_trials(config.parse(BASE, overrides), space, eps=eps, public_test=public_test, task=TASK, **more)


@pytest.fixture
def few(monkeypatch):
    """Three trials, whatever is drawn."""
    monkeypatch.setattr(selection, "trials_at_quantile", lambda uniform, *, eta, gamma: 3)


@pytest.mark.parametrize("by", ["selection", "composition"])
def test_one_statement_covers_all_trials_and_can_be_verified(by, few, tmp_path):
    found = tuned(by=by, out=tmp_path / "run")
    statement = found.result.statement
    assert 1.99 < statement.eps <= 2.0
    assert TUNING_ASSUMPTION not in statement.assumptions
    assert any("choice among 2 settings of protocol.clip_norm" in said for said in statement.assumptions)
    assert verify(tmp_path / "run").agrees
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(stated)
    assert stated["tuning"]["chosen"] == dict(found.best_setting)
    assert stated["protocol"]["clip_norm"] == found.best_setting["protocol.clip_norm"]
    assert "Choices made by looking at the private data" not in pages.write(tmp_path / "run").read_text()
    with pytest.raises(ValueError, match="already holds a run"):
        tuned(by=by, out=tmp_path / "run")


def test_a_changed_tuning_is_found(few, tmp_path):
    tuned(out=tmp_path / "run")
    file = tmp_path / "run" / "privacy.json"
    stated = json.loads(file.read_text())
    stated["tuning"]["mean_trials"] = 1.1
    file.write_text(json.dumps(stated))
    assert any("mean_trials" in said for said in verify(tmp_path / "run").differences)


def test_of_trials_that_were_not_chosen_nothing_is_told(few, tmp_path):
    found = tuned(out=tmp_path / "run", number=2.5)
    assert found.facts["by"] == "selection" and found.facts["trials"] is None
    assert found.facts["mean_trials"] == pytest.approx(2.5)
    assert found.result.uploads == 4 * 300  # those of one trial
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_all_trials_are_told_where_all_are_counted():
    found = tuned(by="composition")
    assert [one["setting"]["protocol.clip_norm"] for one in found.facts["trials"]] == [0.5, 1.0]
    assert found.result.accuracy == max(one["accuracy"] for one in found.facts["trials"])
    assert found.result.uploads == 2 * 4 * 300
    assert len(found.record.own.rounds) == 2 * 4
    assert len(tuned(by="composition", number=1).facts["trials"]) == 1


def test_without_a_curator_all_trials_are_counted():
    shuffled = [("protocol", {"name": "ss_simple"}), ("cohort.rounds", 1), ("task.users", 50)]
    space = Space(axes={"protocol.clip_value": (0.05, 0.1)})
    found = tuned(*shuffled, space=space, eps=4.0)
    assert found.facts["by"] == "composition" and found.result.statement.eps <= 4.0
    assert found.result.statement.trust.value == "shuffle" and len(found.record.own.rounds) == 2
    with pytest.raises(NotApplicable, match=r"the analyzer sees every one of them.*by composition"):
        tuned(*shuffled, space=space, eps=4.0, by="selection")


def test_the_best_of_non_private_trials_is_refused_a_statement():
    with pytest.raises(ValueError, match="'fedavg' gives no guarantee with these settings"):
        tuned(("protocol", {"name": "fedavg"}), space=Space(axes={"server.learning_rate": (0.5, 1.0)}))


def test_a_choice_by_records_that_are_not_public_is_refused_a_statement():
    with pytest.raises(ValueError, match=r"declared public: pass public_test=True \(--public-test\).* no statement"):
        tuned(public_test=False)


@pytest.mark.parametrize(
    ("overrides", "more", "message"),
    [
        ([("noise", "seeded")], {}, "would share their noise"),
        ([("protocol.noise_multiplier", 3.0)], {}, "tuning sets the noise of every trial itself"),
        ([("privacy.eps", 1.0), ("privacy.stop", "delta")], {}, "privacy.stop = 'eps'"),
        ([], {"number": 3, "by": "composition"}, "expected 1 to 2 trials"),
        ([], {"number": 1.0}, "mean number of trials > 1"),
        (
            [],
            {"score": "auc"},
            "these data have, one of accuracy, macro_f1, loss, or a function of yours, got score='auc'",
        ),
        ([], {"score": "r2"}, "these data have, one of accuracy, macro_f1, loss, .* got score='r2'"),
        ([], {"by": "chance"}, "by to be one of"),
    ],
)
def test_what_cannot_be_tuned_is_refused(overrides, more, message):
    with pytest.raises(ValueError, match=message):
        tuned(*overrides, **more)


def test_a_space_is_of_settings_that_say_how_to_train():
    space = parse_space(["protocol.clip_norm=0.1,0.5", "server.optimizer=sgd,adam"])
    assert space.axes == {"protocol.clip_norm": (0.1, 0.5), "server.optimizer": ("sgd", "adam")}
    assert len(space.settings) == 4
    for text in ("privacy.delta=0.1,0.2", "seed=1,2", "protocol.name=dp_fl,fedavg", "task.name=a,b", "noise=os"):
        with pytest.raises(ValueError, match="a key that says how to train"):
            parse_space([text])
    for texts in (["protocol.clip_norm"], ["protocol.clip_norm="], ["client.mu=1", "client.mu=2"], []):
        with pytest.raises(ValueError, match="expected"):
            parse_space(texts)


def test_the_command_line(command, few, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(config.parse(BASE)))
    words = ["tune", str(file), "--space", "protocol.clip_norm=0.5,1.0", "--eps", "2", "--out", str(tmp_path / "run")]
    status, _, err = command(*words)
    assert status == 2 and "--public-test" in err
    status, out, _ = command(*words, "--public-test", "--json")
    told = json.loads(out)
    assert status == 0 and told["certified"]["eps"] <= 2 and told["tuning"]["by"] == "selection"
    assert (tmp_path / "run" / "report.html").exists()
    status, out, _ = command("verify", str(tmp_path / "run"))
    assert status == 0 and "agrees" in out
    words[-1] = str(tmp_path / "all")
    status, out, _ = command(*words, "--public-test", "--by", "composition")
    assert status == 0 and out.count("protocol.clip_norm=") == 3 and "8 rounds" in out


@pytest.mark.parametrize("scores", [[math.nan, 0.9], [0.9, math.nan], [-math.inf, 0.9], [None, 0.9]])
def test_a_score_that_is_no_number_is_the_worst(scores):
    found = [tuning._score_of_result(types.SimpleNamespace(metrics={"auc": score}), "auc") for score in scores]
    ordered = [tuning._as_larger_is_better(score, "auc") for score in found]
    assert max(ordered) == 0.9
    assert not any(map(math.isnan, ordered))


def test_of_losses_and_errors_the_smallest_is_the_best():
    for name in ("loss", "rmse", "mae"):
        assert max([2.0, 0.5, math.nan, math.inf], key=lambda score: tuning._as_larger_is_better(score, name)) == 0.5
    assert max([2.0, 0.5], key=lambda score: tuning._as_larger_is_better(score, "r2")) == 2.0


# from Python


def numbers():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (400, 3)).astype(np.float32)
    y = (x @ np.array([0.5, -0.3, 0.1]) + 0.02 * rng.normal(size=400)).astype(np.float32)
    return Dataset.from_arrays(x, y, test=(x[:100], y[:100]))


def near(outputs, labels):
    return float(np.mean(np.abs(outputs.ravel() - labels) < 0.1))


STEPS = {"server.learning_rate": [1e-3, 0.3]}
FEW_ROUNDS = {"cohort.rounds": 3, "server.optimizer": "sgd"}


@pytest.mark.parametrize("score", [None, "rmse", near])
def test_numbers_are_tuned_by_any_score_from_python(score, tmp_path):
    asked = {"space": STEPS, "eps": 4.0, "public_test": True, "by": "composition", "settings": FEW_ROUNDS}
    result = dovetail.tune(numbers(), **asked, score=score, out=tmp_path / "run")
    assert isinstance(result, dovetail.Result)
    name = {None: "r2", near: "near"}.get(score, score)
    assert result.tuning["score"] == name
    assert result.tuning["chosen"] == {"server.learning_rate": 0.3}
    assert "chosen: server.learning_rate=0.3" in repr(result)
    told = [one["score"] for one in result.tuning["trials"]]
    best = min(told) if name in ("rmse", "loss") else max(told)
    assert result.metrics[name] == best != told[0]
    assert 3.99 < result.statement.eps <= 4
    assert any(
        "scored on the test records of the data, which are public" in said for said in result.statement.assumptions
    )
    assert result.rounds == 3
    assert verify(tmp_path / "run").agrees
    np.testing.assert_array_equal(
        dovetail.load(tmp_path / "run").predict(numbers().test_inputs), result.predict(numbers().test_inputs)
    )
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(stated)
    assert stated["tuning"]["score"] == name


def test_of_a_selection_from_python_nothing_else_is_told(few):
    result = dovetail.tune(numbers(), space=STEPS, eps=4.0, public_test=True, trials=2, settings=FEW_ROUNDS)
    assert result.tuning["by"] == "selection"
    assert result.tuning["trials"] is None
    assert result.tuning["mean_trials"] == pytest.approx(2)
    assert result.statement.eps <= 4
    with pytest.raises(ValueError, match="the result of tuning cannot be saved"):
        result.save("never")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public_test": False}, "declared public: pass public_test=True"),
        (
            {"score": "accuracy"},
            "these data have, one of r2, rmse, mae, loss, or a function of yours, got score='accuracy'",
        ),
        (
            {"space": {"server.learning_rate": 0.1}},
            r"a list of values to try in space={'server.learning_rate': \[...\]}",
        ),
        ({"space": {"privacy.eps": [1, 2]}}, "a key that says how to train"),
        ({"space": {}}, "expected a space with keys and values"),
        (
            {"settings": {"server.learning_rate": 1.0}},
            "expected 'server.learning_rate' in settings or in space, got it in",
        ),
    ],
)
def test_what_python_cannot_tune_is_refused_before_any_trial(changes, message, monkeypatch):
    monkeypatch.setattr(tuning, "run", lambda plan: pytest.fail("a trial ran"))
    asked = {"space": STEPS, "eps": 4.0, "public_test": True, "settings": FEW_ROUNDS}
    with pytest.raises(ValueError, match=message):
        dovetail.tune(numbers(), **{**asked, **changes})


def test_the_command_line_tunes_numbers(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "NUMBERS", Task(name="numbers", load=lambda *, folder: numbers()), raising=False)
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(config.parse(BASE, [("task.name", "tiny:NUMBERS"), ("cohort.rounds", 2)])))
    words = ["tune", str(file), "--space", "server.learning_rate=0.001,0.3", "--eps", "4", "--public-test"]
    status, out, err = command(*words, "--by", "composition", "--out", str(tmp_path / "run"))
    assert status == 0, err
    assert out.splitlines()[0].split() == ["setting", "r2"]
    assert "chosen: server.learning_rate=0.3" in out


@pytest.mark.parametrize(
    "protocol", [{"name": "dp_fl", "clip_norm": 1.0}, {"name": "ldp_fl", "randomizer": "laplace", "clip_value": 1.0}]
)
def test_the_noise_that_a_trial_starts_from_is_what_it_needs_alone(protocol):
    """It grows with the noise, whether that is given as a multiplier or as a budget."""
    asked = config.parse({**BASE, "protocol": protocol}, [("privacy.eps", 3.0)])
    guarantee, noise = tuning._guarantee_and_noise(asked, TASK)
    eps = [
        dataclasses.replace(guarantee, protocol=guarantee.protocol.with_noise(noise * factor)).bound().eps
        for factor in (0.8, 1.0, 1.25)
    ]
    assert eps[1] == pytest.approx(3.0, rel=1e-2) and eps[0] > eps[1] > eps[2]


def test_a_space_has_as_many_settings_as_all_can_be_tried():
    axes = {"client.learning_rate": tuple(range(1, 101)), "client.batch": tuple(range(1, 101))}
    assert len(Space(axes=axes).settings) == 10_000
    with pytest.raises(ValueError, match="expected a space of at most 10000 settings, got 10100"):
        Space(axes={**axes, "client.batch": tuple(range(1, 102))})
