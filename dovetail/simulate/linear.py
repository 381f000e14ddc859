"""Local training of a linear softmax model in its dual form: no client's gradient is ever formed.

Every local step moves the weights by a combination of the client's own features, W = W_0 - X^T A, with one row of A for
each record. Logits of later batches follow from the Gram matrix K = X X^T (plus constant^2 for the bias), the norm of
the update is sqrt(tr(A^T K A)), and the clipped sum over clients is one product features^T (scaled A).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from dovetail.federated.client import ClientUpdate

__all__ = ["add_scaled", "dual_update", "update_norms", "worthwhile"]

_MAX_RECORDS, _MAX_STEPS = 128, 64


def worthwhile(settings: ClientUpdate, records: int) -> bool:
    """Whether the dual form is the faster one: few records a client, few local steps."""
    return records <= _MAX_RECORDS and settings.num_steps(records) <= _MAX_STEPS


def dual_update(
    weights: jax.Array,
    constant: float,
    inputs: jax.Array,
    labels: jax.Array,
    counts: jax.Array,
    settings: ClientUpdate,
) -> tuple[jax.Array, jax.Array]:
    """Dual coefficients A (clients, records, classes) of every client's update, and their Gram matrices.

    `inputs` is (clients, records, features), in the order in which the records are visited; of each client's records
    only the first `counts` are real. The update is ``-[inputs, constant]^T A``.
    """
    clients, records, features = inputs.shape
    classes = weights.shape[1]
    flat = inputs.reshape(clients * records, features)
    start = (flat @ weights[:-1]).reshape(clients, records, classes) + constant * weights[-1]
    targets = jax.nn.one_hot(labels, classes, dtype=inputs.dtype)
    real = (jnp.arange(records) < counts[:, None]).astype(inputs.dtype)
    gram = jnp.einsum("nif,njf->nij", inputs, inputs) + constant**2

    size = settings.batch_size(records)
    rate = settings.learning_rate if settings.local else 1.0
    dual = jnp.zeros((clients, records, classes), inputs.dtype)
    for step in range(settings.num_steps(records)):
        first_pass = step < math.ceil(records / size)
        low = (step % math.ceil(records / size)) * size
        batch = slice(low, min(low + size, records))
        seen = slice(0, low if first_pass else records)
        moved = jnp.einsum("nij,njc->nic", gram[:, batch, seen], dual[:, seen]) if step else 0.0
        weight = real[:, batch] / jnp.maximum(real[:, batch].sum(axis=1, keepdims=True), 1.0)
        residual = (jax.nn.softmax(start[:, batch] - moved) - targets[:, batch]) * weight[..., None]
        if settings.mu:
            pulls = (real[:, batch].sum(axis=1) > 0)[:, None, None]
            dual = jnp.where(pulls, (1 - rate * settings.mu) * dual, dual)
        dual = dual.at[:, batch].add(rate * residual)
    return dual, gram


def update_norms(dual: jax.Array, gram: jax.Array) -> jax.Array:
    """The L2 norm of each client's update."""
    square = jnp.einsum("nic,nic->n", dual, jnp.einsum("nij,njc->nic", gram, dual))
    return jnp.sqrt(jnp.where(square < 0, 0.0, square))


def add_scaled(total: jax.Array, constant: float, inputs: jax.Array, dual: jax.Array, scale: jax.Array) -> jax.Array:
    """`total` plus every client's update times its scale."""
    clients, records, features = inputs.shape
    scaled = jnp.where(scale[:, None, None] == 0, 0.0, dual * scale[:, None, None])
    scaled = scaled.reshape(clients * records, -1)
    product = inputs.reshape(clients * records, features).T @ scaled
    return total - jnp.concatenate([product, constant * scaled.sum(axis=0, keepdims=True)])
