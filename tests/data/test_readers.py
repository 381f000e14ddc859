"""Other people's tables, arrays and folders as a `Dataset`; nothing about them is guessed from the data."""

import csv
import dataclasses
import gzip
import inspect
import re
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from dovetail import Dataset
from dovetail.data.readers import sources, tables
from dovetail.data.readers.assembly import CLASSES_NOTE, TESTED_NOTE, held_out_mask
from dovetail.data.readers.recipes import Answer, Recipe, recipe_of, with_recipe
from dovetail.data.readers.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:no range is declared", "ignore:column .* looks like ids")

COLUMNS = {
    "patient": ["ann", "bob", "ann", "cy", "bob", "dee"],
    "age": [20, 40, 60, 80, 100, 30],
    "dose": [0.5, 1.0, 1.5, 2.0, 2.5, 3.0],
    "smoker": [True, False, False, True, True, False],
    "city": ["Rome", "Oslo", "Oslo", "Rome", "Rome", "Oslo"],
    "ill": ["yes", "no", "no", "yes", "no", "yes"],
}
HOW = {
    "user": "patient",
    "target": "ill",
    "bounds": {"age": (0, 80)},
    "categories": {"city": ["Oslo", "Rome"]},
    "test_share": 0.5,
    "test_seed": 1,
}
READ = np.array(
    [
        [-0.5, 0.5, 1, 0, 1],
        [0.0, 1.0, 0, 1, 0],
        [0.5, 1.5, 0, 1, 0],
        [1.0, 2.0, 1, 0, 1],
        [1.0, 2.5, 1, 0, 1],  # 100 is clipped to 80
        [-0.25, 3.0, 0, 1, 0],
    ],
    np.float32,
)


def written(path, columns=None, delimiter=","):
    """A CSV file of columns."""
    columns = COLUMNS if columns is None else columns
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def both_sides(data):
    return np.concatenate([data.inputs, data.test_inputs])


def same(one, other):
    for name in ("inputs", "labels", "test_inputs", "test_labels", "users", "subjects"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (one.recipe, one.notes, one.num_classes) == (other.recipe, other.notes, other.num_classes)


def test_a_table_is_read_as_declared():
    data = Dataset.from_pandas(COLUMNS, **{**HOW, "test_share": None, "test": COLUMNS})
    np.testing.assert_array_equal(data.inputs, READ)
    np.testing.assert_array_equal(data.test_inputs, READ)
    assert data.labels.tolist() == [1, 0, 0, 1, 0, 1]
    assert data.num_classes == 2
    assert data.users.tolist() == [0, 1, 0, 2, 1, 3]
    assert data.users.dtype == np.int32
    assert data.subjects is None
    assert data.recipe.answer.classes == ("no", "yes")


def test_a_share_of_users_is_held_out_whole():
    data = Dataset.from_pandas(COLUMNS, **HOW)
    out = held_out_mask(COLUMNS["patient"], share=0.5, seed=1)
    np.testing.assert_array_equal(data.test_inputs, READ[out])
    np.testing.assert_array_equal(data.inputs, READ[~out])
    assert not {name for name, o in zip(COLUMNS["patient"], out, strict=True) if o} & {
        name for name, o in zip(COLUMNS["patient"], out, strict=True) if not o
    }


def test_who_is_held_out_depends_on_nobody_else():
    names = [f"user {number}" for number in range(4000)]
    out = held_out_mask(names, share=0.2, seed=0)
    assert abs(out.mean() - 0.2) < 5 * (0.2 * 0.8 / 4000) ** 0.5  # alpha below 1e-6
    np.testing.assert_array_equal(held_out_mask(names[1:], share=0.2, seed=0), out[1:])
    assert (held_out_mask(names, share=0.2, seed=1) != out).any()
    assert not (held_out_mask(names, share=0.1, seed=0) & ~out).any()
    for share in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="expected 0 < test_share < 1"):
            held_out_mask(names, share=share, seed=0)
    with pytest.raises(ValueError, match=r"leaves someone on both sides, got test_share=0.5 with . of 1 held out"):
        held_out_mask(["ann", "ann"], share=0.5, seed=0)


def test_without_users_subjects_or_else_records_are_held_out():
    about = Dataset.from_pandas(COLUMNS, **{**HOW, "user": None, "subject": "patient"})
    same(dataclasses.replace(about, subjects=None, users=about.subjects), Dataset.from_pandas(COLUMNS, **HOW))
    columns = {name: column for name, column in COLUMNS.items() if name != "patient"}
    alone = Dataset.from_pandas(columns, **{**HOW, "user": None})
    there = np.concatenate([alone.inputs, alone.test_inputs])
    assert sorted(map(tuple, there.tolist())) == sorted(map(tuple, READ.tolist()))
    assert 0 < len(alone.labels) < 6
    assert alone.users is None


def test_a_row_less_moves_no_other_row_from_one_side_to_the_other():
    rng = np.random.default_rng(0)
    table = {"a": rng.integers(0, 40, 300).astype(float), "b": rng.integers(0, 2, 300)}
    how = {"target": "b", "classes": [0, 1], "user": None, "test_share": 0.3}

    def sides(rows):
        data = Dataset.from_pandas({name: column[rows] for name, column in table.items()}, **how)
        train = Counter(zip(data.inputs[:, 0].tolist(), data.labels.tolist(), strict=True))
        return train, Counter(zip(data.test_inputs[:, 0].tolist(), data.test_labels.tolist(), strict=True))

    whole = sides(np.arange(300))
    for missing in (0, 7, 150):
        fewer = sides(np.delete(np.arange(300), missing))
        assert sum((one - other).total() + (other - one).total() for one, other in zip(whole, fewer, strict=True)) == 1


def test_users_and_subjects_may_be_arrays_of_any_type():
    columns = {name: column for name, column in COLUMNS.items() if name != "patient"}
    ids = np.array([7, 9, 7, 11, 9, 12])
    for user in (ids, ids.astype(float), [("ward", number) for number in ids], list(ids)):
        data = Dataset.from_pandas(columns, **{**HOW, "user": user, "subject": COLUMNS["patient"]})
        assert len(set(zip(data.users.tolist(), data.subjects.tolist(), strict=True))) == len(set(data.users.tolist()))
    with pytest.raises(ValueError, match="expected one user for each of 6 records, got 5"):
        Dataset.from_pandas(columns, **{**HOW, "user": ids[:5]})


def test_what_was_read_off_the_data_is_noted():
    assert Dataset.from_pandas(COLUMNS, **HOW).notes == (CLASSES_NOTE, TESTED_NOTE)
    declared = Dataset.from_pandas(COLUMNS, **HOW, classes=["yes", "no", "unknown"])
    assert declared.notes == (TESTED_NOTE,)
    assert declared.num_classes == 3
    assert declared.recipe.answer.classes == ("yes", "no", "unknown")
    with pytest.raises(
        ValueError, match="one of the 2 declared classes in column 'ill' of the mapping, got 3 of 6 rows"
    ):
        Dataset.from_pandas(COLUMNS, **HOW, classes=["yes", "maybe"])


@pytest.mark.parametrize(
    ("changes", "how", "sentence"),
    [
        (
            {},
            {"categories": {}},
            r"numbers in column 'city' of the mapping, got text in its 6 rows; declare its values",
        ),
        (
            {"city": ["Rome"] * 5 + ["Bern"]},
            {},
            "the 2 declared categories in column 'city' of the mapping, got 1 of 6",
        ),
        (
            {"dose": [0.5, None, 1.5, float("nan"), 2.5, 3.0]},
            {},
            r"the input columns of the mapping, got some without one in 'dose' \(2 of 6 rows\): declare what stands",
        ),
        ({"dose": [0.5, 1, 1, np.inf, 2, 3]}, {}, "finite numbers in column 'dose' of the mapping, got 1 of 6 rows"),
        ({"dose": [0.5, 1, 1, 1e39, 2, 3]}, {}, "float32 can hold in column 'dose', got 1 of 6 rows"),
        ({"patient": ["ann", None, "ann", "cy", None, "d"]}, {}, "row of column 'patient' of the mapping, got 2 of 6"),
        ({"ill": ["yes", None, "no", "yes", "no", "yes"]}, {}, "row of column 'ill' of the mapping, got 1 of 6 rows"),
        ({"ill": ["yes"] * 6}, {}, "expected at least two classes in column 'ill', got 1"),
        ({"ill": ["yes", 1, "yes", 1, "yes", 1]}, {}, "column 'ill' has text and numbers for classes"),
        ({"dose": [1.0]}, {}, "expected columns of one length"),
        ({}, {"target": "sick"}, "unknown column of the mapping 'sick'"),
        ({}, {"user": "patients"}, "unknown column of the mapping 'patients': did you mean 'patient'"),
        ({}, {"bounds": {"aeg": (0, 1)}}, "unknown input column in bounds 'aeg': did you mean 'age'"),
        ({}, {"bounds": {"age": (80, 0)}}, r"with low < high of column 'age', got \(80.0, 0.0\)"),
        ({}, {"bounds": {"age": (0, np.inf)}}, "expected high to be a finite number"),
        ({}, {"bounds": {"city": (0, 1)}}, "column 'city' has bounds and categories: declare one of them"),
        ({}, {"categories": {"city": ["Rome", "Rome"]}}, "expected different categories of column 'city'"),
        ({}, {"inputs": []}, "no column is left for inputs: name some with inputs="),
        ({}, {"test_share": None}, "expected either test= .* or test_share= .*, got neither"),
        ({}, {"test": COLUMNS}, "expected either test= .* or test_share= .*, got both"),
        ({}, {"kind": "numbers"}, "expected kind to be one of classes, number, labels, got kind='numbers'"),
        ({}, {"kind": "number", "classes": ["yes", "no"]}, "classes are given, and kind='number'"),
        ({}, {"kind": "labels"}, "expected a list of columns of 0 and 1 for kind='labels', got target='ill'"),
        ({}, {"kind": "number"}, "numbers in column 'ill' of the mapping, got text in its 6 rows"),
        ({}, {"bounds": {"ill": (0, 1)}}, "bounds of column 'ill', which are classes"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(changes, how, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        Dataset.from_pandas({**COLUMNS, **changes}, **{**HOW, **how})
    assert "\n" not in str(refused.value)


def test_a_thousand_classes_are_a_number_or_declared():
    columns = {"x": np.arange(1500.0), "y": np.arange(1500)}
    with pytest.raises(ValueError, match="at most 1000 classes in column 'y', or kind='number', or classes="):
        Dataset.from_pandas(columns, target="y", test_share=0.5)
    assert Dataset.from_pandas(columns, target="y", test_share=0.5, classes=range(1500)).num_classes == 1500


# CSV


def test_csv_gives_what_the_table_gives(tmp_path):
    expected = Dataset.from_pandas(COLUMNS, **HOW)
    same(Dataset.from_csv(written(tmp_path / "a.csv"), **HOW), expected)
    same(Dataset.from_csv(str(written(tmp_path / "b.csv", delimiter=";")), **HOW), expected)
    same(Dataset.from_csv(written(tmp_path / "c.tsv", delimiter="\t"), **HOW), expected)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    same(Dataset.from_csv(tmp_path / "d.csv.gz", **HOW), expected)
    whole = {**HOW, "test_share": None}
    same(
        Dataset.from_csv(tmp_path / "a.csv", test=tmp_path / "b.csv", **whole),
        Dataset.from_pandas(COLUMNS, test=COLUMNS, **whole),
    )


def test_cells_are_read_as_what_they_are_for(tmp_path):
    columns = {"zip": ["01234", "1234", "01234", "1234"], "n": ["1", "2", " 3", "4"], "y": ["0", "1", "1", "0"]}
    path = written(tmp_path / "a.csv", columns)
    how = {"target": "y", "test": path}
    numbers = Dataset.from_csv(path, **how)
    assert numbers.inputs.tolist() == [[1234, 1], [1234, 2], [1234, 3], [1234, 4]]
    texts = Dataset.from_csv(path, **how, categories={"zip": ["01234", "1234"]})
    assert texts.inputs.tolist() == [[1, 0, 1], [0, 1, 2], [1, 0, 3], [0, 1, 4]]
    assert texts.recipe.answer.classes == (0, 1)
    assert Dataset.from_csv(path, **how, classes=["1", "0"]).labels.tolist() == [1, 0, 0, 1]
    assert len(set(Dataset.from_csv(path, **how, user="zip").users.tolist())) == 2, "ids stay text"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "expected a header of different names in 'a.csv'"),
        ("x,x\n1,2\n", "expected a header of different names in 'a.csv'"),
        ("x,y\n", "expected rows under the header of 'a.csv', got none"),
        ("x,y\n1,2\n1\n", "expected 2 cells in every row of 'a.csv', got 1 in line 3"),
        ("x,y\n1,0\n,1\nNA,0\n", r"a value in every row of the input columns of 'a.csv', .* in 'x' \(2 of 3 rows\): "),
        ("x,y\n1,0\nold,1\n", "numbers in column 'x' of 'a.csv', got text in its 2 rows"),
    ],
)
def test_a_broken_csv_is_refused(tmp_path, text, sentence):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        Dataset.from_csv(tmp_path / "a.csv", target="y", test_share=0.5)


def test_files_that_are_not_there_or_not_tables_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a file of rows at 'none.csv', and there is none"):
        Dataset.from_csv("none.csv", target="y", test_share=0.5)
    (tmp_path / "a.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape("expected a file that ends in .csv, .tsv")):
        Dataset.from_csv(tmp_path / "a.xlsx", target="y", test_share=0.5)
    with pytest.raises(ValueError, match=r"expected the path of a file, got dict \(from_pandas takes data frames\)"):
        Dataset.from_csv(COLUMNS, **HOW)
    (tmp_path / "a.csv").write_bytes(b"x,y\n\xff,1\n")
    with pytest.raises(ValueError, match=r"expected UTF-8 in 'a.csv', got byte 4 that is not"):
        Dataset.from_csv(tmp_path / "a.csv", target="y", test_share=0.5)


# other libraries


def test_a_package_that_is_not_there_is_named_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"^a Parquet file needs pyarrow: pip install pyarrow$"):
        Dataset.from_parquet(tmp_path / "a.parquet", **HOW)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"^a Hugging Face dataset by name needs datasets: pip install datasets$"
    ):
        Dataset.from_huggingface("adult", **HOW)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(b"")
    with pytest.raises(ModuleNotFoundError, match=r"^Dataset.from_folder needs PIL: pip install pillow$"):
        Dataset.from_folder(tmp_path, test_share=0.5)


def test_pandas_frames():
    pandas = pytest.importorskip("pandas", reason="pip install 'dovetail-fl[tables]'")
    frame = pandas.DataFrame(COLUMNS)
    expected = Dataset.from_pandas(COLUMNS, **HOW)
    found = Dataset.from_pandas(frame, **HOW)
    for name in ("inputs", "labels", "test_inputs", "users"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    assert found.recipe == expected.recipe
    same(Dataset.from_pandas(frame.astype({"age": "Int64", "ill": "category", "smoker": "boolean"}), **HOW), found)
    with_gap = frame.astype({"age": "Int64"})
    with_gap.loc[1, "age"] = pandas.NA
    with pytest.raises(
        ValueError, match=r"input columns of the data frame, got some without one in 'age' \(1 of 6 rows\)"
    ):
        Dataset.from_pandas(with_gap, **HOW)


def test_parquet_files(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pip install 'dovetail-fl[tables]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(COLUMNS), tmp_path / "a.parquet")
    expected = Dataset.from_pandas(COLUMNS, **HOW)
    same(Dataset.from_parquet(tmp_path / "a.parquet", **HOW), expected)
    same(Dataset.from_pandas(pyarrow.table(COLUMNS), **HOW), expected)
    parquet.write_table(pyarrow.table({**COLUMNS, "age": [20, None, 60, 80, None, 30]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"row of column 'age' of 'b.parquet', got 2 of 6 rows without one"):
        Dataset.from_parquet(tmp_path / "b.parquet", **HOW)


class Split:
    """What a split of a Hugging Face dataset looks like from outside."""

    def __init__(self, columns, names=None):
        self._columns, self.column_names = columns, list(columns)
        self.features = {name: SimpleNamespace() for name in columns}
        if names is not None:
            self.features["ill"].names = names

    def __getitem__(self, name):
        return self._columns[name]


def test_hugging_face_datasets():
    same(Dataset.from_huggingface(Split(COLUMNS), **HOW), Dataset.from_pandas(COLUMNS, **HOW))
    numbered = {**COLUMNS, "ill": [1, 0, 0, 1, 0, 1]}
    found = Dataset.from_huggingface(Split(numbered, names=["no", "yes"]), **HOW)
    same(found, Dataset.from_pandas(COLUMNS, **HOW, classes=["no", "yes"]))
    images = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2)
    pictures = Split({"image": list(images), "who": COLUMNS["patient"], "ill": numbered["ill"]}, names=["no", "yes"])
    seen = Dataset.from_huggingface(pictures, inputs="image", target="ill", user="who", test_share=0.5, test_seed=1)
    np.testing.assert_array_equal(seen.test_inputs, images[held_out_mask(COLUMNS["patient"], share=0.5, seed=1)])
    assert seen.recipe.answer.classes == ("no", "yes")
    assert seen.inputs.dtype == np.uint8
    named = Split({"image": list(images), "patient": COLUMNS["patient"], "ill": numbered["ill"]}, names=["no", "yes"])
    with pytest.raises(ValueError, match="the column 'patient' of the dataset looks like ids"):
        Dataset.from_huggingface(named, inputs="image", target="ill", test_share=0.5)
    assert Dataset.from_huggingface(named, inputs="image", target="ill", user=None, test_share=0.5).users is None
    assert (
        Dataset.from_huggingface(named, inputs="image", target="ill", subject="patient", test_share=0.5).users is None
    )
    splits = SimpleNamespace(column_names={"train": [], "test": []})
    with pytest.raises(ValueError, match=re.escape("expected one split, such as dataset['train'], got several")):
        Dataset.from_huggingface(splits, target="ill", test_share=0.5)
    with pytest.raises(
        ValueError, match="no categories, bounds or missing= with one column of arrays, got inputs='image'"
    ):
        Dataset.from_huggingface(pictures, inputs="image", target="ill", test_share=0.5, bounds={"image": (0, 1)})


def test_a_hugging_face_dataset_by_name_brings_its_own_test(monkeypatch):
    splits = {"train": Split(COLUMNS), "test": Split(COLUMNS)}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name: splits))
    whole = {**HOW, "test_share": None}
    same(Dataset.from_huggingface("patients", **whole), Dataset.from_pandas(COLUMNS, test=COLUMNS, **whole))


class Pairs:
    """What a torch dataset looks like from outside."""

    def __init__(self, *items):
        self._items = items

    def __len__(self):
        return len(self._items)

    def __getitem__(self, number):
        return self._items[number]


def test_torch_datasets():
    images = np.random.default_rng(0).random((6, 3, 4, 5), np.float32)
    pairs = Pairs(*zip(images, [0, 1, 2, 2, 1, 0], strict=True))
    data = Dataset.from_torch(pairs, user=COLUMNS["patient"], channels_first=True, test=pairs)
    np.testing.assert_array_equal(data.inputs, np.moveaxis(images, 1, -1))
    assert data.labels.tolist() == [0, 1, 2, 2, 1, 0]
    assert data.users.tolist() == [0, 1, 0, 2, 1, 3]
    with pytest.raises(ValueError, match=r"torch dataset of pairs \(input, label\), got 1 items of another form"):
        Dataset.from_torch(Pairs((1, 2, 3)), test_share=0.5)
    with pytest.raises(ValueError, match="torch dataset with a length and numbered items, got generator"):
        Dataset.from_torch((pair for pair in pairs), test_share=0.5)
    with pytest.raises(ValueError, match="records of one shape in inputs, got 2 shapes in 2 records"):
        Dataset.from_torch(Pairs((np.zeros(2), 0), (np.zeros(3), 1)), test_share=0.5)


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="pip install torch")
    inputs, labels = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    pairs = torch.utils.data.TensorDataset(inputs, labels)
    data = Dataset.from_torch(pairs, user=COLUMNS["patient"], test=pairs)
    np.testing.assert_array_equal(data.inputs, inputs.numpy())
    np.testing.assert_array_equal(data.labels, labels.numpy())


def test_arrays_are_taken_as_they_are():
    images = np.random.default_rng(0).integers(0, 256, (6, 8, 8), np.uint8)
    data = Dataset.from_arrays(images, COLUMNS["ill"], user=COLUMNS["patient"], test=(images[:2], ["no", "yes"]))
    assert data.inputs is not None
    np.testing.assert_array_equal(data.inputs, images)
    assert data.test_labels.tolist() == [0, 1]
    assert data.recipe == Recipe(
        shape=(8, 8),
        dtype="uint8",
        answer=Answer(kind="classes", size=2, classes=("no", "yes"), columns=("labels",)),
    )
    with pytest.raises(ValueError, match=r"expected test records like those to train on, uint8 of \(8, 8\), got uint8"):
        Dataset.from_arrays(images, COLUMNS["ill"], test=(images[:, 1:], COLUMNS["ill"]))
    with pytest.raises(ValueError, match=r"expected test=\(inputs, labels\), got 6 parts"):
        Dataset.from_arrays(images, COLUMNS["ill"], test=images)
    with pytest.raises(ValueError, match=r"expected inputs as uint8 .* got int64"):
        Dataset.from_arrays(images.astype(np.int64), COLUMNS["ill"], test_share=0.5)


def test_a_folder_of_images(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for kind in ("cat", "dog"):
        (tmp_path / kind).mkdir()
        for number in range(3):
            Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8)).save(tmp_path / kind / f"{number}-{kind}.png")
    (tmp_path / "notes.txt").write_text("not a class")
    data = Dataset.from_folder(tmp_path, user=lambda path: path.name[0], test=tmp_path)
    assert data.inputs.shape == (6, 6, 5, 3)
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.users.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.recipe.answer.classes == ("cat", "dog")
    np.testing.assert_array_equal(data.inputs[4], np.asarray(Image.open(tmp_path / "dog" / "1-dog.png")))
    assert Dataset.from_folder(tmp_path, grey=True, size=(4, 3), test_share=0.5).inputs.shape[1:] == (4, 3)
    Image.fromarray(rng.integers(0, 256, (9, 5, 3), np.uint8)).save(tmp_path / "cat" / "large.png")
    with pytest.raises(ValueError, match=r"one size, or size=\(height, width\), got 2 sizes in 7 images"):
        Dataset.from_folder(tmp_path, test_share=0.5)
    with pytest.raises(FileNotFoundError, match="expected a folder of images, one folder per class"):
        Dataset.from_folder(tmp_path / "none", test_share=0.5)
    with pytest.raises(ValueError, match="expected images in one folder per class, got none"):
        Dataset.from_folder(tmp_path / "cat", test_share=0.5)


# recipes


def test_a_recipe_survives_json_and_reads_new_rows(tmp_path):
    data = Dataset.from_pandas(COLUMNS, **HOW)
    recipe = Recipe.from_json(data.recipe.to_json())
    assert recipe == data.recipe
    inputs = {name: COLUMNS[name] for name in ("city", "dose", "smoker", "age")}
    np.testing.assert_array_equal(recipe.read_inputs({**inputs, "other": ["?"] * 6}), READ)
    np.testing.assert_array_equal(recipe.read_inputs(written(tmp_path / "new.csv")), READ)
    np.testing.assert_array_equal(recipe.read_inputs(READ), READ)
    for rows, sentence in (
        ({"age": [1], "smoker": [True]}, "the mapping lacks columns that the model was trained on: 'dose', 'city'"),
        (READ[:, :3], r"expected inputs of shape \(rows, 5\), got \(6, 3\)"),
        (READ[0], r"expected inputs of shape \(rows, 5\), got \(5,\)"),
        (np.full((1, 5), np.nan), "expected inputs to be finite everywhere"),
        ({**COLUMNS, "city": ["Bern"] * 6}, "declared categories in column 'city' of the mapping, got 6 of 6 rows"),
    ):
        with pytest.raises(ValueError, match=sentence):
            recipe.read_inputs(rows)
    with pytest.raises(ValueError, match="expected a recipe that this version of the library wrote"):
        Recipe.from_json({"shape": [5]})


def test_data_without_a_recipe_get_one_that_takes_arrays():
    inputs = np.zeros((3, 2), np.float32)
    data = Dataset(inputs=inputs, labels=[0, 1, 2], test_inputs=inputs, test_labels=[0, 1, 2], num_classes=3)
    assert data.recipe is None
    recipe = with_recipe(data).recipe
    assert (recipe.shape, recipe.dtype, recipe.columns, recipe.answer.size) == ((2,), "float32", None, 3)
    np.testing.assert_array_equal(recipe.read_inputs({"a": [1, 2], "b": [3, 4]}), [[1, 3], [2, 4]])
    with pytest.raises(ValueError, match="the model was not trained on a table, got the mapping with 1 columns"):
        recipe.read_inputs({"a": [1, 2]})
    reshaped = dataclasses.replace(Dataset.from_pandas(COLUMNS, **HOW), inputs=np.zeros((4, 7)))
    assert recipe_of(reshaped).shape == (7,), "a recipe of other inputs is not this one's"


def test_answers():
    logits = np.array([[2.0, 0.0, -1.0], [0.0, 0.0, 9.0]])
    classes = Answer(kind="classes", size=3, classes=("a", "b", "c"))
    assert classes.decode(logits).tolist() == ["a", "c"]
    np.testing.assert_allclose(
        classes.probabilities(logits), np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    )
    two = Answer(kind="classes", size=2, classes=(False, True))
    for one_output in (np.array([[-2.0], [3.0]]), np.array([-2.0, 3.0])):
        assert two.decode(one_output).tolist() == [False, True]
        np.testing.assert_allclose(two.probabilities(one_output)[:, 1], 1 / (1 + np.exp([2.0, -3.0])))
    labels = Answer(kind="labels", size=3)
    assert labels.decode(logits).tolist() == [[1, 0, 0], [0, 0, 1]]
    np.testing.assert_allclose(labels.probabilities(logits), 1 / (1 + np.exp(-logits)))
    number = Answer(kind="number", size=1, bounds=(10.0, 30.0))
    np.testing.assert_allclose(number.decode(np.array([[-1.0], [0.0], [2.0]])), [10, 20, 40])
    assert Answer(kind="number", size=1).decode(np.array([[3.5]])).tolist() == [3.5]
    with pytest.raises(ValueError, match="a model of numbers gives no probabilities"):
        number.probabilities(np.zeros((1, 1)))
    prices = Table(name="prices", columns={"price": [10.0, 15.0, 99.0]})
    np.testing.assert_allclose(
        Answer(kind="number", size=1, columns=("price",), bounds=(10.0, 30.0)).read_labels(prices), [-1, -0.5, 1]
    )


def test_a_target_of_floating_point_numbers_is_a_number():
    data = Dataset.from_pandas(COLUMNS, target="dose", user="patient", inputs=["age"], test_share=0.5, test_seed=1)
    assert (data.target, data.num_classes, data.labels.dtype) == ("number", 1, np.float32)
    assert data.notes == (TESTED_NOTE,)
    forced = Dataset.from_pandas(COLUMNS, target="age", user=None, kind="number", inputs=["dose"], test=COLUMNS)
    assert forced.labels.tolist() == COLUMNS["age"]


def test_a_list_of_targets_is_a_set_of_labels():
    columns = {"x": COLUMNS["dose"], "a": [0, 1, 0, 1, 0, 1], "b": COLUMNS["smoker"]}
    data = Dataset.from_pandas(columns, target=["a", "b"], test=columns)
    assert (data.target, data.num_classes) == ("labels", 2)
    np.testing.assert_array_equal(data.labels, np.stack([columns["a"], columns["b"]], axis=1).astype(np.float32))
    arrays = Dataset.from_arrays(
        np.zeros((6, 1)), data.labels, classes=["a", "b"], test=(np.zeros((6, 1)), data.labels)
    )
    assert arrays.recipe.answer.columns == ("a", "b")


def test_labels_are_zeros_and_ones():
    with pytest.raises(ValueError, match="expected 0 or 1 in column 'age', got 6 of 6 rows with another value"):
        Dataset.from_pandas(COLUMNS, target=["age", "smoker"], user=None, inputs=["dose"], test=COLUMNS)
    halves = {"x": [1.0, 2.0], "a": [0.0, 0.5]}
    with pytest.raises(ValueError, match="expected 0 or 1 in column 'a', got 1 of 2 rows with another value"):
        Dataset.from_pandas(halves, target=["a"], inputs=["x"], test=halves)
    with pytest.raises(ValueError, match="zeros and ones, got 1 that are neither"):
        Dataset(
            inputs=np.ones((2, 1), np.float32),
            labels=np.array([[0.0], [0.5]]),
            test_inputs=np.ones((1, 1), np.float32),
            test_labels=np.array([[1.0]]),
            num_classes=1,
            target="labels",
        )
    with pytest.raises(
        ValueError, match="a list of targets are columns of 0 and 1, without kind, classes or bounds, got"
    ):
        Dataset.from_pandas(COLUMNS, target=["smoker"], user=None, classes=[0, 1], inputs=["dose"], test=COLUMNS)


def test_reading_needs_no_package_but_the_librarys_own(tmp_path, monkeypatch):
    for name in ("pandas", "pyarrow", "torch", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert Dataset.from_csv(written(tmp_path / "a.csv"), **HOW).num_classes == 2
    assert tables.is_table(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("method", "function"),
    [
        ("from_pandas", sources.from_table),
        ("from_csv", sources.from_table),
        ("from_parquet", sources.from_table),
        ("from_huggingface", sources.from_table),
        ("from_arrays", sources.from_arrays),
        ("from_torch", sources.from_arrays),
        ("from_folder", sources.from_folder),
    ],
)
def test_keywords_are_spelled_out_as_they_are_read(method, function):
    """`help` and editors show every keyword of a reader, with its default."""
    shown, read = (inspect.signature(of).parameters for of in (getattr(Dataset, method), function))
    keywords = {name: one.default for name, one in read.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}
    assert keywords.items() <= {name: one.default for name, one in shown.items()}.items()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())


# what a report says of where the data come from


def test_data_are_called_by_their_name_or_that_of_the_file(tmp_path):
    written(tmp_path / "visits.csv")
    (tmp_path / "more.visits.csv.gz").write_bytes(gzip.compress((tmp_path / "visits.csv").read_bytes()))
    assert Dataset.from_csv(tmp_path / "visits.csv", **HOW).name == "visits"
    assert Dataset.from_csv(str(tmp_path / "more.visits.csv.gz"), **HOW).name == "more"
    assert Dataset.from_csv(tmp_path / "visits.csv", name="ours", **HOW).name == "ours"
    assert Dataset.from_pandas(COLUMNS, name="ours", **HOW).name == "ours"
    assert Dataset.from_pandas(COLUMNS, **HOW).name is None


def test_how_test_records_were_held_out_is_kept():
    assert Dataset.from_pandas(COLUMNS, **HOW).held_out == (0.5, 1)
    apart = Dataset.from_pandas(COLUMNS, test=COLUMNS, **{**HOW, "test_share": None})
    assert apart.held_out is None


def test_categories_of_numpy_can_be_written():
    """They once ended a run in an error, after the training."""
    data = Dataset.from_pandas(COLUMNS, **{**HOW, "categories": {"city": np.unique(COLUMNS["city"])}})
    assert data.recipe.to_json()["columns"][3]["categories"] == ("Oslo", "Rome")
