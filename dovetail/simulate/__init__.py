"""The engine: the only jit, vmap and sharding over clients."""

from dovetail.simulate.engine import Diagnostics, Engine, Items, Performance, Training

__all__ = ["Diagnostics", "Engine", "Items", "Performance", "Training"]
