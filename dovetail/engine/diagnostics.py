"""How large and how different the raw updates of a round were, which no noise hides and no statement covers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Diagnostics", "Seen", "diagnosed", "seen"]


class Seen(NamedTuple):
    """What adds up to diagnostics: the sum of the raw updates, the sum of their squared norms, how many."""

    total: jax.Array
    square: jax.Array
    clients: jax.Array


class Diagnostics(NamedTuple):
    """What the raw updates of a round were like, per parameter (Geyer Sec. 3); for simulations only.

    `variance` is the between-clients variance V_c, `scale` the update scale U_s: the mean square of the mean update.
    V_c is a difference in single precision: below a millionth of U_s it is rounding.
    """

    variance: jax.Array
    scale: jax.Array


def seen(updates: jax.Array, present: jax.Array) -> Seen:
    """What diagnostics are made of, for the clients that are there."""
    kept = jnp.where(present[:, None], updates, 0)
    return Seen(kept.sum(axis=0), jnp.sum(kept * kept), jnp.sum(present).astype(updates.dtype))


def diagnosed(raw: Seen, dim: int) -> Diagnostics:
    """The diagnostics of a round, from what was seen of all its clients."""
    count = jnp.maximum(raw.clients, 1)
    scale = jnp.sum((raw.total / count) ** 2)
    return Diagnostics(jnp.maximum(raw.square / count - scale, 0) / dim, scale / dim)
