"""A bench for a protocol: updates to try it on, and what its code makes of them, on every path."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.events import Everyone
from dovetail.protocols import Cohort, Protocol, fast_path
from dovetail.shufflers import Reports, deliver, shuffle

__all__ = ["FAR", "Bench", "tally_from_messages", "tally_from_sum", "tally_on_fast_path"]

FAR = 1e6  # an update that every protocol clips

Path = Callable[["Bench", jax.Array, jax.Array], Any]  # the tally of a round, from updates and a seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A protocol with everything that it needs to run: hashable, so that its programs are compiled once.

    Arguments:
        unsettled: the protocol with its settings, before `settle`.
        dim: coordinates of an update.
        clients: users of a round, all of whom take part.
        runs: rounds that averages are taken over.
    """

    unsettled: Protocol
    dim: int = 40
    clients: int = 150
    runs: int = 150

    @classmethod
    def build(cls, protocol: type[Protocol], settings: Mapping[str, Any], *, clients: int = 150) -> Bench:
        """A bench for a class under these settings, with the rest of them from its `example`."""
        dim = protocol.only_dim or 40
        filled = {**protocol.example(dim, settings), **settings}
        return cls(unsettled=protocol(**filled), dim=dim, clients=clients, runs=max(150, 6000 // dim))

    @property
    def cohort(self) -> Cohort:
        """A cohort of all clients, all of whom are needed."""
        return Cohort(participation=Everyone(), size=self.clients, min_size=self.clients)

    @functools.cached_property
    def protocol(self) -> Protocol:
        """The protocol, settled on its cohort."""
        return self.unsettled.settle(self.cohort, self.dim)

    @functools.cached_property
    def updates(self) -> np.ndarray:
        """One update per client: some short, some longer than any clip norm."""
        scale = np.linspace(0.1, 3.0, self.clients)[:, None]
        normal = np.random.default_rng(0).normal(size=(self.clients, self.dim))
        return np.asarray(normal * scale / np.sqrt(self.dim), np.float32)

    @functools.cached_property
    def corners(self) -> np.ndarray:
        """Updates far beyond every clip norm, all of the same signs."""
        signs = np.resize([1.0, -1.0, 1.0], self.dim)
        return np.asarray(FAR * signs * (1 + np.abs(self.updates)), np.float32)

    def budgets(self, count: int) -> jax.Array | None:
        """The eps_local of the first `count` clients; None where budgets are not personal."""
        return None if self.protocol.budgets is None else jnp.asarray(self.protocol.budgets[:count], jnp.float32)

    def expected_mean(self, updates: np.ndarray) -> np.ndarray:
        """The mean of what these updates count as, which is what estimates should average to: float64 (dim,)."""
        state = self.protocol.init(self.dim)
        return np.asarray(self.protocol.expected_update(jnp.asarray(updates), state), np.float64).mean(axis=0)

    def reports(self, updates: Any, seed: Any = 0) -> Reports:
        """The reports of the first clients, one for each row of updates, from the keys of this seed."""
        return _reports(self, jnp.asarray(updates), seed)

    def tally(self, reports: Reports) -> Any:
        """The analyzer's sums of reports in the order in which they came."""
        return self.protocol.tally(deliver(reports), self.dim)

    def estimate(self, tally: Any, seed: Any = 0) -> jax.Array:
        """The estimate of the mean update from a tally, with the analyzer's noise from this seed: (dim,)."""
        state = self.protocol.init(self.dim)
        return self.protocol.estimate(tally, self.clients, state, key=jax.random.key(seed))[0]

    def estimates(self, updates: Any, path: Path) -> np.ndarray:
        """Estimates of `runs` rounds with fresh noise, (runs, dim); the same updates are run once."""
        return _estimates(self, path, np.asarray(updates, np.float32).tobytes())

    @property
    def quickest_path(self) -> Path:
        """How a simulation adds up a round: without messages, if it can."""
        return tally_on_fast_path if fast_path(self.protocol, self.dim).is_summable else tally_from_messages


def _client_keys(seed: Any, clients: int) -> jax.Array:
    """One key for each client of a round, all from one seed."""
    return jax.random.split(jax.random.key(seed), clients)


@functools.partial(jax.jit, static_argnums=0)
def _reports(bench: Bench, updates: jax.Array, seed: Any) -> Reports:
    """The compiled randomizer of the first clients, one for each update."""
    protocol = bench.protocol
    state = bench.protocol.init(bench.dim)
    keys = _client_keys(seed, bench.clients)[: len(updates)]
    randomize = lambda x, key, budget: protocol.randomize(x, state, key=key, budget=budget)  # noqa: E731
    return jax.vmap(randomize)(updates, keys, bench.budgets(len(updates)))


_shuffle = jax.jit(shuffle, static_argnums=1)


def tally_from_messages(bench: Bench, updates: jax.Array, seed: Any) -> Any:
    """The tally of a round whose messages are formed, shuffled and added up."""
    key = jax.random.key(seed + 10**6)
    messages = _shuffle(bench.reports(updates, seed), bench.protocol.layout(bench.dim), key=key)
    return bench.protocol.tally(messages, bench.dim)


def tally_on_fast_path(bench: Bench, updates: jax.Array, seed: Any) -> Any:
    """The tally of a round by the protocol's fast path."""
    path = fast_path(bench.protocol, bench.dim)
    collected = path.collect(
        updates,
        jnp.ones(len(updates), bool),
        bench.protocol.init(bench.dim),
        keys=_client_keys(seed, bench.clients),
        budgets=bench.budgets(len(updates)),
    )
    return path.finish(collected, key=jax.random.key(seed + 2 * 10**6))


def tally_from_sum(bench: Bench, updates: jax.Array, seed: Any) -> Any:
    """The tally of a round from the sum of the scaled updates alone."""
    path = fast_path(bench.protocol, bench.dim)
    scale = path.scaling(jnp.linalg.norm(updates, axis=1), bench.protocol.init(bench.dim))
    total = (updates * scale[:, None]).sum(axis=0)  # type: ignore[index]
    return path.tally_of_sum(total, jnp.float32(bench.clients), key=jax.random.key(seed))


@functools.lru_cache(maxsize=64)
def _compiled_rounds(bench: Bench, path: Path) -> Callable[[Any, Any], jax.Array]:
    """The compiled rounds of a bench on one path: from updates and seeds to estimates, (seeds, dim)."""

    def run(updates: jax.Array, seed: Any) -> jax.Array:
        return bench.estimate(path(bench, updates, seed), seed + 3 * 10**6)

    return jax.jit(lambda updates, seeds: jax.lax.map(lambda seed: run(updates, seed), seeds))


@functools.lru_cache(maxsize=64)
def _estimates(bench: Bench, path: Path, updates: bytes) -> np.ndarray:
    """The estimates of all runs; cached by the updates' bytes, so do not write to them."""
    rows = np.frombuffer(updates, np.float32).reshape(bench.clients, bench.dim)
    return np.asarray(_compiled_rounds(bench, path)(rows, jnp.arange(bench.runs)), np.float64)
