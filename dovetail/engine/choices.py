"""Whether clients train one after the other or side by side on a device: measured where it is not plain.

Side by side, every matrix product has a batch of matrices. A CPU multiplies those more slowly than single ones, up to
five times, unless they are so small that the calls themselves are what costs. Where between that is depends on model
and machine, so a chunk of made-up clients is timed both ways, and the answer kept beside the compiled programs. No
record is read, and whatever is chosen changes the order of floating-point sums and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dovetail.data._base import Dataset, Loss, Model
from dovetail.engine.convolutions import convolves, in_eigen_order
from dovetail.engine.programs import program_folder
from dovetail.learners.client import ClientUpdate, local_update

__all__ = ["trains_one_by_one"]

_LOG = logging.getLogger("dovetail")
_PLAIN = 2**12, 2**15  # parameters: below side by side is faster, above one after the other
_CLIENTS = 16  # that are timed
_MOST_RECORDS = 64
_REPEATS = 5


def trains_one_by_one(
    model: Model, parameters: Any, update: ClientUpdate, loss: Loss, dataset: Dataset, *, records: int
) -> bool:
    """Whether clients with so many records each train faster one after the other than side by side.

    Arguments:
        parameters: the model's first.
        dataset: whose records have the shapes and types to time with.
    """
    if jax.default_backend() != "cpu":
        return False
    record = jax.ShapeDtypeStruct((1, *dataset.inputs.shape[1:]), np.float32)
    if convolves(model.apply, parameters, record):
        return True  # side by side, they would be convolutions by groups
    dim = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    if not _PLAIN[0] <= dim < _PLAIN[1]:
        return dim >= _PLAIN[1]
    return _measure(model, parameters, update, loss, dataset, min(max(records, 1), _MOST_RECORDS))


def _measure(model: Model, parameters: Any, update: ClientUpdate, loss: Loss, dataset: Dataset, records: int) -> bool:
    """Whether a few clients whose records are zeros are faster so, as it was measured here before, or is now."""
    apply = in_eigen_order(model.apply)
    shape = (_CLIENTS, records)
    batch = (
        jnp.zeros((*shape, *dataset.inputs.shape[1:]), jnp.float32),
        jnp.zeros((*shape, *dataset.labels.shape[1:]), dataset.labels.dtype),
        jnp.full(_CLIENTS, records, jnp.int32),
    )

    def one_by_one(parameters: Any, *batch: jax.Array) -> jax.Array:
        train = local_update(update, apply, loss, own_steps=True)
        return jax.lax.map(lambda client: ravel_pytree(train(parameters, *client))[0], batch).sum(axis=0)

    def side_by_side(parameters: Any, *batch: jax.Array) -> jax.Array:
        train = local_update(update, apply, loss)
        updates = jax.vmap(lambda *client: ravel_pytree(train(parameters, *client))[0])(*batch)
        return updates.sum(axis=0)

    text = re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(one_by_one)(parameters, *batch)))
    name = hashlib.sha256(f"{jax.__version__} {text}".encode()).hexdigest()[:32]
    folder = program_folder()
    path = None if folder is None else folder / f"{name}.choice.json"
    if path is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json.loads(path.read_text(encoding="utf-8"))["one_by_one"])
    seconds = {way.__name__: _time(way, parameters, batch) for way in (one_by_one, side_by_side)}
    chosen = seconds["one_by_one"] < seconds["side_by_side"]
    _LOG.info("clients train %s: measured %s", "one by one" if chosen else "side by side", _in_words(seconds))
    if path is not None:
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"one_by_one": chosen, "seconds": seconds}), encoding="utf-8")
    return chosen


def _time(function: Callable[..., jax.Array], parameters: Any, batch: tuple[jax.Array, ...]) -> float:
    """The fewest seconds of a few calls, once compiled."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(parameters, *batch))
    best = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(parameters, *batch))
        best = min(best, time.perf_counter() - began)
    return best


def _in_words(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {1e3 * value:.2f} ms" for name, value in seconds.items())
