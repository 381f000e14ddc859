"""Whether what trains a model sees one user at a time, and what its author has to vouch for otherwise.

A model in JAX is compiled: clients are mapped over, and the program for one has no way to see another, unless it calls
back into Python, follows a batching rule of its own, or changes state that it shares. A PyTorch module is tried
and, where that can be done, rid of all Python code but PyTorch's own (`learners.torch`). A function or a learner of
one's own is called with one client's records, or with those of many, and can do with them what it likes.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Dataset, HostLearner, Loss, Model
from dovetail.data.own_code import RecordSpec, escapes
from dovetail.learners import losses
from dovetail.learners.functions import FunctionLearner

__all__ = ["inspected"]

_PROBES = 4


def inspected(model: Model, dataset: Dataset, *, records: bool = False) -> tuple[Model, tuple[str, ...]]:
    """A model as it is to train, and what the author of its code has to vouch for.

    It is tried on test records, which are public. With `records`, single records are protected and not users.

    Guarantees:
        Refuses by name what is seen to carry something from one user to another; with `records`, also what mixes the
        records of a batch.
        If nothing is to be vouched for, a user's update depends on that user's records alone.
    """
    loss = losses.chosen(model, dataset)
    learner = model.learner
    if learner is None:
        if records:
            _refuse_mixing(model, dataset)
        return model, _declared_of_jax(model, loss, RecordSpec.of(dataset))
    if type(learner) is FunctionLearner:
        return model, learner.declared
    if _is_torch(learner):
        inputs, labels = _probes(dataset)
        found, declared = learner.inspected(loss, inputs, labels, records=records)  # type: ignore[attr-defined]
        return _with_learner(model, found), declared
    name = type(learner).__name__
    return model, (f"the learner {name} computes each user's update from that user's records alone",)


def _is_torch(learner: HostLearner) -> bool:
    module = sys.modules.get("dovetail.learners.torch")
    return module is not None and type(learner) is module.TorchLearner


def _with_learner(model: Model, learner: Any) -> Model:
    return Model(name=model.name, init=model.init, apply=learner.outputs, loss=model.loss, learner=learner)


def _declared_of_jax(model: Model, loss: str | Loss, spec: RecordSpec) -> tuple[str, ...]:
    """That of a model or loss whose program leads out of itself."""
    own = losses.function(loss)
    parameters = jax.eval_shape(model.init, jax.random.key(0))
    inputs = jax.ShapeDtypeStruct((2, *spec.input_shape), jnp.float32)
    labels = jax.ShapeDtypeStruct((2, *spec.label_shape), np.dtype(spec.label_dtype))

    def total(parameters: Any, inputs: Any, labels: Any) -> jax.Array:
        return jnp.sum(own(model.apply(parameters, inputs), labels))

    ways = set(escapes(jax.make_jaxpr(total)(parameters, inputs, labels)))
    ways |= set(escapes(jax.make_jaxpr(jax.grad(total))(parameters, inputs, labels)))
    if not ways:
        return ()
    return (
        f"the model {model.name} or its loss, which leaves compiled code ({', '.join(sorted(ways))}), computes each "
        "user's update from that user's records alone",
    )


def _refuse_mixing(model: Model, dataset: Dataset) -> None:
    """Refuse outputs for one record that change with another; compared bit by bit, for batches of one shape."""
    inputs, _ = _probes(dataset)
    key = jax.random.key(0)
    leaves, structure = jax.tree.flatten(model.init(key))
    moved = [leaf + 0.1 * jax.random.normal(jax.random.fold_in(key, i), leaf.shape) for i, leaf in enumerate(leaves)]
    apply = jax.jit(lambda x: model.apply(jax.tree.unflatten(structure, moved), x))
    among = np.asarray(apply(inputs[:3]))
    pairs = [
        (among[1:], np.asarray(apply(inputs[[3, 1, 2]]))[1:]),
        (among[:2], np.asarray(apply(inputs[[0, 1, 3]]))[:2]),
    ]
    if any(one.tobytes() != other.tobytes() for one, other in pairs):
        raise ValueError(
            "expected a model whose output for a record depends on that record alone where single records are "
            f"protected, got model {model.name!r}, which mixes the records of a batch"
        )


def _probes(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Four test records as a model reads them, the last one unlike the others."""
    rows = np.arange(_PROBES) % len(dataset.test_labels)
    inputs, labels = dataset.test_inputs[rows].astype(np.float32), dataset.test_labels[rows].copy()
    if dataset.test_inputs.dtype == np.uint8:
        inputs /= 255
    if (inputs[3] == inputs[2]).all() or (inputs[3] == inputs[0]).all():
        inputs[3] = 1 - inputs[3]
    return inputs, labels
