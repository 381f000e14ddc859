import dataclasses
import hashlib
from pathlib import Path

import idx_files
import numpy as np
import pytest

from dovetail.tasks import idx, mnist, mnist_writers, qmnist
from dovetail.tasks.download import RemoteFile

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
            place(tmp_path, file, values, suffix=suffix) for file, values in zip(mnist.FILES, contents, strict=True)
        ]
        monkeypatch.setattr(mnist, "FILES", tuple(files))
        labels = {"train": place(tmp_path, qmnist.LABEL_FILES["train"], table, suffix=suffix)}
        monkeypatch.setattr(qmnist, "LABEL_FILES", labels)
        return tmp_path

    return folder


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_comes_with_its_writers_numbered_without_gaps(prepare, suffix):
    data = mnist_writers.TASK.load(folder=prepare(TABLE, suffix=suffix))
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
        mnist_writers.TASK.load(folder=prepare(np.ascontiguousarray(table)))
    assert "\n" not in str(caught.value)


def test_other_labels_are_refused_by_their_hash(prepare):
    folder = prepare(TABLE)
    idx_files.write(folder / "qmnist-train-labels-idx2-int", TABLE[::-1])
    with pytest.raises(FileNotFoundError, match="does not match its SHA-256"):
        mnist_writers.TASK.load(folder=folder)


@pytest.mark.skipif(not REAL.exists(), reason="the real labels of QMNIST are not beside the repository")
def test_the_real_labels_have_539_writers():
    content = idx.read(REAL)
    assert hashlib.sha256(idx_files.encode(content)).hexdigest() == qmnist.LABEL_FILES["train"].sha256
    writers = mnist_writers._writers(REAL, content[:, 0])
    items = np.bincount(writers)
    assert (len(writers), len(items)) == (60_000, 539)
    assert (items.min(), np.median(items), items.max()) == (19, 116, 131)
    assert len(np.unique(content[:, 1:3], axis=0)) == 539  # the number of a writer is the writer, whatever the form
