import dataclasses
import gzip
import hashlib
import sys

import idx_files
import numpy as np
import pytest
from sklearn.datasets import load_digits

from dovetail import data
from dovetail.data import digits, mnist
from dovetail.data.download import RemoteFile


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))


def as_file(name: str, values: np.ndarray, origin) -> RemoteFile:
    content = idx_files.encode(values)
    return RemoteFile(origin=origin, name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("name", ["MNIST", "FASHION_MNIST"])
def test_the_four_files_are_read_in_their_roles(tmp_path, monkeypatch, name):
    contents = [
        idx_files.images(6),
        np.arange(6, dtype=np.uint8),
        idx_files.images(3, seed=1),
        np.full(3, 9, np.uint8),
    ]
    real = getattr(mnist, f"{name}_FILES")
    origin = dataclasses.replace(real[0].origin, mirrors=(), installed=(), npm=None)
    files = tuple(as_file(file.name, values, origin) for file, values in zip(real, contents, strict=True))
    monkeypatch.setattr(mnist, f"{name}_FILES", files)
    for file, values in zip(files, contents, strict=True):
        idx_files.write(tmp_path / f"{file.name}.gz", values)
    data = getattr(mnist, name).load(folder=tmp_path)
    for found, values in zip((data.inputs, data.labels, data.test_inputs, data.test_labels), contents, strict=True):
        np.testing.assert_array_equal(found, values)
    assert data.num_classes == 10


@pytest.mark.parametrize("name", ["MNIST", "FASHION_MNIST"])
def test_every_file_has_its_own_hash_and_two_mirrors(name):
    files = getattr(mnist, f"{name}_FILES")
    assert len({file.sha256 for file in mnist.MNIST_FILES + mnist.FASHION_MNIST_FILES}) == 8
    assert all(len(file.sha256) == 64 and len(file.origin.mirrors) >= 2 for file in files)
    assert [file.size for file in files] == [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]


def test_the_labels_of_qmnist_have_hashes_and_two_mirrors():
    assert sorted(mnist.QMNIST_LABEL_FILES) == ["test", "train"]
    for file in mnist.QMNIST_LABEL_FILES.values():
        assert len(file.sha256) == 64
        assert len(file.origin.mirrors) >= 2
        assert file.size == 12 + 60_000 * 8 * 4


def qmnist_folder(tmp_path, monkeypatch, *, train_images):
    tables = {"train": np.array([[5, 4, 1], [0, 4, 2]], np.int32), "test": np.array([[7, 4, 3]], np.int32)}
    files = {}
    for split, images in (("train", train_images), ("test", idx_files.images(1, seed=1))):
        origin = dataclasses.replace(mnist.QMNIST_LABEL_FILES[split].origin, mirrors=())
        files[split] = as_file(f"qmnist-{split}-labels-idx2-int", tables[split], origin)
        idx_files.write(tmp_path / f"qmnist-{split}-labels-idx2-int.gz", tables[split])
        idx_files.write(tmp_path / f"qmnist-{split}-images-idx3-ubyte{'.gz' if split == 'test' else ''}", images)
    monkeypatch.setattr(mnist, "QMNIST_LABEL_FILES", files)
    return tmp_path


def test_qmnist_comes_from_a_folder(tmp_path, monkeypatch):
    data = mnist.QMNIST.load(folder=qmnist_folder(tmp_path, monkeypatch, train_images=idx_files.images(2)))
    assert data.labels.tolist() == [5, 0]
    assert data.test_labels.tolist() == [7]
    np.testing.assert_array_equal(data.inputs, idx_files.images(2))


def test_qmnist_refuses_what_does_not_fit(tmp_path, monkeypatch):
    folder = qmnist_folder(tmp_path, monkeypatch, train_images=idx_files.images(3))
    with pytest.raises(ValueError, match="expected one label for each record"):
        mnist.QMNIST.load(folder=folder)
    labels = folder / "qmnist-test-labels-idx2-int.gz"
    labels.write_bytes(gzip.compress(idx_files.encode(np.array([[6, 4, 3]], np.int32))))
    for path in (tmp_path / "cache").rglob("qmnist-test*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="does not match its SHA-256"):
        mnist.QMNIST.load(folder=folder)
    (folder / "qmnist-test-images-idx3-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="expected qmnist-test-images-idx3-ubyte or"):
        mnist.QMNIST.load(folder=folder)
    with pytest.raises(FileNotFoundError, match="are not downloaded: give the folder"):
        mnist.QMNIST.load(folder=None)


def test_digits_are_scaled_and_split_the_same_way_always():
    data = digits.TASK.load(folder=None)
    assert (data.inputs.shape, data.test_inputs.shape) == ((1437, 8, 8), (360, 8, 8))
    assert (data.inputs.dtype, data.inputs.min(), data.inputs.max()) == (np.float32, 0, 1)
    again = digits.TASK.load(folder=None)
    np.testing.assert_array_equal(data.inputs, again.inputs)
    rows = {record.tobytes() for record in data.inputs}
    assert not any(record.tobytes() in rows for record in data.test_inputs)
    assert set(data.test_labels.tolist()) == set(range(10))


def test_bundled_digits_are_those_of_scikit_learn():
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    data = digits.TASK.load(folder=None)
    ours = np.concatenate([data.inputs, data.test_inputs])
    np.testing.assert_array_equal(ours.reshape(-1, 64), (images[order] / 16).astype(np.float32))
    np.testing.assert_array_equal(np.concatenate([data.labels, data.test_labels]), labels[order])


def test_registered_tasks_are_found_by_name():
    assert sorted(data.TASKS) == [
        *("adult", "cifar10", "digits", "fashion-mnist", "mnist", "mnist-writers", "qmnist", "toxicity")
    ]
    for name, task in data.TASKS.items():
        assert data.resolve(name) is task
        assert task.name == name
    assert data.resolve(digits.TASK) is digits.TASK


def test_a_name_nearly_right_is_corrected():
    with pytest.raises(ValueError, match="unknown task 'fashion_mnist': did you mean 'fashion-mnist'"):
        data.resolve("fashion_mnist")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, not on sys.path, with a module or two."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("mine_"):
            del sys.modules[name]


def test_a_module_in_the_working_directory_brings_a_task(here):
    (here / "mine_good.py").write_text(
        "from dovetail.data import Task\nfrom mine_helper import load\nTOY = Task(name='toy', load=load)\n"
    )
    (here / "mine_helper.py").write_text("def load(*, folder): return 'data'\n")
    task = data.resolve("mine_good:TOY")
    assert (task.name, task.load(folder=None)) == ("toy", "data")


@pytest.mark.parametrize(
    ("source", "name", "sentence"),
    [
        ("1 / 0", "mine_bad:TASK", "ZeroDivisionError: division by zero"),
        ("def broken(:", "mine_bad:TASK", "SyntaxError"),
        ("import mine_absent", "mine_bad:TASK", "No module named 'mine_absent'"),
        ("raise RuntimeError('first\\nsecond')", "mine_bad:TASK", "RuntimeError: first"),
        ("TASK = 3", "mine_bad:TASK", "to be a dovetail.data.Task, got a int"),
        ("", "mine_bad:TASK", "got no such name"),
        ("", "mine_nowhere:TASK", "No module named 'mine_nowhere'"),
        ("", ":TASK", "expected a task 'module:name' that imports"),
    ],
)
def test_what_is_wrong_with_a_module_is_one_sentence(here, source, name, sentence):
    (here / "mine_bad.py").write_text(source)
    with pytest.raises(ValueError, match=sentence) as caught:
        data.resolve(name)
    assert "\n" not in str(caught.value)
    assert name.split(":")[0] in str(caught.value)
