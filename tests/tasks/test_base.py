import numpy as np
import pytest

from dovetail.tasks import Clients, Dataset


@pytest.mark.parametrize(
    ("index", "counts"),
    [
        (np.zeros((2, 3)), [1, 4]),
        (np.zeros((2, 3)), [-1, 3]),
        (np.zeros((0, 3)), []),
        (np.zeros((2, 0)), [0, 0]),
        (np.zeros((2, 3)), [1, 2, 3]),
        (np.zeros(3), [1, 1, 1]),
    ],
    ids=["too many", "negative", "nobody", "no room", "too many counts", "flat"],
)
def test_clients_that_make_no_sense_are_refused(index, counts):
    with pytest.raises(ValueError, match=r"expected (clients of 0 to 3 records|at least one client|index \(clients, )"):
        Clients(index=index.astype(np.int32), counts=np.array(counts, np.int32))


def test_a_client_may_own_nothing():
    clients = Clients(index=np.full((2, 3), 7, np.int32), counts=np.array([0, 3], np.int32))
    assert clients.num_clients == 2
    users, records = clients.entries()
    assert (users.tolist(), records.tolist()) == ([1, 1, 1], [7, 7, 7])


@pytest.mark.parametrize("owners", [[2, 0, 2, 2], [1, 1, 1, 1], [3, 3, 0, 3], []])
def test_owners_make_a_table_with_room_for_those_who_own_nothing(owners):
    records = np.array([9, 4, 6, 5])[: len(owners)]
    clients = Clients.from_owners(records, np.array(owners, np.int64), num_clients=4)
    for user, (row, count) in enumerate(zip(clients.index, clients.counts, strict=True)):
        mine = [record for record, owner in zip(records, owners, strict=True) if owner == user]
        assert row[:count].tolist() == mine
        assert set(row[count:].tolist()) <= {mine[0] if mine else 0}
    users, kept = clients.entries()
    assert sorted(zip(users, kept, strict=True)) == sorted(zip(owners, records, strict=True))
    assert clients.index.dtype == clients.counts.dtype == np.int32


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": np.zeros(3, np.int32)}, "expected one label for each record of inputs, got 2 and 3"),
        ({"test_labels": np.array([4], np.int32)}, r"expected labels of test_inputs in \[0, 4\), got 4..4"),
        ({"labels": np.array([0, -1], np.int32)}, r"expected labels of inputs in \[0, 4\), got -1..0"),
        ({"inputs": np.array([[0, np.nan]] * 2, np.float32)}, "got 2 NaN or infinite values in inputs"),
        (
            {"subjects": np.zeros(3, np.int32)},
            r"expected one subject for each of the 2 records of inputs, got .* \(3,\)",
        ),
        ({"subjects": np.zeros((2, 1), np.int32)}, r"expected one subject for each of the 2 records.*\(2, 1\)"),
        ({"subjects": np.array([5, -1], np.int32)}, "expected subjects >= 0, got subjects=-1"),
        ({"subjects": np.array([5.0, 1.0])}, "expected subjects to be int32, got float64"),
        ({"test_inputs": np.zeros((0, 2)), "test_labels": np.zeros(0, np.int32)}, "expected one label for each record"),
    ],
)
def test_a_dataset_that_makes_no_sense_is_refused(changed, sentence):
    good = {
        "inputs": np.zeros((2, 2), np.float32),
        "labels": np.array([0, 3], np.int32),
        "test_inputs": np.zeros((1, 2), np.float32),
        "test_labels": np.zeros(1, np.int32),
        "num_classes": 4,
    }
    assert Dataset(**good).subjects is None
    Dataset(**good, subjects=np.array([7, 0], np.int32))
    with pytest.raises(ValueError, match=sentence):
        Dataset(**{**good, **changed})
