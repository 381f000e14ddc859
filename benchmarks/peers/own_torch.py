"""The PyTorch modules of `dovetail bench own` as Dovetail trains them."""

from collections.abc import Callable

import numpy as np
import own_modules
import own_workload

from dovetail.data import Dataset, Model
from dovetail.learners import torch as learner
from dovetail.learners.isolation import inspect_model


def model(name: str, dataset: Dataset) -> Model:
    """The module of a workload, inspected as before a training."""
    return inspect_model(learner.model(own_modules.network(name), device="cpu"), dataset)[0]


def clipped_sum(name: str, dataset: Dataset) -> Callable[[], list[np.ndarray]]:
    """The function that returns the sum of the clipped gradients of all records, one array for each parameter."""
    built = model(name, dataset)
    shapes = [(value.shape, value.numel()) for _, value in built.learner.trained_parameters]
    start = np.concatenate([value.detach().numpy().ravel() for _, value in built.learner.trained_parameters])
    counts = np.ones(len(dataset.labels), np.int32)

    def step() -> list[np.ndarray]:
        records = dataset.inputs[:, None], dataset.labels[:, None], counts
        total = built.learner.clipped_sum("cross_entropy", start, *records, clip_norm=own_workload.CLIP)
        return np.split(total, np.cumsum([size for _, size in shapes])[:-1])

    return step
