"""PrivUnit: a whole unit vector in one message, exactly (Bhowmick et al. 2018; Asi, Feldman, Talwar 2022).

The report is uniform on the cap ``{v : <v, u> >= threshold}`` of the sphere with probability `prob`, else uniform on
the rest. With c the mass of the cap, densities are prob/c and (1 - prob)/(1 - c), so ``eps = ln(prob (1-c)/((1-prob)
c))``, exactly; c is rounded down, which rounds eps up. The projection of the report on u has mean ``m = k (prob/c -
(1-prob)/(1-c))`` with k the integral of t over the cap, so the report divided by m is unbiased with variance 1/m^2 - 1.
At a given eps the best threshold solves ``threshold = m``: m rises while it is above the threshold and falls once it is
below.
"""

from __future__ import annotations

import dataclasses
import math

from scipy.optimize import brentq
from scipy.special import betainc, betaincc

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = ["PRIVUNIT", "Cap", "cap_mass", "eps", "least_variance_cap", "mean_projection", "rms_error"]

PRIVUNIT = Theorem(
    key="PrivUnit",
    where="PrivUnit (Bhowmick et al. 2018; Asi, Feldman, Talwar 2022), ratio of the two densities with the exact cap",
    url="https://arxiv.org/abs/1812.00984",
)

_DOWN = 1 - 1e-10  # rounds the mass of a cap down by more than its error
_LEAST_EPS = 1e-6  # below it the mass of a cap is not known well enough
_LARGEST_EPS = 500.0  # beyond it caps have no mass to compute with
_LARGEST_THRESHOLD = 1 - 1e-12  # of the search


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cap:
    """PrivUnit's parameters: a cap of the sphere in `dim` dimensions, and the probability to report from it."""

    dim: int
    threshold: float
    prob: float

    def __post_init__(self) -> None:
        _validate.integer(dim=self.dim)
        _validate.at_least(2, dim=self.dim)
        _validate.in_interval(0, 1, threshold=self.threshold)
        _validate.in_open_interval(0, 1, prob=self.prob)
        if self.threshold == 1:
            raise ValueError("expected threshold < 1, got threshold=1: the cap has no mass")


def cap_mass(*, dim: int, threshold: float) -> float:
    """P(<v, u> >= threshold) for v uniform on the sphere, rounded down.

    Arguments:
        dim: of the space that the unit sphere is in, 2 or more.
        threshold: the least inner product with the cap's centre, in [0, 1].

    Guarantees:
        Never above the exact mass; within 1e-9 of it where it is at least 1e-290 (tested in 50 digits up to dim 1e6).
    """
    _validate.integer(dim=dim)
    _validate.at_least(2, dim=dim)
    _validate.in_interval(0, 1, threshold=threshold)
    if threshold > 0.5:  # 1 - threshold^2 without cancellation
        mass = float(betainc((dim - 1) / 2, 0.5, (1 - threshold) * (1 + threshold))) / 2
    else:
        mass = float(betaincc(0.5, (dim - 1) / 2, threshold**2)) / 2
    if mass < 1e-290:  # the integral of t is smaller than that of 1
        return math.exp(_log_first_moment(dim, threshold)) * (1 - 1e-6)
    return mass * _DOWN


def _log_first_moment(dim: int, threshold: float) -> float:
    """log of the integral of t over the cap: (1 - threshold^2)^((d-1)/2) / ((d-1) B(1/2, (d-1)/2))."""
    b = (dim - 1) / 2
    log_ratio = math.lgamma(b + 0.5) - math.lgamma(b)
    if b > 50:  # Stirling's series, where the difference of logarithms would lose digits
        log_ratio = 0.5 * math.log(b) - 1 / (8 * b) + 1 / (192 * b**3) - 1 / (640 * b**5)
    return b * math.log1p(-(threshold**2)) - math.log(dim - 1) - 0.5 * math.log(math.pi) + log_ratio


def eps(cap: Cap) -> Bound:
    """The pure eps of one report, rounded up; `NotApplicable` where the cap's mass underflows."""
    mass = _require_cap_mass(cap)
    up = math.log(cap.prob) - math.log1p(-cap.prob) + math.log1p(-mass) - math.log(mass)
    if up >= 0:
        return Bound(eps=up * (1 + 1e-14) + 1e-15, delta=0.0, proof=PRIVUNIT.proof)
    above = min(0.5, mass / _DOWN * (1 + 1e-9))  # less likely inside than outside: the mass is rounded the other way
    down = -(math.log(cap.prob) - math.log1p(-cap.prob) + math.log1p(-above) - math.log(above))
    return Bound(eps=numerics.as_eps_bound(down) * (1 + 1e-14) + 1e-15, delta=0.0, proof=PRIVUNIT.proof)


def _require_cap_mass(cap: Cap) -> float:
    """`cap_mass` of this cap, rounded down; refuses a cap whose mass underflows."""
    mass = cap_mass(dim=cap.dim, threshold=cap.threshold)
    if mass == 0:
        raise NotApplicable(
            f"the cap beyond threshold={cap.threshold} in {cap.dim} dimensions has no mass to compute with"
        )
    return mass


def mean_projection(cap: Cap) -> float:
    """m, the mean of <report, u>: the report divided by m is an unbiased estimate of u."""
    mass = _require_cap_mass(cap) / _DOWN
    return math.exp(_log_first_moment(cap.dim, cap.threshold)) * (cap.prob / mass - (1 - cap.prob) / (1 - mass))


def rms_error(cap: Cap) -> float:
    """Root of the mean square error of the unbiased estimate of a unit vector, all coordinates together."""
    return math.sqrt(1 / mean_projection(cap) ** 2 - 1)


def least_variance_cap(*, dim: int, eps_local: float) -> Cap:
    """The cap and the probability with the least variance at this eps.

    Arguments:
        dim: of the vectors, 2 or more.
        eps_local: the pure eps that one report may have, from 1e-6 to 500.

    Guarantees:
        eps(result) is at most eps_local and within 1e-6 of it; no other threshold has a larger `mean_projection`.
    """
    _validate.positive(eps_local=eps_local)
    _validate.integer(dim=dim)
    _validate.at_least(2, dim=dim)
    if eps_local < _LEAST_EPS:
        raise NotApplicable(
            f"eps_local={eps_local} is below {_LEAST_EPS:g}, where the mass of a cap is not known well enough"
        )
    if eps_local > _LARGEST_EPS:
        raise NotApplicable(f"eps_local={eps_local} is above {_LARGEST_EPS:.0f}, beyond which the cap has no mass")
    small = math.exp(-eps_local)

    def gap(threshold: float) -> float:
        """m - threshold at this eps, which is 0 at the best threshold alone."""
        mass = cap_mass(dim=dim, threshold=threshold) / _DOWN
        log_m = _log_first_moment(dim, threshold) + math.log1p(-small) - math.log(small + (1 - small) * mass)
        return math.exp(log_m) - threshold

    if gap(_LARGEST_THRESHOLD) >= 0:
        raise NotApplicable(f"eps_local={eps_local} in {dim} dimensions asks for a cap too small to compute with")
    threshold = brentq(gap, 0.0, _LARGEST_THRESHOLD, xtol=1e-15, rtol=1e-12)
    mass = cap_mass(dim=dim, threshold=threshold)
    odds = math.exp(min(700.0, eps_local * (1 - 1e-12) + math.log(mass) - math.log1p(-mass)))
    prob = min(odds / (1 + odds), 1 - 2.0**-52)
    while eps(Cap(dim=dim, threshold=threshold, prob=prob)).eps > eps_local:
        prob -= (1 - prob) * prob * 1e-12 + 2.0**-53
    return Cap(dim=dim, threshold=threshold, prob=prob)
