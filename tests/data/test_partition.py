import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.data import partition

SUBJECTS = np.random.default_rng(8).integers(0, 60, 3000).astype(np.int32) * 3  # some 50 records each, ids with gaps
LABELS = np.random.default_rng(7).integers(0, 10, 3000).astype(np.int32)
SORTED_EVENLY = np.random.default_rng(7).permutation(np.repeat(np.arange(10), 300)).astype(np.int32)

MAKERS = {
    "iid": lambda seed: partition.iid(3000, users=70, seed=seed),
    "one-record": lambda seed: partition.one_record(3000, users=50, seed=seed),
    "shards": lambda seed: partition.shards(LABELS, users=30, seed=seed, records_per_user=100),
    "dirichlet": lambda seed: partition.dirichlet(LABELS, users=40, concentration=0.3, seed=seed),
    "silos": lambda seed: partition.silos(SUBJECTS, num_silos=8, spread=3, seed=seed),
    "by-user": lambda seed: partition.by_user(SUBJECTS),
}


def owned(clients) -> list[np.ndarray]:
    return [clients.records_of(user) for user in range(clients.num_clients)]


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def test_nobody_shares_a_record_and_padding_is_the_clients_own(make):
    clients = make(0)
    records = np.concatenate(owned(clients))
    assert len(np.unique(records)) == len(records)
    assert records.min() >= 0
    assert records.max() < 3000
    for row, mine in zip(clients.rows(np.arange(clients.num_clients)), owned(clients), strict=True):
        assert set(row) == set(mine)
    assert clients.records.dtype == clients.counts.dtype == np.int32


@pytest.mark.parametrize("make", [MAKERS[name] for name in MAKERS if name != "by-user"])
def test_the_seed_decides_everything(make):
    first, again, other = make(3), make(3), make(4)
    np.testing.assert_array_equal(first.records, again.records)
    np.testing.assert_array_equal(first.counts, again.counts)
    assert (first.records != other.records).any()


@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet", "silos", "by-user"])
def test_all_records_are_dealt(name):
    np.testing.assert_array_equal(np.sort(np.concatenate(owned(MAKERS[name](0)))), np.arange(3000))


def test_iid_counts_differ_by_at_most_one():
    clients = partition.iid(3000, users=70, seed=0)
    assert sorted(set(clients.counts.tolist())) == [42, 43]
    assert clients.num_clients == 70


def test_iid_is_not_in_order_and_mixes_labels():
    clients = partition.iid(len(SORTED_EVENLY), users=10, seed=0)
    kinds = [len(set(np.sort(SORTED_EVENLY)[mine])) for mine in owned(clients)]
    assert min(kinds) == 10


def test_one_record_is_by_default_as_many_users_as_records():
    clients = partition.one_record(500, seed=0)
    np.testing.assert_array_equal(np.sort(clients.records), np.arange(500))
    assert (clients.records != np.arange(500)).any()
    assert clients.counts.tolist() == [1] * 500


@pytest.mark.parametrize("users", [10, 11])
def test_more_users_than_records_are_refused(users):
    calls = [
        lambda: partition.iid(10, users=users, seed=0),
        lambda: partition.dirichlet(LABELS[:10], users=users, concentration=1.0, seed=0),
    ]
    for call in calls:
        if users == 10:
            assert call().num_clients == 10
        else:
            with pytest.raises(ValueError, match=r"expected at most one user per record \(10 records\), got users=11"):
                call()


@pytest.mark.parametrize("users", [0, -1, 2.5, True])
def test_a_number_of_users_is_a_whole_number_from_1(users):
    for call in (partition.iid, partition.one_record):
        with pytest.raises(ValueError, match="expected users"):
            call(10, users=users, seed=0)
    with pytest.raises(ValueError, match="expected users"):
        partition.shards(LABELS, users=users, seed=0)


def test_a_shard_is_a_run_of_one_label():
    clients = partition.shards(SORTED_EVENLY, users=10, seed=0, records_per_user=300)
    kinds = [len(set(SORTED_EVENLY[mine])) for mine in owned(clients)]
    assert max(kinds) <= 2  # 20 shards of 150 records, 300 of each label: no shard holds two labels
    assert np.mean(kinds) > 1.5
    for mine in owned(clients):
        counts = np.unique(SORTED_EVENLY[mine], return_counts=True)[1]
        assert set(counts) <= {150, 300}


def test_shards_are_repeated_when_the_data_are_not_enough():
    clients = partition.shards(SORTED_EVENLY, users=100, seed=0, records_per_user=300)
    assert clients.counts.tolist() == [300] * 100
    assert set(np.bincount(clients.records, minlength=3000)) == {10}
    assert all(len(set(mine)) == 300 for mine in owned(clients))
    assert all(len(set(SORTED_EVENLY[mine])) <= 2 for mine in owned(clients))


def test_shards_that_do_not_divide_the_data_are_spread_over_all_of_it():
    clients = partition.shards(SORTED_EVENLY, users=5, seed=0, shards_per_user=3, records_per_user=570)
    records = np.concatenate(owned(clients))
    assert len(np.unique(records)) == len(records) == 2850
    assert set(SORTED_EVENLY[records]) == set(range(10))
    repeated = partition.shards(SORTED_EVENLY, users=50, seed=0, shards_per_user=4, records_per_user=760)
    assert all(len(set(mine)) == 760 for mine in owned(repeated))


@pytest.mark.parametrize(
    "sizes", [{"records_per_user": 601}, {"records_per_user": 4000}, {"records_per_user": 0}, {"shards_per_user": 0}]
)
def test_shards_refuse_sizes_that_do_not_fit(sizes):
    with pytest.raises(ValueError, match=r"expected (records|shards)_per_user"):
        partition.shards(LABELS, users=2, seed=0, **sizes)


def test_dirichlet_is_ragged_when_small_and_even_when_large():
    skewed = partition.dirichlet(LABELS, users=40, concentration=0.1, seed=0)
    even = partition.dirichlet(LABELS, users=40, concentration=1000.0, seed=0)
    assert skewed.counts.min() >= 1
    assert skewed.counts.std() > 5 * even.counts.std()

    def main_label(clients):
        return np.mean([np.bincount(LABELS[mine]).max() / len(mine) for mine in owned(clients)])

    assert main_label(skewed) > 0.5
    assert main_label(even) < 0.2


@pytest.mark.parametrize("concentration", [1e-3, 0.01])
@pytest.mark.parametrize("users", [1, 500, 3000])
def test_dirichlet_leaves_nobody_empty(concentration, users):
    clients = partition.dirichlet(LABELS, users=users, concentration=concentration, seed=1)
    assert clients.counts.min() >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(owned(clients))), np.arange(3000))


@pytest.mark.parametrize("concentration", [0, -1.0, float("nan"), float("inf")])
def test_dirichlet_needs_a_positive_concentration(concentration):
    with pytest.raises(ValueError, match="expected concentration"):
        partition.dirichlet(LABELS, users=4, concentration=concentration, seed=0)


def test_build_finds_a_partition_by_its_name():
    built = {
        "iid": partition.build("iid", LABELS, users=70, seed=0),
        "one-record": partition.build("one-record", LABELS, users=50, seed=0),
        "shards": partition.build("shards", LABELS, users=30, seed=0),
        "dirichlet": partition.build("dirichlet", LABELS, users=40, seed=0, concentration=0.3),
        "silos": partition.build("silos", LABELS, users=8, seed=0, subjects=SUBJECTS, spread=3),
        "by-user": partition.build("by-user", LABELS, users=None, seed=0, owners=SUBJECTS),
        "writers": partition.build("writers", LABELS, users=None, seed=0, subjects=SUBJECTS),
    }
    assert sorted(built) == sorted(partition.PARTITIONS)
    made = {**MAKERS, "shards": lambda seed: partition.shards(LABELS, users=30, seed=seed)}
    made["writers"] = made["by-user"]
    for name, clients in built.items():
        np.testing.assert_array_equal(clients.records, made[name](0).records)
    assert partition.build("one-record", LABELS, users=None, seed=0).num_clients == 3000


def test_by_user_every_owner_is_a_user_with_all_its_records():
    ids = np.unique(SUBJECTS)
    for clients in (partition.by_user(SUBJECTS), partition.by_user(SUBJECTS, users=len(ids))):
        assert clients.num_clients == len(ids)
        for mine, subject in zip(owned(clients), ids, strict=True):
            np.testing.assert_array_equal(mine, np.flatnonzero(subject == SUBJECTS))
    with pytest.raises(ValueError, match=r"the data name 60 users, more than task.users = 5: declare at least as many"):
        partition.by_user(SUBJECTS, users=5)


def test_declared_users_beyond_those_with_records_hold_nothing():
    assert partition.by_user(np.array([4, 4, 9]), users=4).counts.tolist() == [2, 1, 0, 0]
    assert partition.one_record(3, users=5, seed=0).counts.tolist() == [1, 1, 1, 0, 0]


def test_a_place_on_the_roster_does_not_depend_on_who_else_has_records():
    places = np.array([1, 1, 4], np.int32)
    assert partition.by_user(places, roster=6).counts.tolist() == [0, 2, 0, 0, 1, 0]
    assert partition.by_user(places[2:], roster=6).counts.tolist() == [0, 0, 0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"task.users = 5 contradicts the roster of the data, which has 6 places"):
        partition.by_user(places, users=5, roster=6)


def held(clients, subjects) -> np.ndarray:
    """How many records of each subject (rows) each client holds."""
    table = np.zeros((subjects.max() + 1, clients.num_clients), int)
    for user, mine in enumerate(owned(clients)):
        np.add.at(table, (subjects[mine], user), 1)
    return table


@given(
    subjects=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    silos=st.integers(1, 8),
    spread=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_subject_is_spread_evenly_over_exactly_so_many_silos(subjects, silos, spread, seed):
    subjects = np.array(subjects, np.int32)
    silos = min(silos, len(subjects))
    spread = min(spread, silos)
    clients = partition.silos(subjects, num_silos=silos, spread=spread, seed=seed)
    assert clients.num_clients == silos
    np.testing.assert_array_equal(np.sort(np.concatenate(owned(clients))), np.arange(len(subjects)))
    for counts in held(clients, subjects):
        assert np.count_nonzero(counts) == min(spread, counts.sum())
        share, rest = divmod(int(counts.sum()), spread)
        assert sorted(counts[counts > 0]) == [n for n in [share] * (spread - rest) + [share + 1] * rest if n]


def test_silos_and_the_records_they_get_are_drawn_uniformly():
    # 2000 subjects of 3 records at 2 of 5 silos: a silo gets 2 of a subject's records with probability 1/5, 1 with 1/5
    subjects = np.repeat(np.arange(2000), 3)
    clients = partition.silos(subjects, num_silos=5, spread=2, seed=0)
    table = held(clients, subjects)
    deviation = np.sqrt(2000 / 5 * 4 / 5)
    for records in (1, 2):
        assert (np.abs((table == records).sum(axis=0) - 2000 / 5) < 4 * deviation).all()  # alpha < 10 x 7e-5
    alone = [mine[table[subjects[mine], silo] == 1] for silo, mine in enumerate(owned(clients))]
    which = np.bincount(np.concatenate(alone) % 3, minlength=3)
    assert which.sum() == 2000
    assert (np.abs(which - 2000 / 3) < 4 * np.sqrt(2000 / 3 * 2 / 3)).all()  # alpha < 3 x 7e-5


def test_silos_say_what_does_not_fit():
    assert partition.silos(SUBJECTS[:4], num_silos=4, spread=4, seed=0).num_clients == 4
    for given_, sentence in (
        ({"num_silos": 5, "spread": 1}, r"expected at most one silo per record \(4 records\), got silos=5"),
        ({"num_silos": 4, "spread": 5}, "expected 1 <= spread <= 4, got spread=5"),
        ({"num_silos": 4, "spread": 0}, "expected 1 <= spread <= 4, got spread=0"),
        ({"num_silos": 0, "spread": 1}, "expected silos >= 1, got silos=0"),
        ({"num_silos": 2.5, "spread": 1}, "expected silos to be a whole number"),
    ):
        with pytest.raises(ValueError, match=sentence):
            partition.silos(SUBJECTS[:4], **given_, seed=0)


def test_silos_that_nobody_draws_are_empty():
    clients = partition.silos(np.zeros(9, np.int32), num_silos=9, spread=1, seed=0)
    assert sorted(clients.counts.tolist()) == [0] * 8 + [9]


def test_build_says_what_it_misses():
    sentence = r"partition 'silos' needs data with subjects \(subject= of Dataset.from_csv; mnist-writers has them\)"
    with pytest.raises(ValueError, match=sentence):
        partition.build("silos", LABELS, users=3, seed=0)
    for name in partition.BY_USER:
        with pytest.raises(ValueError, match=f"partition '{name}' needs data that name users or subjects"):
            partition.build(name, LABELS, users=3, seed=0)
    with pytest.raises(ValueError, match=r"partition 'silos' needs the number of silos: set task\.silos"):
        partition.build("silos", LABELS, users=None, seed=0, subjects=SUBJECTS)
    with pytest.raises(ValueError, match="expected 1 <= spread <= 3, got spread=4"):
        partition.build("silos", LABELS, users=3, seed=0, subjects=SUBJECTS, spread=4)
    with pytest.raises(ValueError, match="unknown partition 'shard': did you mean 'shards'"):
        partition.build("shard", LABELS, users=3, seed=0)
    with pytest.raises(ValueError, match=r"partition 'iid' needs the number of users: set task\.users"):
        partition.build("iid", LABELS, users=None, seed=0)
