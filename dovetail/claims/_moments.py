"""The moments accountant of Abadi et al. 2016, as Geyer et al. and SubDP used it: orders 1 to 32, Poisson sampling."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.special import gammaln, xlog1py, xlogy

from dovetail import _validate
from dovetail.accounting.releases import release_of
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Poisson, Round
from dovetail.statements import Neighbors, NotApplicable

__all__ = ["MAX_ORDER", "same_rounds", "total_log_moments"]

MAX_ORDER = 32


def total_log_moments(rounds: Sequence[Round]) -> np.ndarray:
    """Sum of the log-moments alpha(1), ..., alpha(32) over these rounds, whatever the sampling taken as Poisson."""
    if not rounds:
        raise ValueError("expected at least one round, got none")
    counts: Counter[tuple[float, float]] = Counter()
    for item in rounds:
        shift = release_of(item.mechanism).mu
        if shift is None or math.isinf(shift) or item.mechanism.neighbors is not Neighbors.ADD_REMOVE:
            raise NotApplicable("the moments accountant needs Gaussian noise under add-remove neighbours")
        counts[_prob(item), 1 / shift] += 1
    total = np.zeros(MAX_ORDER)
    for (prob, noise), times in counts.items():
        total = total + times * _log_moments(prob, noise)
    return total


@functools.lru_cache(maxsize=256)
def _log_moments(prob: float, noise: float) -> np.ndarray:
    """log E_{z ~ mixture}[(mixture / base)^l], l = 1..32: the binomial sum of Abadi et al. 2016, Sec. 3.2."""
    moments = []
    for n in range(2, MAX_ORDER + 2):
        k = np.arange(n + 1)
        choose = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        terms = choose + xlog1py(n - k, -prob) + xlogy(k, prob) + k * (k - 1) / (2 * noise**2)
        moments.append(float(np.logaddexp.reduce(terms)))
    return np.array(moments)


def _prob(item: Round) -> float:
    match item.participation:
        case Poisson(prob=prob):
            return prob
        case FixedSize(size=size, population=population):
            return size / population
        case Everyone():
            return 1.0
        case Disjoint():
            raise NotApplicable("Geyer et al. draw the clients of every round afresh, not in disjoint batches")


def same_rounds(prob: float, noise: float, rounds: int) -> list[Round]:
    """So many equal Poisson-sampled Gaussian releases of this noise multiplier."""
    _validate.positive(noise=noise)
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    mechanism = Gaussian(std=noise, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    return [Round(mechanism=mechanism, participation=Poisson(prob=prob))] * rounds
