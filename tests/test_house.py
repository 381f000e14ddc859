"""The house: its names mean one thing each, and its public names are listed."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

import dovetail

SOURCE = Path(dovetail.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


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
        ("dovetail.experiment", ("Callback", "RunStart", "Progress", "Diagnosis")),
        ("dovetail.watching", ("EarlyStopping", "LivePage", "TensorBoard", "MLflow", "WandB")),
        ("dovetail.protocols", ("Cohort", "Fast", "Claimed", "Messages")),
        ("dovetail.accounting.releases", ("Release", "releases", "release_of")),
        ("dovetail.audit.exact.registry", ("on_event",)),
        ("dovetail.audit.attacks.registry", ("stronger", "on_own_reports", "shows_less")),
    ],
)
def test_what_the_page_names_in_modules_is_there(module, names):
    assert set(names) <= set(importlib.import_module(module).__all__)
