"""Runs that are chosen one after the other, each after seeing the ones before: what they spend together.

Composition theorems fix beforehand how much every run spends. Here even that may depend on what earlier runs showed, so
only what adds up along every path counts (docs/proofs/across-runs.md): the squares of the means of Gaussian releases,
or eps and delta themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_EVEN
from fractions import Fraction

from dovetail.accounting.accountants import BASIC, exact_gaussian
from dovetail.accounting.exposure import exposures_of
from dovetail.events import Everyone, Round
from dovetail.numbers import round_to
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = ["ACROSS_RUNS", "add_up", "gaussian_bound", "total_delta", "total_gaussian_mu"]

ACROSS_RUNS = Theorem(
    key="dovetail.across-runs",
    where="fully adaptive composition over runs (docs/proofs/across-runs.md)",
    url="https://arxiv.org/abs/2210.17520",
)

_SUM_ERROR = 1e-15  # relative error of a sum for each of its terms and four more


def add_up(bounds: Sequence[Bound]) -> Bound:
    """Basic composition: the sums of eps and of delta, rounded up; delta is at most 1.

    Guarantees:
        Holds also where the eps and delta of a run were chosen after seeing the runs before it.
    """
    eps = math.fsum(bound.eps for bound in bounds) * (1 + _SUM_ERROR * (len(bounds) + 4))
    return Bound(eps=eps, delta=total_delta(bounds), proof=BASIC.proof.then(ACROSS_RUNS))


def total_delta(bounds: Sequence[Bound]) -> float:
    """The sum of all delta, at most 1: the number of few digits that is next to it where that is no less, or above."""
    exact = sum((Fraction(bound.delta) for bound in bounds), Fraction(0))
    near = round_to(float(exact), 12, ROUND_HALF_EVEN)
    return min(1.0, near if Fraction(near) >= exact else math.nextafter(float(exact), 1))


def total_gaussian_mu(rounds: Sequence[Round]) -> float | None:
    """mu of all rounds together, where every release is Gaussian and no users are sampled; None for others."""
    exposures = exposures_of(rounds)
    shifts = [exposure.release.mu for exposure in exposures if exposure.sampling == Everyone()]
    if len(shifts) < len(exposures) or None in shifts:
        return None
    pairs = zip(exposures, shifts, strict=True)
    return math.hypot(*(math.sqrt(exposure.times) * shift for exposure, shift in pairs if shift is not None))


def gaussian_bound(rounds: Sequence[Round], *, delta: float) -> Bound:
    """The bound for the rounds of all runs where their noise is Gaussian, or close to it, and no users are sampled.

    `NotApplicable` for other rounds.

    Arguments:
        rounds: those of all runs, in any order; disjoint batches of different runs belong to different epochs.
        delta: for all of them together.

    Guarantees:
        Holds also where the noise of a run, and how many rounds it has, were chosen after seeing the runs before it.
    """
    curve = exact_gaussian(exposures_of(rounds))
    eps = curve.eps(delta)
    if not 0 <= eps < math.inf:
        raise NotApplicable(f"the Gaussian formula gives no number at delta={delta}")
    return Bound(eps=eps, delta=delta, proof=curve.proof.then(ACROSS_RUNS).with_spent(*curve.delta_spent(eps)))
