"""msgspec's types made ready for decoding by one thread at a time.

msgspec finds out about a struct's fields when it first decodes one. Another thread that decodes the same kind at that
moment reads what is not there yet, and the process dies of a segmentation fault (msgspec 0.22.0). Whatever several
threads may decode is decoded as `resolve_fields(kind)`.
"""

from __future__ import annotations

import threading
from typing import TypeVar

import msgspec

__all__ = ["resolve_fields"]

_Kind = TypeVar("_Kind")
_READY: set[type] = set()
_ALONE = threading.Lock()


def resolve_fields(kind: type[_Kind]) -> type[_Kind]:
    """The same type, once msgspec has learnt its fields: from then on several threads may decode it."""
    if kind not in _READY:
        with _ALONE:
            msgspec.json.Decoder(kind)
            _READY.add(kind)
    return kind
