"""Training in deployed parties, from a config: the first model, how a user trains, how good a model is.

It is the deployed counterpart of the simulation's engine: the same tasks, models and local updates, one user at a time.
Other frameworks need none of this: a client takes any function from a flat model to a flat update, an analyzer any
first model.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data import Clients, Dataset, Model
from dovetail.engine.chunks import as_float
from dovetail.engine.rounds import first_parameters
from dovetail.experiment.config import Config
from dovetail.experiment.population import load_data_for_parties
from dovetail.learners import trees
from dovetail.learners.client import cross_entropy, local_update, visiting_order
from dovetail.learners.moments import Moments, moments_of
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.user.participation import Train

__all__ = ["Federation", "load_federation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Federation:
    """A model, who holds which records, and records to test with."""

    config: Config
    dataset: Dataset
    clients: Clients
    model: Model

    @property
    def initial(self) -> np.ndarray:
        """The first model, flat; or no moments yet, where those are what users send."""
        if self.moments is not None:
            return np.zeros(self.moments.dim, np.float32)
        return np.asarray(first_parameters(self.model, self.config.seed)[0])

    @functools.cached_property
    def moments(self) -> Moments | None:
        """What users send in place of a move of the model, if they do."""
        return moments_of(self.config.client, self.model)

    @property
    def dim(self) -> int:
        """How many numbers an update has."""
        return len(self.initial)

    def train(self, user: int) -> Train:
        """How one user trains: a function from a flat model to an update, on the user's own records."""
        inputs, labels, count = self._records_of_user(user)

        def train(model: np.ndarray) -> np.ndarray:
            key = jax.random.key(secrets.randbits(31))
            return np.asarray(self._compiled_training(jnp.asarray(model), inputs, labels, jnp.int32(count), key))

        return train

    def measure(self, user: int) -> Callable[[np.ndarray], dict[str, Any]]:
        """What one user measures: a function from a flat model to loss, accuracy, and how often each label occurs."""
        inputs, labels, count = self._records_of_user(user)
        counts = np.bincount(np.asarray(labels[:count]), minlength=self.dataset.num_classes).astype(np.float64)

        def measure(model: np.ndarray) -> dict[str, Any]:
            loss, accuracy = self._compiled_quality(jnp.asarray(model), inputs, labels, jnp.int32(count))
            return {"loss": float(loss), "accuracy": float(accuracy), "labels": counts}

        return measure

    def _records_of_user(self, user: int) -> tuple[jax.Array, jax.Array, int]:
        """A user's inputs and labels, in a power of two of rows (few programs serve all), and how many are its own."""
        if not 0 <= user < self.clients.num_clients:
            raise ValueError(f"user {user} has no data: this config has users 0 to {self.clients.num_clients - 1}")
        count = int(self._rows_by_client.counts[user])
        width = min(self._rows_by_client.max_records, 1 << max(0, count - 1).bit_length())
        rows = self._rows_by_client.rows(np.array([user]), width=width)[0]
        labels = jnp.asarray(self.dataset.labels[rows // self.dataset.views])
        return as_float(jnp.asarray(self.dataset.inputs[rows])), labels, count

    @functools.cached_property
    def _compiled_quality(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Mean loss and accuracy on one user's records, compiled once for all users of this process."""
        _, unravel = first_parameters(self.model, self.config.seed)

        @jax.jit
        def quality(
            model: jax.Array, inputs: jax.Array, labels: jax.Array, count: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = self.model.apply(unravel(model), inputs)
            weight = jnp.arange(len(labels)) < count
            mean = functools.partial(jnp.average, weights=weight)
            return mean(cross_entropy(logits, labels)), mean(jnp.argmax(logits, axis=1) == labels)

        return quality

    @functools.cached_property
    def _rows_by_client(self) -> Clients:
        """The rows of inputs of every client."""
        return self.clients.with_views(self.dataset.views)

    @functools.cached_property
    def _compiled_training(self) -> Callable[..., jax.Array]:
        """One user's training, compiled once for all users of this process."""
        _, unravel = first_parameters(self.model, self.config.seed)
        update = local_update(self.config.client, lambda params, batch: self.model.apply(unravel(params), batch))
        if (moments := self.moments) is not None:
            return jax.jit(lambda model, inputs, labels, count, key: moments(inputs, labels, count))

        def step(model: jax.Array, inputs: jax.Array, labels: jax.Array, count: jax.Array, key: jax.Array) -> jax.Array:
            order = visiting_order(count, len(labels), key=key)
            return update(model, inputs[order], labels[order], count)

        return jax.jit(step)

    def parameters_by_name(self, model: np.ndarray) -> dict[str, np.ndarray]:
        """The parameters of a flat model by name."""
        first, unravel = first_parameters(self.model, self.config.seed)
        if model.shape != first.shape:
            raise ValueError(
                f"this model has {len(model):,} parameters, and that of the config {len(first):,}: use the config that "
                "it was trained with"
            )
        return trees.arrays_by_name(unravel(jnp.asarray(model)))

    def learning(self) -> Learning:
        """What the analyzer needs: first model, server step and evaluation; of the records, those for testing alone."""
        _, unravel = first_parameters(self.model, self.config.seed)
        inputs = as_float(jnp.asarray(self.dataset.test_inputs))
        labels = jnp.asarray(self.dataset.test_labels)

        @jax.jit
        def score(model: jax.Array) -> jax.Array:
            return jnp.mean(jnp.argmax(self.model.apply(unravel(model), inputs), axis=1) == labels)

        return Learning(
            initial=self.initial,
            moments=self.moments,
            server=self.config.server.build(),
            evaluate=lambda model: float(score(jnp.asarray(model))),
        )


def load_federation(config: Config) -> Federation:
    """Load the data and the model of a config."""
    dataset, clients, model = load_data_for_parties(config)
    return Federation(config=config, dataset=dataset, clients=clients, model=model)
