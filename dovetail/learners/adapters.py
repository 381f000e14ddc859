"""Adapters: a public model stays as it is, and what users train together is a small change of it.

With low-rank adapters (LoRA, Hu et al. 2022) a public matrix W of shape (m, n) is used as W + scale * down @ up, where
`down` is (m, rank) and `up` is (rank, n), which starts at zero: the first model is the public one. Only adapters and
the arrays that are trained whole, such as a new last layer, are parameters: they are what clients upload, what is
clipped and noised, and what is published. A linear probe is the case without adapters.

The public weights are an assumption of every user: that they were made without the private records, which nobody can
check from here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import _validate
from dovetail.data._base import Model
from dovetail.learners import trees

__all__ = ["adapt", "merge"]

Adapters = dict[str, Any]  # by the public array's name: {"down", "up"}, or an array that is trained whole


def adapt(
    model: Model, weights: Any, *, rank: int = 4, on: Sequence[str] = (), whole: Sequence[str] = (), scale: float = 1.0
) -> Model:
    """The model of adapters to the public `weights` of a model.

    Arguments:
        weights: the public parameters of the model.
        rank: the rank of an adapter's matrix down @ up.
        on: patterns of names as `learners.trees` gives them (``"encoder/*/kernel"``): which arrays get an adapter. An
            array of more than two axes is adapted as the matrix with its last axis as columns.
        whole: which arrays are trained whole, from their public values. Everything else stays as it is.
        scale: what down @ up is multiplied by.

    Guarantees:
        The first model gives the public model's outputs.
        Refuses a pattern that names nothing, and an array that is named both ways or is too small for the rank.
    """
    _validate.integer(rank=rank)
    _validate.at_least(1, rank=rank)
    if model.learner is not None:
        raise ValueError(
            f"only models in JAX take adapters, and {model.name!r} trains outside it: freeze the module's parameters"
        )
    public = trees.arrays_by_name(weights)
    narrow, full = _select_names(on, public, "on"), _select_names(whole, public, "whole")
    if not narrow and not full:
        raise ValueError("nothing would be trained with on=() and whole=(): name the arrays that get an adapter")
    if set(narrow) & set(full):
        raise ValueError(f"{min(set(narrow) & set(full))!r} is named in on and in whole: choose one of them")
    for name in narrow:
        if public[name].ndim < 2 or min(_matrix_shape(public[name])) < rank:
            raise ValueError(f"expected matrices of rank={rank} and more in on, got {name} of {public[name].shape}")

    def init(key: jax.Array) -> Adapters:
        adapters: Adapters = {name: jnp.asarray(public[name]) for name in full}
        for name, own in zip(narrow, jax.random.split(key, max(1, len(narrow))), strict=False):
            rows, columns = _matrix_shape(public[name])
            down = jax.random.normal(own, (rows, rank)) / math.sqrt(rows)
            adapters[name] = {"down": down, "up": jnp.zeros((rank, columns))}
        return adapters

    def apply(params: Adapters, inputs: jax.Array) -> jax.Array:
        return model.apply(merge(weights, params, scale=scale), inputs)

    return Model(name=f"{model.name}, adapted", init=init, apply=apply, loss=model.loss)


def merge(weights: Any, params: Adapters, *, scale: float = 1.0) -> Any:
    """The public weights with adapters and whole arrays put in: parameters that the model takes without adapters.

    Arguments:
        weights: the public parameters of the model.
        params: what was trained: by name an adapter, or an array that takes the place of the public one.
        scale: the one that `adapt` was called with.
    """
    arrays: dict[str, Any] = dict(trees.arrays_by_name(weights))
    for name, own in params.items():
        arrays[name] = own if not isinstance(own, dict) else _apply_adapter(arrays[name], own, scale)
    return trees.fill_tree(weights, arrays)


def _apply_adapter(array: np.ndarray, adapter: dict[str, jax.Array], scale: float) -> jax.Array:
    """The public array plus scale x down @ up, in the array's own shape."""
    return jnp.asarray(array) + scale * (adapter["down"] @ adapter["up"]).reshape(array.shape)


def _matrix_shape(array: np.ndarray) -> tuple[int, int]:
    """Rows and columns of an array as the matrix that is adapted: its last axis are the columns."""
    return math.prod(array.shape[:-1]), array.shape[-1]


def _select_names(patterns: Sequence[str], public: dict[str, np.ndarray], key: str) -> list[str]:
    """The names of public arrays that some pattern fits, sorted; `key` names the argument in a refusal."""
    for pattern in patterns:
        if not fnmatch.filter(public, pattern):
            raise ValueError(f"{key} has {pattern!r}, which fits none of {', '.join(sorted(public))}")
    return sorted({name for pattern in patterns for name in fnmatch.filter(public, pattern)})
