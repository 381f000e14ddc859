"""A config made ready to run: data loaded, users and records scheduled, noise calibrated.

Every bad input is refused here, before anything is written. Before each round a plan is asked whether the round still
fits the budget; cohorts, records and noise depend on the seed and the round alone.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import msgspec
import numpy as np

from dovetail import _validate, accounting, protocols, quotes, units
from dovetail.calibration import Calibration, unit_of
from dovetail.config import CohortConfig, Config
from dovetail.events import Round
from dovetail.federated.client import ClientUpdate
from dovetail.federated.cohort import Schedule
from dovetail.federated.items import ItemDraws
from dovetail.federated.server import Server
from dovetail.protocols._items import ItemLevel
from dovetail.simulate import Engine, Items, Performance, Training
from dovetail.statements import Bound, NotApplicable, Scope, Statement, Unit
from dovetail.tasks import Clients, Dataset, Model, Task, models, partition, resolve, subjects

__all__ = ["Guests", "Plan", "load", "prepare"]


class Guests(typing.Protocol):
    """Users or people that an audit adds to a federation: all of them count for what is public, some are there."""

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The federation with every guest in it; noise, sizes and rates are set for this one."""
        ...

    def toss(self, held: Clients, num_records: int) -> Clients:
        """Who holds what of these records once it is decided who is there, and with which record."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A config made ready to run; `model`, `dataset` and `clients` are what the engine runs on."""

    config: Config
    schedule: Schedule
    protocol: protocols.Protocol
    engine: Engine
    model: Model
    dataset: Dataset
    clients: Clients
    scope: Scope
    rounds: tuple[Round, ...]
    replaced: units.Viewed | None
    spread: units.Spread
    items: ItemDraws | None = None
    published_noise: Callable[[int], float] | None = None

    @property
    def unit(self) -> Unit:
        """Whom the target and the statement are about."""
        return unit_of(self.config, self.scope)

    def viewed(self, released: list[int]) -> tuple[units.Viewed, units.Viewed | None]:
        """The rounds that were released, as they are stated and under replacement of a user."""
        own = units.Viewed(rounds=tuple(self.rounds[i] for i in released), scope=self.scope)
        if self.replaced is None:
            return own, None
        rounds = tuple(self.replaced.rounds[i] for i in released)
        return own, dataclasses.replace(self.replaced, rounds=rounds)

    def certify(self, released: list[int]) -> Statement:
        """The statement for the rounds that were released."""
        own, _ = self.viewed(released)
        if self.unit is not self.scope.unit:
            return self.table(released)[self.unit]
        return quotes.certified(own.rounds, self.scope, **self._at)

    def table(self, released: list[int]) -> Mapping[Unit, Statement]:
        """What these rounds promise for an item, a user and a subject."""
        return units.table(*self.viewed(released), self.spread, delta=self.config.privacy.delta)

    def quote(self, released: list[int]) -> quotes.Quote:
        """That statement, beside what the paper claims, what the shuffler learns, and what is left without trust."""
        return quotes.state(
            self.protocol,
            [self.schedule.cohort(i) for i in released],
            self.engine.dim,
            [self.rounds[i] for i in released],
            self.scope,
            delta=self.config.privacy.delta,
            statement=self.certify(released),
        )

    def spent(self, released: list[int]) -> Bound | None:
        """The bound of that statement, without the rest of it; None where nothing is certified."""
        try:
            own, replaced = self.viewed(released)
            return units.bound(self.unit, own, replaced, self.spread, **self._target)
        except NotApplicable:
            return None

    def fits(self, released: list[int]) -> bool:
        """Whether these rounds stay within the budget."""
        eps, delta = self.config.privacy.eps, self.config.privacy.delta
        if eps is None or self.published_noise is not None:
            return True  # no budget, or one that only the paper's recipe keeps to
        own, replaced = self.viewed(released)
        if self.unit is self.scope.unit:
            return accounting.fits(own.rounds, eps=eps, delta=delta)
        try:
            return units.bound(self.unit, own, replaced, self.spread, delta=delta).eps <= eps
        except NotApplicable:
            return False

    def affordable(self) -> int:
        """How many rounds from the first fit into the budget together; what fits with more, fits with fewer."""
        low, high = 0, len(self.rounds)
        if self.fits(list(range(high))):
            return high
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(list(range(middle))) else (low, middle)
        return low

    def step(self, training: Training, index: int, users: np.ndarray) -> Training:
        """Run a round with these users."""
        schedule, scale = self.schedule, self.schedule.noise_scale_of(index)
        size: float = schedule.size_of(index)
        capacity = schedule.capacity
        steps = self.protocol.private_steps
        items = None
        if self.items is not None:
            scales = self._published_scales(index, users, max(1, steps))
            if steps:
                items = Items(self.items.batches(index, users, steps=steps), scales)
            else:
                users, size, capacity = self.items.batch(index, users), self._batch, self.items.capacity
                if self.published_noise is not None:
                    scale = float(np.sqrt(np.sum(scales**2)))
        return self.engine.step(
            training, users, index=index, capacity=capacity, size=size, noise_scale=scale, items=items
        )

    def _published_scales(self, index: int, users: np.ndarray, steps: int) -> np.ndarray:
        if self.items is None or self.published_noise is None:
            return np.ones((len(users), steps), np.float32)
        return self.items.published_scales(index, users, steps=steps, noise_of=self.published_noise)

    @property
    def _batch(self) -> float:
        return float(self.protocol.known("batch"))

    @property
    def _target(self) -> dict[str, float]:
        """At which delta, or eps, the rounds are bounded."""
        privacy = self.config.privacy
        by_delta = privacy.stop == "delta" and privacy.eps is not None
        return {"eps": privacy.eps} if by_delta else {"delta": privacy.delta}  # type: ignore[dict-item]

    @property
    def _at(self) -> dict[str, float]:
        return {"delta": self.config.privacy.delta, **self._target}


def load(config: Config, *, task: Task | None = None) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model."""
    task = task or resolve(config.task.name)
    dataset = task.load(folder=None if config.task.folder is None else Path(config.task.folder))
    clients = _dealt(config, dataset)
    dataset, model = (dataset, task.model) if task.model else models.build(config.task.model, dataset)
    return dataset, clients, model


def prepare(config: Config, *, task: Task | None = None, guests: Guests | None = None) -> Plan:
    """Load the data, schedule the cohorts, calibrate the noise; refuses whatever cannot work."""
    protocol = _protocol(config)
    update = ClientUpdate(**msgspec.structs.asdict(config.client))
    server = Server.build(config.server.optimizer, config.server.learning_rate, config.server.options)
    performance = Performance(**msgspec.structs.asdict(config.performance))
    if not protocol.calibrated and config.privacy.eps is None:
        raise ValueError(f"expected privacy.eps or the noise of {protocol.name!r}, got neither")

    _check_sections(config, protocol)
    dataset, clients, model = load(config, task=task)
    if guests is not None:
        dataset, clients = guests.join(dataset, clients)
    held, spread = _holdings(clients, dataset, protocol, public_spread=config.task.spread)
    records = int(held.counts.sum()) if isinstance(protocol, ItemLevel) else None
    schedule = _schedule(config, clients.num_clients, protocol, records=records)
    dim = _dimension(model)
    calibration = Calibration(protocol, schedule, config, dim, spread)
    protocol, published_noise = calibration.calibrated()
    if guests is not None:
        held = guests.toss(held, len(dataset.labels))
    items = None
    if isinstance(protocol, ItemLevel):
        items = ItemDraws(clients=held, subjects=_subjects(clients, dataset), rate=protocol.rate, seed=config.seed)
        protocol = _with_group(protocol, items, schedule, published_noise)
    own, replaced = calibration.planned(protocol), calibration.replaced(protocol)
    by_record = items is not None and not protocol.private_steps
    engine = Engine(
        model=model,
        dataset=dataset,
        clients=_one_record_each(held) if by_record else held,
        update=update,
        protocol=protocol,
        server=server,
        cohort_size=items.capacity if items is not None and by_record else schedule.size,
        seed=config.seed,
        performance=performance,
        diagnostics=config.diagnostics and items is None,
    )
    return Plan(
        config=config,
        schedule=schedule,
        protocol=protocol,
        engine=engine,
        model=model,
        dataset=dataset,
        clients=held,
        scope=own.scope,
        rounds=own.rounds,
        replaced=replaced,
        spread=spread,
        items=items,
        published_noise=published_noise,
    )


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


def _schedule(config: Config, population: int, protocol: protocols.Protocol, *, records: int | None) -> Schedule:
    cohort = config.cohort
    if (cohort.epochs is None) == (cohort.rounds is None):
        raise ValueError(
            f"expected either cohort.epochs or cohort.rounds, got epochs={cohort.epochs}, rounds={cohort.rounds}"
        )
    sizes = _sizes(cohort)
    size = sizes[0] if sizes else population if cohort.size is None else cohort.size
    schedule = Schedule(
        kind=cohort.kind,
        population=population,
        size=size,  # type: ignore[arg-type]
        rounds=cohort.rounds or 1,
        seed=config.seed,
        min_size=_min_size(cohort, size, protocol),  # type: ignore[arg-type]
        colluders=cohort.colluders,
        dropout=cohort.dropout,
        sizes=sizes,
        records=records,
    )
    if cohort.epochs is not None:
        _validate.integer(epochs=cohort.epochs)
        schedule = dataclasses.replace(schedule, rounds=cohort.epochs * schedule.rounds_per_epoch)
    planned = [schedule.size_of(index) for index in range(schedule.rounds)]
    return dataclasses.replace(schedule, noise_scales=protocol.noise_scales(planned))


def _sizes(cohort: CohortConfig) -> tuple[int, ...]:
    """The sizes of all rounds, where they differ."""
    if isinstance(cohort.size, list):
        if not cohort.size or cohort.size_end is not None:
            raise ValueError(f"expected a list of sizes without size_end, got {cohort.size} and {cohort.size_end}")
        return tuple(cohort.size)
    if cohort.size_end is None:
        return ()
    if cohort.size is None or cohort.rounds is None:
        raise ValueError("expected cohort.size and cohort.rounds with cohort.size_end, got none")
    return tuple(np.linspace(cohort.size, cohort.size_end, cohort.rounds).round().astype(int).tolist())


def _check_sections(config: Config, protocol: protocols.Protocol) -> None:
    """Refuse settings that would be ignored."""
    task, privacy = config.task, config.privacy
    if task.partition != "silos" and (task.silos is not None or task.spread != 1):
        raise ValueError(f"expected task.silos and task.spread with partition 'silos' only, got {task.partition!r}")
    if task.partition == "silos" and task.users is not None:
        raise ValueError(f"expected task.silos and not task.users with partition 'silos', got users={task.users}")
    if isinstance(protocol, ItemLevel) and config.client.update != "fedsgd":
        raise ValueError(f"expected client.update = 'fedsgd' under {protocol.name!r}, got {config.client.update!r}")
    own = Unit(protocol.unit) if isinstance(protocol, ItemLevel) else Unit.USER
    if privacy.stop == "delta" and privacy.unit is not None and Unit(privacy.unit) is not own:
        raise ValueError(
            f"expected privacy.stop = 'eps' for a unit that {protocol.name!r} does not protect itself, got 'delta'"
        )


def _protocol(config: Config) -> protocols.Protocol:
    settings = {key: value for key, value in config.protocol.items() if key != "name"}
    name, unit = config.protocol["name"], config.privacy.unit
    if issubclass(protocols.find(name), ItemLevel) and "unit" not in settings:
        settings["unit"] = "item" if unit == "item" else "subject"
    return protocols.build(name, settings)


def _subjects(clients: Clients, dataset: Dataset) -> np.ndarray:
    if dataset.subjects is not None:
        return dataset.subjects
    return subjects.one_per_user(clients, len(dataset.labels))


def _holdings(
    clients: Clients, dataset: Dataset, protocol: protocols.Protocol, *, public_spread: int
) -> tuple[Clients, units.Spread]:
    """Who holds what after a cap that the protocol asks for, and how subjects' records lie."""
    all_records = clients
    if isinstance(protocol, ItemLevel):
        _refuse_shared_records(clients)
        if protocol.unit == "subject":
            clients = subjects.cap(
                clients,
                _subjects(clients, dataset),
                items_per_subject=protocol.items_per_subject or 1,
                users_per_subject=protocol.users_per_subject,
                items_per_user=protocol.items_per_user,
            )
    owners, records = all_records.entries()
    holders = int(np.bincount(np.unique(np.stack([owners, records]), axis=1)[1]).max())
    if dataset.subjects is None:
        return clients, units.Spread(alone=holders == 1, users_per_item=holders)
    about = np.unique(np.stack([owners, dataset.subjects[records]]), axis=1)
    alone = about.shape[1] == len(np.unique(about[0])) == len(np.unique(about[1]))
    most = subjects.holdings(clients, dataset.subjects)
    return clients, units.Spread(
        known=True,
        alone=alone,
        users_per_item=holders,
        users_per_subject=max(most.most_users, public_spread),  # silos are dealt by a public number
        items_per_subject=most.most_items,
        items_per_user=most.most_items_at_one_user,
    )


def _with_group(
    protocol: ItemLevel, items: ItemDraws, schedule: Schedule, published_noise: Callable[[int], float] | None
) -> ItemLevel:
    """The protocol with the paper's Z, from all rounds if it sets the noise, else from some for the claim."""
    steps = max(1, protocol.private_steps)
    rounds = schedule.rounds if protocol.adaptive_z else min(schedule.rounds, max(1, 50 // steps))
    largest = items.largest_group(rounds, np.arange(schedule.population), steps=steps)
    if published_noise is not None:
        published_noise(largest)  # refuses a Z that its recipe has no noise for
    return dataclasses.replace(protocol, group_in_batch=largest)


def _dealt(config: Config, dataset: Dataset) -> Clients:
    task = config.task
    return partition.build(
        task.partition,
        dataset.labels,
        users=task.silos if task.partition == "silos" else task.users,
        seed=config.seed,
        concentration=task.concentration,
        subjects=dataset.subjects,
        spread=task.spread,
    )


def _refuse_shared_records(clients: Clients) -> None:
    _, records = clients.entries()
    if len(np.unique(records)) < len(records):
        raise ValueError("expected every record at one user where records are protected, got records at several users")


def _one_record_each(clients: Clients) -> Clients:
    """Every record as if it were a user: what a record adds is what is clipped."""
    records = np.arange(int(clients.index.max()) + 1, dtype=np.int32)
    return Clients(index=records[:, None], counts=np.ones(len(records), np.int32))


def _dimension(model: models.Model) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
