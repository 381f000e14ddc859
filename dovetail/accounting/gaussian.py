"""The Gaussian mechanism, exactly, for any eps (Balle, Wang 2018).

One number, mu = sensitivity / std, decides everything: the mechanism is (eps, delta)-DP if and only if
``delta >= Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)``. Adaptive composition stays Gaussian with
``mu^2 = mu_1^2 + ... + mu_T^2`` (Dong, Roth, Su 2022), so this file is also the exact accountant for training in
which every user takes part. Roots are returned on the safe side of their bracket.

The privacy loss of a Gaussian on a sample, as dp-accounting discretises it, computed for all of its grid at once.

dp-accounting finds where the loss falls below an eps one eps at a time, in Python, which is most of the time of a
calibration. The mechanism, its tails and the discretisation stay its own.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting._dp_accounting import pld, pld_mechanism, pld_pmf
from dovetail.accounting.search import smallest_point
from dovetail.statements import Theorem

__all__ = [
    "ANALYTIC",
    "delta_of",
    "eps_of",
    "lower_eps_of",
    "mu_of",
]

ANALYTIC = Theorem(
    key="BW18.thm8",
    where="Balle, Wang (ICML 2018), Thm. 8; composition by Dong, Roth, Su (JRSS-B 2022), Cor. 3.3",
    url="https://arxiv.org/abs/1805.06530",
)

_RELATIVE_SLACK = 1e-12
_ULP = numerics.ULP
_LEAST = 1e-300  # stands for every smaller delta
_LOG_NEGLIGIBLE = -695.0  # the logarithm of what is clearly smaller
_DENSEST = 0.39894228040143274  # a standard Gaussian's density at 0, rounded up


def delta_of(mu: float, *, eps: float) -> float:
    """The smallest delta at this eps, rounded up.

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
    at_most = mu * _DENSEST * (1 + _RELATIVE_SLACK) + _LEAST  # at any eps, for it is so at 0
    log_first = float(log_ndtr(mu / 2 - eps / mu))
    log_second = eps + float(log_ndtr(-mu / 2 - eps / mu))
    if not log_first > _LOG_NEGLIGIBLE:
        return min(at_most, _LEAST if log_first == log_first else 1.0)
    first = math.exp(log_first)
    exact = first * -math.expm1(min(0.0, log_second - log_first))
    rounding = 8 * _ULP * first * (1 + abs(log_first) + abs(log_second) + eps)
    above = numerics.probability(math.nextafter(exact * (1 + _RELATIVE_SLACK) + rounding, math.inf))
    return min(at_most, max(above, _LEAST))


def lower_eps_of(mu: float, *, delta: float) -> float:
    """An eps at which delta is still above this one, rounded down; infinite for a noiseless release.

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
        if delta_of(mu, eps=eps) > delta + _rounded(mu, eps):
            return eps
        down *= 4
    return 0.0


def _rounded(mu: float, eps: float) -> float:
    """More than `delta_of` has added to the exact value."""
    found = delta_of(mu, eps=eps)
    log_first = float(log_ndtr(mu / 2 - eps / mu))
    log_second = eps + float(log_ndtr(-mu / 2 - eps / mu))
    if not log_first > -600:
        return found
    each = math.exp(log_first) * (1 + abs(log_first) + abs(log_second) + eps)
    return 4 * (_RELATIVE_SLACK * found + 8 * _ULP * each) + _LEAST


def eps_of(mu: float, *, delta: float) -> float:
    """The smallest eps at this delta, rounded up; infinite for a noiseless release."""
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
    """What `from_gaussian_mechanism` of dp-accounting returns, up to rounding.

    A user is added or removed, or else replaced, in a Poisson sample with this probability.
    """
    kinds = pld_mechanism.AdjacencyType
    used = ([kinds.REMOVE] if prob == 1 else [kinds.REMOVE, kinds.ADD]) if add_remove else [kinds.REPLACE]
    sides = []
    for kind in used:
        one = pld_mechanism.GaussianPrivacyLoss(std, sensitivity=sensitivity, sampling_prob=prob, adjacency_type=kind)
        bounds = one.connect_dots_bounds()
        steps = np.arange(math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval) + 1)
        deltas = _deltas(one, steps * interval)
        sides.append(
            pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, int(steps[0]), int(steps[-1]), deltas)
        )
    return pld.PrivacyLossDistribution(*sides)


def _deltas(one: pld_mechanism.GaussianPrivacyLoss, eps: np.ndarray) -> np.ndarray:
    """The hockey-stick divergence at every eps: that of the half-line on which the loss is above eps."""
    with np.errstate(divide="ignore"):
        ends = _ends(one, eps)
        deltas = one.mu_upper_cdf(ends) - np.exp(eps + one.mu_lower_log_cdf(ends))
    return np.clip(deltas, 0, 1)


def _ends(one: pld_mechanism.GaussianPrivacyLoss, eps: np.ndarray) -> np.ndarray:
    """Where the half-lines end; that of all numbers, or of none, where every loss is above eps, or none."""
    prob, unit = one.sampling_prob, one.standard_deviation**2 / one.sensitivity
    match one.adjacency_type:
        case pld_mechanism.AdjacencyType.REMOVE:
            return -0.5 * one.sensitivity - unit * _unsampled(eps, prob)
        case pld_mechanism.AdjacencyType.ADD:
            return 0.5 * one.sensitivity + unit * _unsampled(-eps, prob)
    if prob == 1:
        return -eps / 2 * unit
    half = np.abs(eps) / 2
    log_alpha = 0.5 * (one.sensitivity / one.standard_deviation) ** 2 + math.log1p(-prob) - math.log(prob)
    log_sinh = log_alpha + half + np.log(-np.expm1(-2 * half)) - math.log(2)
    asinh = np.logaddexp(log_sinh, 0.5 * np.logaddexp(2 * log_sinh, 0))
    return unit * (-np.sign(eps) * asinh - eps / 2)


def _unsampled(eps: np.ndarray, prob: float) -> np.ndarray:
    """log(1 + (e^eps - 1) / prob): the loss without sampling where that of the sample is eps; -inf below all losses."""
    if prob == 1:
        return eps
    left = -np.expm1(np.minimum(math.log1p(-prob) - eps, 0))
    return eps + np.log(left) - math.log(prob)
