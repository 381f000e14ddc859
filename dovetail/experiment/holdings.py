"""Who holds which records, and whom they are about."""

from __future__ import annotations

import numpy as np

from dovetail.data import Clients, Dataset, partition, subjects
from dovetail.experiment.config import TaskConfig
from dovetail.guarantee import units

__all__ = ["dealt", "spread_of"]


def dealt(task: TaskConfig, dataset: Dataset, *, seed: int) -> Clients:
    """The records of a task, dealt to users."""
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
