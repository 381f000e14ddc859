"""Sums by shares: all aggregators together have the victim's update, with one client's part of the noise or none."""

from __future__ import annotations

from dovetail.audit.attacks import split_and_mix
from dovetail.audit.attacks.registry import on_own_reports
from dovetail.audit.bounds import ExactAttack, disjoint
from dovetail.protocols import Cohort
from dovetail.protocols.sums.secagg import SecAgg

__all__ = ["own_reports"]


@on_own_reports.register(SecAgg)
def own_reports(protocol: SecAgg, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The value that the shares add up to."""
    if protocol.by_users:
        return split_and_mix.own_reports(protocol, cohort, dim)
    return [disjoint("the victim's own value, to which aggregators have not added their noise")]
