"""What a call of `train` brings of its own: a dataset, a model, a loss, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.data import Dataset, Loss, Metric, Task, resolve

__all__ = ["task_of"]


def task_of(
    task: str | Task | Dataset,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None,
) -> Task:
    """The task with what is given in place of its own; a dataset is a task named "own"."""
    if isinstance(task, Dataset):
        held = task

        def load(*, folder: Path | None) -> Dataset:
            return held

        task = Task(name="own", load=load)
    changes = {"model": model, "loss": loss, "metrics": metrics}
    return dataclasses.replace(resolve(task), **{name: value for name, value in changes.items() if value is not None})
