"""Four processes that train together, on hosts of their own where the machine allows: one is killed, and all go on."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parents[1]
TOGETHER = HERE.parent / "examples" / "cluster" / "together.sh"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{HERE.parent}:{HERE}",
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "COLUMNS": "200",
}
HOSTS = 4
CONFIG = """
noise = "seeded"
[task]
name = "tiny:TASK"
[cohort]
kind = "everyone"
size = 300
rounds = 600
[protocol]
name = "dp_fl"
clip_norm = 1.0
[privacy]
eps = 3.0
"""
ON_HOST = """#!/bin/bash
name=$1 && shift
exec ip netns exec "$name" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$name" "$@"
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def network(folder):
    """Names of hosts, each a network namespace with a host name of its own, on one bridge; how to reach them.

    Without the rights to make any, all are this machine.
    """
    names = [f"dvt{os.getpid()}-{i}" for i in range(HOSTS)]
    made = []
    try:
        try:
            for name in (*names, f"{names[0]}-bridge"):
                ip("netns", "add", name)
                made.append(name)
        except (OSError, subprocess.CalledProcessError):
            yield [f"HOST={i}" for i in range(HOSTS)], {"REMOTE": "env", "ADDRESS": "127.0.0.1"}
            return
        bridge = made[-1]
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        table = "127.0.0.1 localhost\n" + "".join(f"10.213.7.{i + 1} {name}\n" for i, name in enumerate(names))
        for i, name in enumerate(names):
            ip("-n", bridge, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", bridge, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            Path("/etc/netns", name).mkdir(parents=True)
            Path("/etc/netns", name, "hosts").write_text(table)
        remote = folder / "on_host"
        remote.write_text(ON_HOST)
        remote.chmod(0o755)
        yield names, {"REMOTE": str(remote), "ADDRESS": "10.213.7.1"}
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def process_of(rank, out):
    """The id of that process of this training, if it runs."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if str(out).encode() in words and words[-3:-1] == [b"--process-id", str(rank).encode()]:
                return int(entry.parent.name)
    return None


def killed_after_a_checkpoint(rank, out, script):
    """Kill this process with signal 9 once the run has gone on from where it began; its id."""
    checkpoint, first = out / "checkpoint.npz", None
    while script.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            written = checkpoint.stat().st_mtime_ns
            first = first or written
            pid = process_of(rank, out)
            if written != first and pid is not None:
                os.kill(pid, signal.SIGKILL)
                return pid
        time.sleep(0.01)
    raise AssertionError(f"the training ended before a process was killed: {script.communicate()[1][-3000:]}")


@pytest.mark.soak
def test_four_hosts_of_which_one_is_killed_train_the_model_of_one(tmp_path):
    config = tmp_path / "tiny.toml"
    config.write_text(CONFIG)
    run = [sys.executable, "-m", "dovetail.cli", "run", str(config), "--quiet", "--out"]
    subprocess.run([*run, str(tmp_path / "alone")], env=ENVIRONMENT, check=True, capture_output=True, timeout=250)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    out = tmp_path / "together"
    with network(tmp_path) as (hosts, reached):
        script = subprocess.Popen(
            [str(TOGETHER), port, *hosts, "--", *run, str(out)],
            env=ENVIRONMENT | reached,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        killed_after_a_checkpoint(2, out, script)
        _, errors = script.communicate(timeout=280)
    assert script.returncode == 0, errors[-3000:]
    assert errors.count("a process failed; those that are left are ended") == 1
    alone, together = (np.load(folder / "model.npz")["params"] for folder in (tmp_path / "alone", out))
    np.testing.assert_allclose(together, alone, atol=1e-4)
    alone, together = (json.loads((folder / "privacy.json").read_text()) for folder in (tmp_path / "alone", out))
    assert together["certified"] == alone["certified"]
    rounds = [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(rounds)) == rounds, "no round is counted twice"
