"""Comparisons: everything at the same certified privacy, ranked, with the costs of real messages."""

import dataclasses
import json

import pytest
import report_samples as samples
from tiny import TASK

from dovetail import compare, data, pages
from dovetail.cli import studies
from dovetail.compare import Comparison, Outcome
from dovetail.events import Everyone
from dovetail.experiment.config import Config
from dovetail.numbers import at_most
from dovetail.protocols import PROTOCOLS, Cohort, build
from dovetail.statements import Trust

EPS, DELTA = 0.5, 1e-3  # so much noise that no accuracy is at its end
SMALL = (("cohort", {"kind": "everyone", "rounds": 2}),)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(data.TASKS, "mnist", TASK)


def contenders(*names):
    return compare.line_up(eps=EPS, delta=DELTA, protocols=names, overrides=SMALL)


@pytest.mark.parametrize("model", compare.models_with_line_up())
@pytest.mark.parametrize("eps", [0.24, 1.0, 2.5])
def test_a_line_up_has_a_config_or_a_reason_for_every_protocol(model, eps):
    found = {one.protocol: one for one in compare.line_up(eps=eps, delta=5e-6, model=model)}
    assert set(found) == set(PROTOCOLS)
    for one in found.values():
        assert (one.config is None) != (one.reason is None)
        if one.config is not None:
            assert isinstance(one.config, Config)
            assert one.config.privacy.eps == (None if one.protocol == "fedavg" else eps)
            build(one.protocol, one.config.protocol_settings)


def test_the_nearest_tuned_line_is_used():
    near, at = (compare.line_up(eps=eps, delta=5e-6, protocols=["dp_fl"])[0].config for eps in (1.2, 1.0))
    far = compare.line_up(eps=0.24, delta=5e-6, protocols=["dp_fl"])[0].config
    assert near.server == at.server
    assert far.server != at.server


def test_everything_is_certified_alike_and_ranked(tiny, tmp_path):
    steps = []
    found = compare.compare(
        contenders("dp_fl", "split_and_mix", "fedavg", "binary_sum"),
        task="mnist", model="logistic", eps=EPS, delta=DELTA, seeds=2, out=tmp_path / "out", observe=steps.append,
    )  # fmt: skip
    data = json.loads((tmp_path / "out" / "comparison.json").read_text())
    rows = {row["protocol"]: row for row in data["rows"]}
    for name in ("dp_fl", "split_and_mix"):
        assert rows[name]["certified"]["eps"] == pytest.approx(EPS, rel=1e-3)
        assert rows[name]["certified"]["eps"] <= EPS
        assert rows[name]["certified"]["delta"] == DELTA
        assert rows[name]["certified"]["neighbors"] == "replace-one"
        assert len(set(rows[name]["accuracies"])) == 2, "seeds give different noise"
    assert rows["fedavg"]["certified"]["unbounded"]
    assert "adds up numbers" in rows["binary_sum"]["reason"]
    means = [row["mean"] for row in data["rows"] if not row["reason"]]
    assert means == sorted(means, reverse=True)
    assert rows["split_and_mix"]["no_trusted_party"]
    assert not rows["dp_fl"]["no_trusted_party"]
    assert "dp_fl, seed 1" in steps
    assert {line["name"].split()[0] for line in data["figures"][0]["lines"]} == {"dp_fl", "split_and_mix"}
    lines = (tmp_path / "out" / "comparison.csv").read_text().splitlines()
    assert len(lines) == 1 + len(data["rows"])
    assert found.best_single_shuffler is None


def test_what_cannot_be_certified_says_why(tiny):
    (lonely,) = compare.line_up(eps=1e-9, delta=1e-12, protocols=["split_and_mix"], overrides=SMALL)
    found = compare.compare([lonely], task="mnist", model="logistic", eps=1e-9, delta=1e-12, seeds=1)
    (row,) = found.to_json()["rows"]
    assert row["reason"]
    assert "mean" not in row


@pytest.mark.parametrize("key", ["privacy.eps", "privacy.neighbors", "privacy", "protocol.name"])
def test_what_makes_privacy_unequal_is_refused(key):
    with pytest.raises(ValueError, match=f"--set {key} is not possible|--set {key} cannot be"):
        compare.line_up(eps=1.0, delta=1e-6, overrides=[(key, 5.0)])


def test_costs_are_those_of_deployed_messages():
    cohort = Cohort(participation=Everyone(), size=100, min_size=100)
    seed = compare.costs(build("privunit", {"clip_norm": 1.0, "eps_local": 2.0}).settle(cohort, 50), 100, 50)
    assert (seed.messages, seed.bytes) == (1, 4 + 16 + 48)
    bits = compare.costs(build("ss_simple", {"clip_value": 1.0, "eps_local": 1.0}).settle(cohort, 50), 100, 50)
    assert (bits.messages, bits.bytes) == (50, 50 * (4 + 1 + 48))
    assert 1 / 3 < bits.server_seconds / (50 * seed.server_seconds) < 3
    vector = compare.costs(build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 1.0}).settle(cohort, 50), 100, 50)
    assert (vector.messages, vector.bytes) == (1, 200)
    assert vector.server_seconds < seed.server_seconds


def test_trust_is_said_in_words(tiny):
    found = compare.compare(
        contenders("ldp_fl", "split_and_mix"), task="mnist", model="logistic", eps=EPS, delta=DELTA, seeds=1
    )
    words = {name: (run.trust, run.certified.trust) for name, run in found.runs.items()}
    assert words["ldp_fl"] == ("nobody", Trust.LOCAL)
    assert found.runs["ldp_fl"].statement_without_trust == found.runs["ldp_fl"].certified
    assert found.runs["split_and_mix"].statement_without_trust == found.runs["split_and_mix"].local
    assert words["split_and_mix"] == ("2 shufflers, of which 1 may collude", Trust.SHUFFLE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--eps", "-1"), "expected eps > 0"),
        (("--delta", "2"), "delta"),
        (("--protocols", "dp_fll"), "dp_fl"),
        (("--model", "logistik"), "logistic"),
        (("--task", "mnits"), "mnist"),
        (("--set", "privacy.eps=5"), "--eps and --delta"),
    ],
)
def test_cli_refuses_bad_input_in_one_sentence(command, arguments, said, tmp_path):
    status, out, err = command("compare", "--out", str(tmp_path / "out"), *arguments)
    assert status == 2
    assert not out
    assert said in err
    assert not (tmp_path / "out").exists()


def test_cli_compares_and_draws(command, tmp_path):
    out = tmp_path / "out"
    status, said, err = command(
        "compare", "--task", "digits", "--protocols", "dp_fl,fedavg", "--seeds", "1", "--eps", "5", "--delta", "1e-4",
        "--set", "cohort.size=100", "--out", str(out), "--json",
    )  # fmt: skip
    assert status == 0, err
    assert [row["protocol"] for row in json.loads(said)["rows"]] == ["fedavg", "dp_fl"]
    assert "<svg" in (out / "report.html").read_text()


def test_protocols_are_added_to_what_lies_there(tiny, tmp_path):
    terms = {"task": "mnist", "model": "logistic", "eps": EPS, "delta": DELTA, "seeds": 1, "out": tmp_path / "out"}
    alone = compare.compare(contenders("dp_fl"), **terms)
    both = compare.compare(contenders("fedavg", "binary_sum"), **terms)
    assert set(both.runs) == {"dp_fl", "fedavg"}
    assert both.runs["dp_fl"] == alone.runs["dp_fl"], "read back as it was written"
    again = compare.compare(contenders("dp_fl"), **terms)
    assert [one.protocol for one in again.outcomes].count("dp_fl") == 1
    before = (tmp_path / "out" / "comparison.json").read_bytes()
    with pytest.raises(ValueError, match="holds a comparison on other terms"):
        compare.compare(contenders("fedavg"), **{**terms, "seeds": 2})
    assert (tmp_path / "out" / "comparison.json").read_bytes() == before
    (tmp_path / "out" / "comparison.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a folder that `dovetail compare` wrote"):
        compare.compare(contenders("fedavg"), **terms)


def test_every_column_of_the_ranking_has_its_name(command, tmp_path):
    status, said, err = command(
        "compare", "--task", "digits", "--protocols", "dp_fl", "--seeds", "1", "--eps", "5", "--delta", "1e-4",
        "--set", "cohort.size=100", "--out", str(tmp_path / "out"),
    )  # fmt: skip
    assert status == 0, err
    (row,) = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    head, line = (text for text in said.splitlines() if text.lstrip().startswith(("protocol", "dp_fl")))
    assert line[head.index("rounds") :].split()[0] == str(row["rounds"])
    assert line[head.index("eps ") :].split()[0] == at_most(row["certified"]["eps"])
    assert line[head.index("verdict") :].startswith("simulation only, noise is reproducible")


def test_personal_budgets_are_not_written_user_by_user(tiny):
    found = compare.compare(contenders("pldp"), task="mnist", model="logistic", eps=EPS, delta=DELTA, seeds=1)
    assert found.runs["pldp"].settings["budgets"] == "uniform2"


def test_what_does_not_beat_a_constant_guess_is_not_called_best(tmp_path):
    folder = samples.comparison(tmp_path / "out")
    found = Comparison.read(folder)
    assert found.best_single_shuffler == "ss_topk"
    assert found.baseline is None
    guess = {name: dataclasses.replace(run, baseline=0.885) for name, run in found.runs.items()}
    for name, run in guess.items():
        found = found.with_outcome(Outcome(protocol=name, run=run))
    assert {name for name, run in found.runs.items() if run.beats_baseline} == {"dp_fl", "split_and_mix"}
    assert found.best_single_shuffler is None, "ss_topk is above it with two seeds of three"
    found.write(folder)
    assert Comparison.read(folder) == found
    page = pages.write_comparison_page(folder).read_text()
    assert page.count("no better than a constant guess") == 2
    assert "best constant guess" in page
    assert "best with one shuffler" not in page
    table = str(studies._ranking_table(found.runs, found.baseline).columns[0]._cells)
    assert table.index("split_and_mix") < table.index("ss_topk") < table.index("best constant guess")
