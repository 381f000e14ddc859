"""What rounds that protect one user say about a subject whose records sit at several users.

Where noise is Gaussian the shifts of the subject's users add up, and nothing else is lost (docs/proofs/subjects.md):

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
from dovetail.accounting import compose, groups
from dovetail.accounting.exposure import refusal
from dovetail.accounting.releases import release_of
from dovetail.events import Round
from dovetail.statements import Bound, NotApplicable, Proof

__all__ = ["spanned"]

_LEAST_LOG_DELTA = -140.0
_CLOSE = 1e-3  # the search for the best delta for one user ends at this ratio


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
    if any(release_of(item.mechanism).concerns_subjects for item in rounds):
        raise NotApplicable("these rounds are accounted for a subject already, not for one user")
    if users == 1 or refusal(rounds) is not None:
        return compose.bound(rounds, delta=delta)
    added = [release_of(item.mechanism).of_users(item.participation, users) for item in rounds]
    if None not in added:
        together = compose.bound([item for item in added if item is not None], delta=delta)
        note = f"for the {users} users of a subject together (docs/proofs/subjects.md)"
        return dataclasses.replace(together, proof=together.proof.noting(note))
    return _by_group_privacy(rounds, users, delta)


def _by_group_privacy(rounds: Sequence[Round], users: int, delta: float) -> Bound:
    """The smallest eps for the group whose delta is at most this one, over the delta that is left to one user.

    Less delta for one user means a larger eps, so the largest delta that will do is searched: downwards by tens, then
    in between.
    """
    found: list[Bound] = []

    def holds(delta_one: float) -> bool:
        group = groups.for_group(compose.bound(rounds, delta=delta_one), size=users)
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
    compose.bound(rounds, delta=delta)  # says why, where nothing is certified even for one user
    none = Proof(missing=f"there is no guarantee for a group of {users} users at delta={delta:.3g}")
    return Bound(eps=math.inf, delta=delta, proof=none)
