"""`dovetail choose`: answers from options, or asked for on a terminal."""

import io
import json
import sys

import pytest

SMALL = ["--users", "400", "--dim", "20", "--rounds", "2", "--eps", "2", "--delta", "1e-4"]


def test_a_table_and_the_reasons_of_the_others(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = command("choose", "--trust", "aggregators", *SMALL)
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].startswith("(2, 0.0001)-DP for 2 rounds of 400 of 400 users (everyone), 20 coordinates")
    assert any(line.split()[:1] == ["secagg"] and "clip_norm" in line for line in lines)
    assert "dp_fl: ruled out, it needs more trust: a curator who sees every update" in out
    assert "accuracy: unknown" in out


def test_json_is_one_object(command):
    status, out, err = command("choose", "--trust", "nobody", *SMALL, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert [one["protocol"] for one in found["protocols"]] == ["ldp_fl"]
    assert found["protocols"][0]["certified"]["eps"] <= 2.0
    assert found["participation"] == "everyone"
    assert {one["protocol"] for one in found["ruled_out"]} >= {"dp_fl", "secagg", "ss_topk"}


def test_without_a_terminal_what_is_missing_is_one_sentence(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("nobody\n"))
    status, out, err = command("choose", "--users", "400")
    assert (status, out) == (2, "")
    assert err.strip() == "dovetail: give --trust, --rounds, --dim: questions are asked on a terminal only"


def test_on_a_terminal_it_asks(command, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("nobody\n400\n\n2\n20\n"))
    status, out, err = command("choose", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert (found["trust"], found["users"], found["per_round"], found["rounds"], found["dim"]) == (
        *("nobody", 400, 400, 2, 20),
    )
    assert "How many users are there" in err


@pytest.mark.parametrize("trust", ["everybody", "shufler"])
def test_unknown_trust_is_refused(command, trust):
    status, _, err = command("choose", "--trust", trust, *SMALL)
    assert status == 2
    assert "expected trust to be one of nobody, aggregators, shuffler, curator" in err
    assert err.strip().count("\n") == 0
