"""The operator's page, followed to its end on four machines, which are network namespaces of this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parties.operating_walk import HOME, OPERATED, PAGE, typed_on

NEEDED = ("ip", "unshare", "nsenter", "mount", "curl")


def alone(folder: Path) -> list[str]:
    """What begins a command in namespaces of its own; skips the test where there can be none."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}, which this machine does not have")
    if os.geteuid() != 0 or subprocess.run([*words, "true"], check=False).returncode:
        pytest.skip("needs root and `unshare --net --mount --pid`, which this machine does not allow")
    switch = ["ip", "link", "add", "switch", "type", "bridge"]
    if subprocess.run([*words, *switch], check=False, capture_output=True).returncode:
        pytest.skip("needs a bridge between network namespaces, which this machine does not have")
    for needed in (Path(sys.executable), PAGE, folder):
        if {HOME.parent, Path("/var/lib")} & set(needed.absolute().parents):
            pytest.skip(f"puts folders of its own in the places of /srv and /var/lib, where {needed} would be missing")
    return words


def test_what_is_typed_is_read_from_the_page():
    typed = typed_on(PAGE.read_text())
    commands = [one for blocks in typed.values() for block in blocks for one in block]
    assert len(commands) == PAGE.read_text().count("$ ") >= 50
    assert {machine for machine, _ in commands} == {"all", *OPERATED}
    assert all(sum(len(block) for block in typed[lead]) for lead in ("Keys", "Start", "A task ends early"))


@pytest.mark.soak
def test_a_new_operator_follows_the_page_to_its_end(tmp_path, capsys):
    """Training, new keys, a withdrawal, a theft, a restore: every command of the page, and what it says comes of it."""
    done = subprocess.run(
        [*alone(tmp_path), sys.executable, "-m", "parties.operating_walk", str(tmp_path / "walk")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    logs = {path.name: path.read_text()[-1000:] for path in tmp_path.glob("walk/logs/*.log")} if done.returncode else {}
    assert done.returncode == 0, f"{done.stderr[-4000:]}\n{json.dumps(logs, indent=1)}"
    found = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        sys.stdout.write(f"\n{json.dumps(found)}\n")
    assert found["typed"] >= 100 and found["started"] >= 30
    assert found["rounds"]["training"] == [["released", 20]] * 3
    assert found["rounds"]["another task"] == [["released", 20]]
    assert found["rounds"]["withdrawn"] == found["rounds"]["stolen key"] == [["void", 0]]
    assert found["rounds"]["after a restore"] == [["released", 20]] * 2
