"""Sums of one number in [0, 1] per user, by randomized response and one shuffle per slot; and messages of shares.

A user turns its number into positions in [0, 1], one per slot, that average to it; each is reported by randomized
response. The analyzer sees the number of reports, and subtracts what random answers add on average. Statistics are
protocols of dimension 1: `estimate` gives the sum over the planned size. Fast and faithful path agree exactly from the
same keys.

`Shares`, at the end, are the deployed messages of split-and-mix: the encoded update gets exact Skellam noise and is
split by `mechanisms.exact_skellam`, one share, a 32-bit word, in each message. The shares of a coordinate are
neighbouring slots, assigned to the shufflers in turn.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dovetail import _validate, events
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Mechanism, Report, Round, View
from dovetail.mechanisms import ExactRandomizedResponse, ExactSampler, ExactSkellam, RandomizedResponse, exact_skellam
from dovetail.mechanisms._base import clamp
from dovetail.mechanisms.skellam import Encoding
from dovetail.protocols._base import Cohort, Protocol
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._messages import Levels, Messages, Positions, Sent, from_bytes, to_bytes
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING, shuffle_scope
from dovetail.protocols._shared_sums import level_sums
from dovetail.shufflers import Layout, Reports, ShuffledReports, SlotSums, slot_sums
from dovetail.statements import Neighbors

__all__ = [
    "ReportedSum",
    "Shares",
    "check_one_number",
]


def check_one_number(dim: int, name: str) -> None:
    """Refuse updates of more than one number, on behalf of the protocol of this name."""
    if dim != 1:
        raise ValueError(f"expected one number per user (dim = 1) with {name!r}, got dim={dim}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedSum(Protocol):
    """A sum of numbers in [0, 1] from shuffled reports; numbers outside are clipped, NaN counts as 1/2."""

    shuffled: ClassVar[bool] = True
    only_dim: ClassVar[int | None] = 1
    uncompared: ClassVar[str | None] = "it adds up numbers and trains no model; see `dovetail reproduce survey`"

    eps_local: float | None = None
    """The budget of one report; calibrated if not given."""

    def __post_init__(self) -> None:
        _validate.positive(**_validate.not_none(eps_local=self.eps_local))

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: a budget of 1 for a report."""
        return {"eps_local": 1.0}

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the budget of a report."""
        return "eps_local"

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol as it is, for updates of one number."""
        check_one_number(dim, self.name)
        return self

    @property
    @abc.abstractmethod
    def local_randomizer(self) -> RandomizedResponse:
        """The randomizer of one report, for a position in [0, 1]."""

    @property
    def slots(self) -> int:
        """How many reports a user sends, one per slot."""
        return 1

    def positions(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: a position for every slot, clipped to [0, 1] when it is reported; they average to x."""
        return x

    def layout(self, dim: int) -> Layout:
        """One slot for each report of a user, and one shuffler that permutes every slot on its own."""
        check_one_number(dim, self.name)
        return Layout(slots=self.slots, reports_per_client=self.slots, shufflers=1)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """A randomized response on every position."""
        key_position, key_report = jax.random.split(key)
        reports = self.local_randomizer(self.positions(x, key=key_position), key=key_report)
        return Reports(slot=None, value=reports, valid=jnp.ones((), bool))

    def expected_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The number, clipped to [0, 1]; 1/2 for NaN."""
        return jnp.asarray(clamp(x, 0.0, 1.0))

    def messages(self, dim: int) -> Messages:
        """Deployed messages: one level each, one for every slot."""
        check_one_number(dim, self.name)
        local = self.local_randomizer
        return _Slots(response=ExactRandomizedResponse(local.eps_local, local.levels), protocol=self)

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What users share between aggregators: the level of every slot."""
        return level_sums(self.messages(dim), cohort)

    def exact_positions(self, x: np.ndarray, *, sampler: ExactSampler) -> np.ndarray:
        """Deployed client: `positions`, with what is random from the sampler."""
        return x

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray | None:
        """The log density of a report of the number x: the randomizer's, slot by slot."""
        return self.local_randomizer.log_density(value, x)

    def tally(self, reports: ShuffledReports, dim: int) -> SlotSums:
        """Sum and number of the reports in every slot."""
        return slot_sums(reports, self.slots, jnp.int32)

    def estimate(self, tally: SlotSums, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The unbiased sum over the planned size, as one coordinate, and the state as it was."""
        local = self.local_randomizer
        sums = (tally.total - local.offset * tally.messages) / local.slope
        return jnp.mean(sums, keepdims=True) / size, state

    def variance(self, x: npt.ArrayLike) -> float:
        """The exact variance of the estimated sum of these users' numbers: of the sum, not of the mean."""
        return float(self.local_randomizer.debiased_variance(np.asarray(x, np.float64)).sum())

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the estimate where every user holds zero."""
        return math.sqrt(self.variance(np.zeros(size))) / size

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One shuffled report per slot."""
        check_one_number(dim, self.name)
        scope = shuffle_scope(cohort, neighbors, "the shuffler permutes every slot uniformly, with fresh randomness")
        mechanism = self.own_reports(cohort, dim)
        return View(round=Round(mechanism=mechanism, participation=cohort.participation), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of a user's reports, one per slot; without its crowd it is what a user's own reports reveal."""
        local = self.local_randomizer
        return events.Shuffled(
            report=Report(kind="rr", eps_local=local.eps_local, levels=local.levels),
            num_users=cohort.crowd(),
            colluders=cohort.colluders,
            coordinates=self.slots,
        )

    def slots_seen(self, dim: int) -> DataIndependent:
        """Slots tell nothing: every client fills every slot."""
        return SLOTS_TELL_NOTHING


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Slots(Levels):
    """One message for every slot."""

    protocol: ReportedSum

    @property
    def slots(self) -> int:
        """How many slots there are: as many as the protocol has."""
        return self.protocol.slots

    @property
    def per_client(self) -> int:
        """How many messages a client sends: one for every slot."""
        return self.protocol.slots

    def positions(self, x: np.ndarray, *, sampler: ExactSampler) -> Positions:
        """A position for every slot; all depend on the data."""
        x = self.check_update(x, 1)
        position = self.protocol.exact_positions(np.asarray(x, np.float64), sampler=sampler)
        return Positions(np.arange(self.slots), position, np.ones(self.slots, bool))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares(Messages):
    """Every share of every coordinate, 4 bytes each.

    Guarantees:
        `total_variation` covers the noise, the one thing that is not drawn exactly.
    """

    size: ClassVar[int] = 4

    encoding: Encoding
    noise: ExactSkellam
    shares: int
    modulus: int
    shufflers: int

    @property
    def slots(self) -> int:
        """How many slots there are: one for every share of every coordinate."""
        return self.encoding.dim * self.shares

    @property
    def per_client(self) -> int:
        """How many messages a client sends: one for every slot."""
        return self.slots

    @property
    def total_variation(self) -> float:
        """How far the client's noise, over all coordinates, is from Skellam noise in total variation, at most."""
        return self.encoding.dim * self.noise.distance

    def shuffler_of(self, slot: np.ndarray) -> np.ndarray:
        """Share j is held by shuffler j mod `shufflers`."""
        return np.asarray(slot, np.int64) % self.shares % self.shufflers

    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """The shares of the encoded update with the client's part of the noise."""
        x = self.check_update(x, self.encoding.dim)
        noisy = exact_skellam.encode(self.encoding, x, sampler=sampler) + self.noise(len(x), sampler=sampler)
        shares = exact_skellam.split_into_shares(noisy, self.shares, self.modulus, sampler=sampler)
        return Sent(np.arange(self.slots, dtype=np.int64), to_bytes(shares.ravel(), self.size))

    def read(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        """Shares, one per row; refuses what is not below the modulus."""
        valid = self.check_slots(slot, body)
        shares = from_bytes(body)
        return self.keep_valid(slot, shares, valid & (shares < self.modulus))
