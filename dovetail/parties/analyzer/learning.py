"""The numbers of a training, as the analyzer keeps them: what messages add up to, and how the sums move the model.

A model with all that training needs to go on (the server's state, the protocol's) is a list of arrays, the parameters
first; the sums of a round are another one. `Learner` makes them and holds none of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.learners.moments import Moments
from dovetail.learners.server import Server
from dovetail.parties.common.measures import read_measures
from dovetail.parties.common.task import TrainingTask
from dovetail.shufflers import ShuffledReports
from dovetail.statements import Neighbors

__all__ = ["Learner", "Learning"]

_LARGEST_BLOCK = 1 << 23  # numbers that are expanded at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learning:
    """What is done with estimates: the first model, the server's step, and a score of a model, if any.

    Where users send `moments`, these stand in for the model until one is published, which is then of its own length.
    """

    initial: np.ndarray
    server: Server
    evaluate: Callable[[np.ndarray], float] | None = None
    moments: Moments | None = None


class Learner:
    """The protocol of a task between its messages and the server's step."""

    def __init__(self, task: TrainingTask, learning: Learning) -> None:
        if learning.initial.shape != (task.model_dim,):
            raise ValueError(f"expected a model of {task.model_dim} numbers, got shape={learning.initial.shape}")
        self._task = task
        self._protocol, self._cohort = task.build()
        self._shared = task.contribution() if task.aggregators else None
        self._sharing = task.sharing() if task.aggregators else None
        self._messages = None if task.aggregators else task.messages()
        self._dim, self._learning, moments = task.dim, learning, learning.moments
        std = None if moments is None else self._protocol.noise_std(self._cohort.size, task.dim)
        self._server = learning.server.for_rounds(task.rounds, moments=moments, noise_std=std)

    def initial_leaves(self) -> list[np.ndarray]:
        """The first model, and the states that training begins with."""
        return [self._learning.initial.astype(np.float32), *_arrays(self._first_states())]

    def zero_sums(self) -> list[np.ndarray]:
        """The sums of nobody's messages or contributions."""
        if self._sharing is not None:
            return self._sharing.read_sum(self._sharing.encode_sum(self._sharing.empty_sum(), None))
        return _arrays(self._empty_tally())

    def tally(self, slot: np.ndarray, body: np.ndarray) -> tuple[list[np.ndarray], int]:
        """The sums of messages, and how many of them no honest client sends; some at a time, if they are long."""
        at_a_time = max(1, _LARGEST_BLOCK // self._dim)
        total, refused = self.zero_sums(), 0
        for low in range(0, len(slot), at_a_time):
            shuffled, out_of_range = self._read(slot[low : low + at_a_time], body[low : low + at_a_time])
            leaves = jax.tree.leaves(self._protocol.tally(shuffled, self._dim))
            total = [a + np.asarray(b) for a, b in zip(total, leaves, strict=True)]
            refused += out_of_range
        return total, refused

    def step(
        self, before: Sequence[np.ndarray], sums: Sequence[np.ndarray], *, users: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The model after a round with these sums over so many users, from the one before it; and what was measured."""
        params, *leaves = [jnp.asarray(leaf) for leaf in before]
        server_state, protocol_state = jax.tree.unflatten(jax.tree.structure(self._first_states()), leaves)
        if self._shared is not None and self._sharing is not None:
            tally = self._shared.tally(self._sharing.unshard(sums), users)
        else:
            tally = jax.tree.unflatten(jax.tree.structure(self._empty_tally()), [jnp.asarray(leaf) for leaf in sums])
        size = self._divisor(users)
        estimate, protocol_state = self._protocol.estimate(tally, size, protocol_state, key=jax.random.key(0))
        found = self._measures_of(np.asarray(estimate), size)
        params, server_state = self._server.step(params, server_state, estimate[: self._task.model_dim])
        return _arrays((params, server_state, protocol_state)), found

    def _divisor(self, users: int) -> int:
        """What sums are divided by: the users who counted, if that number is public and the same for neighbours.

        It is released with every round. Where one user more or less makes neighbours it depends on their data, and the
        planned number stands for it; so it does where what is solved for takes the noise of the planned number.
        """
        same = self._protocol.relation is Neighbors.REPLACE_ONE and self._learning.moments is None
        return users if same else self._cohort.size

    def _measures_of(self, estimate: np.ndarray, size: int) -> dict[str, Any]:
        task = self._task
        if not task.measures:
            return {}
        std = self._protocol.noise_std(size, task.dim)
        clip_norm = getattr(self._protocol, "clip_norm", math.nan)
        return read_measures(task.measures, estimate[task.model_dim :], size=size, clip_norm=clip_norm, std=std)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a statement says of the model that is published in the end."""
        return self._server.notes

    def model_to_publish(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """The model to publish, if training ended here; users go on from the first of the leaves."""
        params, *rest = [jnp.asarray(leaf) for leaf in leaves]
        server_state, _ = jax.tree.unflatten(jax.tree.structure(self._first_states()), rest)
        return np.asarray(self._server.model_to_publish(params, server_state))

    def score(self, leaves: Sequence[np.ndarray]) -> float | None:
        """How good the model to publish is, if anybody can tell."""
        return None if self._learning.evaluate is None else self._learning.evaluate(self.model_to_publish(leaves))

    def _first_states(self) -> tuple[Any, Any]:
        params = jnp.asarray(self._learning.initial, jnp.float32)
        return self._server.init(params), self._protocol.init(self._dim)

    def _empty_tally(self) -> Any:
        size = 0 if self._messages is None else self._messages.size
        shuffled, _ = self._read(np.zeros(0, np.int64), np.zeros((0, size), np.uint8))
        return self._protocol.tally(shuffled, self._dim)

    def _read(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        if self._messages is None:
            raise ValueError("expected messages from shufflers, got a task with aggregators, who send sums")
        return self._messages.read(slot, body)


def _arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
