"""Releases that are Gaussian but for a small divergence, and what the difference spends of delta.

Let P be the law of all that is released and I what is seen of Gaussian releases instead, for the same input. If
KL(I || P) <= D for both neighbours, both are within sqrt(D / 2) in total variation (Pinsker), and P is
(eps, delta + (1 + e^eps) sqrt(D / 2))-DP where I is (eps, delta)-DP. Divergences of rounds add up, also where a round
is chosen after seeing those before it (the chain rule), and a secret sample of the users adds none (KL is convex).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import Theorem

__all__ = ["NearGaussian", "spent_delta"]

_OUTWARD = 1 + 1e-12


class NearGaussian(NamedTuple):
    """A Gaussian release, and how far from it a release is at the most, whatever its input.

    `mu` is the Gaussian's sensitivity over its std; `divergence` is KL(what is seen of the Gaussian || the release).
    """

    mu: float
    divergence: float = 0.0
    theorem: Theorem | None = None

    def repeated(self, rounds: int) -> NearGaussian:
        """So many of them, each chosen after those before it."""
        outward = 1 + 1e-15
        return self._replace(mu=self.mu * math.sqrt(rounds) * outward, divergence=self.divergence * rounds * outward)


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
