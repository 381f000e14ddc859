from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.data import Clients, partition
from dovetail.data.subjects import SubjectMaxima, cap_records, subject_maxima, subjects_by_user

MANY = settings(max_examples=200, deadline=None, derandomize=True)


def table(pairs: list[tuple[int, int]], num_clients: int) -> Clients:
    users, records = np.array(pairs, np.int64).reshape(-1, 2).T
    return Clients.from_owners(records, users, num_clients=num_clients)


def pairs_of(clients: Clients) -> list[tuple[int, int]]:
    return [(user, int(r)) for user in range(clients.num_clients) for r in clients.records_of(user)]


def by_subject(clients: Clients, subjects: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    found = defaultdict(list)
    for user, record in pairs_of(clients):
        found[int(subjects[record])].append((user, record))
    return found


def kept_by_hand(pairs: list[tuple[int, int]], limits: dict[str, int | None]) -> set[tuple[int, int]]:
    """The rule of `cap_records` for one subject, word by word."""
    held = defaultdict(list)
    for user, record in sorted(pairs):
        held[user].append(record)
    users = sorted(held, key=lambda user: (-len(held[user]), user))[: limits["users_per_subject"]]
    queues = {user: held[user][: limits["items_per_user"]] for user in users}
    kept = set()
    while any(queues.values()):
        for user in users:
            if queues[user] and len(kept) < limits["items_per_subject"]:
                kept.add((user, queues[user].pop(0)))
            elif len(kept) == limits["items_per_subject"]:
                return kept
    return kept


@st.composite
def federations(draw):
    """A few users with records of a few subjects, in any order; a record may be at several users."""
    subjects = np.array(draw(st.lists(st.sampled_from([0, 1, 2, 9]), min_size=1, max_size=24)), np.int32)
    num_clients = draw(st.integers(1, 5))
    pair = st.tuples(st.integers(0, num_clients - 1), st.integers(0, len(subjects) - 1))
    pairs = draw(st.lists(pair, min_size=1, max_size=40, unique=True))
    return table(pairs, num_clients), subjects


some = st.one_of(st.none(), st.integers(1, 5))
LIMITS = st.fixed_dictionaries(
    {"items_per_subject": st.integers(1, 8), "users_per_subject": some, "items_per_user": some}
)


@given(federation=federations(), limits=LIMITS)
@MANY
def test_cap_keeps_what_its_rule_says(federation, limits):
    clients, subjects = federation
    capped = cap_records(clients, subjects, **limits)
    kept = by_subject(capped, subjects)
    assert kept.keys() == by_subject(clients, subjects).keys()
    for subject, pairs in by_subject(clients, subjects).items():
        assert len(kept[subject]) == len(set(kept[subject]))
        assert set(kept[subject]) == kept_by_hand(pairs, limits)


@given(federation=federations(), limits=LIMITS)
@MANY
def test_cap_holds_its_limits_and_users_stay_users(federation, limits):
    clients, subjects = federation
    capped = cap_records(clients, subjects, **limits)
    most = subject_maxima(capped, subjects)
    assert most.most_items <= limits["items_per_subject"]
    assert most.most_users <= (limits["users_per_subject"] or 5)
    assert most.most_items_at_one_user <= (limits["items_per_user"] or 24)
    assert capped.num_clients == clients.num_clients
    before, after = pairs_of(clients), set(pairs_of(capped))
    assert pairs_of(capped) == [pair for pair in before if pair in after]  # in the old order
    again = cap_records(capped, subjects, **limits)
    np.testing.assert_array_equal(again.records, capped.records)
    np.testing.assert_array_equal(again.counts, capped.counts)


@given(federation=federations(), limits=LIMITS, removed=st.sampled_from([0, 1, 2, 9]))
@MANY
def test_removing_a_subject_changes_nothing_for_the_others(federation, limits, removed):
    clients, subjects = federation
    rest = table([pair for pair in pairs_of(clients) if subjects[pair[1]] != removed], clients.num_clients)
    kept = by_subject(cap_records(clients, subjects, **limits), subjects)
    kept.pop(removed, None)
    assert by_subject(cap_records(rest, subjects, **limits), subjects) == kept


def test_cap_takes_turns_from_the_largest_holders():
    subjects = np.zeros(10, np.int32)
    clients = table([(0, 9), (1, 8), (1, 3), (1, 5), (2, 7), (2, 1), (3, 0), (3, 6), (3, 2), (0, 4)], 5)
    capped = cap_records(clients, subjects, items_per_subject=4, users_per_subject=3)
    assert pairs_of(capped) == [(0, 4), (1, 3), (1, 5), (3, 0)]  # 1 and 3 hold three, 0 comes before 2; 1 begins
    assert capped.counts.tolist() == [1, 2, 0, 1, 0]
    everything = cap_records(clients, subjects, items_per_subject=10, users_per_subject=None)
    np.testing.assert_array_equal(everything.records, clients.records)
    np.testing.assert_array_equal(everything.counts, clients.counts)


def test_padding_is_not_mistaken_for_a_record():
    clients = Clients.from_rows(np.array([[0, 1, 2], [3, 0, 1]]), np.array([2, 1]))
    subjects = np.zeros(4, np.int32)
    assert subject_maxima(clients, subjects) == SubjectMaxima(
        subjects=1, most_items=3, most_users=2, most_items_at_one_user=2
    )
    assert pairs_of(cap_records(clients, subjects, items_per_subject=9, users_per_subject=None)) == [
        (0, 0),
        (0, 1),
        (1, 3),
    ]


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
@pytest.mark.parametrize("name", ["items_per_subject", "users_per_subject", "items_per_user"])
def test_limits_are_whole_numbers_from_1(name, value):
    clients = table([(0, 0)], 1)
    limits = {"items_per_subject": 1, "users_per_subject": 1, "items_per_user": 1, name: value}
    with pytest.raises(ValueError, match=rf"expected {name} (>= 1|to be a whole number), got {name}={value}"):
        cap_records(clients, np.zeros(1, np.int32), **limits)


def test_a_record_without_a_subject_is_refused():
    clients = table([(0, 0), (1, 4)], 2)
    for call in (
        lambda: cap_records(clients, np.zeros(4, np.int32), items_per_subject=1, users_per_subject=None),
        lambda: subject_maxima(clients, np.zeros(4, np.int32)),
        lambda: subjects_by_user(clients, 4),
    ):
        with pytest.raises(ValueError, match=r"expected records 0\.\.3, one subject for each, got records 0\.\.4"):
            call()


@given(federation=federations())
@MANY
def test_holdings_count(federation):
    clients, subjects = federation
    at = {subject: Counter(user for user, _ in pairs) for subject, pairs in by_subject(clients, subjects).items()}
    assert subject_maxima(clients, subjects) == SubjectMaxima(
        subjects=len(at),
        most_items=max(sum(users.values()) for users in at.values()),
        most_users=max(len(users) for users in at.values()),
        most_items_at_one_user=max(max(users.values()) for users in at.values()),
    )


def test_nobody_holds_anything():
    clients = table([], 2)
    subjects = np.zeros(3, np.int32)
    assert subject_maxima(clients, subjects) == SubjectMaxima(
        subjects=0, most_items=0, most_users=0, most_items_at_one_user=0
    )
    assert cap_records(clients, subjects, items_per_subject=1, users_per_subject=1).counts.tolist() == [0, 0]
    assert subjects_by_user(clients, 3).tolist() == [2, 2, 2]


def test_unknown_subjects_are_the_users():
    clients = partition.one_record(50, users=30, seed=0)
    subjects = subjects_by_user(clients, 50)
    assert subjects.dtype == np.int32
    np.testing.assert_array_equal(subjects[clients.records], np.arange(30))
    assert np.count_nonzero(subjects == 30) == 20  # at nobody's
    ragged = partition.dirichlet(np.arange(60) % 3, users=7, concentration=0.5, seed=0)
    most = subject_maxima(ragged, subjects_by_user(ragged, 60))
    assert most == SubjectMaxima(
        subjects=7,
        most_items=ragged.counts.max(),
        most_users=1,
        most_items_at_one_user=ragged.counts.max(),
    )


def test_a_record_of_two_users_has_no_single_subject():
    labels = np.arange(40) % 4
    repeated = partition.shards(labels, users=8, seed=0, records_per_user=10)
    with pytest.raises(ValueError, match="expected every record at one user, since subjects are unknown, got record"):
        subjects_by_user(repeated, 40)
    assert len(subjects_by_user(partition.shards(labels, users=4, seed=0, records_per_user=10), 40)) == 40
