"""CentralSubDP: a trusted server adds noise to the federation's sum of clipped record gradients (SubDP Alg. 1).

Every user sends the sum of the clipped gradients of its sampled records; what one record adds is what `randomize`
gives, and users only add up. The server adds N(0, (noise_multiplier * clip_norm)^2) once to the sum of all, and divides
by the expected batch. Without sampling of users, records are sampled from the whole federation; if users are drawn
first (`cohort.kind = "poisson"`), a subject's records at one user arrive together, which the event says.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dovetail._jax import jax, jnp
from dovetail.claims import subdp
from dovetail.events import Everyone, FixedSize, Mechanism, Poisson, Round, View
from dovetail.mechanisms.gaussian import normal
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Formula
from dovetail.protocols._fast import Fast
from dovetail.protocols._scopes import CURATOR_SEES, curator_scope
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.shufflers import Reports
from dovetail.statements import Neighbors

__all__ = ["CentralSub"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CentralSub(ItemLevel, Fast):
    """Subject-level differential privacy with a trusted server; `unit = "item"` is item-level DP-FL.

    Guarantees:
        A record adds at most `clip_norm` to the sum, a subject at most `items_per_subject` times that.
        The noise does not depend on the data, unless `adaptive_z`.
    """

    name: ClassVar[str] = "central_sub"
    unshared: ClassVar[str] = "needs a curator to sample records and to add the noise"
    formula: ClassVar[Formula] = staticmethod(subdp.central_sub)

    def _expected_records(self, cohort: Cohort) -> float:
        """How many records a step draws from, on average: those of all users, or of the users that are drawn."""
        return (cohort.records or 0) * self._prob_of_user(cohort)

    def _prob_of_user(self, cohort: Cohort) -> float:
        """The probability that a user takes part in a round; refuses other samples than Poisson ones."""
        match cohort.participation:
            case Everyone():
                return 1.0
            case Poisson(prob=prob):
                return prob
        kind = "fixed" if isinstance(cohort.participation, FixedSize) else "disjoint' or 'separated"
        raise ValueError(f"expected cohort.kind = 'everyone' or 'poisson' under {self.name!r}, got {kind!r}")

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The clipped gradient of one record."""
        return Reports(slot=None, value=self.clip_update(x, state), valid=jnp.ones(()))

    def init(self, dim: int) -> jax.Array:
        """The state before the first round: noise scale 1, which only `adaptive_z` changes."""
        return jnp.float32(1.0)

    def prepare(self, state: jax.Array, *, noise_scale: jax.Array, norms: jax.Array | None = None) -> jax.Array:
        """The state of a round, which is its noise scale."""
        return noise_scale

    def estimate(self, tally: jax.Array, size: int, state: jax.Array, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The noised sum over `size`, which is the expected batch, and the state as it was."""
        noise = self.std * state * normal(key, tally.shape, tally.dtype)
        return (tally + noise) / size, state

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The event of a round, a noisy sum over sampled records, against an observer of the models."""
        self.check_relation(neighbors)
        cohort.refuse_minimum_if_secret()
        scope = curator_scope(
            neighbors,
            "the server adds the noise and keeps the users' sums to itself",
            self._sampling_assumption(cohort),
            *self._assumptions(),
            unit=self.protects,
        )
        mechanism = self._mechanism(cohort, prob_user=self._prob_of_user(cohort))
        return View(round=Round(mechanism=mechanism, participation=Everyone()), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """Nothing is certified: the server gets the clipped gradients themselves."""
        return CURATOR_SEES

    def _sampling_assumption(self, cohort: Cohort) -> str:
        """The assumption on who joins a round, as a sentence of the statement."""
        prob = self._prob_of_user(cohort)
        if prob == 1:
            return "each record joins a round independently, and the adversary does not see which"
        return (
            f"each user joins a round independently with probability {prob:.4g}, then each of its records, and the "
            "adversary does not see which, except through other people's records"
        )

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the server's noise over `size`, which is the expected batch."""
        return self.std / size

    def clip_norm_at(self, state: Any) -> float:
        """The clip norm: scaling records down to it is all that happens before the sum."""
        return self.clip_norm
