"""Who holds which records, and whom they are about."""

from __future__ import annotations

import msgspec
import numpy as np

from dovetail.data import Clients, Dataset, partition, subjects
from dovetail.experiment.config import Config, TaskConfig
from dovetail.guarantee import units

__all__ = ["dealt", "settled", "spread_of"]


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
        spread=task.spread,
    )


def spread_of(clients: Clients, held: Clients, dataset: Dataset, *, public_spread: int) -> units.Spread:
    """How subjects' records lie, of all that the users have and of what of it is `held` for the training."""
    owners, records = clients.entries()
    items = len(np.unique(records))
    holders = int(np.bincount(np.unique(np.stack([owners, records]), axis=1)[1]).max())
    if dataset.subjects is None:
        return units.Spread(alone=holders == 1, users_per_item=holders, users=clients.num_clients, items=items)
    about = np.unique(np.stack([owners, dataset.subjects[records]]), axis=1)
    alone = about.shape[1] == len(np.unique(about[0])) == len(np.unique(about[1]))
    most = subjects.holdings(held, dataset.subjects)
    return units.Spread(
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
