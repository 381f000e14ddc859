"""Who owns which records: how a dataset is assigned to users.

iid and one-record assign at random; shards gives every user two runs of the records sorted by label (McMahan et al.
2017, Geyer et al. 2017); dirichlet draws each class's shares of the users (Hsu, Qi, Brown 2019). by-user gives every
record to the user that the data name, or, where they name none, to whom it is about ("writers" is its older name);
silos spreads each subject over a few of the users, as a patient's files lie in several hospitals (Marathe, Kanani
2022). All randomness comes from the seed.
"""

from __future__ import annotations

import heapq

import numpy as np

from dovetail import _validate
from dovetail.data._base import Clients

__all__ = ["BY_USER", "PARTITIONS", "build", "by_user", "dirichlet", "iid", "one_record", "shards", "silos"]

BY_USER = ("by-user", "writers")  # the second is an older name of the first
PARTITIONS = (*BY_USER, "dirichlet", "iid", "one-record", "shards", "silos")


def build(
    name: str,
    labels: np.ndarray,
    *,
    users: int | None,
    seed: int,
    concentration: float = 0.5,
    subjects: np.ndarray | None = None,
    owners: np.ndarray | None = None,
    roster: int | None = None,
    spread: int = 1,
) -> Clients:
    """Assign records to users by the partition of this name.

    Arguments:
        name: one of `PARTITIONS`.
        labels: those of the records.
        users: how many users there are; for silos, how many silos. None goes with one-record, as many as records, and
            with by-user, as many as there are; with more users than that, those left over hold nothing.
        seed: of all randomness.
        concentration: of dirichlet.
        subjects: whom each record is about: for silos, and for by-user where the data do not name the owners.
        owners: the user that holds each record, for by-user.
        roster: how many places the public list of users has; owners are then places on it.
        spread: over how many silos the records of a subject are spread.
    """
    _validate.known_name("partition", name, PARTITIONS)
    if name in BY_USER:
        holders = subjects if owners is None else owners
        if holders is None:
            raise ValueError(
                f"partition {name!r} needs data that name users or subjects (user= of Dataset.from_csv names users; "
                "mnist-writers has subjects)"
            )
        return by_user(holders, users=users, roster=roster if owners is not None else None)
    if name == "silos":
        if subjects is None:
            raise ValueError(
                f"partition {name!r} needs data with subjects (subject= of Dataset.from_csv; mnist-writers has them)"
            )
        if users is None:
            raise ValueError("partition 'silos' needs the number of silos: set task.silos")
        return silos(subjects, num_silos=users, spread=spread, seed=seed)
    if name == "one-record":
        return one_record(len(labels), users=users or roster, seed=seed)
    if users is None:
        raise ValueError(f"partition {name!r} needs the number of users: set task.users")
    if name == "iid":
        return iid(len(labels), users=users, seed=seed)
    if name == "dirichlet":
        return dirichlet(labels, users=users, concentration=concentration, seed=seed)
    return shards(labels, users=users, seed=seed)


def iid(num_records: int, *, users: int, seed: int) -> Clients:
    """Assign every record to one user, at random; the users' counts differ by at most one."""
    _check_users(users, num_records)
    order = np.random.default_rng(seed).permutation(num_records)
    return Clients.from_owners(order, np.arange(num_records) % users, num_clients=users)


def one_record(num_records: int, *, users: int | None = None, seed: int) -> Clients:
    """Assign one record to each user, in random order; users beyond the records hold nothing.

    With fewer users than records, the others belong to nobody.
    """
    users = num_records if users is None else users
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    order = np.random.default_rng(seed).permutation(num_records)[:users]
    return Clients.from_owners(order, np.arange(len(order)), num_clients=users)


def shards(
    labels: np.ndarray, *, users: int, seed: int, shards_per_user: int = 2, records_per_user: int = 600
) -> Clients:
    """Cut the records, sorted by label, into shards, and assign a few of them to each user.

    Arguments:
        seed: of the order of records and shards.

    Guarantees:
        A shard is a run of the sorted records: it holds one label, or few.
        Nobody holds a record twice; nobody shares one, unless users x records_per_user exceeds the data.
        Otherwise the shards are assigned anew, in a new order, until every user is served.
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
    users_a_pass = num_shards // shards_per_user  # how many users one set of all shards serves
    passes = [
        rng.permutation(num_shards)[: users_a_pass * shards_per_user].reshape(users_a_pass, shards_per_user)
        for _ in range(-(-users // users_a_pass))
    ]
    runs = starts[np.concatenate(passes)[:users]]
    places = (runs[:, :, None] + np.arange(size)).reshape(users, records_per_user)
    return Clients.from_rows(rng.permuted(order[places], axis=1))


def dirichlet(labels: np.ndarray, *, users: int, concentration: float, seed: int) -> Clients:
    """Assign every record to one user; how a class is split among the users is drawn from Dirichlet(concentration).

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
    _fill_empty_users(owner, users)
    return Clients.from_owners(order, owner, num_clients=users)


def by_user(owners: np.ndarray, *, users: int | None = None, roster: int | None = None) -> Clients:
    """Assign every record to its owner: each owner is a user, in the order of their ids, and holds all its records.

    With more `users` than owners, the others hold nothing; with a `roster`, an owner's id is its place among so many.
    """
    if roster is not None:
        if users not in (None, roster):
            raise ValueError(f"task.users = {users} contradicts the roster of the data, which has {roster} places")
        return Clients.from_owners(np.arange(len(owners)), owners, num_clients=roster)
    ids, user = np.unique(owners, return_inverse=True)
    if users is not None and users < len(ids):
        raise ValueError(f"the data name {len(ids)} users, more than task.users = {users}: declare at least as many")
    return Clients.from_owners(np.arange(len(owners)), user, num_clients=users or len(ids))


def silos(subjects: np.ndarray, *, num_silos: int, spread: int, seed: int) -> Clients:
    """Assign every record to one silo, and the records of a subject evenly to `spread` silos of its own.

    Guarantees:
        A subject is at exactly `spread` silos, or at as many as it has records; its counts there differ by at most one.
        Every subject draws its silos uniformly, which alone decides their sizes; a silo that nobody draws is empty.
    """
    _validate.integer(silos=num_silos, spread=spread)
    _validate.at_least(1, silos=num_silos)
    _validate.in_interval(1, num_silos, spread=spread)
    if num_silos > len(subjects):
        raise ValueError(f"expected at most one silo per record ({len(subjects)} records), got silos={num_silos}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(subjects))
    order = order[np.argsort(subjects[order], kind="stable")]
    _, starts, counts = np.unique(subjects[order], return_index=True, return_counts=True)
    homes = np.stack([rng.choice(num_silos, spread, replace=False) for _ in starts])
    subject = np.repeat(np.arange(len(starts)), counts)
    turn = np.arange(len(order)) - starts[subject]
    return Clients.from_owners(order, homes[subject, turn % spread], num_clients=num_silos)


def _fill_empty_users(owner: np.ndarray, users: int) -> None:
    """Give each user without a record one of the user who then has most; changes `owner`, the user of each record."""
    counts = np.bincount(owner, minlength=users)
    largest = [(-int(count), user) for user, count in enumerate(counts)]  # a heap, the largest user first
    heapq.heapify(largest)
    records_of = np.split(np.argsort(owner, kind="stable"), np.cumsum(counts)[:-1])
    for user in np.flatnonzero(counts == 0):
        negative, donor = heapq.heappop(largest)
        owner[records_of[donor][-negative - 1]] = user
        heapq.heappush(largest, (negative + 1, donor))


def _check_users(users: int, num_records: int) -> None:
    """Refuse a number of users that is not in 1 .. num_records."""
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    if users > num_records:
        raise ValueError(f"expected at most one user per record ({num_records} records), got users={users}")
