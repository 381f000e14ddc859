"""What a call of `train` brings of its own: a dataset, a model, a loss, metrics; and what to do with anything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.data import TASKS, Dataset, Loss, Metric, Task, resolve

__all__ = ["default_cohort", "default_server", "refuse_unnamed", "task_of"]

_OWN, _ROUNDS = "dataset", 30
_FILES = {".csv": "from_csv", ".gz": "from_csv", ".parquet": "from_parquet", ".pq": "from_parquet", ".tsv": "from_csv"}


def task_of(
    offered: object,
    *,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> Task:
    """The task with what is given in place of its own; refuses tables and files, which do not say whose rows are."""
    changes = {"model": model, "loss": loss, "metrics": metrics}
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(_resolved(offered), **given)


def _resolved(offered: object) -> Task:
    if isinstance(offered, Dataset):
        return Task(name=_OWN, load=lambda *, folder: offered)
    if isinstance(offered, Task):
        return offered
    if isinstance(offered, str | Path):
        reader = _FILES.get(Path(offered).suffix.lower())
        if reader is None and isinstance(offered, str):
            return resolve(offered)
        reader = reader or "from_folder"
        raise ValueError(_sentence(f"Dataset.{reader}({str(offered)!r}, ...)", f"the path {str(offered)!r}"))
    if hasattr(offered, "columns"):
        raise ValueError(_sentence("Dataset.from_pandas(frame, ...)", f"a {type(offered).__name__}"))
    raise ValueError(f"expected a Dataset, a Task or the name of a task, got {type(offered).__name__}")


def refuse_unnamed(task: str) -> None:
    """Refuse to load by its name what a program gave to `train`: only the program has it."""
    if ":" not in task and task not in TASKS:
        raise ValueError(
            "expected a task that a config can name, got data or a task of a Python program "
            f"(task.name = {task!r}): call dovetail.train again with the same arguments, the same out= and resume=True"
        )


def default_cohort(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everyone in each of 30 rounds, as far as these settings leave it open."""
    found: dict[str, Any] = {}
    if not {"cohort", "cohort.kind", "cohort.size", "cohort.epochs"} & settings.keys():
        found["kind"] = "everyone"
    if not {"cohort", "cohort.rounds", "cohort.epochs"} & settings.keys():
        found["rounds"] = _ROUNDS
    return found


def default_server(dataset: Dataset, settings: Mapping[str, Any], *, own: bool) -> dict[str, Any]:
    """A step at which squared loss does not diverge on inputs in [-1, 1], where labels are numbers and nothing is set.

    Nothing for a model or a loss of one's `own`.

    With d inputs, a linear model's loss has a second derivative of at most 2 (1 + d): steps below 1 / (1 + d) converge.
    """
    if own or dataset.target != "number" or any(key.partition(".")[0] in ("server", "client") for key in settings):
        return {}
    return {"learning_rate": 1 / (2 + math.prod(dataset.inputs.shape[1:]))}


def _sentence(call: str, got: str) -> str:
    asked = "target=, what to predict, user=, whose a row is, and test_share= or test="
    return f"expected a Dataset, made by {call} with {asked}, got {got}"
