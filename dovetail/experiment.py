"""Config -> run -> `Result`.

`prepare` turns a config into a `Plan`, and refuses every bad input. `run` trains the plan. Before each round the budget
is asked whether the round still fits; if not, training ends there. A checkpoint holds all that a run needs to go on as
if it had never stopped: cohorts and noise depend on the seed and the round alone.
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
from dovetail.folder import RunFolder, Saved
from dovetail.plan import Plan, prepare
from dovetail.simulate import Diagnostics, Training
from dovetail.simulate.devices import to_host
from dovetail.statements import Bound, Statement, Unit
from dovetail.tasks import Task

__all__ = ["Progress", "Result", "prepare", "run", "train"]


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
    """
    folder, saved = _open(plan, out, resume)
    training, released = _begin(plan, saved)
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
            if folder and isinstance(training.diagnostics, Diagnostics):
                folder.diagnose({"round": index + 1, **_diagnosed(training.diagnostics)})
        progress = dataclasses.replace(progress, round=index + 1)
        if progress.round % every == 0:
            progress = _evaluated(plan, training, released, progress)
            if folder:
                folder.log(progress.to_json())
        if folder and progress.round % checkpoint_every == 0:
            folder.save(Saved(round=progress.round, released=tuple(released), leaves=_leaves(training)))
        if observe:
            observe(progress)

    result = _result(plan, training, released, seconds, out)
    if folder:
        folder.finish({**result.to_json(), "protocol": _described(plan.protocol)}, result.parameters)
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


def _open(plan: Plan, out: Path | None, resume: bool) -> tuple[RunFolder | None, Saved | None]:
    """The run's folder (the first process alone writes to it) and the checkpoint to go on from."""
    if out is None:
        return None, None
    config = to_toml(plan.config)
    folder, saved = RunFolder.reopen(out, config) if resume else (None, None)
    if jax.process_index() != 0:
        return None, saved
    if folder is None:
        return RunFolder.create(out, config), None
    folder.drop_after(saved.round if saved else 0)
    return folder, saved


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
