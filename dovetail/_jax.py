"""JAX, imported when something of it is first asked for, and only where it is installed.

A client that takes part draws its reports with NumPy, an aggregator adds up integers: neither needs JAX, whose import
takes most of a second. Modules that they import take `jax` and `jnp` from here. Where JAX is not installed, whatever
would compute with it says so when it is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from dovetail._imports import LateModule

__all__ = ["ArrayLike", "is_array", "jax", "jnp", "lax", "map_blocks", "materialize", "materialize_into", "trace_once"]

if TYPE_CHECKING:
    import jax
    import jax.extend.random
    import jax.numpy as jnp
    from jax import lax
    from jax.typing import ArrayLike
else:
    jax, jnp, lax = LateModule("jax", "jax.extend.random"), LateModule("jax.numpy"), LateModule("jax.lax")
    ArrayLike = Any

_BLOCK = 3 * 2**15  # numbers of a few vectors at a time, which any usual number of cores divides


def is_array(value: object) -> TypeGuard[jax.Array]:
    """Whether it is one of JAX's arrays; where nobody has imported JAX, nothing is."""
    return "jax" in sys.modules and isinstance(value, jax.Array)


def materialize(fill: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Compute `fill(zeros)`, for zeros of this shape and type, into memory before anything reads it."""
    return materialize_into(jnp.zeros(shape, dtype), fill)


def materialize_into(array: jax.Array, fill: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Compute `fill(array)`, of the same shape and type, into memory before anything reads it.

    A loop of one turn, whose length XLA cannot see, is the one thing that is not fused into what follows, where it
    would be computed again for every reader, or number by number.
    """
    once = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(0, once, lambda i, array: fill(array), array)


def map_blocks(
    function: Callable[..., tuple[jax.Array, jax.Array]], out: jax.Array, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`function(out, *arrays)` of long vectors, computed block by block.

    Arguments:
        function: from vectors of one length to a vector of that length, number by number, and a sum over them.
        out: the first vector; the result is written over it.

    Returns: the vector, and the sum. It is added up block by block, and so rounded otherwise than in one piece.

    On a CPU the function sees a block at a time, which stays in the cache of a core. XLA shares a loop over a whole
    vector among the cores, and if they do not divide its length, tests every number for the end instead of taking
    several at once.
    """
    length = out.shape[0]
    if length <= _BLOCK or jax.default_backend() != "cpu":
        return function(out, *arrays)

    def block(at: jax.Array | int, size: int, out: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, part = function(*(lax.dynamic_slice(array, (at,), (size,)) for array in (out, *arrays)))
        return lax.dynamic_update_slice(out, values, (at,)), part

    def add(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        out, part = block(i * _BLOCK, _BLOCK, state[0])
        return out, state[1] + part

    whole = length // _BLOCK
    zero = jnp.zeros((), jax.eval_shape(function, out, *arrays)[1].dtype)
    out, total = lax.fori_loop(0, whole, add, (out, zero))
    if whole * _BLOCK == length:
        return out, total
    out, part = block(whole * _BLOCK, length - whole * _BLOCK, out)
    return out, total + part


Result = TypeVar("Result")


def trace_once(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function of arrays that JAX traces once for their shapes, however many programs use it; keywords are static.

    XLA puts its operations where they are called, so programs are the same. Tracing hundreds of operations anew for
    every program, and for every transformation of it, would take longer than compiling them.
    """

    @functools.cache
    def compiled(names: tuple[str, ...]) -> Callable[..., Result]:
        return jax.jit(function, static_argnames=names)

    @functools.wraps(function)
    def call(*arrays: Any, **static: Any) -> Result:
        return compiled(tuple(sorted(static)))(*arrays, **static)

    return call
