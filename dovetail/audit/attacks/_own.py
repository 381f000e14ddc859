"""What is left when shuffler and analyzer collude: the victim's own reports, with its name on them.

Nobody else hides the victim, so the law of its reports in both worlds is all there is. Reports that are independent add
up their log-likelihood ratios. Where which slots a client fills is a function of its data, or where the server gets the
update itself, the supports differ and no finite eps holds.
"""

from __future__ import annotations

import math

import numpy as np

from dovetail.audit import exact
from dovetail.audit.bounds import ExactAttack, disjoint
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import log_binomial
from dovetail.audit.exact.sums import attack_repeated
from dovetail.events import Report
from dovetail.protocols import Cohort, Protocol

__all__ = ["SERVER", "by_event", "independent", "reports", "seen_by_the_server"]

_OWN = "the victim's own reports"
SERVER = "the victim's update, which the server gets as it is"


def reports(report: Report, count: int) -> list[ExactAttack]:
    """So many reports, all on the low end or all on the high end."""
    high, low = cells.of_report(report).ends(report.eps_local)
    return independent(high, low, count)


def independent(first: np.ndarray, second: np.ndarray, count: int, *, pure: float = 0.0) -> list[ExactAttack]:
    """So many reports with these laws in the two worlds; `pure` is what is known at delta = 0."""
    if len(first) == 2:
        logs = [log_binomial(count, float(law[1])) for law in (first, second)]
        return [ExactAttack(attack=f"ones among {_OWN}", log_first=logs[0], log_second=logs[1])]
    return attack_repeated(f"log-likelihood ratios of {_OWN}", first, second, count, pure=pure)


def by_event(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Those on the event, where what the server sees of a client is all that there is."""
    return exact.exact_attacks(protocol.view(cohort, dim, neighbors=protocol.relation).round.mechanism)


def seen_by_the_server(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Updates that the server gets as they are, if the victim is drawn."""
    prob = cohort.participation.prob_drawn
    if prob == 1:
        return [disjoint(SERVER)]
    logs = np.array([math.log(prob), -math.inf, math.log1p(-prob)])
    return [ExactAttack(attack=SERVER, log_first=logs, log_second=logs[[1, 0, 2]])]
