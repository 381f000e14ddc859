"""How each parameter enters a model, read from the program that JAX traces: what its gradients are products of.

A parameter that enters once, by an operation that is linear in it, has for every client a gradient that follows from
the other operand of that operation and from the slope of its output. One backward pass gives the slopes of all
outputs: those of `probes`, zeros added to them. So no gradient has to be carried through the program client by client:

- `dot_general` in any orientation, and `conv_general_dilated` as a product of its patches: sums of l_k r_k^T over
  positions k, which `engine.examples` need not form where a record passes once (`Outer`);
- `gather` of rows, an embedding: the rows that a client reads (`TableRows`);
- a sum with a parameter, or a product number by number: a bias or a scale (`Formed`).

Before any of these a parameter may be reshaped, transposed, broadcast or cut; `jit` and `checkpoint` are looked into.
Every other parameter has a reason why it is not `followed`, and is differentiated for each client, side by side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from dovetail.engine.convolutions import data_axes, kernel_axes, patches_of
from dovetail.engine.tracing import bind, inner_program

__all__ = ["Program", "Use", "program_of"]

_REORDERED = ("reshape", "transpose", "squeeze", "expand_dims", "copy", "copy_p", "convert_element_type")
_LINEAR = (*_REORDERED, "broadcast_in_dim", "slice", "rev", "neg", "reduce_sum")
_NUMBER = jax.ShapeDtypeStruct((), np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """How one parameter enters the program, for one client.

    Arguments:
        kind: "product" (of `left`, positions x rows), "rows" (that `left` names), "scale", "bias", or "none".
        reason: of "none", why the parameter is differentiated by itself.
        shape: of the parameter.
        out: shape and type of the operation's output.
        left: shape and type of what is kept of the other operand.
        positions: of a product, how often the kernel is passed.
        is_dense: whether every record passes the kernel once.
        view: from the parameter to the operand that enters the operation.
        operand: shape and type of that operand.
        slopes: of a product, from the gradient of the output to (positions, columns).
        matrix: of a product, from a matrix (rows, columns) to one of the operand's shape.
    """

    kind: str
    shape: jax.ShapeDtypeStruct
    reason: str = ""
    out: jax.ShapeDtypeStruct | None = None
    left: jax.ShapeDtypeStruct | None = None
    positions: int = 0
    is_dense: bool = False
    is_reordered: bool = False
    view: Callable[[jax.Array], jax.Array] = lambda value: value
    operand: jax.ShapeDtypeStruct = _NUMBER
    slopes: Callable[[jax.Array], jax.Array] = lambda slope: slope
    matrix: Callable[[jax.Array], jax.Array] = lambda matrix: matrix
    sign: float = 1.0

    @property
    def is_outer(self) -> bool:
        """Whether a client's gradient need not be formed."""
        return self.kind == "product" and self.is_dense and self.is_reordered

    def describe(self) -> str:
        """How a client's gradient of this parameter is measured and added up, in words."""
        match self.kind:
            case "none":
                return f"a gradient for each client, as {self.reason}"
            case "rows":
                return "the rows that a client reads"
            case "product" if not self.is_outer:
                return f"formed from {self.positions} positions of a client's records"
            case "product":
                return "a product that is never formed"
        return f"formed, a {self.kind}"

    @property
    def is_summed(self) -> bool:
        """Whether a gradient is a sum over several positions of one record, which may cancel."""
        return not (
            self.is_outer or (self.kind == "bias" and self.out is not None and self.out.size == self.shape.size)
        )

    @property
    def num_floats(self) -> int:
        """How many numbers the gradient of one client takes, with all that it is computed from."""
        if self.kind == "none":
            return 3 * self.shape.size
        if self.kind == "bias":
            return self.shape.size
        kept = (self.left.size if self.left is not None else 0) + (self.out.size if self.out is not None else 0)
        if self.is_outer:
            return kept
        return kept + (0 if self.kind == "rows" else self.shape.size)

    def restore(self, gradient: jax.Array) -> jax.Array:
        """A sum of gradients in the shape of the parameter (`examples.gradients_of`)."""
        if self.kind == "product" and self.is_reordered:
            return self.to_parameter(self.matrix(gradient))
        return self.to_parameter(gradient.reshape(self.operand.shape)) if self.kind == "rows" else gradient

    def to_parameter(self, operand: jax.Array) -> jax.Array:
        """The gradient of the parameter, from that of the operand."""
        (found,) = jax.linear_transpose(self.view, self.shape)(operand)
        return found


class Program:
    """A model's program for one client.

    Arguments:
        closed: what JAX traced, from the parameters' leaves and the records to the outputs.
        uses: how each leaf enters.
    """

    def __init__(self, closed: core.ClosedJaxpr, uses: Sequence[Use]) -> None:
        self._closed = closed
        self.uses = tuple(uses)

    @property
    def is_followed(self) -> bool:
        """Whether any parameter's gradient needs not be carried through the program client by client."""
        return any(use.kind != "none" for use in self.uses)

    def run(
        self, leaves: Sequence[jax.Array], records: jax.Array, probes: Sequence[jax.Array | None]
    ) -> tuple[Any, list[Any]]:
        """The outputs for one client's records, with a probe added where each parameter enters; what each one met."""
        walk = _Walk(self._closed, leaves, records, followed=[use.kind != "none" for use in self.uses], probes=probes)
        (outputs,) = walk.outputs
        return outputs, [note.left if note else None for note in walk.notes]


def program_of(apply: Callable[[Any, Any], Any], weights: Any, records: jax.ShapeDtypeStruct) -> Program:
    """Read how the leaves of `weights` enter a model, for a client with such records.

    Arguments:
        apply: the model, from weights and records to one array of outputs.
        weights: parameters, or their shapes.
    """
    leaves, structure = jax.tree.flatten(weights)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]

    def of_leaves(leaves: list[jax.Array], records: jax.Array) -> jax.Array:
        return apply(jax.tree.unflatten(structure, leaves), records)

    closed = jax.make_jaxpr(of_leaves)(shapes, jax.ShapeDtypeStruct(records.shape, records.dtype))
    found: list[_Walk] = []

    def trace(leaves: list[jax.Array], records: jax.Array) -> None:
        found.append(_Walk(closed, leaves, records, followed=[True] * len(leaves)))

    jax.eval_shape(trace, shapes, records)
    walk = found[0]
    uses = []
    for shape, note, reason in zip(shapes, walk.notes, walk.reasons, strict=True):
        if reason or note is None:
            uses.append(Use("none", shape, reason=reason or "it is not used"))
        else:
            uses.append(note.use(shape, records.shape[0]))
    return Program(closed, uses)


@dataclasses.dataclass(frozen=True, eq=False)
class _View:
    """A parameter on its way to the operation that it enters: its number, its operand, and how that comes about."""

    number: int
    value: jax.Array
    steps: tuple[Callable[[jax.Array], jax.Array], ...] = ()
    is_reordered: bool = True

    def apply(self, value: jax.Array) -> jax.Array:
        for step in self.steps:
            value = step(value)
        return value


@dataclasses.dataclass(eq=False)
class _Note:
    """How a parameter entered: kept while the program is walked through."""

    kind: str
    view: _View
    out: jax.Array
    left: Any = None
    from_records: bool = True
    slopes: Callable[[jax.Array], jax.Array] = lambda slope: slope
    matrix: Callable[[jax.Array], jax.Array] = lambda matrix: matrix
    sign: float = 1.0

    def use(self, shape: jax.ShapeDtypeStruct, records: int) -> Use:
        left = None if self.left is None else jax.ShapeDtypeStruct(self.left.shape, self.left.dtype)
        positions = left.shape[0] if self.kind == "product" and left is not None else 0
        return Use(
            self.kind,
            shape,
            out=jax.ShapeDtypeStruct(self.out.shape, self.out.dtype),
            left=left,
            positions=positions,
            is_dense=self.from_records and positions == records,
            is_reordered=self.view.is_reordered,
            view=self.view.apply,
            operand=jax.ShapeDtypeStruct(self.view.value.shape, self.view.value.dtype),
            slopes=self.slopes,
            matrix=self.matrix,
            sign=self.sign,
        )


class _Walk:
    """One walk through a program, equation by equation, which follows parameters to the operations that they enter.

    `notes` says how each parameter entered, `reasons` why it was not followed any further.
    """

    def __init__(
        self,
        closed: core.ClosedJaxpr,
        leaves: Sequence[jax.Array],
        records: jax.Array,
        *,
        followed: Sequence[bool],
        probes: Sequence[jax.Array | None] | None = None,
    ) -> None:
        self.notes: list[_Note | None] = [None] * len(leaves)
        self.reasons = [""] * len(leaves)
        self._probes = probes
        self._from_records: set[core.Var] = set()
        values = [
            _View(i, leaf) if follow else leaf for i, (leaf, follow) in enumerate(zip(leaves, followed, strict=True))
        ]
        outputs = self._run(closed.jaxpr, closed.consts, [*values, records], [False] * len(leaves) + [True])
        self.outputs = [self._lay_open(value, "is an output") for value, _ in outputs]

    def _run(
        self, jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], tainted: Sequence[bool]
    ) -> list[tuple[Any, bool]]:
        """The values of a program's outputs, and whether each depends on records."""
        known: dict[Any, tuple[Any, bool]] = {}

        def read(atom: Any) -> tuple[Any, bool]:
            return (atom.val, False) if isinstance(atom, core.Literal) else known[atom]

        for var, const in zip(jaxpr.constvars, consts, strict=True):
            known[var] = const, False
        for var, value, taint in zip(jaxpr.invars, arguments, tainted, strict=True):
            known[var] = value, taint
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            values, taint = [value for value, _ in operands], any(taint for _, taint in operands)
            if (inner := inner_program(equation)) is not None:
                found = self._run(inner.jaxpr, inner.consts, values, [taint for _, taint in operands])
            else:
                found = [(value, taint) for value in self._apply(equation, values, [taint for _, taint in operands])]
            known.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Any, values: list[Any], tainted: list[bool]) -> list[Any]:
        """The outputs of one equation."""
        views = [i for i, value in enumerate(values) if isinstance(value, _View)]
        if not views:
            return bind(equation, values)
        if len(views) == 1:
            at = views[0]
            others = [i for i in range(len(values)) if i != at]
            moved = _as_view(equation, values, at)
            if moved is not None:
                return [moved]
            note = _as_use(equation, values, at, from_records=any(tainted[i] for i in others))
            if note is not None:
                return [self._note(note)]
        name = equation.primitive.name
        return bind(equation, [self._lay_open(value, f"goes into {name}") for value in values])

    def _note(self, note: _Note) -> jax.Array:
        """Keep how a parameter entered, and add its probe to the output; a second time it is not followed."""
        number = note.view.number
        if self.notes[number] is not None:
            self.reasons[number] = self.reasons[number] or "it is used more than once"
        self.notes[number] = note
        probe = self._probes[number] if self._probes is not None else None
        return note.out if probe is None else note.out + probe

    def _lay_open(self, value: Any, reason: str) -> Any:
        """The array in place of a parameter that is followed no further."""
        if not isinstance(value, _View):
            return value
        self.reasons[value.number] = self.reasons[value.number] or f"it {reason}"
        return value.value


def _as_view(equation: Any, values: list[Any], at: int) -> _View | None:
    """The parameter after an operation that is linear in it and meets nothing else; None if it is another one."""
    view: _View = values[at]
    name = equation.primitive.name
    if name in ("mul", "div") and len(values) == 2 and isinstance(equation.invars[1 - at], core.Literal):
        if name == "div" and at == 1:
            return None
        is_reordered = False
    elif name in _LINEAR and len(values) == 1:
        is_reordered = name in _REORDERED or (
            name == "broadcast_in_dim" and math.prod(equation.params["shape"]) == view.value.size
        )
        if name == "convert_element_type" and equation.params["new_dtype"] != view.value.dtype:
            return None
    else:
        return None

    def step(value: jax.Array) -> jax.Array:
        return bind(equation, [*values[:at], value, *values[at + 1 :]])[0]

    return _View(view.number, step(view.value), (*view.steps, step), view.is_reordered and is_reordered)


def _as_use(equation: Any, values: list[Any], at: int, *, from_records: bool) -> _Note | None:
    """How the parameter enters by this equation; None if that is not by an operation that is linear in it."""
    name, params = equation.primitive.name, equation.params
    view: _View = values[at]
    opened = [value.value if isinstance(value, _View) else value for value in values]
    if name == "dot_general":
        return _as_product(params, view, opened[1 - at], at, from_records=from_records)
    if name == "conv_general_dilated" and at == 1:
        return _as_patches(params, view, opened[0], from_records=from_records)
    if name == "gather" and at == 0 and view.is_reordered and _reads_rows(params, view.value, opened[1]):
        (out,) = bind(equation, opened)
        return _Note("rows", view, out, left=_row_numbers(opened[1], params, view.value), from_records=from_records)
    if name in ("add", "add_any", "sub", "mul"):
        (out,) = bind(equation, opened)
        if out.dtype != view.value.dtype:
            return None
        view = _broadcast(view, out.shape)
        if name == "mul":
            return _Note("scale", view, out, left=jnp.broadcast_to(opened[1 - at], out.shape))
        return _Note("bias", view, out, sign=-1.0 if name == "sub" and at == 1 else 1.0)
    return None


def _broadcast(view: _View, shape: tuple[int, ...]) -> _View:
    """The parameter's operand in the shape of what it enters, where the operation repeats it."""
    if view.value.shape == shape:
        return view

    def step(value: jax.Array) -> jax.Array:
        return jnp.broadcast_to(value, shape)

    return _View(view.number, step(view.value), (*view.steps, step), is_reordered=False)


def _as_product(params: Any, view: _View, data: Any, at: int, *, from_records: bool) -> _Note | None:
    """A product of the parameter's operand with data, over axes of both, without axes that stay side by side."""
    contracted, batched = params["dimension_numbers"]
    if any(batched) or data.dtype != view.value.dtype or params.get("preferred_element_type") not in (None, data.dtype):
        return None
    own, theirs = contracted[at], contracted[1 - at]
    free = [axis for axis in range(view.value.ndim) if axis not in own]
    kept = [axis for axis in range(data.ndim) if axis not in theirs]
    rows = math.prod(data.shape[axis] for axis in theirs)
    columns = math.prod(view.value.shape[axis] for axis in free)
    sides = (view.value, data) if at == 0 else (data, view.value)
    out = lax.dot_general(*sides, **params)
    kept_shape, free_shape = [data.shape[axis] for axis in kept], [view.value.shape[axis] for axis in free]

    def slopes(slope: jax.Array) -> jax.Array:
        if at == 0:
            slope = jnp.moveaxis(slope, range(len(free)), range(len(kept), len(kept) + len(free)))
        return slope.reshape(math.prod(kept_shape), columns)

    def matrix(matrix: jax.Array) -> jax.Array:
        cut = matrix.reshape(*[view.value.shape[axis] for axis in own], *free_shape)
        return cut.transpose(np.argsort([*own, *free]))

    left = data.transpose(*kept, *theirs).reshape(math.prod(kept_shape), rows)
    return _Note("product", view, out, left=left, from_records=from_records, slopes=slopes, matrix=matrix)


def _as_patches(params: Any, view: _View, data: Any, *, from_records: bool) -> _Note | None:
    """A convolution as a product of patches of the data with the kernel as a matrix; None if it goes by groups."""
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1 or data.dtype != view.value.dtype:
        return None
    if params.get("preferred_element_type") not in (None, data.dtype):
        return None
    numbers = params["dimension_numbers"]
    kernel_order, out_order = kernel_axes(numbers.rhs_spec), data_axes(numbers.out_spec)
    kernel = view.value.transpose(kernel_order)
    patches = patches_of(
        data.transpose(data_axes(numbers.lhs_spec)),
        kernel.shape[:-2],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
    )
    left = patches.reshape(-1, patches.shape[-1])
    columns = kernel.shape[-1]
    product = jnp.matmul(left, kernel.reshape(-1, columns), precision=params["precision"])
    out = product.reshape(*patches.shape[:-1], columns).transpose(np.argsort(out_order))

    def slopes(slope: jax.Array) -> jax.Array:
        return slope.transpose(out_order).reshape(-1, columns)

    def matrix(matrix: jax.Array) -> jax.Array:
        return matrix.reshape(kernel.shape).transpose(np.argsort(kernel_order))

    return _Note("product", view, out, left=left, from_records=from_records, slopes=slopes, matrix=matrix)


def _reads_rows(params: Any, table: jax.Array, indices: jax.Array) -> bool:
    """Whether a gather reads whole rows of a table, one for each number, each along the last axes of the output."""
    numbers = params["dimension_numbers"]
    places = indices.ndim - 1
    return (
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *table.shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(places, places + table.ndim - 1))
    )


def _row_numbers(indices: jax.Array, params: Any, table: jax.Array) -> jax.Array:
    """Which row of the table each place reads, int32 (places,); -1 where it reads none."""
    rows = indices.reshape(-1).astype(jnp.int32)
    if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        return jnp.where((rows >= 0) & (rows < len(table)), rows, -1)
    return jnp.clip(rows, 0, len(table) - 1)
