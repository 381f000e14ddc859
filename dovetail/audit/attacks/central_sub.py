"""SubDP with a Z read off the batch: the noise scale follows the largest number of one subject's records in it.

Everyone but the victim has one record. Without the victim Z is 1; with it Z is the number of its records in the batch,
a binomial. The noise that the paper's recipe asks for at Z grows with Z. All gradients lie along one direction, so the
squared norm of the released sum in the others is that of the noise alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from scipy.stats import binom

from dovetail.audit.attacks import _own
from dovetail.audit.attacks._scales import scaled_noise
from dovetail.audit.attacks.registry import on_own_reports, stronger
from dovetail.audit.bounds import ExactAttack
from dovetail.claims import subdp
from dovetail.protocols import Cohort, Protocol
from dovetail.protocols.subjects import record_level
from dovetail.protocols.subjects.central_sub import CentralSub
from dovetail.protocols.subjects.local_sub import LocalSub

__all__ = ["exact_attacks", "of_local_sub", "own_reports"]

_EPS, _DELTA, _STEPS = 8.0, 1e-5, 100  # what the recipe is asked for, where nothing else is known


@stronger.register(CentralSub)
@stronger.register(LocalSub)
def exact_attacks(
    protocol: Protocol, cohort: Cohort, dim: int, *, noise_of: Callable[[int], float] | None = None
) -> list[ExactAttack]:
    """One round of `adaptive_z`; `noise_of` is the noise multiplier for each Z, by default the recipe's for 100 steps.

    Over the steps of a user's own round noise adds up; then the victim has two records, which meet or do not.
    """
    mine = record_level(protocol)
    most = mine.items_per_subject or 1
    if not mine.adaptive_z or most < 2:
        return []
    rate, steps = mine.rate, max(1, mine.private_steps)
    noise_of = noise_of or _recipe(mine.claimed_eps or _EPS, rate)
    if steps > 1:
        meets = rate**2
        single, double = noise_of(1) ** 2, noise_of(2) ** 2
        law = [
            (float(binom.pmf(times, steps, meets)), (steps - times) * single + times * double)
            for times in range(steps + 1)
        ]
        name, alone = "two records", [(1.0, steps * single)]
    else:
        law = [(float(binom.cdf(1, most, rate)), noise_of(1) ** 2)]
        law += [(float(binom.pmf(items, most, rate)), noise_of(items) ** 2) for items in range(2, most + 1)]
        name, alone = f"{most} records", [(1.0, noise_of(1) ** 2)]
    return [scaled_noise(f"squared norm of the noise, which follows the victim's {name}", dim - 1, law, alone)]


def _recipe(eps: float, rate: float) -> Callable[[int], float]:
    @functools.cache
    def noise_of(group: int) -> float:
        return float(subdp.noise_scale(eps=eps, delta=_DELTA, group=group, prob=rate, steps=_STEPS).value)

    return noise_of


@on_own_reports.register(CentralSub)
def own_reports(protocol: CentralSub, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """A user's sum is not zero if the subject's records are in it; the subject is that user's only one."""
    caps = [cap for cap in (protocol.items_per_user, protocol.items_per_subject) if cap is not None]
    absent = (1 - protocol.rate) ** min(caps, default=1)
    absent = 1 - cohort.participation.prob_drawn * (1 - absent)
    with np.errstate(divide="ignore"):
        there = np.log([absent, 1 - absent])
    return [ExactAttack(attack=_own.SERVER, log_first=there, log_second=np.array([0.0, -np.inf]))]


@on_own_reports.register(LocalSub)
def of_local_sub(protocol: LocalSub, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The noise is in what a user sends, so its event says it all, unless the noise itself tells."""
    attacks = exact_attacks if protocol.adaptive_z else _own.by_event
    return attacks(protocol, cohort, dim)
