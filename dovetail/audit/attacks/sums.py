"""Sums: a user's randomized responses, or its shares.

All shares of the victim together, whether they went to shufflers or to aggregators, are its update with one client's
part of the noise, or with none where aggregators add it.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import attacks_on_own_reports
from dovetail.audit.bounds import ExactAttack, disjoint_attack
from dovetail.audit.exact.noise import attack_skellam
from dovetail.events import Report
from dovetail.protocols import Cohort
from dovetail.protocols.sums._skellam import NoisySum
from dovetail.protocols.sums._sums import ReportedSum
from dovetail.protocols.sums.real_sum import RealSum
from dovetail.protocols.sums.secagg import SecAgg
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol
from dovetail.statements import NotApplicable

__all__ = ["attack_real_sum_client", "attack_secagg_client", "attack_shares_client", "attack_sum_client"]

_VALUE = "the victim's own noisy value"


@attacks_on_own_reports.register(ReportedSum)
def attack_sum_client(protocol: ReportedSum, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on a user's randomized responses, one report in every slot."""
    local = protocol.local_randomizer
    return _own.attacks_on_reports(Report(kind="rr", eps_local=local.eps_local, levels=local.levels), protocol.slots)


@attacks_on_own_reports.register(RealSum)
def attack_real_sum_client(protocol: RealSum, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on a user's reports or shares, whichever the protocol's method sends."""
    if protocol.sharing is None:
        return attack_sum_client(protocol, cohort, dim)
    return attack_shares_client(protocol.sharing, cohort, dim)


@attacks_on_own_reports.register(SecAgg)
def attack_secagg_client(protocol: SecAgg, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on the value that a user's shares add up to; it has no noise where aggregators add that."""
    if protocol.has_users_noise:
        return attack_shares_client(protocol, cohort, dim)
    return [disjoint_attack("the victim's own value, to which aggregators have not added their noise")]


@attacks_on_own_reports.register(SplitAndMixProtocol)
def attack_shares_client(protocol: NoisySum, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on a value with one client's part of the Skellam noise, which the victim holds at either end.

    By its exact law, where the noise spreads over few enough values; and by thresholds, with Chernoff's bound on both
    tails (the power rounded down, the alarms up). At delta = 0 the ratio has no bound, so `pure_eps` is infinite.
    """
    shift = 2 * math.floor(protocol.require("scale") * protocol.clip_norm)
    variance = protocol.part_variance
    attacks = []
    with contextlib.suppress(NotApplicable):
        attacks.append(attack_skellam(_VALUE, variance, shift, modulus=protocol.require("modulus")))
    for fraction in (0.5, 0.8, 0.9, 0.95, 0.98):
        above = math.ceil(shift * fraction)
        missed, alarm = (_log_tail(variance, distance) for distance in (shift - above, above))
        if math.exp(missed) + math.exp(alarm) > 0.99:  # upper bounds that say nothing
            continue
        first = np.array([missed, math.log(-math.expm1(missed))])
        second = np.array([math.log(-math.expm1(alarm)), alarm])
        attack = f"whether {_VALUE} is above {above}"
        attacks.append(ExactAttack(attack=attack, log_first=first, log_second=second, pure_eps=math.inf))
    nothing = np.zeros(1)
    return attacks or [ExactAttack(attack=_VALUE, log_first=nothing, log_second=nothing, pure_eps=math.inf)]


def _log_tail(variance: float, distance: int) -> float:
    """An upper bound on log P(noise >= distance) for Skellam noise of this variance, by Chernoff; distance >= 0."""
    slope = math.asinh(distance / variance)
    return variance * (math.hypot(1.0, distance / variance) - 1) - distance * slope
