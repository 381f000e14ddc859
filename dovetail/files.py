"""How files are written: complete or not at all, into folders that can be written to."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["hold", "make_folder", "replacing", "write_atomically", "write_json", "write_table"]


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where there is none; refuses one that cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"the folder {str(path)!r} cannot be written to ({error.strerror})") from error


def hold(folder: Path) -> IO[bytes]:
    """Lock a folder for this process, until the file that is returned is closed; refuses one that another has locked.

    The folder is made if need be, and its owner alone can read it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    lock = (folder / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ValueError(f"another process is working in {str(folder)!r}") from error
    return lock


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A stream that becomes the file when the block is left, complete or not at all, also after a crash.

    Until then, and with `mode` 0600 for good, nobody but its owner can read it.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
        _sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make a new name durable: a file that was replaced could come back after a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that it is seen either complete or not at all, also after a crash."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write plain data as indented JSON, complete or not at all; refuses NaN and infinity, which JSON has not."""
    write_atomically(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, each from column to value, as CSV with a header, complete or not at all.

    Columns are in the order in which they first come; those that are empty in every row are left out.
    """
    names = dict.fromkeys(name for row in rows for name, value in row.items() if value not in (None, ""))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
