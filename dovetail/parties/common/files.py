"""JSON files of tasks, public keys and policies; files read again when they change; folders that services hold."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Generic, TypeVar

import msgspec

from dovetail._structs import resolve_fields

__all__ = ["WatchedFile", "lock_folder", "read_json"]

_LOG = logging.getLogger(__name__)
_Content = TypeVar("_Content")
_LOOK = 1.0  # seconds between two looks at a file


def read_json(path: Path, kind: type[_Content], what: str) -> _Content:
    """Read a JSON file.

    Arguments:
        path: the file.
        kind: type of what it holds.
        what: what that is, for messages: "a signed task".
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected {what} in {str(path)!r}, which is no file")
    try:
        return msgspec.json.decode(path.read_bytes(), type=resolve_fields(kind))
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"expected {what} in {str(path)!r}, which this version cannot read as one ({error})"
        ) from error


def lock_folder(folder: Path) -> IO[bytes]:
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


class WatchedFile(Generic[_Content]):
    """A file that is read again when it was changed or replaced; one that became unreadable says what it said before.

    Arguments:
        path: the file.
        read: reads it; an OSError or ValueError says that it cannot be read.
    """

    def __init__(self, path: Path, read: Callable[[Path], _Content]) -> None:
        self._path = path
        self._read = read
        self._version = self._file_stamp()
        self._looked = time.monotonic()
        self._content = read(path)

    def current_content(self) -> _Content:
        """What the file says, as of a second ago at most."""
        if time.monotonic() >= self._looked + _LOOK:
            self._looked = time.monotonic()
            version = self._file_stamp()
            if version != self._version:
                self._version = version
                try:
                    self._content = self._read(self._path)
                except (OSError, ValueError) as error:
                    _LOG.warning("%s; what it said before still holds", error)
        return self._content

    def _file_stamp(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
