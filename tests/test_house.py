"""The house: its names mean one thing each, and its public names are listed."""

import ast
import importlib
from collections import defaultdict
from pathlib import Path

import pytest

import dovetail

SOURCE = Path(dovetail.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PAGE = (SOURCE.parent / "docs" / "stable.md").read_text()
SCOPES = ("curator_scope", "local_scope", "shuffle_scope", "shares_scope")
RANDOMIZERS = ("BinaryRandomizedResponse", "RandomizedResponse", "LaplaceRandomizer", "ClipLaplace")


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
    assert name == "__version__" or f"dovetail.{name}" in PAGE


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dovetail.statements", ("Proof", "Theorem", "Scope", "Trust", "Neighbors", "Unit", "Verdict")),
        ("dovetail.experiment", ("Callback", "RunStart", "Progress", "Diagnosis")),
        ("dovetail.watching", ("EarlyStopping", "LivePage", "TensorBoard", "MLflow", "WandB")),
        (
            "dovetail.protocols",
            ("register", "Cohort", "Fast", "Claimed", "Messages", "Contribution", *SCOPES),
        ),
        ("dovetail.shufflers", ("Layout", "Padding", "Reports", "ShuffledReports", "SlotSums", "slot_sums")),
        ("dovetail.mechanisms", ("LocalRandomizer", "Blanket", *RANDOMIZERS, "ExactSampler", "clip_l2")),
        ("dovetail.audit", ("audit", "attack_terms", "ExactAttack")),
        ("dovetail.testing", ("check_protocol", "ContractError", "ContractReport")),
        ("dovetail.accounting.releases", ("Release", "releases", "release_of")),
        ("dovetail.audit.exact.registry", ("attacks_on_event",)),
        ("dovetail.audit.attacks.registry", ("stronger_attacks", "attacks_on_own_reports", "shows_less_than_event")),
    ],
)
def test_what_the_page_names_in_modules_is_there(module, names):
    assert set(names) <= set(importlib.import_module(module).__all__)
    assert all(f"`{name}`" in PAGE or f"{module}`" in PAGE for name in names)


def test_the_example_of_a_protocol_needs_stable_names_alone():
    """Whatever it imports from Dovetail is on the page, or in the `__all__` of a module that the page names whole."""
    for node in ast.walk(ast.parse((SOURCE.parent / "examples" / "own_protocol.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dovetail"):
            for name in (alias.name for alias in node.names):
                whole = node.module == "dovetail.events" and name in importlib.import_module(node.module).__all__
                rows = [row for row in PAGE.splitlines() if f"`{node.module}`" in row and f"`{name}`" in row]
                assert whole or rows, f"{node.module}.{name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dovetail":
            assert node.attr in dovetail.__all__
