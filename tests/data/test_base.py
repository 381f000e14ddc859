import numpy as np
import pytest

from dovetail.data import Clients, Dataset


@pytest.mark.parametrize(
    ("records", "counts"),
    [([1, 2, 3], [1, 4]), ([1, 2], [-1, 3]), ([], []), ([1, 2], [1]), ([[1, 2]], [2]), ([1, 2], [[2]])],
    ids=["too many", "negative", "nobody", "too few", "records in rows", "counts in rows"],
)
def test_clients_that_make_no_sense_are_refused(records, counts):
    with pytest.raises(ValueError, match=r"expected (counts >= 0 that add up|a list of records and the counts)"):
        Clients(records=np.array(records, np.int32), counts=np.array(counts, np.int32))


@pytest.mark.parametrize("counts", [[1, 4], [1, 2, 3]])
def test_rows_that_are_too_short_or_too_few_are_refused(counts):
    with pytest.raises(ValueError, match="expected a count of at most 3 for each of the 2 rows"):
        Clients.from_rows(np.zeros((2, 3), np.int32), np.array(counts))


def test_a_client_may_own_nothing():
    clients = Clients.from_rows(np.full((2, 3), 7, np.int32), np.array([0, 3]))
    assert clients.num_clients == 2
    users, records = clients.owners_and_records()
    assert (users.tolist(), records.tolist()) == ([1, 1, 1], [7, 7, 7])


@pytest.mark.parametrize("owners", [[2, 0, 2, 2], [1, 1, 1, 1], [3, 3, 0, 3], []])
def test_owners_make_a_table_with_room_for_those_who_own_nothing(owners):
    records = np.array([9, 4, 6, 5])[: len(owners)]
    clients = Clients.from_owners(records, np.array(owners, np.int64), num_clients=4)
    for user, (row, count) in enumerate(zip(clients.rows(np.arange(4)), clients.counts, strict=True)):
        mine = [record for record, owner in zip(records, owners, strict=True) if owner == user]
        assert row[:count].tolist() == clients.records_of(user).tolist() == mine
        assert set(row[count:].tolist()) <= {mine[0] if mine else 0}
    users, kept = clients.owners_and_records()
    assert sorted(zip(users, kept, strict=True)) == sorted(zip(owners, records, strict=True))
    some = clients.subset(np.array([3, 0]))
    assert [some.records_of(i).tolist() for i in range(2)] == [
        clients.records_of(3).tolist(),
        clients.records_of(0).tolist(),
    ]
    assert clients.records.dtype == clients.counts.dtype == np.int32


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": np.zeros(3, np.int32)}, "expected one label for each record of inputs, got 2 and 3"),
        ({"test_labels": np.array([4], np.int32)}, r"expected labels of test_inputs in \[0, 4\), got 4..4"),
        ({"labels": np.array([0, -1], np.int32)}, r"expected labels of inputs in \[0, 4\), got -1..0"),
        ({"inputs": np.array([[0, np.nan]] * 2, np.float32)}, "got 2 NaN or infinite values in inputs"),
        ({"inputs": np.array([[0, np.inf]] * 2)}, "got 2 NaN or infinite values in inputs"),
        (
            {"inputs": np.array([[0, 1e39], [-1e300, 1]])},
            r"expected inputs within 3\.4e\+38 of zero, .* got 2 values beyond it in inputs",
        ),
        ({"test_inputs": np.array([[1e39, 0]])}, "got 1 values beyond it in test_inputs"),
        ({"inputs": np.zeros((2, 2), np.int64)}, r"expected inputs as uint8 \(.*\) or as floating.*, got int64"),
        ({"inputs": np.zeros((2, 2), bool)}, "or as floating-point numbers, got bool"),
        ({"labels": np.array([0.5, 1.0])}, "expected labels of inputs to be whole numbers, got 1 that are not"),
        ({"labels": np.array([np.nan, np.inf])}, "expected labels of inputs to be whole numbers, got 2 that are not"),
        ({"labels": np.array(["a", "b"])}, "expected labels of inputs as whole numbers, got <U1"),
        ({"labels": np.zeros((2, 1), np.int32)}, r"got labels of shape \(2, 1\)"),
        ({"labels": np.array([0, 2**32], np.int64)}, r"expected labels of inputs in \[0, 4\), got 0\.\.4294967296"),
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


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"target": "classes"}, r'to be whole numbers, got 1 that are not: pass target="number" for regression'),
        ({"labels": np.array([0.5, np.inf])}, "got 1 NaN or infinite values in labels of inputs"),
        ({"test_labels": np.array([1e300])}, "got 1 values beyond it in labels of test_inputs"),
        ({"labels": np.array(["a", "b"])}, "expected labels of inputs as numbers, got <U1"),
        ({"labels": np.zeros((2, 1))}, r"expected one label for each record of inputs, got labels of shape \(2, 1\)"),
        ({"num_classes": 2}, 'expected num_classes=1 with target="number", got num_classes=2'),
        ({"target": "numbers"}, "expected target to be one of classes, number, labels, got target='numbers'"),
    ],
)
def test_numbers_to_predict_are_finite_and_one_per_record(changed, sentence):
    good = {
        "inputs": np.zeros((2, 2), np.float32),
        "labels": np.array([0.5, -3.0]),
        "test_inputs": np.zeros((1, 2), np.float32),
        "test_labels": np.array([2]),
        "num_classes": 1,
        "target": "number",
    }
    data = Dataset(**good)
    assert data.labels.dtype == data.test_labels.dtype == np.float32
    np.testing.assert_array_equal(data.labels, np.array([0.5, -3.0], np.float32))
    with pytest.raises(ValueError, match=sentence):
        Dataset(**{**good, **changed})


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": np.array([[0, 2, 1], [1, 0.5, np.nan]])}, "to be zeros and ones, got 3 that are neither"),
        ({"labels": np.zeros((2, 2))}, r"expected a row of 3 labels for each record of inputs, .* \(2, 2\)"),
        ({"test_labels": np.zeros(1)}, r"expected a row of 3 labels for each record of test_inputs, .* \(1,\)"),
        ({"labels": np.full((2, 3), "0")}, "expected labels of inputs as zeros and ones, got <U1"),
        ({"labels": np.zeros((3, 3))}, "expected one label for each record of inputs, got 2 and 3"),
    ],
)
def test_several_labels_are_zeros_and_ones(changed, sentence):
    good = {
        "inputs": np.zeros((2, 2), np.float32),
        "labels": np.array([[0, 1, 1], [1, 0, 0]]),
        "test_inputs": np.zeros((1, 2), np.float32),
        "test_labels": np.array([[True, False, True]]),
        "num_classes": 3,
        "target": "labels",
    }
    data = Dataset(**good)
    assert data.labels.dtype == data.test_labels.dtype == np.float32
    np.testing.assert_array_equal(data.test_labels, [[1, 0, 1]])
    with pytest.raises(ValueError, match=sentence):
        Dataset(**{**good, **changed})


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble])
def test_floats_are_held_as_float32_and_labels_as_int32(dtype):
    inputs = np.array([[0.5, 1e-5], [3.0, 6e-8]]).astype(dtype)
    for labels in (np.array([0.0, 3.0]), np.array([0, 3], np.uint8), np.array([False, True])):
        data = Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=4)
        np.testing.assert_array_equal(data.inputs, inputs.astype(np.float32))
        np.testing.assert_array_equal(data.test_labels, labels.astype(int))
        assert data.inputs.dtype == data.test_inputs.dtype == np.float32
        assert data.labels.dtype == data.test_labels.dtype == np.int32


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_what_has_its_type_already_is_not_copied(dtype):
    inputs, labels = np.zeros((2, 2), dtype), np.zeros(2, np.int32)
    data = Dataset(inputs=inputs, labels=labels, test_inputs=inputs, test_labels=labels, num_classes=1)
    assert data.inputs is inputs
    assert data.labels is labels


def test_the_largest_number_that_float32_holds_is_taken():
    edge = np.full((1, 1), float(np.finfo(np.float32).max))
    data = Dataset(inputs=edge, labels=[0], test_inputs=-edge, test_labels=[0], num_classes=1)
    assert data.inputs[0, 0] == -data.test_inputs[0, 0] == np.finfo(np.float32).max
