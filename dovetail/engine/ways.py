"""Which of the ways of `engine.chunks` is the fastest for clients of a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Model
from dovetail.engine import examples, linear
from dovetail.engine.sizes import SizeClass
from dovetail.learners.client import ClientUpdate
from dovetail.protocols import Fast

__all__ = ["Way", "best_ways"]

Way = Literal["general", "scaled", "linear", "moments", "clipped"]


def best_ways(
    model: Model,
    fast: Fast,
    state: Any,
    update: ClientUpdate,
    inputs: np.ndarray,
    *,
    classes: Sequence[SizeClass],
    diagnostics: bool,
) -> list[Way]:
    """The fastest way for each class of clients, whose records are like these; `state` is the protocol's first.

    Guarantees:
        What is collected adds up over classes: sums of updates in all of them, or in none.
    """
    dtype = np.float32 if inputs.dtype == np.uint8 else inputs.dtype
    held = [jax.ShapeDtypeStruct((one.width, *inputs.shape[1:]), dtype) for one in classes]
    ways = [_best_way(model, fast, state, update, one, diagnostics=diagnostics) for one in held]
    return ways if len(set(ways)) == 1 else ["scaled" if way == "general" else way for way in ways]


def _best_way(
    model: Model, fast: Fast, state: Any, update: ClientUpdate, held: jax.ShapeDtypeStruct, *, diagnostics: bool
) -> Way:
    if model.learner is not None:
        return "general"
    rescales, records = fast.scaling(jnp.ones(1), state) is not None, held.shape[0]
    if update.update == "moments":
        return "moments" if rescales and not diagnostics else "general"
    if model.constant is not None and linear.worthwhile(update, records) and rescales:
        return "linear"
    if diagnostics or update.local or fast.clipped_to(state) is None:
        return "general"
    return "clipped" if records == 1 or examples.worthwhile(model, held) else "general"
