"""Sums of numbers: a user's randomized responses, or its shares."""

from __future__ import annotations

from dovetail.audit.attacks import _own, split_and_mix
from dovetail.audit.attacks.registry import on_own_reports
from dovetail.audit.bounds import ExactAttack
from dovetail.events import Report
from dovetail.protocols import Cohort
from dovetail.protocols.sums._sums import ReportedSum
from dovetail.protocols.sums.real_sum import RealSum

__all__ = ["of_real_sum", "own_reports"]


@on_own_reports.register(ReportedSum)
def own_reports(protocol: ReportedSum, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """One report in every slot."""
    local = protocol.local
    return _own.reports(Report(kind="rr", eps_local=local.eps_local, levels=local.levels), protocol.slots)


@on_own_reports.register(RealSum)
def of_real_sum(protocol: RealSum, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The same, unless numbers are split into shares."""
    if protocol.sharing is None:
        return own_reports(protocol, cohort, dim)
    return split_and_mix.own_reports(protocol.sharing, cohort, dim)
