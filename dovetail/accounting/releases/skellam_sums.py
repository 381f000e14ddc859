"""Sums of whole vectors with Skellam noise, of which nothing else is seen (Agarwal, Kairouz, Liu 2021).

Vectors are clipped to `clip_norm`, scaled and rounded to integers of bounded norm (`rounded_norm`); the noise that the
adversary does not know has variance `noise_variance`. That costs a Gaussian and Skellam's distance from it
(`divergence_from_gaussian`), or Skellam's Renyi divergence, whichever is less. What a sum by shares of which one
aggregator is honest shows is no more than that sum (docs/proofs/secagg.md); `split_and_mix` adds how far mixed shares
are from it.

**The distance from a Gaussian** that is rounded to whole numbers (docs/proofs/skellam.md). For whole x,
x + round(N(0, s^2)) is what rounding makes of x + N(0, s^2). Skellam noise of variance v is as if it were that with
s^2 = v - 1/12, for rounding adds 1/12: KL(round N(0, v - 1/12) || Skellam) <= (1 + 24/v) / (48 v^2). Of many draws, the
ratio of the two laws is close to 1, but for a small probability (`gaussian.slack_of`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import TypeVar

import numpy as np

from dovetail import _validate
from dovetail.accounting.gaussian import NearGaussian, SkellamDraws
from dovetail.accounting.loss_distributions import Loss
from dovetail.accounting.releases._base import Release, Sampling, Scale, releases
from dovetail.accounting.releases.noise import CorrelatedRelease, CorrelatedStream, GaussianRelease
from dovetail.accounting.streams import CORRELATED
from dovetail.events import (
    CorrelatedGaussian,
    CorrelatedSum,
    EncodedSum,
    Everyone,
    FixedSize,
    Gaussian,
    Participation,
    Poisson,
    Round,
    SkellamNoise,
    SkellamSum,
)
from dovetail.statements import Neighbors, NotApplicable, Theorem

__all__ = [
    "LEAST_VARIANCE",
    "ORDERS",
    "REMOVED",
    "SECAGG",
    "SKELLAM",
    "SkellamRelease",
    "divergence_from_gaussian",
    "near_gaussian",
    "near_gaussian_of",
    "renyi",
    "rounded_norm",
    "sensitivity",
]

SECAGG = Theorem(
    key="dovetail.secagg",
    where="Skellam noise (Agarwal, Kairouz, Liu 2021) on a sum by additive shares, of which all but one may be seen "
    "(docs/proofs/secagg.md)",
    url="https://arxiv.org/abs/2110.04995",
)
REMOVED = dataclasses.replace(
    SECAGG,
    key="dovetail.secagg-removed",
    where=f"{SECAGG.where}; for users that are removed, docs/proofs/removed-users.md",
)
ORDERS = np.unique(np.round(np.geomspace(2, 20_000, 160)))

_Sum = TypeVar("_Sum", bound=SkellamNoise)


def renyi(event: SkellamNoise, orders: np.ndarray) -> np.ndarray:
    """Skellam's Renyi divergence of one sum with everyone, all coordinates, rounded up.

    An order between integers is rounded up to the next one; infinite at orders that are not finite or not above 1.

    Guarantees:
        Never below the divergence summed from Skellam's probabilities.
    """
    return _skellam_renyi(sensitivity(event), event.coordinates, event.noise_variance, np.asarray(orders, dtype=float))


def near_gaussian_of(event: SkellamNoise) -> NearGaussian:
    """The Gaussian release that one sum is close to, all coordinates; `NotApplicable` below a variance of 100."""
    return near_gaussian(sensitivity=sensitivity(event), coordinates=event.coordinates, variance=event.noise_variance)


def sensitivity(event: EncodedSum) -> float:
    """The L2 sensitivity of the sum of whole numbers: one largest norm for a user who is removed, two if replaced.

    Rounded up; for removed users see docs/proofs/removed-users.md.
    """
    return event.norms_apart * rounded_norm(
        clip_norm=event.clip_norm,
        scale=event.scale,
        coordinates=event.coordinates,
        rounding_tail=event.rounding_tail,
    )


def rounded_norm(*, clip_norm: float, scale: float, coordinates: int, rounding_tail: float) -> float:
    """The L2 norm that conditional stochastic rounding enforces, rounded up (Kairouz, Liu, Steinke 2021).

    Plain stochastic rounding stays below it with probability at least 1 - rounding_tail; it is repeated until it does,
    which biases the result slightly.

    Arguments:
        clip_norm: the largest L2 norm of a vector before it is scaled.
        scale: what vectors are multiplied by before they are rounded to whole numbers.
        coordinates: how many the vector has.
        rounding_tail: at most how probably one rounding is above the result.
    """
    _validate.positive(clip_norm=clip_norm, scale=scale, coordinates=coordinates)
    _validate.in_open_interval(0, 1, rounding_tail=rounding_tail)
    scaled_norm = scale * clip_norm
    half = math.sqrt(coordinates) / 2
    square = scaled_norm**2 + half**2 + math.sqrt(-2 * math.log(rounding_tail)) * (scaled_norm + half)
    return min(math.sqrt(square), scaled_norm + 2 * half) * (1 + 1e-14)


def _skellam_renyi(l2_sensitivity: float, coordinates: int, variance: float, orders: np.ndarray) -> np.ndarray:
    """The Renyi divergence of Skellam noise at these orders (Agarwal, Kairouz, Liu 2021), rounded up.

    Arguments:
        l2_sensitivity: the L2 sensitivity of the sum of whole numbers.
        coordinates: of the sum, of whole numbers, so that its L1 sensitivity is at most l2^2, too.
        variance: of the noise on one coordinate.
        orders: any; infinite at those that are not finite or not above 1.
    """
    l1 = min(math.sqrt(coordinates) * l2_sensitivity, l2_sensitivity**2)
    usable = np.isfinite(orders) & (orders > 1)
    order = np.maximum(np.ceil(np.where(usable, orders, 2.0)), 2.0)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # the noise may be next to nothing
        excess = np.fmin(
            ((2 * order - 1) * l2_sensitivity**2 + 6 * l1) / (4 * variance * variance), 3 * l1 / (2 * variance)
        )
        return np.where(usable, (order * l2_sensitivity**2 / (2 * variance) + excess) * (1 + 1e-13), np.inf)


class SkellamRelease(Release[_Sum]):
    """Skellam noise on a sum, near to a Gaussian's.

    A sample of who uploads amplifies nothing: it is seen. `Poisson` means that everyone uploads, and that users toss
    secret coins for whether their data enter.
    """

    orders = ORDERS

    @property
    def near_gaussian(self) -> NearGaussian | None:
        """The Gaussian release that the sum is close to; None where there is too little noise for that."""
        with contextlib.suppress(NotApplicable):
            return near_gaussian_of(self.event)
        return None

    @property
    def _gaussian_release(self) -> GaussianRelease:
        """The release of the Gaussian that the sum is close to; `NotApplicable` where there is too little noise."""
        moved = sensitivity(self.event)
        std = moved / near_gaussian_of(self.event).mu
        return GaussianRelease(Gaussian(std=std, sensitivity=moved, neighbors=self.neighbors))

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The losses of the Gaussian that it is close to, rounded up, where users toss secret coins (`Poisson`).

        The distance from that Gaussian is charged apart (`near_gaussian`): a sample of users makes it no larger, for KL
        is convex. Everything else is refused: with everyone `near_gaussian` itself says all.
        """
        is_poisson = isinstance(sampling, Poisson)
        return self._gaussian_release.losses(sampling, interval) if is_poisson else super().losses(sampling, interval)

    def loss_scale(self, sampling: Sampling) -> Scale | None:
        """The scale of the Gaussian that the sum is close to; refused where there is too little noise."""
        return self._gaussian_release.loss_scale(sampling)

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Skellam's own Renyi divergence with everyone, rounded up; refuses samples, on which none is known."""
        return renyi(self.event, np.asarray(orders)) if sampling == Everyone() else super().renyi(sampling, orders)

    def full_round_covers_known_sample(self, sampling: Sampling) -> bool:
        """True, but for samples of fixed size with fewer users than the `num_users` whose noise is counted on."""
        least = getattr(self.event, "num_users", 0)
        return not isinstance(sampling, FixedSize) or sampling.size >= least

    def sampling_assumption(self, sampling: Sampling) -> str | None:
        """What is assumed of a sample: where users toss coins, that nobody may see how they fell."""
        if not isinstance(sampling, Poisson):
            return super().sampling_assumption(sampling)
        return (
            f"each user decides secretly and independently, with probability {sampling.prob:.4g}, whether its data "
            "enter a round; when and how long it uploads does not depend on that choice"
        )


@releases(SkellamSum)
class SkellamSumRelease(SkellamRelease[SkellamSum]):
    """A sum by shares: no more than the sum is seen, as long as one aggregator is honest."""

    @property
    def theorem(self) -> Theorem:
        """`SECAGG` for users that are replaced, `REMOVED` for users that are removed."""
        return SECAGG if self.event.neighbors is Neighbors.REPLACE_ONE else REMOVED


CORRELATED_SUM = dataclasses.replace(
    CORRELATED,
    key="dovetail.correlated-secagg",
    where=f"{CORRELATED.where}; of sums by shares, docs/proofs/secagg.md and docs/proofs/removed-users.md",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedStream(CorrelatedStream):
    """All rounds of a stream of sums by shares, as the one Gaussian release that they are."""


@releases(SharedStream)
class SharedStreamRelease(GaussianRelease):
    """A Gaussian release that rests on two more theorems: that a stream is one, and that shares show no more."""

    is_tight = False

    @property
    def theorem(self) -> Theorem:
        """`CORRELATED_SUM`."""
        return CORRELATED_SUM


@releases(CorrelatedSum)
class CorrelatedSumRelease(CorrelatedRelease[CorrelatedSum]):
    """One round of a stream of sums by shares with correlated noise: only the whole stream has a guarantee."""

    stream = SharedStream

    @property
    def unrounded(self) -> CorrelatedGaussian:
        """The round without rounding the noise, of which this one is post-processing."""
        return self.event.with_sensitivity(sensitivity(self.event))

    def of_users(self, participation: Participation, users: int) -> Round | None:
        """None: group privacy is needed, for the sum is stated for one user's clip norm."""
        return None


SKELLAM = Theorem(
    key="dovetail.skellam-gaussian",
    where="Skellam noise beside the Gaussian that it rounds to (docs/proofs/skellam.md)",
)
LEAST_VARIANCE = 100.0  # below it the proof says nothing

_ROUNDING = 1 / 12  # variance that rounding adds to a Gaussian
_OUTWARD = 1 + 1e-14  # more than the rounding errors of a few operations
_LEAST = 1e-300  # stands for a divergence that underflows


def divergence_from_gaussian(variance: float) -> float:
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
    """The Gaussian release that Skellam noise on so many coordinates is close to, and how far from it; rounded up.

    Arguments:
        sensitivity: of the sum of whole numbers, in L2.
        coordinates: how many the sum has.
        variance: of Skellam's noise in each coordinate.

    Guarantees:
        Not known (`NotApplicable`) below a variance of 100.
    """
    _validate.positive(sensitivity=sensitivity, coordinates=coordinates)
    total_divergence = coordinates * divergence_from_gaussian(variance)
    mu = sensitivity / math.sqrt(variance - _ROUNDING) * _OUTWARD
    return NearGaussian(mu, total_divergence * _OUTWARD, SKELLAM, SkellamDraws(coordinates, variance))
