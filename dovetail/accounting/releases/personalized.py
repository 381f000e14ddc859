"""Shuffling reports with unequal public budgets: what each user gets from the others.

`pairs.personal` says who hides whom, by clones and by a blanket, as one dominating pair per group of users with similar
budgets. Which user is the victim is fixed but unknown, so the worst group counts.
"""

from __future__ import annotations

import contextlib
import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import loss_distributions, numerics
from dovetail.accounting.loss_distributions import PRIVACY_LOSS, Loss
from dovetail.accounting.pairs import personal, symmetric
from dovetail.accounting.pairs.blanket_pair import BLANKETS
from dovetail.accounting.pairs.personal import budget_range, budgets_of, users_by_budget
from dovetail.accounting.pairs.symmetric import SymmetricPair
from dovetail.accounting.releases import crowds
from dovetail.accounting.releases._base import Curve, Release, Sampling, Scale, releases
from dovetail.accounting.search import smallest_eps
from dovetail.events import Everyone, Personalized
from dovetail.statements import Bound, NotApplicable, Proof, Theorem

__all__ = ["CLONES", "bounds_per_user", "delta", "eps", "pairs", "renyi"]

CLONES = Theorem(
    key="dovetail.personalized-clones",
    where="personalised clones (docs/proofs/personalized-clones.md, after Feldman, McMillan, Talwar 2023)",
    url="https://arxiv.org/abs/2208.04591",
)
_HIDING = Proof(theorems=(CLONES, BLANKETS))
_CLEARLY = 0.98  # ratio at which a loss is clearly smaller
_LITTLE = 1.001  # ratio at which a loss is a little larger
_MOST_HALVED = 8  # groups that are split further
_WORTH = 0.9995  # ratio of losses at which a split pays
_TAILS = (1.0, 16.0, 128.0)  # Renyi orders by which the largest loss is found, of few coordinates
_FEWEST = 4  # groups of users that are told an eps each
_GROUPS = (  # (up to so many users, so many groups)
    (1_000, 16),
    (20_000, 10),
    (math.inf, _FEWEST),
)


def _groups_of_victims(event: Personalized, victim: int | None) -> tuple[np.ndarray, ...]:
    """Groups of users, as indices, of whom one may be the victim: this one alone, or (None) everybody."""
    if victim is None:
        return personal.victim_groups(event)
    _validate.in_interval(0, len(event.eps_locals) - 1, victim=victim)
    return (np.array([victim]),)


def pairs(event: Personalized, victim: int | None = None) -> tuple[SymmetricPair, ...]:
    """A dominating pair of all coordinates for each group of users: of this victim, or (None) of everybody.

    Groups whose loss is clearly not the largest are asked at fewer eps. A pair that another one dominates, or would if
    it were a little larger, is left out.
    """
    return _pairs_by_group(event, victim)


@functools.lru_cache(maxsize=16)
def _pairs_by_group(event: Personalized, victim: int | None) -> tuple[SymmetricPair, ...]:
    """`pairs`, kept: first roughly for every group, then exactly for those whose loss may be the largest."""
    groups = list(_groups_of_victims(event, victim))
    if len(groups) == 1:
        return (personal.pair(event, groups[0]),)
    rough = [personal.pair(event, members, coarse=True) for members in groups]
    _halve_worst_group(event, groups, rough)
    worst = max(pair.std_loss for pair in rough)
    results: list[SymmetricPair] = []
    first = 0.0
    for index in np.argsort([-pair.std_loss for pair in rough]).tolist():
        pair = rough[index]
        if pair.std_loss > _CLEARLY * worst:
            pair = personal.pair(event, groups[index])
        if any(other.dominates(pair) for other in results):
            continue
        if results and event.coordinates >= symmetric.MANY_FOLDS:  # of many folds the tails do not matter
            both = symmetric.upper_envelope(results[0], pair)
            if both.std_loss <= _LITTLE * first:
                results[0] = both
                continue
        first = first or pair.std_loss
        results.append(pair)
    return tuple(results)


def _halve_worst_group(event: Personalized, groups: list[np.ndarray], pairs: list[SymmetricPair]) -> None:
    """Split the group with the largest loss, in place, as long as that makes the largest loss clearly smaller.

    `pairs` are those of the groups, in the same order.
    """
    orders = _TAILS if event.coordinates < symmetric.MANY_FOLDS else _TAILS[:1]
    for order in orders:
        for _ in range(_MOST_HALVED):
            worst = max(range(len(groups)), key=lambda index: _std_of_one_fold(pairs[index], order))
            halves = personal.halve_group(event, groups[worst])
            if len(halves) == 1:
                break
            halved = [personal.pair(event, members, coarse=True) for members in halves]
            if max(_std_of_one_fold(pair, order) for pair in halved) > _WORTH * _std_of_one_fold(pairs[worst], order):
                break
            groups[worst : worst + 1], pairs[worst : worst + 1] = halves, halved


def _std_of_one_fold(pair: SymmetricPair, order: float) -> float:
    """About the std of one fold's loss; at orders above 1 that of a Gaussian loss with the same Renyi divergence.

    The larger the order, the more the tail counts. To compare groups by, never for a bound.
    """
    return pair.std_loss if order == 1 else math.sqrt(2 * float(pair.one_fold().renyi(np.array([order]))[0]) / order)


def delta(event: Personalized, *, eps: float, victim: int | None = None) -> float:
    """delta at eps of one coordinate, rounded up: of this victim, or (None) the largest of all users."""
    _validate.non_negative(eps=eps)
    return max(
        numerics.as_probability_bound(personal.delta_curve(event, members)(eps))
        for members in _groups_of_victims(event, victim)
    )


def renyi(event: Personalized, orders: np.ndarray, victim: int | None = None) -> np.ndarray:
    """Renyi divergence of all coordinates, rounded up: of this victim, or (None) the largest, order by order.

    Infinite at orders that are not finite or not above 1.
    """
    orders = np.asarray(orders, dtype=float)
    usable = np.isfinite(orders) & (orders > 1)
    divergences = np.full(len(orders), np.inf)
    try:
        divergences[usable] = np.max([pair.renyi(orders[usable]) for pair in pairs(event, victim)], axis=0)
    except NotApplicable:  # budgets beyond all crowds: no divergence is above the largest loss
        divergences[usable] = _pure_eps(event, victim)
    return divergences


def eps(event: Personalized, *, delta: float, victim: int | None = None) -> Bound:
    """eps at delta over all coordinates: of this victim, or (None) the maximum over users.

    Arguments:
        event: one round.
        delta: at which eps is asked for.
        victim: the index of a user.

    Guarantees:
        Never below the exact value (brute force at small n), and never above the local guarantee.
        The maximum is at least every user's own bound, up to the grid's error.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    if event.coordinates == 1:
        return _eps_of_one_coordinate(event, delta, victim)
    try:
        value = min(_pure_eps(event, victim), max(_eps_of_rounds(pair, delta) for pair in pairs(event, victim)))
    except NotApplicable:
        return Bound(eps=_pure_eps(event, victim), delta=delta, proof=crowds.LOCAL.proof)
    return Bound(eps=value, delta=delta, proof=_HIDING.then(PRIVACY_LOSS))


def _pure_eps(event: Personalized, victim: int | None) -> float:
    """The pure eps that holds without a crowd: the largest budget, times the coordinates."""
    budgets = event.eps_locals if victim is None else event.eps_locals[victim : victim + 1]
    return event.coordinates * max(budgets)


def _eps_of_one_coordinate(event: Personalized, delta: float, victim: int | None) -> Bound:
    """The eps at delta of one coordinate: by the curve of delta itself, which is tighter than a pair made from it.

    The worst group is halved as long as its users differ.
    """

    def eps_of(members: np.ndarray) -> tuple[float, np.ndarray]:
        _, top = budget_range(event, members)
        return smallest_eps(personal.delta_curve(event, members), delta=delta, high=top, tolerance=1e-7), members

    answers = [eps_of(members) for members in _groups_of_victims(event, victim)]
    while True:
        worst = max(range(len(answers)), key=lambda index: answers[index][0])
        halves = personal.halve_group(event, answers[worst][1])
        if len(halves) == 1:
            return Bound(eps=answers[worst][0], delta=delta, proof=_HIDING)
        answers[worst : worst + 1] = [eps_of(half) for half in halves]


def _eps_of_rounds(pair: SymmetricPair, delta: float, times: int = 1) -> float:
    """The eps of so many rounds of all folds of a pair, never above that of all reports without a crowd."""
    loss = symmetric.repeated_loss(pair, times)
    return min(times * pair.folds * pair.eps_pure, loss_distributions.worst_eps([loss], delta=delta))


def bounds_per_user(event: Personalized, *, delta: float, times: int = 1) -> tuple[Bound, ...]:
    """eps at delta over all coordinates of so many rounds, for every user; users of similar budgets share a bound.

    Arguments:
        event: one round.
        delta: at which every user's eps is asked for.
        times: how many rounds there are.

    Guarantees:
        Holds for every user; within 2 % of, or above, `eps(event, delta=delta, victim=user)`.
    """
    answers = np.empty(len(event.eps_locals), dtype=object)
    for members, bound in _bounds_by_group(event, delta, times):
        answers[members] = bound
    return tuple(answers)


@functools.lru_cache(maxsize=16)
def _bounds_by_group(event: Personalized, delta: float, times: int) -> tuple[tuple[np.ndarray, Bound], ...]:
    """Groups of users of similar budgets, and what holds for each of a group."""
    _validate.in_open_interval(0, 1, delta=delta)
    budgets = budgets_of(event)
    order = users_by_budget(event)
    ordered = budgets[order]
    low, high = float(ordered[0]), float(ordered[-1])
    count = _FEWEST if event.threshold else next(many for most, many in _GROUPS if len(order) <= most)
    edges = np.geomspace(low, high, count + 1)[1:-1] if high > low else np.empty(0)
    answers = []
    for members in np.split(order, np.unique(np.searchsorted(ordered, edges, side="right"))):
        if len(members):
            alone = times * event.coordinates * float(budgets[members[-1]])
            bound = Bound(eps=alone, delta=delta, proof=crowds.LOCAL.proof)
            with contextlib.suppress(NotApplicable):
                hidden = _eps_of_rounds(personal.pair(event, members, coarse=True), delta, times)
                bound = Bound(eps=min(alone, hidden), delta=delta, proof=_HIDING.then(PRIVACY_LOSS))
            answers.append((members, bound))
    return tuple(answers)


@releases(Personalized)
class PersonalizedRelease(Release[Personalized]):
    """Reports with personal budgets, for every user at once."""

    orders = crowds.ORDERS

    @property
    def theorem(self) -> Theorem:
        """`BLANKETS`, which names the clones beside the blankets."""
        return BLANKETS

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """The largest Renyi divergence of any user at every order, rounded up; refuses samples of users."""
        return renyi(self.event, np.asarray(orders)) if sampling == Everyone() else super().renyi(sampling, orders)

    def losses(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The losses with everyone, rounded up: one for every group of users that the victim may be in."""
        if sampling != Everyone():
            return super().losses(sampling, interval)
        return tuple(symmetric.folded_loss(pair, interval=interval) for pair in pairs(self.event))

    def losses_rounded_down(self, sampling: Sampling, interval: float) -> tuple[Loss, ...]:
        """The losses of the same pairs with everyone, rounded down: lower ends of what these *pairs* give."""
        if sampling != Everyone():
            return super().losses_rounded_down(sampling, interval)
        return tuple(symmetric.loss_rounded_down(pair, interval=interval) for pair in pairs(self.event))

    @property
    def resolution(self) -> float:
        """The interval that a round should be composed on for the victim with the largest loss."""
        return symmetric.composition_interval(max(pairs(self.event), key=lambda pair: pair.std_loss))

    def loss_scale(self, sampling: Sampling) -> Scale:
        """About the std of all coordinates and the width of one, for the victim with the largest loss."""
        worst = max(pairs(self.event), key=lambda pair: pair.std_loss)
        return Scale(std=worst.std_loss * math.sqrt(worst.folds), width=worst.eps_pure, sums=1)

    @property
    def pure_eps(self) -> float:
        """The largest budget, times the coordinates: the local guarantee, which shuffling cannot worsen."""
        return _pure_eps(self.event, None)

    def equal_rounds(self, sampling: Sampling, times: int) -> Curve:
        """The curve of one coordinate in one round, which need not compose and is tighter; refuses anything more."""
        if sampling != Everyone() or times * self.event.coordinates != 1:
            raise NotApplicable("the curve itself is of one coordinate and one round, with no sampling of users")
        return Curve(
            proof=_HIDING,
            eps=lambda at: eps(self.event, delta=at).eps,
            delta=lambda at: delta(self.event, eps=at),
            best=frozenset({"eps"}),
        )

    def eps_per_user(self, times: int, *, delta: float) -> tuple[float, ...]:
        """Every user's eps after so many rounds, in the users' order; never above its budget for all of them."""
        answers = np.empty(len(self.event.eps_locals))
        for members, bound in _bounds_by_group(self.event, delta, times):
            answers[members] = bound.eps
        return tuple(answers.tolist())

    def local_bound(self, *, delta: float) -> Bound:
        """The pure eps of the reports of the user with the largest budget, seen with its name on them."""
        return Bound(eps=self.pure_eps, delta=0.0, proof=crowds.LOCAL.proof)
