"""Watching trainings: loggers and a live page as callbacks, and finished runs side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail._imports import lazy_getattr

if TYPE_CHECKING:
    from dovetail.experiment import EarlyStopping
    from dovetail.watching.live import LivePage
    from dovetail.watching.loggers import MLflow, TensorBoard, WandB

__all__ = ["EarlyStopping", "LivePage", "MLflow", "TensorBoard", "WandB"]

_HOMES = dict.fromkeys(("MLflow", "TensorBoard", "WandB"), "dovetail.watching.loggers")
_HOMES |= {"EarlyStopping": "dovetail.experiment", "LivePage": "dovetail.watching.live"}
__getattr__ = lazy_getattr(__name__, _HOMES)
