"""Threads that decode a kind of struct for the first time do so one after another; msgspec alone crashes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import dovetail

SOURCE = Path(dovetail.__file__).parent
AT_ONCE = """
import sys, threading
import msgspec
from dovetail._structs import resolve_fields

sys.setswitchinterval(1e-6)
for number in range(60):
    class Inner(msgspec.Struct):
        data: bytes

    class Outer(msgspec.Struct):
        inner: Inner
        others: tuple[Inner, ...]
        text: str | None = None

    barrier, found = threading.Barrier(8), []

    def decode():
        barrier.wait()
        data = b'{"inner": {"data": "AAAA"}, "others": [{"data": "AAAA"}]}'
        found.append(msgspec.json.decode(data, type=resolve_fields(Outer)))

    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
"""


def test_threads_that_are_first_at_once_all_decode():
    """In a process of its own: without `resolve_fields` it ends with SIGSEGV."""
    ran = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_services_decode_structs_in_no_other_way():
    kinds = re.compile(r"msgspec\.(?:json|msgpack)\.decode\((?:[^()]|\([^()]*\))*type=(.+?)\)+$", re.MULTILINE)
    files = (SOURCE / "parties").rglob("*.py")
    found = [(path.name, kind) for path in files for kind in kinds.findall(path.read_text())]
    assert len(found) > 10
    assert [
        one for one in found if not one[1].startswith(("resolve_fields(", "set[bytes] | None", "bytes | None"))
    ] == []
