"""The records on which a user's own model is tried out."""

import numpy as np
import pytest

from dovetail.data import Dataset
from dovetail.learners import isolation


def dataset(test_inputs):
    labels = np.arange(len(test_inputs), dtype=np.int32) % 2
    return Dataset(
        inputs=test_inputs, labels=labels, test_inputs=test_inputs, test_labels=labels, num_classes=2, target="classes"
    )


def test_records_are_as_a_model_reads_them():
    """Bytes in [0, 1], numbers as they are; few are taken again."""
    pixels = np.array([[0, 51, 255], [255, 0, 102], [51, 51, 0]], np.uint8)
    inputs, labels = isolation._probe_records(dataset(pixels))
    assert inputs.dtype == np.float32
    assert inputs == pytest.approx(np.array([[0, 0.2, 1], [1, 0, 0.4], [0.2, 0.2, 0], [1, 0.8, 0]], np.float32))
    assert labels.tolist() == [0, 1, 0, 0]
    numbers = np.array([[0.5, -3.0], [2.0, 0.0], [1.0, 1.0], [40.0, 7.0]], np.float32)
    assert np.array_equal(isolation._probe_records(dataset(numbers))[0], numbers)


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("value", [0, 255])
def test_the_last_record_is_unlike_the_others(rows, value):
    inputs, _ = isolation._probe_records(dataset(np.full((rows, 3), value, np.uint8)))
    assert inputs.shape == (4, 3)
    assert all((inputs[3] != inputs[number]).any() for number in range(3))
