"""Local training of linear models, and the sum of the clients' rescaled updates, by matrix products alone.

Three forms, chosen by shape:

- *one record per client*: the update is the record times a row of coefficients, its norm the product of the two norms,
  and the sum over clients one product features^T (scaled coefficients): no client's update is ever formed.
- *gram*, for a few records and one gradient step: the same sum, with norms from the products of a client's rows, which
  are computed once a training (`products_of_rows`, `bound_gradient_norms`).
- *explicit*: one (classes, features) block a client, transposed so that every product runs along contiguous features.

A norm is computed from what is added up, or exactly as a product, or as a difference plus a proven bound on its
rounding: Gram matrices cancel for records that are nearly equal, and clipping by bare differences is not clipping.
The bias is a feature of constant value; it is never appended to the data.

Whatever the loss, a record's gradient is the record times the slope of its loss in the logits: probability less target
for the softmax cross-entropy, and for any other loss its derivative, taken record by record. Weights are
(features + 1, classes), the bias last.

*Norms by Gram matrices.* The gradient of a client with rows x_i (the constant feature among them) and residuals r_i is
the sum of x_i (x) r_i, of squared norm sum_ij <x_i, x_j> <r_i, r_j>. Views of one record are nearly equal, and so the
sum may cancel in single precision; what `bound_gradient_norms` returns is therefore that sum plus a worst-case bound on
all rounding, relative to (sum_i |x_i| |r_i|)^2, which does not cancel: clipping by it is clipping
(docs/proofs/views.md).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Clients, Loss
from dovetail.learners.client import ClientUpdate
from dovetail.learners.losses import cross_entropy

__all__ = [
    "CANCELLED",
    "LONGEST",
    "MOST_ROWS",
    "Chunk",
    "Products",
    "Scaling",
    "bound_gradient_norms",
    "bound_norms",
    "is_worthwhile",
    "products_of_rows",
    "rounding_bound",
    "row_norms",
    "scaled_sum",
    "uses_gram",
]

_UNROLLED = 64  # up to so many local steps are compiled one by one, more as a loop
_EXACT = jax.lax.Precision.HIGHEST  # of sums of clipped vectors: a coarser product is longer than the clip norm

Scaling = Callable[[jax.Array], jax.Array]  # norms of clients (clients,) -> what each update is multiplied by, >= 0


class Chunk(NamedTuple):
    """The records of some clients, in the order in which they are visited; only the first `counts` of each are real.

    `inputs` are (clients, records, features), `labels` (clients, records, ...). With `products_of_rows` of these
    records, in this order, the form is *gram*.
    """

    inputs: jax.Array
    labels: jax.Array
    counts: jax.Array
    products: Products | None = None


def is_worthwhile(settings: ClientUpdate, records: int) -> bool:
    """Whether `scaled_sum` is fast for clients of so many records: not for many steps with one, which are unrolled."""
    return records > 1 or settings.num_steps(records) <= _UNROLLED


def scaled_sum(
    weights: jax.Array,
    constant: float,
    chunk: Chunk,
    settings: ClientUpdate,
    scaling: Scaling,
    loss: Loss = cross_entropy,
) -> jax.Array:
    """The sum over the chunk of each client's update times `scaling` of its norm.

    Arguments:
        weights: the model's, (features + 1, classes).
        constant: the value of the constant feature.
        settings: how a client turns the model and its records into an update.
        scaling: from the norms of updates to what each is multiplied by.

    Returns: an array like the weights.

    Guarantees:
        Equal to forming, scaling and adding the updates one by one, up to float summation order.
        A client whose scale is zero adds nothing, nor does one whose records, update or squared norm are not finite:
        `scaling` is asked for norm zero in its place.
        No client adds more than its scaled norm, however large or alike its records are.
    """

    def of_finite(norms: jax.Array) -> jax.Array:
        finite = jnp.isfinite(norms * norms)
        return jnp.where(finite, scaling(jnp.where(finite, norms, 0.0)), 0.0)

    form = _scaled_sum_of_single_records if chunk.inputs.shape[1] == 1 else _scaled_sum_by_movements
    if chunk.products is not None:
        if settings.local:
            raise ValueError(f"expected products of records with update = 'fedsgd' only, got {settings.update!r}")
        form = functools.partial(_scaled_sum_by_gram, chunk.products)
    return form(weights, constant, chunk, settings, of_finite, loss)


def _scaled_sum_of_single_records(
    weights: jax.Array, constant: float, chunk: Chunk, settings: ClientUpdate, scaling: Scaling, loss: Loss
) -> jax.Array:
    """`scaled_sum` for clients of one record: an update is minus the record times a row of coefficients."""
    inputs = chunk.inputs[:, 0]
    start = _logits(weights, constant, chunk.inputs)
    square = jnp.sum(inputs * inputs, axis=1) + constant**2  # logits move by this times the row of coefficients
    record_norms = jnp.hypot(row_norms(inputs), constant)
    rows = jnp.zeros_like(start)
    for step in _local_steps(chunk, settings, weights.shape[1], loss):
        residual = step.residual(start - square[:, None, None] * rows if step.later else start)
        rows = (step.keep * rows if settings.mu else rows) + residual
    rows = rows[:, 0]
    norms = record_norms * row_norms(rows)
    if not settings.local:
        norms = bound_norms(norms, _infinite_if_long(record_norms) * row_norms(rows), chunk.counts, weights.shape[1])
    return _sum_rows(_scale_clients(rows, scaling(norms)), inputs, constant, numbers=jnp.isfinite(record_norms))


def _scaled_sum_by_gram(
    products: Products,
    weights: jax.Array,
    constant: float,
    chunk: Chunk,
    settings: ClientUpdate,
    scaling: Scaling,
    loss: Loss,
) -> jax.Array:
    """`scaled_sum` for one gradient step, with norms from the products of a client's rows."""
    (step,) = _local_steps(chunk, settings, weights.shape[1], loss)
    residual = step.residual(_logits(weights, constant, chunk.inputs))
    residual = jax.lax.optimization_barrier(residual)  # what is measured is what is added up, to the last bit
    scaled = _scale_clients(residual, scaling(bound_gradient_norms(products, residual, chunk.counts)))
    flat = chunk.inputs.reshape(-1, chunk.inputs.shape[-1])
    is_real = jnp.arange(chunk.inputs.shape[1]) < chunk.counts[:, None]  # what is read as padding may be no number, too
    numbers = (jnp.isfinite(products.lengths) & is_real).ravel()
    return _sum_rows(scaled.reshape(len(flat), -1), flat, constant, numbers=numbers)


def _sum_rows(scaled: jax.Array, inputs: jax.Array, constant: float, *, numbers: jax.Array) -> jax.Array:
    """Minus the sum of every row of inputs (and its constant) times its scaled coefficients, like the weights.

    Arguments:
        scaled: the coefficients, (rows, classes).
        inputs: (rows, features).
        numbers: which rows have a finite length, (rows,).

    Where a row has no finite length its coefficients are zero, and 0 * inf is NaN: it may not meet the others.
    """
    numbers = numbers[:, None]

    def add_up(inputs: jax.Array) -> jax.Array:
        return jnp.matmul(scaled.T, inputs, precision=_EXACT)

    product = jax.lax.cond(jnp.all(numbers), add_up, lambda x: add_up(jnp.where(numbers, x, 0.0)), inputs)
    return -jnp.concatenate([product.T, constant * scaled.sum(axis=0, keepdims=True)])


def _scaled_sum_by_movements(
    weights: jax.Array, constant: float, chunk: Chunk, settings: ClientUpdate, scaling: Scaling, loss: Loss
) -> jax.Array:
    """`scaled_sum` for any steps: every client's movement is formed, one (classes, features) block each."""
    clients, _, features = chunk.inputs.shape
    classes = weights.shape[1]

    def move(state: _Movement, step: _Step, part: jax.Array, start: jax.Array) -> _Movement:
        slopes, bias = state
        shift = jnp.einsum("nbf,ncf->nbc", part, slopes) + constant * bias[:, None] if step.later else 0.0
        residual = step.residual(start + shift)
        if settings.mu:
            slopes, bias = slopes * step.keep, bias * step.keep[..., 0]
        slopes = slopes - jnp.einsum("nbc,nbf->ncf", residual, part)
        return _Movement(slopes, bias - constant * residual.sum(axis=1))

    dtype = chunk.inputs.dtype
    state = _Movement(jnp.zeros((clients, classes, features), dtype), jnp.zeros((clients, classes), dtype))
    if settings.num_steps(chunk.inputs.shape[1]) <= _UNROLLED:
        start = _logits(weights, constant, chunk.inputs)
        for step in _local_steps(chunk, settings, classes, loss):
            state = move(state, step, chunk.inputs[:, step.batch], start[:, step.batch])
    else:
        state = _take_steps_in_loop(weights, constant, chunk, settings, loss, move, state)
    slopes, bias = state
    norms = jnp.sqrt(jnp.sum(slopes**2, axis=(1, 2)) + jnp.sum(bias**2, axis=1))
    if not settings.local:
        norms = bound_norms(norms, _sums_of_norms(weights, constant, chunk, settings, loss), chunk.counts, classes)
    scale = scaling(norms)
    return jnp.concatenate(
        [_scale_clients(slopes, scale).sum(axis=0), _scale_clients(bias, scale).sum(axis=0)[:, None]], axis=1
    ).T


def _sums_of_norms(weights: jax.Array, constant: float, chunk: Chunk, settings: ClientUpdate, loss: Loss) -> jax.Array:
    """For each client, the sum of the norms of its records' gradients, which may cancel: of one gradient step."""
    clients, records, features = chunk.inputs.shape
    (step,) = _local_steps(chunk, settings, weights.shape[1], loss)
    residual = row_norms(step.residual(_logits(weights, constant, chunk.inputs)).reshape(clients * records, -1))
    long = _infinite_if_long(jnp.hypot(row_norms(chunk.inputs.reshape(-1, features)), constant))
    return jnp.sum((long * residual).reshape(clients, records), axis=1)


def _infinite_if_long(lengths: jax.Array) -> jax.Array:
    """Lengths of rows, infinite above `LONGEST`, where no product of records may be relied on."""
    return jnp.where(lengths <= LONGEST, lengths, jnp.inf)


class _Movement(NamedTuple):
    """How far every client's model has moved: slopes (clients, classes, features), bias (clients, classes)."""

    slopes: jax.Array
    bias: jax.Array


def _take_steps_in_loop(
    weights: jax.Array,
    constant: float,
    chunk: Chunk,
    settings: ClientUpdate,
    loss: Loss,
    move: Callable[[_Movement, _Step, jax.Array, jax.Array], _Movement],
    state: _Movement,
) -> _Movement:
    """All local steps in a loop that is compiled once; the last record fills up the last batch, and counts once.

    Arguments:
        move: the movement after a step, from that before, the step, its records, and their logits at the start.
        state: no movement yet.
    """
    records = chunk.inputs.shape[1]
    size = settings.batch_size(records)
    batches = math.ceil(records / size)
    spare = batches * size - records
    inputs, labels = (
        jnp.pad(array, [(0, 0), (0, spare)] + [(0, 0)] * (array.ndim - 2), mode="edge")
        for array in (chunk.inputs, chunk.labels)
    )

    def turn(number: jax.Array, state: _Movement) -> _Movement:
        low = number % batches * size
        part, targets = (jax.lax.dynamic_slice_in_dim(array, low, size, axis=1) for array in (inputs, labels))
        (step,) = _local_steps(Chunk(part, targets, chunk.counts - low), settings, weights.shape[1], loss, most=1)
        return move(state, step._replace(later=True), part, _logits(weights, constant, part))

    return jax.lax.fori_loop(0, settings.num_steps(records), turn, state)


def row_norms(rows: jax.Array) -> jax.Array:
    """The norm of each row, without its square, which may over- or underflow where a product of norms does not.

    Guarantees:
        Right up to rounding wherever it is a normal number, whatever the rows; infinite or NaN rows give no finite one.
    """
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    unit = jnp.clip(largest, 2.0**-126, 2.0**126)  # its inverse is a normal number: smaller ones count as zero
    return unit[:, 0] * jnp.sqrt(jnp.sum((rows / unit) ** 2, axis=1))


class _Step(NamedTuple):
    """One local step of every client.

    `batch` are the records' places, `later` whether a step came before it, `keep` what it keeps of the movement so far
    (1 - learning rate x mu, the proximal term), (clients, 1, 1), `weight` learning rate x 1 / (real records of the
    batch) for real records and 0 for padding, (clients, records of the batch, 1), and `targets` their labels: one-hot
    for the softmax cross-entropy.
    """

    batch: slice
    later: bool
    keep: jax.Array
    weight: jax.Array
    targets: jax.Array
    loss: Loss

    def residual(self, logits: jax.Array) -> jax.Array:
        """`weight` x the slope of each record's loss in its logits: (clients, records of the batch, classes)."""
        if self.loss is cross_entropy:
            return (jax.nn.softmax(logits) - self.targets) * self.weight
        return _loss_slopes(self.loss, logits, self.targets) * self.weight


def _loss_slopes(loss: Loss, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The derivative of each record's loss in its own logits; no record meets another."""
    slope = jax.grad(lambda row, label: loss(row[None], label[None])[0])
    return jax.vmap(jax.vmap(slope))(logits, labels)


def _local_steps(
    chunk: Chunk, settings: ClientUpdate, classes: int, loss: Loss, *, most: int | None = None
) -> Iterator[_Step]:
    """The steps of a local training on these records, or the first `most` of them; fedsgd is one step of rate 1."""
    records = chunk.inputs.shape[1]
    dtype = chunk.inputs.dtype
    size = settings.batch_size(records)
    rate = settings.learning_rate if settings.local else 1.0
    softmax = loss is cross_entropy
    targets = jax.nn.one_hot(chunk.labels, classes, dtype=dtype) if softmax else chunk.labels
    real = (jnp.arange(records) < chunk.counts[:, None]).astype(dtype)
    for number in range(most or settings.num_steps(records)):
        low = number % math.ceil(records / size) * size
        batch = slice(low, min(low + size, records))
        num_real = real[:, batch].sum(axis=1, keepdims=True)
        keep = jnp.where(num_real > 0, 1 - rate * settings.mu, 1.0)[..., None]
        weight = (rate * real[:, batch] / jnp.maximum(num_real, 1.0))[..., None]
        yield _Step(batch, number > 0, keep, weight, targets[:, batch], loss)


def _logits(weights: jax.Array, constant: float, inputs: jax.Array) -> jax.Array:
    """The logits (clients, records, classes) of inputs (clients, records, features)."""
    flat = inputs.reshape(-1, inputs.shape[-1]) @ weights[:-1]
    return flat.reshape(*inputs.shape[:2], -1) + constant * weights[-1]


def _scale_clients(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Each client's values times its scale; nothing where the scale is zero, whatever the values."""
    scale = scale.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(scale == 0, 0.0, values * scale)


MOST_ROWS = 16  # above, gradients themselves are no slower
_UNIT = 2.0**-24  # half the distance of neighbouring float32 numbers, relative
_LARGEST_ROUNDING = 0.01  # of a squared norm: with more rows or classes no Gram matrix is used
CANCELLED = 16.0  # how many times its own length a client's gradient may be the sum of
LONGEST = 2.0**80  # of a row: beside a longer one, coefficients that are flushed to zero would count
_BLOCK = 1 << 23  # numbers of inputs that are in double precision at a time


class Products(NamedTuple):
    """The cosines (clients, rows, rows) and lengths (clients, rows) of clients' rows, with the constant feature."""

    cosines: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray


def rounding_bound(rows: int, classes: int) -> float:
    """Upper bound on all rounding of a squared norm from `rows` products, relative to (sum_i |x_i| |r_i|)^2.

    docs/proofs/views.md, Thm. 1; for operations well below 2^24, as where `uses_gram` holds.
    """
    operations = (rows**2 * classes + 2 * (rows + classes) + 32) * _UNIT
    return operations / (1 - operations)


def bound_norms(norms: jax.Array, sum_of_norms: jax.Array, counts: jax.Array, classes: int) -> jax.Array:
    """Raise the norms of clients to what every form states for as many rows.

    Arguments:
        norms: the norms of the clients' gradients.
        sum_of_norms: for each client, sum_i |x_i| |r_i|: the sum of the norms of what may cancel.
        counts: how many rows each client has.

    Norms by Gram matrices are raised by a bound on their rounding. So, for clients with as few rows, all other norms
    are raised by it too, and a gradient that cancels to less than a sixteenth of the sum is taken to be that long:
    which form a client is computed in depends on the largest client of its class, and its update must not tell which it
    was.

    Guarantees:
        Never below the norms that are given; raised by the client's own rows alone.
    """
    part = _rounding_bounds(counts, classes)
    raised = jnp.maximum(jnp.hypot(norms, jnp.sqrt(part) * sum_of_norms), sum_of_norms / CANCELLED)
    return jnp.where(part > 0, raised, norms)


def _rounding_bounds(counts: jax.Array, classes: int) -> jax.Array:
    """`rounding_bound` for these counts of rows, rounded up to float32; 0 where no Gram matrix is used for them."""
    bounds = [rounding_bound(rows, classes) for rows in range(MOST_ROWS + 1)]
    used = [bound if rows and bound <= _LARGEST_ROUNDING else 0.0 for rows, bound in enumerate(bounds)]
    up = np.nextafter(np.array([*used, 0.0], np.float32), np.float32(np.inf))
    table = np.where(np.array([*used, 0.0]) > 0, up, np.float32(0))
    return jnp.asarray(table)[jnp.minimum(counts, MOST_ROWS + 1)]


def uses_gram(rows: int, classes: int) -> bool:
    """Whether norms by Gram matrices are used for clients of at most so many rows: few, and with little rounding."""
    return 2 <= rows <= MOST_ROWS and rounding_bound(rows, classes) <= _LARGEST_ROUNDING


def products_of_rows(inputs: np.ndarray, clients: Clients, *, constant: float) -> Products:
    """Cosines and lengths of every client's rows with their constant feature, from double precision.

    Guarantees:
        A length is not below that of its row, a cosine is that of the lengths as stated, each up to float32 rounding;
        the length of a row that is longer than 2^80 is infinite.
        Rows that do not count have length and cosines zero.
    """
    rows = clients.max_records
    real = np.arange(rows) < clients.counts[:, None]
    cosines = np.zeros((len(real), rows, rows), np.float32)
    lengths = np.zeros((len(real), rows), np.float32)
    flat = inputs.reshape(len(inputs), -1)
    size = max(1, _BLOCK // (rows * flat.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(real), size):
            part = slice(low, low + size)
            block = flat[clients.rows(np.arange(len(real))[part], width=rows)]
            block = block * np.float32(1 / 255) if block.dtype == np.uint8 else block  # as `chunks.as_float` reads it
            double = block.astype(np.float64)
            both = real[part, :, None] & real[part, None]
            inner = np.where(both, double @ double.swapaxes(1, 2) + constant**2, 0)
            norm = np.sqrt(np.diagonal(inner, axis1=1, axis2=2))
            rounded = np.nextafter(norm.astype(np.float32), np.float32(np.inf)) * (norm != 0)
            lengths[part] = np.where(norm <= LONGEST, rounded, np.inf)
            outer = lengths[part].astype(np.float64)
            outer = outer[:, :, None] * outer[:, None]
            cosines[part] = np.where(inner == 0, 0, inner / np.where(outer == 0, 1, outer))
    return Products(cosines, lengths)


def bound_gradient_norms(products: Products, residuals: jax.Array, counts: jax.Array) -> jax.Array:
    """Upper bounds on the norms of the clients' gradients, from residuals (clients, rows, classes).

    Guarantees:
        Never below the exact norm of the sum of x_i (x) r_i, wherever that is above 2^-60.
        Above it by no more than the rounding bound for the client's own `counts` of rows, or a sixteenth of the sum of
        the norms of what cancels; not finite where a part of it is not.
    """
    classes = residuals.shape[2]
    parts = products.lengths[:, :, None] * residuals
    unit = jnp.clip(jnp.max(jnp.abs(parts), axis=(1, 2)), 2.0**-70, 2.0**126)
    scaled = parts / unit[:, None, None]
    inner = jnp.sum(scaled[:, :, None] * scaled[:, None], axis=3)
    square = jnp.sum(products.cosines * inner, axis=(1, 2))
    sum_of_norms = jnp.sum(jnp.sqrt(jnp.sum(scaled * scaled, axis=2)), axis=1)
    raised = jnp.sqrt(jnp.maximum(square, 0.0) + _rounding_bounds(counts, classes) * (sum_of_norms * sum_of_norms))
    return unit * jnp.maximum(raised, sum_of_norms / CANCELLED)
