"""What an adversary that knows all data but the coins can work out of a training that it watches.

At every released model it computes, with the clients' own code, what everybody adds: the sum of the real users' clipped
updates, and what each canary would add in either of its worlds. Who takes part is used where that is public (disjoint
batches, everyone) or independent of the canaries (other users and records of a Poisson sample), and nowhere else: a
canary of a secret sample counts with the probability that it joins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dovetail.audit.training.canaries import Canaries
from dovetail.experiment.preparation import Plan
from dovetail.learners import losses
from dovetail.learners.client import local_update
from dovetail.learners.server import Ridge
from dovetail.statements import Unit

__all__ = ["Attacker", "AttackerView"]

_CHUNK = 256  # users whose updates are computed together, at most,
_CHUNK_FLOATS = 2**24  # and the numbers that they may need


class AttackerView(NamedTuple):
    """A released round (`number`, from 0): its planned users, the flat model before and after, and states before.

    `state` is what is public of the protocol's, `server` the server optimizer's.
    """

    number: int
    users: np.ndarray
    before: Any
    after: np.ndarray
    state: Any
    server: Any


class Attacker:
    """Knows the plan, all data and both worlds of every canary; not the coins.

    Guarantees:
        Where who takes part is public, others' sum and the canaries' worlds explain a released sum up to its noise.
    """

    def __init__(self, plan: Plan, hidden: Canaries) -> None:
        self._plan = plan
        self._hidden = hidden
        self._inputs = plan.dataset.inputs
        self._labels = plan.dataset.labels
        self._views = plan.dataset.views
        self.server = plan.engine.server
        self._first_canary = len(self._labels) - hidden.num_records
        _, self._unravel = ravel_pytree(plan.model.init(jax.random.key(0)))
        moments = plan.engine.moments
        if plan.model.learner is not None:
            raise ValueError(f"only trainings of models in JAX can be audited, and {plan.model.name!r} is none")
        self._loss = losses.loss_function(plan.engine.loss)
        update_of = (
            local_update(plan.config.client, self._logits, self._loss)
            if moments is None
            else lambda _, *held: moments(*held)
        )
        self._update_of = jax.vmap(update_of, (None, 0, 0, 0))
        self._clipped = jax.jit(self._clipped_updates_on_rows)

    def divisor(self, view: AttackerView) -> float:
        """What the noised sum of updates in this round is divided by to give the estimate that the server steps by."""
        return self._plan.sampler.sum_divisor(view.number, learning_rate=self._plan.config.client.learning_rate)

    def released_sum(self, view: AttackerView) -> np.ndarray:
        """The noised sum of updates, (dim,), read off the models before and after a step of SGD, momentum or not.

        The step is linear in the estimate: what a step by 0 and by 1 would do gives its offset and its slope.
        """
        nothing = jnp.zeros_like(view.before)
        without, _ = self.server.step(view.before, view.server, nothing)
        slope, _ = self.server.step(nothing, self.server.init(nothing), nothing + 1)
        moved = view.after.astype(np.float64) - np.asarray(without)
        return moved / np.asarray(slope, np.float64) * self.divisor(view)

    def noise_std(self, view: AttackerView) -> float:
        """The standard deviation of the noise on a coordinate of that round's sum."""
        return self._plan.sampler.noise_std(view.number, dim=self._plan.engine.dim)

    def canary_weights(self, view: AttackerView) -> np.ndarray:
        """How many times each canary's update is in the sum, (canaries,); on average where draws are secret."""
        hidden = self._hidden
        schedule = self._plan.sampler.schedule
        if hidden.unit is not Unit.USER or schedule.kind in ("fixed", "poisson", "secret"):
            return np.full(hidden.count, self._plan.sampler.expected_times_in_sum(view.number, records=hidden.items))
        return np.isin(schedule.population - hidden.count + np.arange(hidden.count), view.users).astype(float)

    def sum_of_others(self, view: AttackerView) -> np.ndarray:
        """The sum of the real users' or records' clipped updates, (dim,).

        Where a fixed number of users is drawn, who is drawn would tell of the canaries: it is a mean over draws.
        """
        schedule = self._plan.sampler.schedule
        users = view.users
        weight = 1.0
        if self._hidden.unit is Unit.USER:
            real = schedule.population - self._hidden.count
            users = users[users < real]
            if schedule.kind == "fixed":
                users, weight = np.arange(real), schedule.size_of(view.number) / schedule.population
        rows, counts = self._plan.sampler.rows_in_sum(view.number, users)
        theirs = rows[:, 0] < self._first_canary
        return weight * self._sum_updates(view, rows[theirs], counts[theirs])

    def mean_and_half_difference_of_worlds(self, view: AttackerView) -> tuple[np.ndarray, np.ndarray]:
        """Half the sum and half the difference of each canary's updates in its two worlds, (canaries, dim)."""
        rows, other = self._hidden.record_numbers(len(self._labels))
        first = self._clipped_updates(view, rows)
        second = np.zeros_like(first) if other is None else self._clipped_updates(view, other)
        return (first + second) / 2, (first - second) / 2

    def losses(self, params: Any, rows: np.ndarray) -> np.ndarray:
        """The loss on each of these records of a model with these parameters; of moments, the model made of them."""
        params = jnp.asarray(params)
        params = self.server.model_to_publish(params, ()) if isinstance(self.server, Ridge) else params
        logits = self._logits(params, self._inputs[rows * self._views])
        return np.asarray(self._loss(logits, self._labels[rows]))

    def _clipped_updates(self, view: AttackerView, rows: np.ndarray) -> np.ndarray:
        """The clipped updates, (rows, dim), of users who hold one of these records each."""
        counts = np.ones(len(rows), np.int32)
        return np.asarray(self._clipped(view.before, view.state, *self._training_rows(rows[:, None], counts)))

    def _training_rows(self, index: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What users train on: inputs, labels, and how many rows of them count.

        Arguments:
            index: the records of each user, (users, records), padded with any.
            counts: how many of them count, (users,).
        """
        rows = (index[:, :, None] * self._views + np.arange(self._views)).reshape(len(index), -1)
        return self._inputs[rows], self._labels[rows // self._views], counts * self._views

    def _sum_updates(self, view: AttackerView, index: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """The sum of the clipped updates, (dim,), a chunk of users at a time; arguments as in `_training_rows`."""
        total = np.zeros(self._plan.engine.dim)
        floats = index.shape[1] * self._views * self._inputs[0].size
        size = max(1, min(_CHUNK, _CHUNK_FLOATS // (floats + 2 * self._plan.engine.dim)))
        for low in range(0, len(counts), size):
            short = size - len(counts[low : low + size])
            rows = np.pad(index[low : low + size], ((0, short), (0, 0)))
            real = np.pad(counts[low : low + size], (0, short))
            total += np.asarray(
                jnp.sum(self._clipped(view.before, view.state, *self._training_rows(rows, real)), axis=0)
            )
        return total

    def _clipped_updates_on_rows(self, params: Any, state: Any, inputs: Any, labels: Any, counts: Any) -> jax.Array:
        """The updates, (users, dim), of users who train on these rows, clipped as the protocol clips them."""
        return self._plan.sampler.protocol.clip_update(self._update_of(params, inputs, labels, counts), state)

    def _logits(self, params: jax.Array, inputs: Any) -> jax.Array:
        """The model's outputs for these inputs; `params` are flat."""
        return self._plan.model.apply(self._unravel(params), inputs)
