"""Config -> run -> `Result`.

`prepare` turns a config into a `Plan`, and refuses every bad input. `run` trains the plan. Before each round the budget
is asked whether the round still fits; if not, training ends there. A checkpoint holds all that a run needs to go on as
if it had never stopped: cohorts and noise depend on the run's randomness and the round alone. What a run states is
computed from its plan, and held against what the engine noted that it did before anything is written.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from dovetail import protocols, quotes
from dovetail.config import parse, presets, read, to_toml
from dovetail.fingerprint import difference, fingerprint
from dovetail.folder import RunFolder, Saved
from dovetail.plan import Plan, prepare
from dovetail.record import Record
from dovetail.simulate import Diagnostics, Training
from dovetail.simulate.devices import to_host
from dovetail.statements import Bound, Statement, Unit
from dovetail.tasks import Task

__all__ = ["Finished", "Progress", "Result", "prepare", "run", "train"]


class Finished(ValueError):  # noqa: N818 - nothing is wrong
    """A run was to be resumed that has ended; nothing was changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ended with."""

    accuracy: float
    rounds: int
    planned_rounds: int
    seconds_per_round: float
    uploads: int
    quote: quotes.Quote
    units: Mapping[Unit, Statement]
    parameters: Mapping[str, np.ndarray]
    out: Path | None

    @property
    def statement(self) -> Statement:
        """What is certified."""
        return self.quote.certified

    def to_json(self) -> dict[str, Any]:
        """The machine-readable summary."""
        return {
            "accuracy": self.accuracy,
            "rounds": self.rounds,
            "planned_rounds": self.planned_rounds,
            "seconds_per_round": self.seconds_per_round,
            "uploads": self.uploads,
            **{key: value for key, value in self.quote.to_json().items() if key != "protocol"},
            "units": {unit.value: statement.to_json() for unit, statement in self.units.items()},
            "out": None if self.out is None else str(self.out),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands after a round; accuracy and what is spent are those of the last evaluation."""

    round: int
    rounds: int
    accuracy: float | None
    spent: Bound | None

    def to_json(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`; an unbounded eps is null."""
        spent = self.spent if self.spent is not None and math.isfinite(self.spent.eps) else None
        return {
            "round": self.round,
            "accuracy": self.accuracy,
            "eps": None if spent is None else spent.eps,
            "delta": None if spent is None else spent.delta,
        }


def train(
    task: str | Task,
    *,
    protocol: str = "dp_fl",
    eps: float | None = None,
    delta: float | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
) -> Result:
    """Train privately: the one door for newcomers.

    `task` is a registered name, ``"module:name"`` or a `Task`; `settings` overrides config keys by dotted path, for
    example ``{"cohort.rounds": 50}``. Without `out` nothing is written.

    A task whose name is that of a preset starts from it: model, cohort, server, the protocol's settings where it is the
    same protocol, and the privacy target where `eps` or `delta` is not given, which is (2, 1e-05) for "digits" and
    (1, 5e-06) for "mnist". Other tasks have a `delta` of 1e-05 and no `eps`: without one, the noise must be in
    `settings`.
    """
    name = task if isinstance(task, str) else task.name
    data: dict[str, Any] = {"task": {"name": name}, "protocol": {"name": protocol}}
    if name in presets():
        data = msgspec.to_builtins(read(name))
        if data["protocol"]["name"] != protocol:
            data["protocol"] = {"name": protocol}
    overrides = {"privacy.eps": eps, "privacy.delta": delta}
    chosen = [(key, value) for key, value in overrides.items() if value is not None] + list((settings or {}).items())
    plan = prepare(parse(data, chosen), task=task if isinstance(task, Task) else None)
    return run(plan, out=None if out is None else Path(out))


def run(
    plan: Plan,
    *,
    out: Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    evaluate_every: int | None = None,
    observe: Callable[[Progress], None] | None = None,
) -> Result:
    """Train a plan; writes into `out` if given, and goes on from its last checkpoint if `resume`.

    Guarantees:
        No round starts that would overspend the budget; no round below the minimum size is released.
        A run that was killed and resumed ends with the same model and the same statement as one that was not.
        To resume is refused where anything that the statement rests on has changed, and raises `Finished` where there
        is nothing left to do; nothing is written then.
        What is stated of the rounds is what the engine noted of them, or nothing is written.
        No two runs have the same noise, also of one plan, unless it is seeded.
    """
    folder, saved, identity = _open(plan, out, resume)
    plan = plan.renewed() if saved is None else plan.resumed(saved.root)
    training, released = _begin(plan, saved)
    record = plan.record_of([]) if saved is None else saved.record
    if folder and saved is None:
        folder.save(_saved(plan, 0, [], record, identity, training))
    every = evaluate_every or max(1, len(plan.rounds) // 20)
    affordable = plan.affordable()
    progress = Progress(round=saved.round if saved else 0, rounds=len(plan.rounds), accuracy=None, spent=None)
    seconds: list[float] = []

    while progress.round < progress.rounds:
        index = progress.round
        if index >= affordable and not plan.fits([*released, index]):
            break
        users = plan.schedule.draw(index)
        if len(users) >= plan.schedule.min_size:
            began = time.perf_counter()
            training = plan.step(training, index, users)
            jax.block_until_ready(training)
            seconds.append(time.perf_counter() - began)
            released.append(index)
            record = record.followed_by(plan.record_of(plan.engine.ran[-1:]))
            if folder and isinstance(training.diagnostics, Diagnostics):
                folder.diagnose({"round": index + 1, **_diagnosed(training.diagnostics)})
        progress = dataclasses.replace(progress, round=index + 1)
        if progress.round % every == 0:
            progress = _evaluated(plan, training, released, progress)
            if folder:
                folder.log(progress.to_json())
        if folder and progress.round % checkpoint_every == 0:
            folder.save(_saved(plan, progress.round, released, record, identity, training))
        if observe:
            observe(progress)

    if record != plan.record(released):
        raise RuntimeError("the engine did not run what the plan states: nothing is certified, and nothing was written")
    result = _result(plan, training, released, seconds, out)
    if folder:
        stated = {**result.to_json(), "noise": plan.config.noise, "protocol": _described(plan.protocol)}
        folder.finish(stated, record, result.parameters)
    return result


def _result(plan: Plan, training: Training, released: list[int], seconds: list[float], out: Path | None) -> Result:
    return Result(
        accuracy=plan.engine.accuracy(training),
        rounds=len(released),
        planned_rounds=len(plan.rounds),
        seconds_per_round=float(np.median(seconds[1:] or seconds or [0.0])),  # the first one compiles
        uploads=sum(plan.schedule.size_of(index) for index in released),
        quote=plan.quote(released),
        units=plan.table(released),
        parameters=plan.engine.model_arrays(training),
        out=out,
    )


def _open(plan: Plan, out: Path | None, resume: bool) -> tuple[RunFolder | None, Saved | None, Mapping[str, Any]]:
    """The run's folder (the first process alone writes to it), the checkpoint to go on from, and what the run is."""
    if out is None:
        return None, None, {}
    folder = RunFolder.reopen(out) if resume else None
    if folder is not None and folder.finished:
        folder.forget()  # a kill may have come between the statement and this
        raise Finished(f"the run in {str(out)!r} is finished: nothing to resume, and nothing was changed")
    first = jax.process_index() == 0
    identity = fingerprint(plan.config, plan.protocol, plan.dataset, plan.clients, plan.engine.first)
    if folder is None:
        return RunFolder.create(out, to_toml(plan.config)) if first else None, None, identity
    saved = folder.saved()
    if changed := difference(saved.fingerprint, identity):
        raise ValueError(f"expected the run that began in {str(out)!r}, got another one: {changed}")
    if saved.record != plan.record(list(saved.released)):
        raise ValueError(f"expected the rounds that were released in {str(out)!r}, got a plan of other rounds")
    if not first:
        return None, saved, identity
    folder.drop_after(saved.round)
    return folder, saved, identity


def _saved(
    plan: Plan, done: int, released: list[int], record: Record, identity: Mapping[str, Any], training: Training
) -> Saved:
    return Saved(
        round=done,
        released=tuple(released),
        record=record,
        fingerprint=identity,
        root=plan.randomness.root,
        leaves=_leaves(training),
    )


def _begin(plan: Plan, saved: Saved | None) -> tuple[Training, list[int]]:
    training = plan.engine.start()
    if saved is None:
        return training, []
    leaves, structure = jax.tree.flatten(training)
    if len(leaves) != len(saved.leaves):
        raise ValueError(f"expected a checkpoint of {len(leaves)} arrays, got {len(saved.leaves)}")
    return plan.engine.place(jax.tree.unflatten(structure, saved.leaves)), list(saved.released)


def _leaves(training: Training) -> tuple[np.ndarray, ...]:
    return tuple(to_host(leaf) for leaf in jax.tree.leaves(training))


def _evaluated(plan: Plan, training: Training, released: list[int], progress: Progress) -> Progress:
    return dataclasses.replace(progress, accuracy=plan.engine.accuracy(training), spent=plan.spent(released))


def _diagnosed(diagnostics: Diagnostics) -> dict[str, float]:
    return {name: float(to_host(value)) for name, value in diagnostics._asdict().items()}


def _described(protocol: protocols.Protocol) -> dict[str, Any]:
    settings = dataclasses.asdict(protocol)  # type: ignore[call-overload]
    settings.pop("group_in_batch", None)  # read off the data
    return {"name": protocol.name, **settings}
