"""A protocol in one file outside the package, and one line of metadata: through every command, and a fleet."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail import protocols
from dovetail.cli import app
from dovetail.statements import Verdict

HERE = Path(__file__).parent
SET = ("--set", "eps_local=0.5")
SIZE = ("--n", "60", "--dim", "3", "--delta", "1e-4")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder on the path with the file and its metadata, as pip would leave them."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(HERE / "sign_bits.py", folder)
    metadata = folder / "sign_bits-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sign-bits\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dovetail.protocols]\nsign_bits = sign_bits:SignBits\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    protocols.PROTOCOLS.pop("sign_bits", None)
    sys.modules.pop("sign_bits", None)


@pytest.fixture
def ask(installed):
    def asked(*arguments):
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.exception
        return json.loads(done.stdout)

    return asked


def test_account_certifies_by_its_own_theorem_as_declared(ask):
    said = ask("account", "protocol", "sign_bits", *SIZE, *SET)
    assert said["certified"]["verdict"] == Verdict.DECLARED.value
    assert 1.49 < said["certified"]["eps"] <= 1.5
    assert said["local"]["eps"] == pytest.approx(1.5)
    assert said["shuffler"]["eps"] == 0
    many = ask("account", "protocol", "sign_bits", *SIZE, *SET, "--rounds", "200")
    assert "randomized response on every coordinate" in many["certified"]["theorem"]["where"]
    assert many["certified"]["eps"] < 200 * 1.5 / 2


def test_calibrate_meets_the_target(ask):
    found = ask("calibrate", "sign_bits", *SIZE, "--rounds", "5", "--eps", "3")
    assert 2.9 < found["certified"]["eps"] <= 3


def test_audit_uses_its_own_attack_and_agrees(ask):
    found = ask("audit", "sign_bits", *SIZE, *SET, "--trials", "0")
    assert found["attack"] == "ones in all" and found["consistent"]
    assert 0 < found["eps_lower"] <= found["certified"]["eps"]


def test_run_and_verify(ask, tmp_path):
    keys = ("task.name=tiny:TASK", "cohort.kind=everyone", "cohort.rounds=3", "protocol.name=sign_bits")
    sets = [word for key in (*keys, "privacy.eps=4") for word in ("--set", key)]
    (tmp_path / "config.toml").write_text("")
    ran = ask("run", str(tmp_path / "config.toml"), *sets, "--out", str(tmp_path / "run"))
    assert 3.9 < ran["certified"]["eps"] <= 4
    assert "Bits" in (tmp_path / "run" / "ledger.json").read_text()
    assert ask("verify", str(tmp_path / "run"))["agrees"]
    assert "sign_bits" in (tmp_path / "run" / "report.html").read_text()


def test_compare_ranks_it_by_its_defaults(ask, tmp_path):
    overrides = ("task.partition=iid", "task.users=300", "cohort.kind=everyone", "cohort.size=300")
    sets = [word for key in overrides for word in ("--set", key)]
    found = ask(
        *("compare", "--task", "tiny:TASK", "--protocols", "dp_fl,sign_bits", "--eps", "4", "--delta", "1e-4"),
        *("--seeds", "1", "--out", str(tmp_path / "comparison"), *sets),
    )
    rows = {row["protocol"]: row for row in found["rows"]}
    assert rows["sign_bits"]["certified"]["verdict"] == Verdict.DECLARED_REPRODUCIBLE.value  # trainings are seeded
    assert rows["sign_bits"]["certified"]["eps"] <= 4


def in_a_process(installed, *words):
    tests = HERE.parent
    environment = os.environ | {"PYTHONPATH": f"{tests.parent}:{installed}:{tests}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "dovetail.cli", *words, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_a_new_process_finds_it(installed):
    """Which is what a fleet's processes need beyond what every deployable protocol has."""
    said = in_a_process(installed, "account", "protocol", "sign_bits", *SIZE, *SET)
    assert said["certified"]["verdict"] == Verdict.DECLARED.value


@pytest.mark.soak
def test_a_fleet_of_processes_trains_with_it(installed, tmp_path):
    sets = [word for key in ("task.name=tiny:TASK", "privacy.eps=200") for word in ("--set", key)]
    words = ("fleet", "demo", "--protocol", "sign_bits", "--clients", "3", "--rounds", "1", "--processes", "1")
    said = in_a_process(installed, *words, "--folder", str(tmp_path / "fleet"), *sets)
    assert said["privacy"]["history"][0]["outcome"] != "void"
