"""Training from a config: `train` is the simplest entry point, `run` trains a prepared `Plan` and gives a `Result`.

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
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import msgspec
import numpy as np

from dovetail import _validate, protocols
from dovetail.data import TASKS, Dataset, Loss, Metric, Task, resolve
from dovetail.engine import Diagnostics, Training, devices
from dovetail.engine.devices import to_host
from dovetail.engine.scoring import baseline_scores
from dovetail.experiment import defaults
from dovetail.experiment.callbacks import (
    OVERHEARD,
    STOPPED,
    STOPPED_BY_MODELS,
    Callback,
    Callbacks,
    Diagnosis,
    RunStart,
)
from dovetail.experiment.config import Config, parse, presets, read, to_toml
from dovetail.experiment.declared import UNNAMED
from dovetail.experiment.fingerprint import check_key, fingerprint, first_difference, origin_of
from dovetail.experiment.folder import Checkpoint, RunFolder
from dovetail.experiment.preparation import Plan, prepare, rounds_due
from dovetail.experiment.result import Progress, Provenance, Result, describe_protocol
from dovetail.experiment.scores import describe
from dovetail.experiment.spending import Account, open_account_of_plan, settle_finished_run
from dovetail.guarantee import Guarantee, Quote, Record

__all__ = ["Finished", "Progress", "Result", "prepare", "run"]

_LOG = logging.getLogger("dovetail")


class Finished(ValueError):  # noqa: N818 - nothing is wrong
    """The run to be resumed has already ended; nothing was changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a training begins with: a config, and the task, which its name alone may not lead to.

    `open_keys` are those of the config that follow from the noise (`defaults.complete_config`).
    """

    config: Config
    task: Task
    open_keys: frozenset[str] = frozenset()


def start_of(
    task: str | Task | Dataset,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    protocol: str = "dp_fl",
    eps: float | None = None,
    delta: float | None = None,
    settings: Mapping[str, Any] | None = None,
    evaluate: Literal["public", "private"] | None = None,
) -> Start:
    """What `train` begins with, given these of its arguments."""
    is_named = isinstance(model, str)
    own_task = task_of(task, model=None if is_named else model, loss=loss, metrics=metrics)
    name = task if isinstance(task, str) else own_task.name
    data: dict[str, Any] = {"task": {"name": name}, "protocol": {"name": protocol}}
    if isinstance(task, Dataset):
        data["cohort"] = defaults.cohort_for_dataset(settings or {})
        data["privacy"] = {"neighbors": protocols.find(protocol).relation.value}
    elif name in presets():
        data = msgspec.to_builtins(read(name))
        if data["protocol"]["name"] != protocol:
            data["protocol"] = {"name": protocol}
            data["privacy"]["neighbors"] = protocols.find(protocol).relation.value
    arguments = {"task.model": model if is_named else None, "privacy.eps": eps, "privacy.delta": delta}
    arguments["task.evaluate"] = evaluate
    overrides = [*_validate.not_none(**arguments).items(), *(settings or {}).items()]
    open_keys = defaults.open_keys(settings or {}, protocol=protocol) if isinstance(task, Dataset) else frozenset()
    return Start(config=parse(data, overrides), task=own_task, open_keys=open_keys)


# which method of Dataset reads a file, by its ending
_FILES = {".csv": "from_csv", ".gz": "from_csv", ".parquet": "from_parquet", ".pq": "from_parquet", ".tsv": "from_csv"}


def task_of(
    offered: object,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Task:
    """The task, with this model, loss and metrics in place of its own.

    Refuses tables and files, which do not say whose rows are whose.
    """
    return dataclasses.replace(_resolve_task(offered), **_validate.not_none(model=model, loss=loss, metrics=metrics))


def _resolve_task(offered: object) -> Task:
    """A task, a dataset or a registered name as a task; says how to make a dataset of anything else."""
    if isinstance(offered, Dataset):
        return Task(name=UNNAMED, load=lambda *, folder: offered)
    if isinstance(offered, Task):
        return offered
    if isinstance(offered, str | Path):
        reader = _FILES.get(Path(offered).suffix.lower())
        if reader is None and isinstance(offered, str):
            return resolve(offered)
        reader = reader or "from_folder"
        raise ValueError(
            _dataset_needed_message(f"Dataset.{reader}({str(offered)!r}, ...)", f"the path {str(offered)!r}")
        )
    if hasattr(offered, "columns"):
        raise ValueError(_dataset_needed_message("Dataset.from_pandas(frame, ...)", f"a {type(offered).__name__}"))
    raise ValueError(f"expected a Dataset, a Task or the name of a task, got {type(offered).__name__}")


def refuse_nameless_task(task: str) -> None:
    """Refuse to load by its name what a program gave to `train`: only the program has it."""
    if ":" not in task and task not in TASKS:
        raise ValueError(
            f"the data of task.name = {task!r} were given by a Python program, which the command line does not have: "
            "to resume, call dovetail.train again with the same arguments, the same out= and resume=True"
        )


def _dataset_needed_message(call: str, offered: str) -> str:
    """The message that says by which call a dataset is made of what was offered."""
    arguments = "target=, what to predict, user=, whose a row is, and test_share= or test="
    return f"expected a Dataset, made by {call} with {arguments}, got {offered}"


def run(
    plan: Plan,
    *,
    out: Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 10,
    evaluate_every: int | None = None,
    callbacks: Sequence[Callback] = (),
    ledger: str | Path | bool | None = None,
    ceiling: float | str | Sequence[float] | None = None,
) -> Result:
    """Train a plan.

    Arguments:
        plan: what `prepare` made of a config.
        out: the folder to write to; without one nothing is written.
        resume: go on from the last checkpoint in `out`.
        checkpoint_every: rounds between checkpoints.
        evaluate_every: rounds between scores on the test records; by default a twentieth of all rounds.
        callbacks: objects that watch the training (see `Callback`).
        ledger: the ledger of all runs on the same people, as `spending.open_account` reads it.
        ceiling: what all runs in it may spend together; by default the config's `privacy.ceiling`.

    Guarantees:
        No round starts that would overspend the budget; no round below the minimum size is released.
        Every round has at most one model that anybody could have seen, also in runs that were killed and resumed, on
        other code, another backend or in other processes: what is certified is what an observer can count.
        No round's noise is drawn twice: a run that is resumed has noise of its own from there on. (Seeded noise follows
        from the seed and the round, and the run ends with the model of an uninterrupted one.)
        To resume is refused where the config, the protocol, the data or the users have changed, and raises `Finished`
        where there is nothing left to do; nothing is written then.
        The statement describes the rounds as the engine recorded them, or nothing is written.
        What it may spend is in the ledger, on disk, before its first round; where that would exceed a ceiling,
        `CeilingReached` is raised and nothing is written. A run that is resumed is charged once.
        No two runs have the same noise, even of the same plan, unless the noise is seeded.
        Callbacks see what the statement covers, and diagnostics under their banner; where one of them ends the
        training, the statement is that of all rounds that were planned and could be paid for.
    """
    watching = Callbacks(callbacks if jax.process_index() == 0 else ())
    with contextlib.ExitStack() as locks, watching.notify_failure():
        if plan.config.noise == "os":
            plan = plan.with_randomness(devices.shared_randomness(plan.config.seed))
        is_first = jax.process_index() == 0  # of several processes the first alone has a ledger and a folder
        ceiling = plan.config.privacy.ceiling if ceiling is None else ceiling
        account = open_account_of_plan(
            plan, ledger=ledger if is_first else False, ceiling=ceiling if is_first else None, out=out
        )
        if not resume:
            if out is not None and is_first:  # the others would refuse what the first one made
                RunFolder.refuse_taken(out)
            account.reserve(_record_to_charge(plan))
        run: _Run | None = None
        try:
            folder, saved, identity = _open_folder(plan, out, resume, locks)
            run = _start_or_resume(plan, folder, saved, identity, account)
            if resume and folder is not None:
                account.resume_reservation(folder)
                account.reserve(_record_to_charge(plan, run.released, start=run.progress.round))
            if folder is not None:
                account.write_ledger_link(folder)
            watching.on_start(RunStart.of(plan, round=run.progress.round, folder=out))
            run.train(checkpoint_every=checkpoint_every, evaluate_every=evaluate_every, watching=watching)
        except BaseException:
            if run is None or not run.has_begun:
                account.give_back()
            raise
        watching.on_end(result := run.finish(out))
        return result


def _record_to_charge(plan: Plan, released: Sequence[int] = (), *, start: int = 0) -> Record:
    """All that a run may yet be charged: released rounds, all others that fit its budget, and its scores."""
    charged = list(released)
    if plan.num_affordable_rounds() == plan.num_rounds:
        charged += range(start, plan.num_rounds)
    else:
        for index, users in rounds_due(plan, charged, start=start):
            if len(users) >= plan.sampler.schedule.min_size:
                charged.append(index)
    record = plan.record(charged)
    scores = plan.scores
    return record if scores is None else dataclasses.replace(record, evaluation=scores.record)


@dataclasses.dataclass(kw_only=True)
class _Run:
    """A training under way: where it stands, what the engine noted of it, and the folder it is written to, if any."""

    plan: Plan
    folder: RunFolder | None
    identity: Mapping[str, Any]  # the run's fingerprint, for its checkpoints
    training: Training  # the engine's state after the last round
    released: list[int]  # the indices, from 0, of the rounds that were run, before and after it was resumed
    progress: Progress
    account: Account  # its place in the ledger of all runs on the same people
    earlier: Record | None = None  # of the rounds before it was resumed
    resumed: tuple[int, ...] = ()  # the rounds after which it was resumed
    seconds: list[float] = dataclasses.field(default_factory=list)  # of each round that this process ran
    charged_not_run: list[int] = dataclasses.field(default_factory=list)  # rounds left when a callback ended it
    has_begun: bool = False  # whether a round was begun, here or before it was resumed, of which something may be seen
    overheard: bool = False  # whether a callback ended it while one of them was told diagnostics
    _saved_round: int | None = None  # of the checkpoint that this process wrote

    def train(self, *, checkpoint_every: int, evaluate_every: int | None, watching: Callbacks) -> None:
        """Run the rounds that are left and fit the budget, until a callback has seen enough."""
        plan = self.plan
        for line in plan.engine.describe_strategies():
            _LOG.info("%s", line)
        every = evaluate_every or max(1, plan.num_rounds // 20)
        self.save()
        if self.progress.round % every == 0 and self._lacks_scores():
            self.score()
        for index, users in rounds_due(plan, self.released, start=self.progress.round):
            if len(users) >= plan.sampler.schedule.min_size:
                self.step(index, users, watching)
            else:
                self.training = self.plan.skip(self.training, index)
            self.progress = dataclasses.replace(self.progress, round=index + 1, fresh=False)
            is_scored = self.progress.round % every == 0
            if is_scored or self.progress.round % checkpoint_every == 0:
                self.save()
            if is_scored:
                self.score()
            if watching.on_round(self.progress):
                self.charge_remaining_rounds()
                self.overheard = plan.config.diagnostics and watching.reads_diagnostics
                break
        self.save()

    def _lacks_scores(self) -> bool:
        """Whether the last round has no line in `metrics.jsonl`: a kill came between its checkpoint and its scores."""
        if self.folder is None or self.progress.round == 0:
            return False
        return all(line.get("round") != self.progress.round for line in self.folder.read_metrics())

    def score(self) -> None:
        """Score the model on the test records and log the scores; call it after `save`, so the model is durable.

        Where test records are private, what was spent is logged alone.
        """
        scores = self.plan.engine.metrics(self.training) if self.plan.scores is None else None
        self.progress = dataclasses.replace(
            self.progress,
            accuracy=None if scores is None else scores.get("accuracy"),
            metrics=scores,
            spent=self.plan.bound(self.released),
            fresh=True,
        )
        if self.folder:
            self.folder.append_metrics(self.progress.to_json())

    def charge_remaining_rounds(self) -> None:
        """Charge the rounds that are left as if they were run.

        A callback looked at the models when it ended the training, so how many rounds were run depends on the data.
        """
        charged = list(self.released)
        for index, users in rounds_due(self.plan, charged, start=self.progress.round):
            if len(users) >= self.plan.sampler.schedule.min_size:
                charged.append(index)
        self.charged_not_run = charged[len(self.released) :]

    def step(self, index: int, users: np.ndarray, watching: Callbacks) -> None:
        """Run one round (`index`, from 0), and note that it was released, how long it took, and its diagnostics."""
        began = time.perf_counter()
        self.has_begun = True
        self.training = self.plan.step(self.training, index, users)
        jax.block_until_ready(self.training)
        self.seconds.append(time.perf_counter() - began)
        self.released.append(index)
        if isinstance(self.training.diagnostics, Diagnostics):
            values = _diagnostics_by_name(self.training.diagnostics)
            if self.folder:
                self.folder.append_diagnostics({"round": index + 1, **values})
            watching.on_diagnostics(Diagnosis(round=index + 1, values=values))

    def record(self) -> Record:
        """All rounds in privacy terms, those before resuming among them: as the engine logged them, not as planned."""
        record = self.plan.guarantee.record([log.cohort for log in self.plan.engine.round_logs])
        return record if self.earlier is None else self.earlier.followed_by(record)

    def save(self) -> None:
        """Replace the checkpoint, where there is a folder and this process has not written this one yet."""
        if self.folder is None or self._saved_round == self.progress.round:
            return
        saved = Checkpoint(
            round=self.progress.round,
            released=tuple(self.released),
            resumed=self.resumed,
            record=self.record(),
            fingerprint=self.identity,
            leaves=tuple(to_host(leaf) for leaf in jax.tree.leaves(self.training)),
        )
        self.folder.save_checkpoint(saved)
        self._saved_round = self.progress.round

    def finish(self, out: Path | None) -> Result:
        """The result, written to the run's folder if it has one.

        Raises RuntimeError, and writes nothing, if the engine's log differs from the plan.
        """
        planned = self.plan.record(self.released)
        if self.record() != planned:
            raise RuntimeError(
                "the engine did not run what the plan states, so nothing is certified and nothing was written"
            )
        result = self.result(planned, out)
        charged = result.required_provenance.record
        result = dataclasses.replace(result, across_runs=self.account.total_with(charged))
        if self.folder:
            result.write(self.folder)
        self.account.settle(charged)
        if self.folder:
            self.folder.delete_ledger_link()
        return result

    def result(self, planned: Record, out: Path | None) -> Result:
        """The model, its scores, and what is stated of the rounds that are charged.

        Arguments:
            planned: what the plan states of the rounds that were run.
            out: the folder that it is written to, if any.
        """
        plan = self.plan
        released = self.released
        charged = [*released, *self.charged_not_run]
        guarantee = self._guarantee_of_result()
        cohorts = plan.cohorts(charged)
        record = planned if guarantee is plan.guarantee else guarantee.record(cohorts)
        predictor = plan.predictor(self.training)
        scores, guess, evaluation = self._final_scores()
        if plan.scores is not None:
            record = dataclasses.replace(record, evaluation=plan.scores.record)
        return Result(
            accuracy=scores.get("accuracy"),
            auc=scores.get("auc"),
            metrics=scores,
            baseline=guess,
            evaluation=evaluation,
            rounds=len(released),
            planned_rounds=plan.num_rounds,
            charged_rounds=len(charged),
            seconds_per_round=float(np.median(self.seconds[1:] or self.seconds or [0.0])),  # the first one compiles
            uploads=sum(plan.sampler.schedule.num_uploads_of(index) for index in released),
            quote=Quote.from_record(guarantee.protocol.name, record, guarantee.claim(cohorts)),
            units=record.statements_by_unit(),
            parameters=predictor.parameters,
            noise=plan.config.noise,
            out=out,
            predictor=predictor,
            provenance=Provenance(
                config=plan.config,
                protocol=describe_protocol(plan.sampler.protocol),
                record=record,
                origin=functools.partial(
                    origin_of, plan.config, plan.task, plan.sampler.protocol, plan.dataset, guarantee
                ),
            ),
        )

    def _final_scores(self) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any] | None]:
        """The last model's scores, those of a constant guess, and how they were made where they are private.

        Private ones are drawn here, once: nothing of them leaves the process before the statement does, which ends the
        run, so a run that is killed before has shown none.
        """
        plan = self.plan
        if plan.scores is None:
            return plan.engine.metrics(self.training), baseline_scores(plan.dataset), None
        drawn = plan.scores.draw(plan.engine.test_outputs(self.training), plan.sampler.schedule.randomness)
        return drawn.metrics, drawn.baseline, describe(drawn, plan.scores)

    def _guarantee_of_result(self) -> Guarantee:
        """The plan's guarantee, with the further assumptions of a run that was resumed or that a callback ended."""
        guarantee = self.plan.guarantee
        if self.resumed:
            guarantee = guarantee.with_assumption(_resumed_note(self.resumed))
        if self.charged_not_run:
            guarantee = guarantee.with_assumption(STOPPED if self.plan.scores is None else STOPPED_BY_MODELS)
            if self.overheard:
                guarantee = guarantee.with_declaration(OVERHEARD)
        return guarantee


def _open_folder(
    plan: Plan, out: Path | None, resume: bool, locks: contextlib.ExitStack
) -> tuple[RunFolder | None, Checkpoint | None, Mapping[str, Any]]:
    """Make or reopen the run's folder, and lock it; refuses a folder that this plan cannot go on with.

    Arguments:
        locks: where the folder's lock is entered; it is held until this closes.

    Returns: the folder, None without `out` and in all processes but the first, which alone writes; the checkpoint to go
    on from, None for a new run; and the run's fingerprint.
    """
    if out is None and resume:
        raise ValueError("resume=True needs out=, the folder of the run to go on with")
    if out is None:
        return None, None, {}
    first = jax.process_index() == 0
    folder = RunFolder.reopen(out) if resume else None
    if folder is not None and first:
        locks.enter_context(folder.lock())
    if folder is not None and folder.is_finished:
        folder.delete_checkpoint()  # a kill may have come between the statement and this
        settle_finished_run(folder)
        raise Finished(f"the run in {str(out)!r} is finished: nothing to resume, and nothing was changed")
    sampler = plan.sampler
    identity = fingerprint(plan.config, plan.task, sampler.protocol, plan.dataset, sampler.clients, plan.engine.first)
    if folder is None:
        if not first:
            return None, None, identity
        check_key(out)
        folder = RunFolder.create(out, to_toml(plan.config))
        locks.enter_context(folder.lock())
        return folder, None, identity
    saved = folder.read_checkpoint()
    if changed := first_difference(saved.fingerprint, identity):
        raise ValueError(f"the run in {str(out)!r} was started differently and cannot go on from here: {changed}")
    if saved.record != plan.record(list(saved.released)):
        raise ValueError(f"the checkpoint in {str(out)!r} lists rounds that were not planned: it was changed")
    if first:
        folder.drop_lines_after(saved.round)
    return folder if first else None, saved, identity


def _start_or_resume(
    plan: Plan, folder: RunFolder | None, saved: Checkpoint | None, identity: Mapping[str, Any], account: Account
) -> _Run:
    """A new run; or, with a checkpoint, an earlier one where it stopped.

    Arguments:
        folder: where it is written to, if anywhere.
        saved: the checkpoint to go on from.
        identity: the run's fingerprint, which its checkpoints hold.
        account: its place in the ledger of all runs on the same people.
    """
    training = plan.engine.start()
    if saved is None:
        return _Run(
            plan=plan,
            folder=folder,
            identity=identity,
            training=training,
            released=[],
            progress=Progress(round=0, rounds=plan.num_rounds, accuracy=None, spent=None),
            account=account,
        )
    leaves, structure = jax.tree.flatten(training)
    if len(leaves) != len(saved.leaves):
        raise ValueError(
            f"the checkpoint has {len(saved.leaves)} arrays, this training {len(leaves)}: it is not of this run"
        )
    plan.note_past_rounds(saved.round)
    return _Run(
        plan=plan,
        folder=folder,
        identity=identity,
        training=plan.engine.place(jax.tree.unflatten(structure, saved.leaves)),
        earlier=saved.record,
        released=list(saved.released),
        progress=Progress(round=saved.round, rounds=plan.num_rounds, accuracy=None, spent=None),
        account=account,
        has_begun=saved.round > 0,
        resumed=saved.resumed if saved.round == 0 else (*saved.resumed, saved.round),
    )


def _resumed_note(rounds: Sequence[int]) -> str:
    """The further assumption of a run that was resumed after these rounds."""
    listed = ", ".join(str(number) for number in dict.fromkeys(rounds))
    return (
        f"nothing of a later round had been seen when the run was resumed after round {listed}: its folder was not "
        "replaced by an older copy"
    )


def _diagnostics_by_name(diagnostics: Diagnostics) -> dict[str, float]:
    """A round's diagnostics as plain numbers by name."""
    return {name: float(to_host(value)) for name, value in diagnostics._asdict().items()}
