"""The house: its rooms are small, its names mean one thing each, and its public names are listed."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

import dovetail

SOURCE = Path(dovetail.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, LONGEST_FUNCTION, MOST_MODULES = 300, 50, 15


def body_lines(function):
    """The lines of a function without its signature, which may list many options, and without its docstring."""
    first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
    return function.end_lineno - first.lineno + 1


def test_no_file_is_long():
    assert not [f"{path}: {lines}" for path in FILES if (lines := len(path.read_text().splitlines())) > MOST_LINES]


def test_no_function_is_long():
    functions = (
        (path, node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert not [f"{path}: {node.name}" for path, node in functions if body_lines(node) > LONGEST_FUNCTION]


def test_no_package_is_wide():
    public = defaultdict(list)
    for path in FILES:
        if not path.name.startswith("_"):
            public[path.parent].append(path.name)
    assert not [package for package, names in public.items() if len(names) > MOST_MODULES]


def test_one_class_name_has_one_meaning():
    homes = defaultdict(list)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    assert not {name: places for name, places in homes.items() if len(places) > 1}


@pytest.mark.parametrize("name", dovetail.__all__)
def test_public_names_are_there_and_on_their_page(name):
    assert getattr(dovetail, name) is not None
    page = (SOURCE.parent / "docs" / "stable.md").read_text()
    assert name == "__version__" or f"dovetail.{name}" in page


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dovetail.statements", ("Proof", "Theorem", "Scope", "Trust", "Neighbors", "Unit", "Verdict")),
        ("dovetail.experiment", ("Callback", "Outset", "Progress", "Diagnosis")),
        ("dovetail.watching", ("EarlyStopping", "LivePage", "TensorBoard", "MLflow", "WandB")),
        ("dovetail.protocols", ("Cohort", "Fast", "Claimed", "Messages")),
        ("dovetail.accounting.releases", ("Release", "releases", "release_of")),
        ("dovetail.audit.exact.registry", ("on_event",)),
        ("dovetail.audit.attacks.registry", ("stronger", "on_own_reports", "shows_less")),
    ],
)
def test_what_the_page_names_in_modules_is_there(module, names):
    assert set(names) <= set(importlib.import_module(module).__all__)
