"""LocalSubDP: every user trains by DP-SGD on its own records, and the server averages the models (SubDP Alg. 2).

A round is `steps` steps at every user: the clipped gradients of the sampled records are added up, N(0,
(noise_multiplier * clip_norm)^2) is added to the sum, and the step divides by the expected batch. The server sees every
user's model and need not be trusted. A subject at several users is hidden by each one's noise apart, so its shifts add
up like the sides of a cube, which the event says.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.claims import subdp
from dovetail.events import Everyone, Mechanism, Round, View
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Formula
from dovetail.protocols._scopes import local_scope
from dovetail.protocols.subjects._items import ItemLevel
from dovetail.shufflers import Reports
from dovetail.statements import Neighbors

__all__ = ["LocalSub"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSub(ItemLevel):
    """Subject-level differential privacy against the server itself.

    Guarantees:
        The noise is in the model before it leaves the user: `randomize` adds nothing.
        Nothing is claimed from users not taking part, whom the server would see.
    """

    name: ClassVar[str] = "local_sub"
    unshared: ClassVar[str] = "adds its noise within local training, in floating point"
    formula: ClassVar[Formula] = staticmethod(subdp.local_sub)
    undeployed: ClassVar[str] = "adds its noise within local training, in floating point, and has no shuffler to deploy"

    steps: int = 1
    """Number of noisy steps that a user takes per round."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(steps=self.steps)
        _validate.at_least(1, steps=self.steps)

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: two private steps, so that more than one is tried."""
        return [{"steps": 2}]

    @property
    def private_steps(self) -> int:
        """Steps of DP-SGD at a user in a round; above 0, the engine runs them before `randomize`."""
        return self.steps

    def _expected_records(self, cohort: Cohort) -> float:
        """How many records a step draws from: those of one user, on average."""
        return (cohort.records or 0) / cohort.population

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """How far the user's private steps moved the model."""
        return Reports(slot=None, value=x, valid=jnp.ones(()))

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The average of the users' model changes over the planned size, and the state as it was."""
        return tally / size, state

    def expected_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The update as it comes: records were clipped in the steps that made it."""
        return x

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The noisy sums of all users in one round, as a server that knows who sent them sees them."""
        self.check_relation(neighbors)
        scope = local_scope(
            neighbors,
            "each record joins a step independently, and the adversary does not see which",
            *self._assumptions(),
            unit=self.protects,
        )
        return View(round=Round(mechanism=self.own_reports(cohort, dim), participation=Everyone()), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one user's reports: what the server sees is all there is."""
        return self._mechanism(cohort, noise="user", steps=self.steps)

    def noise_std(self, size: int, dim: int) -> float:
        """Zero, for nothing is added to what users send: the noise is in there already."""
        return 0.0
