"""Gaussian and Laplace noise, by dp-accounting; and releases that promise nothing, or show nothing.

dp-accounting's two accountants disagree on what a noise multiplier means under replacement (one doubles the
sensitivity, the other does not). Our events carry the sensitivity of their own relation; this file translates.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

from dovetail.accounting import loss_distributions
from dovetail.accounting._dp_accounting import dp_event, pld, privacy_accountant, rdp
from dovetail.accounting.gaussian import gaussian_losses
from dovetail.accounting.loss_distributions import Loss
from dovetail.accounting.releases._base import INTERVAL, Release, Sampling, Scale, releases
from dovetail.accounting.streams import CORRELATED, amplification_of_uploads
from dovetail.events import (
    CorrelatedGaussian,
    CorrelatedSum,
    DataIndependent,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    NonPrivate,
    Participation,
    Poisson,
    ReplacedUsers,
    Round,
    SampledSubject,
    Separated,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = [
    "MOST_LOSSES",
    "CorrelatedGaussianRelease",
    "CorrelatedRelease",
    "CorrelatedStream",
    "GaussianRelease",
    "LaplaceRelease",
    "NonPrivateRelease",
    "StreamRelease",
    "UnrelatedRelease",
]

_LOG_ERROR = 1e-12  # more than dp-accounting's error in the logarithm of a sum
_LARGEST_MU = 1000.0  # beyond, eps is in the hundreds of thousands, and losses are too many to tell apart
MOST_LOSSES = 2**20  # points that the loss of one release may take
_UP = 1 + 1e-15  # rounds up a product or quotient of two numbers
_PARTS = 20  # intervals to one eps_each
_MANY = 100_000  # queries, of which more have a coarser grid
_FEW_PARTS = 5  # intervals to one eps_each for many queries


@releases(Gaussian)
class GaussianRelease(Release[Gaussian]):
    """A vector with Gaussian noise; users that are sampled hide better."""

    @property
    def mu(self) -> float:  # type: ignore[override]
        """Sensitivity over standard deviation, the one number that its privacy depends on."""
        return self.event.mu

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Its Renyi divergence, rounded up; infinite at orders where dp-accounting knows none, and without noise.

        Known with everyone under any relation, on Poisson samples for adding or removing a user, and on samples of
        fixed size for replacing one; other samples are refused.
        """
        if self.event.std == 0:
            return np.full(len(orders), np.inf)
        noise = dp_event.GaussianDpEvent(1 / self.event.mu)
        match self.event.neighbors, sampling:
            case _, Everyone():
                return _renyi_by_dp_accounting(noise, orders)
            case Neighbors.ADD_REMOVE, Poisson(prob=prob):
                return _renyi_by_dp_accounting(dp_event.PoissonSampledDpEvent(prob, noise), orders)
            case Neighbors.REPLACE_ONE, FixedSize(size=size, population=population):
                return _renyi_by_dp_accounting(
                    dp_event.SampledWithoutReplacementDpEvent(population, size, noise), orders, add_remove=False
                )
        return super().renyi(sampling, orders)

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The loss of one release, rounded up: with everyone, on Poisson samples, and on samples of fixed size.

        The last only for replacing a user. Refuses mu = 0 and mu above `_LARGEST_MU` (so, too, releases without noise).
        The spliced profile of a sample of fixed size is, at eps >= 0, that of a user that a Poisson sample may have,
        and symmetric (docs/proofs/fixed-size.md).
        """
        add_remove = self.event.neighbors is Neighbors.ADD_REMOVE
        spliced = isinstance(sampling, FixedSize)
        if not 0 < self.event.mu <= _LARGEST_MU or (add_remove and spliced):
            return super().losses(sampling, interval)
        add_remove |= spliced
        loss = gaussian_losses(
            self.event.std,
            sensitivity=self.event.sensitivity if add_remove else self.event.sensitivity / 2,  # which it doubles again
            prob=_prob_sampled(sampling),
            add_remove=add_remove,
            interval=interval,
        )
        loss = loss_distributions.from_dp_accounting(loss)
        return (loss_distributions.symmetrize(loss) if spliced else loss,)

    def full_round_covers_known_sample(self, sampling: Sampling) -> bool:
        """True for replacing a user, and on Poisson samples.

        A user that is added or removed may change which others are in a sample of fixed size.
        """
        return self.neighbors is Neighbors.REPLACE_ONE or isinstance(sampling, Poisson)

    @property
    def resolution(self) -> float:
        """The usual interval, or a coarser one where the loss is so wide that its points would be too many."""
        mu = min(self.event.mu, _LARGEST_MU)
        return max(INTERVAL, mu * (mu + 20) / MOST_LOSSES) if self.event.std > 0 else INTERVAL

    def loss_scale(self, sampling: Sampling) -> Scale | None:
        """About the std and the width of its loss; None without noise.

        Where a user is drawn with probability q, the std is at most about q sqrt(e^(mu^2) - 1).
        """
        if not self.event.std > 0:
            return None
        mu, prob = self.event.mu, _prob_sampled(sampling)
        std = mu if prob == 1 else min(mu, prob * math.sqrt(math.expm1(min(mu, 10.0) ** 2)))
        return Scale(std=max(std, 1e-15), width=max(mu * mu + 20 * mu, 1e-15), sums=1)

    def of_users(self, participation: Participation, users: int) -> Round | None:
        """The release of this many users who change together; None without noise on a sample.

        With everyone their shifts add up: the sensitivity grows by `users`, rounded up. On a sample only those of them
        count that are drawn: a `SampledSubject` where they come or go, `ReplacedUsers` where they are replaced.
        """
        noise = self.event
        match participation:
            case FixedSize(size=size, population=population) if size < population:
                return self._of_replaced_users(participation, min(users, population))
            case Poisson(prob=prob) if 0 < prob < 1:
                if noise.neighbors is Neighbors.REPLACE_ONE:
                    return self._of_replaced_users(participation, users)
                if not noise.std > 0:
                    return None
                joined = SampledSubject(
                    std=noise.std, clip_norm=noise.sensitivity, items=users, prob_item=prob, users_spanned=users
                )
                return Round(mechanism=joined, participation=Everyone())
        sensitivity = noise.sensitivity * users * _UP
        return Round(mechanism=dataclasses.replace(noise, sensitivity=sensitivity), participation=participation)

    def _of_replaced_users(self, participation: Participation, users: int) -> Round | None:
        """A sampled round in which so many users are replaced at once; None under add-remove, or without noise.

        Under replacement the sensitivity is twice the clip norm.
        """
        noise = self.event
        if noise.neighbors is not Neighbors.REPLACE_ONE or not noise.std > 0:
            return None
        together = ReplacedUsers(std=noise.std, clip_norm=noise.sensitivity / 2, users=users)
        return Round(mechanism=together, participation=participation)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorrelatedStream(Gaussian):
    """All rounds of a stream with correlated noise, as the one Gaussian release that they are."""


@releases(CorrelatedStream)
class StreamRelease(GaussianRelease):
    """A Gaussian release that rests on one more theorem: that a stream is one, of at most this sensitivity."""

    is_tight = False

    @property
    def theorem(self) -> Theorem:
        """That correlated noise on a stream is the Gaussian mechanism on C X."""
        return CORRELATED


_Correlated = TypeVar("_Correlated", bound=CorrelatedGaussian | CorrelatedSum)


class CorrelatedRelease(Release[_Correlated]):
    """One round of a stream with correlated noise: it has no privacy of its own, only the whole stream has."""

    mixes_in_stream = False
    stream: type[CorrelatedStream]  # the event of all rounds together

    @property
    @abc.abstractmethod
    def unrounded(self) -> CorrelatedGaussian:
        """The round in real numbers, which shows no less."""

    def check_disjoint_batches(self) -> None:
        """Refuse epochs of disjoint batches: what a batch's noise hides depends on the rounds beside it."""
        raise NotApplicable("correlated noise is accounted for over its whole stream, by cohort.kind = 'separated'")

    def fold_stream(self, schedule: Separated) -> tuple[CorrelatedStream, int]:
        """One Gaussian release for the whole stream: all uploads of one user move C X by no more than that."""
        noise = self.unrounded
        factor = amplification_of_uploads(
            noise.coefficients, schedule.rounds, schedule.most_uploads, schedule.separation
        )
        if not noise.sensitivity * factor < math.inf:
            raise NotApplicable("the coefficients of the correlated noise make its sensitivity overflow")
        sensitivity = noise.sensitivity * factor * _UP
        return self.stream(std=noise.std, sensitivity=sensitivity, neighbors=noise.neighbors), 1

    def _description(self, sampling: Sampling) -> str:
        return f"one round of correlated noise by itself, with {type(sampling).__name__} participation"


@releases(CorrelatedGaussian)
class CorrelatedGaussianRelease(CorrelatedRelease[CorrelatedGaussian]):
    """One round of a curator's stream."""

    stream = CorrelatedStream

    @property
    def unrounded(self) -> CorrelatedGaussian:
        """The event itself."""
        return self.event

    def of_users(self, participation: Participation, users: int) -> Round | None:
        """The release of this many users who change together: their shifts add up, each by its own schedule."""
        if not isinstance(participation, Separated):
            return None
        sensitivity = self.event.sensitivity * users * _UP
        return Round(mechanism=dataclasses.replace(self.event, sensitivity=sensitivity), participation=participation)


@releases(Laplace)
class LaplaceRelease(Release[Laplace]):
    """`count` scalar queries on the same unit, each with Laplace noise."""

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """The Renyi divergence of all queries together with everyone, rounded up; refuses samples."""
        if not isinstance(sampling, Everyone):
            return super().renyi(sampling, orders)
        query = dp_event.LaplaceDpEvent(self.event.scale / self.event.sensitivity)
        return self.event.count * _renyi_by_dp_accounting(query, orders)

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The loss of all queries together with everyone, rounded up; refuses samples."""
        if not isinstance(sampling, Everyone):
            return super().losses(sampling, interval)
        loss = pld.from_laplace_mechanism(
            self.event.scale, sensitivity=self.event.sensitivity, value_discretization_interval=interval
        )
        return (loss_distributions.self_compose(loss_distributions.from_dp_accounting(loss), self.event.count),)

    def full_round_covers_known_sample(self, sampling: Sampling) -> bool:
        """True for replacing a user, and on Poisson samples, as for Gaussian noise."""
        return self.neighbors is Neighbors.REPLACE_ONE or isinstance(sampling, Poisson)

    @property
    def resolution(self) -> float:
        """A fixed part of eps_each, and no less than the usual interval.

        Rounding up costs the square of the interval over eps_each, and only where a loss lies between the two largest.
        """
        parts = _PARTS if self.event.count < _MANY else _FEW_PARTS
        return max(INTERVAL, self.event.eps_each / parts)

    @property
    def pure_eps(self) -> float:
        """The eps of all queries together, by basic composition."""
        return self.event.count * self.event.eps_each


@releases(NonPrivate)
class NonPrivateRelease(Release[NonPrivate]):
    """A release without a guarantee: whatever contains it promises nothing."""

    @property
    def refusal(self) -> str:  # type: ignore[override]
        """The reason that the event itself gives."""
        return self.event.reason

    def _description(self, sampling: Sampling) -> str:
        return f"a release without a guarantee: {self.event.reason}"


@releases(DataIndependent)
class UnrelatedRelease(Release[DataIndependent]):
    """A release that has the same distribution whatever the data are.

    It has no divergence or loss here, only a `local` guarantee.
    """

    def local_bound(self, *, delta: float) -> Bound:
        """(0, 0): a client's part does not depend on its data."""
        return Bound(
            eps=0.0, delta=0.0, proof=Theorem(key="none shown", where=f"data independence: {self.event.reason}").proof
        )


def _prob_sampled(sampling: Sampling) -> float:
    """How probably a user is drawn, rounded up where that is a quotient of two numbers; 1 with everyone."""
    return min(1.0, sampling.prob_drawn * _UP) if isinstance(sampling, FixedSize) else sampling.prob_drawn


def _neighboring_relation(add_remove: bool) -> privacy_accountant.NeighboringRelation:
    relations = privacy_accountant.NeighboringRelation
    return relations.ADD_OR_REMOVE_ONE if add_remove else relations.REPLACE_ONE


def _renyi_by_dp_accounting(
    event: dp_event.DpEvent, orders: tuple[float, ...], *, add_remove: bool = True
) -> np.ndarray:
    """dp-accounting's Renyi divergences at these orders, rounded up; infinite where it gives none.

    Those of sampled releases are logarithms of sums, right to about 1e-13: where little is lost they may be negative.
    """
    accountant = rdp.RdpAccountant(orders=orders, neighboring_relation=_neighboring_relation(add_remove))
    with _silence_order_warnings(), np.errstate(all="ignore"):
        try:
            divergences = np.asarray(accountant.compose(event).rdp, dtype=float)
        except ValueError:  # the logarithm of what underflowed
            return np.full(len(orders), np.inf)
    sampled = (dp_event.PoissonSampledDpEvent, dp_event.SampledWithoutReplacementDpEvent)
    error = _LOG_ERROR / (np.asarray(orders) - 1) if isinstance(event, sampled) else 0.0
    outward = np.maximum(divergences, 0.0) * (1 + _LOG_ERROR) + error
    return np.where(np.isfinite(divergences) & (divergences >= -error), outward, np.inf)


@contextlib.contextmanager
def _silence_order_warnings() -> Iterator[None]:
    """Silence dp-accounting's warnings about orders that it leaves out, which cost tightness and nothing else."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
