"""From a config to a trained model and its statement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import on_first_use

if TYPE_CHECKING:
    from dovetail.experiment.training import Finished, Progress, Result, prepare, run, train

__all__ = ["Finished", "Progress", "Result", "prepare", "run", "train"]

__getattr__ = on_first_use(__name__, dict.fromkeys(__all__, "dovetail.experiment.training"))  # the engine is large
