"""PrivUnit in the shuffle model: one message per user, its whole update as one locally private vector.

Each update is clipped to L2 norm `clip_norm` and reported by `mechanisms.PrivUnit` with budget eps_local for all of its
coordinates together. The shuffler permutes the messages: one slot, no dummies, nothing linkable but what one report
shows. Fast and faithful path give the same tally from the same keys. A deployed message is a seed of 16 bytes, which
the analyzer expands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Mechanism, Report, Round, Shuffled, View
from dovetail.mechanisms import ExactSampler, SeededPrivUnit, seeds
from dovetail.mechanisms import PrivUnitRandomizer as Randomizer
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.protocols._base import CLIP_NORM, Cohort, Protocol
from dovetail.protocols._fast import Fast
from dovetail.protocols._messages import Messages, Sent
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING, shuffle_scope
from dovetail.shufflers import Layout, Reports, reports_from_messages
from dovetail.shufflers import ShuffledReports as Forwarded
from dovetail.statements import Neighbors

__all__ = ["PrivUnit"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivUnit(Protocol, Fast):
    """One shuffled message per user.

    Guarantees:
        The estimate is unbiased for the mean of the updates, clipped to `clip_norm`.

    References:
        Bhowmick et al. (2018); Asi, Feldman, Talwar (ICML 2022); amplified as any randomizer with this eps_local is.
    """

    name: ClassVar[str] = "privunit"
    references: ClassVar[tuple[str, ...]] = ("BDFKR18", "AFT22")
    shuffled: ClassVar[bool] = True

    unshared: ClassVar[str] = "sends a seed of 16 bytes, smaller than any share of the vector it stands for"

    clip_norm: float = CLIP_NORM
    """Largest L2 norm of an update; larger ones are scaled down."""
    eps_local: float | None = None
    """The budget of one report; calibrated if not given."""

    def __post_init__(self) -> None:
        _validate.clip_norm(clip_norm=self.clip_norm)
        _validate.positive(**_validate.not_none(eps_local=self.eps_local))

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: a budget of 2 for the whole update."""
        return {"eps_local": 2.0}

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the budget of the message."""
        return "eps_local"

    def local_randomizer(self, dim: int) -> Randomizer:
        """The randomizer of an update of this dimension."""
        return Randomizer(self.require("eps_local"), self.clip_norm, dim)

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, all of them in one message, whose entries travel together."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=1, linkage="vector")

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The update as a random unit vector, in one message."""
        return Reports(slot=None, value=self.local_randomizer(len(x))(x, key=key), valid=jnp.ones(()))

    @property
    def matches_messages_exactly(self) -> bool:
        """True: the fast path adds up the same messages in another order."""
        return True

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> jax.Array:
        """The sum of the messages, one after the other where they are long."""
        return self.local_randomizer(xs.shape[1]).sum_reports(xs, present, keys=keys)

    def collect_onto(
        self,
        total: jax.Array,
        xs: jax.Array,
        present: jax.Array,
        state: Any,
        *,
        keys: jax.Array,
        budgets: jax.Array | None = None,
    ) -> jax.Array:
        """`total` plus the sum of these messages."""
        return self.local_randomizer(xs.shape[1]).sum_reports(xs, present, keys=keys, onto=total)

    def messages(self, dim: int) -> Messages:
        """Deployed messages: the seed of a unit vector, 16 bytes."""
        return _Seeds(SeededPrivUnit(self.local_randomizer(dim)))

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray:
        """The log density of the whole message against the uniform law of the sphere, (..., 1)."""
        return self.local_randomizer(value.shape[-1]).log_density(value, x)[..., None]

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """Updates scaled down to the clip norm."""
        return clip_l2(x, self.clip_norm)

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum of the messages, unbiased, over the planned size."""
        return self.local_randomizer(len(tally)).debias(tally / size), state

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of a coordinate of the average of `size` messages on a zero update.

        Taken at the last coordinate: a zero update counts as lying along the first.
        """
        return float(np.sqrt(self.local_randomizer(dim).debiased_variance(np.zeros(dim))[-1]) / math.sqrt(size))

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one message per user; without its crowd it is what a single message reveals."""
        local = self.local_randomizer(dim)
        report = Report(kind="cap", eps_local=local.eps_local, cap_mass=local.cap_mass)
        return Shuffled(report=report, num_users=cohort.crowd(), colluders=cohort.colluders)

    def slots_seen(self, dim: int) -> DataIndependent:
        """Slots tell nothing: all messages are in one."""
        return SLOTS_TELL_NOTHING

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One shuffled report per user."""
        mechanism = self.own_reports(cohort, dim)
        if cohort.aggregators is not None:
            raise self.not_shared()
        scope = shuffle_scope(cohort, neighbors, "the shuffler permutes the messages uniformly, with fresh randomness")
        return View(round=Round(mechanism=mechanism, participation=cohort.participation), scope=scope)


@dataclasses.dataclass(frozen=True)
class _Seeds(Messages):
    """The seed of a direction; any 16 bytes are one."""

    size: ClassVar[int] = seeds.SEED_BYTES
    slots: ClassVar[int] = 1
    per_client: ClassVar[int] = 1

    randomizer: SeededPrivUnit

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What messages rely on: also that directions generated from seeds look uniform."""
        return (
            *super().assumptions,
            "directions generated from seeds are indistinguishable from uniform ones (AES-128)",
        )

    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """The seed of the update's direction."""
        x = self.check_update(x, self.randomizer.law.dim)
        return Sent(np.zeros(1, np.int64), self.randomizer(x, sampler=sampler)[None])

    def read(self, slot: np.ndarray, body: np.ndarray) -> tuple[Forwarded, int]:
        """The directions, one per row, and how many messages were refused because their slot does not exist."""
        valid = self.check_slots(slot, body)
        return reports_from_messages(None, seeds.directions_of_seeds(body, self.randomizer.law.dim), valid), int(
            np.count_nonzero(~valid)
        )
