"""`dovetail audit`: what it prints, how it ends, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest

from dovetail import audit as audits
from dovetail.accounting import certification

SMALL = ("--n", "10", "--dim", "2", "--delta", "0.01", "--set", "eps_local=1.0")
FLAME = ("--n", "1000", "--dim", "7850", "--set", "eps_local=0.5", "--set", "pad_to=333")


def test_an_audit_as_json(command):
    status, out, _ = command("audit", "ss_simple", *SMALL, "--trials", "500", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["protocol"] == "ss_simple"
    assert 0 < found["eps_lower"] <= found["certified"]["eps"]
    assert found["unbounded"] is False
    assert found["consistent"] is True
    assert found["certified"]["verdict"] == "certified"
    assert found["claimed"] is None or found["claimed"]["eps"] > 0
    assert {attack["trials"] for attack in found["attacks"]} == {0, 1000}
    assert {attack["confidence"] for attack in found["attacks"]} == {1.0, 0.95}


def test_whole_messages_are_refuted_at_flames_size(command):
    _, out, _ = command("audit", "ss_double", *FLAME, "--set", "beta=0.02", "--set", "published=true", "--json")
    found = json.loads(out)
    assert found["eps_lower"] >= 7
    assert found["claimed"]["eps"] == pytest.approx(0.238, abs=1e-3)
    assert found["claim_refuted"] is True


def test_what_is_unbounded_says_so(command):
    _, out, _ = command("audit", "ss_topk", *FLAME, "--set", "k=157", "--set", "published=true", "--json")
    found = json.loads(out)
    assert found["eps_lower"] is None
    assert found["unbounded"] is True
    assert found["consistent"] is True  # nothing was certified


def test_the_tables_for_people(command):
    status, out, _ = command("audit", "binary_sum", "--n", "100", "--dim", "1", "--trials", "100")
    assert status == 0
    assert "no attack found more than is certified" in out
    assert re.search(
        r"In plain words: the best attack that we ran can tell with [\d.]+% certainty .* allows at most", out
    )
    assert "at delta" in out
    assert "5e-06" in out.split("certified")[0], "no eps without its delta"
    status, out, _ = command(
        "audit", "ss_topk", "--view", "shuffler", "--n", "40", "--dim", "60", "--set", "k=3", "--set", "decoys=20"
    )
    assert status == 0
    assert "refuted" in out


def test_all_cases_in_one_table(command, monkeypatch):
    some = [case for case in audits.CASES if case.protocol in ("fedavg", "dp_fl") and case.trials is None]
    monkeypatch.setattr(audits, "CASES", tuple(some))
    status, out, _ = command("audit", "--all", "--quick", "--trials", "300", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["consistent"] is True
    assert [row["protocol"] for row in found["audits"]] == [case.protocol for case in some if case.quick]
    status, out, _ = command("audit", "--all", "--quick", "--trials", "300")
    assert status == 0
    assert "unbounded" in out


def test_more_than_what_is_certified_ends_in_status_1(command, monkeypatch):
    honest = certification.best_bound

    def optimistic(*paid, **target):
        bound = honest(*paid, **target)
        return dataclasses.replace(bound, eps=bound.eps / 10, lower=None)

    monkeypatch.setattr(certification, "best_bound", optimistic)
    status, out, _ = command("audit", "ss_simple", *SMALL, "--trials", "0", "--json")
    assert status == 1
    assert json.loads(out)["consistent"] is False


def test_the_curves_are_drawn(command, tmp_path):
    path = tmp_path / "curves.svg"
    status, _, _ = command("audit", "ss_simple", *SMALL, "--trials", "200", "--plot", str(path))
    assert status == 0
    drawn = path.read_text()
    assert all(name in drawn for name in ("certified", "audited", "counted"))


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_attack(command, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    monkeypatch.setattr(audits, "audit", None)
    status, out, err = command("audit", "ss_simple", *SMALL, "--plot", str(tmp_path / "curves.png"))
    assert (status, out) == (2, "")
    assert "a figure as .png needs vl-convert: pip install 'dovetail-fl[plots]'" in err
    assert len(err.strip().splitlines()) == 1


def test_a_whole_training_is_attacked(command):
    training = ("--training", "digits", "--canaries", "60", "--set", "cohort.rounds=5")
    status, out, _ = command("audit", *training, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["consistent"] is True
    assert found["canaries"] == 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give one of NAME, --all and --training, got none of them"),
        (("ss_simple", "--all"), "got NAME and --all"),
        (("ss_simpel",), "ss_simple"),
        (("ss_simple", "--view", "nobody"), "expected view to be one of"),
        (("ss_simple", "--confidence", "1"), "expected 0 < confidence < 1"),
        (("ss_simple", "--set", "eps=1"), "eps"),
        (("dp_fl", "--view", "shuffler"), "--view shuffler attacks 'ss_topk'"),
        (("ss_simple", *SMALL, "--trials", "3"), "expected trials >= 10"),
        (("ss_simple", *SMALL, "--trials", "0", "--plot", "/nowhere/at/all.svg"), "cannot draw to"),
    ],
)
def test_bad_input_is_one_sentence(command, arguments, sentence):
    status, _, err = command("audit", *arguments)
    assert status == 2
    assert sentence in err
    assert len(err.strip().splitlines()) == 1
