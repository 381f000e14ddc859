"""SubDP's theorems as printed (Marathe, Kanani 2022): subject-level privacy by groups of items.

Z is the largest number of items of one subject in a mini-batch. Group privacy (Thm. 3.1) is read backwards (Thm. 3.2)
to set the noise, by the moments accountant over all mini-batches, to (eps/Z, Delta/(Z e^((Z-1) eps/Z))) for one item;
Thm. 3.3 then speaks of subjects. The paper has no experiments and prints no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dovetail import _validate
from dovetail.accounting.search import smallest_noise
from dovetail.claims._claim import HOLDS, REFUTED, Claim, PrintedNumber
from dovetail.claims.geyer import MAX_ORDER, equal_rounds, total_log_moments
from dovetail.events import Round
from dovetail.statements import NotApplicable, Theorem

__all__ = [
    "central_sub",
    "local_sub",
    "noise_scale",
]

_SPANS = "s users that hold a subject's items add their aligned gradients up, which costs a factor sqrt(s) in mu."
_BATCH = (
    "Z counts a subject's items in one mini-batch and not in the data: at q .01, T 1000, noise 0.96 a subject with "
    "2, 5 or 10 items gets eps 4.35, 12.7 or 30.5 instead of 2."
)


def _subdp_theorem(key: str, where: str) -> Theorem:
    return Theorem(
        key=f"SubDP.{key}", where=f"SubDP (Marathe, Kanani 2022), {where}", url="https://arxiv.org/abs/2206.03617"
    )


def central_sub(rounds: Sequence[Round], *, delta: float, items_per_subject: int, users_per_subject: int = 1) -> Claim:
    """What the paper claims for CentralSubDP run with this noise, Z being `items_per_subject`.

    The eps at which the recipe of Thm. 3.2 would have asked for just this noise; mini-batches sampled by Poisson.
    """
    return _subject_claim("alg1", "Alg. 1", rounds, delta, items_per_subject, users_per_subject)


def local_sub(rounds: Sequence[Round], *, delta: float, items_per_subject: int, users_per_subject: int = 1) -> Claim:
    """What the paper claims for LocalSubDP run with this noise, Z being `items_per_subject`."""
    return _subject_claim("alg2", "Alg. 2", rounds, delta, items_per_subject, users_per_subject)


def noise_scale(*, eps: float, delta: float, group: int, prob: float, steps: int) -> PrintedNumber:
    """sigma_Z: the noise multiplier that the recipe of Thm. 3.2 asks for."""
    _check_group(group)
    _validate.positive(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)
    least = group * math.log(group / delta) / max(MAX_ORDER - group + 1, 1e-9)
    if eps <= least:
        raise NotApplicable(
            f"orders up to {MAX_ORDER} show no less than eps={least:.3g} for groups of {group}, got {eps}"
        )

    def eps_of(noise: float) -> float:
        return _group_eps(equal_rounds(prob, noise, steps), delta, group)

    return PrintedNumber(
        value=smallest_noise(eps_of, eps=eps, tolerance=1e-4),
        quantity=f"noise multiplier for groups of {group}",
        theorem=_subdp_theorem("sigma", "Sec. 3.1"),
        verdict=HOLDS,
        reason="As a recipe for groups of a fixed size under Poisson sampling of items it is sound, and loose.",
    )


def _subject_claim(
    key: str, where: str, rounds: Sequence[Round], delta: float, items_per_subject: int, users_per_subject: int
) -> Claim:
    """The paper's group-privacy claim for a subject: moments of the rounds, then a group of Z items."""
    _validate.integer(users_per_subject=users_per_subject)
    _validate.at_least(1, users_per_subject=users_per_subject)
    return Claim(
        eps=_group_eps(rounds, delta, items_per_subject),
        delta=delta,
        theorem=_subdp_theorem(key, f"{where} by Thm. 3.2 and 3.3"),
        verdict=REFUTED,
        reason=_BATCH if users_per_subject == 1 else _SPANS,
    )


def _group_eps(rounds: Sequence[Round], delta: float, group: int) -> float:
    """The smallest g e with Delta >= g e^((g-1) e) min_l exp(sum alpha(l) - l e): linear in e for every order l."""
    _check_group(group)
    _validate.in_open_interval(0, 1, delta=delta)
    total = total_log_moments(rounds)
    slope = np.arange(1, len(total) + 1) - (group - 1)
    usable = slope > 0
    if not usable.any():
        raise NotApplicable(f"the moments accountant stops at order {len(total)}, too low for groups of {group}")
    return group * float(np.min((total[usable] + math.log(group / delta)) / slope[usable]))


def _check_group(group: int) -> None:
    _validate.integer(group=group)
    _validate.at_least(1, group=group)
