"""Config -> run -> `Result`.

`prepare` turns a config into a `Plan`, and refuses every bad input. `run` trains the plan. The budget is checked before
the first round, and again before each round from the first that might not fit; if a round would exceed it, training
ends there. What a run states is computed from its plan, and compared with the engine's record of what it did before
anything is written.

A round is released once (docs/proofs/resume.md). Its model is in a durable checkpoint before anybody sees anything of
it: a score, a line of the log, a callback, a file. A run that is resumed goes on from its newest checkpoint, so what a
kill threw away was seen by nobody; it draws new noise and new samples, whatever the code, the backend or the number of
processes may be by then. No noise key is ever written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from dovetail import protocols
from dovetail.data import Dataset, Loss, Metric, Task
from dovetail.engine import Diagnostics, Training
from dovetail.engine.devices import to_host
from dovetail.engine.scoring import baseline
from dovetail.experiment._origin import check_key, origin_of
from dovetail.experiment._own import default_cohort, default_server, task_of
from dovetail.experiment.callbacks import OVERHEARD, STOPPED, Callback, Callbacks, Diagnosis, RunStart
from dovetail.experiment.config import parse, presets, read, to_toml
from dovetail.experiment.fingerprint import difference, fingerprint
from dovetail.experiment.folder import Checkpoint, RunFolder
from dovetail.experiment.plan import rounds_due
from dovetail.experiment.preparation import Plan, prepare
from dovetail.experiment.result import Progress, Provenance, Result, describe_protocol
from dovetail.guarantee import Record

__all__ = ["Finished", "Progress", "Result", "prepare", "run", "train"]


class Finished(ValueError):  # noqa: N818 - nothing is wrong
    """The run to be resumed has already ended; nothing was changed."""


def train(
    task: str | Task | Dataset,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    protocol: str = "dp_fl",
    eps: float | None = None,
    delta: float | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a model with differential privacy: the simplest entry point.

    `task` is a registered name, ``"module:name"``, a `Task` or a `Dataset`. `model` is a bundled model by name, a
    `Model`, a module of PyTorch, Flax or Equinox, or a function from a `RecordSpec` to one of these; `loss` is a name
    of `learners.losses.LOSSES` or a function ``(outputs, labels) -> one loss per record``; `metrics` are functions
    ``(outputs, labels) -> number`` of the test records, by name. `settings` overrides config keys by dotted path, for
    example ``{"cohort.rounds": 50}``. Without `out` nothing is written; with `resume`, the run that was interrupted
    there goes on, given the same arguments. `callbacks` watch (see `Callback`).

    If a preset has the name of the task, training starts from it: model, cohort, server, the protocol's settings if
    it is the same protocol, and the privacy target if `eps` or `delta` is not given, which is (2, 1e-05) for "digits"
    and (1, 5e-06) for "mnist". Other tasks have a `delta` of 1e-05 and no `eps`; without `eps`, `settings` must give
    the noise. Every protocol has defaults for all other settings, including its clip norm. On a `Dataset`, all users
    take part in each of 30 rounds, unless `settings` say otherwise; where labels are numbers, and loss and
    model are not your own, the server's step is 1 / (2 + number of inputs), which is safe on inputs in [-1, 1].
    """
    named = {"task.model": model} if isinstance(model, str) else {}
    chosen_task = task_of(task, model=None if named else model, loss=loss, metrics=metrics)
    name = task if isinstance(task, str) else chosen_task.name
    data: dict[str, Any] = {"task": {"name": name}, "protocol": {"name": protocol}}
    if isinstance(task, Dataset):
        data["cohort"] = default_cohort(settings or {})
        data["server"] = default_server(task, settings or {}, own=loss is not None or bool(model and not named))
        data["privacy"] = {"neighbors": protocols.find(protocol).relation.value}
    elif name in presets():
        data = msgspec.to_builtins(read(name))
        if data["protocol"]["name"] != protocol:
            data["protocol"] = {"name": protocol}
            data["privacy"]["neighbors"] = protocols.find(protocol).relation.value
    overrides = {**named, "privacy.eps": eps, "privacy.delta": delta}
    chosen = [(key, value) for key, value in overrides.items() if value is not None] + list((settings or {}).items())
    plan = prepare(parse(data, chosen), task=chosen_task)
    return run(plan, out=None if out is None else Path(out), resume=resume, callbacks=callbacks)


def run(
    plan: Plan,
    *,
    out: Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train a plan; writes into `out` if given, and continues from its last checkpoint if `resume`.

    Guarantees:
        No round starts that would overspend the budget; no round below the minimum size is released.
        Every round has at most one model that anybody could have seen, also in runs that were killed and resumed, on
        other code, another backend or in other processes: what is certified is what an observer can count.
        No round's noise is drawn twice: a run that is resumed has noise of its own from there on. (Seeded noise follows
        from the seed and the round, and the run ends with the model of an uninterrupted one.)
        To resume is refused where the config, the protocol, the data or the users have changed, and raises `Finished`
        where there is nothing left to do; nothing is written then.
        The statement describes the rounds as the engine recorded them, or nothing is written.
        No two runs have the same noise, even of the same plan, unless the noise is seeded.
        Callbacks see what the statement covers, and diagnostics under their banner; where one of them ends the
        training, the statement is that of all rounds that were planned and could be paid for.
    """
    watching = Callbacks(callbacks if jax.process_index() == 0 else ())
    with contextlib.ExitStack() as held, watching.told_of_failure():
        run = _begin(plan, *_open(plan, out, resume, held))
        watching.on_start(RunStart.of(plan, round=run.progress.round, folder=out))
        run.train(checkpoint_every=checkpoint_every, evaluate_every=evaluate_every, watching=watching)
        watching.on_end(result := run.finish(out))
        return result


@dataclasses.dataclass(kw_only=True)
class _Run:
    """A training under way: where it stands, what the engine noted of it, and the folder it is written to, if any."""

    plan: Plan
    folder: RunFolder | None
    identity: Mapping[str, Any]
    training: Training
    record: Record
    released: list[int]
    progress: Progress
    resumed: tuple[int, ...] = ()  # the rounds after which it was resumed
    seconds: list[float] = dataclasses.field(default_factory=list)
    forgone: list[int] = dataclasses.field(default_factory=list)  # charged, and not run
    overheard: bool = False  # by a callback that is told diagnostics, in a training that a callback ended
    _saved_round: int | None = None  # of the checkpoint that this process wrote

    def train(self, *, checkpoint_every: int, evaluate_every: int | None, watching: Callbacks) -> None:
        """Run the rounds that are left and fit the budget, until a callback has seen enough."""
        plan, every = self.plan, evaluate_every or max(1, len(self.plan.rounds) // 20)
        self.save()
        if self.progress.round % every == 0 and self._lacks_scores():
            self.score()
        for index, users in rounds_due(plan, self.released, start=self.progress.round):
            if len(users) >= plan.schedule.min_size:
                self.step(index, users, watching)
            self.progress = dataclasses.replace(self.progress, round=index + 1, fresh=False)
            is_scored = self.progress.round % every == 0
            if is_scored or self.progress.round % checkpoint_every == 0:
                self.save()
            if is_scored:
                self.score()
            if watching.on_round(self.progress):
                self.forgo()
                self.overheard = plan.config.diagnostics and watching.hears_diagnostics
                break
        self.save()

    def _lacks_scores(self) -> bool:
        """Whether a kill came between the checkpoint of a round and the line with its scores."""
        if self.folder is None or self.progress.round == 0:
            return False
        return all(line.get("round") != self.progress.round for line in self.folder.metrics())

    def score(self) -> None:
        """Score the model on the test records, and write that down; its checkpoint is there already."""
        scores = self.plan.engine.metrics(self.training)
        self.progress = dataclasses.replace(
            self.progress,
            accuracy=scores.get("accuracy"),
            metrics=scores,
            spent=self.plan.spent_bound(self.released),
            fresh=True,
        )
        if self.folder:
            self.folder.log(self.progress.to_json())

    def forgo(self) -> None:
        """Charge the rounds that are left, for the models decided that they are not run."""
        charged = list(self.released)
        for index, users in rounds_due(self.plan, charged, start=self.progress.round):
            charged += [index] if len(users) >= self.plan.schedule.min_size else []
        self.forgone = charged[len(self.released) :]

    def step(self, index: int, users: np.ndarray, watching: Callbacks) -> None:
        """Run one round, and note what it was."""
        began = time.perf_counter()
        self.training = self.plan.step(self.training, index, users)
        jax.block_until_ready(self.training)
        self.seconds.append(time.perf_counter() - began)
        self.released.append(index)
        self.record = self.record.followed_by(self.plan.record_of(self.plan.engine.round_logs[-1:]))
        if isinstance(self.training.diagnostics, Diagnostics):
            values = _diagnosed(self.training.diagnostics)
            if self.folder:
                self.folder.diagnose({"round": index + 1, **values})
            watching.on_diagnostics(Diagnosis(round=index + 1, values=values))

    def save(self) -> None:
        """Replace the checkpoint, where there is a folder and this process has not written this one yet."""
        if self.folder is None or self._saved_round == self.progress.round:
            return
        saved = Checkpoint(
            round=self.progress.round,
            released=tuple(self.released),
            resumed=self.resumed,
            record=self.record,
            fingerprint=self.identity,
            leaves=tuple(to_host(leaf) for leaf in jax.tree.leaves(self.training)),
        )
        self.folder.save(saved)
        self._saved_round = self.progress.round

    def finish(self, out: Path | None) -> Result:
        """The result, written if there is a folder; refuses to state what the engine did not do."""
        plan = self.plan
        if self.record != plan.record(self.released):
            raise RuntimeError(
                "the engine did not run what the plan states, so nothing is certified and nothing was written"
            )
        result = self.result(out)
        if self.folder:
            result.write(self.folder)
        return result

    def result(self, out: Path | None) -> Result:
        """What it ended with, and what is stated of the rounds that are charged."""
        plan, released, charged = self.plan, self.released, [*self.released, *self.forgone]
        if self.resumed:
            plan = plan.with_assumption(_resumed_after(self.resumed))
        if self.forgone:
            plan = plan.with_assumption(STOPPED)
            plan = plan.with_declaration(OVERHEARD) if self.overheard else plan
        predictor, scores = plan.predictor(self.training), plan.engine.metrics(self.training)
        return Result(
            accuracy=scores.get("accuracy"),
            auc=scores.get("auc"),
            metrics=scores,
            baseline=baseline(plan.dataset),
            rounds=len(released),
            planned_rounds=len(plan.rounds),
            charged_rounds=len(charged),
            seconds_per_round=float(np.median(self.seconds[1:] or self.seconds or [0.0])),  # the first one compiles
            uploads=sum(plan.schedule.uploads_of(index) for index in released),
            quote=plan.quote(charged),
            units=plan.statements_by_unit(charged),
            parameters=predictor.parameters,
            noise=plan.config.noise,
            out=out,
            predictor=predictor,
            provenance=Provenance(
                config=plan.config,
                protocol=describe_protocol(plan.protocol),
                record=plan.record(charged),
                origin=functools.partial(
                    origin_of, plan.config, plan.task, plan.protocol, plan.dataset, plan.guarantee.spread
                ),
            ),
        )


def _open(
    plan: Plan, out: Path | None, resume: bool, held: contextlib.ExitStack
) -> tuple[RunFolder | None, Checkpoint | None, Mapping[str, Any]]:
    """The run's folder (the first process alone writes to it), the checkpoint to go on from, and what the run is."""
    if out is None and resume:
        raise ValueError("expected out=, the folder of the run to resume, got resume=True without it")
    if out is None:
        return None, None, {}
    first = jax.process_index() == 0
    folder = RunFolder.reopen(out) if resume else None
    if folder is not None and first:
        held.enter_context(folder.lock())
    if folder is not None and folder.is_finished:
        folder.forget()  # a kill may have come between the statement and this
        raise Finished(f"the run in {str(out)!r} is finished: nothing to resume, and nothing was changed")
    identity = fingerprint(plan.config, plan.task, plan.protocol, plan.dataset, plan.clients, plan.engine.first)
    if folder is None:
        if not first:
            return None, None, identity
        check_key(out)
        folder = RunFolder.create(out, to_toml(plan.config))
        held.enter_context(folder.lock())
        return folder, None, identity
    saved = folder.read_checkpoint()
    if changed := difference(saved.fingerprint, identity):
        raise ValueError(f"expected the run that was started in {str(out)!r}, got a different one: {changed}")
    if saved.record != plan.record(list(saved.released)):
        raise ValueError(f"expected the rounds that were released in {str(out)!r}, got a plan with different rounds")
    if first:
        folder.drop_after(saved.round)
    return folder if first else None, saved, identity


def _begin(plan: Plan, folder: RunFolder | None, saved: Checkpoint | None, identity: Mapping[str, Any]) -> _Run:
    """A new run, or an earlier one where it stopped: either has noise and samples of its own from here on."""
    plan = plan.renewed()
    training = plan.engine.start()
    if saved is None:
        return _Run(
            plan=plan,
            folder=folder,
            identity=identity,
            training=training,
            record=plan.record_of([]),
            released=[],
            progress=Progress(round=0, rounds=len(plan.rounds), accuracy=None, spent=None),
        )
    leaves, structure = jax.tree.flatten(training)
    if len(leaves) != len(saved.leaves):
        raise ValueError(f"expected a checkpoint of {len(leaves)} arrays, got {len(saved.leaves)}")
    return _Run(
        plan=plan,
        folder=folder,
        identity=identity,
        training=plan.engine.place(jax.tree.unflatten(structure, saved.leaves)),
        record=saved.record,
        released=list(saved.released),
        progress=Progress(round=saved.round, rounds=len(plan.rounds), accuracy=None, spent=None),
        resumed=saved.resumed if saved.round == 0 else (*saved.resumed, saved.round),
    )


def _resumed_after(rounds: Sequence[int]) -> str:
    """What the statement of a resumed run rests on besides."""
    listed = ", ".join(str(number) for number in dict.fromkeys(rounds))
    return (
        f"nothing of a later round had been seen when the run was resumed after round {listed}: its folder was not "
        "replaced by an older copy"
    )


def _diagnosed(diagnostics: Diagnostics) -> dict[str, float]:
    return {name: float(to_host(value)) for name, value in diagnostics._asdict().items()}
