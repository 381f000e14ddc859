"""Users to attack: the updates of a whole population over several rounds.

`Population` is a model that needs no data: coordinates of power-law scale, partly the same in all of a user's rounds.
`gradients` takes them from a task: logistic regression, one record a user, the model moving by noiseless FedSGD.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate
from dovetail.data import Task, partition, resolve
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate, local_update

__all__ = ["Population", "gradients"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Population:
    """Users with made-up updates: coordinate j, counted from 1, is normal with standard deviation j^-scale_exponent.

    `persistence` is the share of its variance that a user keeps over all rounds; the rest is drawn anew in each. The
    defaults give about what MNIST's logistic regression does with one image per user, d = 7850 and k = 157: the most
    popular coordinate is among the k largest of 60 % of the users, and seven in ten of the k largest stay from one
    round to another. Unlike there, coordinates are independent.
    """

    users: int
    dim: int
    scale_exponent: float = 0.2
    persistence: float = 0.95

    def __post_init__(self) -> None:
        _validate.integer(users=self.users, dim=self.dim)
        _validate.at_least(4, users=self.users)
        _validate.at_least(2, dim=self.dim)
        _validate.non_negative(scale_exponent=self.scale_exponent)
        _validate.in_interval(0, 1, persistence=self.persistence)

    def updates(self, users: jax.Array, rounds: int, *, key: jax.Array) -> jax.Array:
        """The updates of these users, (users, rounds, dim)."""
        scale = jnp.arange(1, self.dim + 1, dtype=jnp.float32) ** -self.scale_exponent

        def one(user: jax.Array) -> jax.Array:
            own, fresh = jax.random.split(jax.random.fold_in(key, user))
            kept = math.sqrt(self.persistence) * jax.random.normal(own, (1, self.dim))
            return scale * (kept + math.sqrt(1 - self.persistence) * jax.random.normal(fresh, (rounds, self.dim)))

        return jax.vmap(one)(users)


def gradients(task: str | Task, *, users: int, rounds: int, learning_rate: float = 1.0, seed: int = 0) -> np.ndarray:
    """Updates of one-record users who all take part in every round of noiseless FedSGD: (users, rounds, dim).

    The model is logistic regression from zero, so `rounds` models are seen, each a step on.
    """
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    _validate.positive(learning_rate=learning_rate)
    dataset, model = models.build("logistic", resolve(task).load(folder=None))
    records = partition.one_record(len(dataset.labels), users=users, seed=seed).records[:, None]
    inputs = dataset.inputs[records] / np.float32(255 if dataset.inputs.dtype == np.uint8 else 1)
    first = model.init(jax.random.key(seed))
    update = local_update(ClientUpdate(), lambda params, x: model.apply(params.reshape(first.shape), x))
    everyone = jax.jit(jax.vmap(update, in_axes=(None, 0, 0, None)))
    params, seen = first.ravel(), []
    for _ in range(rounds):
        seen.append(np.asarray(everyone(params, inputs, dataset.labels[records], 1)))
        params = params + learning_rate * np.mean(seen[-1], axis=0)
    return np.stack(seen, axis=1)
