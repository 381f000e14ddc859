"""Convolutions as XLA runs them fast on a CPU, wherever in a program they are.

XLA hands a convolution to Eigen only if its axes are in one order: records, rows, columns, channels. It reorders others
in a program's main part, but not in a loop, and a round is loops: over chunks, clients, batches. There most gradients
of convolutions, and whatever a model writes in another order, run five to twenty times slower. So a model is traced,
and its convolutions are computed with their axes in that order. The gradient of the data is one convolution more. That
of a kernel is another, of channels as if they were records; side by side this would be a convolution by groups, so
there it is a product with the patches that the kernel met. The numbers are the same up to rounding.

Convolutions by groups of channels stay as they are, and so do programs without convolutions, to the last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dovetail.engine.tracing import bind, inner_program

__all__ = ["convolves", "data_axes", "has_convolutions", "in_eigen_order", "kernel_axes", "patches_of"]


def in_eigen_order(apply: Callable[[Any, Any], Any], *, alone: bool = False) -> Callable[[Any, Any], Any]:
    """The model with its convolutions in the order of axes that is fast on a CPU; on other devices as it is.

    Arguments:
        alone: whether clients train one after the other, and so never side by side under `vmap`.
    """
    if jax.default_backend() != "cpu":
        return apply

    @functools.wraps(apply)
    def reordered(params: Any, inputs: Any) -> Any:
        closed, shape = jax.make_jaxpr(apply, return_shape=True)(params, inputs)
        if not has_convolutions(closed.jaxpr):
            return apply(params, inputs)
        found = _run(closed.jaxpr, closed.consts, jax.tree.leaves((params, inputs)), alone=alone)
        return jax.tree.unflatten(jax.tree.structure(shape), found)

    return reordered


def convolves(apply: Callable[[Any, Any], Any], params: Any, inputs: jax.ShapeDtypeStruct) -> bool:
    """Whether a model convolves, for parameters and inputs of these shapes."""
    return has_convolutions(jax.make_jaxpr(apply)(params, inputs).jaxpr)


def has_convolutions(jaxpr: core.Jaxpr) -> bool:
    """Whether a program, or one that it calls as it is, convolves."""
    for equation in jaxpr.eqns:
        inner = inner_program(equation)
        if _is_plain(equation) or (inner is not None and has_convolutions(inner.jaxpr)):
            return True
    return False


def _is_plain(equation: Any) -> bool:
    params = equation.params
    return (
        equation.primitive.name == "conv_general_dilated"
        and params["feature_group_count"] == params["batch_group_count"] == 1
        and params.get("preferred_element_type") in (None, equation.invars[0].aval.dtype)
        and equation.invars[0].aval.dtype == np.float32
    )


def _run(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], *, alone: bool) -> list[Any]:
    """The outputs of a program, with its convolutions in the fast order."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))
    for equation in jaxpr.eqns:
        values = [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in equation.invars]
        inner = inner_program(equation)
        if _is_plain(equation):
            found = [_convolve(values[0], values[1], equation.params, alone=alone)]
        elif inner is not None and has_convolutions(inner.jaxpr):
            found = _run(inner.jaxpr, inner.consts, values, alone=alone)
        else:
            found = bind(equation, values)
        known.update(zip(equation.outvars, found, strict=True))
    return [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in jaxpr.outvars]


def _convolve(data: jax.Array, kernel: jax.Array, params: Any, *, alone: bool) -> jax.Array:
    """A convolution of these axes, computed with them in the fast order."""
    numbers = params["dimension_numbers"]
    ordered = _ordered_convolution(
        tuple(params["window_strides"]),
        tuple(map(tuple, params["padding"])),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        params["precision"],
        alone,
    )
    out = ordered(data.transpose(data_axes(numbers.lhs_spec)), kernel.transpose(kernel_axes(numbers.rhs_spec)))
    return out.transpose(np.argsort(data_axes(numbers.out_spec)))


def data_axes(spec: Sequence[int]) -> list[int]:
    """Axes of data or outputs as records, places, channels, from those of a specification (records, channels, ...)."""
    return [spec[0], *spec[2:], spec[1]]


def kernel_axes(spec: Sequence[int]) -> list[int]:
    """Axes of a kernel as places, channels, channels out, from those of a specification (out, in, ...)."""
    return [*spec[2:], spec[1], spec[0]]


@functools.cache
def _ordered_convolution(
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    data_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    precision: Any,
    alone: bool,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A convolution of data (records, places..., channels) with a kernel (places..., channels, channels out)."""

    def convolve(data: jax.Array, kernel: jax.Array, **settings: Any) -> jax.Array:
        letters = "XYZ"[: data.ndim - 2] if data.ndim <= 5 else "".join(map(chr, range(97, 95 + data.ndim)))
        order = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
        return lax.conv_general_dilated(data, kernel, dimension_numbers=order, precision=precision, **settings)

    @jax.custom_vjp
    def ordered(data: jax.Array, kernel: jax.Array) -> jax.Array:
        return convolve(
            data,
            kernel,
            window_strides=strides,
            padding=padding,
            lhs_dilation=data_dilation,
            rhs_dilation=kernel_dilation,
        )

    def forward(data: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return ordered(data, kernel), (data, kernel)

    def backward(kept: tuple[jax.Array, jax.Array], slope: jax.Array) -> tuple[jax.Array, jax.Array]:
        data, kernel = kept
        places = range(kernel.ndim - 2)
        extents = [(size - 1) * apart + 1 for size, apart in zip(kernel.shape, kernel_dilation, strict=False)]
        stretched = [(data.shape[1 + i] - 1) * data_dilation[i] + 1 for i in places]
        reached = [(slope.shape[1 + i] - 1) * strides[i] + 1 for i in places]
        lows = [extents[i] - 1 - padding[i][0] for i in places]
        around = [(lows[i], stretched[i] + extents[i] - 1 - lows[i] - reached[i]) for i in places]
        of_data = convolve(
            slope,
            jnp.flip(kernel, tuple(places)).swapaxes(-1, -2),
            window_strides=data_dilation,
            padding=around,
            lhs_dilation=strides,
            rhs_dilation=kernel_dilation,
        )
        if not alone:
            patches = patches_of(data, kernel.shape[:-2], strides, padding, data_dilation, kernel_dilation)
            slopes = slope.reshape(-1, slope.shape[-1])
            of_kernel = jnp.matmul(patches.reshape(-1, patches.shape[-1]).T, slopes, precision=precision)
            return of_data, of_kernel.reshape(kernel.shape)
        of_kernel = convolve(
            jnp.swapaxes(data, 0, -1),
            jnp.moveaxis(slope, 0, -2),
            window_strides=kernel_dilation,
            padding=[(padding[i][0], extents[i] - 1 + reached[i] - stretched[i] - padding[i][0]) for i in places],
            lhs_dilation=data_dilation,
            rhs_dilation=strides,
        )
        return of_data, jnp.moveaxis(of_kernel, 0, -2)

    ordered.defvjp(forward, backward)
    return ordered


def patches_of(
    data: jax.Array,
    sizes: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    data_dilation: Sequence[int],
    kernel_dilation: Sequence[int],
) -> jax.Array:
    """The patches (records, places..., numbers of a patch) that a kernel of these sizes meets in a convolution.

    Arguments:
        data: (records, places..., channels). The other arguments are those of `lax.conv_general_dilated`.
    """
    around = [(low, high, apart - 1) for (low, high), apart in zip(padding, data_dilation, strict=True)]
    if any(any(pad) for pad in around):
        data = lax.pad(data, jnp.zeros((), data.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    places = [
        (extent - (size - 1) * apart - 1) // stride + 1
        for extent, size, stride, apart in zip(data.shape[1:-1], sizes, strides, kernel_dilation, strict=True)
    ]
    shifts = []
    for offset in np.ndindex(*sizes):
        start = [at * apart for at, apart in zip(offset, kernel_dilation, strict=True)]
        stop = [first + (count - 1) * stride + 1 for first, count, stride in zip(start, places, strides, strict=True)]
        shifts.append(lax.slice(data, (0, *start, 0), (len(data), *stop, data.shape[-1]), (1, *strides, 1)))
    if len(shifts) == 1:
        return shifts[0]
    return jnp.stack(shifts, axis=-2).reshape(*shifts[0].shape[:-1], math.prod(sizes) * data.shape[-1])
