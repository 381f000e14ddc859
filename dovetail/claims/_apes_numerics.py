"""The numerics behind APES's Table 3, reproduced as they must have been run.

The number of clones (echoes) is cut into blocks of 100 around its mean, every block takes the worse of its two ends,
and ten halvings of the closed form give eps. With a normal law for the count one in a hundred counts is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from dovetail.accounting import numerics
from dovetail.statements import NotApplicable

__all__ = ["by_blocks", "clone_form", "echoes"]

_BLOCK, _HALVINGS = 100, 10


def echoes(budgets: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of sum_{i>1} sum_j Bern(p_ij / n), p_ij as in Lemma 6, user 1 having the largest eps.

    With r(e) = (1 - e^-e) / e, p_ij = r(e_j) / r(e_i) e^-max(e_i, e_j): sorting makes both sums linear.
    """
    e = np.sort(budgets)
    n = len(e)
    sums = []
    for power in (1, 2):
        r = (-np.expm1(-e) / e) ** power
        damp = np.exp(-power * e)
        up_to, beyond = np.cumsum(r), np.cumsum((r * damp)[::-1])[::-1]
        inner = damp * up_to + np.append(beyond[1:], 0.0)
        sums.append(float(np.sum((inner / r)[:-1])) / n**power)
    return sums[0], math.sqrt(max(sums[0] - sums[1], 0.0))


def clone_form(eps_local: float, clones: float, delta: float) -> float:
    """ln(1 + tanh(eps/2) (8 sqrt(ln(4/delta) / clones) + 8 / clones))."""
    return math.log1p(math.tanh(eps_local / 2) * (8 * math.sqrt(math.log(4 / delta) / clones) + 8 / clones))


def by_blocks(
    eps_local: float,
    centre: float,
    n: int,
    mass: Callable[[np.ndarray, np.ndarray], np.ndarray],
    start: float,
    delta: float,
) -> float:
    """Ten halvings from `start`, the number of clones taken in blocks of 100 around its mean, each at its worse end.

    Blocks are added outwards until less is left than they have summed up to, and then the rest is added. A normal
    `mass` leaves out one count in a hundred between neighbouring blocks, so that this never happens and the rest is
    lost: the published computation, not an upper bound.
    """
    if n <= 2 * _BLOCK:
        raise NotApplicable(f"the numerics of Table 3 work in blocks of {_BLOCK} users, too coarse for n={n}")
    steps = np.arange(1, math.ceil(n / _BLOCK))
    above, below = np.ceil(centre + steps * _BLOCK), np.ceil(centre - steps * _BLOCK)
    low = np.column_stack([above - _BLOCK + (steps > 1), np.maximum(below, 0)]).ravel()
    high = np.column_stack([np.minimum(above, n - 1), below + _BLOCK - 1]).ravel()
    inside = (low <= n - 1) & (high >= 0)
    low, high = low[inside], high[inside]
    weights = mass(low, high)
    low, high, weights = low[weights != 0], high[weights != 0], weights[weights != 0]  # most are far from the mean
    left = 1 - np.cumsum(weights)
    bottom, top = 0.0, min(start, eps_local)
    for _ in range(_HALVINGS):
        eps = (bottom + top) / 2
        at_high = _one_step(high, eps, eps_local)
        total = np.cumsum(weights * np.maximum(_one_step(low, eps, eps_local), at_high))
        enough = np.flatnonzero(left < np.cumsum(weights * at_high))
        reached = total[enough[0]] + left[enough[0]] if enough.size else total[-1]
        bottom, top = (bottom, eps) if reached < delta else (eps, top)
    return top


def _one_step(clones: np.ndarray, eps: float, eps_local: float) -> np.ndarray:
    """Hockey-stick divergence of the clone pair given the number of clones, by two binomial cdfs."""
    p, ratio = 1 / (1 + math.exp(-eps_local)), math.exp(eps)
    odds = ((ratio + 1) * p - 1) / ((ratio + 1) * p - ratio)
    cut = (clones + 1) / (odds + 1)
    here, before = numerics.binomial_cdf(cut, clones, 0.5), numerics.binomial_cdf(cut - 1, clones, 0.5)
    return p * here + (1 - p) * before - ratio * ((1 - p) * here + p * before)
