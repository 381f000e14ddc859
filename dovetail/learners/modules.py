"""Modules of other libraries as models: Flax, Equinox and PyTorch, each as it is.

None of these libraries is a dependency, and none is imported unless a module of it is given. Parameters are whatever
the library trains by gradients; a module with any other state that training would change is refused.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.data._base import Model
from dovetail.data.own_code import RecordSpec, refusal_of_records

__all__ = ["equinox_model", "flax_model", "model_of"]


def model_of(source: Any, spec: RecordSpec) -> Model:
    """The model of what a user brings.

    Arguments:
        source: a `Model`, which stays as it is; a module of Flax, Equinox or PyTorch; or a function from a `RecordSpec`
            to one of these.
        spec: shapes and types of the records.

    Guarantees:
        The function gets shapes and types, and no record.
    """
    if isinstance(source, Model):
        return source
    if _is_instance_of(source, "torch.nn", "Module"):
        from dovetail.learners import torch

        return torch.model(source)
    if _is_instance_of(source, "flax.linen", "Module") or _is_instance_of(source, "flax.nnx", "Module"):
        return flax_model(source, spec)
    if _is_instance_of(source, "equinox", "Module"):
        return equinox_model(source)
    if isinstance(source, type):
        name = source.__name__
        raise ValueError(
            f"expected a model that has its parameters, got the class {name} itself: pass an instance, "
            f"model={name}(...), or a function from the shapes of records to one, model=lambda spec: {name}(...)"
        )
    if callable(source):
        return model_of(_call_with_spec(source, spec), spec)
    raise ValueError(
        "expected a dovetail.Model, a module of PyTorch, Flax or Equinox, or a function from a RecordSpec to one, "
        f"got a {type(source).__name__}"
    )


def _call_with_spec(function: Any, spec: RecordSpec) -> Any:
    """What a function makes of a `RecordSpec`; refuses one that does not take exactly that."""
    try:
        inspect.signature(function).bind(spec)
    except TypeError as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise ValueError(
            f"expected a function of one argument, the RecordSpec with the shapes of records, to make the model, got "
            f"{name}{inspect.signature(function)}"
        ) from error
    except ValueError:  # a function without a signature, written in C
        pass
    return function(spec)


def flax_model(module: Any, spec: RecordSpec) -> Model:
    """The model of a Flax module: `linen`, initialised for such records, or `nnx`, with its own weights."""
    if _is_instance_of(module, "flax.nnx", "Module"):
        return _nnx_model(module)
    record = jnp.zeros((1, *spec.input_shape), jnp.float32)
    try:
        state = jax.eval_shape(module.init, jax.random.key(0), record)
    except Exception as error:  # of whatever kind Flax or the module raises
        raise refusal_of_records(type(module).__name__, spec.input_shape, error) from error
    others = sorted(set(state) - {"params"})
    if others:
        raise ValueError(f"expected a Flax module whose state is its parameters, got {', '.join(others)} beside them")
    return Model(
        name=type(module).__name__,
        init=lambda key: module.init(key, record)["params"],
        apply=lambda params, inputs: module.apply({"params": params}, inputs),
    )


def _nnx_model(module: Any) -> Model:
    """The model of a module of `flax.nnx`, which starts from its own weights."""
    nnx = sys.modules["flax.nnx"]
    graph, first, rest = nnx.split(module, nnx.Param, ...)
    if jax.tree.leaves(rest):
        raise ValueError("expected a Flax module whose state is its parameters, got other variables beside them")
    return Model(
        name=type(module).__name__,
        init=lambda key: nnx.to_pure_dict(first),
        apply=lambda params, inputs: nnx.merge(graph, _replace_leaves(first, params), rest)(inputs),
    )


def _replace_leaves(state: Any, values: Any) -> Any:
    """The `state` of nnx with the arrays of `values` in place of its own, in the same order."""
    return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(values))


def equinox_model(module: Any) -> Model:
    """The model of an Equinox module, which is called record by record and starts from its own weights.

    Its arrays of floating-point numbers are trained, everything else stays.
    """
    equinox = sys.modules["equinox"]
    first, rest = equinox.partition(module, equinox.is_inexact_array)
    leaves, structure = jax.tree.flatten(first)

    def apply(params: list[jax.Array], inputs: jax.Array) -> jax.Array:
        return jax.vmap(equinox.combine(jax.tree.unflatten(structure, params), rest))(inputs)

    return Model(name=type(module).__name__, init=lambda key: list(map(jnp.asarray, leaves)), apply=apply)


def _is_instance_of(value: Any, module: str, name: str) -> bool:
    """Whether this is an object of a class of a library that is imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
