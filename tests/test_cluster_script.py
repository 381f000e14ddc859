"""The script that starts a training on many hosts, with a stand-in for the training."""

import os
import subprocess
from pathlib import Path

TOGETHER = Path(__file__).parents[1] / "examples" / "cluster" / "together.sh"
TRAINING = """#!/bin/bash
# Notes its words; in the first attempts process 2 fails, and the others wait for it.
folder=$2 words=$*
rank=${words##*--process-id } attempt=${words##*first:}
rank=${rank%% *} attempt=$((${attempt%% *} - 9000))
touch "$folder/checkpoint.npz"
echo "$*" >>"$folder/words-$rank"
if [ $attempt -lt $FAILURES ]; then
  [ $rank = 2 ] && exit 3
  exec sleep 30
fi
"""


def together(folder, *words, failures=0, retries=3):
    training = folder / "training"
    training.write_text(TRAINING)
    training.chmod(0o755)
    (folder / "run").mkdir()
    hosts = [f"HOST={i}" for i in range(4)]
    reached = {"REMOTE": "env", "ADDRESS": "first", "FAILURES": str(failures), "RETRIES": str(retries)}
    return subprocess.run(
        [TOGETHER, "9000", *hosts, "--", str(training), *(words or ("--out", str(folder / "run")))],
        env=os.environ | reached,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_every_host_is_told_its_number(tmp_path):
    ended = together(tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(4):
        words = (tmp_path / "run" / f"words-{rank}").read_text()
        assert words == f"--out {tmp_path / 'run'} --coordinator first:9000 --processes 4 --process-id {rank}\n"


def test_if_one_fails_all_begin_again_from_the_checkpoint_on_another_port(tmp_path):
    ended = together(tmp_path, failures=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("a process failed") == 2
    first, second, third = (tmp_path / "run" / "words-2").read_text().splitlines()
    assert "first:9000" in first
    assert "first:9001" in second and second.endswith("--resume")
    for rank in (0, 1, 3):
        assert (tmp_path / "run" / f"words-{rank}").read_text().splitlines()[-1] == third.replace(
            "-id 2", f"-id {rank}"
        )


def test_it_gives_up_and_says_where_the_checkpoint_is(tmp_path):
    ended = together(tmp_path, failures=9, retries=1)
    assert ended.returncode == 1
    assert "gave up after 2 attempts" in ended.stderr
    assert str(tmp_path / "run") in ended.stderr


def test_a_command_without_a_folder_is_refused(tmp_path):
    ended = together(tmp_path, "run", "config.toml")
    assert ended.returncode == 2
    assert "expected --out FOLDER" in ended.stderr
