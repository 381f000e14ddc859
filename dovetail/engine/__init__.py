"""The engine: the only jit, vmap and sharding over clients."""

from dovetail.engine.diagnostics import Diagnostics
from dovetail.engine.rounds import Engine, Performance, Ran, Training

__all__ = ["Diagnostics", "Engine", "Performance", "Ran", "Training"]
