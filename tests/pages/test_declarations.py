"""What was declared public, line by line: nothing is missing, and nothing is called declared that was not."""

from dovetail.pages.declarations import declarations, name_of

RECIPE = {
    "shape": [5],
    "dtype": "float32",
    "columns": [
        {"name": "age", "bounds": [0.0, 100.0], "categories": None},
        {"name": "weight", "bounds": [0.0, 123456.75], "categories": None},
        {"name": "height", "bounds": [0.0, 100.0], "categories": None},
        {"name": "city", "bounds": None, "categories": ["Oslo", "Rome"]},
        {"name": "bmi", "bounds": None, "categories": None},
    ],
    "answer": {"kind": "classes", "size": 2, "classes": ["no", "yes"], "columns": ["ill"], "bounds": None},
}
NOTHING = dict.fromkeys(("roster", "users", "records", "subjects", "spread"))
DECLARED = {
    "name": "visits",
    "published": False,
    "classes": "declared",
    "tests": {"records": 1200, "share": 0.25, "seed": 7},
    **NOTHING,
}
ORIGIN = {"users": 3000, "records": None, "declared": DECLARED}


def lines(origin=ORIGIN, recipe=RECIPE):
    return {line.what: (line.value, line.meaning) for line in declarations(origin, recipe)}


def changed(**changes):
    return lines({**ORIGIN, "declared": {**DECLARED, **changes}})


def test_columns_that_were_declared_alike_share_a_line_and_ranges_are_exact():
    shown = lines()
    assert shown["Columns age, height"][0] == "range 0 to 100"
    assert shown["Column weight"][0] == "range 0 to 123456.75"
    assert shown["Column city"][0] == "2 values: Oslo, Rome"
    assert shown["Column bmi"] == ("no range", "its numbers were taken as they are; nothing about them was declared")


def test_another_declaration_about_a_column_is_shown_as_it_is():
    columns = [{**RECIPE["columns"][0], "unit": "years"}]
    assert lines(recipe={**RECIPE, "columns": columns})["Column age"][0] == "range 0 to 100; unit years"


def test_what_stands_for_a_missing_value_is_shown():
    for fill, said in ((0, "0"), (50.5, "50.5"), (None, "the middle of the range")):
        columns = [{**RECIPE["columns"][0], "missing": True, "fill": fill}]
        shown = lines(recipe={**RECIPE, "columns": columns})["Column age"][0]
        assert shown == f"range 0 to 100; a missing value is read as {said}, and marked by an input of its own"


def test_classes_that_were_read_off_the_data_are_not_called_declared():
    assert lines()["Target ill"] == ("2 classes: no, yes", "which values there are was declared, not looked up")
    assert "public only if everybody knows" in changed(classes="read off the data")["Target ill"][1]


def test_targets_of_every_kind():
    def target(**answer):
        return lines(recipe={**RECIPE, "answer": {**RECIPE["answer"], **answer}})

    number = {"kind": "number", "size": 1, "classes": None}
    assert target(**number, bounds=[-1.5, 2.0])["Target ill"][0] == "a number, range -1.5 to 2"
    assert target(**number)["Target ill"][0] == "a number, no range"
    several = target(kind="labels", size=2, classes=["a", "b"], columns=["a", "b"])
    assert several["Target a, b"][0] == "2 labels, of which several may apply: a, b"


def test_arrays_have_a_shape_and_no_columns():
    shown = lines(recipe={**RECIPE, "shape": [8, 8], "dtype": "uint8", "columns": None})
    assert shown["Inputs"][0] == "arrays of 8 x 8, each value / 255"


def test_how_test_records_were_chosen():
    assert lines()["Test records"][0].startswith("1,200; held out by a public rule")
    assert lines()["Test records"][0].endswith("25%, seed 7")
    assert "came apart" in changed(tests={"records": 5, "share": None, "seed": None})["Test records"][0]
    assert changed(tests=None)["Test records"][0] == "none"


def test_counts_say_where_they_come_from():
    assert lines()["Number of users"] == ("3,000", "counted in the data; the guarantee does not hide it")
    assert "list of users" in changed(roster=3000)["Number of users"][1]
    assert "task.users" in changed(users=3000)["Number of users"][1]
    assert "published" in changed(published=True)["Number of users"][1]
    assert "Number of records" not in lines()
    shown = lines({**ORIGIN, "records": 9000, "declared": {**DECLARED, "records": 9000, "subjects": 70, "spread": 2}})
    assert shown["Number of records"] == ("9,000", "declared in the config (task.records)")
    assert shown["Number of people"][0] == "70"
    assert shown["Users who hold records of one person"][0] == "at most 2"


def test_published_data_are_one_line_more():
    assert changed(published=True)["The whole data set"][0] == "visits, which is published"
    assert "The whole data set" not in lines()


def test_long_lists_are_cut_and_say_so():
    values = [f"v{i}" for i in range(100)]
    shown = lines(recipe={**RECIPE, "columns": [{"name": "x", "bounds": None, "categories": values}]})["Column x"][0]
    assert shown.startswith("100 values: v0, v1")
    assert shown.endswith("v59 and 40 more (recipe.json)")


def test_runs_that_did_not_record_it_show_what_there_is():
    assert [*lines({}, RECIPE)] == [*lines()][:5]
    assert [*lines()][4] == "Target ill"
    assert lines({}, None) == {}


def test_the_name_of_the_data():
    assert name_of(ORIGIN, {"task": {"name": "dataset"}}) == "visits"
    assert name_of({"declared": {**DECLARED, "name": None}}, {"task": {"name": "dataset"}}) == "data without a name"
    assert name_of({}, {"task": {"name": "mnist"}}) == "mnist"
