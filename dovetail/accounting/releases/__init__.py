"""What one release costs: its Renyi divergence, its privacy loss, its pure eps, and the delta that it spends.

Gaussian and Laplace noise are dp-accounting's, shuffled rounds those of `pairs` and `personalized`, sums by shares of
`split_and_mix`, sums over the items of a subject of `subjects`. Each function raises `NotApplicable` where it knows no
bound for the release or for the way its users were sampled.

dp-accounting's two accountants disagree on what a noise multiplier means under replacement (one doubles the
sensitivity, the other does not). Our events carry the sensitivity of their own relation; this file translates.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from dovetail.accounting import loss_distributions
from dovetail.accounting.loss_distributions import Loss
from dovetail.accounting.releases import crowds, personalized, split_and_mix, subjects
from dovetail.events import (
    Crowd,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    Mechanism,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Neighbors, NotApplicable, Theorem

__all__ = [
    "MOST_LOSSES",
    "Sampling",
    "Scale",
    "losses",
    "pure_eps",
    "renyi",
    "resolution",
    "scale",
    "spent_on_full",
    "spent_on_mixing",
    "theorem",
]

Sampling = Everyone | FixedSize | Poisson


class Scale(NamedTuple):
    """About the std and the width of the loss of one noisy sum, and how many sums a release has: to choose a grid."""

    std: float
    width: float
    sums: int


_INTERVAL = 1e-4
_LOG_ERROR = 1e-12
_SAMPLED = (dp_event.PoissonSampledDpEvent, dp_event.SampledWithoutReplacementDpEvent)
_LARGEST_MU = 1000.0  # beyond, eps is in the hundreds of thousands, and losses are too many to tell apart
MOST_LOSSES = 2**20  # of one release
_FINE = 4 * _INTERVAL  # losses on finer grids are large, and few of them are kept
_ADD_REMOVE = privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = privacy_accountant.NeighboringRelation.REPLACE_ONE


def theorem(mechanism: Mechanism) -> Theorem | None:
    """The theorem behind this release's divergence and loss; None for plain noise, where the accountant's says all."""
    match mechanism:
        case Shuffled() | PaddedBernoulli() | PaddedTopk():
            return crowds.theorem(mechanism)
        case Personalized():
            return personalized.CLONES
        case SplitAndMix():
            return split_and_mix.SPLIT_AND_MIX
        case SampledSubject():
            return subjects.MIXTURE
    _refuse_non_private(mechanism)
    return None


@functools.lru_cache(maxsize=2048)
def renyi(mechanism: Mechanism, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
    """Renyi divergence of one release at every order; noise multipliers are std over the event's own sensitivity."""
    match mechanism, sampling:
        case Laplace(), Everyone():
            event = dp_event.LaplaceDpEvent(mechanism.scale / mechanism.sensitivity)
            return mechanism.count * _dp_accounting_renyi(event, _ADD_REMOVE, orders)
        case ((Shuffled() | PaddedBernoulli() | PaddedTopk()), Everyone()):
            return crowds.renyi(mechanism, np.asarray(orders))
        case Personalized(), Everyone():
            return personalized.renyi(mechanism, np.asarray(orders))
        case SplitAndMix(), Everyone():
            return split_and_mix.renyi(mechanism, np.asarray(orders))
        case Gaussian(std=0.0), _:
            return np.full(len(orders), np.inf)
        case Gaussian(), Everyone():
            return _dp_accounting_renyi(dp_event.GaussianDpEvent(1 / mechanism.mu), _ADD_REMOVE, orders)
        case Gaussian(neighbors=Neighbors.ADD_REMOVE), Poisson():
            event = dp_event.PoissonSampledDpEvent(sampling.prob, dp_event.GaussianDpEvent(1 / mechanism.mu))
            return _dp_accounting_renyi(event, _ADD_REMOVE, orders)
        case Gaussian(neighbors=Neighbors.REPLACE_ONE), FixedSize():
            noise = dp_event.GaussianDpEvent(1 / mechanism.mu)
            event = dp_event.SampledWithoutReplacementDpEvent(sampling.population, sampling.size, noise)
            return _dp_accounting_renyi(event, _REPLACE, orders)
    raise NotApplicable(f"no Renyi bound here for {_describe(mechanism, sampling)}")


def _dp_accounting_renyi(
    event: dp_event.DpEvent, relation: privacy_accountant.NeighboringRelation, orders: tuple[float, ...]
) -> np.ndarray:
    """dp-accounting's divergences, rounded up; infinite where it gives none.

    Those of sampled releases are logarithms of sums, right to about 1e-13: where little is lost they may be negative.
    """
    accountant = rdp.RdpAccountant(orders=orders, neighboring_relation=relation)
    with _quietly(), np.errstate(all="ignore"):
        found = np.asarray(accountant.compose(event).rdp, dtype=float)
    error = _LOG_ERROR / (np.asarray(orders) - 1) if isinstance(event, _SAMPLED) else 0.0
    outward = np.maximum(found, 0.0) * (1 + _LOG_ERROR) + error
    return np.where(np.isfinite(found) & (found >= -error), outward, np.inf)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without a warning for every order that is left out, which costs tightness and nothing else."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def resolution(mechanism: Mechanism) -> float:
    """The interval of privacy losses that this release should be composed on; of a `scale`, the finest that pays."""
    match mechanism:
        case Shuffled() | PaddedBernoulli() | PaddedTopk():
            return crowds.resolution(mechanism)
        case SampledSubject():
            return subjects.resolution(mechanism)
        case Laplace():  # connecting the dots costs the square of their distance over eps_each
            return max(_INTERVAL, mechanism.eps_each / 20)
        case Gaussian(std=noise) if noise > 0:
            return max(_INTERVAL, min(mechanism.mu, _LARGEST_MU) * (min(mechanism.mu, _LARGEST_MU) + 20) / MOST_LOSSES)
    _refuse_non_private(mechanism)
    return _INTERVAL


def scale(mechanism: Mechanism, sampling: Sampling) -> Scale | None:
    """The scale of a noisy sum; None for other releases."""
    match mechanism:
        case SampledSubject():
            std, width = subjects.scale(mechanism)
            return Scale(std=std, width=width, sums=mechanism.steps)
        case Gaussian(std=noise) if noise > 0:
            mu = mechanism.mu
            prob = sampling.prob if isinstance(sampling, Poisson) else 1.0
            std = mu if prob == 1 else min(mu, prob * math.sqrt(math.expm1(min(mu, 10.0) ** 2)))
            return Scale(std=max(std, 1e-15), width=max(mu * mu + 20 * mu, 1e-15), sums=1)
    _refuse_non_private(mechanism)
    return None


def losses(mechanism: Mechanism, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
    """The privacy loss of one release on multiples of `interval`.

    Several, where it depends on something fixed but unknown about the victim (how a subject's items are spread over
    users): the loss of any number of such releases is the composition of one of them.
    """
    return (_fine_losses if interval < _FINE else _coarse_losses)(mechanism, sampling, interval)


def _losses(mechanism: Mechanism, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
    match mechanism, sampling:
        case Laplace(), Everyone():
            one = pld.from_laplace_mechanism(
                mechanism.scale, sensitivity=mechanism.sensitivity, value_discretization_interval=interval
            )
            return (loss_distributions.copies(loss_distributions.outward(one), mechanism.count),)
        case ((Shuffled() | PaddedBernoulli() | PaddedTopk()), Everyone()):
            return (crowds.loss(mechanism, interval=interval),)
        case SampledSubject(), Everyone():
            return subjects.losses(mechanism, interval=interval)
        case Gaussian(std=std), _ if 0 < mechanism.mu <= _LARGEST_MU and not isinstance(sampling, FixedSize):
            prob = sampling.prob if isinstance(sampling, Poisson) else 1.0
            if mechanism.neighbors is Neighbors.ADD_REMOVE:
                reach, relation = mechanism.sensitivity, _ADD_REMOVE
            else:
                reach, relation = mechanism.sensitivity / 2, _REPLACE  # dp-accounting doubles it again
            one = pld.from_gaussian_mechanism(
                std,
                sensitivity=reach,
                sampling_prob=prob,
                neighboring_relation=relation,
                value_discretization_interval=interval,
            )
            return (loss_distributions.outward(one),)
    raise NotApplicable(f"no privacy-loss distribution here for {_describe(mechanism, sampling)}")


_fine_losses = functools.lru_cache(maxsize=64)(_losses)
_coarse_losses = functools.lru_cache(maxsize=1024)(_losses)


def pure_eps(mechanism: Mechanism) -> float:
    """The local guarantee of one round, which shuffling cannot worsen."""
    match mechanism:
        case Laplace():
            return mechanism.count * mechanism.eps_each
        case Shuffled():
            return mechanism.coordinates * mechanism.report.eps_local
        case Personalized():
            return mechanism.coordinates * max(mechanism.eps_locals)
    raise NotApplicable(f"{type(mechanism).__name__} has no pure guarantee")


def spent_on_full(mechanism: Mechanism) -> float:
    """The delta that a release spends on reports that meet a full coordinate."""
    _refuse_non_private(mechanism)
    return crowds.spent_delta(mechanism) if isinstance(mechanism, Crowd) else 0.0


def spent_on_mixing(mechanism: Mechanism, *, eps: float) -> float:
    """The delta that a release spends on imperfect mixing, at the eps of the whole composition."""
    _refuse_non_private(mechanism)
    return split_and_mix.spent_delta(mechanism, eps) if isinstance(mechanism, SplitAndMix) else 0.0


def _refuse_non_private(mechanism: Mechanism) -> None:
    if isinstance(mechanism, NonPrivate):
        raise NotApplicable(f"a release without a guarantee: {mechanism.reason}")


def _describe(mechanism: Mechanism, sampling: Sampling) -> str:
    relation = getattr(mechanism, "neighbors", None)
    under = f" under {relation.value}" if relation else ""
    return f"{type(mechanism).__name__} noise with {type(sampling).__name__} participation{under}"
