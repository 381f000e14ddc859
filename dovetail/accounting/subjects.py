"""Subjects with several items, in the data of one user or of many: mixtures of Gaussians.

Item gradients are clipped one by one, sampled, summed and noised. A subject with K of its items in the sum shifts it by
at most K clip norms, so the release is a mixture of Gaussians over the law of K, and only that law matters: the scalar
mixture dominates (Choquette-Choo, Ganesh, Steinke, Thakurta 2023). It must match the sampling:

- federation-wide Poisson sampling of items: K ~ Bin(items, prob_item);
- users first, then items within a user: a subject's items in one user arrive together, and K is a sum over the users it
  spans of Bern(prob_user) times Bin(its items there, prob_item), whose worst split over users is searched.

Noise added by every user apart is another matter: aligned gradients at s users multiply mu by sqrt(s) (`spanning`).
Neighbours add or remove one subject, at most `items` items; a cap on items is public and enforced by truncation.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy.stats import binom

from dovetail import _validate
from dovetail.events import Gaussian, SampledSubject
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = ["MIXTURE", "delta", "eps", "items_in_sum", "losses", "resolution", "spanning", "splits"]

MIXTURE = Theorem(
    key="CGST23.mixture",
    where="mixture of Gaussians over the number of the subject's items in the sum (Choquette-Choo, Ganesh, Steinke, "
    "Thakurta 2023)",
    url="https://arxiv.org/abs/2310.15526",
)

_MOST_SPLITS = 64
_OUTWARD = 1 + 1e-9


def splits(event: SampledSubject) -> list[tuple[int, ...]]:
    """Every way to spread the subject's items over at most `users_spanned` users, that matters to the law of K."""
    if event.prob_user == 1:
        return [(event.items,)]
    found: list[tuple[int, ...]] = []

    def spread(left: int, largest: int, parts: tuple[int, ...]) -> None:
        if left == 0:
            found.append(parts)
        elif len(parts) < event.users_spanned:
            for part in range(min(left, largest), 0, -1):
                spread(left - part, part, (*parts, part))
                if len(found) > _MOST_SPLITS:
                    return

    spread(event.items, event.items, ())
    if len(found) > _MOST_SPLITS:
        raise NotApplicable(
            f"{event.items} items over {event.users_spanned} users split in more than {_MOST_SPLITS} ways, and which "
            "is the worst is not known: sample items federation-wide, or cap lower"
        )
    return found


def items_in_sum(event: SampledSubject, split: tuple[int, ...]) -> np.ndarray:
    """The probabilities of 0, 1, ... of the subject's items in the sum, when its users hold these numbers of them."""
    if sum(split) != event.items or min(split) < 1:
        raise ValueError(f"expected a split of items={event.items} over users, got split={split}")
    law = np.ones(1)
    for items in split:
        here = event.prob_user * binom.pmf(np.arange(items + 1), items, event.prob_item)
        here[0] += 1 - event.prob_user
        law = np.convolve(law, here)
    return law / law.sum()


def eps(event: SampledSubject, *, rounds: int, delta: float, interval: float = 2e-3) -> Bound:
    """The smallest eps of `rounds` such sums for one subject.

    Guarantees:
        Non-decreasing in items, users' and items' probabilities, rounds and 1/std.
        One item is the Poisson-sampled Gaussian; items that are always sampled are the Gaussian of `items` clip norms.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    found = (float(loss.get_epsilon_for_delta(delta)) for loss in _composed(event, rounds, interval))
    where = f"{MIXTURE.where}, composed as a privacy-loss distribution, rounded up"
    theorem = Theorem(key=MIXTURE.key, where=where, url=MIXTURE.url)
    return Bound(eps=max(0.0, *found) * _OUTWARD, delta=delta, theorem=theorem)


def delta(event: SampledSubject, *, rounds: int, eps: float, interval: float = 2e-3) -> float:
    """The smallest delta of `rounds` such sums at eps for one subject."""
    _validate.non_negative(eps=eps)
    found = (float(loss.get_delta_for_epsilon(eps)) for loss in _composed(event, rounds, interval))
    return min(1.0, max(0.0, *found) * _OUTWARD)


def losses(event: SampledSubject, *, interval: float) -> tuple[pld.PrivacyLossDistribution, ...]:
    """The privacy loss of one such sum for every split of the subject's items, on multiples of `interval`.

    A subject's split is the same in every round, so many rounds compose within a split, and the worst split counts.
    """
    _validate.positive(interval=interval)
    return tuple(_loss(event, split, interval) for split in splits(event))


def resolution(event: SampledSubject) -> float:
    """An interval of privacy losses that resolves the mean shift of one sum, and is not too slow."""
    shift = event.items * event.clip_norm / event.std
    return min(2e-3, max(shift * event.prob_item * event.prob_user / 4, shift / 4000))


@functools.lru_cache(maxsize=128)
def _composed(event: SampledSubject, rounds: int, interval: float) -> tuple[pld.PrivacyLossDistribution, ...]:
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    return tuple(one.self_compose(rounds) for one in losses(event, interval=interval))


@functools.lru_cache(maxsize=128)
def _loss(event: SampledSubject, split: tuple[int, ...], interval: float) -> pld.PrivacyLossDistribution:
    law = items_in_sum(event, split)
    return pld.from_mixture_gaussian_mechanism(
        event.std / event.clip_norm, list(range(len(law))), law.tolist(), value_discretization_interval=interval
    )


def spanning(event: Gaussian, *, users: int) -> Gaussian:
    """The release of `users` users together, each with noise of its own, to a subject with data at all of them.

    Its gradients may be aligned, so their shifts add up like the sides of a cube: mu grows by sqrt(users).
    """
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    return dataclasses.replace(event, sensitivity=event.sensitivity * math.sqrt(users) * (1 + 1e-15))
