"""One round of federated learning as one compiled program.

The cohort is dealt to the devices; each takes its clients in chunks that fit its cache, gathers their records by index,
runs local training, `randomize` and `tally`, and adds up: memory is one chunk of updates, never clients x parameters.
The tallies are summed over devices, `estimate` and the server's step follow in the same program.

Four paths: the general one (`vmap` over the clients of a chunk); for linear models under protocols that only rescale
updates, the matrix forms of `simulate.linear`; for clients of one record, under protocols that only clip, the products
of `simulate.examples`; and, without `fast`, the *faithful* one for protocols with a shuffler, which holds every report
of the round, shuffles and pads them. Keys are folded by round and client, so results depend on neither chunk size nor
device count, up to the order of floating-point sums.

With `diagnostics` a round also says how large and how different its raw updates were, which no noise hides and no
statement covers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from dovetail import _validate
from dovetail.federated.client import ClientUpdate, local_update, private_update, visiting_order
from dovetail.federated.server import Server
from dovetail.protocols import Protocol
from dovetail.protocols._items import ItemLevel
from dovetail.shufflers import masked, shuffle
from dovetail.simulate import examples, linear
from dovetail.simulate.devices import AXIS, make_mesh, on_every_device, split_over_devices, to_host
from dovetail.tasks._base import Clients, Dataset, Model

__all__ = ["Diagnostics", "Engine", "Items", "Performance", "Training", "as_float", "first_parameters"]

_CHUNK_BYTES_CPU, _CHUNK_BYTES_GPU = 2**21, 2**31
_Data = tuple[jax.Array, ...]
_Work = tuple[jax.Array, Any]  # the users of a round, and the records of their private steps or None
_EVALUATE, _ORDER, _RANDOMIZE, _ESTIMATE, _TALLY, _SHUFFLE, _STEPS = range(7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """What may change speed and never a result or a statement."""

    devices: int | None = None
    chunk: int | None = None
    fast: bool = True

    def __post_init__(self) -> None:
        if self.chunk is not None:
            _validate.integer(chunk=self.chunk)
            _validate.at_least(1, chunk=self.chunk)


class Diagnostics(NamedTuple):
    """What the raw updates of a round were like, per parameter (Geyer Sec. 3); for simulations only.

    `variance` is the between-clients variance V_c, `scale` the update scale U_s: the mean square of the mean update.
    V_c is a difference in single precision: below a millionth of U_s it is rounding.
    """

    variance: jax.Array
    scale: jax.Array


class Training(NamedTuple):
    """All that a training carries from round to round, and, if asked for, the diagnostics of the last round."""

    params: jax.Array
    server: Any
    protocol: Any
    diagnostics: Diagnostics | tuple[()] = ()


class _Public(NamedTuple):
    """What is public about a round."""

    round: Any
    size: Any
    noise_scale: Any


class Items(NamedTuple):
    """What users' private steps are on: `rows` of records, (users, steps, width), padded with -1.

    `noise_scale`, (users, steps), is each step's noise over the protocol's own.
    """

    rows: Any
    noise_scale: Any


class Engine:
    """Rounds of one federation: its data, model, clients, protocol and server.

    Guarantees:
        Any chunk size and any number of devices give the same model up to float summation order.
        The linear path gives the same model too; fast and faithful path as far as the protocol says they do.
        Peak memory grows with the chunk, not with the number of clients times the number of parameters.
    """

    def __init__(
        self,
        *,
        model: Model,
        dataset: Dataset,
        clients: Clients,
        update: ClientUpdate,
        protocol: Protocol,
        server: Server,
        cohort_size: int,
        seed: int,
        performance: Performance | None = None,
        diagnostics: bool = False,
    ) -> None:
        self._model, self._update, self._protocol, self._server = model, update, protocol, server
        self._size, self._performance, self._diagnostics = cohort_size, performance or Performance(), diagnostics
        self._key = jax.random.key(seed)
        first, self._unravel = first_parameters(model, seed)
        self._first, self.dim = np.asarray(first), len(first)
        self._layout = protocol.layout(self.dim)
        self._records = clients.index.shape[1]
        self._linear = (
            self._performance.fast
            and model.constant is not None
            and linear.worthwhile(update, self._records)
            and protocol.scaling(jnp.ones(1), protocol.init(self.dim)) is not None
        )
        self._clipped = (
            self._performance.fast
            and not self._linear
            and not diagnostics
            and self._records == 1
            and not update.local
            and protocol.clipped_to(protocol.init(self.dim)) is not None
        )
        self._faithful = self._layout.shufflers > 0 and not (self._performance.fast and protocol.summable)
        self.mesh = make_mesh(self._performance.devices)
        self._chunk = self._performance.chunk or self._default_chunk(dataset)
        self._data = tuple(
            on_every_device(array, self.mesh)
            for array in (dataset.inputs, dataset.labels, clients.index, clients.counts)
        )
        self._budgets = None if protocol.budgets is None else np.asarray(protocol.budgets, np.float32)
        self._test = (dataset.test_inputs, dataset.test_labels)
        self._compiled = jax.jit(self._round, donate_argnums=0)

    def start(self) -> Training:
        """The state before the first round."""
        params = jnp.asarray(self._first)
        nothing = Diagnostics(jnp.zeros(()), jnp.zeros(())) if self._diagnostics else ()
        return self.place(Training(params, self._server.init(params), self._protocol.init(self.dim), nothing))

    def place(self, training: Any) -> Training:
        """A state of host arrays (a checkpoint), on the devices."""
        return jax.tree.map(lambda leaf: on_every_device(np.asarray(leaf), self.mesh), training)

    def step(
        self,
        training: Training,
        users: np.ndarray,
        *,
        index: int,
        capacity: int,
        size: float | None = None,
        noise_scale: float = 1.0,
        items: Items | None = None,
    ) -> Training:
        """Run round `index` with these users; consumes `training`.

        `size` is the planned size of the round (that of the engine unless given), `items` what the users' private
        steps are on, where the protocol asks for such.
        """
        width = self.mesh.size * self._chunk
        chunks = max(1, math.ceil(max(capacity, len(users)) / width))

        def dealt(rows: np.ndarray, empty: float) -> jax.Array:
            padded = np.full((chunks * width, *rows.shape[1:]), empty, rows.dtype)
            padded[: len(rows)] = rows
            return split_over_devices(
                padded.reshape(chunks, self.mesh.size, self._chunk, *rows.shape[1:]), self.mesh, axis=1
            )

        ids = dealt(np.asarray(users, np.int32), -1)
        work = (ids, None if items is None else Items(dealt(items.rows, -1), dealt(items.noise_scale, 1.0)))
        used = on_every_device(np.int32(math.ceil(len(users) / width)), self.mesh)
        planned = self._size if size is None else size
        public = _Public(np.int32(index), np.float32(planned), np.float32(noise_scale))
        return self._compiled(
            training, self._data, work, used, jax.tree.map(lambda leaf: on_every_device(leaf, self.mesh), public)
        )

    def accuracy(self, training: Training) -> float:
        """The share of test records that the model gets right."""
        params = jnp.asarray(to_host(training.params))
        inputs, labels = self._test
        batch = max(1, 2**26 // max(1, math.prod(inputs.shape[1:]) * 4))
        right = sum(
            int(self._count_right(params, inputs[low : low + batch], labels[low : low + batch]))
            for low in range(0, len(labels), batch)
        )
        return right / len(labels)

    def model_arrays(self, training: Training) -> dict[str, np.ndarray]:
        """The model's parameters by name, for `model.npz`."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._unravel(jnp.asarray(to_host(training.params))))
        return {jax.tree_util.keystr(path).strip("[]'") or "params": np.asarray(leaf) for path, leaf in leaves}

    def _default_chunk(self, dataset: Dataset) -> int:
        floats = self._records * math.prod(dataset.inputs.shape[1:])
        if not self._linear and not self._clipped:
            floats += 3 * self.dim
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        fitting = (_CHUNK_BYTES_CPU if cpu else _CHUNK_BYTES_GPU) // (4 * floats)
        return max(1, min(fitting, math.ceil(self._size / self.mesh.size)))

    @functools.partial(jax.jit, static_argnums=0)
    def _count_right(self, params: jax.Array, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(jnp.argmax(self._logits(params, as_float(inputs)), axis=1) == labels)

    def _logits(self, params: jax.Array, inputs: jax.Array) -> jax.Array:
        return self._model.apply(self._unravel(params), inputs)

    def _round(self, training: Training, data: _Data, work: _Work, used: jax.Array, public: _Public) -> Training:
        key = jax.random.fold_in(self._key, public.round)
        split, same = PartitionSpec(None, AXIS), PartitionSpec()
        per_device = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(same, same, same, split, same), check_vma=False
        )
        norms = None
        if self._protocol.measured:
            measure = per_device(functools.partial(self._norms_of_device, key=key), out_specs=split)
            norms = measure(training.params, training.protocol, data, work, used).ravel()
        state = self._protocol.prepare(training.protocol, noise_scale=public.noise_scale, norms=norms)
        if self._faithful:
            everyone = per_device(functools.partial(self._updates_of_device, key=key), out_specs=split)
            updates = everyone(training.params, state, data, work, used).reshape(-1, self.dim)
            tally = self._shuffled_tally(updates, work[0].ravel(), state, key)
            seen = _seen(updates, work[0].ravel() >= 0)
        else:
            collect = per_device(functools.partial(self._tally_of_device, key=key), out_specs=same)
            tally, seen = collect(training.params, state, data, work, used)
        estimate, protocol = self._protocol.estimate(
            tally, cast(int, public.size), state, key=jax.random.fold_in(key, _ESTIMATE)
        )
        params, server = self._server.step(training.params, training.server, estimate)
        return Training(params, server, protocol, _diagnostics(seen, self.dim) if self._diagnostics else ())

    def _tally_of_device(
        self, params: jax.Array, state: Any, data: _Data, work: _Work, used: jax.Array, *, key: jax.Array
    ) -> Any:
        """The tally of all clients, and what was seen of their raw updates."""
        tally_chunk = (
            self._linear_chunk if self._linear else self._clipped_chunk if self._clipped else self._general_chunk
        )

        def chunk(i: jax.Array | int) -> Any:
            return tally_chunk(params, state, data, jax.tree.map(lambda leaf: leaf[i, 0], work), key)

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: chunk(0)))
        add_chunk = lambda i, total: jax.tree.map(jnp.add, total, chunk(i))  # noqa: E731
        total, seen = jax.lax.psum(jax.lax.fori_loop(0, used, add_chunk, zero), AXIS)
        key_tally = jax.random.fold_in(key, _TALLY)
        if not self._linear and not self._clipped:
            return self._protocol.finish(total, key=key_tally), seen
        update, count = total
        return self._protocol.tally_of_sum(update.ravel(), count, key=key_tally), seen

    def _norms_of_device(
        self, params: jax.Array, state: Any, data: _Data, work: _Work, used: jax.Array, *, key: jax.Array
    ) -> jax.Array:
        """The norm of every update, of shape (chunks, 1, chunk); NaN where nobody is."""

        def chunk(part: _Work) -> jax.Array:
            norms = jnp.linalg.norm(self._updates(params, data, part, key), axis=1)
            return jnp.where(part[0] >= 0, norms, jnp.nan)

        return jax.lax.map(chunk, jax.tree.map(lambda leaf: leaf[:, 0], work))[:, None]

    def _updates_of_device(
        self, params: jax.Array, state: Any, data: _Data, work: _Work, used: jax.Array, *, key: jax.Array
    ) -> jax.Array:
        """Faithful path: every update, of shape (chunks, 1, chunk, dim)."""
        parts = jax.tree.map(lambda leaf: leaf[:, 0], work)
        return jax.lax.map(lambda part: self._updates(params, data, part, key), parts)[:, None]

    def _shuffled_tally(self, updates: jax.Array, ids: jax.Array, state: Any, key: jax.Array) -> Any:
        """Faithful path: every report, shuffled, then tallied."""
        keys, budgets = self._client_keys(ids, key), self._client_budgets(ids)
        reports = jax.vmap(lambda x, k, b: self._protocol.randomize(x, state, key=k, budget=b))(updates, keys, budgets)
        messages = shuffle(masked(reports, ids >= 0), self._layout, key=jax.random.fold_in(key, _SHUFFLE))
        return self._protocol.tally(messages, self.dim)

    def _gather(self, data: _Data, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inputs, labels and counts of a chunk of clients; a client that is not there has no records."""
        records, labels, table, counts = data
        present = ids >= 0
        rows = table[jnp.maximum(ids, 0)]
        count = jnp.where(present, counts[jnp.maximum(ids, 0)], 0)
        if self._update.local:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, _ORDER), ids)
            order = jax.vmap(lambda n, k: visiting_order(n, self._records, key=k))(count, keys)
            rows = jnp.take_along_axis(rows, order, axis=1)
        return as_float(records[rows]), labels[rows], count

    def _linear_chunk(self, params: jax.Array, state: Any, data: _Data, part: _Work, key: jax.Array) -> Any:
        ids, _ = part
        inputs, labels, counts = self._gather(data, ids, key)
        chunk = linear.Chunk(inputs.reshape(*inputs.shape[:2], -1), labels, counts)
        norms: list[jax.Array] = []

        def scaling(of: jax.Array) -> jax.Array:
            norms.append(of)
            return cast(jax.Array, self._protocol.scaling(of, state)) * (ids >= 0)

        def scaled_sum(scaling: linear.Scaling) -> jax.Array:
            return linear.scaled_sum(
                self._unravel(params), cast(float, self._model.constant), chunk, self._update, scaling
            )

        total, count = scaled_sum(scaling), jnp.sum(ids >= 0).astype(params.dtype)
        if not self._diagnostics:
            return (total, count), None
        square = jnp.sum(jnp.where(ids >= 0, norms[0] ** 2, 0))
        raw = scaled_sum(lambda of: (ids >= 0).astype(of.dtype))
        return (total, count), _Seen(raw.ravel(), square, count)

    def _clipped_chunk(self, params: jax.Array, state: Any, data: _Data, part: _Work, key: jax.Array) -> Any:
        ids, _ = part
        inputs, labels, counts = self._gather(data, ids, key)
        total = self._clipped_sum(params, inputs[:, 0], labels[:, 0], counts, self._protocol.clipped_to(state))
        return (-total, jnp.sum(ids >= 0).astype(params.dtype)), None

    def _clipped_sum(self, params: jax.Array, inputs: Any, labels: Any, present: Any, clip_norm: Any) -> jax.Array:
        return examples.clipped_sum(self._model, self._unravel, params, inputs, labels, present, clip_norm=clip_norm)

    def _general_chunk(self, params: jax.Array, state: Any, data: _Data, part: _Work, key: jax.Array) -> Any:
        ids, _ = part
        updates = self._updates(params, data, part, key)
        keys, budgets = self._client_keys(ids, key), self._client_budgets(ids)
        collected = self._protocol.collect(updates, ids >= 0, state, keys=keys, budgets=budgets)
        return collected, _seen(updates, ids >= 0) if self._diagnostics else None

    def _updates(self, params: jax.Array, data: _Data, part: _Work, key: jax.Array) -> jax.Array:
        ids, items = part
        if self._protocol.private_steps:
            keys = self._client_keys(ids, jax.random.fold_in(key, _STEPS))
            return jax.lax.map(lambda one: self._private_update(data)(params, *one), (*items, keys))
        inputs, labels, counts = self._gather(data, ids, key)
        return jax.vmap(local_update(self._update, self._logits), (None, 0, 0, 0))(params, inputs, labels, counts)

    def _private_update(self, data: _Data) -> Callable[..., jax.Array]:
        """The update of a client whose protocol has its noise inside the local steps."""
        protocol = cast(ItemLevel, self._protocol)
        records, labels = data[:2]

        def clipped_sum(params: jax.Array, row: jax.Array) -> jax.Array:
            at = jnp.maximum(row, 0)
            return self._clipped_sum(params, as_float(records[at]), labels[at], row >= 0, protocol.clip_norm)

        return private_update(
            clipped_sum, learning_rate=self._update.learning_rate, batch=cast(float, protocol.batch), std=protocol.std
        )

    def _client_keys(self, ids: jax.Array, key: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, _RANDOMIZE), ids)

    def _client_budgets(self, ids: jax.Array) -> jax.Array | None:
        return None if self._budgets is None else jnp.asarray(self._budgets)[jnp.maximum(ids, 0)]


class _Seen(NamedTuple):
    """What adds up to diagnostics: the sum of the raw updates, the sum of their squared norms, how many."""

    total: jax.Array
    square: jax.Array
    clients: jax.Array


def _seen(updates: jax.Array, present: jax.Array) -> _Seen:
    kept = jnp.where(present[:, None], updates, 0)
    return _Seen(kept.sum(axis=0), jnp.sum(kept * kept), jnp.sum(present).astype(updates.dtype))


def _diagnostics(seen: _Seen, dim: int) -> Diagnostics:
    count = jnp.maximum(seen.clients, 1)
    scale = jnp.sum((seen.total / count) ** 2)
    return Diagnostics(jnp.maximum(seen.square / count - scale, 0) / dim, scale / dim)


def first_parameters(model: Model, seed: int) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The first model as a flat vector, and the way back to its own shape."""
    return ravel_pytree(model.init(jax.random.fold_in(jax.random.key(seed), 2**31 - 1)))


def as_float(inputs: jax.Array) -> jax.Array:
    """Records as the model reads them: bytes become numbers in [0, 1]."""
    return inputs.astype(jnp.float32) * (1 / 255) if inputs.dtype == jnp.uint8 else inputs
