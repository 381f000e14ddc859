"""Config -> run -> `Result`.

`prepare` turns a config into a `Plan`: data loaded, cohorts scheduled, noise calibrated to the privacy target; every
bad input is refused there, before anything is written. `run` trains the plan. Before each round the budget is asked
whether the round still fits; if not, training ends there. A checkpoint holds all that a run needs to go on as if it had
never stopped: cohorts and noise depend on the seed and the round alone.
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

from dovetail import _validate, accounting, protocols, quotes
from dovetail.config import CohortConfig, Config, parse, presets, read, to_toml
from dovetail.events import NonPrivate, Round
from dovetail.federated.client import ClientUpdate
from dovetail.federated.cohort import Schedule
from dovetail.federated.server import Server
from dovetail.folder import RunFolder, Saved
from dovetail.simulate import Engine, Performance, Training
from dovetail.simulate.devices import to_host
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Statement
from dovetail.tasks import Task, models, partition, resolve

__all__ = ["Plan", "Progress", "Result", "prepare", "run", "train"]

SIMULATION_ASSUMPTION = "the simulation's floating-point noise stands for real-valued noise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ended with."""

    accuracy: float
    rounds: int
    planned_rounds: int
    seconds_per_round: float
    quote: quotes.Quote
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
            **{key: value for key, value in self.quote.to_json().items() if key != "protocol"},
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
        bounded = self.spent is not None and math.isfinite(self.spent.eps)
        return {
            "round": self.round,
            "accuracy": self.accuracy,
            "eps": self.spent.eps if self.spent and bounded else None,
            "delta": self.spent.delta if self.spent and bounded else None,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run."""

    config: Config
    schedule: Schedule
    protocol: protocols.Protocol
    engine: Engine
    scope: Scope
    rounds: tuple[Round, ...]

    def certify(self, released: list[int]) -> Statement:
        """The statement for the rounds that were released."""
        return quotes.certified([self.rounds[i] for i in released], self.scope, delta=self.config.privacy.delta)

    def quote(self, released: list[int]) -> quotes.Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        return quotes.state(
            self.protocol,
            self.schedule.cohort(0),
            self.engine.dim,
            [self.rounds[i] for i in released],
            self.scope,
            delta=self.config.privacy.delta,
        )

    def spent(self, released: list[int]) -> Bound | None:
        """The bound of that statement, without the rest of it; None where nothing is certified."""
        try:
            return accounting.bound([self.rounds[i] for i in released], delta=self.config.privacy.delta)
        except NotApplicable:
            return None

    def fits(self, released: list[int]) -> bool:
        """Whether these rounds stay within the budget."""
        eps = self.config.privacy.eps
        rounds = [self.rounds[i] for i in released]
        return eps is None or accounting.fits(rounds, eps=eps, delta=self.config.privacy.delta)


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


def prepare(config: Config, *, task: Task | None = None) -> Plan:
    """Load the data, schedule the cohorts, calibrate the noise; refuses whatever cannot work."""
    protocol = protocols.build(
        config.protocol["name"], {key: value for key, value in config.protocol.items() if key != "name"}
    )
    update = ClientUpdate(**msgspec.structs.asdict(config.client))
    server = Server.build(config.server.optimizer, config.server.learning_rate, config.server.options)
    performance = Performance(**msgspec.structs.asdict(config.performance))
    if not protocol.calibrated and config.privacy.eps is None:
        raise ValueError(f"expected privacy.eps or the noise of {protocol.name!r}, got neither")

    task = task or resolve(config.task.name)
    dataset = task.load(folder=None if config.task.folder is None else Path(config.task.folder))
    clients = partition.build(
        config.task.partition,
        dataset.labels,
        users=config.task.users,
        seed=config.seed,
        concentration=config.task.concentration,
    )
    schedule = _schedule(config, clients.num_clients, protocol)
    dataset, model = (dataset, task.model) if task.model else models.build(config.task.model, dataset)
    dim = _dimension(model)
    protocol, rounds, scope = _calibrated(protocol, schedule, config, dim)
    engine = Engine(
        model=model,
        dataset=dataset,
        clients=clients,
        update=update,
        protocol=protocol,
        server=server,
        cohort_size=schedule.size,
        seed=config.seed,
        performance=performance,
    )
    return Plan(config=config, schedule=schedule, protocol=protocol, engine=engine, scope=scope, rounds=rounds)


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
    whole_plan_fits = plan.fits(list(range(len(plan.rounds))))
    progress = Progress(round=saved.round if saved else 0, rounds=len(plan.rounds), accuracy=None, spent=None)
    seconds: list[float] = []

    while progress.round < progress.rounds:
        index = progress.round
        if not whole_plan_fits and not plan.fits([*released, index]):
            break
        users = plan.schedule.draw(index)
        if len(users) >= plan.schedule.min_size:
            began = time.perf_counter()
            training = plan.engine.step(training, users, index=index, capacity=plan.schedule.capacity)
            jax.block_until_ready(training)
            seconds.append(time.perf_counter() - began)
            released.append(index)
        progress = dataclasses.replace(progress, round=index + 1)
        if progress.round % every == 0:
            progress = _evaluated(plan, training, released, progress)
            if folder:
                folder.log(progress.to_json())
        if folder and progress.round % checkpoint_every == 0:
            folder.save(Saved(round=progress.round, released=tuple(released), leaves=_leaves(training)))
        if observe:
            observe(progress)

    result = Result(
        accuracy=plan.engine.accuracy(training),
        rounds=len(released),
        planned_rounds=len(plan.rounds),
        seconds_per_round=float(np.median(seconds[1:] or seconds or [0.0])),
        quote=plan.quote(released),
        parameters=plan.engine.model_arrays(training),
        out=out,
    )
    if folder:
        folder.finish({**result.to_json(), "protocol": _described(plan.protocol)}, result.parameters)
    return result


def _open(plan: Plan, out: Path | None, resume: bool) -> tuple[RunFolder | None, Saved | None]:
    """The run's folder (the first process alone writes to it) and the checkpoint to go on from."""
    if out is None:
        return None, None
    config = to_toml(plan.config)
    folder, saved = RunFolder.reopen(out, config) if resume else (None, None)
    if jax.process_index() != 0:
        return None, saved
    return folder or RunFolder.create(out, config), saved


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


def _described(protocol: protocols.Protocol) -> dict[str, Any]:
    return {"name": protocol.name, **dataclasses.asdict(protocol)}  # type: ignore[call-overload]


def _min_size(cohort: CohortConfig, size: int, protocol: protocols.Protocol) -> int:
    if protocol.shuffled and cohort.dropout and cohort.kind == "fixed":
        raise ValueError(
            f"expected no dropout under {protocol.name!r} where the sample is secret (a withheld round would tell of "
            f"who was drawn), got dropout={cohort.dropout}"
        )
    if cohort.min_size is not None:
        return cohort.min_size
    if protocol.shuffled and cohort.dropout:
        raise ValueError(
            f"expected cohort.min_size with dropout={cohort.dropout} under {protocol.name!r}, got none: "
            "its reports hide in a crowd, which must not be smaller than promised"
        )
    return size if protocol.shuffled else 0


def _schedule(config: Config, population: int, protocol: protocols.Protocol) -> Schedule:
    cohort = config.cohort
    size = population if cohort.size is None else cohort.size
    if (cohort.epochs is None) == (cohort.rounds is None):
        raise ValueError(
            f"expected either cohort.epochs or cohort.rounds, got epochs={cohort.epochs}, rounds={cohort.rounds}"
        )
    schedule = Schedule(
        kind=cohort.kind,
        population=population,
        size=size,
        rounds=cohort.rounds or 1,
        seed=config.seed,
        min_size=_min_size(cohort, size, protocol),
        colluders=cohort.colluders,
        dropout=cohort.dropout,
    )
    if cohort.epochs is None:
        return schedule
    _validate.integer(epochs=cohort.epochs)
    return dataclasses.replace(schedule, rounds=cohort.epochs * schedule.rounds_per_epoch)


def _dimension(model: models.Model) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def _calibrated(
    protocol: protocols.Protocol, schedule: Schedule, config: Config, dim: int
) -> tuple[protocols.Protocol, tuple[Round, ...], Scope]:
    """The protocol with its noise set, the rounds it will run, and the scope of the statement."""
    neighbors, privacy = Neighbors(config.privacy.neighbors), config.privacy

    def planned(candidate: protocols.Protocol) -> tuple[tuple[Round, ...], Scope]:
        candidate = candidate.settle(schedule.cohort(0), dim)
        views = [candidate.view(schedule.cohort(i), dim, neighbors=neighbors) for i in range(schedule.rounds)]
        scope = views[0].scope
        said = (*scope.assumptions, SIMULATION_ASSUMPTION)
        return tuple(view.round for view in views), dataclasses.replace(scope, assumptions=said)

    refusals: list[NotApplicable] = []

    def eps_at(noise: float) -> float:
        try:
            rounds, _ = planned(protocol.with_noise(noise))
            return accounting.bound(rounds, delta=privacy.delta).eps
        except NotApplicable as refusal:
            refusals.append(refusal)
            return math.inf

    if not protocol.calibrated and privacy.eps is not None:
        try:
            protocol = protocol.with_noise(accounting.smallest_noise(eps_at, eps=privacy.eps))
        except ValueError as error:
            raise refusals[-1] if refusals else error from error
    protocol = protocol.settle(schedule.cohort(0), dim)
    rounds, scope = planned(protocol)
    if privacy.eps is not None and any(isinstance(item.mechanism, NonPrivate) for item in rounds):
        raise ValueError(f"expected no privacy.eps with {protocol.name!r}, which promises nothing, got {privacy.eps}")
    return protocol, rounds, scope
