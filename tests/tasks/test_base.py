import numpy as np
import pytest

from dovetail.tasks import Clients, Dataset


@pytest.mark.parametrize(
    ("index", "counts"),
    [
        (np.zeros((2, 3)), [1, 4]),
        (np.zeros((2, 3)), [0, 3]),
        (np.zeros((0, 3)), []),
        (np.zeros((2, 3)), [1, 2, 3]),
        (np.zeros(3), [1, 1, 1]),
    ],
    ids=["too many", "nothing", "nobody", "too many counts", "flat"],
)
def test_clients_that_make_no_sense_are_refused(index, counts):
    with pytest.raises(ValueError, match=r"expected (clients of 1 to 3 records|index \(clients, records\))"):
        Clients(index=index.astype(np.int32), counts=np.array(counts, np.int32))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": np.zeros(3, np.int32)}, "expected one label for each record of inputs, got 2 and 3"),
        ({"test_labels": np.array([4], np.int32)}, r"expected labels of test_inputs in \[0, 4\), got 4..4"),
        ({"labels": np.array([0, -1], np.int32)}, r"expected labels of inputs in \[0, 4\), got -1..0"),
        ({"inputs": np.array([[0, np.nan]] * 2, np.float32)}, "got 2 NaN or infinite values in inputs"),
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
    Dataset(**good)
    with pytest.raises(ValueError, match=sentence):
        Dataset(**{**good, **changed})
