"""Who owns which records: ways to deal a dataset to users.

iid and one-record deal at random; shards gives every user two runs of the records sorted by label (McMahan et al. 2017,
Geyer et al. 2017); dirichlet draws each class's shares of the users (Hsu, Qi, Brown 2019). All randomness comes from
the seed. A row shorter than the widest is filled with the user's own first record, never with someone else's.
"""

from __future__ import annotations

import heapq

import numpy as np

from dovetail import _validate
from dovetail.tasks._base import Clients

__all__ = ["PARTITIONS", "build", "dirichlet", "iid", "one_record", "shards"]

PARTITIONS = ("dirichlet", "iid", "one-record", "shards")


def build(
    name: str,
    labels: np.ndarray,
    *,
    users: int | None,
    seed: int,
    shards_per_user: int = 2,
    records_per_user: int = 600,
    concentration: float = 0.5,
) -> Clients:
    """The partition of this name; `users=None`, as many as records, goes with one-record only."""
    _validate.known("partition", name, PARTITIONS)
    if name == "one-record":
        return one_record(len(labels), users=users, seed=seed)
    if users is None:
        raise ValueError(f"expected the number of users for partition {name!r}, got users=None")
    if name == "iid":
        return iid(len(labels), users=users, seed=seed)
    if name == "dirichlet":
        return dirichlet(labels, users=users, concentration=concentration, seed=seed)
    return shards(labels, users=users, seed=seed, shards_per_user=shards_per_user, records_per_user=records_per_user)


def iid(num_records: int, *, users: int, seed: int) -> Clients:
    """Every record to one user, at random; counts differ by at most one."""
    _check_users(users, num_records)
    order = np.random.default_rng(seed).permutation(num_records)
    return _table(order, np.arange(num_records) % users, users)


def one_record(num_records: int, *, users: int | None = None, seed: int) -> Clients:
    """One record to each user, in random order."""
    users = num_records if users is None else users
    _check_users(users, num_records)
    order = np.random.default_rng(seed).permutation(num_records)[:users]
    return Clients(index=order.astype(np.int32)[:, None], counts=np.ones(users, np.int32))


def shards(
    labels: np.ndarray, *, users: int, seed: int, shards_per_user: int = 2, records_per_user: int = 600
) -> Clients:
    """Shards of the records sorted by label, a few to each user.

    Guarantees:
        A shard is a run of the sorted records: it holds one label, or few.
        Nobody holds a record twice; nobody shares one, unless users x records_per_user exceeds the data.
        Otherwise the shards are dealt anew, in a new order, until every user is served.
    """
    _validate.integer(users=users, shards_per_user=shards_per_user, records_per_user=records_per_user)
    _validate.at_least(1, users=users, shards_per_user=shards_per_user)
    size, rest = divmod(records_per_user, shards_per_user)
    if rest or not shards_per_user <= records_per_user <= len(labels):
        raise ValueError(
            f"expected records_per_user to be a multiple of shards_per_user={shards_per_user} and at most "
            f"{len(labels)} records, got records_per_user={records_per_user}"
        )
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    num_shards = len(labels) // size
    starts = np.linspace(0, len(labels) - size, num_shards).astype(np.int64)
    users_a_pass = num_shards // shards_per_user
    passes = [
        rng.permutation(num_shards)[: users_a_pass * shards_per_user].reshape(users_a_pass, shards_per_user)
        for _ in range(-(-users // users_a_pass))
    ]
    dealt = starts[np.concatenate(passes)[:users]]
    places = (dealt[:, :, None] + np.arange(size)).reshape(users, records_per_user)
    index = rng.permuted(order[places], axis=1)
    return Clients(index=index.astype(np.int32), counts=np.full(users, records_per_user, np.int32))


def dirichlet(labels: np.ndarray, *, users: int, concentration: float, seed: int) -> Clients:
    """Every record to one user; the shares of a class among the users are drawn from Dirichlet(concentration).

    A small concentration gives users of few classes and of very different sizes. A user left with nothing takes one
    record from whoever holds the most.
    """
    _check_users(users, len(labels))
    _validate.positive(concentration=concentration)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        places = np.flatnonzero(labels[order] == label)
        ends = np.cumsum(rng.dirichlet(np.full(users, concentration)))
        cuts = np.minimum(np.round(ends * len(places)), len(places)).astype(np.int64)
        cuts[-1] = len(places)
        owner[places] = np.repeat(np.arange(users), np.diff(cuts, prepend=0))
    _feed_the_empty(owner, users)
    return _table(order, owner, users)


def _feed_the_empty(owner: np.ndarray, users: int) -> None:
    """Give each user without a record one from the largest user, in place."""
    counts = np.bincount(owner, minlength=users)
    largest = [(-int(count), user) for user, count in enumerate(counts)]
    heapq.heapify(largest)
    held = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    for user in np.flatnonzero(counts == 0):
        negative, donor = heapq.heappop(largest)
        owner[held[donor][-negative - 1]] = user
        heapq.heappush(largest, (negative + 1, donor))


def _table(records: np.ndarray, owner: np.ndarray, users: int) -> Clients:
    """`records[i]` belongs to `owner[i]`; everyone owns something."""
    counts = np.bincount(owner, minlength=users)
    grouped = records[np.argsort(owner, kind="stable")]
    starts = np.cumsum(counts) - counts
    column = np.arange(counts.max())
    places = starts[:, None] + np.where(column < counts[:, None], column, 0)
    return Clients(index=grouped[places].astype(np.int32), counts=counts.astype(np.int32))


def _check_users(users: int, num_records: int) -> None:
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    if users > num_records:
        raise ValueError(f"expected at most one user a record ({num_records} records), got users={users}")
