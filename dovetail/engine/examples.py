"""Sums of clipped per-example gradients, without a gradient for each example.

Where each parameter enters a model once, as `x @ kernel` or `x + bias`, one backward pass gives the inputs a of every
kernel and the gradients d of its outputs. A kernel that an example passes once (a dense layer) has the gradient a d^T:
its norm is |a| |d|, and the clipped sum over examples is one matrix product. A kernel that it passes at many positions
(a convolution) is small, and its gradients are formed and added up, a chunk of examples at a time. So no norm is ever
computed as a difference, as it would be from a Gram matrix of the positions, and no second backward pass is needed.

Linear models go through `engine.linear`; a model of any other kind gets one gradient an example, a chunk at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from dovetail.data._base import Loss, Model
from dovetail.engine import linear
from dovetail.engine.devices import chunk_bytes
from dovetail.learners.client import ClientUpdate
from dovetail.learners.losses import cross_entropy
from dovetail.mechanisms.gaussian import clip_factor

__all__ = ["clipped_sum"]


class _Examples(NamedTuple):
    inputs: jax.Array
    labels: jax.Array
    present: jax.Array


def clipped_sum(
    model: Model,
    unravel: Callable[[jax.Array], Any],
    params: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
    present: jax.Array,
    *,
    clip_norm: Any,
    loss: Loss = cross_entropy,
) -> jax.Array:
    """The sum over the examples of the gradients of their losses, each scaled down to `clip_norm` where it is longer.

    `params` is the flat parameter vector, `unravel` gives the model's own; an example counts unless `present` is zero.

    Guarantees:
        Equal to forming, clipping and adding the gradients one by one, up to float summation order.
        An example that is not present adds nothing, nor does one whose gradient or squared norm is not finite.
        No example adds more than clip_norm, up to rounding, however large its gradient is.
        Peak memory grows with the chunk, not with the number of examples times the number of parameters.
    """
    present = (present != 0) & jnp.all(jnp.isfinite(inputs), axis=tuple(range(1, inputs.ndim)))
    examples = _Examples(_where(present, inputs), labels, present)
    weights = unravel(params)
    if model.constant is not None:
        return _linear(weights, model.constant, examples, clip_norm, loss).ravel()
    uses = _uses(model, weights, inputs[:1])
    if uses is None:
        total = _chunked(_formed(model, weights, clip_norm, loss), examples, floats=3 * len(params))
    else:
        floats = sum(use.floats for use in uses)
        total = _chunked(_factored(model, weights, uses, clip_norm, loss), examples, floats=floats)
    return ravel_pytree(total)[0]


def _linear(weights: jax.Array, constant: float, examples: _Examples, clip_norm: Any, loss: Loss) -> jax.Array:
    inputs = examples.inputs.reshape(len(examples.labels), 1, -1)
    chunk = linear.Chunk(inputs, examples.labels[:, None], examples.present.astype(jnp.int32))
    scaling = functools.partial(clip_factor, clip_norm=clip_norm)
    return -linear.scaled_sum(weights, constant, chunk, ClientUpdate(), scaling, loss)


def _chunked(add_up: Callable[[_Examples], Any], examples: _Examples, *, floats: int) -> Any:
    """The sum of `add_up` over chunks of examples that take this many floats each."""
    count = len(examples.labels)
    size = max(1, min(chunk_bytes(jax.default_backend()) // (4 * floats), count))
    chunks = math.ceil(count / size)
    if chunks <= 1:
        return add_up(examples)
    size = math.ceil(count / chunks)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(chunks, size, *x.shape[1:])

    def add(total: Any, chunk: _Examples) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, add_up(chunk)), None

    cuts = jax.tree.map(cut, examples)
    shape = jax.eval_shape(add_up, jax.tree.map(lambda x: x[0], cuts))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return jax.lax.scan(add, zero, cuts)[0]


def _formed(model: Model, weights: Any, clip_norm: Any, loss: Loss) -> Callable[[_Examples], Any]:
    """Any model: one gradient an example."""

    def of_one(weights: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        return loss(model.apply(weights, x[None]), label[None])[0]

    def add_up(examples: _Examples) -> Any:
        gradients = jax.vmap(jax.grad(of_one), (None, 0, 0))(weights, examples.inputs, examples.labels)
        factor = _factor([_Formed(leaf) for leaf in jax.tree.leaves(gradients)], examples, clip_norm)
        return jax.tree.map(lambda leaf: _Formed(leaf).scaled_sum(factor), gradients)

    return add_up


def _factored(model: Model, weights: Any, uses: list[_Use], clip_norm: Any, loss: Loss) -> Callable[[_Examples], Any]:
    """Models whose parameters are used as `uses` says: gradients as products, where that is shorter."""
    leaves, structure = jax.tree.flatten(weights)

    def of_one(probes: list[jax.Array], x: jax.Array, label: jax.Array) -> tuple[jax.Array, list[jax.Array | None]]:
        taps = [_Tap(leaf, probe) for leaf, probe in zip(leaves, probes, strict=True)]
        value = loss(model.apply(jax.tree.unflatten(structure, taps), x[None]), label[None])[0]
        return value, [tap.left for tap in taps]

    probes = [jnp.zeros(use.out.shape, use.out.dtype) for use in uses]
    backward = jax.vmap(jax.grad(of_one, has_aux=True), (None, 0, 0))

    def add_up(examples: _Examples) -> Any:
        slopes, lefts = backward(probes, examples.inputs, examples.labels)
        gradients = [_gradient(left, slope) for left, slope in zip(lefts, slopes, strict=True)]
        factor = _factor(gradients, examples, clip_norm)
        return jax.tree.unflatten(structure, [gradient.scaled_sum(factor) for gradient in gradients])

    return add_up


class _Formed(NamedTuple):
    """The gradients of one parameter, first axis the example."""

    values: jax.Array

    def square(self, clip_norm: Any) -> jax.Array:
        return jnp.sum((self.values / clip_norm) ** 2, axis=tuple(range(1, self.values.ndim)))

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        return jnp.sum(_where(factor > 0, self.values * _beside(factor, self.values)), axis=0)


class _Outer(NamedTuple):
    """The gradients left_i right_i^T of one kernel."""

    left: jax.Array
    right: jax.Array

    def square(self, clip_norm: Any) -> jax.Array:
        return (linear.lengths(self.left) * linear.lengths(self.right) / clip_norm) ** 2

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        right = _where(factor > 0, self.right * _beside(factor, self.right))
        return jnp.matmul(_where(factor > 0, self.left).T, right, precision=jax.lax.Precision.HIGHEST)


def _gradient(left: jax.Array | None, slope: jax.Array) -> _Formed | _Outer:
    """A parameter's gradients from the inputs of its kernel (None: a bias) and the gradients of its outputs."""
    slope = slope.reshape(len(slope), -1, slope.shape[-1])
    if left is None:
        return _Formed(slope.sum(axis=1))
    left = left.reshape(len(left), -1, left.shape[-1])
    if left.shape[1] == 1:
        return _Outer(left[:, 0], slope[:, 0])
    return _Formed(jnp.einsum("npi,npo->nio", left, slope))


def _factor(gradients: list[_Formed | _Outer], examples: _Examples, clip_norm: Any) -> jax.Array:
    """By how much each example's gradient shrinks; 0 for examples that do not count."""
    square = sum(gradient.square(clip_norm) for gradient in gradients)
    return jnp.where(examples.present, clip_factor(jnp.sqrt(square), 1.0), 0.0)


class _Use(NamedTuple):
    """How a parameter enters the model, for one example: the inputs of its kernel (None: a bias), and the outputs."""

    left: jax.ShapeDtypeStruct | None
    out: jax.ShapeDtypeStruct
    size: int

    @property
    def floats(self) -> int:
        """What the gradient of one example takes, with all that it is computed from."""
        if self.left is None:
            return self.size
        positions = self.out.size // self.out.shape[-1]
        return self.left.size + self.out.size + (self.size if positions > 1 else 0)


class _Tap:
    """Stands in for a parameter while the model is traced, and keeps what its gradient needs.

    The gradient of the output is that of `probe`, zeros added to it. Whatever is not `x @ kernel` or `x + bias`, once,
    is a TypeError; with `like`, so is a use inside a jit, scan or other transformation within the model.
    """

    __array_ufunc__ = None  # NumPy arrays leave their operators to us, as JAX arrays do

    def __init__(self, value: jax.Array, probe: jax.Array | None = None, *, like: jax.Array | None = None) -> None:
        self.left: jax.Array | None = None
        self.out: jax.Array | None = None
        self._value, self._probe, self._like = value, probe, like

    def __rmatmul__(self, left: jax.Array) -> jax.Array:
        if self._value.ndim != 2:
            raise TypeError(f"expected a kernel of two axes, got shape {self._value.shape}")
        self.left = left
        return self._used(left @ self._value)

    def __radd__(self, left: jax.Array) -> jax.Array:
        out = left + self._value
        if self._value.ndim != 1 or out.shape[-1:] != self._value.shape:
            raise TypeError(f"expected a bias along the last axis, got shapes {self._value.shape} and {left.shape}")
        return self._used(out)

    def _used(self, out: jax.Array) -> jax.Array:
        if self.out is not None:
            raise TypeError("expected a parameter to be used once")
        if self._like is not None and out._trace is not self._like._trace:  # type: ignore[attr-defined]
            raise TypeError("expected a parameter to be used outside of inner transformations")
        self.out = out
        return out if self._probe is None else out + self._probe


def _uses(model: Model, weights: Any, one_input: jax.Array) -> list[_Use] | None:
    """How each parameter enters the model; None for a model that uses one in another way, or not exactly once."""
    leaves, structure = jax.tree.flatten(weights)

    def trace(x: jax.Array) -> list[tuple[jax.Array | None, jax.Array | None]]:
        taps = [_Tap(leaf, like=x) for leaf in leaves]
        model.apply(jax.tree.unflatten(structure, taps), x)
        return [(tap.left, tap.out) for tap in taps]

    try:
        shapes = jax.eval_shape(trace, one_input)
    except (AttributeError, TypeError):
        return None
    if any(out is None for _, out in shapes):
        return None
    return [_Use(left, out, leaf.size) for (left, out), leaf in zip(shapes, leaves, strict=True)]


def _beside(factor: jax.Array, values: jax.Array) -> jax.Array:
    return factor.reshape(-1, *[1] * (values.ndim - 1))


def _where(keep: jax.Array, values: jax.Array) -> jax.Array:
    """Each example's values, or zeros where it is not kept, whatever the values."""
    return jnp.where(_beside(keep, values), values, 0.0)
