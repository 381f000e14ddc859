"""Personal budgets: the reports of the user that is ready to spend the most."""

from __future__ import annotations

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import on_own_reports
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.protocols import Cohort
from dovetail.protocols.personal._personal import Personal
from dovetail.protocols.personal.apes import Apes

__all__ = ["of_apes", "own_reports"]


@on_own_reports.register(Personal)
def own_reports(
    protocol: Personal, cohort: Cohort, dim: int, *, family: cells.Cells | None = None
) -> list[ExactAttack]:
    """Every coordinate at the largest budget; the law of a report is that of the protocol's kind unless given."""
    budget = float(protocol.settle(cohort, dim).eps_locals.max())
    high, low = (family or cells.partition(protocol.kind)).ends(budget)
    pure = dim * budget * (1 - 1e-9)  # the ratio at the end of the box
    return _own.independent(high, low, dim, pure=pure)


@on_own_reports.register(Apes)
def of_apes(protocol: Apes, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Clip-Laplace reports may leave the box of the inputs."""
    if protocol.kind != "clip_laplace":
        return own_reports(protocol, cohort, dim)
    family = cells.clipped((protocol.output_bound / protocol.clip_value - 1) / 2)
    return own_reports(protocol, cohort, dim, family=family)
