"""How far Skellam noise is from a Gaussian that is rounded to whole numbers (docs/proofs/skellam.md).

For whole x, x + round(N(0, s^2)) is what rounding makes of x + N(0, s^2). Skellam noise of variance v is as if it were
that with s^2 = v - 1/12, for rounding adds 1/12: KL(round N(0, v - 1/12) || Skellam) <= (1 + 24/v) / (48 v^2). Of many
draws, the ratio of the two laws is close to 1, but for a small probability (`near_gaussian.slack_of`).
"""

from __future__ import annotations

import math

from dovetail import _validate
from dovetail.accounting.near_gaussian import NearGaussian, SkellamDraws
from dovetail.statements import NotApplicable, Theorem

__all__ = ["LEAST_VARIANCE", "SKELLAM", "divergence", "near_gaussian"]

SKELLAM = Theorem(
    key="dovetail.skellam-gaussian",
    where="Skellam noise beside the Gaussian that it rounds to (docs/proofs/skellam.md)",
)
LEAST_VARIANCE = 100.0  # the proof's

_ROUNDING = 1 / 12  # variance that rounding adds to a Gaussian
_OUTWARD = 1 + 1e-14
_LEAST = 1e-300  # stands for a divergence that underflows


def divergence(variance: float) -> float:
    """An upper bound on KL(round N(0, variance - 1/12) || Skellam noise of this variance), for one coordinate.

    Guarantees:
        Never below the divergence summed from both laws, and within 2 % of it from a variance of 1500 on.
        Not known (`NotApplicable`) below a variance of 100.
    """
    _validate.positive(variance=variance)
    if variance < LEAST_VARIANCE:
        raise NotApplicable(f"the distance of Skellam noise from a Gaussian needs variance >= 100, got {variance:.4g}")
    return max((1 + 24 / variance) / 48 / variance / variance * _OUTWARD, _LEAST)


def near_gaussian(*, sensitivity: float, coordinates: int, variance: float) -> NearGaussian:
    """The Gaussian that Skellam noise on so many coordinates is near to; `sensitivity` is in L2, of whole numbers.

    Guarantees:
        Not known (`NotApplicable`) below a variance of 100.
    """
    _validate.positive(sensitivity=sensitivity, coordinates=coordinates)
    far = coordinates * divergence(variance)
    mu = sensitivity / math.sqrt(variance - _ROUNDING) * _OUTWARD
    return NearGaussian(mu, far * _OUTWARD, SKELLAM, SkellamDraws(coordinates, variance))
