"""What people expect of any command line: -h, --quiet, completion, Ctrl-C, and files found beside each other."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from dovetail.cli import app

HERE = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
CONFIG = """
[task]
name = "{task}"
[cohort]
kind = "everyone"
rounds = {rounds}
[protocol]
name = "dp_fl"
clip_norm = 1.0
noise_multiplier = 20.0
"""


def commands(one, words=()):
    yield words
    for name, inner in getattr(one, "commands", {}).items():
        yield from commands(inner, (*words, name))


ALL = list(commands(typer.main.get_command(app)))


def config(folder, *, task="tiny:TASK", rounds=3):
    path = folder / "small.toml"
    path.write_text(CONFIG.format(task=task, rounds=rounds))
    return str(path)


def test_python_dash_m():
    words = [sys.executable, "-m", "dovetail", "--version"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_dash_h_is_help(command, words):
    status, out, _ = command(*words, "-h")
    assert status == 0
    assert "Usage: " in out
    assert "--help" in out
    assert "<bool>" not in out


def test_commands_are_shown_in_groups_and_plainly_where_nobody_looks(command, monkeypatch):
    _, plain, _ = command("-h")
    places = [plain.index(f"\n{group}:\n") for group in ("Options", "Train", "Privacy", "Deploy", "Research")]
    assert places == sorted(places)
    assert "\nCommands:" not in plain, "each has a group"
    assert not set("│╭─") & set(plain)
    top = typer.main.get_command(app)
    for name in top.commands:
        assert f"\n  {name} " in plain
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, framed, _ = command("-h")
    assert "╭─" in framed
    assert " Research " in framed


def test_quiet_shows_no_progress(command, tmp_path):
    status, _, err = command("run", config(tmp_path), "--out", str(tmp_path / "quiet"), "--quiet")
    assert (status, err) == (0, "")
    status, _, err = command("run", config(tmp_path), "--out", str(tmp_path / "loud"))
    assert status == 0
    assert "round 3/3" in err, "and the next command is not quiet"
    status, _, err = command("run", "missing.toml", "--quiet")
    assert status == 2
    assert "there is no config file" in err, "errors are always said"


LONG = ["run", "verify", "predict", "tune", "choose", "calibrate", "audit", "compare", "reproduce", "account protocol",
        "fleet demo", "fleet audit"]  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_long_commands_can_be_quiet(command, name):
    assert "--quiet" in command(*name.split(), "-h")[1]


def test_the_shell_completes_commands(command, monkeypatch):
    for name, value in {"_DOVETAIL_COMPLETE": "complete_bash", "COMP_WORDS": "dovetail ch", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    _, out, _ = command()
    assert out.split() == ["choose"]
    monkeypatch.delenv("_DOVETAIL_COMPLETE")
    assert "--install-completion" in command("-h")[1]


def test_a_module_beside_the_config_is_found_from_anywhere(command, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "neighbour_of_a_config.py").write_text("from tiny import TASK\n")
    path = config(tmp_path / "there", task="neighbour_of_a_config:TASK")
    monkeypatch.chdir(tmp_path / "here")
    status, _, err = command("run", path, "--out", "out")
    assert status == 0, err
    assert (tmp_path / "here" / "out" / "privacy.json").exists()


# a shell starts background jobs, and so their tests, with SIGINT ignored
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("dovetail", run_name="__main__", alter_sys=True)
"""


def test_control_c_says_how_to_resume(command, tmp_path):
    out = tmp_path / "out put"
    words = ["run", config(tmp_path, rounds=400), "--set", "clip_norm=.5", "--out", str(out)]
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *words], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 100
    while not (out / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        assert running.poll() is None, "it must still be running when it is interrupted"
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    last = err.strip().splitlines()[-1]
    said, _, again = last.partition(": ")
    assert said == "interrupted; to continue from the last checkpoint"
    assert shlex.split(again) == ["dovetail", *words[:-2], "--resume", "--out", str(out)]
    assert "Traceback" not in err
    status, _, err = command(*shlex.split(again)[1:])
    assert status == 0, err
    assert (out / "privacy.json").exists()
