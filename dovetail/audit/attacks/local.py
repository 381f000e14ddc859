"""Attacks on local randomizers of whole vectors: LDP-FL, whose event says it all, and PrivUnit, shuffled or not.

A PrivUnit message lies with a large probability on the cap around its sender's direction. Two attacks on a shuffled
round count messages on caps; without a shuffle, the cap that the victim's own message falls into is all there is.

*Opposite*: the victim holds a unit vector u or -u. All others hold -u: of their messages the fewest fall into the cap
around u. Where the two caps do not meet, the density of a message takes three values, one on each cap and one between,
so that the numbers of messages on both caps are all that the messages tell of the victim.

*Apart*: the victim holds one of two directions at 120 degrees, all others hold the third. Messages on one of the
victim's caps and on neither of the other two are counted, for both: there the others' density is the lowest, too. In
the plane of the three the squared length r^2 of a uniform point has P(r >= s) = (1 - s^2)^(dim/2 - 1).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting.releases import privunit as accounting
from dovetail.audit.attacks import _own
from dovetail.audit.attacks.registry import attacks_on_own_reports, stronger_attacks
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.cells import attack_two_counts
from dovetail.protocols import Cohort
from dovetail.protocols.local.ldp_fl import LdpFl
from dovetail.protocols.local.privunit import PrivUnit
from dovetail.statements import NotApplicable

__all__ = ["attack_privunit_client", "attack_privunit_round", "cap_probs", "mass_on_one_cap_alone"]

_ROUNDED_DOWN = 1e-10  # what `cap_mass` takes off to be on the safe side of an upper bound
_CAP_ERROR = 1e-12  # relative; 50 digits show 4e-15 in up to a million dimensions
_LEAST_DIM = 10  # below, the density of lengths ends too abruptly for the quadrature
_NODES = 20
_PIECES = 40

attacks_on_own_reports.register(LdpFl, _own.attacks_on_round_event)


@stronger_attacks.register(PrivUnit)
def attack_privunit_round(protocol: PrivUnit, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Both attacks on a shuffled round, by exact laws of two counts; the error of a cap's mass goes into the slack."""
    towards, away = cap_probs(protocol, dim)
    others = cohort.crowd() - cohort.colluders - 1
    attack = "messages on the caps around the victim's direction and its opposite, others opposite"
    opposite = attack_two_counts(attack, others, (away, towards), (towards, away), (away, towards))
    attacks = [dataclasses.replace(opposite, slack=opposite.slack + (others + 1) * away * 4 * _CAP_ERROR)]
    if dim >= _LEAST_DIM:
        attacks.append(_attack_three_caps(towards, away, others, dim, protocol.local_randomizer(dim).cap.threshold))
    return attacks


def _attack_three_caps(
    prob_own_cap: float, prob_opposite_cap: float, others: int, dim: int, threshold: float
) -> ExactAttack:
    """The attack "apart" of the module's docstring.

    Arguments:
        prob_own_cap: the probability that a message falls onto the cap around its sender's direction.
        prob_opposite_cap: the probability that it falls onto the opposite cap.
        others: how many honest users there are beside the victim.
        threshold: the least inner product of a cap's points with its direction.
    """
    mass = accounting.cap_mass(dim=dim, threshold=threshold) * (1 + _ROUNDED_DOWN)
    alone = mass_on_one_cap_alone(dim=dim, threshold=threshold)
    near = prob_own_cap / mass * alone  # that a message lies alone on its sender's cap,
    far = (1 - prob_own_cap) / (1 - mass) * alone  # and alone on another one
    attack = (
        "messages on one of three caps at 120 degrees, of which the victim's is one of two and the others' the third"
    )
    counted = attack_two_counts(attack, others, (far, far), (near, far), (far, near))
    return dataclasses.replace(counted, slack=counted.slack + ((others + 1) * 2 * far + near) * 4 * _CAP_ERROR)


def mass_on_one_cap_alone(*, dim: int, threshold: float) -> float:
    """The fraction of the sphere on a cap and on neither of the caps at 120 degrees from it on either side.

    Guarantees:
        Right to 12 digits in 10 dimensions or more.
    """
    _validate.in_open_interval(0, 1, threshold=threshold)
    _validate.at_least(_LEAST_DIM, dim=dim)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    end = math.acos(threshold)  # of angles at which the cap is met
    total = 0.0
    for low, high in ((0.0, min(math.pi / 3, end)), (min(math.pi / 3, end), end)):  # at 60 degrees two caps cross
        pieces = np.linspace(low, high, _PIECES + 1)
        width = np.diff(pieces)[:, None] / 2
        angle = pieces[:-1, None] + width * (1 + nodes)
        own = _prob_longer_in_plane(threshold / np.cos(angle), dim)
        side = np.cos(2 * math.pi / 3 - angle)  # the nearer of the two others
        other = np.where(side > threshold, _prob_longer_in_plane(threshold / np.maximum(side, threshold), dim), 0.0)
        total += float((width * weights * np.maximum(own - other, 0.0)).sum())
    return total / math.pi  # both sides of the middle, of a full turn


def _prob_longer_in_plane(length: np.ndarray, dim: int) -> np.ndarray:
    """The probability that a uniform point of the sphere is longer than this within a plane through the centre."""
    return np.exp((dim / 2 - 1) * np.log1p(-(np.minimum(length, 1 - 1e-16) ** 2)))


def cap_probs(protocol: PrivUnit, dim: int) -> tuple[float, float]:
    """The probabilities that a message falls into the cap around its sender's direction, and into the opposite cap."""
    cap = protocol.local_randomizer(dim).cap
    if cap.threshold <= 0:
        raise NotApplicable(f"opposite caps overlap at threshold={cap.threshold}: the attack needs a threshold above 0")
    mass = accounting.cap_mass(dim=dim, threshold=cap.threshold) * (1 + _ROUNDED_DOWN)
    return cap.prob, (1 - cap.prob) * mass / (1 - mass)


@attacks_on_own_reports.register(PrivUnit)
def attack_privunit_client(protocol: PrivUnit, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The attack by whether the victim's message lies on the cap of its direction, on the opposite one, or neither."""
    towards, away = cap_probs(protocol, dim)
    logs = np.log([towards, 1 - towards - away, away])
    return [ExactAttack(attack="the cap that the victim's message falls into", log_first=logs, log_second=logs[::-1])]
