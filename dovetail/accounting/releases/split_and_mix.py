"""Split-and-mix: a sum over untrusted shufflers with the noise of a curator (Balle et al. 2020; Agarwal et al. 2021).

Vectors are clipped to `clip_norm`, scaled and rounded to integers of bounded norm (`rounded_norm`). Each client adds
its part of a Skellam noise of variance `noise_variance`, splits every coordinate into additive shares modulo `modulus`,
and each slot of shares is permuted freshly, coordinate by coordinate. Ideally only the sum is seen, at the price of
a Gaussian and of Skellam's distance from it (`skellam_distance`), or of Skellam's Renyi divergence, whichever is less.
The shuffled shares of a coordinate are within `mixing.eta` of that ideal in total variation, which adds
``(1 + e^eps) d eta`` to delta for each round: both neighbours are d eta away from their ideals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import numpy as np

from dovetail import _validate
from dovetail.accounting import gaussian, near_gaussian, numerics
from dovetail.accounting.conversion import RENYI, delta_of, eps_of
from dovetail.accounting.near_gaussian import NearGaussian
from dovetail.accounting.releases import skellam_sums
from dovetail.accounting.releases._base import releases
from dovetail.accounting.releases.mixing import eta, modulus_for, rounded_norm, shares_for
from dovetail.accounting.releases.skellam_sums import ORDERS, SkellamRelease, _skellam, near, renyi
from dovetail.accounting.search import eps_after_spending, smallest_noise
from dovetail.events import SplitAndMix
from dovetail.statements import Bound, Neighbors, NotApplicable, Spent, Theorem

__all__ = [
    "ORDERS",
    "REMOVED",
    "SPLIT_AND_MIX",
    "calibrate",
    "delta",
    "eps",
    "modulus_for",
    "near",
    "renyi",
    "rounded_norm",
    "shares_for",
    "spent_delta",
]

SPLIT_AND_MIX = Theorem(
    key="dovetail.split-and-mix",
    where="Skellam noise (Agarwal, Kairouz, Liu 2021) over additive shares mixed slot by slot (after Balle, Bell, "
    "Gascon, Nissim 2020; exact second moment)",
    url="https://arxiv.org/abs/2002.00817",
)
REMOVED = dataclasses.replace(
    SPLIT_AND_MIX,
    key="dovetail.split-and-mix-removed",
    where=f"{SPLIT_AND_MIX.where}; for users that are removed, docs/proofs/removed-users.md",
)

_OUTWARD = 1 + 1e-9
_LEAST = 1e-300  # stands for a distance that underflows
_CLIMB = 1 - 4e-5  # more than `eps_after_spending` may go beyond the smallest eps


def spent_delta(event: SplitAndMix, eps: float) -> float:
    """What imperfect mixing adds to delta at the eps of the whole composition, for one round: (1 + e^eps) d eta.

    Guarantees:
        1 where the colluding shufflers leave too few slots: then only the client's own noise remains.
    """
    _validate.non_negative(eps=eps)
    distance = eta(num_users=event.honest, slots=event.slots, modulus=event.modulus)
    log_spent = float(np.logaddexp(0.0, eps)) + math.log(event.coordinates) + math.log(max(distance, _LEAST))
    return numerics.probability(math.exp(min(0.0, log_spent)) * _OUTWARD)


def delta(event: SplitAndMix, *, eps: float, rounds: int = 1) -> float:
    """A delta at which so many rounds are (eps, delta)-DP against the analyzer and its colluders."""
    _at_least_one(rounds)
    noise = delta_of(ORDERS, rounds * renyi(event, ORDERS), eps=eps) * _OUTWARD
    with contextlib.suppress(NotApplicable):
        near_all = near(event).repeated(rounds)
        far = near_gaussian.spent_delta(near_all.divergence, eps=eps)
        noise = min(noise, gaussian.delta_of(near_all.mu, eps=eps) + far)
        noise = min(noise, _delta_by_ratio(near_all, eps))
    return numerics.probability(noise + rounds * spent_delta(event, eps))


def eps(event: SplitAndMix, *, delta: float, rounds: int = 1) -> Bound:
    """The smallest eps of so many rounds at delta, with what imperfect mixing spends in each.

    Guarantees:
        Non-decreasing in rounds; equal to what `composition` finds for the same rounds.
        The smallest of three routes: by the ratio of Skellam noise to a Gaussian's, by their distance, and by Skellam's
        Renyi divergence.
    """
    _at_least_one(rounds)
    found, refusals = [], []
    for route in (_by_ratio, _by_distance, _by_renyi):
        try:
            found.append(route(event, delta, rounds))
        except NotApplicable as refusal:
            refusals.append(refusal)
    if not found:
        raise refusals[-1]
    return min(found, key=lambda bound: bound.eps)


def _theorem(event: SplitAndMix) -> Theorem:
    return SPLIT_AND_MIX if event.neighbors is Neighbors.REPLACE_ONE else REMOVED


def _by_renyi(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    divergence = rounds * renyi(event, ORDERS)
    value = eps_after_spending(
        lambda left: _eps(divergence, left), lambda eps: rounds * spent_delta(event, eps), delta=delta
    )
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(RENYI))


def _by_ratio(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    near_all = near(event).repeated(rounds)
    value = _ratio_eps(near_all, delta, lambda eps: rounds * spent_delta(event, eps))
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(skellam_sums.SKELLAM, gaussian.ANALYTIC))


def _by_distance(event: SplitAndMix, delta: float, rounds: int) -> Bound:
    near_all = near(event).repeated(rounds)
    value = _near_eps(near_all, delta, lambda eps: rounds * spent_delta(event, eps))
    return Bound(eps=value, delta=delta, proof=_theorem(event).proof.then(skellam_sums.SKELLAM, gaussian.ANALYTIC))


def _near_eps(near_all: NearGaussian, delta: float, spent: Callable[[float], float] = lambda _: 0.0) -> float:
    """eps at delta by a Gaussian and a distance from it, with what else is spent at an eps."""
    return eps_after_spending(
        lambda left: gaussian.eps_of(near_all.mu, delta=left),
        lambda eps: spent(eps) + near_gaussian.spent_delta(near_all.divergence, eps=eps),
        delta=delta,
    )


def _ratio_eps(near_all: NearGaussian, delta: float, spent: Callable[[float], float] = lambda _: 0.0) -> float:
    """eps at delta by a Gaussian and the ratio of the noise to it."""
    draws = () if near_all.draws is None else (near_all.draws,)
    return near_gaussian.eps_by_ratio(
        lambda left: gaussian.eps_of(near_all.mu, delta=left), draws, delta=delta, spent=spent
    )


def _delta_by_ratio(near_all: NearGaussian, eps: float) -> float:
    draws = () if near_all.draws is None else (near_all.draws,)
    return near_gaussian.delta_by_ratio(lambda at: gaussian.delta_of(near_all.mu, eps=at), draws, eps=eps)


def _at_least_one(rounds: int) -> None:
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)


def _eps(divergence: np.ndarray, delta: float) -> float:
    return eps_of(ORDERS, divergence, delta=delta) * _OUTWARD


def calibrate(
    *,
    num_users: int,
    coordinates: int,
    clip_norm: float,
    eps: float,
    delta: float,
    rounds: int = 1,
    colluders: int = 0,
    rounding_loss: float = 5e-4,
    mixing_share: float = 1e-3,
    neighbors: Neighbors = Neighbors.REPLACE_ONE,
) -> SplitAndMix:
    """The parameters with which so many rounds meet (eps, delta): noise, scale, modulus (a power of two), shares.

    The scale makes rounding inflate norms by about `rounding_loss`, then fills the modulus. `mixing_share` of delta
    goes to imperfect mixing, in all rounds together. No slot is assumed to collude: add shares for those that may.

    Guarantees:
        `split_and_mix.eps(result, delta=delta, rounds=rounds).eps` is at most eps.
    """
    _at_least_one(rounds)
    _validate.positive(eps=eps, clip_norm=clip_norm)
    _validate.in_open_interval(0, 1, delta=delta, mixing_share=mixing_share, rounding_loss=rounding_loss)

    def at(scale: float) -> SplitAndMix:
        norm = rounded_norm(clip_norm=clip_norm, scale=scale, coordinates=coordinates, rounding_tail=1e-3)
        goal, reach = delta * (1 - mixing_share) * (1 - 1e-9), norm * (2 if neighbors is Neighbors.REPLACE_ONE else 1)

        def eps_of(noise: float) -> float:
            variance = (noise * norm) ** 2
            known = [_eps(rounds * _skellam(reach, coordinates, variance, ORDERS), goal)]
            for route in (_ratio_eps, _near_eps):
                with contextlib.suppress(NotApplicable):
                    one = skellam_sums.near_gaussian(sensitivity=reach, coordinates=coordinates, variance=variance)
                    known.append(route(one.repeated(rounds), goal) / _CLIMB)
            return min(known)

        variance = (smallest_noise(eps_of, eps=eps) * norm) ** 2
        everyone = variance * num_users / (num_users - colluders)
        needed = modulus_for(num_users=num_users, norm=norm, noise_variance=everyone)
        return SplitAndMix(
            num_users=num_users,
            coordinates=coordinates,
            clip_norm=clip_norm,
            scale=scale,
            noise_variance=variance,
            modulus=needed,
            shares=1,
            colluders=colluders,
            neighbors=neighbors,
        )

    scale = math.sqrt(coordinates / 8 / rounding_loss) / clip_norm
    found = at(scale)
    modulus = 1 << (found.modulus - 1).bit_length()
    larger = scale * modulus / found.modulus  # about what fills the modulus: norms grow with the scale
    while larger > scale and (filled := at(larger)).modulus > modulus:
        larger *= 0.995
    found = filled if larger > scale else found
    target = delta * mixing_share / (rounds * coordinates * (1 + math.exp(eps)) * (1 + 1e-8))
    shares = shares_for(num_users=found.honest, modulus=modulus, target=target)
    return dataclasses.replace(found, modulus=modulus, shares=shares)


@releases(SplitAndMix)
class SplitAndMixRelease(SkellamRelease[SplitAndMix]):
    """A sum by mixed shares: Skellam noise, and the distance of the shares from their ideal."""

    @property
    def theorem(self) -> Theorem:
        """That of the sum, and what it means to be removed."""
        return _theorem(self.event)

    def spent(self, eps: float) -> tuple[Spent, ...]:
        """The more, the larger the eps of the whole is."""
        return (Spent(spent_delta(self.event, eps), "imperfect mixing of shares"),)
