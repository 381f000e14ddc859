"""A device's share of a round: the chunks that were dealt to it, one after the other.

`work` is (chunks, 1, chunk, ...), the axis of length 1 being the device's own; `used` is how many chunks hold anybody.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.engine.chunks import TALLY, ClientWork, Data, Keys, Work
from dovetail.engine.devices import AXIS

__all__ = ["Share"]


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """What a device adds to a round, under `shard_map`; `clients` is what those of a chunk compute."""

    clients: ClientWork

    def tally(self, params: jax.Array, state: Any, data: Data, work: Work, used: jax.Array, *, keys: Keys) -> Any:
        """The tally of all clients of all devices, and what was seen of their raw updates."""

        def chunk(i: jax.Array | int) -> Any:
            return self.clients.collect(params, state, data, jax.tree.map(lambda leaf: leaf[i, 0], work), keys)

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: chunk(0)))
        add_chunk = lambda i, total: jax.tree.map(jnp.add, total, chunk(i))  # noqa: E731
        total, raw = jax.lax.psum(jax.lax.fori_loop(0, used, add_chunk, zero), AXIS)
        fast, key_tally = self.clients.fast, jax.random.fold_in(keys.noise, TALLY)
        if not self.clients.sums_updates:
            return fast.finish(total, key=key_tally), raw
        update, count = total
        return fast.tally_of_sum(update.ravel(), count, key=key_tally), raw

    def norms(self, params: jax.Array, state: Any, data: Data, work: Work, used: jax.Array, *, keys: Keys) -> jax.Array:
        """The norm of every update, of shape (chunks, 1, chunk); NaN where nobody is."""

        def chunk(part: Work) -> jax.Array:
            norms = jnp.linalg.norm(self.clients.updates(params, data, part, keys), axis=1)
            return jnp.where(part[0] >= 0, norms, jnp.nan)

        return jax.lax.map(chunk, jax.tree.map(lambda leaf: leaf[:, 0], work))[:, None]

    def updates(
        self, params: jax.Array, state: Any, data: Data, work: Work, used: jax.Array, *, keys: Keys
    ) -> jax.Array:
        """Faithful path: every update, of shape (chunks, 1, chunk, dim)."""
        parts = jax.tree.map(lambda leaf: leaf[:, 0], work)
        return jax.lax.map(lambda part: self.clients.updates(params, data, part, keys), parts)[:, None]
