"""From a config to a trained model and its statement."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.experiment.training import Finished, Progress, Result, prepare, run, train

__all__ = ["Finished", "Progress", "Result", "prepare", "run", "train"]


def __getattr__(name: str) -> Any:
    """Public names on first use: whoever reads a config does not load the engine."""
    if name in __all__:
        return getattr(importlib.import_module("dovetail.experiment.training"), name)
    raise AttributeError(f"module 'dovetail.experiment' has no attribute {name!r}")
