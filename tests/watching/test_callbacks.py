"""Callbacks: what is called when, with what, and what it costs to stop early."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import tiny

import dovetail
from dovetail import experiment
from dovetail.experiment import config
from dovetail.experiment.callbacks import OVERHEARD
from dovetail.experiment.folder import BANNER
from dovetail.experiment.verify import verify
from dovetail.statements import Verdict
from dovetail.watching import EarlyStopping

CONFIG = {
    "task": {"name": "tiny:TASK"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 20.0},
    "cohort": {"kind": "everyone", "rounds": 6},
}


def plan(**changes):
    return experiment.prepare(config.parse(CONFIG, changes.items()), task=tiny.TASK)


class Witness(dovetail.Callback):
    def __init__(self, stop_after=None, fail_after=None):
        self.calls, self.stop_after, self.fail_after = [], stop_after, fail_after

    def on_start(self, start):
        self.calls.append(("start", start))

    def on_round(self, progress):
        self.calls.append(("round", progress))
        if progress.round == self.fail_after:
            raise KeyboardInterrupt
        return progress.round == self.stop_after

    def on_diagnostics(self, diagnosis):
        self.calls.append(("diagnostics", diagnosis))

    def on_end(self, result):
        self.calls.append(("end", result))

    def on_failure(self, error):
        self.calls.append(("failure", error))

    def names(self):
        return [name for name, _ in self.calls]


def test_calls_come_in_order_with_what_the_statement_covers(tmp_path):
    seen = Witness()
    result = experiment.run(plan(), out=tmp_path / "run", evaluate_every=2, callbacks=[seen])
    assert seen.names() == ["start", *["round"] * 6, "end"]
    start = seen.calls[0][1]
    assert (start.round, start.rounds, start.folder) == (0, 6, tmp_path / "run")
    assert start.config["protocol"]["name"] == start.protocol["name"] == "dp_fl"
    rounds = [one for name, one in seen.calls if name == "round"]
    assert [one.round for one in rounds] == list(range(1, 7))
    assert [one.fresh for one in rounds] == [False, True] * 3
    assert {field.name for field in dataclasses.fields(rounds[0])} == {
        *("round", "rounds", "accuracy", "spent", "metrics", "fresh")
    }, "a new field needs a thought about what the statement covers"
    assert seen.calls[-1][1] is result
    assert (tmp_path / "run" / "privacy.json").exists()


def test_train_takes_callbacks():
    seen = Witness()
    settings = {"cohort.rounds": 2, "protocol.noise_multiplier": 20.0}
    dovetail.train(tiny.TASK, settings=settings | {"cohort.kind": "everyone"}, callbacks=[seen])
    assert seen.names() == ["start", "round", "round", "end"]


def test_diagnostics_come_apart_and_under_their_banner():
    quiet, loud = Witness(), Witness()
    experiment.run(plan(), callbacks=[quiet])
    experiment.run(plan(diagnostics=True), callbacks=[loud])
    assert "diagnostics" not in quiet.names()
    told = [one for name, one in loud.calls if name == "diagnostics"]
    assert [one.round for one in told] == list(range(1, 7))
    assert {one.banner for one in told} == {BANNER}
    assert set(told[0].values) == {"variance", "scale"}


def test_a_failure_is_told_and_can_be_resumed(tmp_path):
    seen, again = Witness(fail_after=4), Witness()
    with pytest.raises(KeyboardInterrupt):
        experiment.run(plan(), out=tmp_path / "run", checkpoint_every=2, callbacks=[seen])
    assert seen.names()[-1] == "failure"
    assert isinstance(seen.calls[-1][1], KeyboardInterrupt)
    experiment.run(plan(), out=tmp_path / "run", resume=True, callbacks=[again])
    assert again.calls[0][1].round == 4
    assert again.names() == ["start", "round", "round", "end"]


def test_what_fails_in_a_callback_hides_neither_the_error_nor_the_others():
    class Broken(dovetail.Callback):
        def on_failure(self, error):
            raise RuntimeError("not this one")

    last = Witness(fail_after=1)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(plan(), callbacks=[Broken(), last])
    assert last.names()[-1] == "failure"


def test_other_objects_are_refused():
    with pytest.raises(ValueError, match=r"dovetail\.Callback objects, got function"):
        experiment.run(plan(), callbacks=[lambda progress: None])


def test_all_planned_rounds_are_charged_where_a_callback_ends_the_training(tmp_path):
    stopped = experiment.run(plan(), out=tmp_path / "run", callbacks=[Witness(stop_after=2)])
    whole = experiment.run(plan())
    assert (stopped.rounds, stopped.charged_rounds, whole.charged_rounds) == (2, 6, 6)
    assert stopped.statement.eps == whole.statement.eps
    new = set(stopped.statement.assumptions) - set(whole.statement.assumptions)
    assert new == {"the training was ended by looking at released models and at public test records alone"}
    stated = json.loads((tmp_path / "run" / "privacy.json").read_text())
    assert (stated["rounds"], stated["charged_rounds"]) == (2, 6)
    assert "charged_rounds" not in whole.to_json()
    assert verify(tmp_path / "run").agrees
    (tmp_path / "run" / "privacy.json").write_text(json.dumps({**stated, "charged_rounds": 2}))
    assert not verify(tmp_path / "run").agrees


class Overhears(dovetail.Callback):
    """Ends a training by what raw updates are like."""

    loud = 0.0

    def on_diagnostics(self, diagnosis):
        self.loud = diagnosis.values["scale"]

    def on_round(self, progress):
        return self.loud > 0


def test_who_is_told_diagnostics_and_ends_the_training_has_to_vouch_for_that(tmp_path):
    """When a training ends is seen, and its statement was certified whatever the callback had gone by."""
    loud = experiment.run(plan(diagnostics=True), out=tmp_path / "run", callbacks=[Overhears()])
    assert loud.rounds == 1
    for statement in (loud.statement, *loud.units.values()):
        assert statement.verdict is Verdict.DECLARED or statement.is_unbounded
        assert OVERHEARD in statement.assumptions
    assert verify(tmp_path / "run").agrees
    assert verify(loud.save(tmp_path / "saved")).agrees
    others = [
        experiment.run(plan(diagnostics=True), callbacks=[EndsAfterTwo()]),
        experiment.run(plan(), callbacks=[Overhears(), EndsAfterTwo()]),
        experiment.run(plan(diagnostics=True), callbacks=[Witness()]),
    ]
    assert [one.rounds for one in others] == [2, 2, 6]
    assert {one.statement.verdict for one in others} == {Verdict.CERTIFIED}


class EndsAfterTwo(dovetail.Callback):
    def on_round(self, progress):
        return progress.round == 2


def test_rounds_that_do_not_fit_the_budget_are_not_charged():
    target = {"privacy.eps": plan().record([0, 1, 2, 3]).certified_statement().eps}
    stopped = experiment.run(plan(**target), callbacks=[Witness(stop_after=1)])
    assert (stopped.rounds, stopped.charged_rounds, stopped.planned_rounds) == (1, 4, 6)
    assert stopped.statement.eps <= target["privacy.eps"]


def test_early_stopping_waits_for_better_scores():
    stop = EarlyStopping("accuracy", public_test=True, patience=2)

    def told(round, score, fresh=True):
        metrics = {"accuracy": score}
        return stop.on_round(
            experiment.Progress(round=round, rounds=9, accuracy=score, spent=None, metrics=metrics, fresh=fresh)
        )

    assert [bool(told(i, score)) for i, score in enumerate([0.1, 0.5, 0.4, 0.6, 0.6, 0.5])] == [False] * 5 + [True]
    stop.on_start(SimpleNamespace(config={}))
    assert not any(told(i, 0.1, fresh=False) for i in range(5))
    lower = EarlyStopping("loss", public_test=True, patience=1)
    first = experiment.Progress(round=1, rounds=9, accuracy=None, spent=None, metrics={"loss": 1.0}, fresh=True)
    worse = dataclasses.replace(first, round=2, metrics={"loss": None})
    assert (lower.on_round(first), lower.on_round(worse)) == (False, True), "what is not a number is not better"
    with pytest.raises(ValueError, match="public_test=True"):
        EarlyStopping("loss", public_test=False)
    with pytest.raises(ValueError, match="this training has no metric 'auc': choose one of loss"):
        EarlyStopping("auc", public_test=True).on_round(first)


def test_early_stopping_ends_a_training():
    stop = EarlyStopping("r2", public_test=True)
    with pytest.raises(ValueError, match="accuracy"):
        experiment.run(plan(), callbacks=[stop])
    never = EarlyStopping("loss", public_test=True, patience=1, lower_is_better=False)  # the loss falls: stop at once
    assert experiment.run(plan(**{"protocol.noise_multiplier": 0.1}), callbacks=[never]).rounds == 2
