"""Rounds on a secret random sample of the users, and the composition theorems that need no more than (eps, delta).

A round that is (eps, delta)-DP under replacement, run on `size` of `population` users drawn uniformly, is
(ln(1 + q (e^eps - 1)), q delta)-DP with q = size / population against whoever does not know who took part: the analyzer
of a shuffled round, never its shuffler. Such rounds are composed here by basic or optimal composition; no Renyi
bound of a sampled shuffled round is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.search import smallest_point
from dovetail.events import Everyone, FixedSize, Participation
from dovetail.statements import Bound, NotApplicable, Theorem, check_guarantee

__all__ = ["BASIC", "LEMMA4", "OPTIMAL", "basic", "optimal", "repeated", "sampled"]

LEMMA4 = Theorem(
    key="FLAME.lemma4",
    where="fixed-size sampling (FLAME, AAAI 2021, Lemma 4; Balle, Barthe, Gaboardi, NeurIPS 2018, Thm. 9)",
    url="https://arxiv.org/abs/1807.01647",
)
BASIC = Theorem(key="DR14.thm3.16", where="basic composition (Dwork, Roth 2014, Thm. 3.16)")
OPTIMAL = Theorem(
    key="KOV15.thm3.3",
    where="optimal homogeneous composition (Kairouz, Oh, Viswanath, ICML 2015, Thm. 3.3)",
    url="https://arxiv.org/abs/1311.0776",
)

_OUTWARD = 1 + 1e-12


def sampled(bound: Bound, participation: Participation, *, colluders: int = 0) -> Bound:
    """One round on a secret sample, for an adversary who does not know who took part.

    `bound` is that of the round itself, with `size` users of whom `colluders` may be fake. Colluders know whether they
    were drawn, so the others were drawn with probability at most size / (population - colluders).

    Guarantees:
        Never above `bound`, and equal to it when everybody takes part.
        Refuses Poisson sampling: the number of reports would tell who took part. Pad to a fixed count first.
    """
    _validate.integer(colluders=colluders)
    _validate.non_negative(colluders=colluders, eps=bound.eps)
    match participation:
        case Everyone():
            return bound
        case FixedSize(size=size, population=population):
            if colluders >= population:
                raise ValueError(f"expected colluders < population={population}, got colluders={colluders}")
            prob = size / (population - colluders)
        case _:
            raise NotApplicable(
                f"Lemma 4 needs a fixed-size sample drawn uniformly, got {type(participation).__name__} participation"
            )
    if prob >= 1:
        return bound
    return Bound(
        eps=min(bound.eps, _log1p_expm1(prob * (1 + 1e-15), bound.eps) * _OUTWARD),
        delta=min(bound.delta, prob * bound.delta * _OUTWARD),
        proof=bound.proof.then(LEMMA4),
    )


def repeated(
    eps_of: Callable[[float], Bound], sampling: FixedSize, *, colluders: int, times: int, delta: float
) -> Bound:
    """So many equal rounds, each on a fresh secret sample: half of delta for the rounds, half for their composition."""
    prob = min(1.0, sampling.size / (sampling.population - colluders))
    one = eps_of(min(0.5, delta / (2 * times * prob)))
    return optimal([sampled(one, sampling, colluders=colluders)] * times, delta=delta)


def _log1p_expm1(prob: float, eps: float) -> float:
    """ln(1 + prob (e^eps - 1)) without overflow."""
    if eps > 30:
        return eps + math.log(prob + (1 - prob) * math.exp(-eps))
    return math.log1p(prob * math.expm1(eps))


def basic(bounds: Sequence[Bound]) -> Bound:
    """All eps and all delta add up."""
    for bound in bounds:
        check_guarantee(eps=bound.eps, delta=bound.delta)
    count = 1 + 1e-15 * (len(bounds) + 4)
    return Bound(
        eps=math.fsum(bound.eps for bound in bounds) * count,
        delta=numerics.probability(math.fsum(bound.delta for bound in bounds) * count),
        proof=BASIC.proof,
    )


def optimal(bounds: Sequence[Bound], *, delta: float) -> Bound:
    """The smallest eps that any mechanism with these (equal) bounds can be promised.

    The worst case is `len(bounds)` randomized responses, each failing with probability bound.delta:
    ``delta = 1 - (1 - bound.delta)^k (1 - E[(1 - e^(eps - loss))_+])``, loss = (2 Bin(k, e^eps/(1 + e^eps)) - k) eps.

    Guarantees:
        Never below the exact composition of randomized responses; never above basic composition.
        Refuses rounds that differ.
    """
    if not bounds:
        return basic(bounds)
    first = bounds[0]
    if any((bound.eps, bound.delta) != (first.eps, first.delta) for bound in bounds):
        raise NotApplicable("optimal composition needs rounds with the same eps and delta")
    slack = _slack(bounds, delta)
    if math.isinf(first.eps):
        return Bound(eps=math.inf, delta=delta, proof=OPTIMAL.proof)
    count = len(bounds)
    heads = np.arange(count + 1)
    loss = (2 * heads - count) * first.eps
    probs = numerics.binomial_pmf(heads, count, 1 / (1 + math.exp(-first.eps)))
    outward = (1 + 1e-9) * numerics.binomial_outward(count)

    def fits(eps: float) -> bool:
        above = loss > eps
        return float(-np.expm1(eps - loss[above]) @ probs[above]) * outward + 1e-300 <= slack

    eps = smallest_point(fits, low=0.0, high=count * first.eps) if not fits(0.0) else 0.0
    return Bound(eps=min(eps * _OUTWARD, basic(bounds).eps), delta=delta, proof=OPTIMAL.proof)


def _slack(bounds: Sequence[Bound], delta: float) -> float:
    """What the rounds' own deltas leave: smaller than the exact (delta - d)/(1 - d), d = 1 - prod(1 - delta_i)."""
    _validate.in_open_interval(0, 1, delta=delta)
    slack = (delta - math.fsum(bound.delta for bound in bounds)) * (1 - 1e-12)
    if slack <= 0:
        raise NotApplicable(f"the rounds' own deltas leave nothing of delta={delta}")
    return slack
