"""A task small enough to train in no time, also reachable as `tiny:TASK`."""

import dataclasses

import numpy as np

from dovetail.data import Dataset, Task


def load(*, folder=None):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400).astype(np.int32)
    inputs = (np.eye(3)[labels] + 0.3 * rng.normal(size=(400, 3))).astype(np.float32)
    return Dataset(
        inputs=inputs[:300], labels=labels[:300], test_inputs=inputs[300:], test_labels=labels[300:], num_classes=3
    )


def load_with_nan(*, folder=None):
    data = load()
    data.inputs[5, 1] = np.nan
    return Dataset(
        inputs=data.inputs,
        labels=data.labels,
        test_inputs=data.test_inputs,
        test_labels=data.test_labels,
        num_classes=3,
    )


TASK = Task(name="tiny", load=load, published=True)
POISONED = Task(name="poisoned", load=load_with_nan, published=True)


def load_with_subjects(*, folder=None):
    """Five records about each of 60 people."""
    data = load()
    return dataclasses.replace(data, subjects=np.random.default_rng(1).permutation(300).astype(np.int32) // 5)


TASK_WITH_SUBJECTS = Task(name="tiny-subjects", load=load_with_subjects, published=True)
