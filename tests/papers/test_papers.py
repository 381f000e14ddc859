"""Papers: every config parses, rows are written as they come, and what is recomputed is what is printed."""

import csv
import dataclasses
import json

import pytest
from grids import later
from tiny import TASK

from dovetail import data, papers
from dovetail.audit import LowerBound
from dovetail.experiment.config import read
from dovetail.figures import Figure
from dovetail.papers import geyer, subdp, survey
from dovetail.papers import runner as runners
from dovetail.papers.exhibits import Part, Row, curve_lines, sweep_lines
from dovetail.statements import Bound, Neighbors, Scope, Theorem, Trust, Unit, Verdict

SMALL = (
    ("task", {"name": "mnist"}),
    ("cohort", {"kind": "fixed", "size": 50, "rounds": 2}),
    ("protocol", {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 80.0}),
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(data.TASKS, "mnist", TASK)


def a_paper(rows, **more):
    part = Part(key="table1", title="Table 1", caption="what it shows", rows=rows, **more)
    return papers.Paper(
        name="one", title="A paper", citation="Somebody (2020)", reference="X", parts=(part,), minutes={"cpu": 1.0}
    )


def test_parts_have_keys_of_their_own():
    assert list(papers.PAPERS) == ["flame", "apes", "survey", "geyer", "subdp"]
    for paper in papers.PAPERS.values():
        keys = [part.key for part in paper.parts]
        assert len(set(keys)) == len(keys)
        assert set(paper.minutes) == {"cpu", "gpu"}
        assert all(part.caption.endswith(".") for part in paper.parts)


@pytest.mark.parametrize("clients", [100, 1000, 10000])
def test_geyers_variants_are_configs_with_the_printed_uploads(clients):
    for overrides in geyer.overrides_by_variant(clients).values():
        cohort = read(f"geyer-{clients}", overrides).cohort
        if cohort.size_end:
            uploads = (cohort.size + cohort.size_end) / 2 * cohort.rounds
            assert uploads == pytest.approx(geyer._PRINTED[clients]["uploads"], rel=2e-3)
    assert geyer._PRINTED[1000] == {"accuracy": 0.92, "rounds": 54, "uploads": 11880}
    assert read("geyer-100", geyer.overrides_without_privacy(10)).protocol["name"] == "fedavg"


@pytest.mark.parametrize("spread", [1, 2, 5])
def test_subdps_rows_are_configs(spread):
    for preset, overrides in subdp.preset_and_overrides(spread).values():
        assert read(preset, overrides).task.spread == spread
    for preset in subdp.WRITERS.values():
        assert read(preset).privacy.eps == 4.0


def test_rows_are_written_as_they_come_and_what_was_not_run_is_said(tiny, tmp_path):
    seen = []

    def rows(runner):
        yield runner.training_row("one", "mnist", SMALL, paper={"accuracy": 0.5}, note="small", x=1.0, series="ours")
        seen.append(json.loads((tmp_path / "out" / "table1.json").read_text()))
        yield Row(label="far", not_here="it takes long")

    paper = a_paper(rows, figures=lambda rows: [Figure(title="t", x_label="x", y_label="y", lines=curve_lines(rows))])
    found = papers.reproduce(paper, out=tmp_path / "out", quick=False, seeds=2)
    assert [row["label"] for row in seen[0]["rows"]] == ["one"]
    assert not seen[0]["finished"]
    data = json.loads((tmp_path / "out" / "table1.json").read_text())
    assert data["finished"]
    one, far = data["rows"]
    assert len(one["ours"]["values"]) == 2
    assert one["ours"]["mean"] == pytest.approx(sum(one["ours"]["values"]) / 2)
    assert one["ours"]["spread"] is not None
    assert one["extra"]["uploads"] == 100
    assert one["certified"]["unit"] == "user"
    assert far["not_here"] == "it takes long"
    assert data["figures"][0]["lines"][0]["name"] == "one"
    assert read(tmp_path / "out" / one["config"]).protocol["noise_multiplier"] == 80.0
    written = list(csv.DictReader((tmp_path / "out" / "table1.csv").open()))
    assert written[0]["paper accuracy"] == "0.5"
    assert (tmp_path / "out" / "table1-lines.csv").exists()
    facts = json.loads((tmp_path / "out" / "paper.json").read_text())
    assert (facts["exhibits"], facts["seeds"], facts["quick"]) == (["table1"], 2, False)
    assert "jax" in facts["machine"]
    assert found["table1"][0].ours.values == tuple(one["ours"]["values"])


def test_a_config_is_trained_once(tiny, tmp_path, monkeypatch):
    runs = []
    train = runners.experiment.run
    monkeypatch.setattr(runners.experiment, "run", lambda *args, **more: runs.append(1) or train(*args, **more))
    runner = papers.Runner(tmp_path, quick=True, seeds=1)
    first, second = runner.training_row("a", "mnist", SMALL), runner.training_row("b", "mnist", SMALL)
    assert len(runs) == 1
    assert first.config == second.config == "configs/a.toml"
    other = runner.training_row("a", "mnist", (*SMALL, ("server.learning_rate", 0.5)))
    assert other.config == "configs/a-2.toml"


def test_a_claim_that_an_attack_passes_is_refuted():
    scope = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
    claim = scope.state(Bound(eps=1.0, delta=1e-6, proof=Theorem(key="X", where="X.").proof), Verdict.CLAIMED_UNPROVEN)
    for eps, delta, verdict in ((1.1, 1e-6, "refuted"), (0.9, 1e-6, "unproven"), (1.1, 1e-7, "unproven")):
        row = Row(label="", claimed=claim, audited=LowerBound(eps=eps, delta=delta, attack=""))
        assert row.claimed.verdict.value == f"claimed, {verdict}"


def test_sweeps_are_one_line_a_series_in_order():
    rows = [Row(label=str(x), series=name, x=x, extra={"y": y}) for name, x, y in
            [("a", 2.0, 1.0), ("a", 1.0, 3.0), ("b", 1.0, float("inf")), ("b", 2.0, 5.0)]]  # fmt: skip
    a, b = sweep_lines(rows, lambda row: row.extra["y"], suffix=", exact")
    assert (a.name, a.x, a.y) == ("a, exact", (1.0, 2.0), (3.0, 1.0))
    assert b.y == (None, 5.0), "what is unbounded is a gap"


def test_what_subdp_misses_is_recomputed(tmp_path):
    runner = papers.Runner(tmp_path, quick=True, seeds=1)
    items = {(row.series, row.x): row.certified.eps for row in subdp._item_rows(runner)}
    assert items["items sampled alone", 2] == pytest.approx(4.34, abs=0.01)
    assert items["items sampled alone", 5] == pytest.approx(12.7, abs=0.05)
    assert items["items sampled alone", 10] == pytest.approx(30.5, abs=0.05)
    assert items["users first, with nobody else's records", 2] == pytest.approx(5.65, abs=0.01)
    spans = {row.x: row.certified.eps for row in subdp._span_rows(runner)}
    assert [row.claimed.verdict.value for row in subdp._span_rows(runner)] == [
        "claimed, holds",
        *["claimed, refuted"] * 3,
    ]
    assert spans[2] == pytest.approx(6.57, abs=0.01)
    assert spans[10] == pytest.approx(17.85, abs=0.06)


FIRST, *OTHERS = survey._NUMBERS.values()


@pytest.mark.parametrize(("name", "settings"), [*survey._BITS.values(), *(later(*one) for one in (FIRST, *OTHERS))])
def test_measured_sums_have_their_exact_error(name, settings):
    row, protocol = survey.measure_sum(name, 100, settings, seeds=1, most_rounds=200)
    assert row.certified.eps <= survey.EPS
    # the mean of 200 squares of a nearly normal error: a standard error of 10 %, alpha below 1e-5
    assert row.ours.mean == pytest.approx(row.extra["exact"], rel=0.45)
    assert protocol.noise_field in row.extra


def test_the_local_model_costs_n_and_the_curator_nothing():
    assert survey.local_error(10_000) == pytest.approx(100 * survey.local_error(100))
    assert survey.curator_error() < survey.local_error(100)


def test_cli_refuses_an_unknown_paper_or_part(command, tmp_path):
    status, out, err = command("reproduce", "gayer", "--out", str(tmp_path / "x"))
    assert (status, out) == (2, "")
    assert "geyer" in err
    status, out, err = command("reproduce", "geyer", "--parts", "tabel1", "--out", str(tmp_path / "x"))
    assert (status, out) == (2, "")
    assert "table1" in err
    assert not (tmp_path / "x").exists()


def test_cli_reproduces_a_part_and_draws_it(command, tmp_path):
    out = tmp_path / "out"
    status, said, err = command("reproduce", "subdp", "--parts", "spans", "--quick", "--out", str(out), "--json")
    assert status == 0, err
    rows = json.loads(said)["papers"]["subdp"]["exhibits"]["spans"]["rows"]
    assert rows[1]["certified"]["eps"] == pytest.approx(6.57, abs=0.01)
    assert "<svg" in (out / "report.html").read_text()


def test_parts_that_are_not_asked_for_stay(tmp_path):
    """A long reproduction can be made part by part, each with its own machine and seeds."""
    first = a_paper(lambda runner: [Row(label="a", extra={"y": 1.0})])
    second = dataclasses.replace(first.parts[0], key="table2", title="Table 2")
    paper = dataclasses.replace(first, parts=(*first.parts, second))
    for parts in (("table2",), ("table1",)):
        papers.reproduce(paper, out=tmp_path, quick=True, seeds=1, only=parts)
    facts = json.loads((tmp_path / "paper.json").read_text())
    assert facts["exhibits"] == ["table1", "table2"], "in the paper's order"
    run = json.loads((tmp_path / "table2.json").read_text())["run"]
    assert run["quick"]
    assert run["seconds"] > 0
