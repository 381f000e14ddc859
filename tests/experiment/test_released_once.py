"""Every round is released once: a run that is killed anywhere and resumed on other code shows one model per round.

An observer sees what a run lets out: checkpoints, lines of scores, callbacks, the files at the end. Runs are killed at
every moment at which one of these, or a round, begins or has ended, and resumed until they finish. The observer must
never have seen two models of one round, and must have seen no more rounds than are certified.
"""

import dataclasses
import functools
import hashlib
from collections import defaultdict

import jax.numpy as jnp
import numpy as np
import pytest
from grids import later
from resuming import SAID
from tiny import TASK

from dovetail import experiment
from dovetail.experiment import config, folder
from dovetail.experiment.callbacks import Callback
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import Plan
from dovetail.experiment.verify import verify

ROUNDS = 4
PROTOCOLS = {
    "dp_fl": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "secagg": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "split_and_mix": {"clip_norm": 0.5, "noise_multiplier": 3.0, "mixing_error": 1e-6},
    "ldp_fl": {"clip_norm": 0.5, "noise_multiplier": 3.0},
    "ss_double": {"clip_value": 0.3, "eps_local": 0.5, "beta": 0.4},
    "ss_topk": {"clip_value": 0.3, "eps_local": 0.5, "k": 3},
}


def cross_entropy(outputs, labels, *, power=1.0):
    logits = power * (outputs - jnp.log(jnp.sum(jnp.exp(outputs), axis=1, keepdims=True)))
    return -jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


def typed_into_a_notebook(source):
    names = {"__name__": "__main__", "jnp": jnp, "cross_entropy": cross_entropy}
    exec(source, names)
    return names["loss"]


LOSSES = {  # before the kill, and after it
    "notebook": [
        typed_into_a_notebook(f"def loss(outputs, labels):\n    return {scale} * cross_entropy(outputs, labels)")
        for scale in (1.0, 0.25)
    ],
    "partial": [functools.partial(cross_entropy, power=power) for power in (1.0, 0.25)],
}
WAYS = ("same", "general", "chunks", *LOSSES)


class Killed(BaseException):
    """What a process does not outlive."""


class Observer(Callback):
    """Sees all that leaves a run, and kills it at a moment of its own choice."""

    def __init__(self, monkeypatch, *, kill_at):
        self.checkpoints, self.scores, self.models = defaultdict(set), defaultdict(set), set()
        self.moments, self.kill_at = 0, kill_at
        self._around(monkeypatch, Plan, "step")
        self._around(monkeypatch, RunFolder, "save_checkpoint", self._see_checkpoint)
        self._around(monkeypatch, RunFolder, "append_metrics", self._see_line)
        self._around(monkeypatch, folder, "write_json")
        self._around(monkeypatch, folder, "write_atomically", self._see_file)

    def _around(self, monkeypatch, place, name, see=lambda *arguments: None):
        """Moments before and after a function of the run, whose effects are seen in between."""
        function = getattr(place, name)

        def watched(*arguments, **named):
            self._moment()
            result = function(*arguments, **named)
            see(*arguments)
            self._moment()
            return result

        monkeypatch.setattr(place, name, watched)

    def _moment(self):
        self.moments += 1
        if self.moments == self.kill_at:
            raise Killed

    def _see_checkpoint(self, _, saved):
        self.checkpoints[saved.round].add(_digest(saved.leaves))

    def _see_line(self, _, line):
        self.scores[line["round"]].add(line["metrics"]["mean_output"])

    def _see_file(self, path, content):
        if path.name == "model.npz":
            with np.load(path) as arrays:
                self.models.add(_digest(arrays[name] for name in sorted(arrays)))

    def on_round(self, progress):
        if progress.fresh:
            self.scores[progress.round].add(progress.metrics["mean_output"])
        self._moment()


def _digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def prepared(name, way, *, resumed):
    data = {
        "task": {"name": "tiny"},
        "cohort": {"kind": "everyone", "rounds": ROUNDS},
        "server": {"learning_rate": 1.0},
        "protocol": {"name": name, **PROTOCOLS[name]},
        "privacy": {"delta": 1e-5},
    }
    changed = {"general": [("performance.fast", False)], "chunks": [("performance.chunk", 7)]}
    task = dataclasses.replace(TASK, metrics={"mean_output": lambda outputs, labels: np.square(outputs).mean()})
    if way in LOSSES:
        task = dataclasses.replace(task, loss=LOSSES[way][resumed])
    return experiment.prepare(config.parse(data, changed.get(way, []) if resumed else []), task=task)


def train(name, way, out, observer):
    """Run until it is done: as often as it is killed, it is resumed, in another way."""
    kills, resumed = 0, False
    while True:
        try:
            result = experiment.run(
                prepared(name, way, resumed=resumed),
                out=out,
                resume=resumed,
                checkpoint_every=3,
                evaluate_every=2,
                callbacks=[observer],
            )
        except Killed:
            kills, resumed = kills + 1, (out / "checkpoint.npz").exists()
            if not resumed and (out / "config.toml").exists():
                (out / "config.toml").unlink()  # it had not begun
        except experiment.Finished:
            return kills, verify(out).statement
        else:
            return kills, result.statement


def count_moments(name, tmp_path):
    with pytest.MonkeyPatch.context() as patched:
        observer = Observer(patched, kill_at=None)
        train(name, "same", tmp_path / "uninterrupted", observer)
    return observer.moments


def one_model_per_round(name, way, kill_at, out):
    with pytest.MonkeyPatch.context() as patched:
        observer = Observer(patched, kill_at=kill_at)
        kills, statement = train(name, way, out, observer)
    assert kills == 1
    for seen in (observer.checkpoints, observer.scores):
        assert all(len(versions) == 1 for versions in seen.values()), (seen, kill_at)
    assert len(observer.models) == 1
    assert set(observer.checkpoints) <= set(range(ROUNDS + 1))
    assert set(observer.scores) == {2, 4}
    found = verify(out)
    assert found.agrees
    assert found.rounds == ROUNDS
    resumed = [line for line in statement.assumptions if line.startswith(SAID)]
    assert len(resumed) <= 1


@pytest.mark.parametrize("every", [4, later(1)])
def test_a_kill_at_any_moment_leaves_one_model_per_round(tmp_path, every):
    moments = count_moments("secagg", tmp_path)
    assert moments > 30
    for kill_at in range(1, moments + 1, every):
        one_model_per_round("secagg", "general", kill_at, tmp_path / f"run{kill_at}")


CASES = [(name, way) for name in PROTOCOLS for way in WAYS]
QUICK = {("dp_fl", "notebook"), ("split_and_mix", "partial"), ("ldp_fl", "chunks"), ("ss_topk", "same")}


@pytest.mark.parametrize(
    ("name", "way"), [case if case in QUICK else later(*case) for case in CASES], ids=lambda value: str(value)
)
def test_whatever_the_rest_is_run_on_no_round_is_seen_twice(tmp_path, name, way):
    moments = count_moments(name, tmp_path)
    for kill_at in range(11, moments, 9):
        one_model_per_round(name, way, kill_at, tmp_path / f"run{kill_at}")


@pytest.mark.torch
def test_an_edited_module_shows_one_model_per_round(tmp_path):
    """Tanh for ReLU: the same shapes, the same first weights, other updates."""
    torch = pytest.importorskip("torch")

    def module(activation):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), activation, torch.nn.Linear(4, 3))

    def ready(activation):
        data = {"task": {"name": "tiny"}, "cohort": {"kind": "everyone", "rounds": ROUNDS}, "privacy": {"delta": 1e-5}}
        data["protocol"] = {"name": "dp_fl", **PROTOCOLS["dp_fl"]}
        metrics = {"mean_output": lambda outputs, labels: np.square(outputs).mean()}
        task = dataclasses.replace(TASK, model=module(activation), metrics=metrics)
        return experiment.prepare(config.parse(data), task=task)

    out, runs = tmp_path / "run", {"checkpoint_every": 3, "evaluate_every": 2}
    with pytest.MonkeyPatch.context() as patched:
        observer = Observer(patched, kill_at=17)
        with pytest.raises(Killed):
            experiment.run(ready(torch.nn.ReLU()), out=out, callbacks=[observer], **runs)
        experiment.run(ready(torch.nn.Tanh()), out=out, resume=True, callbacks=[observer], **runs)
    assert {number: len(seen) for number, seen in observer.scores.items()} == {2: 1, 4: 1}
    assert len(observer.models) == 1
    assert verify(out).rounds == ROUNDS
