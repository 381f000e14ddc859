"""APES's baselines: Laplace noise of scale 2C / eps on every coordinate (Liu et al., AAAI 2023, section "Baselines").

- `Pldp`: each user with its own budget, no shuffler: nobody need be trusted, and user i's guarantee is d eps_i;
- `LdpMin`: the same with the smallest budget for everyone;
- `Unis`: personal budgets, and each coordinate is shuffled on its own.

The mean of the clipped updates is estimated by the plain average of the reports, without bias.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from dovetail import claims
from dovetail._jax import jax
from dovetail.events import Laplace, Mechanism, Round, View
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols._scopes import local_scope
from dovetail.protocols.personal._personal import PUBLIC_BUDGETS, Personal, laplace_reports
from dovetail.statements import Neighbors

__all__ = ["LdpMin", "Pldp", "Unis"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PersonalLaplace(Personal, Claimed):
    """Laplace noise, one budget per user.

    Guarantees:
        The estimate is unbiased for the mean of the updates, clipped coordinate by coordinate.
    """

    @property
    def kind(self) -> Literal["clip_laplace", "laplace"]:
        """The name of a report's distribution: Laplace noise."""
        return "laplace"

    def perturb(self, x: jax.Array, budget: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: each coordinate, clipped, with Laplace noise of scale 2C / budget."""
        return laplace_reports(x, budget, self.clip_value, key=key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unis(_PersonalLaplace):
    """Personal Laplace noise in the shuffle model."""

    name: ClassVar[str] = "unis"
    formula: ClassVar[Formula] = staticmethod(claims.apes.unis)
    shuffled: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pldp(_PersonalLaplace):
    """Personal local differential privacy; the statement is for the user with the largest budget."""

    name: ClassVar[str] = "pldp"
    formula: ClassVar[Formula] = staticmethod(claims.apes.pldp)

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of the reports of the user with the largest budget, who is protected least."""
        width = 2 * self.clip_value
        largest = max(self.settle(cohort, dim).budgets)
        return Laplace(scale=width / largest, sensitivity=width, count=dim, neighbors=Neighbors.REPLACE_ONE)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one client's reports: what the server sees is all there is."""
        return self.mechanism(cohort, dim)

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The reports of one user, as a server that knows who sent them sees them."""
        scope = local_scope(neighbors, PUBLIC_BUDGETS)
        return View(round=Round(mechanism=self.mechanism(cohort, dim), participation=cohort.participation), scope=scope)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LdpMin(Pldp):
    """Local differential privacy at the smallest budget, which satisfies every user."""

    name: ClassVar[str] = "ldp_min"
    formula: ClassVar[Formula] = staticmethod(claims.apes.ldp_min)

    def budgets_spent(self, budgets: tuple[float, ...]) -> tuple[float, ...]:
        """The smallest of all budgets, once for every user."""
        return (min(budgets),) * len(budgets)
