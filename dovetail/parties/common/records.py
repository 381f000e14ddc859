"""Records in JSON files: tasks, public keys, policies."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from dovetail._structs import ready

__all__ = ["read_record"]

_Record = TypeVar("_Record")


def read_record(path: Path, kind: type[_Record], what: str) -> _Record:
    """The record of a kind in a file; `what` names it where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"expected {what} in {str(path)!r}, got no file")
    try:
        return msgspec.json.decode(path.read_bytes(), type=ready(kind))
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected {what} in {str(path)!r}, got invalid content ({error})") from error
