"""The engine: the only chunking and sharding of clients."""

from dovetail.engine.chunks import Diagnostics
from dovetail.engine.rounds import Engine, Performance, RoundLog, Training

__all__ = ["Diagnostics", "Engine", "Performance", "RoundLog", "Training"]
