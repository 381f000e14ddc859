"""APES's tables and figures: Table 3 recomputes, Table 2 is what is drawn, and every config is one."""

from __future__ import annotations

import itertools
import types
from pathlib import Path

import pytest
from rehearsal import EPS_ATTACKED, Rehearsal, well_formed

from dovetail import audit
from dovetail.audit import LowerBound
from dovetail.claims import apes as published
from dovetail.guarantee import quotes
from dovetail.papers import apes
from dovetail.papers.apes import PAPER
from dovetail.protocols.personal._personal import resolve_budgets
from dovetail.references import find_entry

USERS = 10_000
PARTS = {part.key: part for part in PAPER.parts}
TRAINED = ("table3", "fig2b", "fig3a", "fig3b")


@pytest.fixture(scope="module")
def small() -> quotes.Quote:
    return quotes.quote("apes", quotes.Terms(num_users=300, dim=1, delta=1e-8, settings={"budgets": [0.9, 1.0]}))


@pytest.fixture
def cheap_statements(small: quotes.Quote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements cost time and are tested elsewhere: all are those of one small plan."""
    found = types.SimpleNamespace(
        claimed=small.claimed,
        certified=small.certified,
        bound=LowerBound(eps=EPS_ATTACKED, delta=1e-8, attack="none: a rehearsal"),
    )
    monkeypatch.setattr(quotes, "quote", lambda name, about: small)
    monkeypatch.setattr(audit, "audit", lambda name, about, *, trials: found)


def test_the_paper_is_cited_by_a_known_reference() -> None:
    assert find_entry(PAPER.reference).year == 2023


def test_table3_recomputes_to_the_printed_digits() -> None:
    printed = apes._PRINTED
    for label, claim in (("UniS", published.unis), ("APES", published.apes), ("S-APES", published.s_apes)):
        name, about = apes._terms_of_one_round(apes._PRESETS[label], [("protocol.budgets", apes._UNIFORM2)])
        protocol, cohort = quotes.settle_protocol(name, about)
        event, extra = protocol.published_event(cohort, about.dim)  # type: ignore[misc]
        assert claim(event, delta=about.delta, **extra).eps == pytest.approx(printed[label]["eps_uc"], abs=0.051)
    budgets = resolve_budgets(apes._UNIFORM2, 10_000)
    assert published.echo_numerical(budgets).eps == pytest.approx(printed["APES"]["eps_c"], abs=6e-4)
    assert published.unis_numerical(budgets).eps == pytest.approx(printed["UniS"]["eps_c"], abs=8e-4)


def test_table2_shows_the_printed_ranges(tmp_path: Path) -> None:
    rows = list(PARTS["table2"].rows(Rehearsal(tmp_path, quick=True, num_users=USERS)))
    assert len(rows) == 6
    for row in rows:
        assert row.paper["lowest"] <= row.extra["smallest"] < row.extra["mean"] < row.extra["largest"]
        assert row.extra["largest"] <= row.paper["highest"]
        assert (row.extra["share at the lower end"] > 0.4) == ("Gauss" in row.label)
    figures = PARTS["table2"].figures(rows)
    for figure in figures:
        for line in figure.lines:
            assert sum(y or 0.0 for y in line.y) == pytest.approx(1.0)
    well_formed(PARTS["table2"], rows, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("key", TRAINED)
def test_every_config_is_one(cheap_statements: None, tmp_path: Path, key: str, quick: bool) -> None:
    runner = Rehearsal(tmp_path, quick=quick, num_users=USERS)
    rows = list(PARTS[key].rows(runner))
    assert sum(row.not_here is None for row in rows) == len(runner.asked) > 0
    assert len({row.label for row in rows}) == len(rows)
    assert {config.cohort.rounds for config in runner.asked} == {2 if quick else 20}
    well_formed(PARTS[key], rows, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
def test_figures_share_their_trainings_with_table3(cheap_statements: None, tmp_path: Path, quick: bool) -> None:
    runner = Rehearsal(tmp_path, quick=quick, num_users=USERS)
    for key in TRAINED:
        list(PARTS[key].rows(runner))
    texts = [repr(config) for config in runner.asked]
    assert len(texts) - len(set(texts)) >= 5  # three of Figure 2b, two of 3a, one of 3b, where they are in the table


def test_printed_rows_carry_what_is_printed(cheap_statements: None, tmp_path: Path) -> None:
    rows = {row.label: row for row in PARTS["table3"].rows(Rehearsal(tmp_path, quick=False, num_users=USERS))}
    assert rows["APES"].paper["accuracy"] == 0.7967
    assert rows["S-APES"].extra["claimed eps_ul"] == rows["S-APES"].paper["eps_ul"] == 1570
    assert rows["S-APES"].extra["certified eps_ul"] == 7850
    assert "certified eps_c" not in rows["S-APES"].extra  # nothing is
    assert [label for label, row in rows.items() if not row.paper] == [apes._THRESHOLD]


def test_bounds_of_one_coordinate(tmp_path: Path) -> None:
    rows = list(
        itertools.islice(PARTS["fig2a"].rows(Rehearsal(tmp_path, quick=True, num_users=USERS)), 7)
    )  # n = 1000 alone
    eps = {row.series: row.extra["eps"] for row in rows}
    assert eps["Erlingsson'19"] is None and "1/2" in PARTS["fig2a"].caption
    ours = eps.pop("personalised clones (ours), Uniform2")
    assert all(ours < other for other in eps.values() if other is not None)
    assert [row.series for row in rows if row.certified] == ["personalised clones (ours), Uniform2"]
    well_formed(PARTS["fig2a"], rows, tmp_path)
