"""What a chunk of clients adds to a round: their updates, or the sum of their updates without any being formed.

Five strategies, of which the fastest for clients of a size is chosen:

- *general*: every client's local training, side by side or one after the other, then the protocol's `collect`;
- *scaled*: the same training, then the sum of rescaled updates, beside clients of another size with a strategy below;
- *linear*, for linear models under protocols that only rescale updates: the matrix forms of `engine.linear`, of which
  that by Gram matrices needs the `products` of each client's rows;
- *moments*, for statistics of records in place of updates, under protocols that only rescale: one matrix product where
  clients have one record;
- *clipped*, for clients of one record, or of a few and a large model, under protocols that only clip: the products of
  `engine.examples`.

Clients of a chunk are of one size class, and each class has its own strategy.
What a client adds depends neither on who shares its chunk nor on what those hold. Its secret keys are folded from the
round's key and its own number; the public order of records is the same for all clients with as many of them; an update
without a finite squared norm counts as zero, randomized and counted like any other, and is masked before it meets
anything of another client's.

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

from dovetail._jax import materialize
from dovetail.data._base import ClippingLearner, Loss, Model
from dovetail.engine import examples, linear
from dovetail.engine.convolutions import in_eigen_order
from dovetail.learners import trees
from dovetail.learners.client import ClientUpdate, local_update, private_update, visiting_order
from dovetail.learners.losses import cross_entropy
from dovetail.learners.moments import Moments
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.protocols import Fast, Protocol
from dovetail.protocols.subjects import require_item_level
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
    "SizeClass",
    "Strategy",
    "UpdateSums",
    "Work",
    "Works",
    "as_float",
    "best_strategies",
    "diagnostics_of",
    "size_classes",
    "sum_updates",
]

Work = tuple[jax.Array, Any]  # the users of a round or a chunk (-1: nobody), the records of their private steps or None
Works = tuple[Work, ...]  # one for each size class of clients
ORDER, RANDOMIZE, ESTIMATE, TALLY, SHUFFLE, STEPS = range(1, 7)  # what a key of a round is folded with


class Data(NamedTuple):
    """The records of a federation on the devices, and who owns which.

    Arguments:
        inputs: all rows, (rows, ...), bytes or float32; views of a record are rows of their own.
        labels: one for each row of `inputs`.
        rows: the numbers of the rows that clients own, one client after the other.
        starts: where the rows of each client begin.
        counts: how many rows each client has.
        places: the place of each client in its size class.
        products: for each size class the products of its clients' rows, for *gram*; None where they are not used.
    """

    inputs: Any
    labels: Any
    rows: Any
    starts: Any
    counts: Any
    places: Any
    products: tuple[linear.Products | None, ...]


class Keys(NamedTuple):
    """The keys of a round: a public one, for the order in which clients visit records, and the secret one of noise."""

    order: jax.Array
    noise: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClientWork:
    """What the clients of one size class compute in a round.

    Arguments:
        unravel: from the flat vector of parameters to the model's own.
        fast: the protocol's fast path for this many parameters.
        update: the settings of local training.
        strategy: how what they add up to is computed.
        diagnostics: whether to sum the raw updates, too.
        moments: if given, updates are these statistics of the records; otherwise clients descend on `loss`.
        number: the size class, among all of them.
        width: the most rows of inputs that one of them has.
        one_by_one: whether clients train one after the other, each for as many steps as its records make; otherwise
            those of a chunk train side by side.

    Guarantees:
        All strategies add up to the same, up to float summation order and as far as the protocol says they do.
        A client whose update or its squared norm is not finite counts as one with a zero update, in every strategy.
    """

    model: Model
    unravel: Callable[[jax.Array], Any]
    protocol: Protocol
    fast: Fast
    update: ClientUpdate
    strategy: Strategy
    diagnostics: bool
    moments: Moments | None = None
    number: int = 0
    width: int = 1
    loss: Loss = cross_entropy
    one_by_one: bool = False

    @property
    def forms_updates(self) -> bool:
        """Whether every client's update is formed, so that memory grows with clients x parameters of a chunk."""
        return self.strategy in ("general", "scaled") or (self.strategy == "moments" and self.width > 1)

    def describe_strategy(self) -> str:
        """How what these clients add up to is computed, in words."""
        if self.model.learner is not None:
            return f"updates by {type(self.model.learner).__name__}"
        if self.protocol.private_steps:
            return "steps on clipped sums, client by client"
        match self.strategy:
            case "linear":
                return "a linear model: sums of updates by matrix products"
            case "moments":
                return "sums of statistics"
            case "clipped":
                return "clipped gradients by matrix products"
        how = "one after the other, each for its own number of steps" if self.one_by_one else "side by side"
        return f"updates are formed, {how}" + (" and rescaled" if self.strategy == "scaled" else "")

    @property
    def sums_updates(self) -> bool:
        """Whether what is collected is the sum of scaled updates and their number, for `Fast.tally_of_sum`."""
        return self.strategy != "general"

    def collect(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """Train the clients of one chunk, and collect from them.

        Arguments:
            params: the flat vector of parameters.
            state: the protocol's state for this round, as `Protocol.prepare` returns it.
            part: the users of the chunk.

        Returns: what adds up over chunks: what the protocol collects, and `UpdateSums`, or None without diagnostics.
        """
        match self.strategy:
            case "linear":
                return self._sum_linear(params, state, data, part, keys)
            case "moments":
                return self._sum_moments(state, data, part, keys)
            case "clipped":
                return self._sum_clipped(params, state, data, part, keys)
            case "scaled":
                return self._sum_scaled(self.updates(params, data, part, keys), part[0], state)
        return self.collect_updates(self.updates(params, data, part, keys), part[0], state, keys)

    def collect_updates(self, updates: jax.Array, ids: jax.Array, state: Any, keys: Keys) -> Any:
        """What `collect` returns, for clients whose updates (clients, dim) are there already."""
        collected = self.fast.collect(updates, ids >= 0, state, **self.keys_and_budgets(ids, keys))
        return collected, sum_updates(updates, ids >= 0) if self.diagnostics else None

    def reports(self, updates: jax.Array, ids: jax.Array, state: Any, key: jax.Array) -> Reports:
        """The report of every client with these updates (clients, dim), masked where nobody is (an id of -1)."""
        keys, budgets = _client_keys(ids, key), self._budgets(ids)
        reports = jax.vmap(lambda x, k, b: self.protocol.randomize(x, state, key=k, budget=b))(updates, keys, budgets)
        return mask_absent(reports, ids >= 0)

    def updates(self, params: jax.Array, data: Data, part: Work, keys: Keys) -> jax.Array:
        """Every client's update, (clients, dim), finite: zero where its squared norm would not be."""
        return finite_or_zero(self._raw_updates(params, data, part, keys))

    def _raw_updates(self, params: jax.Array, data: Data, part: Work, keys: Keys) -> jax.Array:
        """Every client's update as it is computed, (clients, dim), which may not be finite."""
        ids, items = part
        if self.protocol.private_steps:
            own = self.step_keys(ids, keys)
            return jax.lax.map(lambda client: self._private_update(data)(params, *client), (*items, own))
        if self.moments is None and (self.one_by_one or len(ids) == 1):
            rows, counts = self.rows_of(data, ids, keys.order)
            train = self.train_alone(data)
            if len(ids) > 1:
                each = functools.partial(train, self.unravel(params))
                return jax.lax.map(lambda client: ravel_pytree(each(*client))[0], (rows, counts))
            # layers are copied into one row, where `ravel_pytree` would join them in a pass of its own
            return materialize(
                lambda row: trees.flatten_into(row, train(self.unravel(params), rows[0], counts[0])),
                params.shape,
                params.dtype,
            )[None]
        inputs, labels, counts = self.gather(data, ids, keys.order)
        if self.moments is not None:
            return jax.vmap(self.moments)(inputs, labels, counts)
        train = local_update(self.update, in_eigen_order(self.model.apply), self.loss)

        def update(params: jax.Array, *records: jax.Array) -> jax.Array:
            return ravel_pytree(train(self.unravel(params), *records))[0]

        return jax.vmap(update, (None, 0, 0, 0))(params, inputs, labels, counts)

    def train_alone(self, data: Data) -> Callable[[Any, jax.Array, jax.Array], Any]:
        """The training of one client: (parameters, rows, count) -> an update like them.

        Its records are read batch by batch, and it takes its own number of steps: it costs what it has, however many
        rows the largest client has.
        """
        apply = in_eigen_order(self.model.apply, alone=True)

        def outputs(params: Any, rows: jax.Array) -> jax.Array:
            return apply(params, as_float(data.inputs[rows]))

        def loss(outputs: jax.Array, rows: jax.Array) -> jax.Array:
            return self.loss(outputs, data.labels[rows])

        train = local_update(self.update, outputs, loss, own_steps=jax.default_backend() == "cpu")
        return lambda params, rows, count: train(params, rows, rows, count)

    def step_keys(self, ids: jax.Array, keys: Keys) -> jax.Array:
        """For each of these clients, the key of the noise inside its local steps."""
        return _client_keys(ids, jax.random.fold_in(keys.noise, STEPS))

    def _private_update(self, data: Data) -> Callable[..., jax.Array]:
        """The update function of a client with noise inside its steps: (params, rows, noise_scale, key) -> update.

        `rows` are, for each step, the numbers of its records in `data.inputs`, -1 where there is none.
        """
        protocol = require_item_level(self.protocol)
        records, labels = data.inputs, data.labels

        def clipped_sum(params: jax.Array, row: jax.Array) -> jax.Array:
            at = jnp.maximum(row, 0)
            batch = as_float(records[at]), labels[at], row >= 0
            return examples.clipped_sum(
                self.model, self.unravel, params, *batch, clip_norm=protocol.clip_norm, loss=self.loss
            )

        return private_update(
            clipped_sum, learning_rate=self.update.learning_rate, batch=cast(float, protocol.batch), std=protocol.std
        )

    def _sum_linear(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """What `collect` returns, for a linear model: the sum of rescaled updates, by matrix products."""
        ids, _ = part
        inputs, labels, counts = self.gather(data, ids, keys.order)
        products = data.products[self.number]
        if products is not None:
            at = data.places[jnp.maximum(ids, 0)]
            products = jax.tree.map(lambda leaf: leaf[at], products)
        chunk = linear.Chunk(inputs.reshape(*inputs.shape[:2], -1), labels, counts, products)
        norms: list[jax.Array] = []  # what `linear.scaled_sum` measured, for the diagnostics

        def scaling(client_norms: jax.Array) -> jax.Array:
            norms.append(client_norms)
            return cast(jax.Array, self.fast.scaling(client_norms, state)) * (ids >= 0)

        def scaled_sum(scaling: linear.Scaling) -> jax.Array:
            return linear.scaled_sum(
                self.unravel(params), cast(float, self.model.constant), chunk, self.update, scaling, self.loss
            )

        total, count = scaled_sum(scaling).ravel(), jnp.sum(ids >= 0).astype(params.dtype)
        if not self.diagnostics:
            return (total, count), None
        square = jnp.sum(jnp.where(ids >= 0, norms[0] ** 2, 0))
        raw = scaled_sum(lambda client_norms: (ids >= 0).astype(client_norms.dtype))
        return (total, count), UpdateSums(raw.ravel(), square, count)

    def _sum_moments(self, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """What `collect` returns for statistics: their sum, each scaled by its norm.

        With one record a client no statistics are formed: their norm follows from that of the record's features. With
        several, those of each client are formed.
        """
        moments = cast(Moments, self.moments)
        ids, _ = part
        if self.width > 1:
            return self._sum_scaled(self.updates(jnp.zeros(0), data, part, keys), ids, state)
        inputs, labels, counts = self.gather(data, ids, keys.order)
        z = moments.augmented_features(inputs[:, 0].reshape(len(inputs), -1))
        norms = moments.norm_of_vector(linear.row_norms(z))
        counted = (counts > 0) & jnp.isfinite(norms * norms)
        scale = cast(jax.Array, self.fast.scaling(jnp.where(counted, norms, 0.0), state)) * counted
        total = moments.scaled_sum(jnp.where(counted[:, None], z, 0.0), moments.centered_targets(labels[:, 0]), scale)
        return (total, jnp.sum(ids >= 0).astype(total.dtype)), None

    def _sum_scaled(self, updates: jax.Array, ids: jax.Array, state: Any) -> Any:
        """What `collect` returns, from updates (clients, dim) that are formed: the sum of them, rescaled."""
        present = ids >= 0
        scale = cast(jax.Array, self.fast.scaling(jnp.linalg.norm(updates, axis=1), state)) * present
        total = jnp.einsum("c,cd->d", scale, updates, precision=jax.lax.Precision.HIGHEST)
        return (total, jnp.sum(present).astype(total.dtype)), sum_updates(
            updates, present
        ) if self.diagnostics else None

    def _sum_clipped(self, params: jax.Array, state: Any, data: Data, part: Work, keys: Keys) -> Any:
        """What `collect` returns, where an update is minus a clipped gradient and none of them is formed."""
        ids, _ = part
        inputs, labels, counts = self.gather(data, ids, keys.order)
        batch = (inputs, labels, counts)
        clip_norm = self.fast.clip_norm_at(state)
        total = examples.clipped_client_sum(
            self.model, self.unravel, params, *batch, clip_norm=clip_norm, loss=self.loss
        )
        return (-total, jnp.sum(ids >= 0).astype(params.dtype)), None

    def gather(self, data: Data, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inputs (clients, width, ...), labels (clients, width, ...) and counts (clients,) of a chunk of clients.

        Only the first `count` of a client's rows are its records; an id of -1 has none. Padding is read as the client's
        own first record, so that nobody computes with another's. The visiting order follows from the round's public
        `key` and the client's own count, not from its place in the chunk, which depends on who else takes part.
        """
        rows, count = self.rows_of(data, ids, key)
        return as_float(data.inputs[rows]), data.labels[rows], count

    def rows_of(self, data: Data, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numbers of the rows (clients, width) of a chunk of clients, as `gather` reads them, and their counts."""
        at = jnp.maximum(ids, 0)
        count = jnp.where(ids >= 0, data.counts[at], 0)
        places = jnp.broadcast_to(jnp.arange(self.width), (len(ids), self.width))
        if self.update.local:
            order = jax.random.fold_in(key, ORDER)
            places = jax.vmap(lambda n: visiting_order(n, self.width, key=order))(count)
        own = jnp.where(jnp.arange(self.width) < count[:, None], places, places[:, :1])
        return data.rows[jnp.minimum(data.starts[at][:, None] + own, len(data.rows) - 1)], count

    def keys_and_budgets(self, ids: jax.Array, keys: Keys) -> dict[str, Any]:
        """What `Fast.collect` takes beside the updates of these clients, as keyword arguments."""
        return {"keys": _client_keys(ids, keys.noise), "budgets": self._budgets(ids)}

    def _budgets(self, ids: jax.Array) -> jax.Array | None:
        """Each client's own privacy budget; None where the protocol has one for all."""
        budgets = self.protocol.budgets
        return None if budgets is None else jnp.asarray(np.asarray(budgets, np.float32))[jnp.maximum(ids, 0)]


def as_float(inputs: jax.Array) -> jax.Array:
    """Records as the model reads them: bytes become numbers in [0, 1]."""
    return inputs.astype(jnp.float32) * (1 / 255) if inputs.dtype == jnp.uint8 else inputs


def _client_keys(ids: jax.Array, key: jax.Array) -> jax.Array:
    """One key for each of these clients, from the round's key and the client's number alone."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, RANDOMIZE), ids)


_FEW_RECORDS = 4  # of a client, above which a learner trains it as fast as it adds up clipped gradients

Strategy = Literal["general", "scaled", "linear", "moments", "clipped"]


def best_strategies(
    model: Model,
    fast: Fast,
    state: Any,
    update: ClientUpdate,
    inputs: np.ndarray,
    *,
    classes: Sequence[SizeClass],
    diagnostics: bool,
) -> list[Strategy]:
    """The fastest strategy for each class of clients.

    Arguments:
        state: the protocol's first.
        inputs: records, of which only shape and type count.
        classes: the size classes.
        diagnostics: whether the sum of raw updates is wanted, which not every strategy has.

    Guarantees:
        What is collected adds up over classes: sums of updates in all of them, or in none.
    """
    dtype = np.float32 if inputs.dtype == np.uint8 else inputs.dtype
    shapes = [jax.ShapeDtypeStruct((size.width, *inputs.shape[1:]), dtype) for size in classes]
    strategies = [_best_strategy(model, fast, state, update, shape, diagnostics=diagnostics) for shape in shapes]
    return (
        strategies
        if len(set(strategies)) == 1
        else ["scaled" if strategy == "general" else strategy for strategy in strategies]
    )


def _best_strategy(
    model: Model, fast: Fast, state: Any, update: ClientUpdate, shape: jax.ShapeDtypeStruct, *, diagnostics: bool
) -> Strategy:
    """The fastest strategy for clients with records like these, (records of a client, ...)."""
    if model.learner is not None:
        clips = isinstance(model.learner, ClippingLearner) and not (diagnostics or update.local)
        few = shape.shape[0] <= _FEW_RECORDS
        return "clipped" if clips and few and fast.clip_norm_at(state) is not None else "general"
    rescales = fast.scaling(jnp.ones(1), state) is not None
    records = shape.shape[0]
    if update.update == "moments":
        return "moments" if rescales and not diagnostics else "general"
    if model.constant is not None and linear.is_worthwhile(update, records) and rescales:
        return "linear"
    if diagnostics or update.local or fast.clip_norm_at(state) is None:
        return "general"
    return "clipped" if records == 1 or examples.is_worthwhile(model, shape) else "general"


MOST_CLASSES = 8
_SPARE = 1.25  # classes are joined while that costs at most so many times the rows of all doubling classes
_SPARE_OF_STEPS = 1.05  # the same of rows in local steps, beside as many classes as there may be
_SMALL = 1 << 22  # up to so many numbers for all records, padding included, one class is as fast as several
_WIDTHS = 256  # different numbers of records that are told apart


@dataclasses.dataclass(frozen=True, eq=False)
class SizeClass:
    """The `members` of a size class, numbers of clients in ascending order; none has more than `width` >= 1 records."""

    width: int
    members: np.ndarray


def size_classes(
    counts: np.ndarray, *, numbers: int, most: int | None = None, batch: int | None = None
) -> list[SizeClass]:
    """Sort clients into classes of similar size, the smallest first.

    Arguments:
        counts: how many records each client has.
        numbers: how many numbers a record has, or how many a local step goes through for it.
        most: up to how many classes there are, whatever they save; without, what is small stays in one.
        batch: records of a local step, where clients take such: they then cost whole batches, and classes are those
            that cost least.

    Guarantees:
        Every client is in one class, and no class is empty.
        Without `most`, all classes together have at most 2.5 times as many rows as there are records and clients, or
        there are `MOST_CLASSES` of them, or one with few numbers.
    """
    width = max(1, int(counts.max()))
    if most is None and len(counts) * width * numbers <= _SMALL:
        most = 1
    if batch is not None and most is None:
        return _classes_of_steps(np.maximum(counts, 1), batch)
    level = np.ceil(np.log2(np.maximum(counts, 1))).astype(int)
    classes = [np.flatnonzero(level == at) for at in np.unique(level)]  # up to 1, 2, 4, 8, ... records
    widths = [max(1, int(counts[members].max())) for members in classes]
    least = sum(len(members) * width for members, width in zip(classes, widths, strict=True))
    rows = least
    limit = most or MOST_CLASSES
    while len(classes) > 1:
        # joined with the next wider class, a class is computed with that one's width
        added = [len(classes[i]) * (widths[i + 1] - widths[i]) for i in range(len(classes) - 1)]
        at = int(np.argmin(added))
        if len(classes) <= limit and (most is not None or rows + added[at] > _SPARE * least):
            break
        rows += added[at]
        classes[at : at + 2] = [np.sort(np.concatenate(classes[at : at + 2]))]
        del widths[at]
    return [SizeClass(width, members) for width, members in zip(widths, classes, strict=True)]


def _classes_of_steps(counts: np.ndarray, batch: int) -> list[SizeClass]:
    """The fewest classes that cost little more than `MOST_CLASSES` of them, each of any widths.

    Clients cost the batches that the widest of their class has. `cost[i]` is that of all clients up to the i-th width,
    in so many classes; `cut[k][i]` is where the last of k + 1 classes begins.
    """
    steps = -(-counts // batch)
    tops = np.unique(steps)
    if len(tops) > _WIDTHS:
        tops = np.unique(np.quantile(tops, np.linspace(0, 1, _WIDTHS), method="higher"))
    below = np.searchsorted(np.sort(steps), np.append(0, tops), side="right")  # clients of up to so many steps
    last = np.arange(len(tops))
    cost = below[1:] * tops
    cuts, costs = [np.zeros(len(tops), int)], [cost]
    while len(cuts) < min(MOST_CLASSES, len(tops)):
        before = np.append(0, costs[-1])
        joined = np.where(
            last[None, :] <= last[:, None],
            before[None, :-1] + (below[1:, None] - below[None, :-1]) * tops[:, None],
            np.inf,
        )
        cuts.append(joined.argmin(axis=1))
        costs.append(joined.min(axis=1))
    enough = next(k for k, cost in enumerate(costs) if cost[-1] <= _SPARE_OF_STEPS * costs[-1][-1])
    found, end = [], len(tops) - 1
    for k in range(enough, -1, -1):
        begin = int(cuts[k][end])
        members = np.flatnonzero((steps <= tops[end]) & (steps > (tops[begin - 1] if begin else 0)))
        found.append(SizeClass(int(counts[members].max()), members))
        end = begin - 1
        if end < 0:
            break
    return found[::-1]


class UpdateSums(NamedTuple):
    """Sums over clients: of the raw updates (dim,), of their squared norms, and of the clients; for diagnostics."""

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


def sum_updates(updates: jax.Array, present: jax.Array) -> UpdateSums:
    """Sums of the updates (clients, dim) of the clients that are present."""
    kept = jnp.where(present[:, None], updates, 0)
    return UpdateSums(kept.sum(axis=0), jnp.sum(kept * kept), jnp.sum(present).astype(updates.dtype))


def diagnostics_of(raw: UpdateSums, dim: int) -> Diagnostics:
    """The diagnostics of a round, from the sums over all its clients."""
    count = jnp.maximum(raw.clients, 1)
    scale = jnp.sum((raw.total / count) ** 2)
    return Diagnostics(jnp.maximum(raw.square / count - scale, 0) / dim, scale / dim)
