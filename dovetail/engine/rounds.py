"""One round of federated learning as one compiled program.

`Engine.step` shards the users of a round over the devices (`ClientSharder`). Each device takes its clients in chunks
that fit its cache, one chunk after the other, gathers their records by index, runs local training and adds up what the
protocol collects (`DeviceShard`, `engine.chunks`): memory is one chunk of updates. The tallies are summed over devices,
`estimate` and the server's step follow in the same program.

Clients are taken by classes of similar size, so that a large one costs what it has and no more. Without `fast`, and
where sums do not serve, protocols with a shuffler take the *faithful* path: it holds every report of the round,
shuffles and pads them, so memory is clients x parameters. Keys are folded by round and client, so results depend on
neither chunk size nor device count, up to the order of floating-point sums. With `diagnostics` a round also says how
large and how different its raw updates were, which no noise hides and no statement covers.

Shapes: all records are copied to every device. The users of a round are, for each size class, arrays `work` of shape
(chunks, devices, chunk, ...), of which a device sees (chunks, 1, chunk, ...), and a number in `used`: how many of these
chunks hold anybody. The other chunks are padding, so that all rounds have one shape and are compiled once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from dovetail.data._base import Clients, ClippingLearner, Dataset, Metric, Model
from dovetail.engine import layers, linear, sums
from dovetail.engine.choices import trains_one_by_one
from dovetail.engine.chunks import (
    ESTIMATE,
    SHUFFLE,
    TALLY,
    ClientWork,
    Data,
    Diagnostics,
    Keys,
    SizeClass,
    Work,
    Works,
    best_strategies,
    diagnostics_of,
    size_classes,
    sum_updates,
)
from dovetail.engine.devices import (
    AXIS,
    Performance,
    chunk_bytes,
    make_mesh,
    on_every_device,
    split_over_devices,
    to_host,
)
from dovetail.engine.examples import describe_uses
from dovetail.engine.hosted import HostRound
from dovetail.engine.scoring import Scores
from dovetail.events import Disjoint, Poisson, Separated
from dovetail.learners import losses, trees
from dovetail.learners.client import ClientUpdate
from dovetail.learners.moments import Moments
from dovetail.learners.server import Server
from dovetail.protocols import Cohort, Protocol, fast_path
from dovetail.randomness import Randomness
from dovetail.sampling import Items, RoundSample, UploadBook
from dovetail.shufflers import shuffle

__all__ = [
    "ClientSharder",
    "DeviceShard",
    "Engine",
    "RoundLog",
    "Training",
    "first_parameters",
    "place_data",
]


class Training(NamedTuple):
    """All that a training carries from round to round, and, if asked for, the diagnostics of the last round.

    `params` is the flat vector of parameters, `server` the state of the server's optimiser, `protocol` that of the
    protocol.
    """

    params: jax.Array
    server: Any
    protocol: Any
    diagnostics: Diagnostics | tuple[()] = ()


class _Public(NamedTuple):
    """What is public about a round: its number, by how many users an estimate divides, and the factor on the noise."""

    round: Any
    size: Any
    noise_scale: Any


@dataclasses.dataclass(frozen=True)
class RoundLog:
    """A round that the engine ran: its number, and what was public about it when its noise was added."""

    index: int
    cohort: Cohort


class Engine:
    """Rounds of one federation: its data, model, clients, protocol and server.

    Arguments:
        clients: who owns which records of the dataset, without views: the engine adds those.
        update: what a client computes from its records.
        cohort_size: how many users take part in a round, unless `step` is told otherwise.
        randomness: the public seed, and the secret key of all noise.
        moments: the layout of the statistics that clients send in place of updates; None for updates of the model.
        performance: what may change speed, but never the law of a result.
        diagnostics: whether to say how large and how different the raw updates of a round were.
        metrics: scores of one's own by name, beside the built-in ones.

    Guarantees:
        Any chunk size, any number of devices and any classes of clients by size give the same model up to float
        summation order.
        The linear path gives the same model too; fast and faithful path as far as the protocol says they do.
        Off the faithful path, peak memory grows with the chunk, not with the number of clients times the number of
        parameters.
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
        moments: Moments | None = None,
        performance: Performance | None = None,
        diagnostics: bool = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        performance = performance or Performance()
        self.loss = losses.loss_for(model, dataset)
        self._randomness = randomness
        self._protocol = protocol
        self.server = server
        self._size = cohort_size
        self._diagnostics = diagnostics
        first, self._unravel = first_parameters(model, randomness.seed)
        self.moments = moments
        self.first = np.asarray(first) if moments is None else np.zeros(moments.dim, np.float32)
        self.dim = len(self.first)
        self._layout = protocol.layout(self.dim)
        self._fast = fast_path(protocol, self.dim)
        clients = clients.with_views(dataset.views)
        numbers = math.prod(dataset.inputs.shape[1:])
        trains = moments is None and not protocol.private_steps
        one_by_one = trains and self._trains_one_by_one(model, update, dataset, clients.counts, performance.one_by_one)
        most = 1 if protocol.private_steps else performance.size_classes
        if most is None and one_by_one and model.constant is None:
            most = 1  # as everybody costs what they have
        work = max(numbers, self.dim) if update.local else numbers
        batch = update.batch if update.local else None
        classes = size_classes(clients.counts, numbers=work, most=most, batch=batch)
        state = protocol.init(self.dim)
        strategies = best_strategies(
            model, self._fast, state, update, dataset.inputs, classes=classes, diagnostics=diagnostics
        )
        self._classes = tuple(
            ClientWork(
                model=model,
                unravel=self._unravel,
                protocol=protocol,
                fast=self._fast,
                update=update,
                strategy=strategy if performance.fast else "general",
                diagnostics=diagnostics,
                moments=moments,
                number=number,
                width=size.width,
                loss=losses.cross_entropy if model.learner is not None else losses.loss_function(self.loss),
                one_by_one=one_by_one,
            )
            for number, (strategy, size) in enumerate(zip(strategies, classes, strict=True))
        )
        self._faithful = self._layout.shufflers > 0 and not (performance.fast and self._fast.is_summable)
        self.mesh = make_mesh(performance.devices if model.learner is None else 1)
        sizes = [
            performance.chunk or self._default_chunk_size(work, numbers, len(size.members))
            for work, size in zip(self._classes, classes, strict=True)
        ]
        self._chunk_sizes = sizes
        self._sharder = ClientSharder(classes, sizes, self.mesh, costs=clients.counts if one_by_one else None)
        self._data = place_data(dataset, clients, list(zip(self._classes, classes, strict=True)), self.mesh)
        self._scores = Scores(model, self._unravel, dataset, self.loss, metrics or {})
        self.round_logs: list[RoundLog] = []
        self._epochs: dict[int, set[int]] = {}
        self._streams: dict[Separated, UploadBook] = {}
        self._compiled: Callable[..., Training] = jax.jit(self._round, donate_argnums=0)
        if model.learner is not None:
            self._compiled = HostRound(self._classes, self.loss, self._faithful, self._round_keys, self._close_round)

    def describe_strategies(self) -> list[str]:
        """How the clients of each size class are computed and why, a line each, and what of the model is formed."""
        lines = [
            f"up to {work.width} records: {work.describe_strategy()}, {size} at a time on a device"
            for work, size in zip(self._classes, self._chunk_sizes, strict=True)
        ]
        first = self._classes[0]
        clips = first.strategy == "clipped" or first.protocol.private_steps > 0
        learner = first.model.learner
        if clips and isinstance(learner, ClippingLearner):
            records = 1 if first.protocol.private_steps else first.width
            lines += learner.describe_clipping(self.loss, self.first, records)
        elif clips and learner is None:
            shape = jax.ShapeDtypeStruct((first.width, *self._data.inputs.shape[1:]), np.float32)
            lines += describe_uses(first.model, jax.eval_shape(self._unravel, self.first), shape)
        return lines

    def start(self) -> Training:
        """The state before the first round; forgets the rounds that were run."""
        self.round_logs = []
        self._epochs = {}
        self._streams = {}
        params = jnp.asarray(self.first)
        nothing = Diagnostics(jnp.zeros(()), jnp.zeros(())) if self._diagnostics else ()
        return self.place(Training(params, self.server.init(params), self._protocol.init(self.dim), nothing))

    def place(self, training: Any) -> Training:
        """Copy a state of host arrays, such as a checkpoint, to every device."""
        return jax.tree.map(lambda leaf: on_every_device(np.asarray(leaf), self.mesh), training)

    def step(
        self,
        training: Training,
        users: np.ndarray,
        *,
        index: int,
        capacity: int,
        cohort: Cohort | None = None,
        sample: RoundSample | None = None,
        randomness: Randomness | None = None,
    ) -> Training:
        """Run round `index` with these users; consumes `training`.

        Arguments:
            training: the state before the round.
            users: the numbers of those who take part.
            capacity: the most that may take part in any round, for which the round is compiled.
            cohort: what is public about the round, which is then noted in `round_logs`; without, the round is of the
                engine's own size, and of no run.
            sample: what a sampler made of the users; without, they are taken as they are.
            randomness: whose noise is added; the engine's own by default.

        Returns: the state after the round.

        Guarantees:
            What `round_logs` says of size and noise is what the round divided by and added.
            Refuses fewer users than the cohort's minimum, more than it admits, a user that comes back in an epoch of
            disjoint batches, and one that comes too often or too soon in a stream.
        """
        if cohort is not None:
            self._check_users(users, cohort, index)
            sample = sample or RoundSample(users=users, size=cohort.size, noise_scale=cohort.noise_scale)
        sample = sample or RoundSample(users=users, size=self._size)
        works, used = self._sharder.shard_clients(sample, capacity)
        public = _Public(np.int32(index), np.float32(sample.size), np.float32(sample.noise_scale))
        public, secret = jax.tree.map(
            lambda leaf: on_every_device(leaf, self.mesh), (public, (randomness or self._randomness).key_data)
        )
        after = self._compiled(training, self._data, works, used, public, secret)
        if cohort is not None:
            self.round_logs.append(RoundLog(index, cohort))
        return after

    def skip(self, training: Training, *, index: int, cohort: Cohort, randomness: Randomness | None = None) -> Training:
        """The state after round `index` was not released: the model stays, and noise that the round had is drawn.

        Arguments:
            training: the state before the round, which is consumed.
            index: the round.
            cohort: what is public about it.
            randomness: whose noise is drawn; the engine's own by default.
        """
        book = self._book_of(cohort)
        if book is not None:
            book.skip(index=index)
        nobody = _Public(np.int32(index), np.float32(0), np.float32(1))
        secret = on_every_device((randomness or self._randomness).key_data, self.mesh)
        keys = self._round_keys(nobody, secret)
        after = self._protocol.skip(training.protocol, key=jax.random.fold_in(keys.noise, ESTIMATE))
        return training._replace(protocol=after)

    def _check_users(self, users: np.ndarray, cohort: Cohort, index: int) -> None:
        """Refuse users whom the cohort does not admit; of a Poisson sample any number may come."""
        sampled = isinstance(cohort.participation, Poisson) and cohort.uploads is None
        most = len(users) if sampled else cohort.max_uploads
        if not cohort.min_size <= len(users) <= most:
            raise ValueError(f"expected {cohort.min_size} to {most} users in a round, got {len(users)}")
        if isinstance(cohort.participation, Disjoint):
            seen = self._epochs.setdefault(cohort.participation.epoch, set())
            again = seen.intersection(users.tolist())
            if again:
                raise ValueError(
                    f"the batches of an epoch have no user in common: user {min(again)} was in epoch "
                    f"{cohort.participation.epoch} already"
                )
            seen.update(users.tolist())
        book = self._book_of(cohort)
        if book is not None:
            book.admit(users, index=index)

    def _book_of(self, cohort: Cohort) -> UploadBook | None:
        """The uploads in this cohort's stream so far; None for cohorts that are in none."""
        if not isinstance(cohort.participation, Separated):
            return None
        return self._streams.setdefault(cohort.participation, UploadBook(cohort.participation))

    def note_past_round(self, users: np.ndarray, *, index: int, cohort: Cohort) -> None:
        """Note who took part in a round that an earlier process ran, where that limits who may in later ones."""
        book = self._book_of(cohort)
        if book is not None:
            book.admit(users, index=index)

    def metrics(self, training: Training) -> dict[str, Any]:
        """All scores of the model to publish on the test records."""
        return self._scores.compute(self.test_outputs(training))

    def test_outputs(self, training: Training) -> np.ndarray:
        """The outputs (records, ...) of the model to publish for all test records: private if these are."""
        return self._scores.outputs(self._params_to_publish(training))

    def model_arrays(self, training: Training) -> dict[str, np.ndarray]:
        """The parameters of the model to publish by name, for `model.npz`."""
        return trees.arrays_by_name(self._unravel(self._params_to_publish(training)))

    def _params_to_publish(self, training: Training) -> jax.Array:
        """The flat parameters of the model to publish, which is not always the last one (`Server.model_to_publish`)."""
        params, state = jax.tree.map(lambda leaf: jnp.asarray(to_host(leaf)), (training.params, training.server))
        return self.server.model_to_publish(params, state)

    def _trains_one_by_one(
        self, model: Model, update: ClientUpdate, dataset: Dataset, counts: np.ndarray, chosen: bool | None
    ) -> bool:
        """Whether the clients of a chunk train one after the other: as `chosen`, or what is faster."""
        if model.learner is not None or not update.local or chosen is not None:
            return model.learner is None and update.local and bool(chosen)
        if model.constant is not None and self.dim < 2**13:
            return False  # linear models have a form of their own
        loss = losses.loss_function(self.loss)
        typical = int(np.median(counts))
        return trains_one_by_one(model, self._unravel(jnp.asarray(self.first)), update, loss, dataset, records=typical)

    def _default_chunk_size(self, work: ClientWork, numbers: int, members: int) -> int:
        """How many clients of a size class a device takes at a time, in chunks of about equal size.

        Arguments:
            numbers: how many numbers a record has.
            members: how many clients the class has.
        """
        records = work.width if work.one_by_one else work.width * numbers
        floats = records + (3 * self.dim if work.forms_updates else 0)  # its records, three vectors
        learner = work.model.learner
        device = self.mesh.devices.flat[0]
        platform = device.platform if learner is None else learner.platform
        fitting = max(1, chunk_bytes(platform) // (4 * floats))
        most = max(1, math.ceil(min(self._size, members) / self.mesh.size))
        return math.ceil(most / math.ceil(most / fitting))

    def _round(
        self, training: Training, data: Data, works: Works, used: jax.Array, public: _Public, secret: jax.Array
    ) -> Training:
        """The state after a round, as one program that JAX compiles; the memory of `training` is used again.

        Arguments:
            works: the users, as `ClientSharder.shard_clients` shards them, with the number of chunks that are `used`.
            secret: the key data of the noise.
        """
        keys = self._round_keys(public, secret)
        split = PartitionSpec(None, AXIS)
        same = PartitionSpec()
        per_device = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(same, same, same, split, same), check_vma=False
        )
        shard = DeviceShard(self._classes)
        norms = None
        if self._protocol.needs_norms:
            measure = per_device(functools.partial(shard.norms, keys=keys), out_specs=split)
            norms = _concatenate(measure(training.params, training.protocol, data, works, used))
        state = self._protocol.prepare(training.protocol, noise_scale=public.noise_scale, norms=norms)
        if self._faithful:
            everyone = per_device(functools.partial(shard.updates, keys=keys), out_specs=split)
            updates = _concatenate(everyone(training.params, state, data, works, used)).reshape(-1, self.dim)
            ids = _concatenate([work[0] for work in works])
            return self._close_round(training, state, updates, ids, public, keys)
        collect = per_device(functools.partial(shard.tally, keys=keys), out_specs=same)
        return self._close_round(
            training, state, collect(training.params, state, data, works, used), None, public, keys
        )

    def _round_keys(self, public: _Public, secret: jax.Array) -> Keys:
        """The keys of a round: from the public seed that of visiting orders, from the secret key that of all noise."""
        order, noise = jax.random.key(self._randomness.seed), Randomness.key_from_words(secret)
        return Keys(*(jax.random.fold_in(key, public.round) for key in (order, noise)))

    def _close_round(
        self, training: Training, state: Any, collected: Any, ids: jax.Array | None, public: _Public, keys: Keys
    ) -> Training:
        """The state after a round, from what was collected in it: tally, estimate, server's step.

        Arguments:
            state: the protocol's state for this round, as `Protocol.prepare` returns it.
            collected: the tally, and the sums of raw updates or None; on the faithful path every update, (users, dim).
            ids: on the faithful path the users of these updates, -1 where nobody is; otherwise None.
        """
        if ids is None:
            tally, raw = collected
        else:
            reports = self._classes[0].reports(collected, ids, state, keys.noise)  # the same in every class
            messages = shuffle(reports, self._layout, key=jax.random.fold_in(keys.noise, SHUFFLE))
            tally = self._protocol.tally(messages, self.dim)
            raw = sum_updates(collected, ids >= 0)
        estimate, protocol = self._protocol.estimate(
            tally, cast(int, public.size), state, key=jax.random.fold_in(keys.noise, ESTIMATE)
        )
        params, server = self.server.step(training.params, training.server, estimate)
        return Training(params, server, protocol, diagnostics_of(raw, self.dim) if self._diagnostics else ())


def _concatenate(parts: Sequence[jax.Array]) -> jax.Array:
    """All numbers of the parts as one flat vector, part after part."""
    return jnp.concatenate([part.ravel() for part in parts])


def first_parameters(model: Model, seed: int) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The first model of a seed as a flat vector, and the function from such a vector to the model's own shape.

    The seed's key is folded with a number that no round has, as `Engine` folds it with the number of a round.
    """
    return ravel_pytree(model.init(jax.random.fold_in(jax.random.key(seed), 2**31 - 1)))


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceShard:
    """What one device adds to a round, under `shard_map`.

    `classes` are what clients of each size class compute. All methods take the same arguments: the flat parameters, the
    protocol's state, the data, for each class the device's work (chunks, 1, chunk, ...) and the number of chunks that
    hold anybody, and the round's keys.
    """

    classes: tuple[ClientWork, ...]

    def tally(self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys) -> Any:
        """The tally of all clients of all devices, and the sums of their raw updates (None without diagnostics)."""

        def sum_class(clients: ClientWork, work: Work, used: jax.Array) -> Any:
            if layers.applies_to(clients, work):
                return layers.sum_clients(clients, params, state, data, work, used, keys)

            def chunk(i: jax.Array | int) -> Any:
                return clients.collect(params, state, data, jax.tree.map(lambda leaf: leaf[i, 0], work), keys)

            none = sums.begin(jax.eval_shape(lambda: chunk(0)))
            return sums.finish(jax.lax.fori_loop(0, used, lambda i, total: sums.add(total, chunk(i)), none))

        first, *others = (sum_class(*args) for args in zip(self.classes, works, used, strict=True))
        total, raw = jax.lax.psum(jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), first, *others), AXIS)
        clients = self.classes[0]
        key_tally = jax.random.fold_in(keys.noise, TALLY)
        if not clients.sums_updates:
            return clients.fast.finish(total, key=key_tally), raw
        update, count = total
        return clients.fast.tally_of_sum(update, count, key=key_tally), raw

    def norms(
        self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys
    ) -> tuple[jax.Array, ...]:
        """The norm of every update, of shape (chunks, 1, chunk) in each class; NaN where nobody is."""

        def chunk(clients: ClientWork, part: Work) -> jax.Array:
            norms = jnp.linalg.norm(clients.updates(params, data, part, keys), axis=1)
            return jnp.where(part[0] >= 0, norms, jnp.nan)

        return self._map_chunks(chunk, works)

    def updates(
        self, params: jax.Array, state: Any, data: Data, works: Works, used: jax.Array, *, keys: Keys
    ) -> tuple[jax.Array, ...]:
        """Faithful path: every update, of shape (chunks, 1, chunk, dim) in each class."""
        return self._map_chunks(lambda clients, part: clients.updates(params, data, part, keys), works)

    def _map_chunks(self, function: Callable[[ClientWork, Work], jax.Array], works: Works) -> tuple[jax.Array, ...]:
        """Apply a function to every chunk of every size class, in turn; returns (chunks, 1, ...) for each class."""
        return tuple(
            jax.lax.map(functools.partial(function, clients), jax.tree.map(lambda leaf: leaf[:, 0], work))[:, None]
            for clients, work in zip(self.classes, works, strict=True)
        )


def place_data(dataset: Dataset, clients: Clients, classes: Sequence[tuple[ClientWork, SizeClass]], mesh: Mesh) -> Data:
    """Copy the records of these clients to every device of a mesh, with the products of rows where *gram* uses them.

    Arguments:
        clients: whose rows are whose, with views counted as rows.
        classes: what clients of each size class compute, and the class.
    """
    places = np.zeros(clients.num_clients, np.int32)
    products: list[linear.Products | None] = []
    for work, size in classes:
        places[size.members] = np.arange(len(size.members))
        one_step = work.strategy == "linear" and not (work.update.local or work.diagnostics)
        if one_step and linear.uses_gram(size.width, dataset.num_classes):
            own = clients.subset(size.members)
            constant = cast(float, work.model.constant)
            products.append(linear.products_of_rows(dataset.inputs, own, constant=constant))
        else:
            products.append(None)
    data = Data(
        inputs=dataset.inputs,
        labels=np.repeat(dataset.labels, dataset.views, axis=0),
        rows=clients.records if len(clients.records) else np.zeros(1, np.int32),
        starts=clients.starts,
        counts=clients.counts,
        places=places,
        products=tuple(products),
    )
    return jax.tree.map(lambda array: on_every_device(array, mesh), data)


class ClientSharder:
    """Shards users over the devices of a mesh, in chunks of one size class.

    Arguments:
        classes: the size classes.
        chunks: for each class, how many clients a device takes at a time.
        costs: what each client costs, where that differs within a class: devices then get about as much to do. Which
            device a client is on changes nothing but the order of sums.
    """

    def __init__(
        self, classes: Sequence[SizeClass], chunks: Sequence[int], mesh: Mesh, *, costs: np.ndarray | None = None
    ) -> None:
        self._mesh = mesh
        self._costs = costs
        self._chunks = chunks
        self._members = [len(size.members) for size in classes]
        self._class_of = np.empty(sum(self._members), np.int32)
        for number, size in enumerate(classes):
            self._class_of[size.members] = number

    def shard_clients(self, sample: RoundSample, capacity: int) -> tuple[Works, jax.Array]:
        """Shard the users of a sample, class by class.

        Arguments:
            capacity: the most users that may come in any round: there are chunks for all of them, so that rounds have
                one shape.

        Returns: the work of each class, -1 where nobody is, and how many chunks of each class hold anybody.
        """
        of_class = self._class_of[sample.users]
        works, used = [], []
        for number, (chunk, members) in enumerate(zip(self._chunks, self._members, strict=True)):
            here = np.flatnonzero(of_class == number)
            width = self._mesh.size * chunk
            chunks = max(1, math.ceil(max(min(capacity, members), len(here)) / width))
            works.append(self._class_work(sample, here, (chunks, self._mesh.size, chunk)))
            used.append(math.ceil(len(here) / width))
        return tuple(works), on_every_device(np.asarray(used, np.int32), self._mesh)

    def _class_work(self, sample: RoundSample, here: np.ndarray, shape: tuple[int, int, int]) -> Work:
        """The users at the places `here` of the sample, and their items, cut to `shape`: (chunks, devices, chunk)."""
        places = self._balanced_places(sample.users[here], shape)

        def shard(rows: np.ndarray, empty: float) -> jax.Array:
            padded = np.full((math.prod(shape), *rows.shape[1:]), empty, rows.dtype)
            padded[places] = rows[here]
            return split_over_devices(padded.reshape(*shape, *rows.shape[1:]), self._mesh, axis=1)

        ids = shard(np.asarray(sample.users, np.int32), -1)
        items = sample.items
        return ids, None if items is None else Items(shard(items.rows, -1), shard(items.noise_scale, 1.0))

    def _balanced_places(self, users: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
        """The place of each user among (chunks, devices, chunk): in order, or so that devices cost about the same.

        The costliest users are dealt to the devices in turn, back and forth.
        """
        if self._costs is None or shape[1] == 1:
            return np.arange(len(users))
        _, devices, chunk = shape
        turn = np.arange(len(users)) % (2 * devices)
        device = np.empty(len(users), int)
        device[np.argsort(-self._costs[users], kind="stable")] = np.minimum(turn, 2 * devices - 1 - turn)
        places = np.empty(len(users), int)
        for number in range(devices):
            own = np.flatnonzero(device == number)
            at = np.arange(len(own))
            places[own] = (at // chunk * devices + number) * chunk + at % chunk
        return places
