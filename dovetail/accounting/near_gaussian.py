"""Releases that are Gaussian but for a small divergence, and what the difference costs.

Let P be the law of all that is released and I what is seen of Gaussian releases instead, for the same input. There are
two ways from I to P, and the cheaper one counts:

- in total variation: if KL(I || P) <= D for both neighbours, both are within sqrt(D / 2) (Pinsker), and P is
  (eps, delta + (1 + e^eps) sqrt(D / 2))-DP where I is (eps, delta)-DP. Divergences of rounds add up, also where a round
  is chosen after seeing those before it (the chain rule), and a secret sample of the users adds none (KL is convex);
- by the ratio of the two laws of all noise: if it is within e^(+-slack) but for a probability `tail` under either, P is
  (eps + 2 slack, e^slack delta + (1 + e^(slack + eps)) tail)-DP (docs/proofs/skellam.md, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.search import eps_after_spending
from dovetail.statements import NotApplicable, Theorem

__all__ = ["NearGaussian", "SkellamDraws", "delta_by_ratio", "eps_by_ratio", "slack_of", "spent_delta", "tail_cost"]

_OUTWARD = 1 + 1e-12
_LEAST_VARIANCE = 100.0  # the proof's
_TAIL_SHARE = 1e-3  # about what tails cost of delta
_LEAST_TAIL, _TAILS = 1e-280, 16.0
_SLOPES = np.geomspace(1e-6, 1.0, 200)  # of Chernoff's bound, in units of the largest that the proof allows


class SkellamDraws(NamedTuple):
    """So many independent draws of Skellam noise of this variance, in place of rounded Gaussian ones."""

    number: int
    variance: float


class NearGaussian(NamedTuple):
    """A Gaussian release, and how far from it a release is at the most, whatever its input.

    `mu` is the Gaussian's sensitivity over its std; `divergence` is KL(what is seen of the Gaussian || the release);
    `draws` are the noise that makes the difference.
    """

    mu: float
    divergence: float = 0.0
    theorem: Theorem | None = None
    draws: SkellamDraws | None = None

    def repeated(self, rounds: int) -> NearGaussian:
        """So many of them, each chosen after those before it."""
        outward = 1 + 1e-15
        draws = None if self.draws is None else self.draws._replace(number=self.draws.number * rounds)
        return self._replace(
            mu=self.mu * math.sqrt(rounds) * outward, divergence=self.divergence * rounds * outward, draws=draws
        )


def spent_delta(divergence: float, *, eps: float) -> float:
    """What a divergence from Gaussian releases costs in delta: (1 + e^eps) sqrt(divergence / 2), rounded up.

    Guarantees:
        Non-decreasing in both; 0 without a divergence, 1 where nothing is left.
    """
    _validate.non_negative(eps=eps, divergence=divergence)
    if divergence == 0:
        return 0.0
    log_spent = float(np.logaddexp(0.0, eps)) + math.log(divergence / 2) / 2
    return numerics.probability(math.exp(min(0.0, log_spent + 1e-15 * abs(log_spent))) * _OUTWARD)


def slack_of(draws: Sequence[SkellamDraws], *, tail: float) -> float:
    """A slack such that the laws of all these draws, Skellam's and the rounded Gaussian's, are within e^(+-slack).

    But for a probability of `tail`, under either law.

    Guarantees:
        Never below the quantile of the sum of log-ratios of both laws, summed from their probabilities.
        Not known (`NotApplicable`) where a variance is below 100, or so small that its fourth root matters.
    """
    _validate.in_open_interval(0, 1, tail=tail)
    count = sum(part.number for part in draws)
    if not count:
        return 0.0
    least = min(part.variance for part in draws)
    if not least >= _LEAST_VARIANCE:
        raise NotApplicable(f"the ratio of Skellam to Gaussian noise needs variance >= 100, got {least:.4g}")
    reach = math.sqrt(2 * (math.log(8 * count) - math.log(tail))) * 1.001 + 1.0 / math.sqrt(least)
    reach = max(reach, 3.0)
    if not reach**4 <= least:
        raise NotApplicable(f"Skellam noise of variance {least:.4g} is too far from a Gaussian for its ratio to matter")
    largest = _largest_ratio(reach, least)
    if not largest <= 0.25:
        raise NotApplicable(f"Skellam noise of variance {least:.4g} is too far from a Gaussian for its ratio to matter")
    squares = math.fsum(part.number * (1 + 18.6 / part.variance) / 24 / part.variance / part.variance for part in draws)
    squares *= math.exp(largest) * (1 + 1e-12)
    slope = _SLOPES / largest
    outside = tail / 2  # of all draws together, under either law
    needed = -math.log(tail / 2) + outside * slope + (slope + slope**2) * squares
    return float(np.min(needed / slope)) * _OUTWARD


def _largest_ratio(reach: float, variance: float) -> float:
    """The largest |log-ratio| of one draw within so many standard deviations, three or more."""
    rest = reach**6 / 75 + reach**2 / 3 + 1 / 8
    return (reach**4 / 24 + rest / variance) / variance * _OUTWARD


def eps_by_ratio(
    eps_of: Callable[[float], float],
    draws: Sequence[SkellamDraws],
    *,
    delta: float,
    spent: Callable[[float], float] = lambda eps: 0.0,
) -> float:
    """eps at delta of the draws, where `eps_of` is that of Gaussian noise, with what else is spent at an eps.

    Guarantees:
        `NotApplicable` where nothing is left of delta, or nothing is known of the ratio.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    about = numerics.eps_bound(eps_of(delta))
    if math.isinf(about):
        return about
    tail = _tail(delta, about)
    slack = slack_of(draws, tail=tail) * _OUTWARD
    inner = eps_after_spending(
        lambda left: eps_of(left * math.exp(-slack) / _OUTWARD),
        lambda eps: tail * (1 + math.exp(min(slack + eps, 700.0))) * _OUTWARD + spent(eps + 2 * slack),
        delta=delta,
    )
    return (inner + 2 * slack) * (1 + 4 * numerics.ULP)


def delta_by_ratio(delta_at: Callable[[float], float], draws: Sequence[SkellamDraws], *, eps: float) -> float:
    """delta at eps of the draws, where `delta_at` is that of Gaussian noise."""
    _validate.non_negative(eps=eps)
    about = _tail(max(delta_at(eps), _LEAST_TAIL), eps)

    def at(tail: float) -> float:
        slack = slack_of(draws, tail=tail) * _OUTWARD
        inner = eps - 2 * slack
        if inner < 0:
            return 1.0
        cost = tail * (1 + math.exp(min(slack + inner, 700.0)))
        return numerics.probability((math.exp(slack) * delta_at(inner) + cost) * _OUTWARD)

    return min(at(about), at(about * _TAILS), at(about / _TAILS))  # one of which `eps_by_ratio` takes


def tail_cost(delta_at: Callable[[float], float], *, eps: float) -> float:
    """About what the tails of the ratio take of delta at this eps: to be told, for it is paid already."""
    _validate.non_negative(eps=eps)
    return numerics.probability(_tail(max(delta_at(eps), _LEAST_TAIL), eps) * (1 + math.exp(min(eps, 700.0))))


def _tail(delta: float, eps: float) -> float:
    """A power of `_TAILS`, so that eps at a delta and delta at that eps go by the same one."""
    least = math.log(_TAIL_SHARE * delta) - min(eps, 600.0)
    return max(_TAILS ** round(least / math.log(_TAILS)), _LEAST_TAIL)
