"""Runs in a folder: listed with what they state, compared, drawn."""

import json

import pytest
import tiny

from dovetail import experiment
from dovetail.experiment import config
from dovetail.watching import runs as reading

CONFIG = {
    "task": {"name": "tiny:TASK"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"eps": 3.0, "delta": 1e-5},
    "cohort": {"kind": "everyone", "rounds": 4},
}


class Interrupted(experiment.Callback):
    def on_round(self, progress):
        if progress.round == 3:
            raise KeyboardInterrupt


def trained(folder, *changes, **settings):
    experiment.run(experiment.prepare(config.parse(CONFIG, changes), task=tiny.TASK), out=folder, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    trained(found / "three")
    trained(found / "below" / "one", ("privacy.eps", 1.0))
    trained(found / "open", ("privacy", {"delta": 1e-5}), ("protocol", {"name": "fedavg"}))
    with pytest.raises(KeyboardInterrupt):
        trained(found / "stopped", callbacks=[Interrupted()])
    (found / "else").mkdir()
    (found / "else" / "config.toml").write_text("theme = 'dark'\n")
    return found


def test_runs_are_found_and_say_what_they_state(folder):
    rows = {run.name: run.row() for run in reading.find_runs(folder)}
    assert set(rows) == {"three", "below/one", "open", "stopped"}
    assert rows["three"]["statement"]["eps"] == pytest.approx(3.0, rel=1e-3)
    assert rows["three"]["score"] == "accuracy"
    assert 0 < rows["three"]["baseline"] < 1
    assert rows["open"]["statement"]["eps"] is None
    assert (rows["stopped"]["state"], rows["stopped"]["statement"]) == ("can be resumed", None)
    assert rows["stopped"]["rounds"] == 3
    assert [run.name for run in reading.find_runs(folder / "three")] == ["three"]


def test_the_list(command, folder):
    status, out, _ = command("runs", str(folder))
    assert status == 0
    (line,) = [line for line in out.splitlines() if "below/one" in line]
    assert "(1, 1e-05)-DP, replace-one, per user, curator" in line
    assert "no guarantee" in out
    assert "none: can be resumed" in out
    told = json.loads(command("runs", str(folder), "--json")[1])
    assert len(told["runs"]) == 4
    assert "differences" not in told


def test_what_differs(command, folder):
    one, two = str(folder / "three"), str(folder / "below" / "one")
    told = json.loads(command("runs", one, two, "--compare", "--json")[1])
    assert told["differences"]["privacy.eps"] == [3.0, 1.0]
    assert told["differences"]["protocol.noise_multiplier"][0] < told["differences"]["protocol.noise_multiplier"][1]
    assert "cohort.rounds" not in told["differences"]
    assert "delta" not in told["differences"]
    status, out, _ = command("runs", "--compare", one, two)
    assert status == 0
    assert "certified eps" in out


def test_it_is_drawn(command, folder, tmp_path):
    for over in ("rounds", "eps"):
        target = tmp_path / f"{over}.svg"
        assert command("runs", str(folder), "--plot", str(target), "--over", over)[0] == 0
        drawn = target.read_text()
        assert "three" in drawn
        assert ("replace-one" in drawn) == (over == "eps"), "an eps has its delta and its neighbours"


def test_refusals(command, folder, tmp_path):
    assert command("runs", str(tmp_path / "none"))[0] == 2
    status, _, err = command("runs", str(folder / "three"), "--compare")
    assert status == 2
    assert "--compare needs two runs or more, got 1" in err
    status, _, err = command("runs", str(folder), "--plot", str(tmp_path / "x.svg"), "--over", "time")
    assert (status, (tmp_path / "x.svg").exists()) == (2, False)
    assert "over rounds or eps" in err
    assert command("runs", str(tmp_path))[:2] == (0, f"no runs in {tmp_path}\n")
    (tmp_path / "bad").mkdir()
    for name in ("config.toml", "privacy.json"):
        (tmp_path / "bad" / name).write_text("{}")
    status, _, err = command("runs", str(tmp_path))
    assert status == 2
    assert "the files of the run in" in err
