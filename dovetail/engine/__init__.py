"""The engine: the only chunking and sharding of clients."""

from dovetail.engine.chunks import Diagnostics
from dovetail.engine.rounds import Engine, Performance, Ran, Training

__all__ = ["Diagnostics", "Engine", "Performance", "Ran", "Training"]
