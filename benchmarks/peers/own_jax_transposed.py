"""The MLP of `dovetail bench own` in plain JAX with its weights the other way round, as PyTorch has them: `x @ W.T`."""

from collections.abc import Callable
from typing import Any

import jax
import own_jax

from dovetail.data import Dataset


def clipped_sum(name: str, dataset: Dataset) -> Callable[[], list[jax.Array]]:
    """The function that returns the sum of the clipped gradients of all records, one array for each parameter."""
    return own_jax.compile_sum(mlp, own_jax.first_layers(name, transposed=False), dataset)


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(x @ layers[0]["weight"].T + layers[0]["bias"])
    return hidden @ layers[1]["weight"].T + layers[1]["bias"]
