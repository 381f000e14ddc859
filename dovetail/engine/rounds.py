"""One round of federated learning as one compiled program.

The cohort is dealt to the devices; each takes its clients in chunks that fit its cache, gathers their records by index,
runs local training and adds up what the protocol collects (`engine.chunks`): memory is one chunk of updates. The
tallies are summed over devices, `estimate` and the server's step follow in the same program.

Clients are taken by classes of similar size (`engine.sizes`), so that a large one costs what it has and no more. What a
chunk adds is found in one of several ways (`engine.chunks`). Without `fast`, and where sums do not serve, protocols
with a shuffler take the *faithful* path: it holds every report of the round, shuffles and pads them, so memory is
clients x parameters. Keys are folded by round and client, so results depend on neither chunk size nor device count, up
to the order of floating-point sums.

With `diagnostics` a round also says how large and how different its raw updates were, which no noise hides and no
statement covers.
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
from jax.sharding import PartitionSpec

from dovetail import _validate
from dovetail.data._base import Clients, Dataset, Metric, Model
from dovetail.engine.chunks import ESTIMATE, SHUFFLE, ClientWork, Data, Keys, Works, as_float
from dovetail.engine.dealing import Dealer, placed
from dovetail.engine.devices import AXIS, chunk_bytes, make_mesh, on_every_device, to_host
from dovetail.engine.diagnostics import Diagnostics, diagnosed, seen
from dovetail.engine.hosted import HostRound
from dovetail.engine.scoring import Scores
from dovetail.engine.shares import Share
from dovetail.engine.sizes import size_classes
from dovetail.engine.ways import best_ways
from dovetail.events import Disjoint, Poisson
from dovetail.learners import losses, trees
from dovetail.learners.client import ClientUpdate
from dovetail.learners.moments import moments_of
from dovetail.learners.server import Server
from dovetail.protocols import Cohort, Protocol, fast_path
from dovetail.randomness import Randomness
from dovetail.sampling import Drawn
from dovetail.shufflers import shuffle

__all__ = ["Engine", "Performance", "Ran", "Training", "as_float", "first_parameters"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Performance:
    """What may change speed but never a statement, nor the distribution of a result."""

    devices: int | None = None
    chunk: int | None = None
    fast: bool = True
    size_classes: int | None = None

    def __post_init__(self) -> None:
        given = _validate.given(chunk=self.chunk, size_classes=self.size_classes)
        _validate.integer(**given)
        _validate.at_least(1, **given)


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
        performance: Performance | None = None,
        diagnostics: bool = False,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        performance = performance or Performance()
        self.loss, self._randomness = losses.chosen(model, dataset), randomness
        self._protocol, self.server, self._size, self._diagnostics = protocol, server, cohort_size, diagnostics
        first, self._unravel = first_parameters(model, randomness.seed)
        moments = moments_of(update, model)
        self.first = np.asarray(first) if moments is None else np.zeros(moments.dim, np.float32)
        self.dim = len(self.first)
        self._layout, self._fast = protocol.layout(self.dim), fast_path(protocol, self.dim)
        clients = clients.with_views(dataset.views)
        numbers = math.prod(dataset.inputs.shape[1:])
        most = 1 if protocol.private_steps else performance.size_classes
        classes = size_classes(clients.counts, numbers=numbers, most=most)
        state = protocol.init(self.dim)
        ways = best_ways(model, self._fast, state, update, dataset.inputs, classes=classes, diagnostics=diagnostics)
        self._classes = tuple(
            ClientWork(
                model=model,
                unravel=self._unravel,
                protocol=protocol,
                fast=self._fast,
                update=update,
                way=way if performance.fast else "general",
                diagnostics=diagnostics,
                moments=moments,
                number=number,
                width=one.width,
                loss=losses.cross_entropy if model.learner is not None else losses.function(self.loss),
            )
            for number, (way, one) in enumerate(zip(ways, classes, strict=True))
        )
        self._faithful = self._layout.shufflers > 0 and not (performance.fast and self._fast.summable)
        self.mesh = make_mesh(performance.devices if model.learner is None else 1)
        sizes = [
            performance.chunk or self._default_chunk(work, numbers, len(one.members))
            for work, one in zip(self._classes, classes, strict=True)
        ]
        self._dealer = Dealer(classes, sizes, self.mesh)
        self._data = placed(dataset, clients, list(zip(self._classes, classes, strict=True)), self.mesh)
        self._scores = Scores(model, self._unravel, dataset, self.loss, metrics or {})
        self.ran: list[Ran] = []
        self._epochs: dict[int, set[int]] = {}
        self._compiled: Callable[..., Training] = jax.jit(self._round, donate_argnums=0)
        if model.learner is not None:
            self._compiled = HostRound(self._classes, self.loss, self._faithful, self._keys, self._closed)

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
        works, used = self._dealer.dealt(drawn, capacity)
        public = _Public(np.int32(index), np.float32(drawn.size), np.float32(drawn.noise_scale))
        public, secret = jax.tree.map(
            lambda leaf: on_every_device(leaf, self.mesh), (public, (randomness or self._randomness).key_data)
        )
        after = self._compiled(training, self._data, works, used, public, secret)
        if cohort is not None:
            self.ran.append(Ran(index, cohort))
        return after

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
        return trees.named(self._unravel(self._published(training)))

    def _published(self, training: Training) -> jax.Array:
        params, state = jax.tree.map(lambda leaf: jnp.asarray(to_host(leaf)), (training.params, training.server))
        return self.server.published(params, state)

    def _default_chunk(self, work: ClientWork, numbers: int, members: int) -> int:
        floats = work.width * numbers + (3 * self.dim if work.forms_updates else 0)
        learner, device = work.model.learner, self.mesh.devices.flat[0]
        place = device.platform if learner is None else learner.platform
        fitting = max(1, chunk_bytes(place) // (4 * floats))
        most = max(1, math.ceil(min(self._size, members) / self.mesh.size))
        return math.ceil(most / math.ceil(most / fitting))

    def _round(
        self, training: Training, data: Data, works: Works, used: jax.Array, public: _Public, secret: jax.Array
    ) -> Training:
        keys = self._keys(public, secret)
        split, same = PartitionSpec(None, AXIS), PartitionSpec()
        per_device = functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(same, same, same, split, same), check_vma=False
        )
        share, norms = Share(self._classes), None
        if self._protocol.measured:
            measure = per_device(functools.partial(share.norms, keys=keys), out_specs=split)
            norms = _joined(measure(training.params, training.protocol, data, works, used))
        state = self._protocol.prepare(training.protocol, noise_scale=public.noise_scale, norms=norms)
        if self._faithful:
            everyone = per_device(functools.partial(share.updates, keys=keys), out_specs=split)
            updates = _joined(everyone(training.params, state, data, works, used)).reshape(-1, self.dim)
            ids = _joined([work[0] for work in works])
            return self._closed(training, state, updates, ids, public, keys)
        collect = per_device(functools.partial(share.tally, keys=keys), out_specs=same)
        return self._closed(training, state, collect(training.params, state, data, works, used), None, public, keys)

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
            reports = self._classes[0].reports(found, ids, state, keys.noise)  # the same in every class
            messages = shuffle(reports, self._layout, key=jax.random.fold_in(keys.noise, SHUFFLE))
            tally, raw = self._protocol.tally(messages, self.dim), seen(found, ids >= 0)
        estimate, protocol = self._protocol.estimate(
            tally, cast(int, public.size), state, key=jax.random.fold_in(keys.noise, ESTIMATE)
        )
        params, server = self.server.step(training.params, training.server, estimate)
        return Training(params, server, protocol, diagnosed(raw, self.dim) if self._diagnostics else ())


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    """All numbers of the parts, one after the other."""
    return jnp.concatenate([part.ravel() for part in parts])


def first_parameters(model: Model, seed: int) -> tuple[jax.Array, Callable[[jax.Array], Any]]:
    """The first model as a flat vector, and the way back to its own shape."""
    return ravel_pytree(model.init(jax.random.fold_in(jax.random.key(seed), 2**31 - 1)))
