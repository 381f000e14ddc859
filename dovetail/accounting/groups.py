"""Several users or items at once: what a bound for one says about k, and what a subject at several users is promised.

**Group privacy.** ``(eps, delta)`` for one gives ``(k eps, delta (1 + e^eps + ... + e^((k-1) eps)))`` for k, by walking
k steps; the sum is ``(e^(k eps) - 1)/(e^eps - 1)``. SubDP (Thm. 3.1) prints the looser ``k e^((k-1) eps) delta``.

**Subjects.** `subject_bound` is for a subject whose records sit at several users, in rounds that protect one. Where
noise is Gaussian the shifts of the subject's users add up, and nothing else is lost (docs/proofs/subjects.md):

- everyone takes part, or the batches of an epoch are disjoint: a Gaussian of `users` times the sensitivity;
- Poisson sampling under add-remove: a mixture over the number of its users in the round, Bin(users, prob);
- Poisson sampling and samples of fixed size under replacement: the same on both sides (`releases.replaced_users`).

For everything else there is group privacy: the subject's users change one after the other, and each step is one between
neighbours for the whole training, whichever batches the users are in. The bound is that for as many users as the
subject has records at. Under replacement their data change in any way; under add-remove they come and go as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from dovetail import _validate
from dovetail.accounting import compose, numerics
from dovetail.accounting.exposure import reason_for_refusal
from dovetail.accounting.releases import release_of
from dovetail.events import Round
from dovetail.statements import Bound, NotApplicable, Proof, Spent, Theorem, check_guarantee

__all__ = ["GROUP", "for_group", "subject_bound"]

GROUP = Theorem(
    key="group-privacy",
    where="group privacy, the geometric sum (Vadhan 2017, Lemma 2.2; SubDP Thm. 3.1 is its looser form)",
    url="https://salil.seas.harvard.edu/publications/complexity-differential-privacy",
)

_OUTWARD = 1 + 1e-12  # more than the rounding errors of eps and delta
_LEAST_LOG_DELTA = -140.0  # no smaller delta for one user is tried
_CLOSE = 1e-3  # the search for the best delta for one user ends at this ratio


def for_group(bound: Bound, *, size: int) -> Bound:
    """What holds for `size` items at once if the bound holds for each.

    Arguments:
        bound: what holds between neighbours that differ in one item.
        size: how many items change at once.

    Guarantees:
        Never above SubDP's Thm. 3.1; a group of one has the bound itself.
        A group too large to be promised anything has delta 1.
    """
    _check_group(bound, size)
    if size == 1:
        return bound
    eps = size * bound.eps * _OUTWARD
    if bound.delta == 0 or math.isinf(eps):
        return dataclasses.replace(bound, eps=eps, lower=None, proof=bound.proof.after(GROUP))
    log_delta = math.log(bound.delta) + _log_delta_factor(bound.eps, size)
    delta = numerics.as_probability_bound(math.exp(min(0.0, log_delta)) * _OUTWARD)
    spent = tuple(Spent(part.delta * (delta / bound.delta), part.on) for part in bound.proof.spent)
    proof = dataclasses.replace(bound.proof.after(GROUP), spent=spent)
    return dataclasses.replace(bound, eps=eps, delta=delta, lower=None, proof=proof)


def _log_delta_factor(eps: float, size: int) -> float:
    """log((e^(k eps) - 1)/(e^eps - 1)) for k = size, rounded up; log k at eps = 0."""
    if eps * size < 1e-9:
        return math.log(size) + size * eps
    log_sum = (size - 1) * eps + math.log(-math.expm1(-size * eps)) - math.log(-math.expm1(-eps))
    return log_sum + 1e-14 * (1 + abs(log_sum) + size * eps)


def _check_group(bound: Bound, size: int) -> None:
    """Refuse a group that is no whole number from 1 on, and a bound whose numbers are none."""
    _validate.integer(size=size)
    _validate.at_least(1, size=size)
    check_guarantee(eps=bound.eps, delta=bound.delta)


def subject_bound(rounds: Sequence[Round], *, users: int, delta: float) -> Bound:
    """The smallest certified eps for a subject with records at up to `users` users, from rounds that protect one.

    Arguments:
        rounds: rounds that protect one user.
        users: the most users that hold records of one subject.
        delta: of the bound for the subject.

    Guarantees:
        One user is the bound itself; more users never give a smaller eps.
        Never above group privacy of the bound for one user, at any delta for one that was tried.
        A release without noise gives an infinite eps.
    """
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    _validate.in_interval(0, 1, delta=delta)
    if any(release_of(item.mechanism).concerns_subjects for item in rounds):
        raise NotApplicable("these rounds are accounted for a subject already, not for one user")
    if users == 1 or reason_for_refusal(rounds) is not None:
        return compose.bound(rounds, delta=delta)
    added = [release_of(item.mechanism).of_users(item.participation, users) for item in rounds]
    if None not in added:
        together = compose.bound([item for item in added if item is not None], delta=delta)
        note = f"for the {users} users of a subject together (docs/proofs/subjects.md)"
        return dataclasses.replace(together, proof=together.proof.with_notes(note))
    return _by_group_privacy(rounds, users, delta)


def _by_group_privacy(rounds: Sequence[Round], users: int, delta: float) -> Bound:
    """The smallest eps for the group whose delta is at most this one, over the delta that is left to one user.

    Less delta for one user means a larger eps, so the largest delta that will do is searched: downwards by tens, then
    in between.
    """
    candidates: list[Bound] = []

    def holds(delta_one: float) -> bool:
        """Whether this delta for one user is at most `delta` for the group; if so the bound becomes a candidate."""
        group = for_group(compose.bound(rounds, delta=delta_one), size=users)
        if math.isinf(group.eps):
            raise NotApplicable(f"there is no guarantee for one user at delta={delta_one:.3g}")
        if group.delta <= delta:
            candidates.append(dataclasses.replace(group, delta=delta))
        return group.delta <= delta

    with contextlib.suppress(NotApplicable):
        holds(0.0)
    with contextlib.suppress(NotApplicable):
        high = math.log(delta / users) if delta else -math.inf
        step = math.log(10)
        while high > _LEAST_LOG_DELTA and not holds(math.exp(high)):
            high -= step
        low = high
        high = min(low + step, math.log(delta / users)) if delta else low
        while high - low > _CLOSE:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    if candidates:
        return min(candidates, key=lambda bound: bound.eps)
    compose.bound(rounds, delta=delta)  # says why, where nothing is certified even for one user
    none = Proof(missing=f"there is no guarantee for a group of {users} users at delta={delta:.3g}")
    return Bound(eps=math.inf, delta=delta, proof=none)
