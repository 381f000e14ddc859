"""Data and models to train on: the registry of tasks, and how a task is found by name."""

from __future__ import annotations

from typing import TypeGuard

from dovetail import _imports, _validate
from dovetail.data import adult, cifar10, digits, mnist, toxicity
from dovetail.data._base import (
    Clients,
    Dataset,
    HeldOut,
    HeldOutPeople,
    HostLearner,
    LoadData,
    Loss,
    Metric,
    Model,
    Target,
    Task,
)
from dovetail.data.own_code import RecordSpec

__all__ = [
    "TASKS",
    "Clients",
    "Dataset",
    "HeldOut",
    "HeldOutPeople",
    "HostLearner",
    "LoadData",
    "Loss",
    "Metric",
    "Model",
    "RecordSpec",
    "Target",
    "Task",
    "resolve",
]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        adult.TASK,
        cifar10.TASK,
        digits.TASK,
        mnist.FASHION_MNIST,
        mnist.MNIST,
        mnist.MNIST_WRITERS,
        mnist.QMNIST,
        toxicity.TASK,
    )
}


def resolve(task: str | Task) -> Task:
    """The task of this name, or the object "module:name", imported from the working directory or the Python path."""
    if isinstance(task, Task):
        return task
    if ":" not in task:
        _validate.known_name("task", task, TASKS)
        return TASKS[task]
    return _imports.import_named(task, what="task", kind="dovetail.data.Task", accept=_is_task)


def _is_task(value: object) -> TypeGuard[Task]:
    return isinstance(value, Task)
