"""A logistic regression on handwritten digits in PyTorch: model, data, training, test. Nothing about privacy here."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from dovetail import data


def load(dataset: str) -> data.Dataset:
    """The images: `digits` (8 x 8, bundled) or `mnist` (28 x 28, from the cache of `dovetail data`)."""
    return data.resolve(dataset).load(folder=None)


def model_for(data: data.Dataset) -> nn.Module:
    """A linear layer that starts from zero, so that everybody starts from the same model."""
    layer = nn.Linear(int(np.prod(data.inputs.shape[1:])), data.num_classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(nn.Flatten(), layer)


def share(data: data.Dataset, partition_id: int, num_partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The records of one node: every `num_partitions`-th one."""
    mine = slice(partition_id, None, num_partitions)
    return _images(data.inputs[mine]), torch.tensor(data.labels[mine], dtype=torch.long)


def train(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, *, learning_rate: float, epochs: int, batch: int
) -> None:
    """Plain SGD on a node's own records."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: data.Dataset) -> float:
    """The share of the public test images that the model names rightly."""
    named = model(_images(data.test_inputs)).argmax(dim=1)
    return float((named == torch.tensor(data.test_labels)).float().mean())


def _images(inputs: np.ndarray) -> torch.Tensor:
    return torch.tensor(inputs / 255 if inputs.dtype == np.uint8 else inputs, dtype=torch.float32)
