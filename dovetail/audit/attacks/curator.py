"""Attacks on protocols with a curator, and on those for subjects, where the noise scale follows the data.

A noise scale that depends on the victim shows in the size of the noise. (Without a trusted curator the server gets
updates as they are, and nothing has to be worked out.)

All updates lie along one direction. The released sum has pure noise in the other dim - 1 coordinates, and its squared
norm there is a scaled chi-square, in both worlds; in many dimensions no two scales look alike.

*DP-FL clipped to the median of the round's own norms*: the noise scale is that median. Of the other users one half has
short updates, the other half long ones, as users of real data do about their median, so the victim's own norm decides
where the median lies. With an odd number of users (n - 1)/2 others have norm 1 and as many norm `CHANGE`; the median is
1 if the victim's update is short and `CHANGE` if it is long. With an even number the median averages two norms, n/2 - 1
others are short and n/2 long, and long is CHANGE / (2 - CHANGE), so that the median is `CHANGE` times larger as well.

*SubDP with a Z read off the batch*: the noise scale follows the largest number of one subject's records in it. Everyone
but the victim has one record. Without the victim Z is 1; with it Z is the number of its records in the batch, a
binomial. The noise that the paper's recipe asks for at Z grows with Z.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import gammainc, gammaincc
from scipy.stats import binom

from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import attacks_on_own_reports, stronger_attacks
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.noise import log_masses_of_cells
from dovetail.claims import subdp
from dovetail.protocols import Cohort, Protocol
from dovetail.protocols.curator.dp_fl import DpFl
from dovetail.protocols.curator.fedavg import FedAvg
from dovetail.protocols.subjects import require_item_level
from dovetail.protocols.subjects.central_sub import CentralSub
from dovetail.protocols.subjects.local_sub import LocalSub

__all__ = [
    "CHANGE",
    "attack_central_sub_client",
    "attack_dp_fl_round",
    "attack_local_sub_client",
    "attack_scaled_noise",
    "attack_subjects_round",
    "norms_around_median",
]

_CELLS = 4000  # of the squared norm
_TINY = 1e-300  # below, doubles cannot tell a tail from none
CHANGE = 1.1  # the factor by which the victim's long update raises the median
_EPS, _DELTA, _STEPS = 8.0, 1e-5, 100  # what the recipe is asked for, where nothing else is known


@stronger_attacks.register(DpFl)
def attack_dp_fl_round(protocol: DpFl, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The attack on a clip norm that is the median: the victim's update raises it, and the noise, by a tenth.

    None for other clip norms, and where users are drawn in secret.
    """
    if protocol.clip != "median":
        return []
    if cohort.participation.secret:
        return []  # where users are drawn at random the median is random, and no exact law is known
    attack = f"squared norm of the noise, its scale {CHANGE - 1:.0%} larger where the victim's update is long"
    return [attack_scaled_noise(attack, dim - 1, [(1.0, CHANGE**2)], [(1.0, 1.0)])]


def norms_around_median(num_users: int, *, long: bool) -> list[float]:
    """The norms of all users' updates, the victim's last.

    Arguments:
        long: whether the victim's update is long, as it is in the first world.
    """
    half, odd = divmod(num_users, 2)
    long_norm = CHANGE if odd else CHANGE / (2 - CHANGE)
    others = [1.0] * (half if odd else half - 1) + [long_norm] * half
    return [*others, long_norm if long else 1.0]


attacks_on_own_reports.register(DpFl, _own.attacks_by_the_server)
attacks_on_own_reports.register(FedAvg, _own.attacks_by_the_server)


@stronger_attacks.register(CentralSub)
@stronger_attacks.register(LocalSub)
def attack_subjects_round(
    protocol: Protocol, cohort: Cohort, dim: int, *, noise_multiplier_of: Callable[[int], float] | None = None
) -> list[ExactAttack]:
    """The attack on one round of SubDP with `adaptive_z`, by the size of the noise; none without it.

    Over the steps of a user's own round noise adds up; then the victim has two records, which are in the same batch or
    are not.

    Arguments:
        noise_multiplier_of: the noise multiplier for each Z; by default that of the paper's recipe for 100 steps.
    """
    settings = require_item_level(protocol)
    most = settings.items_per_subject or 1
    if not settings.adaptive_z or most < 2:
        return []
    rate = settings.rate
    steps = max(1, settings.private_steps)
    noise_multiplier_of = noise_multiplier_of or _noise_multiplier_by_recipe(settings.claimed_eps or _EPS, rate)
    if steps > 1:
        meets = rate**2
        single, double = noise_multiplier_of(1) ** 2, noise_multiplier_of(2) ** 2
        law = [
            (float(binom.pmf(times, steps, meets)), (steps - times) * single + times * double)
            for times in range(steps + 1)
        ]
        name = "two records"
        alone = [(1.0, steps * single)]
    else:
        law = [(float(binom.cdf(1, most, rate)), noise_multiplier_of(1) ** 2)]
        law += [(float(binom.pmf(items, most, rate)), noise_multiplier_of(items) ** 2) for items in range(2, most + 1)]
        name = f"{most} records"
        alone = [(1.0, noise_multiplier_of(1) ** 2)]
    return [attack_scaled_noise(f"squared norm of the noise, which follows the victim's {name}", dim - 1, law, alone)]


def _noise_multiplier_by_recipe(eps: float, rate: float) -> Callable[[int], float]:
    """The noise multiplier for each Z that the paper's recipe takes for this eps and sampling rate, over 100 steps."""

    @functools.cache
    def noise_multiplier_of(group: int) -> float:
        return float(subdp.noise_scale(eps=eps, delta=_DELTA, group=group, prob=rate, steps=_STEPS).value)

    return noise_multiplier_of


@attacks_on_own_reports.register(CentralSub)
def attack_central_sub_client(protocol: CentralSub, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The attack by whether a user's sum is 0: it is not if a record of the subject, the user's only one, is drawn."""
    caps = [cap for cap in (protocol.items_per_user, protocol.items_per_subject) if cap is not None]
    absent = (1 - protocol.rate) ** min(caps, default=1)
    absent = 1 - cohort.participation.prob_drawn * (1 - absent)
    with np.errstate(divide="ignore"):
        there = np.log([absent, 1 - absent])
    return [ExactAttack(attack=_own.SERVER, log_first=there, log_second=np.array([0.0, -np.inf]))]


@attacks_on_own_reports.register(LocalSub)
def attack_local_sub_client(protocol: LocalSub, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on what a user sends, noise included: on its event, or, where the noise follows the data, on its size."""
    attacks = attack_subjects_round if protocol.adaptive_z else _own.attacks_on_round_event
    return attacks(protocol, cohort, dim)


def attack_scaled_noise(
    attack: str, dim: int, first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> ExactAttack:
    """The attack by the squared norm of Gaussian noise whose variance is random.

    Arguments:
        attack: how the attack is described.
        dim: how many coordinates hold pure noise.
        first: pairs of a probability and the variance that the noise has with it, in the first world.
        second: the same in the second world.

    Tails beyond what a double holds go into the slack, so that no eps is found above about 690.
    """
    variances = [variance for world in (first, second) for weight, variance in world if weight > 0]
    spread = 40 * math.sqrt(2 * dim) + 800
    low, high = min(variances) * max(1e-3, dim - spread), max(variances) * (dim + spread)
    cuts = np.geomspace(low, high, _CELLS)
    laws = []
    for world in (first, second):
        below = sum(weight * gammainc(dim / 2, cuts / (2 * variance)) for weight, variance in world)
        above = sum(weight * gammaincc(dim / 2, cuts / (2 * variance)) for weight, variance in world)
        laws.append(log_masses_of_cells(np.log(np.maximum(below, _TINY)), np.log(np.maximum(above, _TINY))))
    return ExactAttack(attack=attack, log_first=laws[0], log_second=laws[1], slack=4 * _TINY)
