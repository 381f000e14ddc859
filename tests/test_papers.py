"""Tables of papers: every row is a config that prepares, and what is written is what was run."""

import json

import pytest
from tiny import TASK

from dovetail import papers, tasks
from dovetail.config import read
from dovetail.papers import geyer, subdp


@pytest.mark.parametrize("paper", papers.PAPERS)
def test_every_row_is_a_config(paper):
    rows = papers.PAPERS[paper](quick=False).rows
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert read(row.preset, row.overrides).task.name in tasks.TASKS
    few = papers.PAPERS[paper](quick=True).rows
    assert 0 < len(few) < len(rows)
    assert {row.name for row in few} <= {row.name for row in rows}


def test_the_printed_table_is_geyers():
    printed = {row.name: dict(row.printed) for row in geyer.table(quick=False).rows}
    assert printed["K = 1000, fixed clip"] == {"accuracy": 0.92, "rounds": 54, "uploads": 11880}
    for row in geyer.table(quick=False).rows:
        cohort = read(row.preset, row.overrides).cohort
        if isinstance(cohort.size, int) and cohort.size_end:
            assert (cohort.size + cohort.size_end) / 2 * cohort.rounds == pytest.approx(
                row.printed["uploads"], rel=2e-3
            )


def test_a_table_is_written_row_by_row_and_says_what_was_not_run(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "mnist", TASK)
    private = {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 80.0}
    small = (("task", {"name": "mnist"}), ("cohort", {"kind": "fixed", "size": 50, "rounds": 2}), ("protocol", private))
    rows = (
        papers.Row(name="one", preset="mnist", overrides=small, printed={"accuracy": 0.5}, note="small"),
        papers.Row(name="far", preset="mnist", not_here="it takes long"),
    )
    table = papers.Table(title="A paper", rows=rows, recomputed=lambda: ["1 + 1 = 2"])
    seen = []
    outcomes = papers.reproduce(table, out=tmp_path / "out", seeds=2, observe=seen.append)
    assert len(outcomes[0].accuracies) == 2
    assert seen[:2] == ["one, seed 0", "one, seed 1"]
    text = (tmp_path / "out" / "table.md").read_text()
    assert "not run: it takes long" in text
    assert "1 + 1 = 2" in text
    data = json.loads((tmp_path / "out" / "table.json").read_text())
    assert data["rows"][0]["mean"] == pytest.approx(sum(outcomes[0].accuracies) / 2)
    assert data["rows"][0]["uploads"] == 100
    assert data["rows"][0]["certified"]["unit"] == "user"
    assert "accuracies" not in data["rows"][1]


def test_what_subdp_misses_is_recomputed():
    text = "\n".join(subdp._figures())
    for figure in (
        "2 items eps 4.34",
        "5 items eps 12.7",
        "10 items eps 30.5",
        "2 users eps 6.57",
        "10 users eps 17.8",
    ):
        assert figure in text
    assert "2 items eps 5.65" in text, "with nobody else's records at the users"
    assert "2 items eps 17.8" in text, "with them"


def test_cli_refuses_an_unknown_paper(command):
    status, out, err = command("reproduce", "gayer", "--out", "nowhere")
    assert status == 2
    assert not out
    assert "geyer" in err
