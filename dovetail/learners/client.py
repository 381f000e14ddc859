"""A client's update: what it would like the model to move by.

- `fedsgd`: the negative gradient of its mean loss;
- `fedavg`: where `epochs` passes of SGD over batches of `batch` records lead (McMahan et al. 2017);
- `fedprox`: the same with the proximal term mu/2 |w - w_0|^2 in the loss (Li et al. 2020);
- `moments`: second moments of its records, whatever the model (`learners.moments`), once;
- private steps: each record's gradient clipped, the batch's sum noised, then a step (DP-SGD, Abadi et al. 2016).

Records are visited in one random order per round, the same in each of its local epochs. The last batch may be smaller;
its mean is over the records it has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dovetail import _validate
from dovetail._fields import with_fields_in_help
from dovetail.data._base import Loss
from dovetail.learners.losses import cross_entropy
from dovetail.mechanisms.gaussian import normal

__all__ = [
    "ClientUpdate",
    "Logits",
    "cross_entropy",
    "local_update",
    "private_step",
    "private_update",
    "visiting_order",
]

_AT_ONCE = 512  # records whose gradient is computed at once: that of more needs memory for all of them

Logits = Callable[[Any, jax.Array], jax.Array]


@with_fields_in_help
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)  # slots: or msgspec leaves out the defaults
class ClientUpdate:
    """How a client turns the model and its records into an update: the section [client] of a config."""

    update: Literal["fedsgd", "fedavg", "fedprox", "moments"] = "fedsgd"
    """`fedsgd` (one gradient), `fedavg` (local epochs), `fedprox` (local epochs with a proximal term) or `moments`
    (statistics for ridge regression, uploaded once)."""
    learning_rate: float = 0.1
    """Learning rate of local steps."""
    epochs: int = 1
    """Local epochs of `fedavg` and `fedprox`."""
    batch: int = 10
    """Number of records per local step."""
    mu: float = 0.0
    """Weight of the proximal term of `fedprox`."""
    project: int | None = None
    """With `update = "moments"`: features are projected to so many dimensions by a fixed public random matrix; not at
    all by default."""
    weight: float = 1.0
    """With `update = "moments"`: the weight of the moments with the labels beside those of the features."""
    views: tuple[str, ...] = ()
    """Views of each image to average over beside the image itself, before clipping: `shift:1` (four shifts), `rotate:8`
    (two turns), `flip`, `zoom:1.1`, or `module:name`."""

    def __post_init__(self) -> None:
        _validate.one_of(("fedsgd", "fedavg", "fedprox", "moments"), update=self.update)
        _validate.positive(learning_rate=self.learning_rate)
        _validate.integer(epochs=self.epochs, batch=self.batch)
        _validate.at_least(1, epochs=self.epochs, batch=self.batch)
        _validate.non_negative(mu=self.mu)
        if self.mu and self.update != "fedprox":
            raise ValueError(f"expected mu = 0 unless update = 'fedprox', got mu={self.mu}")
        _validate.integer(**_validate.not_none(project=self.project))
        _validate.positive(weight=self.weight)
        if self.update != "moments" and (self.project is not None or self.weight != 1):
            raise ValueError(
                "expected client.project and client.weight with update = 'moments' only, "
                f"got project={self.project} and weight={self.weight}"
            )

    @property
    def local(self) -> bool:
        """Whether the client takes steps of its own (fedavg, fedprox), and does not send one gradient or statistics."""
        return self.update in ("fedavg", "fedprox")

    def batch_size(self, records: int) -> int:
        """Records in one local batch of a client that holds this many."""
        return min(self.batch, records) if self.local else records

    def num_steps(self, records: int) -> int:
        """Local steps of a client that holds this many records."""
        return self.epochs * math.ceil(records / self.batch) if self.local else 1


def visiting_order(count: jax.Array, records: int, *, key: jax.Array) -> jax.Array:
    """A random order of the first `count` of `records` positions, the rest behind them.

    Each position is the low end of a random word, so that one sort of plain words gives the order; it is uniform up to
    ties in the other bits. A position has as many bits as the client's own count needs: with as many as the largest
    client needs, that client would decide how everybody's ties are broken.

    Returns: (records,), int32, a permutation of the positions.

    Guarantees:
        The first `count` depend on `count` and the key alone.
    """
    count = jnp.asarray(count, jnp.uint32)
    width = jnp.maximum(32 - jax.lax.clz(jnp.maximum(count, 1) - 1), 1)
    position = jnp.arange(records, dtype=jnp.uint32)
    tag = jax.random.bits(key, (records,), jnp.uint32) >> (width + 1) << width
    behind = jnp.uint32(1 << 31)
    words = jnp.sort(jnp.where(position < count, tag, behind) | position)
    return (words & jnp.where(position < count, (1 << width) - 1, behind - 1)).astype(jnp.int32)


def local_update(
    settings: ClientUpdate, logits: Logits, loss: Loss = cross_entropy, *, own_steps: bool = False
) -> Callable[..., Any]:
    """The update function of one client: (params, inputs, labels, count) -> an update like params.

    Arguments:
        logits: `logits(params, inputs)`, of parameters as a vector or in the model's own shape: that is faster, as no
            step then cuts a vector and joins the parts of its gradient.
        loss: of `learners.losses`, or one's own.
        own_steps: whether a client takes as many local steps as its own records make; otherwise it takes as many as
            there are rows for, and those without a record lead nowhere. Side by side, clients take the same steps.

    Returns: a function, to which only the first `count` of the records are real.
    """

    def mean_loss(params: Any, inputs: jax.Array, labels: jax.Array, weight: jax.Array) -> jax.Array:
        losses = loss(logits(params, inputs), labels)
        return jnp.sum(losses * weight) / jnp.maximum(jnp.sum(weight), 1.0)

    uphill = jax.grad(mean_loss)
    # minus the gradient, without a pass over it that only changes the sign
    downhill = jax.grad(lambda *args: -mean_loss(*args))

    def fedsgd(params: Any, inputs: jax.Array, labels: jax.Array, count: jax.Array) -> Any:
        weight = (jnp.arange(len(labels)) < count).astype(jnp.float32)
        if len(labels) <= _AT_ONCE:
            return downhill(params, inputs, labels, weight)

        def add(total: Any, block: tuple[jax.Array, ...]) -> tuple[Any, None]:
            num_real = jnp.sum(block[2])
            return jax.tree.map(lambda sum_, slope: sum_ + num_real * slope, total, downhill(params, *block)), None

        zero = jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zero, _cut_into_batches(_AT_ONCE, inputs, labels, weight))
        return jax.tree.map(lambda sum_: sum_ / jnp.maximum(jnp.sum(weight), 1.0), total)

    def descend(params: Any, inputs: jax.Array, labels: jax.Array, count: jax.Array) -> Any:
        weight = (jnp.arange(len(labels)) < count).astype(jnp.float32)
        batches = _cut_into_batches(settings.batch_size(len(labels)), inputs, labels, weight)

        def step(current: Any, data: tuple[jax.Array, ...]) -> tuple[Any, None]:
            any_real = jnp.sum(data[2]) > 0

            def move(here: jax.Array, slope: jax.Array, start: jax.Array) -> jax.Array:
                direction = slope + settings.mu * (here - start) if settings.mu else slope
                return jnp.where(any_real, here - settings.learning_rate * direction, here)

            return jax.tree.map(move, current, uphill(current, *data), params), None

        def own_step(i: jax.Array, current: Any) -> Any:
            return step(current, jax.tree.map(lambda batch: batch[i], batches))[0]

        def epoch(current: Any, _: None) -> tuple[Any, None]:
            if own_steps:
                num_steps = (count + batches[2].shape[1] - 1) // batches[2].shape[1]
                return jax.lax.fori_loop(0, num_steps, own_step, current), None
            return jax.lax.scan(step, current, batches)

        final, _ = jax.lax.scan(epoch, params, None, length=settings.epochs)
        return jax.tree.map(jnp.subtract, final, params)

    return descend if settings.local else fedsgd


def _cut_into_batches(size: int, inputs: jax.Array, labels: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Records cut into parts, (parts, size, ...), the last filled up with the last record, which weighs nothing there.

    With zeros, a model or a loss that is no number at zero would be none for a client whose batch others' counts fill
    up, as 0 * NaN is NaN.
    """
    count = math.ceil(len(weight) / size)
    spare = count * size - len(weight)

    def cut(x: jax.Array, mode: str) -> jax.Array:
        filled = jnp.pad(x, [(0, spare)] + [(0, 0)] * (x.ndim - 1), mode=mode) if spare else x
        return filled.reshape(count, size, *x.shape[1:])

    return cut(inputs, "edge"), cut(labels, "edge"), cut(weight, "constant")


def private_step(*, learning_rate: float, batch: float, std: float) -> Callable[..., jax.Array]:
    """One noisy step: (current, clipped sum, noise_scale, key) -> where the client's model moves.

    Arguments:
        batch: what the sum is divided by, a public constant.
        std: standard deviation of the noise on the sum, where noise_scale is 1.
    """

    def move(current: jax.Array, total: jax.Array, scale: jax.Array, key: jax.Array) -> jax.Array:
        noise = std * scale * normal(key, current.shape, current.dtype)
        return current - learning_rate / batch * (total + noise)

    return move


def private_update(
    clipped_sum: Callable[[jax.Array, jax.Array], jax.Array], *, learning_rate: float, batch: float, std: float
) -> Callable[..., jax.Array]:
    """The update function of a client that takes noisy steps: (params, rows, noise_scale, key) -> a vector like params.

    Arguments:
        clipped_sum: `clipped_sum(params, row)`, the sum of the clipped gradients of the records in a row.
        batch: what a step's sum is divided by, a public constant.
        std: standard deviation of the noise on the sum, where noise_scale is 1.

    Returns: a function that takes one step for every row of `rows`.
    """
    move = private_step(learning_rate=learning_rate, batch=batch, std=std)

    def update(params: jax.Array, rows: jax.Array, noise_scale: jax.Array, key: jax.Array) -> jax.Array:
        def step(current: jax.Array, data: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            row, scale, step_key = data
            return move(current, clipped_sum(current, row), scale, step_key), None

        final, _ = jax.lax.scan(step, params, (rows, noise_scale, jax.random.split(key, len(rows))))
        return final - params

    return update
