"""The model that a training starts from, as the analyzer reads it: `python first_model.py digits first-model.npy`."""

from __future__ import annotations

import sys

import numpy as np
from flower_mnist import task
from torch.nn.utils import parameters_to_vector

dataset, path = sys.argv[1:]
model = parameters_to_vector(task.model_for(task.load(dataset)).parameters()).detach().numpy()
np.save(path, model)
print(len(model))  # noqa: T201 - what `dovetail task new --dim` is to be told
