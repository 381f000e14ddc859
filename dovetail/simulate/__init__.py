"""The engine: the only jit, vmap and sharding over clients."""

from dovetail.simulate.engine import Engine, Performance, Training

__all__ = ["Engine", "Performance", "Training"]
