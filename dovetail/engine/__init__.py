"""Rounds of federated learning as compiled programs: the only place that chunks clients and shards them over devices.

To be read in this order: `rounds` (`Engine`: a round from the users to the server's step), `chunks` (what a chunk of
clients adds to it, by the fastest of several strategies), then the strategies' own modules `linear`, `examples` and
`layers`; `hosted` is the same round for models that train outside JAX, `scoring` scores the model on test records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import lazy_getattr

if TYPE_CHECKING:
    from dovetail.engine.chunks import Diagnostics
    from dovetail.engine.devices import Performance
    from dovetail.engine.rounds import Engine, RoundLog, Training

__all__ = ["Diagnostics", "Engine", "Performance", "RoundLog", "Training"]

_HOMES = dict.fromkeys(
    __all__, "dovetail.engine.rounds"
)  # imported on use: it takes longer to import than all of a config
_HOMES |= {"Diagnostics": "dovetail.engine.chunks", "Performance": "dovetail.engine.devices"}
__getattr__ = lazy_getattr(__name__, _HOMES)
