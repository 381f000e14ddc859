"""Who holds which records, and whom they are about."""

from __future__ import annotations

import numpy as np

from dovetail import protocols
from dovetail.data import Clients, Dataset, partition, subjects
from dovetail.experiment.config import TaskConfig
from dovetail.guarantee import units
from dovetail.protocols.subjects._items import ItemLevel

__all__ = ["capped", "dealt", "one_record_each", "subjects_of"]


def dealt(task: TaskConfig, dataset: Dataset, *, seed: int) -> Clients:
    """The records of a task, dealt to users."""
    return partition.build(
        task.partition,
        dataset.labels,
        users=task.silos if task.partition == "silos" else task.users,
        seed=seed,
        concentration=task.concentration,
        subjects=dataset.subjects,
        spread=task.spread,
    )


def subjects_of(clients: Clients, dataset: Dataset) -> np.ndarray:
    """Whom each record is about; where nobody knows, its user."""
    if dataset.subjects is not None:
        return dataset.subjects
    return subjects.one_per_user(clients, len(dataset.labels))


def capped(
    clients: Clients, dataset: Dataset, protocol: protocols.Protocol, *, public_spread: int
) -> tuple[Clients, units.Spread]:
    """Who holds what after a cap that the protocol asks for, and how subjects' records lie."""
    all_records = clients
    if isinstance(protocol, ItemLevel):
        _refuse_shared_records(clients)
        if protocol.unit == "subject":
            clients = subjects.cap(
                clients,
                subjects_of(clients, dataset),
                items_per_subject=protocol.items_per_subject or 1,
                users_per_subject=protocol.users_per_subject,
                items_per_user=protocol.items_per_user,
            )
    owners, records = all_records.entries()
    items = len(np.unique(records))
    holders = int(np.bincount(np.unique(np.stack([owners, records]), axis=1)[1]).max())
    if dataset.subjects is None:
        return clients, units.Spread(alone=holders == 1, users_per_item=holders, users=clients.num_clients, items=items)
    about = np.unique(np.stack([owners, dataset.subjects[records]]), axis=1)
    alone = about.shape[1] == len(np.unique(about[0])) == len(np.unique(about[1]))
    most = subjects.holdings(clients, dataset.subjects)
    return clients, units.Spread(
        users=clients.num_clients,
        items=items,
        subjects=len(np.unique(about[1])),
        known=True,
        alone=alone,
        users_per_item=holders,
        users_per_subject=max(most.most_users, public_spread),  # silos are dealt by a public number
        items_per_subject=most.most_items,
        items_per_user=most.most_items_at_one_user,
    )


def one_record_each(clients: Clients) -> Clients:
    """Every record as if it were a user: what a record adds is what is clipped."""
    records = np.arange(int(clients.index.max()) + 1, dtype=np.int32)
    return Clients(index=records[:, None], counts=np.ones(len(records), np.int32))


def _refuse_shared_records(clients: Clients) -> None:
    _, records = clients.entries()
    if len(np.unique(records)) < len(records):
        raise ValueError("expected every record at one user when records are protected, got records at several users")
