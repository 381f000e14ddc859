"""SS-Simple (FLAME): every client reports every coordinate, each with budget eps_local, each shuffled on its own.

Fast and faithful path give the same tally from the same keys, for a sum does not see the order; Laplace noise is drawn
once per slot in the fast path and agrees in distribution.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail._jax import jax, jnp
from dovetail.claims import flame
from dovetail.events import Mechanism, Report, Shuffled
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols.flame._flame import SharedLevels

__all__ = ["SsSimple"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SsSimple(SharedLevels, Claimed):
    """All coordinates, one shuffle each.

    Guarantees:
        The estimate is unbiased for the mean of the updates, clipped coordinate by coordinate.

    References:
        Liu et al. (AAAI 2021, FLAME), Alg. 2 and Thm. 1; ``published = true`` shuffles whole messages, as printed.
    """

    name: ClassVar[str] = "ss_simple"
    formula: ClassVar[Formula] = staticmethod(flame.ss_simple)

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """FLAME's own settings: a client's budget of 78.5, divided among its coordinates."""
        return {"eps_local": min(1.0, 78.5 / dim)}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: every randomizer, and whole messages."""
        levels = {"eps_local": 1.0, "randomizer": "rr", "levels": 5, "published": True}
        return [{}, levels, {"eps_local": 1.0, "randomizer": "laplace"}]

    def select_coordinates(self, x: jax.Array, *, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Every coordinate depends on the data, and every one is reported."""
        everything = jnp.ones(x.shape, bool)
        return everything, everything

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]]:
        """The event that Thm. 1 speaks of: one shuffled report per coordinate."""
        event = Shuffled(report=self.report, num_users=cohort.crowd(), colluders=cohort.colluders, coordinates=dim)
        return event, {"linkage": self.linkage}

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of a round: one shuffled report per coordinate.

        Linkable coordinates are one report with the budget of all.
        """
        crowd = cohort.crowd()
        report = self.report
        coordinates = dim
        if self.linkage == "vector":
            report = Report(kind="generic", eps_local=dim * report.eps_local)
            coordinates = 1
        return Shuffled(report=report, num_users=crowd, colluders=cohort.colluders, coordinates=coordinates)
