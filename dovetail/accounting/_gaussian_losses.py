"""The privacy loss of a Gaussian on a sample, as dp-accounting discretises it, computed for all of its grid at once.

dp-accounting finds where the loss falls below an eps one eps at a time, in Python, which is most of the time of a
calibration. The mechanism, its tails and the discretisation stay its own.
"""

from __future__ import annotations

import math

import numpy as np

from dovetail.accounting._dp_accounting import pld, pld_mechanism, pld_pmf

__all__ = ["gaussian_losses"]


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
