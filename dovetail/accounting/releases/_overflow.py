"""How probably padded slots are too few, and how many of its coordinates a client reports."""

from __future__ import annotations

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.events import Crowd, PaddedBernoulli
from dovetail.statements import NotApplicable

__all__ = ["most_reports", "need_shuffle", "spent_delta"]

_OUTWARD = 1 + 1e-9
_UNDERFLOW = 1e-300


def spent_delta(event: Crowd) -> float:
    """What a round costs in delta beside its pair: the chance that a report of the victim meets a full coordinate.

    Guarantees:
        At most the chance that any coordinate overflows, by the union bound: P(Bin(n - t, beta) > n_p - t) d.
        Zero where nothing is dropped, and for SS-Topk, whose pair pays for drops.
    """
    need_shuffle(event)
    match event:
        case PaddedBernoulli(inclusion=inclusion):
            slots = event.pad_to - event.colluders
            if event.honest > slots:
                full = float(numerics.binomial_sf(slots - 1, event.honest - 1, inclusion))
                full = full * _OUTWARD * numerics.binomial_outward(event.honest) + _UNDERFLOW
                return numerics.probability(event.coordinates * inclusion * full)
    return 0.0


def most_reports(event: PaddedBernoulli, *, delta: float) -> int:
    """The smallest k_max with P[Bin(coordinates, inclusion) > k_max] <= delta."""
    _validate.in_interval(0, 1, delta=delta)
    low, high = -1, event.coordinates
    while high - low > 1:
        middle = (low + high) // 2
        over = float(numerics.binomial_sf(middle, event.coordinates, event.inclusion)) * _OUTWARD
        over = over * numerics.binomial_outward(event.coordinates) + _UNDERFLOW
        low, high = (low, middle) if over <= delta else (middle, high)
    return high


def need_shuffle(event: Crowd) -> None:
    """Refuse what is no shuffled round."""
    if not isinstance(event, Crowd):
        raise NotApplicable(f"no dominating pair here for {type(event).__name__}")
