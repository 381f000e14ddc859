"""Your own data and your own model: what Dovetail needs to know of them, and one call that trains.

The data here are made up (two moons, seen by 300 people with a few points each); put your own arrays in their place. A
model is two functions of JAX: one draws parameters, one maps parameters and inputs to logits.

    python examples/own_data.py
"""

# [imports]
from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import dovetail
from dovetail.data import Dataset, Model, Task

PEOPLE, HIDDEN = 300, 16


# [data]
def load(*, folder: Path | None = None) -> Dataset:
    """The records as arrays; `folder` is `task.folder` of a config, for data that lie in files."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 3000)
    angle = rng.uniform(0, np.pi, 3000)
    moons = np.stack([np.cos(angle) + labels, np.where(labels, 0.5 - np.sin(angle), np.sin(angle))], axis=1)
    inputs = (moons + rng.normal(0, 0.15, moons.shape)).astype(np.float32)
    return Dataset(
        inputs=inputs[:2000],
        labels=labels[:2000].astype(np.int32),
        test_inputs=inputs[2000:],
        test_labels=labels[2000:].astype(np.int32),
        num_classes=2,
        subjects=rng.integers(0, PEOPLE, 2000).astype(np.int32),  # whose record each one is
    )


# [model]
def init(key: jax.Array) -> dict[str, jax.Array]:
    """Any tree of arrays."""
    one, two = jax.random.split(key)
    return {
        "in": jax.random.normal(one, (3, HIDDEN)),
        "out": jax.random.normal(two, (HIDDEN, 2)) / HIDDEN**0.5,
    }


def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
    """Logits, (records, classes), for a batch of inputs."""
    with_one = jnp.pad(inputs, ((0, 0), (0, 1)), constant_values=1.0)
    return jnp.tanh(with_one @ params["in"]) @ params["out"]


TASK = Task(name="moons", load=load, model=Model(name="one hidden layer", init=init, apply=apply))


# [train]
def train() -> dovetail.Result:
    """Everybody trains in each of 40 rounds; the noise is what (4, 1e-5) for a whole person needs."""
    return dovetail.train(
        TASK,
        protocol="dp_fl",
        eps=4.0,
        delta=1e-5,
        settings={
            "task.partition": "writers",  # a user is one of `subjects`; "one-record" would make every record a user
            "cohort.kind": "everyone",
            "cohort.rounds": 40,
            "client.update": "fedavg",
            "client.learning_rate": 0.5,
            "protocol.clip_norm": 0.5,
        },
    )


# [end]
def main() -> None:
    """Train, and say what was learned and what it cost."""
    result = train()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"test accuracy {result.accuracy:.1%} after {result.rounds} rounds")
    console.print(str(result.statement))


if __name__ == "__main__":
    main()
