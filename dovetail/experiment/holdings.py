"""Who holds which records, whom they are about, and which numbers about that are public (docs/concepts/counts.md)."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from dovetail import protocols
from dovetail.data import Clients, Dataset, partition, subjects
from dovetail.data.readers.assembly import TESTED_NOTE
from dovetail.experiment.config import Config, TaskConfig
from dovetail.guarantee import units
from dovetail.protocols.subjects import record_level

__all__ = [
    "DEALT_NOTES",
    "PLACES_NOTE",
    "ROWS_NOTE",
    "check_counts",
    "dealt",
    "notes_of",
    "num_records",
    "settled",
    "spread_of",
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


def settled(config: Config, dataset: Dataset) -> Config:
    """The config with its partition, where it leaves that open: by user if the data name their users."""
    named = config.task.partition or ("one-record" if dataset.users is None else partition.BY_USER[0])
    return msgspec.structs.replace(config, task=msgspec.structs.replace(config.task, partition=named))


def dealt(task: TaskConfig, dataset: Dataset, *, seed: int) -> Clients:
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
    most = subjects.holdings(held, dataset.subjects)
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
    spread: units.Spread, task: TaskConfig, protocol: protocols.Protocol, most: subjects.Holdings
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
