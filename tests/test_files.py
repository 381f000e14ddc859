"""Files that are complete or not there, and locks, on every system."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dovetail import files

HOLD = """
import sys
from pathlib import Path
from dovetail.files import lock
with lock(Path(sys.argv[1])):
    print("mine", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock `tmp_path / "lock"` until its standard input ends, or it is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "mine\n"
        yield process
        process.kill()


def test_a_lock_keeps_other_processes_out_until_they_end_or_die(holder, tmp_path):
    with pytest.raises(BlockingIOError, match="another process holds the lock"), files.lock(tmp_path / "lock"):
        pass
    holder.kill()
    holder.wait()
    with files.lock(tmp_path / "lock"):
        pass
    assert (tmp_path / "lock").read_bytes() == b""
    assert [file.name for file in tmp_path.iterdir()] == ["lock"], "and no journal"


def test_a_lock_can_be_waited_for(holder, tmp_path):
    timer = threading.Timer(0.1, holder.stdin.close)
    timer.start()
    with files.lock(tmp_path / "lock", wait=10):
        timer.join()


def test_threads_of_one_process_keep_each_other_out(tmp_path):
    with (
        files.lock(tmp_path / "lock"),
        files.lock(tmp_path / "another"),
        pytest.raises(BlockingIOError),
        files.lock(tmp_path / "lock"),
    ):
        pass


def test_a_lock_where_nothing_can_be_written_says_so(tmp_path):
    with pytest.raises(OSError, match="cannot be locked"), files.lock(tmp_path / "missing" / "lock"):
        pass


def test_a_file_that_somebody_reads_is_replaced_when_they_are_done(tmp_path, monkeypatch):
    replace, attempts = Path.replace, []

    def refuse(self, target):
        raise PermissionError("for good")

    def refuse_twice(self, target):
        attempts.append(target)
        if len(attempts) < 3:
            raise PermissionError("the process cannot access the file because it is being used by another process")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse_twice)
    files.write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert len(attempts) == 3
    monkeypatch.setattr(files, "_PATIENCE", 0.01)
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError, match="for good"):
        files.write_atomically(tmp_path / "file", b"other")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
