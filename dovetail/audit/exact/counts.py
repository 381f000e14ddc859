"""Exact laws of counts: numbers of ones among independent bits, and numbers of messages in two cells.

Convolutions of binomials are sums of positive numbers, which keep their relative precision down to far tails. What lies
beyond a window of twelve standard deviations is cut off, and goes into the exact_attack's `slack`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln
from scipy.stats import binom

from dovetail.audit.bounds import ExactAttack
from dovetail.statements import NotApplicable

__all__ = ["Binomial", "binomial_window", "counts", "log_binomial", "trinomials"]

_WIDE = 12.0  # standard deviations to either side
_UNDERFLOW = 1e-290
_NEAR_ONE = 1e-4
_MOST_PRODUCTS = 2e9  # of a convolution
_MOST_PAIRS = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Binomial:
    """The number of ones among so many independent bits."""

    trials: int
    prob: float


def counts(attack: str, first: Sequence[Binomial], second: Sequence[Binomial], *, slack: float = 0.0) -> ExactAttack:
    """The attack by two numbers of ones; exact up to rounding, but for far tails, which go into the slack."""
    laws = [_count(parts) for parts in (first, second)]
    low = min(start for start, _, _ in laws)
    high = max(start + len(masses) for start, masses, _ in laws)
    logs = []
    for start, masses, _ in laws:
        log = np.full(high - low, -np.inf)
        with np.errstate(divide="ignore"):
            log[start - low : start - low + len(masses)] = np.log(masses)
        logs.append(log)
    cut = max(lost for _, _, lost in laws)
    return ExactAttack(attack=attack, log_first=logs[0], log_second=logs[1], slack=slack + cut)


def _count(parts: Sequence[Binomial]) -> tuple[int, np.ndarray, float]:
    """The first value, the probabilities from there on, and what was cut off."""
    start, masses, lost = 0, np.ones(1), 0.0
    for part in parts:
        if not part.trials:
            continue
        low, here = binomial_window(part.trials, part.prob)
        high, here = low + len(here) - 1, here.astype(np.float64)
        if len(here) * len(masses) > _MOST_PRODUCTS:
            raise NotApplicable(f"expected fewer bits to count, got {part.trials} beside {len(masses)} values")
        start, masses = start + low, np.convolve(masses, here)
        lost += float(binom.cdf(low - 1, part.trials, part.prob) + binom.sf(high, part.trials, part.prob)) * 1.01
        lost += 1e-300 * (len(here) + 1)  # probabilities that underflowed
        if part.prob > 1 - _NEAR_ONE:  # what is missing to 1 was rounded, perhaps to nothing
            lost += part.trials * 2.0**-52
    return start, masses, lost


def _window(trials: int, prob: float) -> tuple[int, int]:
    """Values outside of which next to nothing is left; all of them, where they are few."""
    if trials <= 256:
        return 0, trials
    mean, std = trials * prob, math.sqrt(trials * prob * (1 - prob))
    reach = _WIDE * std + 64
    return max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach))


def binomial_window(trials: int, prob: float | np.longdouble) -> tuple[int, np.ndarray]:
    """The first of the values that matter, and the probabilities from there on in extended precision.

    From the largest on they follow from each other by ratios, and they add up to 1: tails below 1e-30 are cut off. The
    error of all together is some roundings for each standard deviation.
    """
    low, high = _window(trials, float(prob))
    odds = np.longdouble(prob) / (1 - np.longdouble(prob)) if prob < 1 else np.longdouble(np.inf)
    if not np.isfinite(odds) or high == low:
        return high, np.ones(1, np.longdouble)
    values = np.arange(low, high, dtype=np.longdouble)
    with np.errstate(divide="ignore"):  # the smallest odds vanish beside large values
        rises = np.log((trials - values) / (values + 1) * odds)
    mode = int(np.count_nonzero(rises > 0))
    zero = np.zeros(1, np.longdouble)
    logs = np.concatenate([-np.cumsum(rises[:mode][::-1])[::-1], zero, np.cumsum(rises[mode:])])
    weights = np.exp(logs)
    return low, weights / weights.sum()


def trinomials(
    attack: str,
    trials: int,
    others: tuple[float, float],
    first: tuple[float, float],
    second: tuple[float, float],
) -> ExactAttack:
    """The attack by how many of `trials` others and one victim fall into each of two cells of these probabilities."""
    a, b = others
    low, high = _window(trials, a)
    left = np.arange(low, high + 1)
    given = b / (1 - a)
    ends = [_window(trials - int(count), given) for count in (left[0], left[-1])]
    bottom, top = min(end[0] for end in ends), max(end[1] for end in ends)
    if len(left) * (top - bottom + 1) > _MOST_PAIRS:
        raise NotApplicable(f"expected few pairs of counts, got {len(left)} times {top - bottom + 1}")
    right = np.arange(bottom, top + 1)
    law = binom.pmf(left, trials, a)[:, None] * binom.pmf(right, trials - left[:, None], given)
    lost = float(binom.cdf(low - 1, trials, a) + binom.sf(high, trials, a))
    lost += float(np.sum(binom.pmf(left, trials, a) * binom.cdf(bottom - 1, trials - left, given)))
    lost += float(np.sum(binom.pmf(left, trials, a) * binom.sf(top, trials - left, given)))
    logs = []
    for in_a, in_b in (first, second):
        world = np.zeros((len(left) + 1, len(right) + 1))
        world[1:, :-1] += in_a * law
        world[:-1, 1:] += in_b * law
        world[:-1, :-1] += (1 - in_a - in_b) * law
        with np.errstate(divide="ignore"):
            logs.append(np.log(world.ravel()))
    return ExactAttack(attack=attack, log_first=logs[0], log_second=logs[1], slack=1.01 * lost + 1e-300 * law.size)


def log_binomial(trials: int, prob: float) -> np.ndarray:
    """The log probabilities of 0 .. trials ones: also where they underflow, there to about 1e-12 of the logarithm."""
    values = np.arange(trials + 1)
    with np.errstate(divide="ignore"):
        near = np.log(binom.pmf(values, trials, prob))
    far = gammaln(trials + 1) - gammaln(values + 1) - gammaln(trials - values + 1)
    far = far + values * math.log(prob) + (trials - values) * math.log1p(-prob)
    return np.where(near > math.log(_UNDERFLOW), near, far)
