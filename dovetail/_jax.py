"""JAX, where it is installed: a client that only takes part draws its reports with NumPy and needs none.

Modules that a client imports take `jax` and `jnp` from here. Without JAX they can be imported all the same, and what
would compute with it says so when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["ArrayLike", "jax", "jnp", "lax"]


class _Absent:
    """In place of something of JAX's."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *given: Any, **options: Any) -> Callable[..., Any]:
        """As a decorator it leaves alone what it decorates; anything else would need JAX."""
        if given and callable(given[0]):
            return given[0]
        raise ModuleNotFoundError(f"expected jax to be installed to compute with {self._name}, got no such package")


class _NoArray:
    """What no array is, where there is no JAX."""


if TYPE_CHECKING:
    import jax
    import jax.extend.random
    import jax.numpy as jnp
    from jax import lax
    from jax.typing import ArrayLike
else:
    try:
        import jax
        import jax.extend.random
        import jax.numpy as jnp
        from jax import lax
        from jax.typing import ArrayLike
    except ModuleNotFoundError:
        jax, jnp, lax, ArrayLike = (_Absent(name) for name in ("jax", "jax.numpy", "jax.lax", "jax.typing.ArrayLike"))
        jax.Array = _NoArray
