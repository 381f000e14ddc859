"""What a chunk of clients adds to a round: their updates, or the sum of their updates without any being formed.

Five ways, of which the fastest for clients of a size is chosen:

- *general*: every client's local training, side by side or one after the other, then the protocol's `collect`;
- *scaled*: the same training, then the sum of rescaled updates, beside clients of another size that go a way below;
- *linear*, for linear models under protocols that only rescale updates: the matrix forms of `engine.linear`, of which
  that by Gram matrices needs the `products` of each client's rows;
- *moments*, for statistics of records in place of updates, under protocols that only rescale: one matrix product where
  clients have one record;
- *clipped*, for clients of one record, or of a few and a large model, under protocols that only clip: the products of
  `engine.examples`.

Clients of a chunk are of one size class (`engine.chunks`), and each class has its own way.
A client's secret keys are folded from the round's key and its own number, so that nothing depends on who shares a
chunk; the public order of records is the same for all clients with as many of them.
Nor does it on what they hold: an update without a finite squared norm counts as zero, randomized and counted like any
other, and is masked before it meets anything of another client's.

*Size classes.* A round costs what its records cost, and not what its largest client does.
Every client of a chunk is computed with as many rows as the widest of them. So clients are sorted into classes, at
first by doubling numbers of records; neighbours are joined again while that costs little, as each class is a part of
the compiled program of its own. Which class a client is in changes the speed of a round and nothing else.

Diagnostics say how large and how different the raw updates of a round were; no statement covers them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from dovetail._jax import written
from dovetail.data._base import Loss, Model
from dovetail.engine import examples, linear
from dovetail.engine.devices import one_after_another
from dovetail.learners import trees
from dovetail.learners.client import ClientUpdate, local_update, private_update, visiting_order
from dovetail.learners.losses import cross_entropy
from dovetail.learners.moments import Moments
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.protocols import Fast, Protocol
from dovetail.protocols.subjects import record_level
from dovetail.shufflers import Reports, mask_absent

__all__ = [
    "ESTIMATE",
    "MOST_CLASSES",
    "SHUFFLE",
    "TALLY",
    "ClientWork",
    "Data",
    "Diagnostics",
    "Keys",
    "Seen",
    "SizeClass",
    "Way",
    "Work",
    "Works",
    "as_float",
    "best_ways",
    "diagnosed",
    "seen",
    "size_classes",
]

Work = tuple[jax.Array, Any]  # the users of a round or a chunk (-1: nobody), the records of their private steps or None
Works = tuple[Work, ...]  # one for each size class of clients
ORDER, RANDOMIZE, ESTIMATE, TALLY, SHUFFLE, STEPS = range(1, 7)  # what a key of a round is folded with


class Data(NamedTuple):
    """Inputs and their labels; the rows of all clients, one client after the other, where each begins and how many.

    For *gram* there are `products` of a class's rows, or None, and the `places` of clients in their class.
    """

    inputs: Any
    labels: Any
    rows: Any
    starts: Any
    counts: Any
    places: Any
    products: tuple[linear.Products | None, ...]


class Keys(NamedTuple):
    """The keys of a round: a public one, of the order in which clients visit records, and the secret one of noise."""

    order: jax.Array
    noise: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClientWork:
    """What clients compute in a round; `unravel` gives the model's own parameters from the flat vector of them.

    They are those of size class `number`, with up to `width` rows of inputs each.
    With `moments` their updates are statistics of the records. Otherwise they descend on `loss`.

    Guarantees:
        All ways add up to the same, up to float summation order and as far as the protocol says they do.
        A client whose update or its squared norm is not finite counts as one with a zero update, in every way.
    """

    model: Model
    unravel: Callable[[jax.Array], Any]
    protocol: Protocol
    fast: Fast
    update: ClientUpdate
    way: Way
    diagnostics: bool
    moments: Moments | None = None
    number: int = 0
    width: int = 1
    loss: Loss = cross_entropy

    @property
    def forms_updates(self) -> bool:
        """Whether memory grows with the clients of a chunk times the numbers of an update."""
        return self.way in ("general", "scaled") or (self.way == "moments" and self.width > 1)

    @property
    def sums_updates(self) -> bool:
        """Whether what is collected is the sum of scaled updates and their number, for `Fast.tally_of_sum`."""
        return self.way != "general"

    def collect(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """What adds up over chunks: what the protocol collects, and what is `Seen`, or None without diagnostics."""
        match self.way:
            case "linear":
                return self._linear(params, state, data, part, keys)
            case "moments":
                return self._moments(state, data, part, keys)
            case "clipped":
                return self._clipped(params, state, data, part, keys)
            case "scaled":
                return self._scaled(self.updates(params, data, part, keys), part[0], state)
        return self.collected(self.updates(params, data, part, keys), part[0], state, keys)

    def collected(self, updates: jax.Array, ids: jax.Array, state: Any, keys: Keys) -> Any:
        """The same, of clients with these updates."""
        collected = self.fast.collect(updates, ids >= 0, state, **self.drawn_with(ids, keys))
        return collected, seen(updates, ids >= 0) if self.diagnostics else None

    def reports(self, updates: jax.Array, ids: jax.Array, state: Any, key: jax.Array) -> Reports:
        """Every report of clients with these updates."""
        keys, budgets = _client_keys(ids, key), self._budgets(ids)
        reports = jax.vmap(lambda x, k, b: self.protocol.randomize(x, state, key=k, budget=b))(updates, keys, budgets)
        return mask_absent(reports, ids >= 0)

    def updates(self, params: jax.Array, data: Data, part: Work, keys: Keys) -> jax.Array:
        """Every client's update, (clients, dim), finite: zero where its squared norm would not be."""
        return finite_or_zero(self._raw_updates(params, data, part, keys))

    def _raw_updates(self, params: jax.Array, data: Data, part: Work, keys: Keys) -> jax.Array:
        ids, items = part
        if self.protocol.private_steps:
            own = self.step_keys(ids, keys)
            return jax.lax.map(lambda one: self._private_update(data)(params, *one), (*items, own))
        inputs, labels, counts = self.gather(data, ids, keys.order)
        if self.moments is not None:
            return jax.vmap(self.moments)(inputs, labels, counts)
        train = local_update(self.update, self.model.apply, self.loss)

        def update(params: jax.Array, *held: jax.Array) -> jax.Array:
            return ravel_pytree(train(self.unravel(params), *held))[0]

        if len(ids) == 1:
            alone = functools.partial(train, inputs=inputs[0], labels=labels[0], count=counts[0])
            return written(lambda row: trees.laid(row, alone(self.unravel(params))), params.shape, params.dtype)[None]
        if self.update.local and one_after_another(jax.default_backend(), len(params)):
            return jax.lax.map(lambda held: update(params, *held), (inputs, labels, counts))
        return jax.vmap(update, (None, 0, 0, 0))(params, inputs, labels, counts)

    def step_keys(self, ids: jax.Array, keys: Keys) -> jax.Array:
        """The keys of the noise inside the steps of these clients."""
        return _client_keys(ids, jax.random.fold_in(keys.noise, STEPS))

    def _private_update(self, data: Data) -> Callable[..., jax.Array]:
        """The update of a client whose protocol has its noise inside the local steps."""
        protocol = record_level(self.protocol)
        records, labels = data.inputs, data.labels

        def clipped_sum(params: jax.Array, row: jax.Array) -> jax.Array:
            at = jnp.maximum(row, 0)
            held = as_float(records[at]), labels[at], row >= 0
            return examples.clipped_sum(
                self.model, self.unravel, params, *held, clip_norm=protocol.clip_norm, loss=self.loss
            )

        return private_update(
            clipped_sum, learning_rate=self.update.learning_rate, batch=cast(float, protocol.batch), std=protocol.std
        )

    def _linear(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        ids, _ = part
        inputs, labels, counts = self.gather(data, ids, keys.order)
        products = data.products[self.number]
        if products is not None:
            at = data.places[jnp.maximum(ids, 0)]
            products = jax.tree.map(lambda leaf: leaf[at], products)
        chunk = linear.Chunk(inputs.reshape(*inputs.shape[:2], -1), labels, counts, products)
        norms: list[jax.Array] = []

        def scaling(of: jax.Array) -> jax.Array:
            norms.append(of)
            return cast(jax.Array, self.fast.scaling(of, state)) * (ids >= 0)

        def scaled_sum(scaling: linear.Scaling) -> jax.Array:
            return linear.scaled_sum(
                self.unravel(params), cast(float, self.model.constant), chunk, self.update, scaling, self.loss
            )

        total, count = scaled_sum(scaling).ravel(), jnp.sum(ids >= 0).astype(params.dtype)
        if not self.diagnostics:
            return (total, count), None
        square = jnp.sum(jnp.where(ids >= 0, norms[0] ** 2, 0))
        raw = scaled_sum(lambda of: (ids >= 0).astype(of.dtype))
        return (total, count), Seen(raw.ravel(), square, count)

    def _moments(self, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """One record a client: norms are products of norms, and no vector is formed; several: one vector a client."""
        moments, (ids, _) = cast(Moments, self.moments), part
        if self.width > 1:
            return self._scaled(self.updates(jnp.zeros(0), data, part, keys), ids, state)
        inputs, labels, counts = self.gather(data, ids, keys.order)
        z = moments.rows(inputs[:, 0].reshape(len(inputs), -1))
        norms = moments.norm(linear.lengths(z))
        counted = (counts > 0) & jnp.isfinite(norms * norms)
        scale = cast(jax.Array, self.fast.scaling(jnp.where(counted, norms, 0.0), state)) * counted
        total = moments.summed(jnp.where(counted[:, None], z, 0.0), moments.targets(labels[:, 0]), scale)
        return (total, jnp.sum(ids >= 0).astype(total.dtype)), None

    def _scaled(self, updates: jax.Array, ids: jax.Array, state: Any) -> Any:
        """The sum of rescaled updates, each of them formed."""
        present = ids >= 0
        scale = cast(jax.Array, self.fast.scaling(jnp.linalg.norm(updates, axis=1), state)) * present
        total = jnp.einsum("c,cd->d", scale, updates, precision=jax.lax.Precision.HIGHEST)
        return (total, jnp.sum(present).astype(total.dtype)), seen(updates, present) if self.diagnostics else None

    def _clipped(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        ids, _ = part
        inputs, labels, counts = self.gather(data, ids, keys.order)
        held, clip_norm = (inputs, labels, counts), self.fast.clip_norm_at(state)
        total = examples.clipped_client_sum(
            self.model, self.unravel, params, *held, clip_norm=clip_norm, loss=self.loss
        )
        return (-total, jnp.sum(ids >= 0).astype(params.dtype)), None

    def gather(self, data: Data, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inputs, labels and counts of a chunk of clients; a client that is not there has no records.

        Padding is read as the client's own first record, so that nobody computes with another's. The order is one of
        the round and the client's own count: it is public, and a client's place depends on who else there is.
        """
        at = jnp.maximum(ids, 0)
        count = jnp.where(ids >= 0, data.counts[at], 0)
        places = jnp.broadcast_to(jnp.arange(self.width), (len(ids), self.width))
        if self.update.local:
            order = jax.random.fold_in(key, ORDER)
            places = jax.vmap(lambda n: visiting_order(n, self.width, key=order))(count)
        own = jnp.where(jnp.arange(self.width) < count[:, None], places, places[:, :1])
        rows = data.rows[jnp.minimum(data.starts[at][:, None] + own, len(data.rows) - 1)]
        return as_float(data.inputs[rows]), data.labels[rows], count

    def drawn_with(self, ids: jax.Array, keys: Keys) -> dict[str, Any]:
        """The keys and budgets of these clients."""
        return {"keys": _client_keys(ids, keys.noise), "budgets": self._budgets(ids)}

    def _budgets(self, ids: jax.Array) -> jax.Array | None:
        given = self.protocol.budgets
        return None if given is None else jnp.asarray(np.asarray(given, np.float32))[jnp.maximum(ids, 0)]


def as_float(inputs: jax.Array) -> jax.Array:
    """Records as the model reads them: bytes become numbers in [0, 1]."""
    return inputs.astype(jnp.float32) * (1 / 255) if inputs.dtype == jnp.uint8 else inputs


def _client_keys(ids: jax.Array, key: jax.Array) -> jax.Array:
    """One key for each of these clients."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, RANDOMIZE), ids)


Way = Literal["general", "scaled", "linear", "moments", "clipped"]


def best_ways(
    model: Model,
    fast: Fast,
    state: Any,
    update: ClientUpdate,
    inputs: np.ndarray,
    *,
    classes: Sequence[SizeClass],
    diagnostics: bool,
) -> list[Way]:
    """The fastest way for each class of clients, whose records are like these; `state` is the protocol's first.

    Guarantees:
        What is collected adds up over classes: sums of updates in all of them, or in none.
    """
    dtype = np.float32 if inputs.dtype == np.uint8 else inputs.dtype
    held = [jax.ShapeDtypeStruct((one.width, *inputs.shape[1:]), dtype) for one in classes]
    ways = [_best_way(model, fast, state, update, one, diagnostics=diagnostics) for one in held]
    return ways if len(set(ways)) == 1 else ["scaled" if way == "general" else way for way in ways]


def _best_way(
    model: Model, fast: Fast, state: Any, update: ClientUpdate, held: jax.ShapeDtypeStruct, *, diagnostics: bool
) -> Way:
    if model.learner is not None:
        return "general"
    rescales, records = fast.scaling(jnp.ones(1), state) is not None, held.shape[0]
    if update.update == "moments":
        return "moments" if rescales and not diagnostics else "general"
    if model.constant is not None and linear.worthwhile(update, records) and rescales:
        return "linear"
    if diagnostics or update.local or fast.clip_norm_at(state) is None:
        return "general"
    return "clipped" if records == 1 or examples.worthwhile(model, held) else "general"


MOST_CLASSES = 8
_SPARE = 1.25  # computing so many times the rows that doubling classes would is fine, if it saves a class
_SMALL = 1 << 22  # numbers that are computed as fast in one class


@dataclasses.dataclass(frozen=True, eq=False)
class SizeClass:
    """Clients of at most `width` records, at least 1, by their numbers, ascending."""

    width: int
    members: np.ndarray


def size_classes(counts: np.ndarray, *, numbers: int, most: int | None = None) -> list[SizeClass]:
    """The classes of clients with these counts of records, the smallest first; a record has so many `numbers`.

    With `most` there are up to so many classes, whatever they save; without, what is small stays in one.

    Guarantees:
        Every client is in one class, and no class is empty.
        Without `most`, all classes together have at most 2.5 times as many rows as there are records and clients, or
        there are `MOST_CLASSES` of them, or one with few numbers.
    """
    width = max(1, int(counts.max()))
    if most is None and len(counts) * width * numbers <= _SMALL:
        most = 1
    level = np.ceil(np.log2(np.maximum(counts, 1))).astype(int)
    classes = [np.flatnonzero(level == at) for at in np.unique(level)]
    widths = [max(1, int(counts[members].max())) for members in classes]
    least = sum(len(members) * width for members, width in zip(classes, widths, strict=True))
    rows, limit = least, most or MOST_CLASSES
    while len(classes) > 1:
        added = [len(classes[i]) * (widths[i + 1] - widths[i]) for i in range(len(classes) - 1)]
        at = int(np.argmin(added))
        if len(classes) <= limit and (most is not None or rows + added[at] > _SPARE * least):
            break
        rows += added[at]
        classes[at : at + 2] = [np.sort(np.concatenate(classes[at : at + 2]))]
        del widths[at]
    return [SizeClass(width, members) for width, members in zip(widths, classes, strict=True)]


class Seen(NamedTuple):
    """What adds up to diagnostics: the sum of the raw updates, the sum of their squared norms, how many."""

    total: jax.Array
    square: jax.Array
    clients: jax.Array


class Diagnostics(NamedTuple):
    """What the raw updates of a round were like, per parameter (Geyer Sec. 3); for simulations only.

    `variance` is the between-clients variance V_c, `scale` the update scale U_s: the mean square of the mean update.
    V_c is a difference in single precision: below a millionth of U_s it is rounding.
    """

    variance: jax.Array
    scale: jax.Array


def seen(updates: jax.Array, present: jax.Array) -> Seen:
    """What diagnostics are made of, for the clients that are there."""
    kept = jnp.where(present[:, None], updates, 0)
    return Seen(kept.sum(axis=0), jnp.sum(kept * kept), jnp.sum(present).astype(updates.dtype))


def diagnosed(raw: Seen, dim: int) -> Diagnostics:
    """The diagnostics of a round, from what was seen of all its clients."""
    count = jnp.maximum(raw.clients, 1)
    scale = jnp.sum((raw.total / count) ** 2)
    return Diagnostics(jnp.maximum(raw.square / count - scale, 0) / dim, scale / dim)
