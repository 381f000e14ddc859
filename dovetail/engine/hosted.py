"""A round of a model that trains outside JAX: updates come from its learner, everything else is compiled as ever.

The learner is called between compiled programs, never from inside one: a callback waits for its arguments on threads
that the program itself holds, which is a deadlock on a machine with few cores. Chunk by chunk, records are gathered in
the order in which a JAX model would visit them, the learner makes the updates, and the protocol's own code takes them;
memory is one chunk of updates, unless the protocol needs every report at once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import ClippingLearner, HostLearner, Loss
from dovetail.engine.chunks import TALLY, ClientWork, Data, Keys, Work, Works, as_float
from dovetail.learners.client import ClientUpdate, private_step
from dovetail.mechanisms.gaussian import clip_factor, finite_or_zero
from dovetail.protocols.subjects import require_item_level

__all__ = ["HostRound"]


@dataclasses.dataclass(frozen=True, eq=False)
class HostRound:
    """A round as a function of the arguments of `Engine`'s compiled one, which it takes the place of.

    Arguments:
        classes: what clients of each size class do, which differs only in how many records they have.
        loss: what the learner trains with.
        faithful: whether the protocol needs every report at once.
        keys_of: from what is public about a round, and the secret key, to its keys.
        close_round: from what was collected or, with `faithful`, from every update, to the state after the round.

    Guarantees:
        The protocol sees the updates, the keys and the noise that it would see from a JAX model with these updates.
    """

    classes: tuple[ClientWork, ...]
    loss: str | Loss
    faithful: bool
    keys_of: Callable[..., Keys]
    close_round: Callable[..., Any]

    @property
    def clients(self) -> ClientWork:
        """What clients of all size classes do alike, which is all but gathering their records."""
        return self.classes[0]

    def __call__(self, training: Any, data: Data, works: Works, used: Any, public: Any, secret: Any) -> Any:
        """The state after a round.

        Arguments:
            works: the users of each size class, arrays of shape (chunks, 1, chunk, ...).
            used: for each class, how many of its chunks hold anybody; the others are left out where that is allowed.
        """
        keys = self._compiled_keys(public, secret)
        protocol = self.clients.protocol
        params = np.asarray(training.params)
        norms = None
        chunks = [
            (number, jax.tree.map(lambda leaf, at=i: leaf[at, 0], work))
            for number, work in enumerate(works)
            for i in range(
                len(work[0]) if self.faithful or protocol.needs_norms else max(number == 0, int(used[number]))
            )
        ]
        if protocol.needs_norms:
            parts = [
                self._compiled_norms(updates, ids)
                for updates, ids in self._updates_by_chunk(params, data, chunks, keys)
            ]
            norms = jnp.concatenate(parts)
        state = protocol.prepare(training.protocol, noise_scale=public.noise_scale, norms=norms)
        if self.faithful:
            every = [updates for updates, _ in self._updates_by_chunk(params, data, chunks, keys)]
            ids = jnp.concatenate([part[0] for _, part in chunks])
            return self._compiled_close_round(training, state, jnp.concatenate(every), ids, public, keys)
        if self.clients.strategy == "clipped":
            collected = self._clipped_sums_by_chunk(params, state, data, chunks, keys)
        else:
            every_chunk = self._updates_by_chunk(params, data, chunks, keys)
            collected = (self._compiled_collect(updates, ids, state, keys) for updates, ids in every_chunk)
        total = functools.reduce(self._compiled_add, collected)
        return self._compiled_close_round(training, state, self._compiled_finish(total, keys), None, public, keys)

    def _updates_by_chunk(
        self, params: np.ndarray, data: Data, chunks: list[tuple[int, Work]], keys: Keys
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """For each chunk the updates (chunk, dim), zero where they were not finite, and the users that they are of.

        `chunks` are pairs: the number of a size class, and the users of a chunk with the records of their private
        steps.
        """
        for number, (ids, items) in chunks:
            if self.clients.protocol.private_steps:
                yield self._compiled_finite(self._private_updates(params, data, ids, items, keys)), ids
            else:
                records = self._compiled_gathers[number](data, ids, keys.order)
                arguments = records if self._shares_device else map(np.asarray, records)
                yield self._compiled_finite(self._learner_updates(self.clients.update, params, *arguments)), ids

    def _clipped_sums_by_chunk(
        self, params: np.ndarray, state: Any, data: Data, chunks: list[tuple[int, Work]], keys: Keys
    ) -> Iterator[Any]:
        """For each chunk what `ClientWork.collect` returns: the sum of clipped updates, and the number of users."""
        clip_norm = float(cast(float, self.clients.fast.clip_norm_at(state)))
        for number, (ids, _) in chunks:
            records = self._compiled_gathers[number](data, ids, keys.order)
            arguments = records if self._shares_device else map(np.asarray, records)
            total = self._clipped_gradients(params, *arguments, clip_norm=clip_norm)
            yield (-jnp.asarray(total), jnp.sum(ids >= 0).astype(jnp.float32)), None

    def _clipped_gradients(self, params: np.ndarray, *records: Any, clip_norm: float) -> Any:
        """The clipped sum that the model's learner makes of the gradients of clients with these records."""
        learner = cast(ClippingLearner, self.clients.model.learner)
        return learner.clipped_sum(self.loss, params, *records, clip_norm=clip_norm)

    @property
    def _shares_device(self) -> bool:
        """Whether the learner computes where JAX does, so that records and updates need not pass through the host."""
        return cast(HostLearner, self.clients.model.learner).platform == jax.default_backend()

    def _learner_updates(self, settings: ClientUpdate, params: Any, inputs: Any, labels: Any, counts: Any) -> Any:
        """Updates (clients, dim) of the model's learner for these records, checked for their shape."""
        learner = cast(HostLearner, self.clients.model.learner)
        updates = learner.updates(settings, self.loss, params, inputs, labels, counts)
        updates = updates if isinstance(updates, jax.Array) else np.asarray(updates, np.float32)
        if updates.shape != (len(counts), len(params)):
            raise ValueError(
                f"expected updates of shape {(len(counts), len(params))} from the learner of "
                f"model {self.clients.model.name!r}, got {updates.shape}"
            )
        return updates

    def _private_updates(self, params: np.ndarray, data: Data, ids: jax.Array, items: Any, keys: Keys) -> np.ndarray:
        """Updates of clients whose noise is inside their steps; one client and one step at a time."""
        protocol = require_item_level(self.clients.protocol)
        move = jax.jit(
            private_step(
                learning_rate=self.clients.update.learning_rate, batch=cast(float, protocol.batch), std=protocol.std
            )
        )
        own = self.clients.step_keys(ids, keys)
        updates = []
        for rows, scales, key in zip(np.asarray(items.rows), items.noise_scale, own, strict=True):
            current = jnp.asarray(params)
            for row, scale, step_key in zip(rows, scales, jax.random.split(key, len(rows)), strict=True):
                total = self._clipped_sum(np.asarray(current), data, row, protocol.clip_norm)
                current = move(current, total, scale, step_key)
            updates.append(np.asarray(current) - params)
        return np.stack(updates)

    def _clipped_sum(self, params: np.ndarray, data: Data, row: np.ndarray, clip_norm: float) -> jax.Array:
        """The sum of the clipped gradients of the records whose numbers are in `row`, -1 where there is none.

        Each is minus the learner's update for a client with that one record.
        """
        at = jnp.maximum(row, 0)
        inputs, labels = np.asarray(as_float(data.inputs[at])), np.asarray(data.labels[at])
        present = (row >= 0).astype(np.int32)
        if isinstance(self.clients.model.learner, ClippingLearner):
            return jnp.asarray(
                self._clipped_gradients(params, inputs[:, None], labels[:, None], present, clip_norm=clip_norm)
            )
        single = self._learner_updates(ClientUpdate(), params, inputs[:, None], labels[:, None], present)
        return self._clip_and_add(single, present, clip_norm)

    @functools.cached_property
    def _clip_and_add(self) -> Callable[..., jax.Array]:
        """(updates of single records, which are present, clip norm) -> minus the sum of these, each clipped."""

        def clip_and_add(updates: jax.Array, present: jax.Array, clip_norm: float) -> jax.Array:
            kept = finite_or_zero(jnp.where(present[:, None] > 0, updates, 0.0))
            scale = clip_factor(jnp.linalg.norm(kept, axis=1), clip_norm)
            return -jnp.einsum("n,nd->d", scale, kept, precision=jax.lax.Precision.HIGHEST)

        return jax.jit(clip_and_add)

    @functools.cached_property
    def _compiled_gathers(self) -> list[Callable[..., tuple[jax.Array, jax.Array, jax.Array]]]:
        return [jax.jit(clients.gather) for clients in self.classes]

    @functools.cached_property
    def _compiled_finite(self) -> Callable[[Any], jax.Array]:
        return jax.jit(finite_or_zero)

    @functools.cached_property
    def _compiled_norms(self) -> Callable[..., jax.Array]:
        return jax.jit(lambda updates, ids: jnp.where(ids >= 0, jnp.linalg.norm(updates, axis=1), jnp.nan))

    @functools.cached_property
    def _compiled_collect(self) -> Callable[..., Any]:
        return jax.jit(self.clients.collect_updates)

    @functools.cached_property
    def _compiled_add(self) -> Callable[..., Any]:
        return jax.jit(lambda left, right: jax.tree.map(jnp.add, left, right))

    @functools.cached_property
    def _compiled_finish(self) -> Callable[..., Any]:
        def finish(total: Any, keys: Keys) -> Any:
            collected, raw = total
            key = jax.random.fold_in(keys.noise, TALLY)
            if self.clients.sums_updates:
                return self.clients.fast.tally_of_sum(*collected, key=key), raw
            return self.clients.fast.finish(collected, key=key), raw

        return jax.jit(finish)

    @functools.cached_property
    def _compiled_keys(self) -> Callable[..., Keys]:
        return jax.jit(self.keys_of)

    @functools.cached_property
    def _compiled_close_round(self) -> Callable[..., Any]:
        return jax.jit(self.close_round)
