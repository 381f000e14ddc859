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
from dovetail.events import Gaussian
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = ["MIXTURE", "SampledSubject", "delta", "eps", "items_in_sum", "spanning", "splits"]

MIXTURE = Theorem(
    key="CGST23.mixture",
    where="mixture of Gaussians over the number of the subject's items in the sum (Choquette-Choo, Ganesh, Steinke, "
    "Thakurta 2023), composed as a privacy-loss distribution, rounded up",
    url="https://arxiv.org/abs/2310.15526",
)

_MOST_SPLITS = 64
_OUTWARD = 1 + 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSubject:
    """One noisy sum of clipped item gradients, seen from a subject with at most `items` items at `users_spanned` users.

    `prob_user` = 1 is federation-wide Poisson sampling of items, each with `prob_item`.
    """

    std: float
    clip_norm: float
    items: int
    prob_item: float
    prob_user: float = 1.0
    users_spanned: int = 1

    def __post_init__(self) -> None:
        _validate.positive(std=self.std, clip_norm=self.clip_norm, prob_item=self.prob_item, prob_user=self.prob_user)
        _validate.at_most(1, prob_item=self.prob_item, prob_user=self.prob_user)
        _validate.integer(items=self.items, users_spanned=self.users_spanned)
        _validate.at_least(1, items=self.items, users_spanned=self.users_spanned)

    @property
    def neighbors(self) -> Neighbors:
        """Subjects are added or removed."""
        return Neighbors.ADD_REMOVE


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
    found = (float(_loss(event, split, rounds, interval).get_epsilon_for_delta(delta)) for split in splits(event))
    return Bound(eps=max(0.0, *found) * _OUTWARD, delta=delta, theorem=MIXTURE)


def delta(event: SampledSubject, *, rounds: int, eps: float, interval: float = 2e-3) -> float:
    """The smallest delta of `rounds` such sums at eps for one subject."""
    _validate.non_negative(eps=eps)
    found = (float(_loss(event, split, rounds, interval).get_delta_for_epsilon(eps)) for split in splits(event))
    return min(1.0, max(0.0, *found) * _OUTWARD)


@functools.lru_cache(maxsize=128)
def _loss(event: SampledSubject, split: tuple[int, ...], rounds: int, interval: float) -> pld.PrivacyLossDistribution:
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    return _one_loss(event, split, interval).self_compose(rounds)


@functools.lru_cache(maxsize=128)
def _one_loss(event: SampledSubject, split: tuple[int, ...], interval: float) -> pld.PrivacyLossDistribution:
    _validate.positive(interval=interval)
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
