"""Sums of clipped gradients, one of each client with one record or a few, without a gradient for each.

Where a parameter enters a model once, by an operation that is linear in it (`engine.uses`), one backward pass gives
what its gradients are products of, for all clients. A kernel that an example passes once (a dense layer) has the
gradient a d^T, of its inputs a and the gradients d of its outputs: its norm is |a| |d|, and the clipped sum over
examples is one matrix product. With several records per client the gradient is a sum of such products: its norm is
taken of blocks of it that are formed and forgotten, and the clipped sum is still one matrix product over all records of
all clients. A kernel that an example passes at many positions (a convolution, a dense layer on a sequence) is small,
and its gradients are formed and added up, a chunk of clients at a time; of a table (an embedding) only the rows that a
client reads. So no norm is ever computed as a difference, as it would be from a Gram matrix of the positions, and no
second backward pass is needed. Any other parameter is differentiated for each client, side by side, a chunk at a time;
linear models go through `engine.linear`.

Read `clipped_client_sum` first. The gradients of one parameter for all clients of a chunk are `Formed`, `Outer`
(products) or `TableRows`, which are measured, clipped (`clip_factors`) and added up.

*Rounding.* A client with records k = 1..K has the gradient sum_k l_k r_k^T of a dense kernel. Its norm is that of the
gradient as it is formed, in blocks that are forgotten; what is added up is one product over the records of all clients.
Records may cancel, and then two roundings of one gradient may be further apart than it is long. With u the unit of
float32, s the factor of clipping and A = sum_k |l_k| |r_k| (`sum_of_norms`):

- alone, the gradient as it is formed is within A n u / (1 - n u) of the exact one with n = K, and what the client adds
  within s A n u / (1 - n u) of s times the exact one with n = K + 1. The `spread`, (2 K + 4) u A, covers both and its
  own rounding, and is added to the norm;
- among others, the client's parts may be added to different partial sums, whose other terms are then rounded as
  coarsely as numbers of size s A are. So a client whose records cancel to less than a sixteenth is left to the general
  way, and s A is at most 16 clip norms. (To shorten it here and not there would tell which way is gone, and so how many
  records the largest client has.)
- s r_k may be flushed to zero while what it cancels is not: an error of at most 2^-126 |l_k| per column. A client with
  |l_k| above 2^80 is left to the general way, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dovetail._jax import materialize
from dovetail.data._base import Loss, Model
from dovetail.engine import linear
from dovetail.engine.convolutions import in_eigen_order
from dovetail.engine.devices import chunk_bytes
from dovetail.engine.uses import Program, Use, program_of
from dovetail.learners import trees
from dovetail.learners.client import ClientUpdate
from dovetail.learners.losses import cross_entropy
from dovetail.mechanisms.gaussian import clip_factor

__all__ = [
    "Formed",
    "Outer",
    "TableRows",
    "clip_factors",
    "clipped_client_sum",
    "clipped_sum",
    "describe_uses",
    "gradients_of",
    "is_worthwhile",
    "zero_unless",
]

_MOST_RECORDS = 8  # of a client, above which forming gradients is as fast
_LARGE_MODEL = 2**16  # parameters


class _Batch(NamedTuple):
    """What clients hold, (clients, records, ...), the weight of each record in its client's mean, and who counts.

    `weights` is (clients, records): 1 / count for a client's own records, 0 for padding. `present` is (clients,).
    """

    inputs: jax.Array
    labels: jax.Array
    weights: jax.Array
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
    """The sum of the gradients of single examples, each clipped: `clipped_client_sum` of clients with one record each.

    Arguments:
        inputs: (examples, ...); `labels` in the same way.
        present: zero for an example that does not count.
    """
    return clipped_client_sum(
        model, unravel, params, inputs[:, None], labels[:, None], present != 0, clip_norm=clip_norm, loss=loss
    )


def clipped_client_sum(
    model: Model,
    unravel: Callable[[jax.Array], Any],
    params: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
    counts: jax.Array,
    *,
    clip_norm: Any,
    loss: Loss = cross_entropy,
) -> jax.Array:
    """The sum over clients of the gradients of their mean losses, each scaled down to `clip_norm` where it is longer.

    Arguments:
        unravel: from the flat vector of parameters to the model's own.
        params: the flat vector of parameters.
        inputs: (clients, records, ...); padding repeats one of a client's own records.
        labels: (clients, records, ...), in the same way.
        counts: how many of each client's records are its own: the first ones.
        loss: one loss per record, from the model's outputs and the labels.

    Returns: a vector like `params`.

    Guarantees:
        Equal to forming, clipping and adding the gradients one by one, up to float summation order; a client
        whose records cancel to less than a sixteenth is formed by itself (`engine.examples`).
        A client without records adds nothing, nor does one whose gradient or squared norm is not finite.
        No client adds more than clip_norm, up to rounding, however large or alike its records are.
        Peak memory grows with the chunk, not with the number of clients times the number of parameters.
    """
    present = (counts > 0) & jnp.all(jnp.isfinite(inputs), axis=tuple(range(1, inputs.ndim)))
    real = jnp.arange(labels.shape[1]) < counts[:, None]
    record_weights = jnp.where(real, 1 / jnp.maximum(counts, 1)[:, None].astype(params.dtype), 0)
    batch = _Batch(zero_unless(present, inputs), labels, record_weights, present)
    weights = unravel(params)
    if model.constant is not None:
        return _clipped_sum_of_linear_model(weights, model.constant, batch, counts, clip_norm, loss).ravel()
    program = program_of(model.apply, weights, jax.eval_shape(lambda: inputs[0]))
    if not program.is_followed:
        total = _sum_over_chunks(_general_sum(model, weights, clip_norm, loss), batch, floats=3 * len(params))
    else:
        floats = sum(use.num_floats for use in program.uses)
        total = _sum_over_chunks(
            _factored_sum(model, weights, program, clip_norm, loss), batch, floats=floats, spare=len(params)
        )
    return materialize(lambda row: trees.flatten_into(row, total), params.shape, params.dtype)


def describe_uses(model: Model, weights: Any, records: jax.ShapeDtypeStruct) -> list[str]:
    """How the gradients of each parameter are clipped, a line each, for clients with such records.

    Arguments:
        weights: the shapes of the parameters.
    """
    if model.constant is not None:
        return ["all parameters: a linear model, by matrix products"]
    uses = program_of(model.apply, weights, records).uses
    return [f"{name}: {use.describe()}" for name, use in zip(trees.names_of_leaves(weights), uses, strict=True)]


def is_worthwhile(model: Model, records: jax.ShapeDtypeStruct) -> bool:
    """Whether `clipped_client_sum` is faster than forming gradients, for clients with several records each.

    `records` is the shape of one client's records. It is faster on a CPU, for a large model, whose gradients would take
    passes over memory, and for few records, as their products are formed twice: to be measured, and to be added up.
    """
    weights = jax.eval_shape(model.init, jax.random.key(0))
    few = records.shape[0] <= _MOST_RECORDS
    large = sum(leaf.size for leaf in jax.tree.leaves(weights)) >= _LARGE_MODEL
    if jax.default_backend() != "cpu" or not few or not large:
        return False
    uses = program_of(model.apply, weights, records).uses
    return all(use.kind == "bias" or use.is_outer for use in uses)


def _clipped_sum_of_linear_model(
    weights: jax.Array, constant: float, batch: _Batch, counts: jax.Array, clip_norm: Any, loss: Loss
) -> jax.Array:
    """`clipped_client_sum` of a linear model, like its parameters; `counts` are the clients' own records."""
    inputs = batch.inputs.reshape(*batch.labels.shape[:2], -1)
    chunk = linear.Chunk(inputs, batch.labels, jnp.where(batch.present, counts, 0).astype(jnp.int32))
    scaling = functools.partial(clip_factor, clip_norm=clip_norm)
    return -linear.scaled_sum(weights, constant, chunk, ClientUpdate(), scaling, loss)


def _sum_over_chunks(add_up: Callable[[_Batch], Any], batch: _Batch, *, floats: int, spare: int = 0) -> Any:
    """The sum of `add_up` over chunks of the batch's clients; padding clients have `present` zero.

    Arguments:
        floats: how many numbers `add_up` holds for one client.
        spare: how many numbers the sum has. A chunk may be as large: where each adds to so long a sum, small chunks
            would spend their time on it.
    """
    count = len(batch.labels)
    size = max(1, min(max(chunk_bytes(jax.default_backend()), 4 * spare) // (4 * floats), count))
    chunks = math.ceil(count / size)
    if chunks <= 1:
        return add_up(batch)
    size = math.ceil(count / chunks)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, chunks * size - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(chunks, size, *x.shape[1:])

    def add(total: Any, chunk: _Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, add_up(chunk)), None

    cuts = jax.tree.map(cut, batch)
    shape = jax.eval_shape(add_up, jax.tree.map(lambda x: x[0], cuts))
    zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
    return jax.lax.scan(add, zero, cuts)[0]


def _general_sum(model: Model, weights: Any, clip_norm: Any, loss: Loss) -> Callable[[_Batch], Any]:
    """The function from a batch to the sum of its clipped gradients, for any model: one gradient per client."""
    apply = in_eigen_order(model.apply)

    def client_loss(weights: Any, x: jax.Array, labels: jax.Array, record_weights: jax.Array) -> jax.Array:
        return jnp.sum(loss(apply(weights, x), labels) * record_weights)

    def add_up(batch: _Batch) -> Any:
        gradients = jax.vmap(jax.grad(client_loss), (None, 0, 0, 0))(weights, *batch[:3])
        factor, _ = clip_factors([Formed(leaf) for leaf in jax.tree.leaves(gradients)], batch.present, clip_norm)
        return jax.tree.map(lambda leaf: Formed(leaf).scaled_sum(factor), gradients)

    return add_up


def _factored_sum(model: Model, weights: Any, program: Program, clip_norm: Any, loss: Loss) -> Callable[[_Batch], Any]:
    """`_general_sum` of a model with this program: gradients as products, where that is shorter.

    One backward pass gives for every parameter the slopes of its outputs: that of `probes`, zeros added to them. A
    parameter that is not followed takes part with its own gradient.
    """
    leaves, structure = jax.tree.flatten(weights)
    uses = program.uses

    def client_loss(
        probes: list[jax.Array], x: jax.Array, labels: jax.Array, record_weights: jax.Array
    ) -> tuple[jax.Array, list[Any]]:
        own = [probe if use.out is None else leaf for use, leaf, probe in zip(uses, leaves, probes, strict=True)]
        added = [None if use.out is None else probe for use, probe in zip(uses, probes, strict=True)]
        outputs, lefts = program.run(own, x, added)
        return jnp.sum(loss(outputs, labels) * record_weights), lefts

    probes = [
        leaf if use.out is None else jnp.zeros(use.out.shape, use.out.dtype)
        for use, leaf in zip(uses, leaves, strict=True)
    ]
    backward = jax.vmap(jax.grad(client_loss, has_aux=True), (None, 0, 0, 0))

    def add_up(batch: _Batch) -> Any:
        slopes, lefts = backward(probes, *batch[:3])
        records = batch.labels.shape[1]
        gradients = [gradients_of(use, left, slope) for use, left, slope in zip(uses, lefts, slopes, strict=True)]
        if records > 1 or any(use.is_summed for use in uses):
            gradients = jax.lax.optimization_barrier(gradients)  # what is measured is what is added up, to the last bit
        own = jnp.sum(batch.weights > 0, axis=1)
        factor, left = clip_factors(gradients, batch.present, clip_norm, records=own)
        sums = [use.restore(gradient.scaled_sum(factor)) for use, gradient in zip(uses, gradients, strict=True)]
        total = jax.tree.unflatten(structure, sums)
        if records == 1:
            return total
        others = batch._replace(present=left)
        return jax.lax.cond(jnp.any(left), lambda total: one_by_one(total, others), lambda total: total, total)

    def one_by_one(total: Any, batch: _Batch) -> Any:
        """The total, and what the present clients of this batch add, each with its gradient formed."""

        def add(total: Any, client: _Batch) -> tuple[Any, None]:
            def add_one(total: Any) -> Any:
                single = jax.tree.map(lambda leaf: leaf[None], client)
                return jax.tree.map(jnp.add, total, _general_sum(model, weights, clip_norm, loss)(single))

            return jax.lax.cond(client.present, add_one, lambda total: total, total), None

        return jax.lax.scan(add, total, batch)[0]

    return add_up


_BLOCK = 1 << 20  # numbers of a gradient that are formed at a time
_UNIT = 2.0**-24  # half the distance of neighbouring float32 numbers, relative
_CANCELLED = 16.0  # how many times its own length a client's gradient may be the sum of
_LONGEST = 2.0**80  # of a record's l_k: beside a longer one, what is flushed to zero of its r_k would count


class Formed(NamedTuple):
    """The gradients of one parameter as they are, first axis the client."""

    values: jax.Array

    def squared_norms(self, clip_norm: Any) -> jax.Array:
        """For each client, the squared norm of its gradient divided by `clip_norm`."""
        return jnp.sum((self.values / clip_norm) ** 2, axis=tuple(range(1, self.values.ndim)))

    def sum_of_norms(self, clip_norm: Any) -> Any:
        """Zero, where `Outer` has a number for each client: nothing cancels in what is added up."""
        return 0.0

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        return jnp.sum(zero_unless(factor > 0, self.values * _broadcast_over_clients(factor, self.values)), axis=0)


class Outer(NamedTuple):
    """The gradients sum_k left_k right_k^T of one kernel: its inputs and the slopes of its outputs.

    `left` is (clients, records, rows of the kernel), `right` (clients, records, columns).
    """

    left: jax.Array
    right: jax.Array

    def squared_norms(self, clip_norm: Any) -> jax.Array:
        """For each client, the squared norm of its gradient divided by `clip_norm`."""
        if self.left.shape[1] == 1:
            return self._relative_norms(clip_norm)[:, 0] ** 2
        return jax.lax.map(lambda sides: _squared_norm(sides[0], sides[1], clip_norm), (self.left, self.right))

    def sum_of_norms(self, clip_norm: Any) -> Any:
        """For each client sum_k |left_k| |right_k| / clip_norm, the norms of what may cancel; 0 for one record.

        Infinite where products may be flushed to zero.
        """
        if self.left.shape[1] == 1:
            return 0.0
        short = jnp.max(jnp.abs(self.left), axis=(1, 2)) * math.sqrt(self.left.shape[2]) <= _LONGEST
        return jnp.where(short, jnp.sum(self._relative_norms(clip_norm), axis=1), jnp.inf)

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        left, right = self.left, self.right * _broadcast_over_clients(factor, self.right)
        left, right = (zero_unless(factor > 0, side).reshape(-1, side.shape[-1]) for side in (left, right))
        return jnp.matmul(left.T, right, precision=jax.lax.Precision.HIGHEST)

    def _relative_norms(self, clip_norm: Any) -> jax.Array:
        """|left_k| |right_k| / clip_norm, (clients, records): norms of the summands, neither squared nor clipped."""
        left, right = (linear.row_norms(side.reshape(-1, side.shape[-1])) for side in self)
        return (left * right / clip_norm).reshape(self.left.shape[:2])


def _squared_norm(left: jax.Array, right: jax.Array, clip_norm: Any) -> jax.Array:
    """The squared norm of left^T right / clip_norm, of which a few rows are formed at a time."""
    records, rows = left.shape
    blocks = math.ceil(rows * right.shape[1] / _BLOCK)
    size = math.ceil(rows / blocks)
    cut = jnp.pad(left, [(0, 0), (0, blocks * size - rows)]).reshape(records, blocks, size).swapaxes(0, 1)

    def square(block: jax.Array) -> jax.Array:
        formed = jnp.matmul(block.T, right, precision=jax.lax.Precision.HIGHEST) / clip_norm
        return jnp.sum(jax.lax.optimization_barrier(jnp.sum(formed * formed, axis=1)))

    return jnp.sum(jax.lax.map(square, cut))


class TableRows(NamedTuple):
    """The gradients of a table of which every client reads some rows: these rows' gradients, each summed.

    `numbers` are (clients, places), which rows; -1 at a place without one, and at all but the first of a row's places.
    `values` are (clients, places, numbers of a row), `like` is a table of zeros.
    """

    numbers: jax.Array
    values: jax.Array
    like: jax.Array

    @classmethod
    def of(cls, numbers: jax.Array, slopes: jax.Array, like: jax.Array) -> TableRows:
        """The gradients from the rows that places (clients, places) read, and the slopes of what they read."""
        same = (numbers[:, :, None] == numbers[:, None, :]) & (numbers >= 0)[:, :, None]
        values = jnp.einsum("npq,nqo->npo", same.astype(slopes.dtype), slopes, precision=jax.lax.Precision.HIGHEST)
        places = numbers.shape[1]
        is_first = jnp.argmax(same, axis=2) == jnp.arange(places)
        return cls(jnp.where(is_first, numbers, -1), values, like)

    def squared_norms(self, clip_norm: Any) -> jax.Array:
        """For each client, the squared norm of its gradient divided by `clip_norm`."""
        own = jnp.where((self.numbers >= 0)[:, :, None], self.values / clip_norm, 0.0)
        return jnp.sum(own**2, axis=(1, 2))

    def sum_of_norms(self, clip_norm: Any) -> Any:
        """Zero: nothing cancels in what is added up."""
        return 0.0

    def scaled_sum(self, factor: jax.Array) -> jax.Array:
        """The sum over clients, each times its factor."""
        values = zero_unless(factor > 0, self.values * _broadcast_over_clients(factor, self.values))
        at = jnp.where(self.numbers >= 0, self.numbers, len(self.like))
        return self.like.at[at.ravel()].add(values.reshape(-1, values.shape[-1]), mode="drop")


def gradients_of(use: Use, left: Any, slope: jax.Array) -> Formed | Outer | TableRows:
    """A parameter's gradients, one for each client, in the order of numbers that `use.restore` takes back.

    Arguments:
        left: what the parameter met in the program of each client (`uses.Program.run`).
        slope: the gradients of the operation's output; of the parameter itself, where it is not followed.
    """
    match use.kind:
        case "none":
            return Formed(slope)
        case "bias":
            return Formed(jax.vmap(use.to_parameter)(use.sign * slope if use.sign < 0 else slope))
        case "scale":
            return Formed(jax.vmap(use.to_parameter)(slope * left))
        case "rows":
            width = math.prod(use.operand.shape[1:])
            like = jnp.zeros((use.operand.shape[0], width), slope.dtype)
            return TableRows.of(left, slope.reshape(*left.shape, width), like)
    right = jax.vmap(use.slopes)(slope)
    if use.is_outer:
        return Outer(left, right)
    formed = jnp.einsum("npi,npo->nio", left, right)
    return Formed(formed if use.is_reordered else jax.vmap(lambda own: use.to_parameter(use.matrix(own)))(formed))


def clip_factors(
    gradients: Sequence[Formed | Outer | TableRows], present: jax.Array, clip_norm: Any, *, records: Any = 1
) -> tuple[jax.Array, jax.Array]:
    """The factors that clip each client's gradient to `clip_norm`, and which clients' gradients must be formed instead.

    Arguments:
        gradients: those of each parameter, for the same clients.
        present: which clients count.
        records: how many records each client has of its own.

    Returns: (factors, to be formed), both (clients,). `spread` keeps factors from exceeding the exact ones where
    records cancel (see the module). They are 0 for clients that do not count and for those to be formed: whose records
    cancel to less than a sixteenth, or whose products may be lost.
    """
    norm = jnp.sqrt(sum(gradient.squared_norms(clip_norm) for gradient in gradients))
    sum_of_norms = sum(gradient.sum_of_norms(clip_norm) for gradient in gradients)
    spread = (2 * records + 4) * _UNIT * sum_of_norms
    kept = present & (sum_of_norms / _CANCELLED <= norm + spread)
    return jnp.where(kept, clip_factor(norm + spread, 1.0), 0.0), present & ~kept


def _broadcast_over_clients(factor: jax.Array, values: jax.Array) -> jax.Array:
    """Numbers of clients (clients,) in a shape that multiplies `values` (clients, ...)."""
    return factor.reshape(-1, *[1] * (values.ndim - 1))


def zero_unless(keep: jax.Array, values: jax.Array) -> jax.Array:
    """Each client's values, or zeros where it is not kept, whatever the values."""
    return jnp.where(_broadcast_over_clients(keep, values), values, 0.0)
