"""The engine: the only jit, vmap and sharding over clients."""

from dovetail.engine.rounds import Diagnostics, Drawn, Engine, Items, Performance, Ran, Training

__all__ = ["Diagnostics", "Drawn", "Engine", "Items", "Performance", "Ran", "Training"]
