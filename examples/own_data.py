"""Your own data and your own model: what Dovetail needs to know about them, and one call that trains.

The data here is synthetic (two moons, split among 300 people with a few points each); replace it by your own arrays. A
model is two JAX functions: one draws parameters, one maps parameters and inputs to logits.

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
    """The records as arrays; `folder` is `task.folder` of the config, for data in files."""
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
        subjects=rng.integers(0, PEOPLE, 2000).astype(np.int32),  # whom each record is about
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
    """Everybody takes part in each of 40 rounds; the noise is calibrated to (4, 1e-5) for all records of a person."""
    return dovetail.train(
        TASK,
        protocol="dp_fl",
        eps=4.0,
        delta=1e-5,
        settings={
            "task.partition": "by-user",  # every subject is one user; "one-record" would make every record one user
            "cohort.kind": "everyone",
            "cohort.rounds": 40,
            "client.update": "fedavg",
            "client.learning_rate": 0.5,
            "protocol.clip_norm": 0.5,
        },
    )


# [end]
def main() -> None:
    """Train, and print the accuracy and the privacy statement."""
    result = train()
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"test accuracy {result.accuracy:.1%} after {result.rounds} rounds")
    console.print(str(result.statement))


if __name__ == "__main__":
    main()
