"""Replicas die, the database crashes, and one replica of every party is cut off from all others now and then.

To be run as root in a network namespace of its own: `unshare --net`. The replicas that are cut off live in a further
one, at the other end of a cable that is pulled and put back.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from parties.cluster import cluster
from parties.replicas import ReplicaKilling

_HERE, _THERE = "10.77.0.1", "10.77.0.2"
_KILLS, _CRASHES, _SEED = 60, 2, 5


def _ip(*words: str, within: int | None = None) -> None:
    elsewhere = [] if within is None else ["nsenter", "--target", str(within), "--net"]
    subprocess.run([*elsewhere, "ip", *words], check=True)


@contextlib.contextmanager
def _elsewhere() -> Iterator[int]:
    """A process that keeps a network namespace, at the other end of the cable."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    try:
        _ip("link", "set", "lo", "up")
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
            time.sleep(0.05)
        _ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(holder.pid))
        _ip("address", "add", f"{_HERE}/24", "dev", "here")
        _ip("link", "set", "here", "up")
        _ip("address", "add", f"{_THERE}/24", "dev", "there", within=holder.pid)
        for device in ("there", "lo"):
            _ip("link", "set", device, "up", within=holder.pid)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


class Cutting(threading.Thread):
    """Pulls the cable and puts it back, until told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._random, self._stop_it, self.cuts = random.Random(_SEED), threading.Event(), 0

    def run(self) -> None:
        """Long enough for both ends to notice, and short enough for them not to."""
        while not self._stop_it.wait(self._random.uniform(2, 10)):
            _ip("link", "set", "here", "down")
            self.cuts += 1
            self._stop_it.wait(self._random.choice([0.5, 1.0, 3.0, 20.0]))
            _ip("link", "set", "here", "up")

    def end(self) -> None:
        """With the cable in its place."""
        self._stop_it.set()
        self.join()


def main(folder: Path) -> None:
    """Sixty kills, two crashes, a cable; what was found, as JSON."""
    with _elsewhere() as holder, cluster(host=_HERE) as running:
        options = {"users": 8, "round_seconds": 5.0, "seed": _SEED, "processes": 2, "host": _HERE}
        killing = ReplicaKilling(folder, "two aggregators", cluster=running, crashes=_CRASHES, **options)
        for name in killing.fleet.names:
            if name.endswith("-1"):
                killing.fleet.within[name] = ["nsenter", "--target", str(holder), "--net"]
                killing.fleet.addresses[name] = _THERE, killing.fleet.addresses[name][1]
        cutting = Cutting()
        cutting.start()
        try:
            killing.run(killing.targets(_KILLS), at_once=3)
        finally:
            cutting.end()
        killing.judge()
        kills = sum(killing.aimed.values())
        summary = f"{killing.summary()}; one replica of each cut off {cutting.cuts} times"
        said = {"summary": summary, "kills": kills, "crashed": killing.crashed, "cuts": cutting.cuts}
    sys.stdout.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
