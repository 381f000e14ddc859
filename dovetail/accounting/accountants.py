"""The composition theorems: each turns what one user pays for into a curve of eps and delta.

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss;
- `privacy_loss` and `renyi`: numerical privacy-loss distributions and Renyi orders, of every release in `releases`;
- `personal`: rounds with personal budgets, for every user at once;
- `sampled_shuffles`: shuffled rounds on secret samples of the users;
- `pure`: basic composition, the only one that needs no delta.

An accountant raises `NotApplicable` where its theorem does not reach. What releases spend of delta beside their noise
is taken from the whole (`charges.spent_delta`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dovetail.accounting import (
    conversion,
    gaussian,
    loss_distributions,
    mixtures,
    numerics,
    pairs,
    personalized,
    releases,
    split_and_mix,
    subsampling,
)
from dovetail.accounting.calibrate import eps_after_spending, smallest_delta
from dovetail.accounting.charges import Charge, spent_delta
from dovetail.accounting.conversion import RENYI
from dovetail.accounting.loss_distributions import PRIVACY_LOSS
from dovetail.events import (
    Crowd,
    Everyone,
    FixedSize,
    Gaussian,
    Personalized,
    Poisson,
    SampledSubject,
    SplitAndMix,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = ["Curve", "exact_gaussian", "personal", "privacy_loss", "pure", "renyi", "sampled_shuffles"]

RENYI_POISSON = Theorem(
    key="MTZ19.sec3",
    where="Renyi divergence of the Poisson-sampled Gaussian (Mironov, Talwar, Zhang 2019, Sec. 3), " + RENYI.where,
    url="https://arxiv.org/abs/1908.10530",
)
RENYI_FIXED_SIZE = Theorem(
    key="WBK19.thm27",
    where="Renyi divergence under fixed-size sampling (Wang, Balle, Kasiviswanathan 2019, Thm. 27), " + RENYI.where,
    url="https://arxiv.org/abs/1808.00087",
)
PRIVACY_LOSS_REPLACE = Theorem(
    key="dovetail.poisson-replacement",
    where="the dominating pair of docs/proofs/poisson-replacement.md, " + PRIVACY_LOSS.where,
    url=PRIVACY_LOSS.url,
)

_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 65)) + (80, 96, 128, 192, 256, 384, 512, 1024)
_WHOLE_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)  # where sampled releases cost little to compute
_OUTWARD = 1 + 1e-9
_MOST_CASES = 64  # ways in which subjects may be spread over users that are composed one by one
_DEVIATIONS, _MOST_LOSSES = 40, 2**24  # of a sum that is resolved, and the points that it may take
_FEW = 4  # different releases that are composed on the finest grid
_TINIEST = 1e-300  # a delta that underflows is not 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The privacy of a composition by one theorem: eps at a delta, and delta at an eps."""

    theorem: Theorem
    eps: Callable[[float], float]
    delta: Callable[[float], float]


def exact_gaussian(paid: Sequence[Charge]) -> Curve:
    """Gaussian releases in which nobody is sampled: exact."""
    shifts = []
    for charge in paid:
        if not isinstance(charge.mechanism, Gaussian) or not isinstance(charge.sampling, Everyone):
            raise NotApplicable("the exact Gaussian formula needs Gaussian noise and no sampling of users")
        shifts.append(charge.mechanism.mu * math.sqrt(charge.times))
    mu = max(math.hypot(*shifts) * (1 + 1e-15 * (len(shifts) + 4)), _TINIEST)
    return Curve(
        theorem=gaussian.ANALYTIC,
        eps=lambda delta: gaussian.eps_of(mu, delta=_proper(delta)),
        delta=lambda eps: gaussian.delta_of(mu, eps=eps),
    )


def renyi(paid: Sequence[Charge]) -> Curve:
    """Renyi orders, added up and converted."""
    orders = _orders(paid)
    total = np.zeros(len(orders))
    theorem = RENYI
    for charge in paid:
        total += charge.times * releases.renyi(charge.mechanism, charge.sampling, orders)
        if isinstance(charge.sampling, Poisson):
            theorem = RENYI_POISSON
        elif isinstance(charge.sampling, FixedSize):
            theorem = RENYI_FIXED_SIZE
    usable = np.isfinite(total) & (total >= 0)
    if not usable.any():
        raise NotApplicable("no Renyi order is finite for this composition")
    at, total = np.asarray(orders)[usable], total[usable]
    curve = Curve(
        theorem=_named(paid, theorem),
        eps=lambda delta: conversion.eps_of(at, total, delta=_proper(delta)) * _OUTWARD,
        delta=lambda eps: numerics.probability(conversion.delta_of(at, total, eps=eps) * _OUTWARD),
    )
    return _after_spending(paid, curve)


def _orders(paid: Sequence[Charge]) -> tuple[float, ...]:
    """Orders at which these charges are known best."""
    if not all(isinstance(charge.mechanism, Crowd | Personalized | SplitAndMix) for charge in paid):
        sampled = sum(not isinstance(charge.sampling, Everyone) for charge in paid)
        return _ORDERS if sampled <= _FEW else _WHOLE_ORDERS
    by_shares = any(isinstance(charge.mechanism, SplitAndMix) for charge in paid)
    return tuple(split_and_mix.ORDERS if by_shares else pairs.ORDERS)


def privacy_loss(paid: Sequence[Charge]) -> Curve:
    """Numerical privacy-loss distributions, convolved on one grid.

    Where a release has several possible losses, so does the composition, and the worst counts. Different releases are
    combined in every way, also in those that no one subject can bring about.
    """
    grid = _grid(paid)
    possible = [releases.losses(charge.mechanism, charge.sampling, grid) for charge in paid]
    cases = math.prod(len(losses) for losses in possible)
    if cases > _MOST_CASES:
        raise NotApplicable(f"the items of a subject may be spread in {cases} ways, more than {_MOST_CASES}")
    parts = [
        [loss_distributions.copies(one, charge.times) if charge.times > 1 else one for one in losses]
        for charge, losses in zip(paid, possible, strict=True)
    ]
    totals = [loss_distributions.together(case) for case in itertools.product(*parts)]
    replaced = any(
        isinstance(c.sampling, Poisson) and getattr(c.mechanism, "neighbors", None) is Neighbors.REPLACE_ONE
        for c in paid
    )
    curve = Curve(
        theorem=_named(paid, PRIVACY_LOSS_REPLACE if replaced else PRIVACY_LOSS),
        eps=lambda delta: loss_distributions.worst_eps(totals, delta=_proper(delta)),
        delta=lambda eps: loss_distributions.worst_delta(totals, eps=eps),
    )
    return _after_spending(paid, curve)


def _grid(paid: Sequence[Charge]) -> float:
    """One interval of losses for all.

    A few different releases are composed on the finest that one of them asks for. Noisy sums over subjects, or with
    many different noises and sampling rates, on one that resolves their mean square loss, to which a grid adds.
    """
    subject = any(isinstance(charge.mechanism, SampledSubject) for charge in paid)
    if not subject and len(paid) <= _FEW:
        finest = min(releases.resolution(charge.mechanism) for charge in paid)
        scales = [(charge.times, releases.scale(charge.mechanism, charge.sampling)) for charge in paid]
        known = [(times, scale) for times, scale in scales if scale is not None]
        spread = math.hypot(*(min(scale.std, 1e6) * math.sqrt(times) for times, scale in known))
        widest = max((min(scale.width, 1e12) for _, scale in known), default=0.0)
        least = max(spread * _DEVIATIONS / _MOST_LOSSES, widest / releases.MOST_LOSSES)
        coarser = max(1.0, least / finest * (1 - 1e-9))
        return finest * 2.0 ** math.ceil(math.log2(coarser))
    squares, widest, count = 0.0, 0.0, 0
    others = []
    for charge in paid:
        scale = releases.scale(charge.mechanism, charge.sampling)
        if scale is None:
            others.append(releases.resolution(charge.mechanism))
        else:
            squares += charge.times * scale.sums * scale.std**2
            widest, count = max(widest, scale.width), count + charge.times * scale.sums
    if not count:
        return min(others)
    return min([mixtures.interval_for(math.sqrt(squares / count), widest, releases=count), *others])


def personal(paid: Sequence[Charge]) -> Curve:
    """Equal rounds of personal budgets: exact for one coordinate, Renyi at refined orders for more."""
    if len(paid) != 1 or not isinstance(paid[0].mechanism, Personalized) or not isinstance(paid[0].sampling, Everyone):
        raise NotApplicable("personalised clones need equal rounds with personal budgets and no sampling of users")
    event = paid[0].mechanism
    whole = dataclasses.replace(event, coordinates=event.coordinates * paid[0].times)

    def eps(delta: float) -> float:
        return personalized.eps(whole, delta=_proper(delta)).eps

    return Curve(
        theorem=personalized.CLONES if whole.coordinates == 1 else personalized.CLONES_RENYI,
        eps=eps,
        delta=lambda target: (
            numerics.probability(personalized.delta(whole, eps=target))
            if whole.coordinates == 1
            else smallest_delta(eps, eps=target)
        ),
    )


def sampled_shuffles(paid: Sequence[Charge]) -> Curve:
    """Equal shuffled rounds on secret fixed-size samples: Lemma 4 for each, optimal composition of all."""
    if len(paid) != 1 or not isinstance(paid[0].mechanism, Crowd) or not isinstance(paid[0].sampling, FixedSize):
        raise NotApplicable("Lemma 4 needs equal shuffled rounds on fixed-size samples of the users")
    event, sampling, times = paid[0].mechanism, paid[0].sampling, paid[0].times
    if event.num_users != sampling.size:
        raise NotApplicable(f"the rounds shuffle {event.num_users} users, but {sampling.size} are drawn")
    prob = min(1.0, sampling.size / (sampling.population - event.colluders))

    def bound(delta: float) -> Bound:
        one = pairs.eps(event, delta=min(0.5, _proper(delta) / (2 * times * prob)))
        return subsampling.optimal([subsampling.sampled(one, sampling, colluders=event.colluders)] * times, delta=delta)

    theorem = _named(paid, subsampling.OPTIMAL)
    return Curve(
        theorem=theorem,
        eps=lambda delta: bound(delta).eps,
        delta=lambda eps: smallest_delta(lambda delta: bound(delta).eps, eps=eps),
    )


def pure(paid: Sequence[Charge]) -> Curve:
    """Basic composition of pure mechanisms."""
    terms = []
    for charge in paid:
        if not isinstance(charge.sampling, Everyone):
            raise NotApplicable("basic composition without delta needs pure mechanisms and no sampling of users")
        terms.append(charge.times * releases.pure_eps(charge.mechanism))
    total = math.fsum(terms) * (1 + 1e-15 * (len(terms) + 4))
    return Curve(theorem=subsampling.BASIC, eps=lambda delta: total, delta=lambda eps: 0.0 if eps >= total else 1.0)


def _after_spending(paid: Sequence[Charge], curve: Curve) -> Curve:
    """The same curve for the whole delta, of which the rounds have spent some already."""

    def spent(eps: float) -> float:
        return spent_delta(paid, eps=eps)

    at_least = spent(0.0)
    if not at_least:
        return curve

    def eps(delta: float) -> float:
        if delta <= at_least:
            raise NotApplicable(
                f"not certified: of delta={delta}, {at_least:.3g} would be spent on overflowing coordinates and on "
                "imperfect mixing"
            )
        return eps_after_spending(curve.eps, spent, delta=_proper(delta))

    return Curve(theorem=curve.theorem, eps=eps, delta=lambda eps: numerics.probability(curve.delta(eps) + spent(eps)))


def _named(paid: Sequence[Charge], theorem: Theorem) -> Theorem:
    """The theorem with those that gave the releases' divergences."""
    found = (releases.theorem(charge.mechanism) for charge in paid)
    used = list(dict.fromkeys(item for item in found if item is not None))
    if not used:
        return theorem
    where = "; ".join([*(item.where for item in used), theorem.where])
    return Theorem(key=f"{used[0].key}+{theorem.key}", where=where, url=used[0].url)


def _proper(delta: float) -> float:
    if not 0 < delta < 1:
        raise NotApplicable(f"this theorem needs 0 < delta < 1, got delta={delta}")
    return delta
