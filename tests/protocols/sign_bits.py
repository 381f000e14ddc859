"""A protocol from outside the package, in one file: its event, its theorem, its messages, its attack.

Every user sends one bit per coordinate by randomized response, through a shuffler. What is certified is what holds
without the shuffle: all bits of one user, composed. An installed distribution names it by one line in its metadata:

    [project.entry-points."dovetail.protocols"]
    sign_bits = "sign_bits:SignBits"
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.accounting.releases import Release, Sampling, releases
from dovetail.audit.attacks import registry
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.cells import Binomial, attack_counts
from dovetail.events import DataIndependent, Everyone, Round, View
from dovetail.mechanisms import BinaryRandomizedResponse, ExactRandomizedResponse, ExactSampler
from dovetail.protocols import Cohort, Levels, Positions, Protocol, shuffle_scope
from dovetail.shufflers import Layout, Reports, ShuffledReports
from dovetail.statements import Bound, Neighbors, Theorem

WARNER = Theorem(key="sign-bits.warner", where="randomized response on every coordinate, by its definition")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bits:
    """One user's bits in a round, as if nobody shuffled them."""

    coordinates: int
    eps_local: float

    @property
    def neighbors(self) -> Neighbors:
        return Neighbors.REPLACE_ONE


@releases(Bits)
class BitsRelease(Release[Bits]):
    """All bits of one user together."""

    theorem = WARNER

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        if sampling != Everyone():
            return super().renyi(sampling, orders)
        at, keep = np.asarray(orders), 1 / (1 + math.exp(-self.event.eps_local))
        logs = np.logaddexp(
            at * math.log(keep) + (1 - at) * math.log1p(-keep), at * math.log1p(-keep) + (1 - at) * math.log(keep)
        )
        return self.event.coordinates * logs / (at - 1) * (1 + 1e-9)

    @property
    def pure_eps(self) -> float:
        return self.event.coordinates * self.event.eps_local

    def local_bound(self, *, delta: float) -> Bound:
        return Bound(eps=self.pure_eps, delta=0.0, proof=WARNER.proof)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignBits(Protocol):
    """One bit per coordinate."""

    name: ClassVar[str] = "sign_bits"
    shuffled: ClassVar[bool] = True

    clip_value: float = 0.1
    eps_local: float | None = None

    @property
    def noise_field(self) -> str:
        return "eps_local"

    @property
    def local_randomizer(self) -> BinaryRandomizedResponse:
        return BinaryRandomizedResponse(self.require("eps_local"))

    def layout(self, dim: int) -> Layout:
        return Layout(slots=dim, reports_per_client=dim, shufflers=1)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        position = jnp.clip(x / (2 * self.clip_value) + 0.5, 0.0, 1.0)
        return Reports(slot=None, value=self.local_randomizer(position, key=key), valid=jnp.ones(len(x), bool))

    def messages(self, dim: int) -> SentBits:
        return SentBits(
            response=ExactRandomizedResponse(self.require("eps_local"), 2), dim=dim, clip_value=self.clip_value
        )

    def tally(self, reports: ShuffledReports, dim: int) -> jax.Array:
        centred = jnp.where(reports.valid, 2 * self.local_randomizer.debias(reports.value) - 1, 0.0)
        if reports.slot is None:
            return centred.sum(axis=0)
        return jnp.zeros(dim).at[reports.slot].add(centred)

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        return tally * self.clip_value / size, state

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        scope = shuffle_scope(cohort, neighbors, "the shuffler permutes uniformly")
        return View(
            round=Round(mechanism=self.own_reports(cohort, dim), participation=cohort.participation), scope=scope
        )

    def own_reports(self, cohort: Cohort, dim: int) -> Bits:
        return Bits(coordinates=dim, eps_local=self.require("eps_local"))

    def slots_seen(self, dim: int) -> DataIndependent:
        return DataIndependent(reason="every user fills every slot")

    def noise_std(self, size: int, dim: int) -> float:
        return self.clip_value / math.tanh(self.require("eps_local") / 2) / math.sqrt(size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentBits(Levels):
    """A byte per coordinate."""

    dim: int
    clip_value: float

    @property
    def slots(self) -> int:
        return self.dim

    @property
    def per_client(self) -> int:
        return self.dim

    def positions(self, x: np.ndarray, *, sampler: ExactSampler) -> Positions:
        x = self.check_update(x, self.dim)
        position = np.clip(x / (2 * self.clip_value) + 0.5, 0.0, 1.0)
        return Positions(np.arange(self.dim), position, np.ones(self.dim, bool))


@registry.shows_less_than_event.register(SignBits)
def shows_less_than_event(protocol: SignBits) -> bool:
    """The event leaves out the shuffle."""
    return True


@registry.stronger_attacks.register(SignBits)
def ones_of_all(protocol: SignBits, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The number of ones in all coordinates, everybody else at the low end."""
    low = 1 / (1 + math.exp(protocol.require("eps_local")))
    others = Binomial(trials=(cohort.crowd() - cohort.colluders - 1) * dim, prob=low)
    return [
        attack_counts(
            "ones in all", [others, Binomial(trials=dim, prob=1 - low)], [others, Binomial(trials=dim, prob=low)]
        )
    ]
