"""Whether what trains a model sees one user at a time, and what its author has to vouch for otherwise.

A model in JAX is compiled: records are mapped over, and the program for one has no way to see another, unless it calls
back into Python, follows a batching rule of its own, or changes state that it shares. It never sees a batch of several
records, which would have as many as the largest user holds, and could tell everybody how many that is. A PyTorch
module is tried and, where that can be done, rid of all Python code but PyTorch's own (`learners.torch`). A function or
a learner of one's own is called with one client's records, or with those of many, and can do with them what it likes.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Dataset, HostLearner, Loss, Model
from dovetail.data.own_code import RecordSpec, escape_routes
from dovetail.learners import losses
from dovetail.learners.functions import FunctionLearner

__all__ = ["inspect_model", "map_over_records"]

_PROBES = 4


def inspect_model(
    model: Model, dataset: Dataset, *, records: bool = False, own_model: bool = True
) -> tuple[Model, tuple[str, ...]]:
    """Try a model on test records, which are public.

    Arguments:
        records: whether single records are protected, and not users.
        own_model: whether the model's code is from outside the package; if not, at most the loss is.

    Returns: the model as it is to train, and what the author of its code has to vouch for.

    Guarantees:
        Refuses by name what is seen to carry something from one user to another; with `records`, also what mixes the
        records of a batch, and in JAX always.
        If nothing is to be vouched for, a user's update depends on that user's records alone: not on how many others
        have, to whose number batches are filled up, either.
    """
    loss = losses.loss_for(model, dataset)
    learner = model.learner
    if learner is None:
        each = _map_over_records(model, loss, own_model=own_model)
        declared = _declarations_of_jax(model, loss, RecordSpec.of(dataset))
        if records or not declared:
            _refuse_mixing(model, each, loss, dataset)
        return each, declared
    if type(learner) is FunctionLearner:
        return model, learner.declarations
    if _is_torch(learner):
        inputs, labels = _probe_records(dataset)
        inspected, declared = learner.inspect(loss, inputs, labels, records=records)  # type: ignore[attr-defined]
        return _with_learner(model, inspected), declared
    name = type(learner).__name__
    return model, (f"the learner {name} computes each user's update from that user's records alone",)


def _is_torch(learner: HostLearner) -> bool:
    """Whether this is our own learner for PyTorch, which is imported only where somebody uses it."""
    module = sys.modules.get("dovetail.learners.torch")
    return module is not None and type(learner) is module.TorchLearner


def _with_learner(model: Model, learner: Any) -> Model:
    """The same model, trained by another learner."""
    return Model(name=model.name, init=model.init, apply=learner.outputs, loss=model.loss, learner=learner)


def _map_over_records(model: Model, loss: str | Loss, *, own_model: bool) -> Model:
    """The model with itself, if it is somebody else's (`own_model`), and its own loss applied record by record."""
    own = model.loss if isinstance(loss, str) else _map_loss(loss)
    return dataclasses.replace(model, apply=_map_records(model.apply) if own_model else model.apply, loss=own)


def map_over_records(model: Model) -> Model:
    """A model in JAX, applied to the records of a batch one at a time, as it is where it is trained."""
    return dataclasses.replace(model, apply=_map_records(model.apply))


def _map_records(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The model, applied to the records of a batch one at a time by `vmap`."""

    def alone(parameters: Any, inputs: Any) -> Any:
        if len(inputs) == 1:
            return apply(parameters, inputs)
        return jax.vmap(lambda record: apply(parameters, record[None])[0])(inputs)

    return functools.wraps(apply)(alone)


def _map_loss(loss: Loss) -> Loss:
    """The loss, applied to the records of a batch one at a time by `vmap`."""

    def alone(outputs: Any, labels: Any) -> Any:
        if len(labels) == 1:
            return loss(outputs, labels)
        return jax.vmap(lambda output, label: loss(output[None], label[None])[0])(outputs, labels)

    return functools.wraps(loss)(alone)


def _declarations_of_jax(model: Model, loss: str | Loss, spec: RecordSpec) -> tuple[str, ...]:
    """What the author of a JAX model or loss has to vouch for; nothing if its program for one record is closed.

    Only the program for one record is ever run. It is not closed if it, or its gradient, calls Python or foreign code,
    or has rules of its own for batches (`own_code.escape_routes`).
    """
    own = losses.loss_function(loss)
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((1, *spec.input_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((1, *spec.label_shape), np.dtype(spec.label_dtype))

    def total(parameters: Any, inputs: Any, labels: Any) -> jax.Array:
        return jnp.sum(own(model.apply(parameters, inputs), labels))

    ways_out = set(escape_routes(jax.make_jaxpr(total)(parameters, inputs, labels)))
    ways_out |= set(escape_routes(jax.make_jaxpr(jax.grad(total))(parameters, inputs, labels)))
    if not ways_out:
        return ()
    return (
        f"the model {model.name} or its loss, which leaves compiled code ({', '.join(sorted(ways_out))}), "
        "computes each user's update from that user's records alone",
    )


def _refuse_mixing(model: Model, each: Model, loss: str | Loss, dataset: Dataset) -> None:
    """Refuse what makes something else of a batch than of its records one at a time, which is how it is run.

    Filled up to the number of records of the largest user, a batch would otherwise tell everybody of that user.
    """
    inputs, labels = _probe_records(dataset)
    key = jax.random.key(0)
    leaves, structure = jax.tree.flatten(model.init(key))
    moved = [leaf + 0.1 * jax.random.normal(jax.random.fold_in(key, i), leaf.shape) for i, leaf in enumerate(leaves)]
    weights = jax.tree.unflatten(structure, moved)
    alone = jax.jit(each.apply)(weights, inputs)
    if not _is_close(jax.jit(model.apply)(weights, inputs), alone):
        raise ValueError(
            f"the output of model {model.name!r} for a record depends on the other records of a batch, or on how many "
            "there are: batches are filled up to the number of records of the largest user. A function "
            "update(parameters, records) gets one user's records as they are"
        )
    if isinstance(loss, str):
        return
    if not _is_close(jax.jit(loss)(alone, labels), jax.jit(losses.loss_function(_map_loss(loss)))(alone, labels)):
        raise ValueError(
            "the loss of a record depends on the other records of a batch, or on how many there are: it must be "
            "computed record by record"
        )


def _is_close(outputs: Any, expected: Any) -> bool:
    """The same numbers, up to how sums are rounded."""
    first, second = np.asarray(outputs, np.float64), np.asarray(expected, np.float64)
    if first.shape != second.shape:
        return False
    scale = np.abs(second[np.isfinite(second)]).max(initial=0)
    return np.allclose(first, second, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _probe_records(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Four test records as a model reads them, the last one unlike the others."""
    rows = np.arange(_PROBES) % len(dataset.test_labels)
    inputs, labels = dataset.test_inputs[rows].astype(np.float32), dataset.test_labels[rows].copy()
    if dataset.test_inputs.dtype == np.uint8:
        inputs /= 255
    if (inputs[3] == inputs[2]).all() or (inputs[3] == inputs[0]).all():
        inputs[3] = 1 - inputs[3]
    return inputs, labels
