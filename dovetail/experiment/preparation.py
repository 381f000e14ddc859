"""A config made ready to run: data loaded, users and records scheduled, noise calibrated.

Every bad input is refused here, before anything is written. Before each round a plan is asked whether the round still
fits the budget; cohorts, records and noise depend on the run's randomness and the round alone.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import jax
import msgspec
import numpy as np

from dovetail import protocols
from dovetail.data import Clients, Dataset, Model, Task, resolve
from dovetail.engine import Engine, Performance, devices
from dovetail.experiment.calibration import calibrated, guarantee_of
from dovetail.experiment.cohorts import schedule_of
from dovetail.experiment.config import Config
from dovetail.experiment.holdings import capped, dealt, one_record_each, subjects_of
from dovetail.experiment.plan import Plan, with_group
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.randomness import Randomness
from dovetail.sampling.items import ItemDraws
from dovetail.statements import Unit

__all__ = ["Guests", "Plan", "load", "prepare"]


class Guests(typing.Protocol):
    """Users or people that an audit adds to a federation: all of them count for what is public, some are there."""

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The federation with every guest in it; noise, sizes and rates are set for this one."""
        ...

    def toss(self, held: Clients, num_records: int) -> Clients:
        """Who holds what of these records once it is decided who is there, and with which record."""
        ...


def load(config: Config, *, task: Task | None = None) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model."""
    task = task or resolve(config.task.name)
    dataset = task.load(folder=None if config.task.folder is None else Path(config.task.folder))
    clients = dealt(config.task, dataset, seed=config.seed)
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
    task = task or resolve(config.task.name)
    dataset, clients, model = load(config, task=task)
    if guests is not None:
        dataset, clients = guests.join(dataset, clients)
    held, spread = capped(clients, dataset, protocol, public_spread=config.task.spread)
    records = int(held.counts.sum()) if isinstance(protocol, ItemLevel) else None
    randomness = Randomness.seeded(config.seed) if config.noise == "seeded" else devices.shared_randomness(config.seed)
    schedule = schedule_of(config, clients.num_clients, protocol, randomness=randomness, records=records)
    dim = _dimension(model)
    guarantee = guarantee_of(config, protocol, schedule, dim, spread)
    protocol, published_noise = calibrated(guarantee, eps=config.privacy.eps)
    guarantee = dataclasses.replace(guarantee, protocol=protocol)
    guarantee.check()
    if guests is not None:
        held = guests.toss(held, len(dataset.labels))
    items = None
    if isinstance(protocol, ItemLevel):
        about = subjects_of(clients, dataset)
        items = ItemDraws(clients=held, subjects=about, rate=protocol.rate, randomness=randomness)
        if config.diagnostics or protocol.adaptive_z:
            protocol = with_group(protocol, items, schedule, published_noise)
    by_record = items is not None and not protocol.private_steps
    engine = Engine(
        model=model,
        dataset=dataset,
        clients=one_record_each(held) if by_record else held,
        update=update,
        protocol=protocol,
        server=server,
        cohort_size=items.capacity if items is not None and by_record else schedule.size,
        randomness=randomness,
        performance=performance,
        diagnostics=config.diagnostics and items is None,
    )
    return Plan(
        config=config,
        schedule=schedule,
        guarantee=dataclasses.replace(guarantee, protocol=protocol),
        engine=engine,
        task=task,
        model=model,
        dataset=dataset,
        clients=held,
        items=items,
        published_noise=published_noise,
    )


def _protocol(config: Config) -> protocols.Protocol:
    settings = config.protocol_settings
    name, unit = config.protocol["name"], config.privacy.unit
    if issubclass(protocols.find(name), ItemLevel) and "unit" not in settings:
        settings["unit"] = "item" if unit == "item" else "subject"
    return protocols.build(name, settings)


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
            f"expected privacy.stop = 'eps' for a unit that {protocol.name!r} does not protect directly, got 'delta'"
        )


def _dimension(model: Model) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
