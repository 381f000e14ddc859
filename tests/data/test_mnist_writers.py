import dataclasses
import hashlib
from pathlib import Path

import idx_files
import numpy as np
import pytest

from dovetail.data import mnist
from dovetail.data.download import RemoteFile

LABELS = np.array([5, 0, 4, 1, 9], np.uint8)
WRITERS = [2154, 0, 2154, 7, 0]
TABLE = np.array([[label, 4, writer, 59] for label, writer in zip(LABELS, WRITERS, strict=True)], np.int32)
REAL = Path(__file__).parents[2] / ".." / "shared" / "data" / "qmnist-train-labels-idx2-int.gz"


def place(folder: Path, file: RemoteFile, values: np.ndarray, *, suffix: str) -> RemoteFile:
    """Put the values into the folder under the file's name; returns the file, which now expects them."""
    content = idx_files.encode(values)
    idx_files.write(folder / f"{file.name}{suffix}", values)
    origin = dataclasses.replace(file.origin, mirrors=(), installed=(), npm=None)
    return dataclasses.replace(file, origin=origin, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """One folder with MNIST's four files and the table of labels."""
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))

    def folder(table: np.ndarray, *, suffix: str = "") -> Path:
        contents = [idx_files.images(5), LABELS, idx_files.images(2, seed=1), np.array([3, 8], np.uint8)]
        files = [
            place(tmp_path, file, values, suffix=suffix)
            for file, values in zip(mnist.MNIST_FILES, contents, strict=True)
        ]
        monkeypatch.setattr(mnist, "MNIST_FILES", tuple(files))
        labels = {"train": place(tmp_path, mnist.QMNIST_LABEL_FILES["train"], table, suffix=suffix)}
        monkeypatch.setattr(mnist, "QMNIST_LABEL_FILES", labels)
        return tmp_path

    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_comes_with_its_writers_numbered_without_gaps(prepare, suffix):
    data = mnist.MNIST_WRITERS.load(folder=prepare(TABLE, suffix=suffix))
    assert data.subjects.tolist() == [2, 0, 2, 1, 0]
    assert data.subjects.dtype == np.int32
    np.testing.assert_array_equal(data.inputs, idx_files.images(5))
    assert data.labels.tolist() == LABELS.tolist()
    assert data.test_labels.tolist() == [3, 8]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (TABLE[:, :2], r"expected a subject column \(column 2\), got labels of shape \(5, 2\)"),
        (LABELS, r"expected a subject column \(column 2\), got labels of shape \(5,\)"),
        (TABLE[:4], "expected one row for each of 5 records, got 4 rows"),
        (TABLE[::-1], "expected the classes of MNIST in column 0, got 4 other classes"),
    ],
    ids=["no column", "no table", "too short", "another order"],
)
def test_a_table_that_does_not_fit_is_refused(prepare, table, sentence):
    with pytest.raises(ValueError, match=sentence) as caught:
        mnist.MNIST_WRITERS.load(folder=prepare(np.ascontiguousarray(table)))
    assert "\n" not in str(caught.value)


def test_other_labels_are_refused_by_their_hash(prepare):
    folder = prepare(TABLE)
    idx_files.write(folder / "qmnist-train-labels-idx2-int", TABLE[::-1])
    with pytest.raises(FileNotFoundError, match="does not match its SHA-256"):
        mnist.MNIST_WRITERS.load(folder=folder)


def stand_in(path: Path) -> Path:
    """A table like QMNIST's, of 539 writers with gaps between their numbers, 19 to 131 rows each, shuffled."""
    rng = np.random.default_rng(0)
    items = np.concatenate([[19, 131], rng.integers(100, 125, 537)])
    writers = rng.permutation(np.repeat(np.arange(539) * 4 + 1, items))
    table = np.stack([rng.integers(0, 10, len(writers)), writers % 3, writers, np.arange(len(writers))], axis=1)
    return idx_files.write(path, table.astype(np.int32))


def test_the_labels_have_539_writers(tmp_path):
    """The real file where it lies beside the repository, else one like it."""
    path = REAL if REAL.exists() else stand_in(tmp_path / "labels.gz")
    content = mnist.read_idx(path)
    writers = mnist.read_writers(path, content[:, 0])
    items = np.bincount(writers)
    assert len(items) == 539
    assert (items.min(), items.max()) == (19, 131)
    assert len(np.unique(content[:, 1:3], axis=0)) == 539  # the number of a writer is the writer, whatever the form
    if REAL.exists():
        assert hashlib.sha256(idx_files.encode(content)).hexdigest() == mnist.QMNIST_LABEL_FILES["train"].sha256
        assert (len(writers), np.median(items)) == (60_000, 116)


def test_a_stand_in_reads_like_the_real_file(tmp_path):
    path = stand_in(tmp_path / "labels.gz")
    content = mnist.read_idx(path)
    writers = mnist.read_writers(path, content[:, 0])
    np.testing.assert_array_equal(writers * 4 + 1, content[:, 2])
