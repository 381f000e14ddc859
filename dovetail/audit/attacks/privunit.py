"""PrivUnit: messages near the victim's direction, and messages near its opposite.

The victim holds a unit vector u or -u. All others hold -u: of their messages the fewest fall into the cap around u.
Where the two caps do not meet, the density of a message takes three values, one on each cap and one between, so that
the numbers of messages on both caps are all that the messages tell of the victim.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail.accounting.releases import privunit as accounting
from dovetail.audit.attacks.registry import on_own_reports, stronger
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.counts import trinomials
from dovetail.protocols import Cohort
from dovetail.protocols.local.privunit import PrivUnit
from dovetail.statements import NotApplicable

__all__ = ["cap_probs", "exact_attacks", "own_reports"]

_ROUNDED_DOWN = 1e-10  # what `cap_mass` takes off to be on the safe side of an upper bound
_CAP_ERROR = 1e-12  # relative; 50 digits show 4e-15 in up to a million dimensions


@stronger.register(PrivUnit)
def exact_attacks(protocol: PrivUnit, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The law of both counts; what may be wrong with the mass of a cap goes into the slack."""
    towards, away = cap_probs(protocol, dim)
    others = cohort.crowd() - cohort.colluders - 1
    attack = "messages on the caps around the victim's direction and its opposite, others opposite"
    exact_attack = trinomials(attack, others, (away, towards), (towards, away), (away, towards))
    return [dataclasses.replace(exact_attack, slack=exact_attack.slack + (others + 1) * away * 4 * _CAP_ERROR)]


def cap_probs(protocol: PrivUnit, dim: int) -> tuple[float, float]:
    """The probabilities that a message falls into the cap around its sender's direction, and into the opposite cap."""
    cap = protocol.local(dim).cap
    if cap.threshold <= 0:
        raise NotApplicable(f"expected caps that do not meet, got threshold={cap.threshold}")
    mass = accounting.cap_mass(dim=dim, threshold=cap.threshold) * (1 + _ROUNDED_DOWN)
    return cap.prob, (1 - cap.prob) * mass / (1 - mass)


@on_own_reports.register(PrivUnit)
def own_reports(protocol: PrivUnit, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """On which cap, or between them, the victim's message lies."""
    towards, away = cap_probs(protocol, dim)
    logs = np.log([towards, 1 - towards - away, away])
    return [ExactAttack(attack="the cap that the victim's message falls into", log_first=logs, log_second=logs[::-1])]
