"""A run's folder is data: nothing that reads one runs code that lies in it, or that it names, unless told to."""

import shutil
import sys
from pathlib import Path

import pytest
from tiny import TASK

import dovetail
from dovetail import experiment, pages
from dovetail.experiment import config
from dovetail.experiment.verify import verify

LOOT = """
import pathlib
pathlib.Path({mark!r}).touch()
from tiny import TASK
from dovetail.protocols.curator.dp_fl import DpFl
def features(images):
    return images
"""
NAMES = {
    "task": ('name = "tiny"', 'name = "loot:TASK"'),
    "features": ('features = "none"', 'features = "loot:features"'),
    "protocol": ('name = "dp_fl"', 'name = "loot:DpFl"'),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    data = {
        "task": {"name": "tiny"},
        "cohort": {"kind": "everyone", "rounds": 2},
        "protocol": {"name": "dp_fl", "noise_multiplier": 4.0},
    }
    out = tmp_path_factory.mktemp("finished") / "run"
    experiment.run(experiment.prepare(config.parse(data), task=TASK), out=out)
    return out


@pytest.fixture(params=NAMES)
def loot(request, finished, tmp_path, monkeypatch):
    """A folder with a module in it that its config names, and the mark that the module leaves if it runs."""
    folder, mark = Path(shutil.copytree(finished, tmp_path / "run")), tmp_path / "ran"
    before, after = NAMES[request.param]
    text = (folder / "config.toml").read_text()
    assert before in text
    (folder / "config.toml").write_text(text.replace(before, after))
    (folder / "loot.py").write_text(LOOT.format(mark=str(mark)))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "loot", raising=False)
    yield request.param, folder, mark
    sys.modules.pop("loot", None)


def test_nothing_that_reads_a_run_imports_its_code(loot, command, tmp_path):
    kind, folder, mark = loot
    rows = tmp_path / "rows.csv"
    rows.write_text("a,b,c\n1,2,3\n")
    for arguments in (["verify", "."], ["predict", ".", str(rows)], ["report", "."], ["runs", str(folder.parent)]):
        status, _, err = command(*arguments)
        assert status in (0, 1, 2), arguments
        assert not mark.exists(), arguments
        assert "Traceback" not in err
    if kind != "protocol":
        with pytest.raises(ValueError, match=r"names code, the .* 'loot:.*', which would run if it were loaded"):
            dovetail.load(folder)
    else:
        with pytest.raises(ValueError, match=r"names code, the protocol 'loot:DpFl'"):
            verify(folder)
    pages.write(folder)
    assert not mark.exists()


def test_a_task_to_whiten_on_is_code_too(finished, tmp_path, monkeypatch, command):
    folder, mark = Path(shutil.copytree(finished, tmp_path / "run")), tmp_path / "ran"
    whiten = config.to_toml(
        config.parse(
            config.msgspec.to_builtins(config.read(folder / "config.toml")),
            [("task.features", "scatter"), ("task.whiten", {"on": "loot:TASK"})],
        )
    )
    (folder / "config.toml").write_text(whiten)
    (folder / "loot.py").write_text(LOOT.format(mark=str(mark)))
    (tmp_path / "rows.csv").write_text("a,b,c\n1,2,3\n")
    monkeypatch.chdir(folder)
    status, _, err = command("predict", ".", str(tmp_path / "rows.csv"))
    assert status == 2
    assert "names code, the task to whiten on 'loot:TASK', which would run" in " ".join(err.split())
    assert not mark.exists()


def test_trusted_code_is_imported(loot):
    kind, folder, mark = loot
    if kind == "task":
        dovetail.load(folder, trust_code=True)
        assert mark.exists()
    if kind == "protocol":
        assert verify(folder, trust_code=True).rounds == 2
        assert mark.exists()


def test_the_command_says_how_to_trust(loot, command):
    kind, folder, _ = loot
    if kind == "protocol":
        status, _, err = command("verify", str(folder))
        assert status == 2
        assert "--trust-code" in " ".join(err.split())
        assert command("verify", str(folder), "--trust-code")[0] == 1, "the config is not the run's"
