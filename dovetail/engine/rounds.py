"""One round of federated learning as one compiled program.

The cohort is dealt to the devices; each takes its clients in chunks that fit its cache, gathers their records by index,
runs local training, `randomize` and `tally`, and adds up: memory is one chunk of updates, never clients x parameters.
The tallies are summed over devices, `estimate` and the server's step follow in the same program.

What a chunk adds is found in one of three ways (`engine.chunks`). Without `fast`, and where sums do not serve,
protocols with a shuffler take the *faithful* path: it holds every report of the round, shuffles and pads them. Keys are
folded by round and client, so results depend on neither chunk size nor device count, up to the order of floating-point
sums.

With `diagnostics` a round also says how large and how different its raw updates were, which no noise hides and no
statement covers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from dovetail import _validate
from dovetail.data._base import Clients, Dataset, Metric, Model
from dovetail.engine import gram
from dovetail.engine.chunks import ESTIMATE, SHUFFLE, ClientWork, Data, Keys, Work, as_float, best_way
from dovetail.engine.devices import AXIS, chunk_bytes, make_mesh, on_every_device, split_over_devices, to_host
from dovetail.engine.diagnostics import Diagnostics, diagnosed, seen
from dovetail.engine.hosted import HostRound
from dovetail.engine.scoring import Scores
from dovetail.engine.shares import Share
from dovetail.events import Disjoint, Poisson
from dovetail.learners import losses
from dovetail.learners.client import ClientUpdate
from dovetail.learners.moments import moments_of
from dovetail.learners.server import Server
from dovetail.protocols import Cohort, Protocol, fast_path
from dovetail.randomness import Randomness
from dovetail.sampling import Drawn, Items
from dovetail.shufflers import shuffle

__all__ = ["Engine", "Performance", "Ran", "Training", "as_float", "first_parameters"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """What may change speed and never a result or a statement."""

    devices: int | None = None
    chunk: int | None = None
    fast: bool = True

    def __post_init__(self) -> None:
        chunk = _validate.given(chunk=self.chunk)
        _validate.integer(**chunk)
        _validate.at_least(1, **chunk)


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


@dataclasses.dataclass(frozen=True)
class Ran:
    """A round that the engine ran: its number, and what was public about it when its noise was added."""

    index: int
    cohort: Cohort


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
        randomness: Randomness,
        performance: Performance | None = None,
        diagnostics: bool = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        performance = performance or Performance()
        self.loss = losses.chosen(model, dataset)
        self._protocol, self.server, self._size, self._diagnostics = protocol, server, cohort_size, diagnostics
        self._randomness = randomness
        first, self._unravel = first_parameters(model, randomness.seed)
        moments = moments_of(update, model)
        self.first = np.asarray(first) if moments is None else np.zeros(moments.dim, np.float32)
        self.dim = len(self.first)
        self._layout, self._fast = protocol.layout(self.dim), fast_path(protocol, self.dim)
        clients = clients.with_views(dataset.views)
        records = clients.index.shape[1]
        way = best_way(model, self._fast, protocol.init(self.dim), update, records=records, diagnostics=diagnostics)
        self._clients = ClientWork(
            model=model,
            unravel=self._unravel,
            protocol=protocol,
            fast=self._fast,
            update=update,
            way=way if performance.fast else "general",
            diagnostics=diagnostics,
            moments=moments,
            records=records,
            loss=losses.cross_entropy if model.learner is not None else losses.function(self.loss),
        )
        self._faithful = self._layout.shufflers > 0 and not (performance.fast and self._fast.summable)
        self.mesh = make_mesh(performance.devices if model.learner is None else 1)
        self._chunk = performance.chunk or self._default_chunk(records * math.prod(dataset.inputs.shape[1:]))
        self._data = self._placed(dataset, clients)
        self._scores = Scores(model, self._unravel, dataset, self.loss, metrics or {})
        self.ran: list[Ran] = []
        self._epochs: dict[int, set[int]] = {}
        self._compiled: Callable[..., Training] = jax.jit(self._round, donate_argnums=0)
        if model.learner is not None:
            self._compiled = HostRound(self._clients, self.loss, self._faithful, self._keys, self._closed)

    def _placed(self, dataset: Dataset, clients: Clients) -> Data:
        """The data on the devices; a table of rows says whose they are."""
        work, products = self._clients, None
        one_step = work.way == "linear" and not (work.update.local or work.diagnostics)
        if one_step and gram.serves(clients.index.shape[1], dataset.num_classes):
            products = gram.products(dataset.inputs, clients, constant=cast(float, work.model.constant))
        labels = np.repeat(dataset.labels, dataset.views, axis=0)
        data = (dataset.inputs, labels, clients.index, clients.counts, products)
        return Data(*jax.tree.map(lambda array: on_every_device(array, self.mesh), data))

    def start(self) -> Training:
        """The state before the first round, of which `ran` knows nothing yet."""
        self.ran, self._epochs = [], {}
        params = jnp.asarray(self.first)
        nothing = Diagnostics(jnp.zeros(()), jnp.zeros(())) if self._diagnostics else ()
        return self.place(Training(params, self.server.init(params), self._protocol.init(self.dim), nothing))

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
        cohort: Cohort | None = None,
        drawn: Drawn | None = None,
        randomness: Randomness | None = None,
    ) -> Training:
        """Run round `index` with these users; consumes `training`.

        `cohort` says what is public about the round, which is then noted in `ran`; without one the round is of the
        engine's own size, and of no run. What a sampler made of the users is `drawn`; without, they are taken as they
        are. Noise is that of `randomness`, or of the engine's own.

        Guarantees:
            What `ran` says of size and noise is what the round divided by and added.
            Refuses fewer users than the cohort's minimum, more than it admits, and a user that comes back in an epoch
            of disjoint batches.
        """
        if cohort is not None:
            self._refuse(users, cohort)
            drawn = drawn or Drawn(users=users, size=cohort.size, noise_scale=cohort.noise_scale)
        drawn = drawn or Drawn(users=users, size=self._size)
        width = self.mesh.size * self._chunk
        chunks = max(1, math.ceil(max(capacity, len(drawn.users)) / width))
        used = on_every_device(np.int32(math.ceil(len(drawn.users) / width)), self.mesh)
        public = _Public(np.int32(index), np.float32(drawn.size), np.float32(drawn.noise_scale))
        public, secret = jax.tree.map(
            lambda leaf: on_every_device(leaf, self.mesh), (public, (randomness or self._randomness).key_data)
        )
        after = self._compiled(training, self._data, self._dealt(drawn, chunks), used, public, secret)
        if cohort is not None:
            self.ran.append(Ran(index, cohort))
        return after

    def _dealt(self, drawn: Drawn, chunks: int) -> Work:
        """What a round works on, over so many chunks of every device; -1 where nobody is."""
        shape = (chunks, self.mesh.size, self._chunk)

        def dealt(rows: np.ndarray, empty: float) -> jax.Array:
            padded = np.full((math.prod(shape), *rows.shape[1:]), empty, rows.dtype)
            padded[: len(rows)] = rows
            return split_over_devices(padded.reshape(*shape, *rows.shape[1:]), self.mesh, axis=1)

        ids, items = dealt(np.asarray(drawn.users, np.int32), -1), drawn.items
        return ids, None if items is None else Items(dealt(items.rows, -1), dealt(items.noise_scale, 1.0))

    def _refuse(self, users: np.ndarray, cohort: Cohort) -> None:
        """Who takes part is who was said to."""
        sampled = isinstance(cohort.participation, Poisson) and cohort.uploads is None
        most = len(users) if sampled else cohort.most
        if not cohort.min_size <= len(users) <= most:
            raise ValueError(f"expected {cohort.min_size} to {most} users in a round, got {len(users)}")
        if isinstance(cohort.participation, Disjoint):
            seen = self._epochs.setdefault(cohort.participation.epoch, set())
            again = seen.intersection(users.tolist())
            if again:
                raise ValueError(f"expected batches of an epoch without common users, got user {min(again)} twice")
            seen.update(users.tolist())

    def accuracy(self, training: Training) -> float | None:
        """The share of test records that the model to publish gets right; None where labels are numbers."""
        return self._scores.accuracy(self._scores.outputs(self._published(training)))

    def metrics(self, training: Training) -> dict[str, Any]:
        """All scores of the model to publish on the test records."""
        return self._scores.of(self._scores.outputs(self._published(training)))

    def model_arrays(self, training: Training) -> dict[str, np.ndarray]:
        """The parameters of the model to publish by name, for `model.npz`."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._unravel(self._published(training)))
        return {jax.tree_util.keystr(path).strip("[]'") or "params": np.asarray(leaf) for path, leaf in leaves}

    def _published(self, training: Training) -> jax.Array:
        params, state = jax.tree.map(lambda leaf: jnp.asarray(to_host(leaf)), (training.params, training.server))
        return self.server.published(params, state)

    def _default_chunk(self, inputs_a_client: int) -> int:
        floats = inputs_a_client + (3 * self.dim if self._clients.forms_updates else 0)
        fitting = chunk_bytes(self.mesh.devices.flat[0].platform) // (4 * floats)
        return max(1, min(fitting, math.ceil(self._size / self.mesh.size)))

    def _round(
        self, training: Training, data: Data, work: Work, used: jax.Array, public: _Public, secret: jax.Array
    ) -> Training:
        keys = self._keys(public, secret)
        split, same = PartitionSpec(None, AXIS), PartitionSpec()
        per_device = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(same, same, same, split, same), check_vma=False
        )
        share, norms = Share(self._clients), None
        if self._protocol.measured:
            measure = per_device(functools.partial(share.norms, keys=keys), out_specs=split)
            norms = measure(training.params, training.protocol, data, work, used).ravel()
        state = self._protocol.prepare(training.protocol, noise_scale=public.noise_scale, norms=norms)
        if self._faithful:
            everyone = per_device(functools.partial(share.updates, keys=keys), out_specs=split)
            updates = everyone(training.params, state, data, work, used).reshape(-1, self.dim)
            return self._closed(training, state, updates, work[0].ravel(), public, keys)
        collect = per_device(functools.partial(share.tally, keys=keys), out_specs=same)
        return self._closed(training, state, collect(training.params, state, data, work, used), None, public, keys)

    def _keys(self, public: _Public, secret: jax.Array) -> Keys:
        order, noise = jax.random.key(self._randomness.seed), Randomness.key(secret)
        return Keys(*(jax.random.fold_in(key, public.round) for key in (order, noise)))

    def _closed(
        self, training: Training, state: Any, found: Any, ids: jax.Array | None, public: _Public, keys: Keys
    ) -> Training:
        """The state after a round: `found` is the tally and what was seen of raw updates; with `ids`, every update."""
        if ids is None:
            tally, raw = found
        else:
            reports = self._clients.reports(found, ids, state, keys.noise)
            messages = shuffle(reports, self._layout, key=jax.random.fold_in(keys.noise, SHUFFLE))
            tally, raw = self._protocol.tally(messages, self.dim), seen(found, ids >= 0)
        estimate, protocol = self._protocol.estimate(
            tally, cast(int, public.size), state, key=jax.random.fold_in(keys.noise, ESTIMATE)
        )
        params, server = self.server.step(training.params, training.server, estimate)
        return Training(params, server, protocol, diagnosed(raw, self.dim) if self._diagnostics else ())


def first_parameters(model: Model, seed: int) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The first model as a flat vector, and the way back to its own shape."""
    return ravel_pytree(model.init(jax.random.fold_in(jax.random.key(seed), 2**31 - 1)))
