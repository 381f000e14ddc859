"""DP-FL clipped to the median of the round's own norms: the noise scale is that median, and tells it.

All updates lie along one direction. Of the other users one half has short updates, the other half long ones, as users
of real data do about their median, so the victim's own norm decides where the median lies. With an odd number of
users (n - 1)/2 others have norm 1 and as many norm `CHANGE`; the median is 1 if the victim's update is short and
`CHANGE` if it is long. With an even number the median averages two norms, n/2 - 1 others are short and n/2 long, and
long is CHANGE / (2 - CHANGE), so that the median is `CHANGE` times larger as well.
"""

from __future__ import annotations

from dovetail.audit.attacks import _own
from dovetail.audit.attacks._scales import scaled_noise
from dovetail.audit.attacks.registry import on_own_reports, stronger
from dovetail.audit.bounds import ExactAttack
from dovetail.protocols import Cohort
from dovetail.protocols.curator.dp_fl import DpFl

__all__ = ["CHANGE", "exact_attacks", "norms"]

CHANGE = 1.1  # by which the median grows


@stronger.register(DpFl)
def exact_attacks(protocol: DpFl, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """A tenth more or less in the median, by one user's update."""
    if protocol.clip != "median":
        return []
    if cohort.participation.secret:
        return []  # where users are drawn at random the median is random, and no exact law is known
    attack = f"squared norm of the noise, its scale {CHANGE - 1:.0%} larger where the victim's update is long"
    return [scaled_noise(attack, dim - 1, [(1.0, CHANGE**2)], [(1.0, 1.0)])]


def norms(num_users: int, *, long: bool) -> list[float]:
    """The norms of all users' updates, the victim's last, in the one world or the other."""
    half, odd = divmod(num_users, 2)
    reach = CHANGE if odd else CHANGE / (2 - CHANGE)
    others = [1.0] * (half if odd else half - 1) + [reach] * half
    return [*others, reach if long else 1.0]


on_own_reports.register(DpFl, _own.seen_by_the_server)
