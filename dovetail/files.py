"""How files are written, on every system: complete or not at all, into folders that can be written to; and locks."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

__all__ = ["lock", "make_folder", "open_replacement", "write_atomically", "write_json", "write_table"]

_PATIENCE = 1.0  # seconds


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, where there is none; refuses one that cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"the folder {str(path)!r} cannot be written to ({error.strerror})") from error


@contextlib.contextmanager
def lock(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Keep everybody else who locks the same file out while the block runs, in this process and in others.

    The file is made if need be, stays empty, and is left there. It is an SQLite database without tables, for SQLite
    locks in the same way on every system; a process that dies lets go of its lock.

    Arguments:
        wait: seconds to wait for whoever has the lock; BlockingIOError if it is still taken then.
    """
    with contextlib.ExitStack() as stack:
        try:
            database = sqlite3.connect(path, timeout=wait, isolation_level=None, check_same_thread=False)
            stack.callback(database.close)
            database.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                raise BlockingIOError(f"another process holds the lock {str(path)!r}") from error
            raise OSError(f"the file {str(path)!r} cannot be locked ({error})") from error
        yield


@contextlib.contextmanager
def open_replacement(path: Path, *, mode: int = 0o644) -> Iterator[IO[bytes]]:
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
        _replace(Path(temporary), path)
        _sync_folder(path.parent)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _replace(temporary: Path, path: Path) -> None:
    """Give a file its name; where that fails because somebody is reading the old one (Windows), try for `_PATIENCE`."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            temporary.replace(path)
            return
        except PermissionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PATIENCE / 50)


def _sync_folder(folder: Path) -> None:
    """Make a new name durable: a file that was replaced could come back after a power cut.

    Windows opens no folders; there the file system's own journal must do.
    """
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that it is seen either complete or not at all, also after a crash."""
    with open_replacement(path, mode=mode) as file:
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
