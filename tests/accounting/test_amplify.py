import json
import math
from pathlib import Path

import numpy as np
import pytest
from enumeration import laplace_cells, randomized_response, worst_delta
from grids import diagonal
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.accounting.amplification import table
from dovetail.events import Report
from dovetail.statements import NotApplicable

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "amplification.json").read_text())
NAMES = [
    "erlingsson19",
    "blanket-hoeffding-generic",
    "blanket-hoeffding-laplace",
    "blanket-hoeffding-rr2",
    "blanket-bennett-generic",
    "blanket-bennett-laplace",
    "blanket-bennett-rr2",
    "blanket-exact-laplace",
    "blanket-exact-rr2",
    "flame-lemma1",
    "clones22-closed",
    "clones22-numerical",
    "clones23-closed",
    "clones23-numerical",
    "girgis21",
]
GENERIC = {name for name in NAMES if not name.endswith(("laplace", "rr2")) and name != "flame-lemma1"}


def eps_of(rows):
    return {row.name: row.bound.eps if row.bound else None for row in rows}


PLACES = [sorted({row[place] for row in GOLDEN["rows"]}) for place in (0, 1)]


@pytest.mark.parametrize(("num_users", "eps_local"), diagonal(*PLACES))
def test_reference_values(num_users, eps_local):
    rows = {row.name: row for row in table.table(eps_local, num_users=num_users, delta=GOLDEN["delta"])}
    expected = {name: eps for n, e0, name, eps in GOLDEN["rows"] if (n, e0) == (num_users, eps_local)}
    assert expected
    for name, eps in expected.items():
        if eps is None:
            assert rows[name].bound is None, name
            assert "hypotheses fail" in rows[name].reason or "no gain" in rows[name].reason
        else:
            assert rows[name].bound.eps == pytest.approx(eps, rel=1e-4), name
            assert rows[name].reason is None


def test_every_name_has_its_row_and_its_theorem():
    assert list(table.BOUNDS) == NAMES
    rows = table.table(1.0, num_users=10**4, delta=1e-6)
    assert [row.name for row in rows] == NAMES
    for row in rows:
        assert (row.bound is None) != (row.reason is None)
        assert row.bound is None or row.bound.proof == row.theorem.proof
        assert row.bound is None or row.bound.delta == 1e-6


def test_a_bound_for_one_randomizer_is_not_given_to_another():
    eligible = {
        "generic": GENERIC,
        "laplace": GENERIC | {name for name in NAMES if name.endswith("laplace")},
        "rr": GENERIC | {name for name in NAMES if name.endswith("rr2")} | {"flame-lemma1"},
    }
    for kind, names in eligible.items():
        for row in table.table(Report(kind=kind, eps_local=0.5), num_users=10**6, delta=1e-6):
            assert (row.bound is not None) == (row.name in names), (kind, row)
            assert row.name in names or "proved for" in row.reason
    ternary = eps_of(table.table(Report(kind="rr", eps_local=0.5, levels=3), num_users=10**6, delta=1e-6))
    assert {name for name, eps in ternary.items() if eps is not None} == GENERIC | {"flame-lemma1"}


def test_best_is_the_smallest_that_holds_for_the_report():
    asked = {"num_users": 10**4, "delta": 1e-6}
    for report in (Report(kind="generic", eps_local=1.0), 1.0):
        assert table.best(report, **asked).name == "clones23-numerical"
    laplace = table.best(Report(kind="laplace", eps_local=1.0), **asked)
    assert laplace.name == "blanket-exact-laplace"
    assert laplace.bound.eps < table.best(1.0, **asked).bound.eps
    binary = table.best(Report(kind="rr", eps_local=1.0), **asked)
    assert binary.bound.eps == min(
        filter(None, eps_of(table.table(Report(kind="rr", eps_local=1.0), **asked)).values())
    )
    with pytest.raises(NotApplicable, match="no amplification bound improves on eps_local=9"):
        table.best(9.0, num_users=100, delta=1e-6)


def test_exact_then_clones23_then_clones22():
    for num_users in (50, 1000, 10**6):
        for eps_local in (0.1, 1.0, 3.0):
            eps = eps_of(table.table(eps_local, num_users=num_users, delta=1e-5))
            order = [eps[f"{name}"] for name in ("blanket-exact-rr2", "clones23-numerical", "clones22-numerical")]
            order = [math.inf if value is None else value for value in order]
            assert order[0] <= order[1] * (1 + 1e-6) <= order[2] * (1 + 2e-6)
            if eps["clones23-numerical"] is not None:
                assert eps["blanket-exact-laplace"] <= eps["clones23-numerical"]


@pytest.mark.parametrize("levels", [2, 3])
def test_no_bound_is_below_enumeration(levels):
    used = set()
    for num_users, eps_local in ((3, 0.3), (6, 1.0), (8, 0.5), (8, 2.0)):
        law = randomized_response(eps_local, levels)
        report = Report(kind="rr", eps_local=eps_local, levels=levels)
        for delta in (1e-4, 0.02, 0.1, 0.3, 0.6):
            for row in table.table(report, num_users=num_users, delta=delta):
                if row.bound is not None:
                    used.add(row.name)
                    assert worst_delta(law, num_users, np.array([row.bound.eps]))[0] <= delta, row
    assert {"clones22-numerical", "clones23-numerical"} <= used
    if levels == 2:
        assert {"blanket-hoeffding-rr2", "blanket-bennett-rr2", "blanket-exact-rr2"} <= used


def test_no_bound_is_below_enumeration_of_laplace():
    used = set()
    for num_users, eps_local in ((3, 0.5), (5, 1.5)):
        cells = laplace_cells(eps_local, np.array([0.0, 0.5, 1.0]), np.array([0.0, 0.5, 1.0]))
        for delta in (1e-3, 0.05, 0.2, 0.5):
            for row in table.table(Report(kind="laplace", eps_local=eps_local), num_users=num_users, delta=delta):
                if row.bound is not None:
                    used.add(row.name)
                    assert worst_delta(cells, num_users, np.array([row.bound.eps]))[0] <= delta, row
    assert {"blanket-exact-laplace", "blanket-bennett-laplace", "clones23-numerical"} <= used


def assert_not_smaller(worse, better, slack):
    for name, eps in worse.items():
        if eps is not None and better[name] is not None:
            assert eps >= better[name] * (1 - slack(name)), name


def slack(name):
    return 2e-3 if name == "blanket-exact-laplace" else 1e-8  # its grid changes with the point


@settings(max_examples=6, deadline=None)
@given(st.integers(10, 10**5), st.floats(1, 100), st.floats(0.05, 5), st.floats(1e-9, 1e-2))
def test_more_users_never_hurt(num_users, factor, eps_local, delta):
    few = eps_of(table.table(eps_local, num_users=num_users, delta=delta))
    many = eps_of(table.table(eps_local, num_users=int(num_users * factor), delta=delta))
    assert_not_smaller(few, many, slack)


@settings(max_examples=6, deadline=None)
@given(st.integers(10, 10**5), st.floats(0.05, 5), st.floats(1, 2), st.floats(1e-9, 1e-2))
def test_a_larger_eps_local_never_helps(num_users, eps_local, factor, delta):
    small = eps_of(table.table(eps_local, num_users=num_users, delta=delta))
    large = eps_of(table.table(eps_local * factor, num_users=num_users, delta=delta))
    assert_not_smaller(large, small, slack)


@settings(max_examples=6, deadline=None)
@given(st.integers(10, 10**5), st.floats(0.05, 5), st.floats(1e-9, 1e-2), st.floats(1, 100))
def test_a_smaller_delta_never_helps(num_users, eps_local, delta, factor):
    strict = eps_of(table.table(eps_local, num_users=num_users, delta=delta / factor))
    lax = eps_of(table.table(eps_local, num_users=num_users, delta=delta))
    assert_not_smaller(strict, lax, slack)


def test_colluders_are_users_less():
    with_colluders = table.table(0.5, num_users=5000, delta=1e-6, colluders=1000)
    assert with_colluders == table.table(0.5, num_users=4000, delta=1e-6)
    best = table.best(0.5, num_users=5000, delta=1e-6, colluders=1000)
    assert best == table.best(0.5, num_users=4000, delta=1e-6)


def test_one_bound_by_its_name():
    report = Report(kind="laplace", eps_local=1.0)
    one = table.bound("clones23-numerical", report, num_users=1000, delta=1e-6)
    assert one.eps == pytest.approx(0.14867158, rel=1e-4)
    with pytest.raises(ValueError, match="did you mean 'clones23-numerical'"):
        table.bound("clones23-numeric", report, num_users=1000, delta=1e-6)
    with pytest.raises(NotApplicable, match="randomized response only"):
        table.bound("blanket-exact-rr2", report, num_users=1000, delta=1e-6)


@pytest.mark.parametrize(
    "bad",
    [
        {"report": 0.0},
        {"report": -1.0},
        {"report": math.nan},
        {"report": math.inf},
        {"num_users": 1},
        {"num_users": 2.5},
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": math.nan},
        {"colluders": -1},
        {"colluders": 999},
    ],
)
def test_bad_input_is_refused(bad):
    asked = {"report": 1.0, "num_users": 1000, "delta": 1e-6} | bad
    report = asked.pop("report")
    for ask in (table.table, table.best):
        with pytest.raises(ValueError, match="expected") as error:
            ask(report, **asked)
        assert not isinstance(error.value, NotApplicable)
