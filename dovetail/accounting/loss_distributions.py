"""Privacy-loss distributions on one grid: many copies of a release, several releases together, one drawn of several.

The distributions and their convolutions are dp-accounting's, rounded up. A release may have several of them, where its
loss depends on something fixed but unknown about the victim: then the worst counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from dovetail import _validate
from dovetail.statements import Theorem

__all__ = ["PRIVACY_LOSS", "copies", "drawn", "together", "worst_delta", "worst_eps"]

PRIVACY_LOSS = Theorem(
    key="DGKMPS22",
    where="privacy-loss distributions, rounded up (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022)",
    url="https://arxiv.org/abs/2207.04380",
)

_OUTWARD = 1 + 1e-9


def copies(loss: PrivacyLossDistribution, times: int) -> PrivacyLossDistribution:
    """So many independent copies of a release.

    Tails of the sum are cut where Chernoff's bound says so, at several slopes, and go to the infinite loss. Where the
    outermost probability is next to nothing a slope's moment overflows; that slope is left out, which cuts less.
    """
    _validate.integer(times=times)
    _validate.at_least(1, times=times)
    with np.errstate(over="ignore"):
        return loss.self_compose(times)


def together(losses: Sequence[PrivacyLossDistribution]) -> PrivacyLossDistribution:
    """All of these releases, in a balanced tree: most convolutions are then short."""
    if not losses:
        raise ValueError("expected at least one release, got none")
    level = list(losses)
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [one.compose(other) for one, other in zip(level[::2], level[1::2], strict=False)] + odd
    return level[0]


def drawn(parts: Sequence[tuple[float, PrivacyLossDistribution | None]], *, interval: float) -> PrivacyLossDistribution:
    """The loss of one of several releases, drawn with these weights, where it is seen which; None is no loss."""
    _validate.positive(interval=interval)
    if all(loss is None for _, loss in parts):
        raise ValueError("expected a release with a loss, got none")
    both = []
    for side in ("_pmf_remove", "_pmf_add"):
        found = [(weight, getattr(loss, side)) for weight, loss in parts if loss is not None]
        low = min(0, *(pmf._lower_loss for _, pmf in found))
        high = max(0, *(pmf._lower_loss + len(pmf._probs) for _, pmf in found))
        probs, infinite = np.zeros(high - low + 1), 0.0
        for weight, pmf in found:
            start = pmf._lower_loss - low
            probs[start : start + len(pmf._probs)] += weight * pmf._probs
            infinite += weight * pmf._infinity_mass
        probs[-low] += sum(weight for weight, loss in parts if loss is None)
        both.append(pld_pmf.DensePLDPmf(interval, low, probs, infinite * (1 + 1e-12), True))
    return PrivacyLossDistribution(*both)


def worst_eps(losses: Sequence[PrivacyLossDistribution], *, delta: float) -> float:
    """The largest eps at this delta, rounded up; infinite where none is large enough."""
    _validate.in_open_interval(0, 1, delta=delta)
    found = [float(loss.get_epsilon_for_delta(delta)) for loss in losses]
    return math.inf if any(map(math.isnan, found)) else max(0.0, *found) * _OUTWARD


def worst_delta(losses: Sequence[PrivacyLossDistribution], *, eps: float) -> float:
    """The largest delta at this eps, rounded up."""
    _validate.non_negative(eps=eps)
    found = [float(loss.get_delta_for_epsilon(eps)) for loss in losses]
    return 1.0 if any(map(math.isnan, found)) else min(1.0, max(0.0, *found) * _OUTWARD)
