"""What of a run's data was treated as public, a line each, for whoever signs that it may be.

Lines are made from `recipe.json` (columns, answers) and from what `privacy.json` says under "origin". Columns that were
declared alike share a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Declaration", "declarations", "name_of"]

_SHOWN = 60  # values of a category, or names of columns, in a line


class Declaration(NamedTuple):
    """A line of the table: what was declared, as which value, and what that means for whoever signs."""

    what: str
    value: str
    meaning: str


def name_of(origin: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What the data are called: by their own name, or else that of the task.

    Arguments:
        origin: where the run comes from, as `privacy.json` has it.
        config: the content of `config.toml`.
    """
    if "declared" in origin:
        return origin["declared"]["name"] or "data without a name"
    return config.get("task", {}).get("name", "its data")


def declarations(origin: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> list[Declaration]:
    """The lines: the data as a whole, columns, target, test records, counts.

    Arguments:
        origin: where the run comes from; empty for runs that did not record it.
        recipe: the content of `recipe.json`, if there is one.
    """
    declared = origin.get("declared", {})
    lines = []
    if declared.get("published"):
        meaning = "everybody has it; every line below was taken from it"
        lines.append(Declaration("The whole data set", f"{declared['name']}, which is published", meaning))
    if recipe is not None:
        lines += [*_input_lines(recipe), _target_line(recipe["answer"], declared.get("classes"))]
    if "tests" in declared:
        lines.append(_test_line(declared["tests"]))
    return [*lines, *_count_lines(origin, declared)]


def _input_lines(recipe: Mapping[str, Any]) -> Iterator[Declaration]:
    """How inputs were read: a line for all columns that were declared alike."""
    if recipe.get("columns") is None:
        size = " x ".join(map(str, recipe["shape"])) or "1"
        read = "each value / 255" if recipe["dtype"] == "uint8" else "taken as they are; no range was declared"
        yield Declaration("Inputs", f"arrays of {size}, {read}", "the shape of a record is public")
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for column in recipe["columns"]:
        alike.setdefault(_reading_in_words(column), []).append(column["name"])
    for (value, meaning), names in alike.items():
        yield Declaration(f"Column{'s' * (len(names) > 1)} {_list_in_words(names)}", value, meaning)


def _reading_in_words(column: Mapping[str, Any]) -> tuple[str, str]:
    """What was declared of a column, and what that means."""
    known = ("name", "bounds", "categories", "missing", "fill")
    more = "".join(
        f"; {key} {value}" for key, value in column.items() if key not in known and value not in (None, False)
    )
    if column.get("missing"):
        fill = column.get("fill")
        middle = "the middle of the range" if column.get("categories") is None else "none of them"
        more += f"; a missing value is read as {middle if fill is None else fill}, and marked by an input of its own"
    if column.get("categories") is not None:
        return (
            f"{len(column['categories'])} values: {_list_in_words(column['categories'])}{more}",
            "no other value was accepted",
        )
    if column.get("bounds") is not None:
        low, high = map(_exact_number, column["bounds"])
        return f"range {low} to {high}{more}", "what lies outside counted as the nearest end"
    return f"no range{more}", "its numbers were taken as they are; nothing about them was declared"


def _target_line(answer: Mapping[str, Any], classes: str | None) -> Declaration:
    """What is predicted, and the values that it may have."""
    what = f"Target {_list_in_words(answer['columns'])}" if answer.get("columns") else "Target"
    if answer["kind"] == "number":
        if answer.get("bounds") is None:
            return Declaration(what, "a number, no range", "its numbers were taken as they are")
        low, high = map(_exact_number, answer["bounds"])
        return Declaration(what, f"a number, range {low} to {high}", "what lies outside counted as the nearest end")
    several = "labels, of which several may apply" if answer["kind"] == "labels" else "classes"
    names = "" if answer.get("classes") is None else f": {_list_in_words(answer['classes'])}"
    meaning = {
        "read off the data": "read off the data: public only if everybody knows that each of these values occurs",
        "declared": "which values there are was declared, not looked up",
    }.get(classes or "", "which values there are is public")
    return Declaration(what, f"{answer['size']} {several}{names}", meaning)


def _test_line(tests: Mapping[str, Any] | None) -> Declaration:
    """The test records: how many, and how they were chosen."""
    if tests is None:
        return Declaration("Test records", "none", "held-out records are protected like all others")
    how = "they came apart from the data"
    if tests["share"] is not None:
        share, seed = f"{100 * tests['share']:g}%", tests["seed"]
        how = f"held out by a public rule: a hash of who a record belongs to, {share}, seed {seed}"
    return Declaration(
        "Test records", f"{tests['records']:,}; {how}", "nothing protects them: scores on them have no noise"
    )


def _count_lines(origin: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Declaration]:
    """How many users, records and so on there are, as far as the page or the noise depends on it."""
    if origin.get("users") is not None:
        if declared.get("roster") is not None:
            meaning = "the places on the list of users that was given; who on it has records stays hidden"
        elif declared.get("users") is not None:
            meaning = "declared in the config (task.users)"
        elif declared.get("published"):
            meaning = "counted in the published data"
        else:
            meaning = "counted in the data; the guarantee does not hide it"
        yield Declaration("Number of users", f"{origin['users']:,}", meaning)
    if origin.get("records") is not None:
        counted = declared.get("published") and declared.get("records") is None
        where = "counted in the published data" if counted else "declared in the config (task.records)"
        yield Declaration("Number of records", f"{origin['records']:,}", where)
    if declared.get("subjects") is not None:
        yield Declaration("Number of people", f"{declared['subjects']:,}", "declared in the config (task.subjects)")
    if declared.get("spread") is not None:
        most = f"at most {declared['spread']:,}"
        yield Declaration("Users who hold records of one person", most, "declared in the config (task.spread)")


def _exact_number(value: float) -> str:
    """A number as it was declared, not rounded to fewer digits."""
    return f"{value:.15g}"


def _list_in_words(values: Sequence[Any]) -> str:
    """The first values, and how many more there are."""
    shown = ", ".join(map(str, values[:_SHOWN]))
    return shown if len(values) <= _SHOWN else f"{shown} and {len(values) - _SHOWN:,} more (recipe.json)"
