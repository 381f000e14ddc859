"""One round of federated learning as one compiled program.

The cohort is dealt to the devices; each takes its clients in chunks that fit its cache, gathers their records by index,
runs local training, `randomize` and `tally`, and adds up: memory is one chunk of updates, never clients x parameters.
The tallies are summed over devices, `estimate` and the server's step follow in the same program.

Three paths: the general one (`vmap` over the clients of a chunk); for linear models under protocols that only rescale
updates, the matrix forms of `simulate.linear`; and, without `fast`, the *faithful* one for protocols with a shuffler,
which holds every report of the round, shuffles and pads them. Keys are folded by round and client, so results depend
on neither chunk size nor device count, up to the order of floating-point sums.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from dovetail import _validate
from dovetail.federated.client import ClientUpdate, local_update, visiting_order
from dovetail.federated.server import Server
from dovetail.protocols import Protocol
from dovetail.shufflers import masked, shuffle
from dovetail.simulate import linear
from dovetail.simulate.devices import AXIS, make_mesh, on_every_device, split_over_devices, to_host
from dovetail.tasks._base import Clients, Dataset, Model

__all__ = ["Engine", "Performance", "Training"]

_CHUNK_BYTES_CPU, _CHUNK_BYTES_GPU = 2**21, 2**31
_EVALUATE, _ORDER, _RANDOMIZE, _ESTIMATE, _TALLY, _SHUFFLE = range(6)


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


class Training(NamedTuple):
    """All that a training carries from round to round."""

    params: jax.Array
    server: Any
    protocol: Any


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
    ) -> None:
        self._model, self._update, self._protocol, self._server = model, update, protocol, server
        self._size, self._performance = cohort_size, performance or Performance()
        self._key = jax.random.key(seed)
        first, self._unravel = ravel_pytree(model.init(jax.random.fold_in(self._key, 2**31 - 1)))
        self._first, self.dim = np.asarray(first), len(first)
        self._layout = protocol.layout(self.dim)
        self._records = clients.index.shape[1]
        self._linear = (
            self._performance.fast
            and model.constant is not None
            and linear.worthwhile(update, self._records)
            and protocol.scaling(jnp.ones(1)) is not None
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
        state = Training(params, self._server.init(params), self._protocol.init(self.dim))
        return self.place(state)

    def place(self, training: Any) -> Training:
        """A state of host arrays (a checkpoint), on the devices."""
        return jax.tree.map(lambda leaf: on_every_device(np.asarray(leaf), self.mesh), training)

    def step(self, training: Training, users: np.ndarray, *, index: int, capacity: int) -> Training:
        """Run round `index` with these users; consumes `training`."""
        width = self.mesh.size * self._chunk
        chunks = max(1, math.ceil(max(capacity, len(users)) / width))
        ids = np.full(chunks * width, -1, np.int32)
        ids[: len(users)] = users
        table = split_over_devices(ids.reshape(chunks, self.mesh.size, self._chunk), self.mesh, axis=1)
        used = on_every_device(np.int32(math.ceil(len(users) / width)), self.mesh)
        return self._compiled(training, self._data, table, used, on_every_device(np.int32(index), self.mesh))

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
        if not self._linear:
            floats += 3 * self.dim
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        fitting = (_CHUNK_BYTES_CPU if cpu else _CHUNK_BYTES_GPU) // (4 * floats)
        return max(1, min(fitting, math.ceil(self._size / self.mesh.size)))

    @functools.partial(jax.jit, static_argnums=0)
    def _count_right(self, params: jax.Array, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.sum(jnp.argmax(self._logits(params, _as_float(inputs)), axis=1) == labels)

    def _logits(self, params: jax.Array, inputs: jax.Array) -> jax.Array:
        return self._model.apply(self._unravel(params), inputs)

    def _round(
        self, training: Training, data: tuple[jax.Array, ...], table: jax.Array, used: jax.Array, index: jax.Array
    ) -> Training:
        key = jax.random.fold_in(self._key, index)
        split, same = PartitionSpec(None, AXIS), PartitionSpec()
        per_device = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(same, same, same, split, same), check_vma=False
        )
        if self._faithful:
            everyone = per_device(functools.partial(self._updates_of_device, key=key), out_specs=split)
            updates = everyone(training.params, training.protocol, data, table, used)
            tally = self._shuffled_tally(updates.reshape(-1, self.dim), table.ravel(), training.protocol, key)
        else:
            collect = per_device(functools.partial(self._tally_of_device, key=key), out_specs=same)
            tally = collect(training.params, training.protocol, data, table, used)
        estimate, protocol = self._protocol.estimate(
            tally, self._size, training.protocol, key=jax.random.fold_in(key, _ESTIMATE)
        )
        params, server = self._server.step(training.params, training.server, estimate)
        return Training(params, server, protocol)

    def _tally_of_device(
        self,
        params: jax.Array,
        state: Any,
        data: tuple[jax.Array, ...],
        table: jax.Array,
        used: jax.Array,
        *,
        key: jax.Array,
    ) -> Any:
        tally_chunk = self._linear_chunk if self._linear else self._general_chunk

        def add_chunk(i: jax.Array, total: Any) -> Any:
            ids = table[i, 0]
            return jax.tree.map(jnp.add, total, tally_chunk(params, state, data, ids, key))

        shape = jax.eval_shape(lambda: tally_chunk(params, state, data, table[0, 0], key))
        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shape)
        total = jax.lax.psum(jax.lax.fori_loop(0, used, add_chunk, zero), AXIS)
        key_tally = jax.random.fold_in(key, _TALLY)
        if not self._linear:
            return self._protocol.finish(total, key=key_tally)
        update, count = total
        return self._protocol.tally_of_sum(update.ravel(), count, key=key_tally)

    def _updates_of_device(
        self,
        params: jax.Array,
        state: Any,
        data: tuple[jax.Array, ...],
        table: jax.Array,
        used: jax.Array,
        *,
        key: jax.Array,
    ) -> jax.Array:
        """Faithful path: every update, of shape (chunks, 1, chunk, dim)."""
        return jax.lax.map(lambda ids: self._updates(params, data, ids, key), table[:, 0])[:, None]

    def _shuffled_tally(self, updates: jax.Array, ids: jax.Array, state: Any, key: jax.Array) -> Any:
        """Faithful path: every report, shuffled, then tallied."""
        keys, budgets = self._client_keys(ids, key), self._client_budgets(ids)
        reports = jax.vmap(lambda x, k, b: self._protocol.randomize(x, state, key=k, budget=b))(updates, keys, budgets)
        messages = shuffle(masked(reports, ids >= 0), self._layout, key=jax.random.fold_in(key, _SHUFFLE))
        return self._protocol.tally(messages, self.dim)

    def _gather(
        self, data: tuple[jax.Array, ...], ids: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Inputs, labels and counts of a chunk of clients; a client that is not there has no records."""
        records, labels, table, counts = data
        present = ids >= 0
        rows = table[jnp.maximum(ids, 0)]
        count = jnp.where(present, counts[jnp.maximum(ids, 0)], 0)
        if self._update.local:
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, _ORDER), ids)
            order = jax.vmap(lambda n, k: visiting_order(n, self._records, key=k))(count, keys)
            rows = jnp.take_along_axis(rows, order, axis=1)
        return _as_float(records[rows]), labels[rows], count

    def _linear_chunk(
        self, params: jax.Array, state: Any, data: tuple[jax.Array, ...], ids: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        inputs, labels, counts = self._gather(data, ids, key)
        chunk = linear.Chunk(inputs.reshape(*inputs.shape[:2], -1), labels, counts)

        def scaling(norms: jax.Array) -> jax.Array:
            return cast(jax.Array, self._protocol.scaling(norms)) * (ids >= 0)

        total = linear.scaled_sum(
            self._unravel(params), cast(float, self._model.constant), chunk, self._update, scaling
        )
        return total, jnp.sum(ids >= 0).astype(params.dtype)

    def _general_chunk(
        self, params: jax.Array, state: Any, data: tuple[jax.Array, ...], ids: jax.Array, key: jax.Array
    ) -> Any:
        updates = self._updates(params, data, ids, key)
        keys, budgets = self._client_keys(ids, key), self._client_budgets(ids)
        return self._protocol.collect(updates, ids >= 0, state, keys=keys, budgets=budgets)

    def _updates(self, params: jax.Array, data: tuple[jax.Array, ...], ids: jax.Array, key: jax.Array) -> jax.Array:
        inputs, labels, counts = self._gather(data, ids, key)
        return jax.vmap(local_update(self._update, self._logits), (None, 0, 0, 0))(params, inputs, labels, counts)

    def _client_keys(self, ids: jax.Array, key: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, _RANDOMIZE), ids)

    def _client_budgets(self, ids: jax.Array) -> jax.Array | None:
        return None if self._budgets is None else jnp.asarray(self._budgets)[jnp.maximum(ids, 0)]


def _as_float(inputs: jax.Array) -> jax.Array:
    return inputs.astype(jnp.float32) * (1 / 255) if inputs.dtype == jnp.uint8 else inputs
