"""Who holds whose records: what a protocol must know to protect a person whose records lie with several users.

A subject is whom a record is about. Its privacy depends on how many of its records enter the training in all and at how
many users they lie, so both are bounded before training by public numbers: `cap_records` drops what exceeds them. It
looks at one subject at a time, so that adding or removing a subject changes nobody else's records. A record that two
users hold counts twice. Where subjects are unknown, all records of a user belong to one (`subjects_by_user`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail import _validate
from dovetail.data._base import Clients

__all__ = ["SubjectMaxima", "cap_records", "subject_maxima", "subjects_by_user"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubjectMaxima:
    """The most that any one subject has in a federation; `subjects` is how many have anything."""

    subjects: int
    most_items: int
    most_users: int
    most_items_at_one_user: int


def cap_records(
    clients: Clients,
    subjects: np.ndarray,
    *,
    items_per_subject: int,
    users_per_subject: int | None,
    items_per_user: int | None = None,
) -> Clients:
    """Drop records until no subject has more than this; None is no limit.

    Arguments:
        clients: who holds which records.
        subjects: whom each record is about.
        items_per_subject: the most records that a subject keeps over all users.
        users_per_subject: the most users that keep records of a subject.
        items_per_user: the most records of a subject that any one user keeps.

    Of a subject, the `users_per_subject` users are kept that hold most of its records (of equals the lower number);
    they give its records in turn, each its lowest first and at most `items_per_user`, until `items_per_subject`.

    Guarantees:
        Over all users a subject keeps at most `items_per_subject` records, at most `items_per_user` at any one user.
        They are at no more than `users_per_subject` users, and as even over them as what the users hold allows.
        What is kept of a subject depends on that subject's own records alone; without randomness.
        A subject that is within the limits keeps everything, and nobody loses all its records.
        Users stay users, if need be without a record; a user's records keep their order.
    """
    limits = _validate.not_none(
        items_per_subject=items_per_subject, users_per_subject=users_per_subject, items_per_user=items_per_user
    )
    _validate.integer(**limits)
    _validate.at_least(1, **limits)

    by_subject = _SortedEntries.of(clients, subjects)
    rank = by_subject.rank_users()
    turn = by_subject.turn
    fits = np.ones(len(turn), bool)
    if users_per_subject is not None:
        fits &= rank < users_per_subject
    if items_per_user is not None:
        fits &= turn < items_per_user
    offered = np.flatnonzero(fits)
    offered = offered[np.lexsort((rank[offered], turn[offered], by_subject.subject[offered]))]
    kept = offered[_place_in_run(by_subject.subject[offered]) < items_per_subject]

    entries = np.sort(by_subject.entry[kept])
    users, records = clients.owners_and_records()
    return Clients.from_owners(records[entries], users[entries], num_clients=clients.num_clients)


def subject_maxima(clients: Clients, subjects: np.ndarray) -> SubjectMaxima:
    """The most records and users that any one subject has, and the most records it has at one user.

    Arguments:
        clients: who holds which records.
        subjects: whom each record is about.
    """
    by_subject = _SortedEntries.of(clients, subjects)
    first_of_pair = by_subject.turn == 0
    return SubjectMaxima(
        subjects=len(np.unique(by_subject.subject)),
        most_items=_longest_run(by_subject.subject),
        most_users=_longest_run(by_subject.subject[first_of_pair]),
        most_items_at_one_user=int(by_subject.turn.max(initial=-1)) + 1,
    )


def subjects_by_user(clients: Clients, num_records: int) -> np.ndarray:
    """For unknown subjects: the subject of a record is the user that holds it; `num_clients` where nobody does."""
    users, records = clients.owners_and_records()
    _check_range(records, num_records)
    order = np.argsort(records, kind="stable")
    users, records = users[order], records[order]
    shared = (records[1:] == records[:-1]) & (users[1:] != users[:-1])
    if shared.any():
        record = records[1:][shared][0]
        raise ValueError(
            f"expected every record at one user, since subjects are unknown, got record {record} at two users or more"
        )
    subjects = np.full(num_records, clients.num_clients, np.int32)
    subjects[records] = users
    return subjects


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SortedEntries:
    """The entries of a `Clients` table sorted by subject, then user, then record: one number of each array an entry."""

    entry: np.ndarray  # its place in Clients.owners_and_records()
    subject: np.ndarray
    user: np.ndarray
    turn: np.ndarray  # 0 for the user's lowest record of the subject, 1 for the next, ...

    @classmethod
    def of(cls, clients: Clients, subjects: np.ndarray) -> _SortedEntries:
        """The entries of these clients, where `subjects` says whom each record is about."""
        users, records = clients.owners_and_records()
        _check_range(records, len(subjects))
        entry = np.lexsort((records, users, subjects[records]))
        subject, user = subjects[records][entry], users[entry]
        return cls(entry=entry, subject=subject, user=user, turn=_place_in_run(subject, user))

    def rank_users(self) -> np.ndarray:
        """For each entry, how many users come before its user for its subject, those with most of its records first.

        Of users with as many, the lower number comes first.
        """
        pair = np.cumsum(self.turn == 0) - 1
        first = np.flatnonzero(self.turn == 0)
        items = np.bincount(pair)
        order = np.lexsort((self.user[first], -items, self.subject[first]))
        rank = np.empty(len(first), np.int64)
        rank[order] = _place_in_run(self.subject[first][order])
        return rank[pair]


def _place_in_run(*sorted_keys: np.ndarray) -> np.ndarray:
    """For each place, how many places before it have the same keys; equal keys must stand together."""
    size = len(sorted_keys[0])
    new = np.ones(size, bool)
    new[1:] = np.any([key[1:] != key[:-1] for key in sorted_keys], axis=0)
    places = np.arange(size)
    return places - np.maximum.accumulate(np.where(new, places, 0))


def _longest_run(sorted_key: np.ndarray) -> int:
    """How often the most frequent key occurs; 0 without any."""
    return int(_place_in_run(sorted_key).max(initial=-1)) + 1


def _check_range(records: np.ndarray, num_records: int) -> None:
    """Refuse records that have no subject: not in 0 .. num_records - 1."""
    low, high = records.min(initial=0), records.max(initial=0)
    if len(records) and not 0 <= low <= high < num_records:
        raise ValueError(f"expected records 0..{num_records - 1}, one subject for each, got records {low}..{high}")
