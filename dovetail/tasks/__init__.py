"""Data and models to train on: the registry of tasks, and how a task is found by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from dovetail import _validate
from dovetail.tasks import digits, fashion_mnist, mnist, mnist_writers, qmnist
from dovetail.tasks._base import Clients, Dataset, LoadData, Model, Task

__all__ = ["TASKS", "Clients", "Dataset", "LoadData", "Model", "Task", "resolve"]

TASKS: dict[str, Task] = {
    task.name: task for task in (digits.TASK, fashion_mnist.TASK, mnist.TASK, mnist_writers.TASK, qmnist.TASK)
}


def resolve(task: str | Task) -> Task:
    """The task of this name, or the object "module:name", imported from the working directory or the Python path."""
    if isinstance(task, Task):
        return task
    if ":" not in task:
        _validate.known("task", task, TASKS)
        return TASKS[task]
    module_name, _, name = task.partition(":")
    found = getattr(_import(module_name, task), name, None)
    if not isinstance(found, Task):
        kind = "no such name" if found is None else f"a {type(found).__name__}"
        raise ValueError(f"expected {name!r} in {module_name!r} to be a dovetail.tasks.Task, got {kind}")
    return found


def _import(module_name: str, task: str) -> object:
    """Import a user's module; whatever goes wrong in it is told in one sentence."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, and for good: the module may import its neighbours when it loads data
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module_name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"expected a task 'module:name' that imports, got {task!r} ({reason})") from error
