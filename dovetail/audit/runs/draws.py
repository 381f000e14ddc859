"""Who takes part in a trial, by the way that users are drawn."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.events import FixedSize, Poisson

__all__ = ["joins", "roster"]


@functools.singledispatch
def joins(participation: Any, rows: int, *, key: jax.Array) -> jax.Array:
    """Which of so many rows take part: all, unless they are drawn."""
    return jnp.ones(rows, bool)


@joins.register(Poisson)
def _by_coins(participation: Poisson, rows: int, *, key: jax.Array) -> jax.Array:
    return jax.random.bernoulli(key, participation.prob, (rows,))


@joins.register(FixedSize)
def _so_many(participation: FixedSize, rows: int, *, key: jax.Array) -> jax.Array:
    return jax.random.permutation(key, rows) < participation.size


@functools.singledispatch
def roster(participation: Any, size: int) -> int:
    """The users of a trial whose rounds are of this size: as many, unless a part of more is drawn."""
    return size


@roster.register(FixedSize)
def _population(participation: FixedSize, size: int) -> int:
    return participation.population
