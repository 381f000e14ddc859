"""Real processes and real files."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{HERE.parent}:{HERE}", "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
TINY = [
    *("--set", "task.name=tiny:TASK"),
    *("--set", "cohort.size=50"),
    *("--set", "cohort.kind=fixed"),
    *("--set", "protocol.clip_norm=1.0"),
]


def arguments(*extra):
    return [sys.executable, "-m", "dovetail.cli", *extra]


def dovetail(*extra, cwd=None):
    return subprocess.run(
        arguments(*extra), env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )


def tiny_config(folder, rounds=30, kind="fixed", size=50, noise="os"):
    """Everyone in every round (of 300 users) is accounted for in no time, a sample of fixed size in seconds."""
    path = folder / "tiny.toml"
    path.write_text(
        f"""
        noise = "{noise}"
        [task]
        name = "tiny:TASK"
        [cohort]
        kind = "{kind}"
        size = {size}
        rounds = {rounds}
        [protocol]
        name = "dp_fl"
        clip_norm = 1.0
        [privacy]
        eps = 3.0
        """
    )
    return path


def test_run_prints_accuracy_and_statement_and_writes_the_folder(tmp_path, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    noise = "protocol.noise_multiplier=10.0"  # that noise is calibrated to the target is seen below
    status, said, err = command("run", str(tiny_config(tmp_path)), "--out", str(tmp_path / "out"), "--set", noise)
    assert status == 0, err
    assert "test accuracy" in said
    assert len(said.splitlines()) <= 10
    assert re.search(
        r"^guarantee: \(\d.*, 1e-05\)-DP for one user: the observer of every model, over 30 rounds, can guess",
        said,
        re.M,
    )
    assert re.search(r"^verdict: certified if \d+ assumptions hold: --explain lists them$", said, re.M)
    assert (
        "\ntrust: You must trust the curator, who sees every update. If nobody can be trusted: no guarantee.\n" in said
    )
    assert re.search(r"^others: one item: \(\d.*, 1e-05\)-DP; one subject: \(\d.*, 1e-05\)-DP$", said, re.M)
    assert said.endswith(f"report: {tmp_path / 'out' / 'report.html'}\n")
    assert "docs/proofs/fixed-size.md" not in said
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {
        "config.toml",
        "metrics.jsonl",
        "ledger.json",
        "privacy.json",
        "model.npz",
        "recipe.json",
        "timing.json",
        "report.html",
    }
    assert "1500 uploads" in said
    report = (tmp_path / "out" / "report.html").read_text()
    assert "certified" in report
    unlinked = re.sub(r'<a href="https://[^"]*">', "", report.split("<pre>")[0])
    assert "http" not in unlinked, "opens offline: sources are linked, and nothing is loaded"


def test_explained_a_run_prints_every_assumption_and_every_unit(tmp_path, command):
    noise = ("--set", "protocol.noise_multiplier=10.0", "--set", "cohort.rounds=2")
    status, said, _ = command("run", str(tiny_config(tmp_path)), "--out", str(tmp_path / "out"), *noise, "--explain")
    assert status == 0
    stated = json.loads((tmp_path / "out" / "privacy.json").read_text())
    for name in ("certified", "local"):
        assert stated[name]["theorem"]["where"] in said
        assert all(f"if {text}" in said for text in stated[name]["assumptions"])
    for unit in ("item", "subject"):
        assert f"For one {unit}:\n" in said
        assert stated["units"][unit]["theorem"]["where"] in said
    assert "docs/proofs/fixed-size.md" in said


def test_json_is_one_object_on_stdout(tmp_path, command):
    config = tiny_config(tmp_path, kind="everyone", size=300)
    _, out, _ = command("run", str(config), "--out", str(tmp_path / "out"), "--json")
    result = json.loads(out)
    assert set(result) >= {"accuracy", "rounds", "seconds_per_round", "certified", "claimed", "units", "uploads", "out"}
    assert result["uploads"] == 30 * 300
    assert set(result["units"]) == {"item", "user", "subject"}
    assert result["units"]["user"]["eps"] == result["certified"]["eps"]
    assert result["certified"]["eps"] <= 3.0
    assert result["certified"]["verdict"] == "certified"


def test_a_killed_run_resumes_to_the_same_model_and_budget(tmp_path):
    config = str(tiny_config(tmp_path, rounds=200, kind="everyone", size=300, noise="seeded"))
    whole = dovetail("run", config, "--out", str(tmp_path / "whole"), "--json")
    assert whole.returncode == 0, whole.stderr
    cut = subprocess.Popen(
        arguments("run", config, "--out", str(tmp_path / "cut")),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 200
    while not (tmp_path / "cut" / "checkpoint.npz").exists():
        assert time.monotonic() < deadline
        assert cut.poll() is None, "it must still be running when it is killed"
        time.sleep(0.01)
    cut.kill()
    assert cut.wait() != 0
    assert not (tmp_path / "cut" / "privacy.json").exists()
    resumed = dovetail("run", "--resume", "--out", str(tmp_path / "cut"), "--json")
    assert resumed.returncode == 0, resumed.stderr
    np.testing.assert_array_equal(
        np.load(tmp_path / "cut" / "model.npz")["params"], np.load(tmp_path / "whole" / "model.npz")["params"]
    )
    one, two = json.loads(whole.stdout), json.loads(resumed.stdout)
    assert one["certified"] == two["certified"]
    assert one["accuracy"] == two["accuracy"]
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()


SHUFFLED = ["--set", "protocol={clip_value = 0.3, name = 'ss_simple'}", "--set"]
EVERYONE = ["--set", "cohort.kind=everyone", "--set", "cohort.size=300"]
MIXED = ["--set", "protocol={clip_norm = 0.3, name = 'split_and_mix'}"]
CENTRAL = ["--set", "protocol={clip_norm = 0.3, name = 'central_sub', batch = 30, items_per_subject = 2}", *EVERYONE]
CENTRAL += ["--set", "privacy.neighbors=add-remove"]
SILOS = ["--set", "task.partition=silos", "--set", "task.silos=3", "--set", "cohort.size=3"]
SUBJECTS = ["--set", "task.name=tiny:TASK_WITH_SUBJECTS", *SILOS]
BAD = {
    "negative eps": (["--set", "privacy.eps=-1"], "expected eps > 0, got eps=-1"),
    "delta of one": (["--set", "privacy.delta=1.0"], "expected 0 < delta < 1, got delta=1.0"),
    "unknown protocol": (["--set", "protocol.name=dp_flm"], "unknown protocol 'dp_flm': did you mean 'dp_fl'?"),
    "unknown key": (["--set", "cohort.sizes=3"], "unknown key of [cohort] 'sizes': did you mean 'size'?"),
    "too many clients": (["--set", "cohort.size=1000"], "expected at most 300 clients per round (all there are)"),
    "NaN in the data": (["--set", "task.name=tiny:POISONED"], "got 1 NaN or infinite values in inputs"),
    "no such task": (["--set", "task.name=tinny:TASK"], "expected a task 'module:name' that imports"),
    "more than all coordinates": ([*SHUFFLED, "protocol.name=ss_topk", "--set", "protocol.k=100"], "expected k <= 12"),
    "too many decoys": (
        [*SHUFFLED, "protocol.name=ss_topk", "--set", "protocol.k=4", "--set", "protocol.decoys=9"],
        "expected decoys from 0 to dimension - k = 8, got decoys=9",
    ),
    "too little padding": (
        [*SHUFFLED, "protocol.name=ss_double", "--set", "protocol.beta=0.5", "--set", "protocol.pad_to=10"],
        "expected pad_to above the 25 reports",
    ),
    "one shuffler": (
        [*MIXED, "--set", "protocol.shufflers=1"],
        "expected shufflers >= 2 (one shuffler would hold all shares)",
    ),
    "a budget of nothing": (
        [*SHUFFLED, "protocol.name=apes", "--set", "protocol.budgets=[0.0, 1.0]", *EVERYONE],
        "expected eps_local > 0, got eps_local=0.0",
    ),
    "a box that is not symmetric": (
        [*SHUFFLED, "protocol.name=apes", "--set", "protocol.clip_value=[-1.0, 2.0]"],
        "expected clip_value to be a finite number",
    ),
    "fewer clients than the minimum": ([*MIXED, "--set", "cohort.min_size=60"], "expected 0 <= min_size <= 50"),
    "no crowd": (
        [*MIXED, "--set", "cohort.min_size=1"],
        "expected cohort.min_size >= 2 for a protocol that shuffles reports",
    ),
    "a schedule that ends early": (
        ["--set", "protocol.schedule=[1.0, 2.0]"],
        "expected a schedule of at least 30 rounds, got 2 factors",
    ),
    "a schedule of one number": (
        ["--set", "protocol.schedule=2"],
        "expected schedule to be one of constant, linear, held",
    ),
    "sizes that end early": (["--set", "cohort.size=[50, 60]"], "expected a size for each of the 30 rounds, got 2"),
    "sizes for another protocol": (
        [*SHUFFLED, "cohort.size_end=60"],
        "expected rounds of one size under 'ss_simple', got 50 to 60 users",
    ),
    "no item of a subject": (
        [*CENTRAL, "--set", "protocol.items_per_subject=0"],
        "expected items_per_subject >= 1, got items_per_subject=0",
    ),
    "a rate above one": (
        [*CENTRAL, "--set", "protocol.sampling_rate=1.5"],
        "expected sampling_rate <= 1, got sampling_rate=1.5",
    ),
    "a batch of more than all": (
        [*CENTRAL, "--set", "protocol.batch=301"],
        "expected a sampling rate of at most 1, got batch=301 of 300 records",
    ),
    "silos without subjects": (
        ["--set", "task.name=digits", *SILOS],
        "partition 'silos' needs data with subjects",
    ),
    "a subject at more silos than there are": (
        [*SUBJECTS, "--set", "task.spread=4"],
        "expected 1 <= spread <= 3, got spread=4",
    ),
    "a delta without an eps": (
        ["--set", "privacy={stop = 'delta'}"],
        "privacy.stop = 'delta' needs privacy.eps, at which delta is stated",
    ),
    "bad override": (["--set", "privacy.eps"], "expected --set key.path=value, got 'privacy.eps'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_exit_2_and_nothing_written(tmp_path, command, case):
    extra, sentence = BAD[case]
    status, out, err = command("run", str(tiny_config(tmp_path)), "--out", str(tmp_path / "out"), *extra)
    assert status == 2
    assert sentence in err
    assert err.strip().count("\n") == 0
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_an_unwritable_folder_is_refused_before_training(tmp_path, command):
    (tmp_path / "file").write_text("in the way")
    config = tiny_config(tmp_path, kind="everyone", size=300)
    status, _, err = command("run", str(config), "--out", str(tmp_path / "file" / "out"))
    assert status == 2
    assert "cannot be written to" in err
    assert err.strip().count("\n") == 0


def test_a_config_that_is_not_there_is_refused(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, sentence in (("missing.toml", "there is no config file"), ("mnits", "did you mean 'mnist'")):
        status, _, err = command("run", name)
        assert status == 2
        assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_lists_and_facts(command):
    assert "digits" in command("data")[1]
    assert json.loads(command("data", "digits", "--json")[1])["classes"] == 10
    assert "clients" in json.loads(command("bench", "--json")[1])
    assert command("bench", "clinets")[0] == 2
    status, out, _ = command("bench", "unequal", "--", "--help")
    assert status == 0
    assert "usage: unequal.py" in out
    assert "mnist" in command("run", "--presets")[1]
    assert dovetail("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize("name", ["run", "audit", "reproduce", "analyzer"])
def test_help_shows_no_type_for_a_flag(command, name):
    status, out, _ = command(name, "--help")
    assert status == 0
    typed = [line for line in out.splitlines() if "<bool>" in line and "--help" not in line]  # that one is typer's
    assert typed == []


def test_two_processes_train_together_from_the_command_line(tmp_path, command):
    config = str(tiny_config(tmp_path, kind="everyone", size=300, noise="seeded"))
    alone = json.loads(command("run", config, "--out", str(tmp_path / "alone"), "--json")[1])
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = arguments("run", config, "--out", str(tmp_path / "both"), "--coordinator", address, "--processes", "2")
    workers = [
        subprocess.Popen([*words, "--process-id", str(rank)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=200)
        assert worker.returncode == 0, errors[-2000:]
    both = np.load(tmp_path / "both" / "model.npz")["params"]
    np.testing.assert_allclose(both, np.load(tmp_path / "alone" / "model.npz")["params"], atol=1e-4)
    spent = json.loads((tmp_path / "both" / "privacy.json").read_text())["certified"]
    assert spent == alone["certified"]
