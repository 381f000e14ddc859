"""What code from outside the package is given: shapes in place of records, and one record at a time.

A model that is built by a function gets a `RecordSpec`, which holds no record. A view or a function for features is
applied to one record at a time (`PerRecord`): if JAX can trace it, the compiled program for one record is mapped over
the batch, and no Python runs while records are read; otherwise the function is called with a batch of one record after
the other, and could keep something of one for the next. `escape_routes` finds what leads from compiled code back to
Python.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import Primitive

if TYPE_CHECKING:
    from dovetail.data._base import Dataset, Target

__all__ = ["PerRecord", "RecordSpec", "escape_routes", "refusal_of_records"]

_FOREIGN = (
    *("custom_vmap_call", "custom_partitioning", "pallas_call"),  # their authors say what becomes of batches
    *("call_exported", "call_tf", "ffi_call", "infeed", "outfeed"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordSpec:
    """What a model may be built from: the shape and type of a record and of its label, and what labels are.

    Models read inputs as float32, whatever `input_dtype` is stored.

    Guarantees:
        Nothing in it depends on the values of a record, nor on how many there are.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]
    label_dtype: str
    target: Target
    num_classes: int

    @classmethod
    def of(cls, dataset: Dataset) -> RecordSpec:
        """The shapes and types of a dataset's records."""
        return cls(
            input_shape=dataset.inputs.shape[1:],
            input_dtype=dataset.inputs.dtype.name,
            label_shape=dataset.labels.shape[1:],
            label_dtype=dataset.labels.dtype.name,
            target=dataset.target,
            num_classes=dataset.num_classes,
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fields = ", ".join(field.name for field in dataclasses.fields(self))
        raise AttributeError(
            f"a function that builds a model gets the shapes of records, not the records: expected one of {fields}, "
            f"got {name!r}"
        )


def refusal_of_records(name: str, shape: tuple[int, ...], error: Exception) -> ValueError:
    """The error of a model that fails on records of a shape: which model and shape, and the first line of what it said.

    Arguments:
        name: what the model is called.
        shape: that of a record.
        error: what was raised.
    """
    records = f"{shape[0]} numbers" if len(shape) == 1 else f"shape {shape}"
    batch = ", ".join(map(str, ("records", *shape)))
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ValueError(
        f"model {name!r} cannot read a batch of these data, of shape ({batch}): build it for records of {records} "
        f"({reason})"
    )


class PerRecord:
    """A function from batches to batches that somebody else wrote, applied to one record at a time.

    Arguments:
        function: what is applied, to a batch of one record.
        shape: that of a record.
        name: what the function is called in messages.

    Guarantees:
        The function never sees two records at once.
        If `is_isolated`, what it makes of a record depends on that record alone.
    """

    def __init__(self, function: Callable[[Any], Any], shape: tuple[int, ...], *, name: str) -> None:
        self._function = function
        self._name = name
        self._record = jax.ShapeDtypeStruct(shape, np.float32)

    @functools.cached_property
    def is_isolated(self) -> bool:
        """Whether JAX can compile it, so that no Python of its author runs while records are read."""
        try:
            return not escape_routes(jax.make_jaxpr(self._apply_to_one)(self._record))
        except Exception:  # of whatever kind: it computes outside JAX, and says so in its own way
            return False

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """What the function makes of each record, first axis the record."""
        if self.is_isolated:
            return np.asarray(self._map_records(batch))
        return np.stack([np.asarray(self._apply_to_one(record)) for record in batch])

    @functools.cached_property
    def _map_records(self) -> Callable[[np.ndarray], jax.Array]:
        """The compiled function, mapped over the records of a batch."""
        return jax.jit(jax.vmap(self._apply_to_one))

    def _apply_to_one(self, record: Any) -> Any:
        """What the function makes of one record, called with a batch of it alone; refuses what is not one row."""
        made = self._function(record[None])
        if getattr(made, "ndim", 0) < 1 or len(made) != 1:
            raise ValueError(
                f"expected one row for a batch of one record from {self._name!r}, "
                f"got shape {getattr(made, 'shape', None)}"
            )
        return made[0]


def escape_routes(traced: Any) -> tuple[str, ...]:
    """The names of what leads out of a traced function: callbacks, foreign calls, own rules for batches, shared state.

    A primitive that is not JAX's own counts, for whoever wrote it wrote its rule for batches: Equinox's `unvmap_max`
    is the largest number of all users that are mapped over.
    """
    primitives = set(_primitives_in(traced.jaxpr))
    own = primitives - _primitives_of_jax()
    names = {primitive.name for primitive in primitives if primitive in own or _runs_foreign_code(primitive.name)}
    return tuple(sorted(names | {type(effect).__name__ for effect in traced.effects}))


def _runs_foreign_code(name: str) -> bool:
    """Whether a primitive of JAX's own, by its name, runs code of somebody else's."""
    return "callback" in name or "hi_primitive" in name or name in _FOREIGN


def _primitives_of_jax() -> set[Primitive]:
    """The primitives that JAX's own modules define, as far as they are loaded."""
    theirs = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    return {value for module in theirs for value in list(vars(module).values()) if isinstance(value, Primitive)}


def _primitives_in(jaxpr: Any) -> Iterator[Primitive]:
    """Every primitive in a traced function, and in the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation.primitive
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from _primitives_in(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    """Whether this is a traced function, as it occurs among the parameters of an equation."""
    return hasattr(value, "eqns")
