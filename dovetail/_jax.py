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

__all__ = ["ArrayLike", "is_array", "jax", "jnp", "lax", "traced_once", "written"]

if TYPE_CHECKING:
    import jax
    import jax.extend.random
    import jax.numpy as jnp
    from jax import lax
    from jax.typing import ArrayLike
else:
    jax, jnp, lax = LateModule("jax", "jax.extend.random"), LateModule("jax.numpy"), LateModule("jax.lax")
    ArrayLike = Any


def is_array(value: object) -> TypeGuard[jax.Array]:
    """Whether it is one of JAX's arrays; where nobody has imported JAX, nothing is."""
    return "jax" in sys.modules and isinstance(value, jax.Array)


def written(fill: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What `fill` makes of an array of zeros of this shape and type, in memory before anything reads it.

    A loop of one turn, whose length XLA cannot see, is the one thing that is not fused into what follows, where it
    would be computed again for every reader, or number by number.
    """
    once = lax.optimization_barrier(jnp.int32(1))
    return lax.fori_loop(0, once, lambda i, array: fill(array), jnp.zeros(shape, dtype))


Result = TypeVar("Result")


def traced_once(function: Callable[..., Result]) -> Callable[..., Result]:
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
