import gzip

import idx_files
import numpy as np
import pytest

from dovetail.data import mnist

IMAGES = idx_files.images(3)
TABLE = np.array([[7, -1], [2, 1 << 20]], np.int32)


@pytest.mark.parametrize("values", [IMAGES, TABLE, np.arange(5, dtype=np.uint8), np.zeros((0, 28, 28), np.uint8)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reads_back_what_was_written(tmp_path, values, suffix):
    found = mnist.read_idx(idx_files.write(tmp_path / f"file{suffix}", values))
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype
    assert found.dtype.isnative
    assert found.flags.writeable


GOOD = idx_files.encode(IMAGES)
BAD = {
    "empty": b"",
    "three bytes": GOOD[:3],
    "first byte": b"\x01" + GOOD[1:],
    "float type": GOOD[:2] + b"\x0d" + GOOD[3:],
    "no dimensions": GOOD[:3] + b"\0" + GOOD[4:],
    "too many dimensions": GOOD[:3] + b"\x09" + GOOD[4:],
    "cut in the header": GOOD[:10],
    "one byte short": GOOD[:-1],
    "one byte long": GOOD + b"\0",
    "dimension too large": GOOD[:7] + b"\x04" + GOOD[8:],
    "overflowing dimensions": GOOD[:4] + b"\xff" * 12 + GOOD[16:],
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_refuses_anything_else_in_one_sentence(tmp_path, content):
    path = tmp_path / "broken"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"expected .*, got .* in .*broken") as caught:
        mnist.read_idx(path)
    assert "\n" not in str(caught.value)


def test_refuses_a_truncated_gzip(tmp_path):
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(GOOD)[:-20])
    with pytest.raises(ValueError, match="expected a whole gzip file"):
        mnist.read_idx(path)


def four(tmp_path, *, train=4, test=2, labels=None, side=28):
    labels = np.arange(train, dtype=np.uint8) if labels is None else labels
    return (
        idx_files.write(tmp_path / "train-images", idx_files.images(train, side=side)),
        idx_files.write(tmp_path / "train-labels", labels),
        idx_files.write(tmp_path / "test-images.gz", idx_files.images(test, seed=1)),
        idx_files.write(tmp_path / "test-labels.gz", np.arange(test, dtype=np.uint8)),
    )


def test_four_files_make_a_dataset(tmp_path):
    data = mnist.dataset_from_idx(*four(tmp_path))
    np.testing.assert_array_equal(data.inputs, idx_files.images(4))
    np.testing.assert_array_equal(data.test_inputs, idx_files.images(2, seed=1))
    assert (data.inputs.dtype, data.labels.dtype, data.test_labels.dtype) == (np.uint8, np.int32, np.int32)
    assert data.labels.tolist() == [0, 1, 2, 3]


def test_of_a_table_of_labels_column_0_is_the_class(tmp_path):
    table = np.array([[3, 9, 9], [1, 8, 8], [4, 7, 7], [1, 6, 6]], np.int32)
    assert mnist.dataset_from_idx(*four(tmp_path, labels=table)).labels.tolist() == [3, 1, 4, 1]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"side": 27}, "expected uint8 images of 28 x 28"),
        ({"labels": np.arange(3, dtype=np.uint8)}, "expected one label for each record"),
        ({"labels": np.array([0, 1, 2, 10], np.uint8)}, "expected labels of inputs in"),
        ({"labels": np.zeros((4, 2, 2), np.int32)}, "expected one label or one row of labels per record"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        mnist.dataset_from_idx(*four(tmp_path, **changed))
