"""FLAME's tables and figures: printed numbers recompute, attacks pass refuted claims, and every config is one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rehearsal import Rehearsal, well_formed

from dovetail.guarantee import quotes
from dovetail.papers import runner as runners
from dovetail.papers.exhibits import Row
from dovetail.papers.flame import PAPER
from dovetail.references import find_entry
from dovetail.statements import Verdict

USERS = 1000
PARTS = {part.key: part for part in PAPER.parts}


@pytest.fixture(scope="module")
def small() -> quotes.Quote:
    plan = quotes.Terms(num_users=100, dim=2, delta=5e-6, settings={"eps_local": 0.5})
    return quotes.quote("ss_simple", plan)


@pytest.fixture
def cheap_quotes(small: quotes.Quote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statements cost time and are tested elsewhere: all are those of one small plan."""
    monkeypatch.setattr(quotes, "quote", lambda name, about: small)

    def calibrate(name: str, about: quotes.Terms, *, eps: float) -> tuple[str, float, quotes.Quote]:
        return ("eps_local" if name == "ss_topk" else "noise_multiplier"), 0.5, small

    monkeypatch.setattr(quotes, "calibrate", calibrate)


@pytest.fixture(scope="module")
def headline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    runner = runners.Runner(tmp_path_factory.mktemp("headline"), quick=True, seeds=1)
    return {row.label: row for row in PARTS["headline"].rows(runner)}


def test_the_paper_is_cited_by_a_known_reference() -> None:
    assert find_entry(PAPER.reference).year == 2021


@pytest.mark.parametrize("printed", [0.91, 0.24, 20.53, 2.348])
def test_claims_recompute_to_the_printed_digits(headline: dict[str, Row], printed: float) -> None:
    rows = [row for row in headline.values() if row.paper.get("eps") == printed]
    digits = len(str(printed).partition(".")[2])
    assert rows
    for row in rows:
        assert row.claimed is not None
        cut_off = math.floor(row.claimed.eps * 10**digits) / 10**digits  # as 20.538 and 2.3485 were
        assert printed in (round(row.claimed.eps, digits), cut_off)


def test_index_privacy_is_as_printed(headline: dict[str, Row]) -> None:
    row = headline["index privacy against the shuffler (Thm. 5)"]
    assert {key: row.extra[key] for key in row.paper} == dict(row.paper)


def test_nothing_that_is_shown_is_above_what_is_certified(headline: dict[str, Row]) -> None:
    rows = [row for row in headline.values() if row.audited]
    assert len(rows) == 11
    for row in rows:
        assert row.certified is not None and row.audited is not None
        assert 0 < row.audited.eps <= row.certified.eps, row.label


def test_attacks_pass_the_claims_for_double_and_topk_as_printed(headline: dict[str, Row]) -> None:
    refuted = [
        row for label, row in headline.items() if label.startswith(("SS-Double as", "SS-Topk as", "SS-Topk, all"))
    ]
    assert len(refuted) == 5
    for row in refuted:
        assert row.claimed is not None and row.audited is not None
        assert row.claimed.verdict is Verdict.CLAIMED_REFUTED
        assert row.audited.eps > row.claimed.eps, row.label
    simple = headline["SS-Simple as printed"]  # its proof is refuted, its number is not passed, and the note says so
    assert simple.claimed is not None and simple.audited is not None and simple.audited.eps < simple.claimed.eps
    assert "no attack here exceeds the claim" in simple.note


def test_repaired_simple_and_double_are_certified_below_the_claims(headline: dict[str, Row]) -> None:
    for label in ("SS-Simple, coordinates apart", "SS-Double, coordinates apart, each with probability beta"):
        row = headline[label]
        assert row.claimed is not None and row.certified is not None and row.certified.eps < row.claimed.eps


def test_claimed_ratios_lie_around_the_printed_ones(cheap_quotes: None, tmp_path: Path) -> None:
    rows = list(PARTS["fig3"].rows(Rehearsal(tmp_path, quick=False, num_users=USERS)))
    for series, printed in (("SS-Simple", 2.55), ("SS-Double", 137.36)):
        ratios = [row.extra["claimed ratio"] for row in rows if row.series == series]
        assert min(ratios) < printed < max(ratios)
    well_formed(PARTS["fig3"], rows, tmp_path)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("key", ["fig4", "fig5", "fig6", "fig7"])
def test_every_config_is_one(cheap_quotes: None, tmp_path: Path, key: str, quick: bool) -> None:
    runner = Rehearsal(tmp_path, quick=quick, num_users=USERS)
    rows = list(PARTS[key].rows(runner))
    assert len(rows) == len(runner.asked) > 0
    assert len({row.label for row in rows}) == len(rows)
    for config in runner.asked:
        assert config.privacy.eps is None  # budgets are an epoch's, so no training may stop at one
    well_formed(PARTS[key], rows, tmp_path)


@pytest.mark.parametrize("key", ["fig8", "fig9"])
def test_figures_without_training_arewell_formed(cheap_quotes: None, tmp_path: Path, key: str) -> None:
    rows = list(PARTS[key].rows(Rehearsal(tmp_path, quick=False, num_users=USERS)))
    assert {row.series for row in rows} == {"SS-Simple", "SS-Double", "SS-Topk"}
    well_formed(PARTS[key], rows, tmp_path)


def test_printed_differences_stand_beside_ours(cheap_quotes: None, tmp_path: Path) -> None:
    rows = {row.label: row for row in PARTS["fig4"].rows(Rehearsal(tmp_path, quick=False, num_users=USERS))}
    assert rows["SS-Double"].paper == {"points over SS-Simple": 4.07}
    top = rows["SS-Topk"].paper
    assert sorted(top.values()) == [33.94, 55.5, 60.7]
    assert all(rows["SS-Topk"].extra[name] == 0.0 for name in top)  # all rehearsals are as accurate
    assert rows["SS-Topk, beta 1/10"].paper == {"points over NP-FL": -1.48}
    notes = PARTS["fig4"].notes(list(rows.values()))
    assert sum("printed" in note and "here" in note for note in notes) == 5
    assert rows["NP-FL"].curve == ((0.5, 0.4), (1.0, 0.5))
