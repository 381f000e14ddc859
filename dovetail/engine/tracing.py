"""Programs as JAX traces them: running one equation, and what an equation calls as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

__all__ = ["bind", "inner_program"]

_INLINED = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint")


def inner_program(equation: Any) -> core.ClosedJaxpr | None:
    """The program that an equation calls as it is (`jit`, `checkpoint`), to be run in its place; None of others."""
    if equation.primitive.name not in _INLINED:
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return inner if inner is None or isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def bind(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of an equation for these operands."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # a pair before JAX 0.10
    with equation.ctx.manager:
        found = equation.primitive.bind(*functions, *values, **params)
    return list(found) if equation.primitive.multiple_results else [found]
