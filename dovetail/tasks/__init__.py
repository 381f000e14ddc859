"""Data and models to train on: the registry of tasks, and how a task is found by name."""

from __future__ import annotations

from dovetail import _imports, _validate
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
    found = _imports.load(task, what="task")
    if not isinstance(found, Task):
        kind = "no such name" if found is None else f"a {type(found).__name__}"
        module_name, _, name = task.partition(":")
        raise ValueError(f"expected {name!r} in {module_name!r} to be a dovetail.tasks.Task, got {kind}")
    return found
