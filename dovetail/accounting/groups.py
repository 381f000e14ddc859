"""Group privacy: what a bound for one says about k, and the bound for one that a target for k needs.

``(eps, delta)`` for one gives ``(k eps, delta (1 + e^eps + ... + e^((k-1) eps)))`` for k, by walking k steps; the sum
is ``(e^(k eps) - 1)/(e^eps - 1)``. SubDP (Thm. 3.1) prints the looser ``k e^((k-1) eps) delta``. Its Thm. 3.2 is read
here as a calibration recipe, from a target for the group to one that suffices for a single item; as the converse, which
is how it is printed, it is false.
"""

from __future__ import annotations

import dataclasses
import math

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import Bound, NotApplicable, Spent, Theorem, check_guarantee

__all__ = ["GROUP", "for_group", "for_one"]

GROUP = Theorem(
    key="group-privacy",
    where="group privacy, the geometric sum (Vadhan 2017, Lemma 2.2; SubDP Thm. 3.1 is its looser form)",
    url="https://salil.seas.harvard.edu/publications/complexity-differential-privacy",
)

_OUTWARD = 1 + 1e-12


def for_group(one: Bound, *, size: int) -> Bound:
    """What holds for `size` items at once if `one` holds for each.

    Guarantees:
        Never above SubDP's Thm. 3.1; a group of one is `one` itself.
        A group too large to be promised anything has delta 1.
    """
    _check(one, size)
    if size == 1:
        return one
    eps = size * one.eps * _OUTWARD
    if one.delta == 0 or math.isinf(eps):
        return dataclasses.replace(one, eps=eps, lower=None, proof=one.proof.after(GROUP))
    log_delta = math.log(one.delta) + _log_factor(one.eps, size)
    delta = numerics.probability(math.exp(min(0.0, log_delta)) * _OUTWARD)
    paid = tuple(Spent(part.delta * (delta / one.delta), part.on) for part in one.proof.spent)
    proof = dataclasses.replace(one.proof.after(GROUP), spent=paid)
    return dataclasses.replace(one, eps=eps, delta=delta, lower=None, proof=proof)


def for_one(group: Bound, *, size: int) -> Bound:
    """A bound for one item that suffices for `group` to hold for `size` of them: the calibration of SubDP's Thm. 3.2.

    Guarantees:
        `for_group(for_one(group))` is never above `group`, and within 1e-9 of it.
        Never stricter than SubDP's recipe (eps/k, delta/(k e^((k-1) eps/k))), but for rounding.
    """
    _check(group, size)
    if size == 1:
        return group
    eps = group.eps / size / _OUTWARD**2
    if group.delta == 0 or math.isinf(eps):
        return Bound(eps=eps, delta=group.delta, proof=group.proof.after(GROUP))
    log_delta = math.log(group.delta) - _log_factor(eps, size)
    if log_delta < -700:
        raise NotApplicable(f"expected a delta that a group of {size} at eps={group.eps:.4g} leaves, got {group.delta}")
    return Bound(eps=eps, delta=math.exp(log_delta) / _OUTWARD**3, proof=group.proof.after(GROUP))


def _log_factor(eps: float, size: int) -> float:
    """log((e^(k eps) - 1)/(e^eps - 1)), rounded up; k at eps = 0."""
    if eps * size < 1e-9:
        return math.log(size) + size * eps
    log_sum = (size - 1) * eps + math.log(-math.expm1(-size * eps)) - math.log(-math.expm1(-eps))
    return log_sum + 1e-14 * (1 + abs(log_sum) + size * eps)


def _check(bound: Bound, size: int) -> None:
    _validate.integer(size=size)
    _validate.at_least(1, size=size)
    check_guarantee(eps=bound.eps, delta=bound.delta)
