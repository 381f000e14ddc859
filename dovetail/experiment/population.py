"""The data of a config, who holds which records, whom they are about, and who takes part in which round.

In this order: `load_data` and `assign_records` give data, clients and model; `check_counts` to `spread_of` decide which
numbers about them are public, by the rule of docs/concepts/counts.md: of data that are not published, they are declared
and never counted; `schedule_of` says who takes part when. `published` is True for data sets that everybody has.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np

from dovetail import _validate, features, protocols
from dovetail.data import Clients, Dataset, Model, RecordSpec, Task, partition, resolve, subjects, views
from dovetail.data.people import with_people
from dovetail.data.readers.assembly import TESTED_NOTE, hold_out_by_number
from dovetail.data.readers.recipes import with_recipe
from dovetail.experiment.config import CohortConfig, Config, TaskConfig
from dovetail.guarantee import units
from dovetail.learners import models
from dovetail.learners.modules import model_of
from dovetail.protocols.subjects import require_item_level
from dovetail.randomness import Randomness
from dovetail.sampling import Schedule

__all__ = [
    "DEALT_NOTES",
    "PLACES_NOTE",
    "ROWS_NOTE",
    "assign_records",
    "check_counts",
    "data_assumptions",
    "load_data",
    "load_data_for_parties",
    "load_inputs",
    "num_records",
    "schedule_of",
    "spread_of",
    "with_partition",
]

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


def load_data_for_parties(config: Config, *, task: Task | None = None) -> tuple[Dataset, Clients, Model]:
    """Load what deployed parties train on: as `load_data`, for classes by cross-entropy alone.

    Guarantees:
        Refuses what only a simulation can train: other targets than classes, a loss of its own, a model outside JAX.
    """
    if config.task.evaluate != "public":
        raise ValueError(
            "task.evaluate = 'private' is for simulated runs: deployed users who are held out report "
            "measures of their own (--measure evaluation), in the same noisy sum"
        )
    dataset, clients, model = load_data(config, task or resolve(config.task.name))
    if dataset.target != "classes" or model.loss not in (None, "cross_entropy") or model.learner is not None:
        raise ValueError(
            "parties train JAX models on classes by cross-entropy; got "
            f"target={dataset.target!r} and model {model.name!r}"
        )
    return dataset, clients, model


def load_data(config: Config, task: Task) -> tuple[Dataset, Clients, Model]:
    """Load what a config trains on.

    Returns: the data as the model reads them, who holds which of them, and the model.
    """
    dataset = _load_task_data(config, task)
    if not task.published:
        dataset = with_people(dataset)  # before views and features change the records
    clients = assign_records(with_partition(config, dataset).task, dataset, seed=config.seed)
    dataset = views.add_views(dataset, config.client.views)
    all_features = config.task.all_features
    if task.model is not None:
        dataset = features.apply(dataset, all_features)
        model = model_of(task.model, RecordSpec.of(dataset))
    else:
        dataset, model = models.build(config.task.model, dataset, features=all_features)
    return dataset, clients, model if task.loss is None else dataclasses.replace(model, loss=task.loss)


def load_inputs(config: Config, task: Task) -> Dataset:
    """The data of a config as `load_data` returns them, without giving them to anybody or making a model."""
    dataset = views.add_views(_load_task_data(config, task), config.client.views)
    return features.apply(dataset, config.task.all_features)


def _load_task_data(config: Config, task: Task) -> Dataset:
    """The data of a config's task as they are loaded, held out as its scores need it."""
    dataset = with_recipe(task.load(folder=None if config.task.folder is None else Path(config.task.folder)))
    return _with_private_test(config, dataset) if config.task.evaluate == "private" else dataset


def _with_private_test(config: Config, dataset: Dataset) -> Dataset:
    """The data without the note that test records are public; rows that may be replaced are held out by their numbers.

    Who is held out by what it holds could change sides where it is replaced by another.
    """
    dataset = dataclasses.replace(dataset, notes=tuple(note for note in dataset.notes if note != TESTED_NOTE))
    by_content = dataset.held_out_people is not None and dataset.held_out_people.by == "row"
    return hold_out_by_number(dataset) if by_content and config.privacy.neighbors == "replace-one" else dataset


def with_partition(config: Config, dataset: Dataset) -> Config:
    """The config with its partition, where it leaves that open: by user if the data name their users."""
    name = config.task.partition or ("one-record" if dataset.users is None else partition.BY_USER[0])
    return msgspec.structs.replace(config, task=msgspec.structs.replace(config.task, partition=name))


def assign_records(task: TaskConfig, dataset: Dataset, *, seed: int) -> Clients:
    """Who holds which records, by the task's partition; refuses to give them to others than the users that data name.

    Arguments:
        task: the section [task] of a config, with its partition.
        dataset: the records.
        seed: of the public randomness that some partitions draw from.
    """
    if task.partition is None:
        raise ValueError("task.partition is open: fill it in by with_partition(config, dataset) first")
    if dataset.users is not None and task.partition not in partition.BY_USER:
        raise ValueError(
            f"task.partition = {task.partition!r} is not for data that name their users: use 'by-user', or leave out "
            "user= where the data are read"
        )
    if dataset.target != "classes" and task.partition in ("dirichlet", "shards"):
        raise ValueError(
            f"task.partition = {task.partition!r} goes by classes, and these data have target {dataset.target!r}"
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
    """Refuse configs that would count users, or deal records, in data where the guarantee hides such numbers.

    Under add-remove whether a user is there is secret, so the number of users must be declared; published data are
    exempt. The config must have its partition (`with_partition`).
    """
    task = config.task
    if not published:
        _refuse_dealing(str(task.partition), neighbors=config.privacy.neighbors)
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
    if config.cohort.kind in ("disjoint", "separated") and not has_places:
        raise ValueError(
            "under add-remove batches that are fixed go by users' places on a public roster: pass user= and roster= to "
            "Dataset.from_..., or choose cohort.kind = 'poisson' or 'everyone'"
        )


def _refuse_dealing(name: str, *, neighbors: str) -> None:
    """Refuse partitions in which one user's data would decide which records all other users get."""
    remedy = "name users by user=, leave each row a user (partition 'one-record')"
    if name in ("dirichlet", "shards"):
        raise ValueError(
            f"task.partition = {name!r} deals records by their labels, so that one record's label moves those of other "
            f"users, and deals published data alone (Task(published=True)): {remedy}, or choose 'iid'"
        )
    if name in DEALT_NOTES and neighbors == "add-remove":
        raise ValueError(
            f"under add-remove task.partition = {name!r} would deal everybody's records anew where one is missing, and "
            f"deals published data alone (Task(published=True)): {remedy}, or ask for "
            "privacy.neighbors = 'replace-one' where the protocol has it"
        )


def num_records(config: Config, held: Clients, protocol: protocols.Protocol, *, published: bool) -> int | None:
    """How many records there are to sample from, as a public number; None where nothing depends on it.

    Arguments:
        config: may declare the number (task.records).
        held: who holds which records that the protocol uses.
        protocol: counts matter where it samples records.
        published: whether the data are public, so that they may be counted.
    """
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


def data_assumptions(config: Config, dataset: Dataset, *, published: bool) -> tuple[str, ...]:
    """The assumptions about the data that every statement lists, a sentence each; published data need fewer."""
    if published:
        return dataset.notes
    task = config.task
    notes = [*dataset.notes, *([TESTED_NOTE] if task.evaluate == "public" else [])]
    if dataset.users is None and task.partition == "one-record":
        notes.append(ROWS_NOTE)
    if task.partition in DEALT_NOTES:
        notes.append(DEALT_NOTES[task.partition])
    goes_by_place = config.cohort.kind in ("disjoint", "separated") or "budgets" in config.protocol_settings
    has_places = dataset.users is not None and dataset.roster is not None
    if goes_by_place and task.partition in partition.BY_USER and not has_places:
        notes.append(PLACES_NOTE)
    declared = {"users": dataset.roster or task.users, "records": task.records, "subjects": task.subjects}
    listed = [f"{count} {name}" for name, count in declared.items() if count is not None]
    if listed:
        notes.append(f"these declared numbers are public, and were not read off the data: {', '.join(listed)}")
    return tuple(dict.fromkeys(notes))


def spread_of(
    task: TaskConfig,
    clients: Clients,
    held: Clients,
    dataset: Dataset,
    protocol: protocols.Protocol,
    *,
    published: bool,
) -> units.Spread:
    """How records and subjects lie over users, in public numbers: what the guarantee for other units needs to know.

    Arguments:
        task: its section, which may declare counts and limits.
        clients: who holds which records, before any cap.
        held: what of them the protocol uses.
        dataset: the records, and whom they are about if that is known.
        protocol: may enforce limits of its own.
        published: whether the data are public, so that counts may be taken from them.

    Guarantees:
        Of data that are not published, no number in it depends on who has how many records: it is declared, or a cap
        that the protocol enforces, or left open.
    """
    owners, records = clients.owners_and_records()
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
        return _with_declared_limits(spread, task, protocol, most)
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


def _with_declared_limits(
    spread: units.Spread, task: TaskConfig, protocol: protocols.Protocol, most: subjects.SubjectMaxima
) -> units.Spread:
    """The spread with declared limits and those that the protocol enforces; refuses data beyond the declared ones.

    Arguments:
        most: the largest counts in the data, which are private: they are compared and not stated.
    """
    if task.spread is not None and most.most_users > task.spread:
        raise ValueError(
            f"a subject has records at {most.most_users} users, more than task.spread = {task.spread} declares: "
            "declare a larger number, or leave records out"
        )
    if protocol.samples != "records":
        return dataclasses.replace(spread, users_per_subject=task.spread)
    caps = require_item_level(protocol)
    if caps.unit == "item":
        return dataclasses.replace(spread, users_per_subject=task.spread)
    return dataclasses.replace(
        spread,
        users_per_subject=caps.users_per_subject or task.spread,
        items_per_subject=caps.items_per_subject,
        items_per_user=caps.items_per_user,
    )


def schedule_of(
    config: Config, protocol: protocols.Protocol, *, population: int, records: int | None, randomness: Randomness
) -> Schedule:
    """Who takes part when.

    Arguments:
        config: its section [cohort] counts.
        protocol: may need a minimum number of users, a sum with everyone's noise, or a schedule of noise.
        population: how many users there are.
        records: the public number of records, where a protocol samples them.
        randomness: what is public, and for a run also what is secret.
    """
    cohort = config.cohort
    if (cohort.epochs is None) == (cohort.rounds is None):
        raise ValueError(
            f"expected either cohort.epochs or cohort.rounds, got epochs={cohort.epochs}, rounds={cohort.rounds}"
        )
    _check_secret_rounds(cohort, protocol)
    sizes = _sizes_by_round(cohort)
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
        uploads=cohort.uploads if cohort.epochs is None else None,
    )
    if cohort.epochs is not None:
        _validate.integer(epochs=cohort.epochs)
        schedule = dataclasses.replace(
            schedule, rounds=cohort.epochs * schedule.rounds_per_epoch, uploads=cohort.uploads
        )
    planned = [schedule.size_of(index) for index in range(schedule.rounds)]
    return dataclasses.replace(schedule, noise_scales=protocol.noise_scales(planned))


def _check_secret_rounds(cohort: CohortConfig, protocol: protocols.Protocol) -> None:
    """Refuse `cohort.kind = "secret"` for protocols in which not all users' noise adds up, and without one size."""
    if cohort.kind != "secret":
        return
    if not protocol.secret_rounds:
        able = [name for name, kind in protocols.PROTOCOLS.items() if kind.secret_rounds]
        raise ValueError(
            f"cohort.kind = 'secret' needs a protocol in which all users' noise adds up ({', '.join(able)}), "
            f"got protocol.name={protocol.name!r}"
        )
    if not isinstance(cohort.size, int) or cohort.size_end is not None:
        raise ValueError(
            "cohort.kind = 'secret' needs one cohort.size (of how many users the data enter, on average), got "
            f"size={cohort.size} and size_end={cohort.size_end}"
        )


def _min_size(cohort: CohortConfig, size: int, protocol: protocols.Protocol) -> int:
    """The least number of users with which a round is released; 0 for protocols that need no minimum.

    Arguments:
        size: how many users upload if nobody drops out.
    """
    if protocol.needs_minimum and cohort.dropout and cohort.kind == "fixed":
        raise ValueError(
            f"{protocol.name!r} cannot have dropout with a secret sample, got dropout={cohort.dropout}: a withheld "
            "round would reveal who was sampled"
        )
    if cohort.min_size is not None:
        return cohort.min_size
    if protocol.needs_minimum and cohort.dropout:
        raise ValueError(
            f"with dropout={cohort.dropout} set cohort.min_size: the guarantee of {protocol.name!r} needs a minimum "
            "number of users in every round"
        )
    return size if protocol.needs_minimum else 0


def _sizes_by_round(cohort: CohortConfig) -> tuple[int, ...]:
    """One size for each round, where sizes differ; empty where all rounds have the same."""
    if isinstance(cohort.size, list):
        if not cohort.size or cohort.size_end is not None:
            raise ValueError(
                f"a list of sizes has at least one, and no size_end; got {cohort.size} and {cohort.size_end}"
            )
        return tuple(cohort.size)
    if cohort.size_end is None:
        return ()
    if cohort.size is None or cohort.rounds is None:
        raise ValueError("cohort.size_end needs cohort.size and cohort.rounds")
    return tuple(np.linspace(cohort.size, cohort.size_end, cohort.rounds).round().astype(int).tolist())
