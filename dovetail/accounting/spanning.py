"""What rounds that protect one user say about a subject whose records sit at several users.

Where noise is Gaussian the shifts of the subject's users add up, and nothing else is lost (docs/proofs/subjects.md):

- everyone takes part, or the batches of an epoch are disjoint: a Gaussian of `users` times the sensitivity;
- Poisson sampling under add-remove: a mixture over the number of its users in the round, Bin(users, prob).

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
from dovetail.accounting import composition, groups
from dovetail.events import (
    Everyone,
    FixedSize,
    Gaussian,
    NonPrivate,
    Poisson,
    Round,
    SampledSubject,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = ["spanned"]

_LEAST_LOG_DELTA = -140.0
_CLOSE = 1e-3  # the search for the best delta for one user ends at this ratio
_UP = 1 + 1e-15


def spanned(rounds: Sequence[Round], *, users: int, delta: float) -> Bound:
    """The smallest certified eps for a subject with records at up to `users` users, from rounds that protect one.

    Guarantees:
        One user is the bound itself; more users never give a smaller eps.
        Never above group privacy of the bound for one user, at any delta for one that was tried.
        A release without noise gives an infinite eps.
    """
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    _validate.in_interval(0, 1, delta=delta)
    if any(isinstance(item.mechanism, SampledSubject) for item in rounds):
        raise NotApplicable("these rounds are accounted for a subject already, not for one user")
    if users == 1 or any(isinstance(item.mechanism, NonPrivate) for item in rounds):
        return composition.bound(rounds, delta=delta)
    if all(_adds_up(item) for item in rounds):
        together = composition.bound([_together(item, users) for item in rounds], delta=delta)
        where = f"{together.theorem.where}, for the {users} users of a subject together (docs/proofs/subjects.md)"
        return dataclasses.replace(together, theorem=dataclasses.replace(together.theorem, where=where))
    return _by_group_privacy(rounds, users, delta)


def _adds_up(item: Round) -> bool:
    """Whether the subject's users only add up their shifts in this round."""
    if not isinstance(item.mechanism, Gaussian):
        return False
    match item.participation:
        case FixedSize(size=size, population=population):
            return size == population
        case Poisson(prob=prob) if 0 < prob < 1:
            return item.mechanism.neighbors is Neighbors.ADD_REMOVE and item.mechanism.std > 0
    return True


def _together(item: Round, users: int) -> Round:
    noise, participation = item.mechanism, item.participation
    if not isinstance(noise, Gaussian):
        raise NotApplicable("the shifts of several users only add up under Gaussian noise")
    if not isinstance(participation, Poisson) or participation.prob in (0, 1):
        reach = noise.sensitivity * users * _UP
        return Round(mechanism=dataclasses.replace(noise, sensitivity=reach), participation=participation)
    joined = SampledSubject(
        std=noise.std, clip_norm=noise.sensitivity, items=users, prob_item=participation.prob, users_spanned=users
    )
    return Round(mechanism=joined, participation=Everyone())


def _by_group_privacy(rounds: Sequence[Round], users: int, delta: float) -> Bound:
    """The smallest eps for the group whose delta is at most this one, over the delta that is left to one user.

    Less delta for one user means a larger eps, so the largest delta that will do is searched: downwards by tens, then
    in between.
    """
    found: list[Bound] = []

    def holds(delta_one: float) -> bool:
        group = groups.for_group(composition.bound(rounds, delta=delta_one), size=users)
        if math.isinf(group.eps):
            raise NotApplicable(f"there is no guarantee for one user at delta={delta_one:.3g}")
        if group.delta <= delta:
            found.append(dataclasses.replace(group, delta=delta))
        return group.delta <= delta

    with contextlib.suppress(NotApplicable):
        holds(0.0)
    with contextlib.suppress(NotApplicable):
        high, step = math.log(delta / users) if delta else -math.inf, math.log(10)
        while high > _LEAST_LOG_DELTA and not holds(math.exp(high)):
            high -= step
        low = high
        high = min(low + step, math.log(delta / users)) if delta else low
        while high - low > _CLOSE:
            middle = (low + high) / 2
            low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    if found:
        return min(found, key=lambda bound: bound.eps)
    composition.bound(rounds, delta=delta)  # says why, where nothing is certified even for one user
    none = Theorem(
        key=groups.GROUP.key, where=f"there is no guarantee for a group of {users} users at delta={delta:.3g}"
    )
    return Bound(eps=math.inf, delta=delta, theorem=none)
