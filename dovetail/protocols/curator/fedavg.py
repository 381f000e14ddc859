"""NP-FL: the plain mean of the clients' updates, without privacy (McMahan et al. 2017).

Nothing is clipped and no noise is added, so its statement gives no guarantee.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from dovetail._jax import jax, jnp
from dovetail.events import Mechanism, NonPrivate, Round, View
from dovetail.protocols._base import Cohort, Protocol
from dovetail.protocols._fast import Fast
from dovetail.protocols._scopes import CURATOR_SEES, curator_scope
from dovetail.shufflers import Layout, Reports
from dovetail.statements import Neighbors

__all__ = ["FedAvg"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FedAvg(Protocol, Fast):
    """Federated averaging without clipping, noise or any guarantee."""

    name: ClassVar[str] = "fedavg"
    references: ClassVar[tuple[str, ...]] = ("MMRHA17",)
    unshared: ClassVar[str] = "adds no noise, so that its sums would give no privacy"
    resizable: ClassVar[bool] = True

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, each of them reported by every client; there is no shuffler."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=0)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The update itself, in one report per coordinate."""
        return Reports(slot=None, value=x, valid=jnp.ones(()))

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum over the planned size."""
        return tally / size, state

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """A release without noise, for which nothing is certified."""
        mechanism = NonPrivate(reason="no noise is added")
        return View(
            round=Round(mechanism=mechanism, participation=cohort.participation), scope=curator_scope(neighbors)
        )

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """Nothing is certified: the server gets the update itself."""
        return CURATOR_SEES

    def noise_std(self, size: int, dim: int) -> float:
        """Zero, for nothing is added."""
        return 0.0

    def scaling(self, norm: jax.Array, state: Any) -> jax.Array:
        """Factors of 1: updates are summed as they are."""
        return jnp.ones_like(norm)
