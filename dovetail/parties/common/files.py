"""Records in JSON files: tasks, public keys, policies; and files that are read again when they change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from dovetail._structs import ready

__all__ = ["WatchedFile", "read_json"]

_LOG = logging.getLogger(__name__)
_Record = TypeVar("_Record")
_LOOK = 1.0  # seconds between looks at a file


def read_json(path: Path, kind: type[_Record], what: str) -> _Record:
    """The record of a kind in a file; `what` names it where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"expected {what} in {str(path)!r}, got no file")
    try:
        return msgspec.json.decode(path.read_bytes(), type=ready(kind))
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected {what} in {str(path)!r}, got invalid content ({error})") from error


class WatchedFile(Generic[_Record]):
    """What a file says, also after it was changed or replaced; one that became unreadable says what it said before."""

    def __init__(self, path: Path, read: Callable[[Path], _Record]) -> None:
        self._path, self._read = path, read
        self._version, self._looked = self._stamp(), time.monotonic()
        self._found = read(path)

    def now(self) -> _Record:
        """As of a second ago, at most."""
        if time.monotonic() >= self._looked + _LOOK:
            self._looked = time.monotonic()
            version = self._stamp()
            if version != self._version:
                self._version = version
                try:
                    self._found = self._read(self._path)
                except (OSError, ValueError) as error:
                    _LOG.warning("%s; what it said before still holds", error)
        return self._found

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
