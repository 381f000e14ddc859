"""Losses: one number per record, from the model's outputs for it and its label.

Which one a model is trained with follows from the dataset's target unless the model brings its own: classes have the
softmax cross-entropy, or the sigmoid's where a model has one output for two classes; numbers the squared error; several
labels the sum of their sigmoid cross-entropies. A loss of one's own is `loss(outputs, labels)`, both with the record as
first axis, and returns one loss per record, which depends on no other record: clipping and noise are per record or per
user, and so hold for any loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate
from dovetail.data._base import Dataset, Loss, Model
from dovetail.data.own_code import refusal_of_records

__all__ = [
    "LOSSES",
    "binary_cross_entropy",
    "cross_entropy",
    "huber",
    "loss_for",
    "loss_function",
    "sigmoid_cross_entropy",
    "squared_error",
]

_DEFAULTS = {"classes": "cross_entropy", "number": "squared_error", "labels": "sigmoid_cross_entropy"}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The softmax cross-entropy of each record, from logits (records, classes) and classes, integers (records,)."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"expected classes as labels for cross_entropy, got {labels.dtype}")
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def binary_cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """The sigmoid cross-entropy of each record, from one output each, the logit of class 1; labels are 0 or 1."""
    return _sigmoid_cross_entropy(outputs.reshape(labels.shape), labels)


def squared_error(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """The squared difference of output and label of each record, without a factor of 1/2."""
    return (outputs.reshape(labels.shape) - labels) ** 2


def huber(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Of each record half the squared difference up to 1, beyond it the difference less 1/2 (Huber 1964)."""
    distance = jnp.abs(outputs.reshape(labels.shape) - labels)
    return jnp.where(distance <= 1, distance**2 / 2, distance - 0.5)


def sigmoid_cross_entropy(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Of each record the sum of its labels' sigmoid cross-entropies; outputs and labels are (records, labels)."""
    return jnp.sum(_sigmoid_cross_entropy(outputs, labels), axis=1)


def _sigmoid_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log of the probability that a logit gives to its label, number by number."""
    return jax.nn.softplus(logits) - logits * labels


LOSSES: dict[str, Loss] = {
    "binary_cross_entropy": binary_cross_entropy,
    "cross_entropy": cross_entropy,
    "huber": huber,
    "sigmoid_cross_entropy": sigmoid_cross_entropy,
    "squared_error": squared_error,
}


def loss_function(loss: str | Loss) -> Loss:
    """The loss of this name, or a loss as it is."""
    if not isinstance(loss, str):
        return loss
    _validate.known_name("loss", loss, LOSSES)
    return LOSSES[loss]


def loss_for(model: Model, dataset: Dataset) -> str | Loss:
    """The loss that a model is trained with on a dataset: a name of `LOSSES`, or the model's own function.

    Guarantees:
        Refuses outputs that do not fit the labels, and a loss of its own that is not one number per record.
    """
    own = model.loss
    outputs = _output_shape(model, dataset)
    if own is None:
        one_for_two = dataset.target == "classes" and dataset.num_classes == 2 and outputs.shape[1:] in ((), (1,))
        own = "binary_cross_entropy" if one_for_two else _DEFAULTS[dataset.target]
    if not isinstance(own, str):
        if model.learner is None:
            _check_own_loss(own, outputs, dataset)
        return own
    _validate.known_name("loss", own, LOSSES)
    _check_labels_and_outputs(own, outputs, dataset, model=model.name)
    return own


def _output_shape(model: Model, dataset: Dataset) -> jax.ShapeDtypeStruct:
    """The shape and type of a model's outputs for two records; JAX models are only traced.

    Refuses a model that cannot read such records, or does not return one output, or row of outputs, for each.
    """
    shape = (2, *dataset.test_inputs.shape[1:])
    try:
        if model.learner is None:
            parameters = jax.eval_shape(model.init, jax.random.key(0))
            outputs = jax.eval_shape(model.apply, parameters, jax.ShapeDtypeStruct(shape, jnp.float32))
        else:
            outputs = model.learner.outputs(model.init(jax.random.key(0)), np.zeros(shape, np.float32))
    except Exception as error:  # of whatever kind its library raises
        raise refusal_of_records(model.name, shape[1:], error) from error
    found = tuple(getattr(outputs, "shape", ()))
    if found[:1] != (2,):
        raise ValueError(
            f"expected model {model.name!r} to return an array with one row for each record, got "
            f"{f'shape {found}' if hasattr(outputs, 'shape') else f'a {type(outputs).__name__}'} for two records"
        )
    return jax.ShapeDtypeStruct(found, outputs.dtype)


def _check_own_loss(loss: Callable[..., Any], outputs: jax.ShapeDtypeStruct, dataset: Dataset) -> None:
    """Refuse a user's own loss that does not return one number per record, for `outputs` of two records."""
    labels = jax.ShapeDtypeStruct((2, *dataset.labels.shape[1:]), dataset.labels.dtype)
    shape = getattr(jax.eval_shape(loss, outputs, labels), "shape", None)
    if shape != (2,):
        raise ValueError(f"expected loss(outputs, labels) to return one number per record, got shape {shape} for two")


def _check_labels_and_outputs(name: str, outputs: jax.ShapeDtypeStruct, dataset: Dataset, *, model: str) -> None:
    """Refuse a loss for other labels, and outputs that cannot be compared with the labels; `model` is its name."""
    target = {"cross_entropy": "classes", "binary_cross_entropy": "classes", "sigmoid_cross_entropy": "labels"}
    if dataset.target != target.get(name, "number"):
        raise ValueError(
            f"expected a loss for labels of target {dataset.target!r}, such as {_DEFAULTS[dataset.target]!r}, "
            f"got loss={name!r}"
        )
    shape = outputs.shape[1:]
    count = dataset.num_classes
    if name == "cross_entropy":
        fits, wanted = shape == (count,), f"{count} outputs for a record, one for each class"
        wanted += " (or one output in all)" if count == 2 else ""
    elif name == "sigmoid_cross_entropy":
        fits, wanted = shape == (count,), f"{count} outputs for a record, one for each label"
    else:
        fits, wanted = shape in ((), (1,)), "one output for a record"
    if not fits:
        got = f"{shape[0]}" if len(shape) == 1 else f"outputs of shape {shape}"
        raise ValueError(
            f"expected model {model!r} to have {wanted}, for loss {name!r}, got {got}: make its last layer that wide"
        )
