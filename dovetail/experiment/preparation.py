"""A config made ready to run: data loaded, users and records scheduled, noise calibrated.

Every bad input is refused here, before anything is written. A plan is asked before the first round how many rounds fit
the budget, and again before each later one; cohorts, records and noise depend on the run's randomness and the round
alone.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path

import jax
import msgspec
import numpy as np

from dovetail import features, protocols
from dovetail.data import Clients, Dataset, Metric, Model, RecordSpec, Task, resolve, views
from dovetail.data.readers.recipes import with_recipe
from dovetail.engine import Engine, Performance, devices
from dovetail.experiment.calibration import calibrated, guarantee_of
from dovetail.experiment.cohorts import schedule_of
from dovetail.experiment.config import ClientConfig, Config
from dovetail.experiment.holdings import check_counts, dealt, notes_of, num_records, settled, spread_of
from dovetail.experiment.plan import Plan
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.isolation import inspected
from dovetail.learners.modules import model_of
from dovetail.learners.moments import moments_of
from dovetail.learners.server import Server
from dovetail.randomness import Randomness
from dovetail.sampling import Sampler, sampler_of, usable
from dovetail.statements import Unit

__all__ = ["Guests", "Plan", "load", "loaded", "prepare", "protocol_of"]


class Guests(typing.Protocol):
    """Users or people that an audit adds to a federation: all of them count for what is public, some are there."""

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The federation with every guest in it; noise, sizes and rates are set for this one."""
        ...

    def toss(self, held: Clients, num_records: int) -> Clients:
        """Who holds what of these records once it is decided who is there, and with which record."""
        ...


def load(config: Config, *, task: Task | None = None) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model, for parties that train by cross-entropy.

    Guarantees:
        Refuses what only a simulation can train: other targets than classes, a loss of its own, a model outside JAX.
    """
    dataset, clients, model = loaded(config, task or resolve(config.task.name))
    if dataset.target != "classes" or model.loss not in (None, "cross_entropy") or model.learner is not None:
        raise ValueError(
            "expected classes, cross-entropy and a JAX model for training by parties, "
            f"got target={dataset.target!r} and model {model.name!r}"
        )
    return dataset, clients, model


def loaded(config: Config, task: Task) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model."""
    dataset = with_recipe(task.load(folder=None if config.task.folder is None else Path(config.task.folder)))
    clients = dealt(settled(config, dataset).task, dataset, seed=config.seed)
    dataset = views.expanded(dataset, config.client.views)
    chosen = config.task.all_features
    if task.model is not None:
        dataset = features.of(dataset, chosen)
        model = model_of(task.model, RecordSpec.of(dataset))
    else:
        dataset, model = models.build(config.task.model, dataset, features=chosen)
    return dataset, clients, model if task.loss is None else dataclasses.replace(model, loss=task.loss)


def prepare(config: Config, *, task: Task | None = None, guests: Guests | None = None) -> Plan:
    """Load the data, schedule the cohorts, calibrate the noise; refuses whatever cannot work."""
    protocol, trainer = protocol_of(config), _Trainer.of(config)
    if not protocol.calibrated and config.privacy.eps is None:
        raise ValueError(f"expected privacy.eps or the noise of {protocol.name!r}, got neither")
    _check_sections(config, protocol)

    task = task or resolve(config.task.name)
    dataset, clients, model = loaded(config, task)
    _check_model(config, protocol, dataset, model)
    declared = dataset.declared
    if task.model is not None or not isinstance(model.loss, str | None):
        model, vouched = inspected(
            model, dataset, records=protocol.samples == "records", own_model=task.model is not None
        )
        declared += vouched
    config = settled(config, dataset)
    check_counts(config, dataset, published=task.published)
    if task.model is not None:
        task = dataclasses.replace(task, model=model)
    if guests is not None:
        dataset, clients = guests.join(dataset, clients)
    held = usable(protocol, clients, dataset.subjects)
    spread = spread_of(config.task, clients, held, dataset, protocol, published=task.published)
    randomness = Randomness.seeded(config.seed) if config.noise == "seeded" else devices.shared_randomness(config.seed)
    records = num_records(config, held, protocol, published=task.published)
    schedule = schedule_of(config, protocol, population=held.num_clients, records=records, randomness=randomness)
    moments = moments_of(trainer.update, model)
    said = trainer.server.over(schedule.rounds, moments=moments).notes
    dim = _dimension(model) if moments is None else moments.dim
    learned = () if model.learner is None else model.learner.notes
    said = (*said, *notes_of(config, dataset, published=task.published), *learned)
    guarantee = guarantee_of(config, protocol, schedule, dim, spread, said=said, declared=declared)
    protocol, noise_of = calibrated(guarantee, eps=config.privacy.eps)

    if guests is not None:
        held = guests.toss(held, len(dataset.labels))
    sampler = sampler_of(protocol, schedule=schedule, clients=held, subjects=dataset.subjects, noise_of=noise_of)
    if config.diagnostics or sampler.by_recipe:
        sampler = sampler.measured()
    guarantee = dataclasses.replace(guarantee, protocol=sampler.protocol)
    guarantee.check()
    return Plan(
        config=config,
        sampler=sampler,
        guarantee=guarantee,
        engine=trainer.engine(sampler, dataset, model, diagnostics=config.diagnostics, metrics=task.metrics),
        task=task,
        model=model,
        dataset=dataset,
    )


def protocol_of(config: Config) -> protocols.Protocol:
    """The protocol that a config names, before anything is calibrated."""
    settings = config.protocol_settings
    name, unit = config.protocol["name"], config.privacy.unit
    if protocols.find(name).samples == "records" and "unit" not in settings:
        settings["unit"] = "item" if unit == "item" else "subject"
    return protocols.build(name, settings)


@dataclasses.dataclass(frozen=True)
class _Trainer:
    """How a config trains: what clients compute, how the server moves, on which devices."""

    update: ClientUpdate
    server: Server
    performance: Performance

    @classmethod
    def of(cls, config: Config) -> _Trainer:
        return cls(
            ClientUpdate(**config.client.steps),
            Server.build(**msgspec.structs.asdict(config.server)),
            Performance(**msgspec.structs.asdict(config.performance)),
        )

    def engine(
        self, sampler: Sampler, dataset: Dataset, model: Model, *, diagnostics: bool, metrics: Mapping[str, Metric]
    ) -> Engine:
        """An engine for what the sampler draws; diagnostics are of users' updates: none where records are drawn."""
        moments = moments_of(self.update, model)
        std = None if moments is None else sampler.noise_std(0, dim=moments.dim) / sampler.divisor(0, learning_rate=1)
        return Engine(
            model=model,
            dataset=dataset,
            clients=sampler.table,
            update=self.update,
            protocol=sampler.protocol,
            server=self.server.over(sampler.schedule.rounds, moments=moments, noise_std=std),
            cohort_size=sampler.size,
            randomness=sampler.schedule.randomness,
            performance=self.performance,
            diagnostics=diagnostics and sampler.protocol.samples == "users",
            metrics=metrics,
        )


def _check_sections(config: Config, protocol: protocols.Protocol) -> None:
    """Refuse settings that would be ignored."""
    task, privacy = config.task, config.privacy
    if task.partition != "silos" and task.silos is not None:
        raise ValueError(f"expected task.silos with partition 'silos' only, got {task.partition!r}")
    if task.partition == "silos" and task.users is not None:
        raise ValueError(f"expected task.silos and not task.users with partition 'silos', got users={task.users}")
    if protocol.samples == "records" and config.client.update != "fedsgd":
        raise ValueError(f"expected client.update = 'fedsgd' under {protocol.name!r}, got {config.client.update!r}")
    if protocol.samples == "records" and config.client.views:
        raise ValueError(
            f"expected no client.views under {protocol.name!r}, which clips every record by itself and would clip "
            f"every view, got {config.client.views}"
        )
    if privacy.stop == "delta" and privacy.unit is not None and Unit(privacy.unit) is not protocol.protects:
        raise ValueError(
            f"expected privacy.stop = 'eps' for a unit that {protocol.name!r} does not protect directly, got 'delta'"
        )


def _check_model(config: Config, protocol: protocols.Protocol, dataset: Dataset, model: Model) -> None:
    """Refuse what moments cannot learn, and settings that a model's own learner would ignore."""
    client, learner = config.client, model.learner
    if client.update == "moments" and (dataset.target != "classes" or model.loss not in (None, "cross_entropy")):
        raise ValueError(
            "expected classes and no loss of the model's own with client.update = 'moments', which solves for the "
            f"model, got target={dataset.target!r}"
        )
    if learner is None:
        return
    if config.client.update == "moments":
        raise ValueError(f"expected a linear model with client.update = 'moments', got model={model.name!r}")
    changed = [name for name, value in ClientConfig().steps.items() if client.steps[name] != value]
    if learner.settled and changed:
        raise ValueError(
            f"expected no settings of [client] with model {model.name!r}, which trains by its own function, "
            f"got client.{changed[0]}"
        )
    if protocol.samples == "records" and not learner.gradients:
        raise ValueError(
            f"expected a model with gradients under {protocol.name!r}, which clips every record by itself, "
            f"got model {model.name!r}, which trains by its own function"
        )
    if jax.process_count() > 1:
        raise ValueError(f"expected one process for model {model.name!r}, which trains outside JAX, got several")


def _dimension(model: Model) -> int:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
