"""Subjects with several items, in the data of one user or of many: mixtures of Gaussians.

Item gradients are clipped one by one, sampled, summed and noised. A subject with X_j items of user j in the sample
shifts a sum over all users by at most X_1 + X_2 + ... clip norms, and users' own noisy sums, all seen together, by at
most sqrt(X_1^2 + X_2^2 + ...). A release is thus a mixture of Gaussians over the law of that shift, and only that law
matters: the scalar mixture dominates (Choquette-Choo, Ganesh, Steinke, Thakurta 2023; docs/proofs/subjects.md has this
and all that follows). The law must match the sampling:

- federation-wide Poisson sampling of items, one noise: Bin(items, prob_item);
- the same with noise at every user: the norm of independent Bin(items_per_user, prob_item), one for each user;
- users first, then items within a user, one noise: a subject's items at one user arrive together, and the shift is a
  sum over the users it spans of Bern(prob_user) times Bin(its items there, prob_item), whose worst split is searched.

Neighbours add or remove one subject, at most `items` items; a cap on items is public and enforced by truncation.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import gaussian, loss_distributions, numerics
from dovetail.accounting.loss_distributions import PRIVACY_LOSS, Loss, LossDistribution
from dovetail.accounting.pairs import mixtures
from dovetail.accounting.pairs.mixtures import ShiftLaw
from dovetail.accounting.releases._base import Release, Sampling, Scale, releases
from dovetail.events import Everyone, Gaussian, Poisson, Round, SampledSubject
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = [
    "MIXTURE",
    "delta",
    "eps",
    "gaussian_if_all_sampled",
    "gaussian_of_users_together",
    "law_of_items_in_sum",
    "law_of_shift",
    "loss_std_and_width",
    "losses",
    "resolution",
    "splits_to_check",
]

MIXTURE = Theorem(
    key="CGST23.mixture",
    where="mixture of Gaussians over the number of the subject's items in the sum (Choquette-Choo, Ganesh, Steinke, "
    "Thakurta 2023; docs/proofs/subjects.md)",
    url="https://arxiv.org/abs/2310.15526",
)

_MOST_SPLITS = 64  # ways to spread a subject's items over users that are looked at one by one


def splits_to_check(event: SampledSubject) -> list[tuple[int, ...]]:
    """The ways to spread a subject's items over users that must be looked at.

    Arguments:
        event: whose caps say how the subject's items may be spread.

    Returns: for each way the positive numbers of items at each of its users. One of them is at least as bad as any way
        that the caps allow.
    """
    if event.prob_user == 1:
        return [_worst_split(event)]
    if event.noise == "user":
        raise NotApplicable("with noise at every user it is seen who takes part, so sampling users hides nobody")
    if event.steps > 1:
        raise NotApplicable("the steps of a round share the users that take part: no law of all of them is known")
    results: list[tuple[int, ...]] = []

    def spread(items_left: int, largest: int, parts: tuple[int, ...]) -> None:
        if items_left == 0:
            results.append(parts)
        elif items_left <= (event.most_users - len(parts)) * largest:
            for part in range(min(items_left, largest), 0, -1):
                spread(items_left - part, part, (*parts, part))
                if len(results) > _MOST_SPLITS:
                    return

    spread(event.most_items, event.most_at_user, ())
    if len(results) > _MOST_SPLITS:
        raise NotApplicable(
            f"{event.items} items over {event.users_spanned} users split in more than {_MOST_SPLITS} ways, and which "
            "is the worst is not known: sample items federation-wide, or cap lower"
        )
    return results


def _worst_split(event: SampledSubject) -> tuple[int, ...]:
    """One split that dominates every other, where items are sampled one by one: numbers of items at each user.

    All items at one user dominate. With noise at every user, so do as many at each user as fit; the tighter of the two
    is guessed from the mean square of the shift.
    """
    together = (event.most_items,)
    full = (event.most_at_user,) * event.most_users
    if event.noise == "sum":
        return together

    def mean_square(split: tuple[int, ...]) -> float:
        return sum(k * event.prob_item * (1 - event.prob_item) + (k * event.prob_item) ** 2 for k in split)

    return min(full, together, key=mean_square)


def law_of_items_in_sum(event: SampledSubject, split: tuple[int, ...]) -> np.ndarray:
    """The law of how many of the subject's items are in one sum, when its users hold these numbers of them.

    Returns: the probabilities of 0, 1, ..., `most_items` items; their sum is 1 up to rounding.
    """
    if sum(split) != event.most_items or min(split) < 1:
        raise ValueError(f"expected a split of items={event.most_items} over users, got split={split}")
    law = np.ones(1)
    for items in split:
        here = event.prob_user * numerics.binomial_pmf(np.arange(items + 1), items, event.prob_item)
        here[0] += 1 - event.prob_user
        law = np.convolve(law, here)
    return law / law.sum()


def law_of_shift(event: SampledSubject, split: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The law of the shift of one sum, in clip norms, for a split of `splits_to_check`.

    Arguments:
        event: one release.
        split: how many items each of the subject's users holds.

    Returns: the possible shifts, rising from 0 and rounded up, and their probabilities.
    """
    if event.noise == "sum" or len(split) == 1:
        law = law_of_items_in_sum(event, split)
        return np.arange(len(law), dtype=float), law
    squares = np.ones(1)
    for items in split:
        here = numerics.binomial_pmf(np.arange(items + 1), items, event.prob_item)
        next_squares = np.zeros(len(squares) + items**2)
        for count, mass in enumerate(here):
            next_squares[count**2 : count**2 + len(squares)] += mass * squares
        squares = next_squares
    possible = np.flatnonzero(squares)
    return np.sqrt(possible) * (1 + 1e-15), squares[possible] / squares.sum()


def gaussian_if_all_sampled(event: SampledSubject) -> Gaussian | None:
    """The Gaussian release that a round is when every item is in every sum; None if items are sampled."""
    if event.prob_item < 1 or event.prob_user < 1:
        return None
    full, rest = divmod(event.most_items, event.most_at_user)
    most = event.most_items if event.noise == "sum" else math.sqrt(full * event.most_at_user**2 + rest**2)
    shift = most * math.sqrt(event.steps) * (1 + 1e-15)
    return Gaussian(std=event.std, sensitivity=event.clip_norm * shift, neighbors=Neighbors.ADD_REMOVE)


def gaussian_of_users_together(event: Gaussian, *, users: int) -> Gaussian:
    """The release of `users` users together, each with noise of its own, to a subject with data at all of them.

    The subject shifts every one of these sums, whose noises are independent: the squares of their mu add up, and mu
    grows by sqrt(users), rounded up.

    Arguments:
        event: the release of one user's sum.
        users: how many of them hold data of the subject.
    """
    _validate.integer(users=users)
    _validate.at_least(1, users=users)
    return dataclasses.replace(event, sensitivity=event.sensitivity * math.sqrt(users) * (1 + 1e-15))


def eps(event: SampledSubject, *, rounds: int, delta: float, interval: float | None = None) -> Bound:
    """The smallest eps of `rounds` rounds of such sums for one subject, on a grid of losses that suits them.

    Guarantees:
        Non-decreasing in users' and items' probabilities, rounds and 1/std, and with one noise in items and users.
        One item is the Poisson-sampled Gaussian; items that are always sampled are the Gaussian of `items` clip norms.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    _check_rounds(rounds)
    plain = gaussian_if_all_sampled(event)
    if plain is not None:
        exact = gaussian.eps_of(plain.mu * math.sqrt(rounds) * (1 + 1e-15), delta=delta)
        return Bound(eps=exact, delta=delta, proof=gaussian.ANALYTIC.proof)
    value = loss_distributions.worst_eps(_compose_rounds(event, rounds, interval), delta=delta)
    return Bound(eps=value, delta=delta, proof=MIXTURE.proof.then(PRIVACY_LOSS))


def delta(event: SampledSubject, *, rounds: int, eps: float, interval: float | None = None) -> float:
    """The smallest delta of `rounds` rounds of such sums at eps for one subject, rounded up."""
    _validate.non_negative(eps=eps)
    _check_rounds(rounds)
    plain = gaussian_if_all_sampled(event)
    if plain is not None:
        return gaussian.delta_of(plain.mu * math.sqrt(rounds) * (1 + 1e-15), eps=eps)
    return loss_distributions.worst_delta(_compose_rounds(event, rounds, interval), eps=eps)


def losses(event: SampledSubject, *, interval: float) -> tuple[Loss, ...]:
    """The privacy loss of one round of such sums, rounded up to multiples of `interval`: one for every split.

    A subject's split is the same in every round, so many rounds compose within a split, and the worst split counts.
    """
    _validate.positive(interval=interval)
    one_step = dataclasses.replace(event, steps=1)
    step_losses = (_loss_of_split(one_step, split, interval) for split in splits_to_check(event))
    return tuple(
        loss_distributions.self_compose(loss, event.steps) if event.steps > 1 else loss for loss in step_losses
    )


def loss_std_and_width(event: SampledSubject) -> tuple[float, float]:
    """About the std and the width of the loss of one of the sums: the narrowest std and the largest width of a split.

    To choose a grid by, never for a bound.
    """
    one_step = dataclasses.replace(event, steps=1)
    scales = [_shift_law(one_step, split).std_and_width_of_loss for split in splits_to_check(event)]
    return min(std for std, _ in scales), max(width for _, width in scales)


def resolution(event: SampledSubject, *, rounds: int = 1) -> float:
    """The interval of privacy losses that one sum should be composed on with all sums of so many rounds."""
    std, width = loss_std_and_width(event)
    return mixtures.interval_for(std, width, num_releases=rounds * event.steps)


@functools.lru_cache(maxsize=128)
def _compose_rounds(event: SampledSubject, rounds: int, interval: float | None) -> tuple[Loss, ...]:
    """The loss of so many rounds for every split; on the interval of `resolution` if none is given."""
    grid = resolution(event, rounds=rounds) if interval is None else interval
    return tuple(loss_distributions.self_compose(loss, rounds) for loss in losses(event, interval=grid))


@functools.lru_cache(maxsize=512)
def _shift_law(event: SampledSubject, split: tuple[int, ...]) -> ShiftLaw:
    """The law of the shift of one sum in standard deviations of the noise."""
    norms, law = law_of_shift(event, split)
    return ShiftLaw.dominating(norms * (event.clip_norm / event.std), law)


@functools.lru_cache(maxsize=512)
def _loss_of_split(event: SampledSubject, split: tuple[int, ...], interval: float) -> LossDistribution:
    """The loss of one sum for this split, rounded up.

    Where users are drawn first and hold others' records, it is seen which of them are drawn: a mixture over that.
    """
    if event.prob_user == 1 or event.alone:
        return mixtures.loss(_shift_law(event, split), interval=interval)

    def loss_of(items: int) -> LossDistribution | None:
        if not items:
            return None
        there = dataclasses.replace(event, items=items, prob_user=1.0, items_per_user=None)
        return mixtures.loss(_shift_law(there, (items,)), interval=interval)

    law = _law_of_items_at_sampled_users(event, split)
    return loss_distributions.loss_of_mixture(
        [(weight, loss_of(items)) for items, weight in law.items()], interval=interval
    )


def _law_of_items_at_sampled_users(event: SampledSubject, split: tuple[int, ...]) -> dict[int, float]:
    """The law of how many of the subject's items are at users that were drawn: number -> probability."""
    law = {0: 1.0}
    for here in split:
        next_law: dict[int, float] = {}
        for items, mass in law.items():
            next_law[items] = next_law.get(items, 0.0) + mass * (1 - event.prob_user)
            next_law[items + here] = next_law.get(items + here, 0.0) + mass * event.prob_user
        law = next_law
    return law


def _check_rounds(rounds: int) -> None:
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)


@releases(SampledSubject)
class SubjectRelease(Release[SampledSubject]):
    """Noisy sums, accounted for a subject with several items in them."""

    theorem = MIXTURE
    concerns_subjects = True

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The loss of one round, rounded up, for every split of the subject's items.

        Items are sampled within the event: users take part in every round, and samples of users are refused.
        """
        return losses(self.event, interval=interval) if sampling == Everyone() else super().losses(sampling, interval)

    @property
    def resolution(self) -> float:
        """The interval that one round alone should be composed on."""
        return resolution(self.event)

    def loss_scale(self, sampling: Sampling) -> Scale:
        """The narrowest std and the largest width of a split, about, for each of the `steps` sums of a round."""
        std, width = loss_std_and_width(self.event)
        return Scale(std=std, width=width, sums=self.event.steps)

    def simplify(self, sampling: Sampling) -> Gaussian | SampledSubject:
        """The same as a Gaussian release where every item is in every sum; otherwise the event itself."""
        plain = gaussian_if_all_sampled(self.event) if sampling == Everyone() else None
        return self.event if plain is None else plain

    def check_disjoint_batches(self) -> None:
        """Always refuses: batches are of users, and a subject may have data at several of them."""
        raise NotApplicable("a subject may have data at users of several disjoint batches of an epoch")

    def of_subject(self, *, items: int, users: int, items_per_user: int | None) -> SampledSubject:
        """The same sums for a subject with these numbers of items and users."""
        return dataclasses.replace(self.event, items=items, users_spanned=users, items_per_user=items_per_user)

    def of_replaced_item(self) -> list[Round]:
        """One Gaussian round under replacement for each of the `steps`.

        A record and the one that takes its place join a sum with the same probability. Refused where users are drawn
        first.
        """
        event = self.event
        if event.prob_user != 1:
            raise NotApplicable("users are sampled first, so all records of a user are sampled together")
        noise = Gaussian(std=event.std, sensitivity=2 * event.clip_norm, neighbors=Neighbors.REPLACE_ONE)
        return [Round(mechanism=noise, participation=Poisson(prob=event.prob_item))] * event.steps
