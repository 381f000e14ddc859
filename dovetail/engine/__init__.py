"""The engine: the only chunking and sharding of clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import lazy_getattr

if TYPE_CHECKING:
    from dovetail.engine.chunks import Diagnostics
    from dovetail.engine.devices import Performance
    from dovetail.engine.rounds import Engine, RoundLog, Training

__all__ = ["Diagnostics", "Engine", "Performance", "RoundLog", "Training"]

_HOMES = dict.fromkeys(__all__, "dovetail.engine.rounds")  # which takes longer to import than all of a config
_HOMES |= {"Diagnostics": "dovetail.engine.chunks", "Performance": "dovetail.engine.devices"}
__getattr__ = lazy_getattr(__name__, _HOMES)
