"""What a client's own reports promise, seen with its name on them: no crowd, no shuffle, no sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.accounting import pairs
from dovetail.accounting.charges import charges
from dovetail.accounting.pairs import LOCAL
from dovetail.events import Crowd, Disjoint, Everyone, Personalized, Round
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = ["local_bound"]

_INDICES_TELL = Theorem(key="none", where="which coordinates a client reports depends on its data")


def local_bound(rounds: Sequence[Round], *, delta: float) -> Bound:
    """A bound for all rounds at this delta or a smaller one; infinite where a report tells more than its noise hides.

    Guarantees:
        Basic composition: never below what any one of the rounds costs.
        `NotApplicable` for rounds that are sampled, which whoever sees names can tell, and for events of noisy sums.
    """
    paid = charges(rounds)
    if any(not isinstance(item.participation, Disjoint | Everyone) for item in rounds):
        raise NotApplicable("an adversary who sees names also sees who was sampled")
    times = sum(charge.times for charge in paid)
    eps, spent = [], []
    for charge in paid:
        event = charge.mechanism
        if isinstance(event, Personalized):
            one = Bound(eps=event.coordinates * max(event.eps_locals), delta=0.0, theorem=LOCAL)
        elif isinstance(event, Crowd):
            one = pairs.local(event, delta=delta / times)
        else:
            raise NotApplicable(f"{type(event).__name__} does not describe what one client's reports reveal")
        if math.isinf(one.eps):
            return Bound(eps=math.inf, delta=delta, theorem=_INDICES_TELL)
        eps.append(charge.times * one.eps)
        spent.append(charge.times * one.delta)
    total = math.fsum(eps) * (1 + 1e-15 * (len(eps) + 4))
    return Bound(eps=total, delta=min(delta, math.fsum(spent)), theorem=LOCAL)
