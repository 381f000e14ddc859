"""SS-Simple as printed shuffles whole messages: one message with too many ones is the victim's."""

from __future__ import annotations

from dovetail.audit import exact
from dovetail.audit.attacks import _own
from dovetail.audit.attacks._linked import messages_like_the_victims, ones
from dovetail.audit.attacks.registry import on_own_reports, stronger
from dovetail.audit.bounds import ExactAttack
from dovetail.events import Shuffled
from dovetail.protocols import Cohort
from dovetail.protocols.flame.ss_simple import SsSimple

__all__ = ["exact_attacks", "own_reports"]


@stronger.register(SsSimple)
def exact_attacks(protocol: SsSimple, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Where whole messages travel; nothing beyond the exact attacks on the event where they do not."""
    if protocol.linkage != "vector":
        return []
    users = cohort.crowd()
    others = users - cohort.colluders - 1
    apart = Shuffled(report=protocol.report, num_users=users, colluders=cohort.colluders, coordinates=dim)
    found = messages_like_the_victims(ones(protocol.report), dim, others=others, dummies=0)
    return found + exact.exact_attacks(apart)  # links may be ignored


@on_own_reports.register(SsSimple)
def own_reports(protocol: SsSimple, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """A report on every coordinate."""
    return _own.reports(protocol.report, dim)
