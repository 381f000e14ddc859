"""The arithmetic of the analyzer: how messages are added up, and how the sums of a round move the model.

A model with all that training needs to go on (the server's state, the protocol's) is a list of arrays, its *leaves*,
the parameters first; the sums of a round are another list. `Learner` computes both and keeps neither.
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
    """What is done with estimates.

    Arguments:
        initial: the first model, flat.
        server: the step from an estimate to the next model.
        evaluate: the score of a flat model; None: nobody can tell.
        moments: what users send in place of a move of the model, if they do. Moments stand in for the model until one
            is published, which then has a length of its own.
    """

    initial: np.ndarray
    server: Server
    evaluate: Callable[[np.ndarray], float] | None = None
    moments: Moments | None = None


class Learner:
    """The protocol of a task, from messages to the next model; it keeps no state."""

    def __init__(self, task: TrainingTask, learning: Learning) -> None:
        if learning.initial.shape != (task.model_dim,):
            raise ValueError(
                f"the task trains a flat model of {task.model_dim} numbers, and the initial one has shape "
                f"{learning.initial.shape}"
            )
        self._task = task
        self._protocol, self._cohort = task.build()
        self._contribution = task.contribution() if task.aggregators else None
        self._sharing = task.sharing() if task.aggregators else None
        self._messages = None if task.aggregators else task.messages()
        self._dim = task.dim
        self._learning = learning
        moments = learning.moments
        std = None if moments is None else self._protocol.noise_std(self._cohort.size, task.dim)
        self._server = learning.server.for_rounds(task.rounds, moments=moments, noise_std=std)

    def initial_leaves(self) -> list[np.ndarray]:
        """The leaves that training begins with: the first model, and the first states of server and protocol."""
        return [self._learning.initial.astype(np.float32), *_leaves_as_arrays(self._first_states())]

    def zero_sums(self) -> list[np.ndarray]:
        """The sums of no messages or contributions at all."""
        if self._sharing is not None:
            return self._sharing.read_sum(self._sharing.encode_sum(self._sharing.empty_sum(), None))
        return _leaves_as_arrays(self._empty_tally())

    def tally(self, slot: np.ndarray, body: np.ndarray) -> tuple[list[np.ndarray], int]:
        """Add up messages, a few at a time if they are long.

        Arguments:
            slot: the slot of each message.
            body: the bytes of each message, one row each.

        Returns: the sums, and how many messages were left out because no honest client sends them.
        """
        at_a_time = max(1, _LARGEST_BLOCK // self._dim)
        total = self.zero_sums()
        refused = 0
        for low in range(0, len(slot), at_a_time):
            shuffled, out_of_range = self._read_messages(slot[low : low + at_a_time], body[low : low + at_a_time])
            leaves = jax.tree.leaves(self._protocol.tally(shuffled, self._dim))
            total = [a + np.asarray(b) for a, b in zip(total, leaves, strict=True)]
            refused += out_of_range
        return total, refused

    def step(
        self, before: Sequence[np.ndarray], sums: Sequence[np.ndarray], *, users: int
    ) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The leaves after a round.

        Arguments:
            before: the leaves before it.
            sums: the sums of its messages or contributions.
            users: how many users counted.

        Returns: the new leaves, and the task's measures by name.
        """
        params, *leaves = [jnp.asarray(leaf) for leaf in before]
        server_state, protocol_state = jax.tree.unflatten(jax.tree.structure(self._first_states()), leaves)
        if self._contribution is not None and self._sharing is not None:
            tally = self._contribution.tally(self._sharing.unshard(sums), users)
        else:
            tally = jax.tree.unflatten(jax.tree.structure(self._empty_tally()), [jnp.asarray(leaf) for leaf in sums])
        size = self._divisor_of_sums(users)
        estimate, protocol_state = self._protocol.estimate(tally, size, protocol_state, key=jax.random.key(0))
        measures = self._measures_of(np.asarray(estimate), size)
        params, server_state = self._server.step(params, server_state, estimate[: self._task.model_dim])
        return _leaves_as_arrays((params, server_state, protocol_state)), measures

    def _divisor_of_sums(self, users: int) -> int:
        """What sums are divided by: the number of users who counted, where neighbouring data has the same number.

        That number is released with every round. Where neighbours differ by one user it depends on their data, and the
        planned number stands in for it, as it does where the model is solved for with the noise of the planned number.
        """
        same = self._protocol.relation is Neighbors.REPLACE_ONE and self._learning.moments is None
        return users if same else self._cohort.size

    def _measures_of(self, estimate: np.ndarray, size: int) -> dict[str, Any]:
        """The task's statistics, which stand behind the model in the estimate of a round with `size` users."""
        task = self._task
        if not task.measures:
            return {}
        std = self._protocol.noise_std(size, task.dim)
        clip_norm = getattr(self._protocol, "clip_norm", math.nan)
        return read_measures(task.measures, estimate[task.model_dim :], size=size, clip_norm=clip_norm, std=std)

    @property
    def notes(self) -> tuple[str, ...]:
        """Assumptions about the published model, for the statement."""
        return self._server.notes

    def model_to_publish(self, leaves: Sequence[np.ndarray]) -> np.ndarray:
        """The model to publish if training ended with these leaves; users would go on from the first of them."""
        params, *rest = [jnp.asarray(leaf) for leaf in leaves]
        server_state, _ = jax.tree.unflatten(jax.tree.structure(self._first_states()), rest)
        return np.asarray(self._server.model_to_publish(params, server_state))

    def score(self, leaves: Sequence[np.ndarray]) -> float | None:
        """The score of the model to publish; None without an evaluation."""
        return None if self._learning.evaluate is None else self._learning.evaluate(self.model_to_publish(leaves))

    def _first_states(self) -> tuple[Any, Any]:
        params = jnp.asarray(self._learning.initial, jnp.float32)
        return self._server.init(params), self._protocol.init(self._dim)

    def _empty_tally(self) -> Any:
        size = 0 if self._messages is None else self._messages.size
        shuffled, _ = self._read_messages(np.zeros(0, np.int64), np.zeros((0, size), np.uint8))
        return self._protocol.tally(shuffled, self._dim)

    def _read_messages(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        if self._messages is None:
            raise ValueError("this task has aggregators, which send sums; only shufflers send messages to tally")
        return self._messages.read(slot, body)


def _leaves_as_arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
