"""A device's share of a round: the chunks that were dealt to it, one after the other.

For each size class of clients there is `work` of shape (chunks, 1, chunk, ...), the axis of length 1 being the device's
own, and a number in `used`: how many chunks hold anybody.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.engine import layers, sums
from dovetail.engine.chunks import TALLY, ClientWork, Data, Keys, Work, Works
from dovetail.engine.devices import AXIS

__all__ = ["Share"]


@dataclasses.dataclass(frozen=True, eq=False)
class Share:
    """What a device adds to a round, under `shard_map`; `classes` are what clients of each size class compute."""

    classes: tuple[ClientWork, ...]

    def tally(self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys) -> Any:
        """The tally of all clients of all devices, and what was seen of their raw updates."""

        def added(clients: ClientWork, work: Work, used: jax.Array) -> Any:
            if layers.serves(clients, work):
                return layers.added(clients, params, state, data, work, used, keys)

            def chunk(i: jax.Array | int) -> Any:
                return clients.collect(params, state, data, jax.tree.map(lambda leaf: leaf[i, 0], work), keys)

            none = sums.begin(jax.eval_shape(lambda: chunk(0)))
            return sums.finish(jax.lax.fori_loop(0, used, lambda i, total: sums.add(total, chunk(i)), none))

        first, *others = (added(*one) for one in zip(self.classes, works, used, strict=True))
        total, raw = jax.lax.psum(jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), first, *others), AXIS)
        clients, key_tally = self.classes[0], jax.random.fold_in(keys.noise, TALLY)
        if not clients.sums_updates:
            return clients.fast.finish(total, key=key_tally), raw
        update, count = total
        return clients.fast.tally_of_sum(update, count, key=key_tally), raw

    def norms(
        self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys
    ) -> tuple[jax.Array, ...]:
        """The norm of every update, of shape (chunks, 1, chunk) in each class; NaN where nobody is."""

        def chunk(clients: ClientWork, part: Work) -> jax.Array:
            norms = jnp.linalg.norm(clients.updates(params, data, part, keys), axis=1)
            return jnp.where(part[0] >= 0, norms, jnp.nan)

        return self._mapped(chunk, works)

    def updates(
        self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys
    ) -> tuple[jax.Array, ...]:
        """Faithful path: every update, of shape (chunks, 1, chunk, dim) in each class."""
        return self._mapped(lambda clients, part: clients.updates(params, data, part, keys), works)

    def _mapped(self, function: Callable[[ClientWork, Work], jax.Array], works: Works) -> tuple[jax.Array, ...]:
        return tuple(
            jax.lax.map(functools.partial(function, clients), jax.tree.map(lambda leaf: leaf[:, 0], work))[:, None]
            for clients, work in zip(self.classes, works, strict=True)
        )
