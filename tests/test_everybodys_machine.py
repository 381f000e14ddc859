"""Simulations, reports and accounting on every system, and without the extra that deployed parties need."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dovetail
from dovetail import files
from dovetail.experiment import fingerprint

TESTS = Path(__file__).parent
SOURCE = Path(dovetail.__file__).parent
PROGRAM = """
import elsewhere
elsewhere.hide(posix={posix})
import sys
from dovetail import cli
for words in {commands!r}:
    sys.argv = ["dovetail", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(f"ended {{ended.code or 0}}", flush=True)
{more}
"""
CONFIG = """
seed = 1
[task]
name = "tiny:TASK"
[cohort]
kind = "poisson"
size = 60
rounds = 3
[protocol]
name = "dp_fl"
clip_norm = 1.0
[privacy]
eps = 3.0
"""
TRAIN = """
import dovetail
data = dovetail.Dataset.from_csv("table.csv", user="user", target="y", classes=["a", "b"], bounds={"x": (0, 1)},
                                  test_share=0.2)
result = dovetail.train(data, eps=2.0, delta=1e-5, settings={"cohort.rounds": 2, "noise": "seeded"}, out="table")
print(result.statement)
"""


def answers(folder: Path, *commands: list[str], posix: bool, more: str = "") -> list[tuple[int, str]]:
    """Exit status and output of commands in one process, whose streams know the letters of Western Europe alone."""
    program = PROGRAM.format(posix=posix, commands=commands, more=more)
    path = os.pathsep.join([str(TESTS), str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "cp1252:strict", "PYTHONUTF8": "0"}
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, check=False
    )
    out, err = said.stdout.decode("cp1252"), said.stderr.decode("cp1252")
    assert said.returncode == 0, err
    *ended, last = re.split(r"^ended (\d+)\s*$", out, flags=re.MULTILINE)
    return [(int(status), text) for text, status in zip(ended[::2], ended[1::2], strict=True)] + [(0, last + err)]


def test_simulations_reports_and_accounting_run_on_every_system(tmp_path):
    (tmp_path / "tiny.toml").write_text(CONFIG, encoding="utf-8-sig")  # as an editor of Windows saves it
    rows = [f"user {row % 50},{row % 10 / 10},{'ab'[row % 10 > 4]}" for row in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["user,x,y", *rows]) + "\n", encoding="utf-8")
    run = "Läufe-数/one"
    found = answers(
        tmp_path,
        ["-h"],
        ["run", "tiny.toml", "--out", run, "--quiet"],
        ["report", run],
        ["verify", run],
        ["runs", "Läufe-数"],
        ["account", "protocol", "dp_fl", "--n", "300", "--dim", "9", "--delta", "1e-5", "--set", "noise_multiplier=2"],
        ["compare", "--task", "tiny:TASK", "--protocols", "dp_fl", "--seeds", "1", "--eps", "4", "--delta", "1e-4",
         "--set", "cohort.rounds=2", "--out", "compared", "--quiet"],
        ["fleet", "demo"],
        posix=True,
        more=TRAIN,
    )  # fmt: skip
    assert [status for status, _ in found] == [0, 0, 0, 0, 0, 0, 0, 2, 0], found[-1][1]
    (_, helped), (_, ran), *_, (_, last) = found
    assert "dovetail [OPTIONS]" in helped
    assert "guarantee: (" in ran
    assert "-DP [curator;" in last
    assert "deployed parties need Linux or another POSIX system, and this one has no module 'fcntl'" in last
    assert (tmp_path / run / "report.html").stat().st_size > 10_000
    assert b"\r" not in (tmp_path / run / "metrics.jsonl").read_bytes()


def test_without_the_extra_a_party_says_what_to_install(tmp_path):
    commands = (["fleet", "demo"], ["keys", "k", "--use", "sign"], ["task", "show", "t.json"], ["fleet", "-h"])
    found = answers(tmp_path, *commands, posix=False)
    assert [status for status, _ in found] == [2, 2, 2, 0, 0]
    lines = [line for line in found[-1][1].splitlines() if line]
    assert len(lines) == 3, "one sentence each"
    assert all("pip install 'dovetail-fl[parties]'" in line for line in lines)
    assert not list(tmp_path.iterdir())


class _Windows(SimpleNamespace):
    """What `os` does on Windows, as far as it is asked for."""

    name = "nt"

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *more):
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied")
        return os.open(path, flags, *more)


def test_windows_opens_no_folders_and_has_no_modes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", _Windows())
    files.write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    key = tmp_path / "data.key"
    made = fingerprint.data_key(key)
    key.chmod(0o666)
    with pytest.raises(ValueError, match="others can read"):
        fingerprint.data_key(key)
    monkeypatch.setattr(fingerprint, "os", _Windows())
    assert fingerprint.data_key(key) == made


def test_text_files_have_one_encoding_on_every_system():
    """UTF-8, said wherever text is read or written: Windows would take another."""

    def is_text(call: ast.Call, name: str) -> bool:
        if name in ("read_text", "write_text"):
            return True
        modes = [
            one.value for one in (*call.args, *(word.value for word in call.keywords)) if isinstance(one, ast.Constant)
        ]
        return name in ("open", "fdopen") and any(mode in ("r", "w", "a", "x") for mode in modes)

    lacking = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if is_text(node, name) and "encoding" not in {word.arg for word in node.keywords}:
                    lacking.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not lacking
