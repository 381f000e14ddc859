"""A config made ready to run: data loaded, users and records scheduled, noise calibrated.

Every bad input is refused here, before anything is written. A plan is asked before the first round how many rounds fit
the budget, and again before each later one; cohorts, records and noise depend on the run's randomness and the round
alone.

The cohorts of a training, as its config asks for them.

Who holds which records, whom they are about, and which numbers about that are public (docs/concepts/counts.md).

A config's training in privacy terms, with the noise that meets its target.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import msgspec
import numpy as np

from dovetail import _validate, accounting, features, protocols
from dovetail.claims import subdp
from dovetail.data import Clients, Dataset, Metric, Model, RecordSpec, Task, partition, resolve, subjects, views
from dovetail.data.readers.assembly import TESTED_NOTE
from dovetail.data.readers.recipes import with_recipe
from dovetail.engine import Engine, Performance, devices
from dovetail.experiment.config import ClientConfig, CohortConfig, Config, TaskConfig
from dovetail.experiment.plan import Plan
from dovetail.guarantee import Guarantee, Spread, units
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.isolation import inspect_model
from dovetail.learners.modules import model_of
from dovetail.learners.moments import moments_of
from dovetail.learners.server import Server
from dovetail.mechanisms import LAPLACE_CUT, NORMAL_CUT
from dovetail.numbers import at_least
from dovetail.protocols import Protocol
from dovetail.protocols.subjects import record_level
from dovetail.randomness import Randomness
from dovetail.sampling import Sampler, Schedule, sampler_of, usable
from dovetail.statements import Neighbors, Unit

__all__ = [
    "DEALT_NOTES",
    "PLACES_NOTE",
    "ROWS_NOTE",
    "Guests",
    "Plan",
    "assign_records",
    "calibrate_noise",
    "check_counts",
    "guarantee_of",
    "load_data",
    "load_data_for_parties",
    "notes_of",
    "num_records",
    "prepare",
    "protocol_of",
    "schedule_of",
    "spread_of",
    "with_partition",
]


class Guests(typing.Protocol):
    """Users or people that an audit adds to a federation: all of them count for what is public, some are there."""

    def join(self, dataset: Dataset, clients: Clients) -> tuple[Dataset, Clients]:
        """The federation with every guest in it; noise, sizes and rates are set for this one."""
        ...

    def toss(self, held: Clients, num_records: int) -> Clients:
        """Who holds what of these records once it is decided who is there, and with which record."""
        ...


def load_data_for_parties(config: Config, *, task: Task | None = None) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model, for parties that train by cross-entropy.

    Guarantees:
        Refuses what only a simulation can train: other targets than classes, a loss of its own, a model outside JAX.
    """
    dataset, clients, model = load_data(config, task or resolve(config.task.name))
    if dataset.target != "classes" or model.loss not in (None, "cross_entropy") or model.learner is not None:
        raise ValueError(
            "expected classes, cross-entropy and a JAX model for training by parties, "
            f"got target={dataset.target!r} and model {model.name!r}"
        )
    return dataset, clients, model


def load_data(config: Config, task: Task) -> tuple[Dataset, Clients, Model]:
    """The data of a config as its model reads it, whose it is, and the model."""
    dataset = with_recipe(task.load(folder=None if config.task.folder is None else Path(config.task.folder)))
    clients = assign_records(with_partition(config, dataset).task, dataset, seed=config.seed)
    dataset = views.add_views(dataset, config.client.views)
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
    if not protocol.is_calibrated and config.privacy.eps is None:
        raise ValueError(f"expected privacy.eps or the noise of {protocol.name!r}, got neither")
    _check_sections(config, protocol)

    task = task or resolve(config.task.name)
    dataset, clients, model = load_data(config, task)
    _check_model(config, protocol, dataset, model)
    declared = dataset.declared
    if task.model is not None or not isinstance(model.loss, str | None):
        model, vouched = inspect_model(
            model, dataset, records=protocol.samples == "records", own_model=task.model is not None
        )
        declared += vouched
    config = with_partition(config, dataset)
    check_counts(config, dataset, published=task.published)
    if task.model is not None:
        task = dataclasses.replace(task, model=model)
    if guests is not None:
        dataset, clients = guests.join(dataset, clients)
    held = usable(protocol, clients, dataset.subjects)
    spread = spread_of(config.task, clients, held, dataset, protocol, published=task.published)
    randomness = (
        Randomness.from_seed(config.seed) if config.noise == "seeded" else devices.shared_randomness(config.seed)
    )
    records = num_records(config, held, protocol, published=task.published)
    schedule = schedule_of(config, protocol, population=held.num_clients, records=records, randomness=randomness)
    moments = moments_of(trainer.update, model)
    said = trainer.server.over(schedule.rounds, moments=moments).notes
    dim = _dimension(model) if moments is None else moments.dim
    learned = () if model.learner is None else model.learner.notes
    said = (*said, *notes_of(config, dataset, published=task.published), *learned)
    guarantee = guarantee_of(config, protocol, schedule, dim, spread, said=said, declared=declared)
    protocol, noise_of = calibrate_noise(guarantee, eps=config.privacy.eps)

    if guests is not None:
        held = guests.toss(held, len(dataset.labels))
    sampler = sampler_of(protocol, schedule=schedule, clients=held, subjects=dataset.subjects, noise_of=noise_of)
    if config.diagnostics or sampler.by_recipe:
        sampler = sampler.with_data_for_claim()
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
    if learner.ignores_settings and changed:
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


def schedule_of(
    config: Config, protocol: protocols.Protocol, *, population: int, records: int | None, randomness: Randomness
) -> Schedule:
    """Who takes part when, of so many users; `records` is the public number of records, where they are sampled."""
    cohort = config.cohort
    if (cohort.epochs is None) == (cohort.rounds is None):
        raise ValueError(
            f"expected either cohort.epochs or cohort.rounds, got epochs={cohort.epochs}, rounds={cohort.rounds}"
        )
    _refuse_secret(cohort, protocol)
    sizes = _sizes(cohort)
    size = sizes[0] if sizes else population if cohort.size is None else cohort.size
    schedule = Schedule(
        kind=cohort.kind,
        population=population,
        size=size,  # type: ignore[arg-type]
        rounds=cohort.rounds or 1,
        randomness=randomness,
        min_size=_min_size(cohort, population if cohort.kind == "secret" else size, protocol),  # type: ignore[arg-type]
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


def _refuse_secret(cohort: CohortConfig, protocol: protocols.Protocol) -> None:
    """Secret rounds need a sum to which everyone adds noise, and their rate."""
    if cohort.kind != "secret":
        return
    if not protocol.secret_rounds:
        able = [name for name, known in protocols.PROTOCOLS.items() if known.secret_rounds]
        raise ValueError(
            f"expected cohort.kind = 'secret' with a protocol in which all users' noise adds up ({', '.join(able)}), "
            f"got protocol.name={protocol.name!r}"
        )
    if not isinstance(cohort.size, int) or cohort.size_end is not None:
        raise ValueError(
            "expected one cohort.size with cohort.kind = 'secret' (of how many users the data enter, on average), got "
            f"size={cohort.size} and size_end={cohort.size_end}"
        )


def _min_size(cohort: CohortConfig, size: int, protocol: protocols.Protocol) -> int:
    if protocol.needs_minimum and cohort.dropout and cohort.kind == "fixed":
        raise ValueError(
            f"expected no dropout under {protocol.name!r} with a secret sample (a withheld round would reveal who was "
            f"sampled), got dropout={cohort.dropout}"
        )
    if cohort.min_size is not None:
        return cohort.min_size
    if protocol.needs_minimum and cohort.dropout:
        raise ValueError(
            f"expected cohort.min_size with dropout={cohort.dropout} under {protocol.name!r}, got none: "
            "its guarantee needs a minimum number of users in every round"
        )
    return size if protocol.needs_minimum else 0


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


PLACES_NOTE = (
    "who is in which batch and has which budget goes by users' ids in order: one that is replaced keeps its id"
)
DEALT_NOTES = {
    "iid": "records are dealt to users by their row numbers: who is replaced has as many records, in the same rows",
    "silos": (
        "records are dealt to silos by their row numbers and by whom they are about: who is replaced has as many "
        "records, in the same rows and about the same people"
    ),
}
ROWS_NOTE = "every row counts as one user: nobody has two rows (user= says whose rows are whose)"


def with_partition(config: Config, dataset: Dataset) -> Config:
    """The config with its partition, where it leaves that open: by user if the data name their users."""
    named = config.task.partition or ("one-record" if dataset.users is None else partition.BY_USER[0])
    return msgspec.structs.replace(config, task=msgspec.structs.replace(config.task, partition=named))


def assign_records(task: TaskConfig, dataset: Dataset, *, seed: int) -> Clients:
    """The records of a task, dealt to users; refuses to deal them to others than the data name."""
    if task.partition is None:
        raise ValueError("expected a partition that is settled, got task.partition=None")
    if dataset.users is not None and task.partition not in partition.BY_USER:
        raise ValueError(
            "expected task.partition = 'by-user' for data that name their users (leave out user= to deal records in "
            f"another way), got {task.partition!r}"
        )
    if dataset.target != "classes" and task.partition in ("dirichlet", "shards"):
        raise ValueError(
            f"expected a partition that does not go by classes for target {dataset.target!r}, got {task.partition!r}"
        )
    return partition.build(
        task.partition,
        dataset.labels,
        users=task.silos if task.partition == "silos" else task.users,
        seed=seed,
        concentration=task.concentration,
        subjects=dataset.subjects,
        owners=dataset.users,
        roster=dataset.roster,
        spread=task.spread or 1,
    )


def check_counts(config: Config, dataset: Dataset, *, published: bool) -> None:
    """Refuse to count users in data that are not published where add-remove hides whether one of them is there."""
    task = config.task
    if not published:
        _check_dealt(str(task.partition), neighbors=config.privacy.neighbors)
    rows_are_users = task.partition == "one-record"
    if (
        published
        or config.privacy.neighbors != "add-remove"
        or task.partition not in (*partition.BY_USER, "one-record")
    ):
        return
    has_places = dataset.users is not None and dataset.roster is not None
    declared = task.users or (dataset.roster if has_places or rows_are_users else None)
    if declared is None:
        raise ValueError(
            "under add-remove the number of users is declared, not counted, for it would tell whether one of them is "
            "there: pass roster= (the public list of all users) to Dataset.from_..., or set task.users to a public "
            "number that is at least theirs; or ask for privacy.neighbors = 'replace-one'"
        )
    if rows_are_users and declared < len(dataset.labels):
        raise ValueError(
            f"the data have {len(dataset.labels)} rows, each of them a user, more than task.users = {declared}: "
            "declare at least as many, for which of them are left out would depend on how many there are"
        )
    if config.cohort.kind == "disjoint" and not has_places:
        raise ValueError(
            "under add-remove disjoint batches go by users' places on a public roster: pass user= and roster= to "
            "Dataset.from_..., or choose cohort.kind = 'poisson' or 'everyone'"
        )


def _check_dealt(name: str, *, neighbors: str) -> None:
    """Refuse partitions that deal everybody's records anew where one unit's records are others, or none."""
    named = "name users by user=, leave each row a user (partition 'one-record')"
    if name in ("dirichlet", "shards"):
        raise ValueError(
            f"task.partition = {name!r} deals records by their labels, so that one record's label moves those of other "
            f"users, and deals published data alone (Task(published=True)): {named}, or choose 'iid'"
        )
    if name in DEALT_NOTES and neighbors == "add-remove":
        raise ValueError(
            f"under add-remove task.partition = {name!r} would deal everybody's records anew where one is missing, and "
            f"deals published data alone (Task(published=True)): {named}, or ask for privacy.neighbors = 'replace-one' "
            "where the protocol has it"
        )


def num_records(config: Config, held: Clients, protocol: protocols.Protocol, *, published: bool) -> int | None:
    """How many records there are to sample from, as a public number; None where nothing depends on it."""
    if protocol.samples != "records":
        return None
    if config.task.records is not None:
        return config.task.records
    if published:
        return int(held.counts.sum())
    if {"batch", "sampling_rate"} <= config.protocol_settings.keys():
        return None
    raise ValueError(
        f"{protocol.name!r} samples records, and how many there are is declared, not counted, for noise and files "
        "would tell whether one of them is there: set task.records to a public number that is about right, or both "
        "protocol.batch and protocol.sampling_rate"
    )


def notes_of(config: Config, dataset: Dataset, *, published: bool) -> tuple[str, ...]:
    """What every statement about these data assumes."""
    if published:
        return dataset.notes
    task, said = config.task, [*dataset.notes, TESTED_NOTE]
    if dataset.users is None and task.partition == "one-record":
        said.append(ROWS_NOTE)
    if task.partition in DEALT_NOTES:
        said.append(DEALT_NOTES[task.partition])
    goes_by_place = config.cohort.kind == "disjoint" or "budgets" in config.protocol_settings
    has_places = dataset.users is not None and dataset.roster is not None
    if goes_by_place and task.partition in partition.BY_USER and not has_places:
        said.append(PLACES_NOTE)
    declared = {"users": dataset.roster or task.users, "records": task.records, "subjects": task.subjects}
    listed = [f"{count} {name}" for name, count in declared.items() if count is not None]
    if listed:
        said.append(f"these declared numbers are public, and were not read off the data: {', '.join(listed)}")
    return tuple(dict.fromkeys(said))


def spread_of(
    task: TaskConfig,
    clients: Clients,
    held: Clients,
    dataset: Dataset,
    protocol: protocols.Protocol,
    *,
    published: bool,
) -> units.Spread:
    """How subjects' records lie, of all that the users have and of what of it is `held` for the training.

    Guarantees:
        Of data that are not published, no number in it depends on who has how many records: it is declared, or a cap
        that the protocol enforces, or left open.
    """
    owners, records = clients.entries()
    holders = int(np.bincount(np.unique(np.stack([owners, records]), axis=1)[1]).max())
    spread = units.Spread(
        users=clients.num_clients,
        items=task.records,
        subjects=task.subjects,
        known=dataset.subjects is not None,
        alone=dataset.subjects is None and holders == 1,
        users_per_item=holders,
        describes_data=True,
    )
    if published:
        spread = dataclasses.replace(spread, items=task.records or len(np.unique(records)))
    if dataset.subjects is None:
        return spread
    most = subjects.subject_maxima(held, dataset.subjects)
    if not published:
        return _declared(spread, task, protocol, most)
    about = np.unique(np.stack([owners, dataset.subjects[records]]), axis=1)
    return dataclasses.replace(
        spread,
        subjects=task.subjects or len(np.unique(about[1])),
        alone=about.shape[1] == len(np.unique(about[0])) == len(np.unique(about[1])),
        users_per_subject=max(most.most_users, task.spread or 1),  # silos are dealt by a public number
        items_per_subject=most.most_items,
        items_per_user=most.most_items_at_one_user,
        measured=True,
    )


def _declared(
    spread: units.Spread, task: TaskConfig, protocol: protocols.Protocol, most: subjects.SubjectMaxima
) -> units.Spread:
    """The limits that were declared, which the data must keep to, and those that the protocol enforces."""
    if task.spread is not None and most.most_users > task.spread:
        raise ValueError(
            f"a subject has records at {most.most_users} users, more than task.spread = {task.spread} declares: "
            "declare a larger number, or leave records out"
        )
    if protocol.samples != "records":
        return dataclasses.replace(spread, users_per_subject=task.spread)
    caps = record_level(protocol)
    if caps.unit == "item":
        return dataclasses.replace(spread, users_per_subject=task.spread)
    return dataclasses.replace(
        spread,
        users_per_subject=caps.users_per_subject or task.spread,
        items_per_subject=caps.items_per_subject,
        items_per_user=caps.items_per_user,
    )


_SIMULATED = (
    "whoever runs the simulation is trusted: all users' data and all noise are on one machine",
    "32-bit floating-point noise is as good as real-valued noise, although normal draws are cut off at "
    f"{at_least(NORMAL_CUT, 3)} standard deviations and Laplace draws at {at_least(LAPLACE_CUT, 3)} scales",
    "32-bit floating-point sums move with one user's data as exact sums do, although each addition that a user's "
    "numbers pass may round others' numbers differently, by up to 2^-23 of the sum, and the number of records of the "
    "largest user may decide how others' updates round, by up to 2e-5 clip norms each (docs/proofs/float-sums.md)",
)
_SECRET = {
    "os": "the run's noise key (256 bits from the operating system) stays secret; it is never written to disk",
    "seeded": "nobody who sees a model knows the seed, which determines all noise and is written in config.toml",
}


def guarantee_of(
    config: Config,
    protocol: Protocol,
    schedule: Schedule,
    dim: int,
    spread: Spread,
    *,
    said: tuple[str, ...] = (),
    declared: tuple[str, ...] = (),
) -> Guarantee:
    """What the simulated training of a config guarantees; `said` is what else its statement says."""
    privacy = config.privacy
    return Guarantee(
        protocol=protocol,
        cohorts=tuple(schedule.cohort(index) for index in range(schedule.rounds)),
        dim=dim,
        relation=Neighbors(privacy.neighbors),
        delta=privacy.delta,
        eps=privacy.eps if privacy.stop == "delta" else None,
        unit=None if privacy.unit is None else Unit(privacy.unit),
        spread=spread,
        assumptions=(*_SIMULATED, _SECRET[config.noise], *config.task.all_features.assumptions, *said),
        declared=declared,
        reproducible=schedule.randomness.reproducible,
    )


def calibrate_noise(guarantee: Guarantee, *, eps: float | None) -> tuple[Protocol, Callable[[int], float] | None]:
    """The settled protocol with its noise set to meet a target; and the noise for each Z, where the data set it."""
    protocol = guarantee.protocol
    if protocol.samples == "records" and record_level(protocol).adaptive_z:
        return _published(guarantee, eps)
    if eps is not None:
        _refuse_without_promise(guarantee, eps)
        if not protocol.is_calibrated:
            guarantee = guarantee.calibrate(eps)
    return guarantee.settled_protocol, None


def _refuse_without_promise(guarantee: Guarantee, eps: float) -> None:
    """A target needs rounds that promise something, to the unit that it is for."""
    protocol = guarantee.protocol
    if not protocol.is_calibrated:
        guarantee = dataclasses.replace(guarantee, protocol=protocol.with_noise(1.0))
    if accounting.refusal(guarantee.rounds()) is not None:
        raise ValueError(f"expected no privacy.eps with {protocol.name!r}, which gives no guarantee, got {eps}")
    if guarantee.target_unit is not guarantee.scope.unit:
        dataclasses.replace(guarantee, eps=None).bound(guarantee.cohorts[:1])


def _published(guarantee: Guarantee, eps: float | None) -> tuple[Protocol, Callable[[int], float]]:
    """SubDP as printed: the target is what its recipe would promise, and nothing is certified."""
    if eps is None:
        raise ValueError("expected privacy.eps with adaptive_z, which derives the noise from it, got none")
    cohorts = guarantee.cohorts
    settled = record_level(guarantee.protocol).settle(cohorts[0], guarantee.dim)
    batches = len(cohorts) * (settled.private_steps or cohorts[0].size)

    @functools.cache
    def noise_of(group: int) -> float:
        found = subdp.noise_scale(eps=eps, delta=guarantee.delta, group=group, prob=settled.rate, steps=batches)
        return found.value

    return dataclasses.replace(settled.with_noise(noise_of(1)), claimed_eps=eps), noise_of
