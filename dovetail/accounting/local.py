"""What a client's own reports promise, seen with its name on them: no crowd, no shuffle, no sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.accounting.exposure import exposures
from dovetail.accounting.releases.crowds import LOCAL
from dovetail.events import Disjoint, Everyone, Round
from dovetail.statements import Bound, NotApplicable

__all__ = ["local_bound"]


def local_bound(rounds: Sequence[Round], *, delta: float) -> Bound:
    """A bound for all rounds at this delta or a smaller one; infinite where a report tells more than its noise hides.

    Guarantees:
        Basic composition: never below what any one of the rounds costs.
        `NotApplicable` for rounds that are sampled, which whoever sees names can tell, and for events of noisy sums.
    """
    paid = exposures(rounds)
    if any(not isinstance(item.participation, Disjoint | Everyone) for item in rounds):
        raise NotApplicable("an adversary who sees names also sees who was sampled")
    times = sum(exposure.times for exposure in paid)
    eps, spent = [], []
    for exposure in paid:
        one = exposure.release.local(delta=delta / times)
        if math.isinf(one.eps):
            return Bound(eps=math.inf, delta=delta, proof=one.proof)
        eps.append(exposure.times * one.eps)
        spent.append(exposure.times * one.delta)
    total = math.fsum(eps) * (1 + 1e-15 * (len(eps) + 4))
    return Bound(eps=total, delta=min(delta, math.fsum(spent)), proof=LOCAL.proof)
