"""What is missing from a table or from what is declared about it: said in one sentence, and what to do."""

import datetime
import re
import warnings

import numpy as np
import pytest

from dovetail import Dataset
from dovetail.data.readers.recipes import InputColumn, Recipe

NAN = float("nan")
COLUMNS = {
    "age": [20, 40, None, 80],
    "dose": [NAN, 1.0, 1.5, NAN],
    "city": ["Rome", None, "Oslo", "Rome"],
    "smoker": [True, None, False, True],
    "ill": ["yes", "no", "no", "yes"],
}
HOW = {
    "target": "ill",
    "user": None,
    "bounds": {"age": (0, 80), "dose": (0, 3)},
    "categories": {"city": ["Oslo", "Rome"]},
}
TEXT = "age,dose,city,smoker,ill\n20,,Rome,true,yes\n40,1.0,NA,,no\n,1.5,Oslo,false,no\n80,nan,Rome,true,yes\n"
INDICATED = np.array(
    [
        [-0.5, 0, 0, 1, 0, 1, 0, 1, 0],
        [0, 0, -1 / 3, 0, 0, 0, 1, 0, 1],
        [0, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 0, 0, 1, 0, 1, 0, 1, 0],
    ],
    np.float32,
)


def read(columns=None, **how):
    columns = COLUMNS if columns is None else columns
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Dataset.from_pandas(columns, test=columns, **{**HOW, **how})


def test_a_missing_value_is_a_constant_and_an_input_of_its_own(tmp_path):
    data = read(missing="indicator")
    np.testing.assert_allclose(data.inputs, INDICATED)
    np.testing.assert_array_equal(data.test_inputs, data.inputs)
    (tmp_path / "a.csv").write_text(TEXT)
    np.testing.assert_array_equal(
        Dataset.from_csv(tmp_path / "a.csv", test=tmp_path / "a.csv", **HOW, missing="indicator").inputs, data.inputs
    )
    complete = {name: [value[3]] * 4 for name, value in COLUMNS.items()} | {"dose": [1.5] * 4, "ill": COLUMNS["ill"]}
    assert read(complete, missing="indicator").inputs.shape == data.inputs.shape, "whether one is missing is private"


def test_constants_and_columns_are_declared_one_by_one():
    complete = COLUMNS | {"city": ["Rome"] * 4, "smoker": [True] * 4}
    data = read(complete, missing={"age": 60, "dose": None})
    assert data.inputs.shape == (4, 2 + 2 + 2 + 1)
    np.testing.assert_allclose(data.inputs[:, 0], [-0.5, 0, 0.5, 1])
    np.testing.assert_allclose(data.inputs[:, 1], [0, 0, 1, 0])
    assert read(complete, missing=["age", "dose"]).inputs[2, 0] == 0, "the middle of the range"
    filled = read(COLUMNS | {"smoker": [True] * 4}, missing={"age": 0, "dose": 0, "city": "Oslo"})
    assert filled.inputs[1, 4:7].tolist() == [1, 0, 1]
    nothing = read(COLUMNS | {"age": [None] * 4, "smoker": [True] * 4}, missing={"age": 60, "dose": 0, "city": "Oslo"})
    np.testing.assert_array_equal(nothing.inputs[:, :2], [[0.5, 1]] * 4)


def test_new_rows_are_read_by_the_same_rule():
    data = read(missing="indicator")
    recipe = Recipe.from_json(data.recipe.to_json())
    assert recipe == data.recipe
    np.testing.assert_allclose(recipe.read_inputs(COLUMNS), INDICATED)
    old = Recipe.from_json({**recipe.to_json(), "columns": [{"name": "age", "bounds": [0, 80]}]})
    assert old.columns == (InputColumn(name="age", bounds=(0.0, 80.0)),)
    strict = read(
        {name: values[3:] * 4 for name, values in COLUMNS.items()} | {"dose": [1.0] * 4, "ill": COLUMNS["ill"]}
    )
    with pytest.raises(ValueError, match=r"'age' \(1 of 4 rows\), .*: the model was trained without a rule for them"):
        strict.recipe.read_inputs(COLUMNS)


@pytest.mark.parametrize(
    ("changes", "how", "sentence"),
    [
        (
            {},
            {},
            "expected a value in every row of the input columns of the mapping, got some without one in 'age' (1 of 4 "
            "rows), 'dose' (2 of 4 rows), 'city' (1 of 4 rows), 'smoker' (1 of 4 rows): declare what stands for a "
            "missing value, missing={'age': a constant}, missing=['age'] for the middle of its range, or "
            "missing='indicator' for that in all columns",
        ),
        ({}, {"missing": {"age": 1}}, "got some without one in 'dose' (2 of 4 rows), 'city' (1 of 4 rows), 'smoker'"),
        ({}, {"missing": "age"}, "for one column write missing=['age']"),
        ({}, {"missing": ["aeg"]}, "unknown input column in missing 'aeg': did you mean 'age'"),
        ({}, {"missing": ["ill"]}, "a missing target cannot be filled in: leave rows without 'ill' out of the table"),
        ({}, {"missing": {"age": "old"}}, "expected missing={'age': ...} to be a finite number, got 'old'"),
        ({}, {"missing": {"city": "Bern"}}, "to be one of the column's categories, got 'Bern'; missing=['city'] makes"),
        ({}, {"missing": 3}, "expected missing to be 'indicator', a list of columns, or constants by column, got"),
        (
            {"ill": ["yes", None, "no", "no"]},
            {},
            "got 1 of 4 rows without one: leave rows without one out of the table",
        ),
        ({"who": ["a", None, "a", "b"]}, {"user": "who"}, "of 4 rows without one: every row must be somebody's"),
        # wrong types
        ({}, {"bounds": {"age": 100}}, "expected two numbers in bounds={'age': (low, high)}, got 100 for column 'age'"),
        ({}, {"bounds": {"age": ("0", "9")}}, "expected two numbers in bounds={'age': (low, high)}, got ('0', '9')"),
        ({}, {"bounds": [0, 1]}, "expected bounds by column, such as bounds={'age': (0, 100)}, got bounds=[0, 1]"),
        ({}, {"categories": {"city": "Oslo"}}, "expected a list of values in categories={'city': [...]}, got 'Oslo'"),
        ({}, {"categories": ["city"]}, "expected categories by column, such as categories={'city': ['Oslo', 'Rome']}"),
        ({}, {"classes": "yes"}, "expected classes=[...], the list of values that the target may have"),
        ({}, {"user": 5}, "expected user to be a column, or a list with one id for each row, got user=5"),
        ({}, {"target": None}, "expected target to be a column, or a list of columns of 0 and 1, got target=None"),
        ({}, {"inputs": 3}, "expected inputs to be a list of columns, got inputs=3"),
        (
            {"since": [datetime.date(2026, 1, 1)] * 4},
            {"missing": "indicator"},
            "expected numbers in column 'since' of the mapping, got dates or times in its 4 rows: make numbers of them",
        ),
        ({"ill": [0.0, 1.0, 1.0, 0.0]}, {}, "column 'ill' has the values 0.0 and 1.0 alone, as floating-point numbers"),
    ],
)
def test_what_is_not_declared_is_asked_for_in_one_sentence(changes, how, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        read(COLUMNS | changes, **how)
    assert "\n" not in str(refused.value)


def test_a_target_of_zeros_and_ones_is_what_one_says_it_is():
    columns = {"x": [0.1, 0.2, 0.3, 0.4], "y": [0.0, 1.0, 1.0, 0.0]}
    how = {"target": "y", "test": columns}
    assert Dataset.from_pandas(columns, **how, kind="classes").target == "classes"
    assert Dataset.from_pandas(columns, **how, kind="number").target == "number"
    assert Dataset.from_pandas(columns, **how, bounds={"y": (0, 1)}).target == "number"
    assert Dataset.from_pandas(columns, **how, classes=[0, 1]).num_classes == 2
    arrays = np.zeros((4, 1)), np.array([0.0, 1.0, 1.0, 0.0])
    with pytest.raises(ValueError, match="pass kind='classes'"):
        Dataset.from_arrays(*arrays, test=arrays)


def test_one_column_is_a_list_of_one():
    assert Dataset.from_pandas(
        {"x": [0.5, 0.1], "y": [0, 1]}, target="y", inputs="x", test={"x": [1.0], "y": [1]}
    ).inputs.shape == (2, 1)


# warnings


def test_numbers_without_a_range_are_named_at_once(tmp_path):
    columns = {"age": [20, 40, 60], "dose": [0.1, -1.0, 0.5], "old": [True, False, True], "price": [10.0, 20.0, 30.0]}
    with pytest.warns(
        UserWarning, match=r"no range is declared for columns 'age', 'price' of the mapping, with"
    ) as told:
        Dataset.from_pandas(columns, target="price", test=columns)
    assert len(told) == 1
    assert told[0].filename == __file__
    assert "bounds={'age': (low, high), ...}" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_pandas(columns, target="price", test=columns, bounds={"age": (0, 100), "price": (0, 100)})


def test_ids_that_would_be_read_as_numbers_are_named():
    columns = {"person": [1, 1, 2], "visit_id": [7, 8, 9], "x": [0.5, 0.1, 0.2], "y": [0, 1, 0]}
    how = {"target": "y", "user": "person", "test": columns}
    with pytest.warns(UserWarning, match="column 'visit_id' looks like ids and will be read as numbers"):
        Dataset.from_pandas(columns, **how, bounds={"x": (0, 1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Dataset.from_pandas(columns, **how, inputs=["x"])
        Dataset.from_pandas(columns, **how, bounds={"visit_id": (0, 10)})


# repr


def test_a_dataset_shows_what_it_is_and_no_record():
    columns = {
        "who": ["a", "a", "b"],
        "age": [20, 40, 61.5],
        "city": ["Rome", "Oslo", "Rome"],
        "ill": ["no", "yes", "no"],
    }
    how = {"target": "ill", "user": "who", "bounds": {"age": (0, 100)}, "categories": {"city": ["Oslo", "Rome"]}}
    assert repr(Dataset.from_pandas(columns, **how, test=columns)) == (
        "Dataset(users: 2, rows: 3, inputs: 'age', 'city' (3 numbers), target: 'ill' (one of 'no', 'yes'), "
        "test: 3 rows)"
    )
    many = Dataset.from_pandas(columns, **how, test_share=0.5, test_seed=3, roster=["a", "b", "c", "d"])
    assert re.search(r"users: 1, of \d on the roster, .* test: \d rows, 50% held out\)$", repr(many))
    images = np.zeros((1200, 6, 5), np.uint8)
    shown = repr(Dataset.from_arrays(images, np.arange(1200) % 10, test=(images, np.arange(1200) % 10)))
    assert shown == (
        "Dataset(users: every row is one, rows: 1,200, inputs: uint8 of shape (6, 5), "
        "target: 'labels' (one of 10 classes), test: 1,200 rows)"
    )
    assert "array" not in shown
