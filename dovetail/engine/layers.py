"""Clients with a model so large that each is a chunk of its own, on a CPU: no more passes over an update than it needs.

A vector of 1e7 parameters is 40 MB, more than a core's cache, so a round takes as long as its passes over memory:

- the model is cut into its layers once a round, not once for every client;
- an update is measured layer by layer as its gradients are. Where the tally is the sum of rescaled updates, each layer
  is added to the layer's sum in one pass, and no update is laid in a row;
- elsewhere its layers are copied into a row that all clients use in turn, which the protocol then reads.

Layers also have the shapes that XLA's loops are fastest with: those over one long axis, of a length that the cores do
not divide, test every number for the end and use no vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from dovetail._jax import materialize, materialize_into
from dovetail.engine.chunks import ClientWork, Data, Keys, Work
from dovetail.learners import trees
from dovetail.protocols import Fast

__all__ = ["applies_to", "sum_clients"]


def applies_to(clients: ClientWork, work: Work) -> bool:
    """Whether `sum_clients` is for this work: one client a chunk, on a CPU, no noise in its steps, no diagnostics."""
    trained = clients.moments is None and not clients.protocol.private_steps and not clients.diagnostics
    return clients.strategy in ("general", "scaled") and trained and work[0].shape[2] == 1 and _is_on_cpu()


def _is_on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def sum_clients(
    clients: ClientWork, params: jax.Array, state: Any, data: Data, work: Work, used: jax.Array, keys: Keys
) -> Any:
    """What `ClientWork.collect` would add up to over all chunks of one client each.

    Arguments:
        params: the flat vector of parameters.
        state: the protocol's state for this round.
        work: the users, (chunks, 1, 1).
        used: how many chunks hold anybody.

    Returns: what the protocol collects, or the sum of rescaled updates (dim,) and how many; and None for diagnostics.
    """
    layers = jax.lax.optimization_barrier(clients.unravel(params))
    train = clients.train_alone(data)

    def update(i: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
        """The user whose turn it is (-1: nobody), as an array of one; the update in layers; its squared norm."""
        ids = work[0][i, 0]
        rows, counts = clients.rows_of(data, ids, keys.order)
        delta = train(layers, rows[0], counts[0])
        square = sum((_squared_norm(leaf) for leaf in jax.tree.leaves(delta)), jnp.float32(0))
        return ids, delta, square

    if clients.sums_updates:
        count = jnp.sum(work[0] >= 0).astype(params.dtype)
        return (_sum_rescaled(clients, update, params, layers, state, used), count), None
    if _tally_is_sum(clients, state):
        return _sum_rescaled(clients, update, params, layers, state, used), None
    return _collect_in_turn(clients, update, params, state, used, keys), None


def _squared_norm(layer: jax.Array) -> jax.Array:
    """The sum of the squares, row by row: XLA may sum several axes by small tiles, which takes ten times as long."""
    rows = jnp.sum(layer * layer, axis=-1)
    return jnp.sum(jax.lax.optimization_barrier(rows))


def _tally_is_sum(clients: ClientWork, state: Any) -> bool:
    """Whether what the protocol collects is the sum of the rescaled updates itself, and not only of the same law."""
    own = type(clients.fast)
    if own.collect is not Fast.collect or own.tally_of_sum is not Fast.tally_of_sum:
        return False
    return clients.fast.scaling(jnp.ones(1), state) is not None


def _sum_rescaled(
    clients: ClientWork,
    update: Callable[[jax.Array], tuple[jax.Array, Any, jax.Array]],
    params: jax.Array,
    layers: Any,
    state: Any,
    used: jax.Array,
) -> jax.Array:
    """The sum (dim,) of the rescaled updates of all clients, added up layer by layer."""

    def add(i: jax.Array, total: Any) -> Any:
        ids, delta, square = update(i)
        norm = jnp.sqrt(square)
        counted = (ids[0] >= 0) & jnp.isfinite(square)
        scale = cast(jax.Array, clients.fast.scaling(jnp.where(counted, norm, 0)[None], state))[0]
        return jax.tree.map(lambda sum_, leaf: sum_ + jnp.where(counted, leaf, 0) * scale, total, delta)

    total = jax.lax.fori_loop(0, used, add, jax.tree.map(jnp.zeros_like, layers))
    return materialize(lambda row: trees.flatten_into(row, total), params.shape, params.dtype)


def _collect_in_turn(
    clients: ClientWork,
    update: Callable[[jax.Array], tuple[jax.Array, Any, jax.Array]],
    params: jax.Array,
    state: Any,
    used: jax.Array,
    keys: Keys,
) -> Any:
    """What the protocol collects from all clients, one after the other through one row of `dim` numbers."""

    def fill_row(row: jax.Array, delta: Any, square: jax.Array) -> jax.Array:
        finite = jnp.isfinite(square)
        return trees.flatten_into(row, jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0), delta))

    def add(i: jax.Array, carried: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        total, row = carried
        ids, delta, square = update(i)
        row = materialize_into(row, lambda row: fill_row(row, delta, square))
        return clients.fast.collect_onto(total, row[None], ids >= 0, state, **clients.keys_and_budgets(ids, keys)), row

    row = jnp.zeros(params.shape, params.dtype)
    ids = jnp.zeros(1, jnp.int32)
    like = jax.eval_shape(lambda: clients.collect_updates(row[None], ids, state, keys)[0])
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return jax.lax.fori_loop(0, used, add, (zero, row))[0]
