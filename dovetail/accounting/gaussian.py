"""The Gaussian mechanism, exactly, and releases that come close to it.

**Exactly** (Balle, Wang 2018). One number, mu = sensitivity / std, decides everything: the mechanism is (eps, delta)-DP
if and only if ``delta >= Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``. Adaptive composition stays Gaussian with
``mu^2 = mu_1^2 + ... + mu_T^2`` (Dong, Roth, Su 2022), so this file is also the exact accountant for training in
which every user takes part. Roots are returned on the safe side of their bracket.

**On a sample** (`gaussian_losses`): the privacy loss as dp-accounting discretises it, computed for all of its grid at
once. dp-accounting finds where the loss falls below an eps one eps at a time, in Python, which is most of the time of a
calibration. The mechanism, its tails and the discretisation stay its own.

**Nearly** (`NearGaussian`). Let P be the law of all that is released and I what is seen of Gaussian releases instead,
for the same input. There are two ways from I to P, and the cheaper one counts:

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
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting._dp_accounting import pld, pld_mechanism, pld_pmf
from dovetail.accounting.search import eps_after_spending, smallest_point
from dovetail.statements import NotApplicable, Theorem

__all__ = [
    "ANALYTIC",
    "NearGaussian",
    "SkellamDraws",
    "delta_by_ratio",
    "delta_of",
    "distance_delta",
    "eps_by_ratio",
    "eps_of",
    "log_ratio_slack",
    "lower_eps_of",
    "mu_of",
    "ratio_tail_cost",
]

ANALYTIC = Theorem(
    key="BW18.thm8",
    where="Balle, Wang (ICML 2018), Thm. 8; composition by Dong, Roth, Su (JRSS-B 2022), Cor. 3.3",
    url="https://arxiv.org/abs/1805.06530",
)

_RELATIVE_SLACK = 1e-12  # more than the relative error of log_ndtr and exp
_ULP = numerics.ULP
_LEAST = 1e-300  # stands for every smaller delta
_LOG_NEGLIGIBLE = -695.0  # the logarithm of what is clearly smaller
_DENSEST = 0.39894228040143274  # a standard Gaussian's density at 0, rounded up
_OUTWARD = 1 + 1e-12  # more than the rounding errors of a few operations
_LEAST_VARIANCE = 100.0  # below it the proof of docs/proofs/skellam.md says nothing
_TAIL_SHARE = 1e-3  # about which part of delta tails cost
_LEAST_TAIL = 1e-280
_TAILS = 16.0  # tails are powers of this
_SLOPES = np.geomspace(1e-6, 1.0, 200)  # of Chernoff's bound, in units of the largest that the proof allows


def delta_of(mu: float, *, eps: float) -> float:
    """The smallest delta at this eps, rounded up.

    Arguments:
        mu: sensitivity over standard deviation, 0 or more; of several releases the root of the sum of squares.
        eps: at which delta is asked for, 0 or more.

    Guarantees:
        Never below the exact value (tested against 50-digit arithmetic), and within 1e-9 of it where delta > 1e-15.
        A delta below 1e-300, which could underflow, is 1e-300; it never rises with eps.
    """
    _validate.non_negative(eps=eps)
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return 1.0
    _validate.positive(mu=mu)
    at_most = mu * _DENSEST * (1 + _RELATIVE_SLACK) + _LEAST  # an upper bound at 0, and so at any eps
    log_first = float(log_ndtr(mu / 2 - eps / mu))
    log_second = eps + float(log_ndtr(-mu / 2 - eps / mu))
    if not log_first > _LOG_NEGLIGIBLE:
        return min(at_most, _LEAST if log_first == log_first else 1.0)  # 1 where it is NaN
    first = math.exp(log_first)
    exact = first * -math.expm1(min(0.0, log_second - log_first))
    rounding = 8 * _ULP * first * (1 + abs(log_first) + abs(log_second) + eps)
    above = numerics.as_probability_bound(math.nextafter(exact * (1 + _RELATIVE_SLACK) + rounding, math.inf))
    return min(at_most, max(above, _LEAST))


def lower_eps_of(mu: float, *, delta: float) -> float:
    """A lower end of the exact eps at this delta: an eps at which delta is still above it.

    It is 0 where none is known, and infinite for a release without noise.

    Arguments:
        mu: sensitivity over standard deviation.
        delta: at which eps is asked for.

    Guarantees:
        Never above the exact value, and within 1e-9 of it where that is above 1e-6 and delta above 1e-15.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    high = eps_of(mu, delta=delta)
    if high in (0.0, math.inf):
        return high
    down = 1e-12
    while down < 1:  # a delta that is this much above is so whatever was rounded up in it
        eps = high * (1 - down)
        if delta_of(mu, eps=eps) > delta + _delta_rounding(mu, eps):
            return eps
        down *= 4
    return 0.0


def _delta_rounding(mu: float, eps: float) -> float:
    """An upper bound on what `delta_of` has added to the exact value at this mu and eps."""
    delta = delta_of(mu, eps=eps)
    log_first = float(log_ndtr(mu / 2 - eps / mu))
    log_second = eps + float(log_ndtr(-mu / 2 - eps / mu))
    if not log_first > -600:
        return delta
    rounding = math.exp(log_first) * (1 + abs(log_first) + abs(log_second) + eps)
    return 4 * (_RELATIVE_SLACK * delta + 8 * _ULP * rounding) + _LEAST


def eps_of(mu: float, *, delta: float) -> float:
    """The smallest eps at this delta, rounded up; infinite for a noiseless release.

    Arguments:
        mu: sensitivity over standard deviation.
        delta: at which eps is asked for.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    if math.isinf(mu):
        return math.inf
    _validate.non_negative(mu=mu)
    if mu == 0 or delta_of(mu, eps=0.0) <= delta:
        return 0.0
    high = mu * mu / 2 + mu * 40 + 1
    if math.isinf(high):
        return math.inf
    return smallest_point(lambda eps: delta_of(mu, eps=eps) <= delta, low=0.0, high=high)


def mu_of(eps: float, *, delta: float) -> float:
    """About the mu that has this eps at this delta: to search by, never for a bound.

    Whatever is composed often is about Gaussian, and its mu is about inversely proportional to its noise.
    """
    _validate.non_negative(eps=eps)
    _validate.in_open_interval(0, 1, delta=delta)

    def above(log_mu: float) -> float:
        return math.log(delta_of(math.exp(log_mu), eps=eps)) - math.log(delta)

    low, high = math.log(delta) - 1, math.log(math.sqrt(2 * eps) + 40)
    return math.exp(brentq(above, low, high, xtol=1e-13, rtol=1e-13)) if above(low) < 0 < above(high) else eps


def gaussian_losses(
    std: float, *, sensitivity: float, prob: float, add_remove: bool, interval: float
) -> pld.PrivacyLossDistribution:
    """The privacy loss of a Poisson-sampled Gaussian, as dp-accounting's `from_gaussian_mechanism`, up to rounding.

    Arguments:
        std: of the noise.
        sensitivity: by how much adding one user moves the sum in L2; replacing one moves it by twice that.
        prob: how likely a user is in the sample; 1 without sampling.
        add_remove: whether a user is added or removed, else replaced.
        interval: between neighbouring losses of the grid.
    """
    kinds = pld_mechanism.AdjacencyType
    used = ([kinds.REMOVE] if prob == 1 else [kinds.REMOVE, kinds.ADD]) if add_remove else [kinds.REPLACE]
    sides = []
    for kind in used:
        loss = pld_mechanism.GaussianPrivacyLoss(std, sensitivity=sensitivity, sampling_prob=prob, adjacency_type=kind)
        bounds = loss.connect_dots_bounds()
        steps = np.arange(math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval) + 1)
        deltas = _deltas_at(loss, steps * interval)
        sides.append(
            pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, int(steps[0]), int(steps[-1]), deltas)
        )
    return pld.PrivacyLossDistribution(*sides)


def _deltas_at(loss: pld_mechanism.GaussianPrivacyLoss, eps: np.ndarray) -> np.ndarray:
    """Delta at every eps (of any sign): P - e^eps Q of the half-line on which the loss is above eps."""
    with np.errstate(divide="ignore"):
        ends = _half_line_ends(loss, eps)
        deltas = loss.mu_upper_cdf(ends) - np.exp(eps + loss.mu_lower_log_cdf(ends))
    return np.clip(deltas, 0, 1)


def _half_line_ends(loss: pld_mechanism.GaussianPrivacyLoss, eps: np.ndarray) -> np.ndarray:
    """Where for each eps the half-line of outcomes with a loss above eps ends; +-infinite where it is all or none.

    dp-accounting's losses fall as the outcome rises, so that a half-line is all outcomes up to its end.
    """
    prob = loss.sampling_prob
    unit = loss.standard_deviation**2 / loss.sensitivity
    match loss.adjacency_type:
        case pld_mechanism.AdjacencyType.REMOVE:
            return -0.5 * loss.sensitivity - unit * _loss_without_sampling(eps, prob)
        case pld_mechanism.AdjacencyType.ADD:
            return 0.5 * loss.sensitivity + unit * _loss_without_sampling(-eps, prob)
    if prob == 1:
        return -eps / 2 * unit
    half = np.abs(eps) / 2
    log_alpha = 0.5 * (loss.sensitivity / loss.standard_deviation) ** 2 + math.log1p(-prob) - math.log(prob)
    log_sinh = log_alpha + half + np.log(-np.expm1(-2 * half)) - math.log(2)
    asinh = np.logaddexp(log_sinh, 0.5 * np.logaddexp(2 * log_sinh, 0))
    return unit * (-np.sign(eps) * asinh - eps / 2)


def _loss_without_sampling(eps: np.ndarray, prob: float) -> np.ndarray:
    """log(1 + (e^eps - 1) / prob): the loss without sampling where that of the sample is eps; -inf below all losses."""
    if prob == 1:
        return eps
    left = -np.expm1(np.minimum(math.log1p(-prob) - eps, 0))
    return eps + np.log(left) - math.log(prob)


class SkellamDraws(NamedTuple):
    """So many independent draws of Skellam noise of this variance, in place of rounded Gaussian ones."""

    number: int
    variance: float  # of one draw, in squares of whole numbers


class NearGaussian(NamedTuple):
    """A Gaussian release, and how far from it a release is at the most, whatever its input."""

    mu: float  # the Gaussian's sensitivity over its std, rounded up
    divergence: float = 0.0  # at least KL(what is seen of the Gaussian || the release); 0 if it is that Gaussian
    theorem: Theorem | None = None  # by which it is that close
    draws: SkellamDraws | None = None  # the noise that makes the difference; None if there is none

    def repeat(self, rounds: int) -> NearGaussian:
        """So many of these releases together, each of which may be chosen after seeing those before it; rounded up."""
        outward = 1 + 1e-15
        draws = None if self.draws is None else self.draws._replace(number=self.draws.number * rounds)
        return self._replace(
            mu=self.mu * math.sqrt(rounds) * outward, divergence=self.divergence * rounds * outward, draws=draws
        )


def distance_delta(divergence: float, *, eps: float) -> float:
    """What a divergence from Gaussian releases costs in delta: (1 + e^eps) sqrt(divergence / 2), rounded up.

    Arguments:
        divergence: KL of what is seen of Gaussian releases from what is released, over all rounds.
        eps: that of the Gaussian releases.

    Guarantees:
        Non-decreasing in both; 0 without a divergence, 1 where nothing is left.
    """
    _validate.non_negative(eps=eps, divergence=divergence)
    if divergence == 0:
        return 0.0
    log_spent = float(np.logaddexp(0.0, eps)) + math.log(divergence / 2) / 2
    return numerics.as_probability_bound(math.exp(min(0.0, log_spent + 1e-15 * abs(log_spent))) * _OUTWARD)


def log_ratio_slack(draws: Sequence[SkellamDraws], *, tail: float) -> float:
    """By how much the log-ratio of Skellam's law of all these draws to the rounded Gaussian's may be off 0, rounded up.

    Outside of that slack there is a probability of at most `tail`, under either law.

    Arguments:
        draws: the noise of all rounds and coordinates.
        tail: how probably the ratio may be larger.

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
    largest = _largest_log_ratio(reach, least)
    if not largest <= 0.25:
        raise NotApplicable(f"Skellam noise of variance {least:.4g} is too far from a Gaussian for its ratio to matter")
    squares = math.fsum(part.number * (1 + 18.6 / part.variance) / 24 / part.variance / part.variance for part in draws)
    squares *= math.exp(largest) * (1 + 1e-12)
    slope = _SLOPES / largest
    outside = tail / 2  # of all draws together, under either law
    needed = -math.log(tail / 2) + outside * slope + (slope + slope**2) * squares
    return float(np.min(needed / slope)) * _OUTWARD


def _largest_log_ratio(num_stds: float, variance: float) -> float:
    """The largest |log-ratio| of one draw that is within `num_stds` standard deviations (3 or more), rounded up."""
    rest = num_stds**6 / 75 + num_stds**2 / 3 + 1 / 8
    return (num_stds**4 / 24 + rest / variance) / variance * _OUTWARD


def eps_by_ratio(
    eps_of: Callable[[float], float],
    draws: Sequence[SkellamDraws],
    *,
    delta: float,
    spent: Callable[[float], float] = lambda eps: 0.0,
) -> float:
    """The eps at delta of a release with Skellam noise, from that with Gaussian noise, by the ratio of the two.

    Arguments:
        eps_of: eps at a delta, of Gaussian noise in place of the draws.
        draws: the noise whose ratio to a Gaussian's is charged.
        delta: for everything together.
        spent: what else is spent of delta when eps is that of the whole.

    Guarantees:
        `NotApplicable` where nothing is left of delta, or nothing is known of the ratio.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    about = numerics.as_eps_bound(eps_of(delta))
    if math.isinf(about):
        return about
    tail = _ratio_tail_probability(delta, about)
    slack = log_ratio_slack(draws, tail=tail) * _OUTWARD
    inner = eps_after_spending(
        lambda left: eps_of(left * math.exp(-slack) / _OUTWARD),
        lambda eps: tail * (1 + math.exp(min(slack + eps, 700.0))) * _OUTWARD + spent(eps + 2 * slack),
        delta=delta,
    )
    return (inner + 2 * slack) * (1 + 4 * numerics.ULP)


def delta_by_ratio(delta_at: Callable[[float], float], draws: Sequence[SkellamDraws], *, eps: float) -> float:
    """The delta at eps of a release with Skellam noise, from that with Gaussian noise, by the ratio of the two.

    Arguments:
        delta_at: delta at an eps, of Gaussian noise in place of the draws.
        draws: the noise whose ratio to a Gaussian's is charged.
        eps: at which delta is asked for.
    """
    _validate.non_negative(eps=eps)
    about = _ratio_tail_probability(max(delta_at(eps), _LEAST_TAIL), eps)

    def at(tail: float) -> float:
        slack = log_ratio_slack(draws, tail=tail) * _OUTWARD
        inner = eps - 2 * slack
        if inner < 0:
            return 1.0
        cost = tail * (1 + math.exp(min(slack + inner, 700.0)))
        return numerics.as_probability_bound((math.exp(slack) * delta_at(inner) + cost) * _OUTWARD)

    return min(at(about), at(about * _TAILS), at(about / _TAILS))  # one of which `eps_by_ratio` takes


def ratio_tail_cost(delta_at: Callable[[float], float], *, eps: float) -> float:
    """About what the tails of the ratio take of delta at this eps, for a proof to name: it is paid already."""
    _validate.non_negative(eps=eps)
    return numerics.as_probability_bound(
        _ratio_tail_probability(max(delta_at(eps), _LEAST_TAIL), eps) * (1 + math.exp(min(eps, 700.0)))
    )


def _ratio_tail_probability(delta: float, eps: float) -> float:
    """The tail probability of the ratio that is charged, at about `_TAIL_SHARE` of delta.

    It is a power of `_TAILS`, so that eps at a delta and delta at that eps go by the same one.
    """
    least = math.log(_TAIL_SHARE * delta) - min(eps, 600.0)
    return max(_TAILS ** round(least / math.log(_TAILS)), _LEAST_TAIL)
