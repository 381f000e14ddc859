"""Grids of cases of which `make test` runs few and `make soak` the rest."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def diagonal(*axes: Sequence[Any]) -> list[Any]:
    """The cases of a grid: every value of every axis is in a case of `make test`, and the rest is in `make soak`.

    A value that is a tuple is several arguments.
    """
    cases, kept = [], {tuple(step % len(axis) for axis in axes) for step in range(max(len(axis) for axis in axes))}
    for places in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[place] for axis, place in zip(axes, places, strict=True)]
        arguments = itertools.chain(*(value if isinstance(value, tuple) else (value,) for value in values))
        cases.append(pytest.param(*arguments, marks=() if places in kept else pytest.mark.soak))
    return cases


def later(*values: Any) -> Any:
    """A case of `make soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)
