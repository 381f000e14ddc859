"""Two neighbouring worlds, run through the code that runs: `randomize`, shuffle, `tally`, `estimate`.

A `Game` fixes what everyone holds; the worlds differ in what one user (or one subject) holds, or whether it is there.
One trial is one independent run of all rounds in one of the worlds, and shows a `TrialView`: the victim's own reports,
the messages after the shuffle, the estimates. Trials are vectorised; memory is one batch of them.

`neighboring_worlds` lists the worlds that are hardest to hide for any protocol: updates far beyond every clipping
bound, in opposite directions, on different coordinates, of different size, present or absent, the same in all rounds or
turning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.events import FixedSize, Poisson, Separated
from dovetail.learners.client import private_update
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.protocols import Cohort, Protocol
from dovetail.protocols.subjects import require_item_level
from dovetail.shufflers import Reports, ShuffledReports, deliver, mask_absent, shuffle
from dovetail.statements import Neighbors

__all__ = [
    "Game",
    "TrialView",
    "Worlds",
    "neighboring_worlds",
    "roster_size",
    "sample_row_mask",
]

_FAR = 1e4  # an update that every protocol clips
_MOST_REPORTS = 2**20  # that a batch holds
_MOST_TRIALS = 5000  # that a batch holds


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Worlds:
    """What everyone holds in two neighbouring worlds.

    `victim` are the victim's rows in both, (2, rounds, rows, dim), NaN where it has none; `others` are those of
    everybody else in every round, (others, dim).
    """

    name: str
    victim: np.ndarray
    others: np.ndarray

    @property
    def direction(self) -> np.ndarray:
        """The victim's sum in the first world less that in the second, (rounds, dim)."""
        held = np.nan_to_num(self.victim, nan=0.0).sum(axis=2)
        return held[0] - held[1]


class TrialView(NamedTuple):
    """What one trial shows: everything has a leading axis of rounds.

    `own_*` are the victim's reports, `known_*` the colluders', before the shuffle; `slot`, `value`, `valid` the
    messages after it (empty where nobody needs them). `own`, `first` and `estimate` are the analyzer's estimates from
    the victim's reports alone, from the messages that came first, and from all; `counts` the messages of each slot,
    `state` the public state after the round: all its leaves, flat.
    """

    own_slot: Any
    own_value: Any
    own_valid: Any
    known_slot: Any
    known_value: Any
    known_valid: Any
    slot: Any
    value: Any
    valid: Any
    own: Any
    first: Any
    estimate: Any
    counts: Any
    state: Any


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Game:
    """A settled protocol, its cohort and the worlds to tell apart; the last `cohort.colluders` users collude."""

    protocol: Protocol
    cohort: Cohort
    worlds: Worlds

    @property
    def dim(self) -> int:
        """How many coordinates an update has."""
        return self.worlds.others.shape[-1]

    @property
    def rounds(self) -> int:
        """How many rounds a trial has."""
        return self.worlds.victim.shape[1]

    @property
    def budgets(self) -> np.ndarray | None:
        """Everyone's budget, the victim first; the victim is the user who is ready to spend the most."""
        if self.protocol.budgets is None:
            return None
        return np.sort(np.asarray(self.protocol.budgets, np.float64))[::-1]

    @functools.cached_property
    def knows_likelihood(self) -> bool:
        """Whether the protocol knows the density of its reports on all that users hold, so that ratios can be used."""
        value = np.zeros((1, self.protocol.layout(self.dim).slots))
        held = [*self.worlds.victim.reshape(-1, self.dim), *np.unique(self.worlds.others, axis=0)]
        budget = None if self.budgets is None else float(self.budgets[0])
        return all(self.protocol.log_density(value, np.nan_to_num(x), budget=budget) is not None for x in held)

    @property
    def reports_per_trial(self) -> int:
        """How many reports a trial draws."""
        rows = len(self.worlds.others) + self.worlds.victim.shape[2]
        return rows * max(1, self.protocol.layout(self.dim).reports_per_client) * self.rounds

    def play(self, world: int, *, trials: int, key: jax.Array, batch: int = _MOST_TRIALS) -> Iterator[TrialView]:
        """Run independent trials in a world.

        Arguments:
            world: 0 or 1.
            batch: how many trials are run together at most. Calls with the same `batch` share one compiled program,
                whatever their number of trials.

        Returns: batches of views, as NumPy arrays with a leading axis of trials.
        """
        size = max(1, min(batch, _MOST_TRIALS, _MOST_REPORTS // self.reports_per_trial))
        key = jax.random.fold_in(key, world)
        rules = _Rules(protocol=self.protocol, cohort=self.cohort, likelihood=self.knows_likelihood)
        held = tuple(np.asarray(rows, np.float32) for rows in (self.worlds.victim[world], self.worlds.others))
        budgets = None if self.budgets is None else np.asarray(self.budgets, np.float32)
        for number, start in enumerate(range(0, trials, size)):
            keys = jax.random.split(jax.random.fold_in(key, number), size)
            views = jax.device_get(_run_trials(rules, *held, budgets, keys))
            yield jax.tree.map(lambda leaf, start=start: leaf[: trials - start], views)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rules:
    """How a round runs: static, so that all worlds of a protocol share one compiled program."""

    protocol: Protocol
    cohort: Cohort
    likelihood: bool

    def run_trial(self, victim: jax.Array, others: jax.Array, budgets: jax.Array | None, key: jax.Array) -> TrialView:
        """Run all rounds of one trial; the protocol's public state goes from one to the next.

        Arguments:
            victim: the victim's rows in this world, (rounds, rows, dim).
            others: everybody else's, (others, dim).
            budgets: everyone's, the victim first.
        """
        state = self.protocol.init(others.shape[1])
        views = []
        for index, mine in enumerate(victim):
            xs = jnp.concatenate([mine, others])
            view, state = self._run_round(xs, len(mine), budgets, state, key, index)
            views.append(view)
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *views)

    def _run_round(
        self,
        xs: jax.Array,
        num_victim_rows: int,
        budgets: jax.Array | None,
        state: Any,
        key: jax.Array,
        round_index: int,
    ) -> tuple[TrialView, Any]:
        """Run one round; returns what it shows, and the protocol's state after it.

        Arguments:
            xs: all rows, the victim's first, NaN where one is absent.
            num_victim_rows: how many of the rows are the victim's.
        """
        protocol = self.protocol
        dim = xs.shape[1]
        key_join, key_shuffle, key_estimate = jax.random.split(jax.random.fold_in(key, round_index), 3)
        present = ~jnp.isnan(xs).any(axis=1)
        if not protocol.private_steps:  # whose steps have samples of their own
            present &= self._choose_participants(len(xs), key_join)
        xs = jnp.nan_to_num(xs)
        norms = jnp.where(present, jnp.linalg.norm(xs, axis=1), jnp.nan) if protocol.needs_norms else None
        state = protocol.prepare(state, noise_scale=jnp.float32(1.0), norms=norms)
        reports = self._randomize_rows(xs, present, budgets, state, client_keys(key, round_index, len(xs)))
        layout = protocol.layout(dim)
        messages = shuffle(reports, layout, key=key_shuffle)

        def estimate(of: ShuffledReports) -> tuple[jax.Array, Any]:
            return protocol.estimate(protocol.tally(of, dim), self._divisor, state, key=key_estimate)

        mine = _select_rows(reports, slice(0, 1 if protocol.private_steps else num_victim_rows))
        theirs = _select_rows(reports, slice(len(reports.valid) - self.cohort.colluders, None))
        total, after = estimate(messages)
        public = protocol.public_state(after)
        view = TrialView(
            *self._columns_for_likelihood(mine),
            *self._columns_for_likelihood(theirs),
            *self._columns_for_likelihood(messages),
            own=estimate(deliver(mine))[0],
            first=estimate(_select_rows(messages, slice(0, len(mine.valid))))[0],
            estimate=total,
            counts=_messages_per_slot(messages, layout.slots),
            state=jnp.concatenate([jnp.zeros(1), *(jnp.ravel(leaf) for leaf in jax.tree.leaves(public))]),
        )
        return view, after

    def _choose_participants(self, rows: int, key: jax.Array) -> jax.Array:
        """Which rows take part, as a mask: all, or a sample of users or of records."""
        if self.protocol.samples == "records":
            return jax.random.bernoulli(key, require_item_level(self.protocol).rate, (rows,))
        return sample_row_mask(self.cohort.participation, rows, key=key)

    @property
    def _divisor(self) -> Any:
        """What `estimate` divides a sum by: users, or a batch of records; 1 where every user divided already."""
        if self.protocol.samples == "users":
            return self.cohort.size
        return 1 if self.protocol.private_steps else self.protocol.require("batch")

    def _randomize_rows(
        self, xs: jax.Array, present: jax.Array, budgets: jax.Array | None, state: Any, keys: jax.Array
    ) -> Reports:
        """The reports of all rows by the protocol's own `randomize`; rows that are not present report nothing valid."""
        protocol = self.protocol
        if protocol.private_steps:
            update = self._private_update(xs, present, keys[0])
            return jax.tree.map(lambda leaf: leaf[None], protocol.randomize(update, state, key=keys[0]))
        randomize = lambda x, key, budget: protocol.randomize(x, state, key=key, budget=budget)  # noqa: E731
        return mask_absent(jax.vmap(randomize)(xs, keys, budgets), present)

    def _private_update(self, xs: jax.Array, present: jax.Array, key: jax.Array) -> jax.Array:
        """One user's noisy steps on these records, each of which has the same gradient in every step."""
        protocol = require_item_level(self.protocol)
        steps = protocol.private_steps
        batch = protocol.require("batch")
        key_noise, *keys_join = jax.random.split(key, 1 + steps)
        rows = jnp.stack([present & self._choose_participants(len(xs), key_join) for key_join in keys_join]).astype(
            jnp.float32
        )

        def clipped_sum(params: jax.Array, row: jax.Array) -> jax.Array:
            return row @ clip_l2(-xs, protocol.clip_norm)

        train = private_update(clipped_sum, learning_rate=batch, batch=batch, std=protocol.std)
        return train(jnp.zeros(xs.shape[1]), rows, jnp.ones(steps), key_noise)

    def _columns_for_likelihood(self, table: Reports | ShuffledReports) -> tuple[Any, Any, Any]:
        """Slot, value and valid of every report, in full; nothing where no likelihood will be asked of them."""
        if not self.likelihood:
            return (), (), ()
        valid = table.valid.reshape(table.valid.shape + (1,) * (table.value.ndim - table.valid.ndim)) > 0
        return () if table.slot is None else table.slot, table.value, jnp.broadcast_to(valid, table.value.shape)


@functools.partial(jax.jit, static_argnums=0)
def _run_trials(
    rules: _Rules, victim: jax.Array, others: jax.Array, budgets: jax.Array | None, keys: jax.Array
) -> TrialView:
    """One trial for each key, as arrays with a leading axis of trials."""
    return jax.vmap(lambda key: rules.run_trial(victim, others, budgets, key))(keys)


def _select_rows(table: Any, which: slice) -> Any:
    """These rows of a table of reports, in all of its columns."""
    return type(table)(*(None if column is None else column[which] for column in table))


def _messages_per_slot(messages: ShuffledReports, slots: int) -> jax.Array:
    """How many valid messages each slot has, (slots,)."""
    valid = messages.valid > 0
    if messages.slot is not None:
        return jnp.zeros(slots, jnp.int32).at[messages.slot].add(valid.astype(jnp.int32), mode="drop")
    return jnp.broadcast_to(valid.sum(), (slots,)) if valid.ndim == 1 else valid.sum(axis=0)


def client_keys(key: jax.Array, round_index: int, users: int) -> jax.Array:
    """Every user's key in a round, another in each round."""
    return jax.random.split(jax.random.fold_in(jax.random.fold_in(key, 2**31 - 1), round_index), users)


def neighboring_worlds(
    protocol: Protocol, cohort: Cohort, dim: int, *, neighbors: Neighbors, rounds: int = 1
) -> list[Worlds]:
    """Worlds that differ in one unit, as far apart as clipping lets them be.

    Arguments:
        dim: how many coordinates an update has.
        neighbors: whether the victim's data are replaced, or the victim is there or not.
        rounds: how many rounds a trial has.
    """
    rows = protocol.rows_of_unit(cohort)
    others = roster_size(cohort.participation, cohort.size) - 1
    up = np.full(dim, _FAR)
    nothing = np.full(dim, np.nan)
    turns = up * (-1.0) ** np.arange(others)[:, None]
    crowds = {"all others low": np.broadcast_to(-up, (others, dim)), "others at both ends": turns}

    present = _rounds_of_victim(cohort.participation, rounds)[:, None, None]

    def worlds(name: str, first: np.ndarray, second: np.ndarray, held: np.ndarray) -> Worlds:
        each = np.stack([np.broadcast_to(side, (rounds, rows, dim)) for side in (first, second)])
        each = np.where(present, each, np.zeros(dim))
        return Worlds(name=name, victim=each, others=np.asarray(held, np.float64))

    if neighbors is Neighbors.ADD_REMOVE:
        gone = np.zeros(dim) if protocol.shuffled else nothing  # where uploads are seen, all upload
        absent = worlds("there or not", up, gone, np.zeros((others, dim)))
        return [absent, *_norm_worlds(protocol, others, dim, worlds)]
    listed = [worlds(f"high or low, {name}", up, -up, held) for name, held in crowds.items()]
    if dim > 1:
        half = np.arange(dim) < dim // 2
        listed.append(worlds("on one half or the other", up * half, up * ~half, np.zeros((others, dim))))
    if not protocol.layout(dim).shufflers:  # whether an update is clipped may show, where norms are counted
        listed.append(worlds("far beyond the clip norm or within", up, up / _FAR**2, np.zeros((others, dim))))
    if rounds > 1:
        turning = np.stack([up * (-1.0) ** i for i in range(rounds)])[:, None]
        listed.append(worlds("the same in all rounds or turning", up, turning, np.zeros((others, dim))))
    return listed + _norm_worlds(protocol, others, dim, worlds)


@functools.singledispatch
def _rounds_of_victim(participation: Any, rounds: int) -> np.ndarray:
    """In which rounds the victim's update may differ: all of them, unless it takes part rarely."""
    return np.ones(rounds, bool)


@_rounds_of_victim.register(Separated)
def _earliest_turns(participation: Separated, rounds: int) -> np.ndarray:
    """In which rounds the victim takes part: as early and as often as its schedule allows."""
    turns = np.arange(rounds)
    return (turns % participation.separation == 0) & (turns < participation.uploads * participation.separation)


def _norm_worlds(protocol: Protocol, others: int, dim: int, make_worlds: Any) -> list[Worlds]:
    """Worlds for a protocol that looks at all norms: the victim's is above their middle or below. None for others."""
    if not protocol.needs_norms:
        return []
    along = np.eye(1, dim)[0]
    sizes = np.where(np.arange(others) < others // 2, 1.0, 0.5)
    return [make_worlds("longer or shorter than the middle", along, along / 2, sizes[:, None] * along)]


@functools.singledispatch
def sample_row_mask(participation: Any, rows: int, *, key: jax.Array) -> jax.Array:
    """Which of `rows` rows take part in a round, as a mask: all, unless this kind of participation samples them."""
    return jnp.ones(rows, bool)


@sample_row_mask.register(Poisson)
def _sample_by_coins(participation: Poisson, rows: int, *, key: jax.Array) -> jax.Array:
    """Each row by a coin of its own."""
    return jax.random.bernoulli(key, participation.prob, (rows,))


@sample_row_mask.register(FixedSize)
def _sample_fixed_size(participation: FixedSize, rows: int, *, key: jax.Array) -> jax.Array:
    """A uniform subset of exactly `participation.size` rows."""
    return jax.random.permutation(key, rows) < participation.size


@functools.singledispatch
def roster_size(participation: Any, size: int) -> int:
    """How many users a trial needs for rounds of this size: as many, unless rounds sample from more."""
    return size


@roster_size.register(FixedSize)
def _population_size(participation: FixedSize, size: int) -> int:
    return participation.population
