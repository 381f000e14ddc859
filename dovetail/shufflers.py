"""Between clients and analyzer: the only place where `ShuffledReports` is made.

Two paths, which the analyzer cannot tell apart:

- *faithful* (`shuffle`): every report is materialised; a slot that is padded gets dummies from the randomizer's
  blanket, or loses a uniformly random surplus; then every slot is permuted on its own (``linkage = "coordinate"``), or
  whole messages are (``"vector"``, as FLAME prints it).
- *fast* (`deliver`, then `pad` once per round): sums do not depend on the order, so nothing is permuted; the dummies
  of a slot are added as one draw of their sum, and a surplus is dropped by a hypergeometric draw.

Protocols without a shuffler deliver their reports directly; the receiver is then trusted (curator) or sees only
locally randomized reports (local), and the protocol's view says which.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.mechanisms import Blanket

__all__ = [
    "LINKAGES",
    "OVERFLOWS",
    "Layout",
    "Padding",
    "Reports",
    "ShuffledReports",
    "SlotSums",
    "deliver",
    "mask_absent",
    "pad",
    "reports_from_messages",
    "shuffle",
    "slot_sums",
]

LINKAGES = ("coordinate", "vector")
OVERFLOWS = ("drop", "keep")


class Reports(NamedTuple):
    """What clients send: `value` of shape (clients, reports), which `slot` each belongs to, which are `valid`.

    A dense protocol reports every slot in order and leaves `slot` as None; `valid` has shape (clients,) where clients
    report all or nothing, else the shape of `value`.
    """

    slot: jax.Array | None
    value: jax.Array
    valid: jax.Array


class ShuffledReports(NamedTuple):
    """What the analyzer sees; made only here, so that raw reports cannot reach an analyzer by mistake.

    Rows are messages. After a shuffle of coordinates the entries of a row have nothing to do with each other.
    """

    slot: jax.Array | None
    value: jax.Array
    valid: jax.Array


class SlotSums(NamedTuple):
    """For every slot: the sum of its reports, and how many there are; (slots,) each."""

    total: jax.Array
    messages: jax.Array


def slot_sums(reports: ShuffledReports, slots: int, dtype: Any) -> SlotSums:
    """The sum and the number of the valid reports in every slot.

    Arguments:
        reports: what the analyzer sees; those without a slot fill all slots in order.
        slots: how many slots there are.
        dtype: of the sums, to which values are converted before they are added.
    """
    valid = reports.valid[:, None] if reports.valid.ndim == 1 else reports.valid
    value = jnp.where(valid, reports.value, 0).astype(dtype)
    if reports.slot is None:
        count = jnp.sum(valid, axis=0, dtype=jnp.int32)
        return SlotSums(jnp.sum(value, axis=0), jnp.broadcast_to(count, (slots,)))
    return SlotSums(
        jnp.zeros(slots, dtype).at[reports.slot].add(value, mode="drop"),
        jnp.zeros(slots, jnp.int32).at[reports.slot].add(valid.astype(jnp.int32), mode="drop"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Padding:
    """Every slot is filled up to `pad_to` reports with dummies, which are draws from the blanket.

    The blanket is the part of a report's distribution that is the same for every input. What is beyond `pad_to` is
    dropped at random, or kept.
    """

    pad_to: int
    overflow: Literal["drop", "keep"]
    blanket: Blanket


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape of a round's messages; `shufflers` is 0 in the curator and local models.

    `reports_per_client` is what a client sends at most; `linkage` says whether slots are permuted on their own, or
    messages.
    """

    slots: int
    reports_per_client: int
    shufflers: int
    linkage: Literal["coordinate", "vector"] = "coordinate"
    padding: Padding | None = None

    def __post_init__(self) -> None:
        _validate.one_of(LINKAGES, linkage=self.linkage)


def mask_absent(reports: Reports, present: jax.Array) -> Reports:
    """The same reports, with those of clients that are not `present`, (clients,), marked as not valid."""
    here = present.reshape(-1, *[1] * (reports.valid.ndim - 1))
    return Reports(reports.slot, reports.value, (reports.valid * here).astype(reports.valid.dtype))


def deliver(reports: Reports) -> ShuffledReports:
    """Hand reports over in the order in which they came: for tallies, which do not see the order."""
    return ShuffledReports(*reports)


def reports_from_messages(slot: np.ndarray | None, value: np.ndarray, valid: np.ndarray) -> ShuffledReports:
    """What a deployed shuffler forwarded and the analyzer opened; a row is a message."""
    return ShuffledReports(None if slot is None else jnp.asarray(slot), jnp.asarray(value), jnp.asarray(valid))


def shuffle(reports: Reports, layout: Layout, *, key: jax.Array) -> ShuffledReports:
    """The faithful path: every report of a round, padded, permuted.

    Guarantees:
        Without padding the analyzer gets the clients' reports slot by slot, in a uniformly random order.
        With padding each slot has `pad_to` reports (at least, where a surplus is kept), whatever the clients sent.
    """
    if not layout.shufflers:
        return deliver(reports)
    if layout.linkage == "vector":
        return _shuffle_messages(reports, layout, key)
    dense = _as_dense(reports, layout.slots)
    key_order, key_dummies, key_mix = jax.random.split(key, 3)
    value, valid = _permute_columns(dense.value, dense.valid, key_order)
    if layout.padding is None:
        return ShuffledReports(None, value, valid)
    padding = layout.padding
    rows = padding.pad_to if padding.overflow == "drop" else max(len(value), padding.pad_to)
    count = valid.sum(axis=0)
    value = jnp.pad(value, [(0, max(0, rows - len(value))), (0, 0)])[:rows]
    dummies = padding.blanket.sample(value.shape, key=key_dummies).astype(value.dtype)
    row = jnp.arange(rows)[:, None]
    filled = jnp.where(row < count, value, dummies)
    return ShuffledReports(None, *_permute_columns(filled, row < jnp.maximum(count, padding.pad_to), key_mix))


def _permute_columns(value: jax.Array, valid: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Values and validity with every column in a uniformly random order of its own, what is not valid behind."""
    order = _uniform_order(valid, key)
    return jnp.take_along_axis(value, order, axis=0), jnp.take_along_axis(valid, order, axis=0)


def _uniform_order(valid: jax.Array, key: jax.Array) -> jax.Array:
    """A uniformly random order of every column: by tags of 63 bits, for ties would keep the order of arrival."""
    high, low = jax.random.bits(key, (2, *valid.shape), jnp.uint32)
    return jnp.lexsort((low, jnp.where(valid, high >> 1, jnp.uint32(2**32 - 1))), axis=0)


def _as_dense(reports: Reports, slots: int) -> Reports:
    """The same reports as one row per client and one column per slot; a client has at most one report in a slot."""
    value = reports.value
    valid = jnp.broadcast_to(_as_columns(reports.valid, value.ndim), value.shape) > 0
    if reports.slot is None:
        return Reports(None, value, valid)
    rows = jnp.arange(len(value))[:, None]
    places = jnp.where(valid, reports.slot, slots)  # out of range: dropped
    return Reports(
        None,
        jnp.zeros((len(value), slots), value.dtype).at[rows, places].set(value, mode="drop"),
        jnp.zeros((len(value), slots), bool).at[rows, places].set(True, mode="drop"),
    )


def _shuffle_messages(reports: Reports, layout: Layout, key: jax.Array) -> ShuffledReports:
    """Whole messages in a uniformly random order; dummies are put into messages of the clients' length.

    Every slot gets the dummies that it lacks; entries of a dummy message that no slot needs are not valid.
    """
    key_order, key_dummies = jax.random.split(key)
    value = reports.value
    valid = jnp.broadcast_to(_as_columns(reports.valid, value.ndim), value.shape) > 0
    if layout.padding is None:
        order = _uniform_order(jnp.ones(len(value), bool), key_order)
        slot = None if reports.slot is None else reports.slot[order]
        return ShuffledReports(slot, value[order], valid[order])
    padding = layout.padding
    width = value.shape[1]
    slot = jnp.broadcast_to(jnp.arange(width), value.shape) if reports.slot is None else reports.slot
    count = jnp.zeros(layout.slots, jnp.int32).at[slot].add(valid)
    need = jnp.maximum(0, padding.pad_to - count)
    rows = -(-layout.slots * padding.pad_to // width) + 1
    place = jnp.searchsorted(jnp.cumsum(need), jnp.arange(rows * width), side="right")
    used = jnp.maximum(1, -(-need.sum() // width))
    entry = jnp.arange(rows * width)
    at = (entry % used, entry // used)  # dealt row by row, so that a message rarely gets a slot twice
    real = entry < need.sum()
    empty = jnp.full((rows, width), layout.slots)
    dummy_slot = empty.at[at].set(jnp.where(real, place, layout.slots), mode="drop")
    dummies = padding.blanket.sample((rows, width), key=key_dummies).astype(value.dtype)
    slots = jnp.concatenate([slot, dummy_slot])
    values = jnp.concatenate([value, dummies])
    valids = jnp.concatenate([valid, dummy_slot < layout.slots])
    order = _uniform_order(jnp.ones(len(values), bool), key_order)
    return ShuffledReports(slots[order], values[order], valids[order])


def _as_columns(valid: jax.Array, ndim: int) -> jax.Array:
    """`valid` with axes of length 1 added at its end, up to `ndim`."""
    return valid.reshape(valid.shape + (1,) * (ndim - valid.ndim))


def pad(sums: SlotSums, padding: Padding, *, key: jax.Array) -> SlotSums:
    """The fast path: what padding makes of the sums of the clients' reports.

    Guarantees:
        Given the clients' reports, the sums have the law of those of `shuffle`.
        A surplus can be dropped from sums of bits only; other reports need the faithful path.
    """
    key_dummies, key_drop = jax.random.split(key)
    need = jnp.maximum(0, padding.pad_to - sums.messages)
    dummies = padding.blanket.sample_sum(need, padding.pad_to, key=key_dummies)
    total = sums.total
    if padding.overflow == "drop":
        if not padding.blanket.is_binary:
            raise ValueError("expected binary reports where a surplus is dropped from sums, got other ones")
        total = _drop_surplus(SlotSums(total, sums.messages), padding.pad_to, key_drop)
        return SlotSums(total + dummies, jnp.full_like(sums.messages, padding.pad_to))
    return SlotSums(total + dummies, jnp.maximum(sums.messages, padding.pad_to))


def _drop_surplus(sums: SlotSums, pad_to: int, key: jax.Array) -> jax.Array:
    """The ones among `pad_to` reports that remain: reports are taken away one by one, uniformly, from every full slot.

    This is the hypergeometric law, drawn exactly, in as many steps as the fullest slot has reports too many.
    """

    def take_one(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The state after one report was taken away from every slot that still has too many."""
        step, ones, left = state
        removed = jax.random.randint(jax.random.fold_in(key, step), ones.shape, 0, jnp.maximum(left, 1))
        full = left > pad_to
        ones = ones - (full & (removed < ones)).astype(ones.dtype)
        return step + 1, ones, left - full.astype(left.dtype)

    _, ones, _ = jax.lax.while_loop(
        lambda state: jnp.any(state[2] > pad_to), take_one, (jnp.int32(0), sums.total, sums.messages)
    )
    return ones
