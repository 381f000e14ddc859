"""Scores and their intervals from noisy sums: both the noise and which people were held out are allowed for.

An interval holds every value that a test at level 1 - `LEVEL` does not reject: for a candidate value, a statistic of
the sums that is zero on average if the candidate is right is compared with its standard deviation. That of the noise
is known. That of the sample of people is at most the one of people with a single record each, which the sums tell. No
denominator is taken to be well known: where the noise drowns the sums, every value stays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import special

__all__ = [
    "LEVEL",
    "Estimate",
    "Moment",
    "estimate_auc",
    "estimate_fraction",
    "estimate_r2",
    "estimate_root_mean_square",
]

LEVEL = 0.95
_GRID = 2001  # candidates of a score
_SHARES = np.arange(_GRID) / (_GRID - 1)  # linspace would give .6940000000000001, which is printed
_WORST = 100.0  # the largest ratio of squared errors to the target's variance that is told apart: R2 of -99


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A score and the interval that covers it at `LEVEL`; an end that nothing is known about is infinite."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Moment:
    """A mean over people, and the standard deviation of the noise on it."""

    value: float
    std: float


def estimate_fraction(noisy_mean: Moment, people: float) -> Estimate:
    """A mean over people of numbers in [0, 1] (Wilson's interval with noise).

    Arguments:
        noisy_mean: the noisy mean.
        people: how many there are.

    Guarantees:
        Numbers between 0 and 1 vary no more than zeros and ones with the same mean, which the interval allows for.
    """
    candidates = _SHARES
    variance = noisy_mean.std**2 + candidates * (1 - candidates) / max(people, 1.0)
    return _estimate_not_rejected(candidates, noisy_mean.value - candidates, variance, noisy_mean.value)


def estimate_auc(positive: np.ndarray, negative: np.ndarray, std: float) -> Estimate:
    """The area under the ROC curve, from how many people's scores are in each of some bins.

    Within a bin both densities are taken to be linear, with the slopes that the bins beside it give.

    Arguments:
        positive: noisy mass of records of class 1 in every bin, lowest scores first; a person's records weigh 1
            together.
        negative: the same of class 0.
        std: of the noise on each number.

    Guarantees:
        The statistic, the sum over pairs of bins of masses times (order - candidate), has mean zero at the true value:
        the noises on both masses are independent.
    """
    bins = len(positive)
    order = _prob_ranked_above(bins)
    total = positive.sum() * negative.sum()
    value = float(positive @ order @ negative / total) if total > 0 else 0.5
    candidates = _SHARES
    against = (order @ negative)[None] - candidates[:, None] * negative.sum()  # one more of class 1 adds this
    towards = (positive @ order)[None] - candidates[:, None] * positive.sum()
    cells = ((order[None] - candidates[:, None, None]) ** 2).sum(axis=(1, 2))
    noise = std**2 * ((against**2).sum(axis=1) + (towards**2).sum(axis=1)) - std**4 * cells
    above, below = np.maximum(positive, 0), np.maximum(negative, 0)
    people = against**2 @ above + towards**2 @ below
    people += (above * below**2 + below * above**2).sum() / 12  # what records of one bin differ by
    statistic = positive @ order @ negative - candidates * total
    return _estimate_not_rejected(candidates, statistic, np.maximum(noise, std**4 * cells) + people, value)


def _prob_ranked_above(bins: int) -> np.ndarray:
    """How often a record of class 1 in a bin ranks above one of class 0 in another, [bin of class 1, bin of class 0].

    Of two records in the same bin it is 1/2 and a twelfth of the difference of both densities' relative slopes over the
    bin. Slopes are differences of neighbouring bins, so that the whole stays a product of the two classes' masses: what
    a bin adds goes to pairs beside the diagonal.
    """
    order = np.tri(bins, k=-1) + np.eye(bins) / 2
    beside = np.full(bins - 1, 1 / 12)
    beside[[0, -1]] = 1 / 8  # the bins at both ends have a neighbour on one side
    return order + np.diag(beside, -1) - np.diag(beside, 1)


def estimate_r2(
    squared_error: Moment,
    fourth_power_of_error: Moment,
    variance: Moment,
    fourth_power_of_distance: Moment,
    people: float,
) -> Estimate:
    """R2 = 1 - squared error / variance.

    Arguments:
        squared_error: mean squared error.
        fourth_power_of_error: mean fourth power of the errors.
        variance: the target's variance.
        fourth_power_of_distance: mean fourth power of the target's distance from about its mean.
        people: how many there are.

    Guarantees:
        Squared errors and squared distances may depend on each other in any way (Cauchy-Schwarz).
    """
    candidates = np.concatenate([[0.0], np.geomspace(1e-4, _WORST, _GRID)])  # of 1 - R2
    deviation = (
        _std_of_squares(squared_error, fourth_power_of_error)
        + candidates * _std_of_squares(variance, fourth_power_of_distance)
    ) / math.sqrt(max(people, 1))
    noise = squared_error.std**2 + candidates**2 * variance.std**2
    value = max(squared_error.value, 0.0) / variance.value if variance.value > 0 else _WORST
    found = _estimate_not_rejected(
        candidates, squared_error.value - candidates * variance.value, noise + deviation**2, value
    )
    low = -math.inf if found.high >= _WORST else 1 - found.high
    return Estimate(1 - min(found.value, _WORST), low, 1 - found.low)


def estimate_root_mean_square(
    mean_square: Moment, mean_fourth_power: Moment, people: float, *, scale: float = 1.0
) -> Estimate:
    """The square root of a mean of squares, times `scale`; `mean_fourth_power` is that of their squares."""
    std = math.hypot(mean_square.std, _std_of_squares(mean_square, mean_fourth_power) / math.sqrt(max(people, 1)))
    reach = float(special.ndtri((1 + LEVEL) / 2)) * std

    def bounded(value: float) -> float:
        return scale * math.sqrt(max(value, 0.0))

    return Estimate(bounded(mean_square.value), bounded(mean_square.value - reach), bounded(mean_square.value + reach))


def _std_of_squares(mean_square: Moment, mean_fourth_power: Moment) -> float:
    """The standard deviation of a person's square, at most, with one standard deviation of the noise to be sure."""
    return math.sqrt(max(mean_fourth_power.value + mean_fourth_power.std - max(mean_square.value, 0.0) ** 2, 0.0))


def _estimate_not_rejected(
    candidates: np.ndarray, statistic: np.ndarray, variance: np.ndarray, value: float
) -> Estimate:
    """The estimate with the span of all candidates whose statistic is within what chance explains.

    Arguments:
        candidates: in increasing order, with the statistic and its variance at each.
        value: the estimate, which is moved into their range.
    """
    reach = float(special.ndtri((1 + LEVEL) / 2))
    kept = np.flatnonzero(statistic**2 <= reach**2 * variance)
    value = float(np.clip(value, candidates[0], candidates[-1]))
    if len(kept) == 0:
        return Estimate(value, value, value)
    step: Callable[[int], int] = lambda index: int(np.clip(index, 0, len(candidates) - 1))  # noqa: E731
    low, high = float(candidates[step(kept[0] - 1)]), float(candidates[step(kept[-1] + 1)])  # outward
    return Estimate(value, min(low, value), max(high, value))
