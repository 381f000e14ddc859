"""Many rounds, one statement: composition of noisy releases.

The accountants read the charges of `charges`, each raising `NotApplicable` where its theorem does not reach, and the
smallest bound is kept:

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss;
- `privacy_loss` and `renyi`: numerical privacy-loss distributions and Renyi orders, of every release in `releases`;
- `personal`: rounds with personal budgets, for every user at once;
- `sampled_shuffles`: shuffled rounds on secret samples of the users;
- `pure`: basic composition, the only one that needs no delta.

What releases spend of delta beside their noise is taken from the whole (`charges.spent_delta`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from dovetail import _validate
from dovetail.accounting import gaussian, pairs, personalized, releases, split_and_mix, subsampling
from dovetail.accounting.calibrate import eps_after_spending
from dovetail.accounting.charges import Charge, charges, spent_delta
from dovetail.events import (
    Crowd,
    Everyone,
    FixedSize,
    Gaussian,
    NonPrivate,
    Personalized,
    Poisson,
    Round,
    SampledSubject,
    SplitAndMix,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = [
    "ACCOUNTANTS",
    "Curve",
    "best_bound",
    "bound",
    "exact_gaussian",
    "fits",
    "personal",
    "privacy_loss",
    "pure",
    "renyi",
    "sampled_shuffles",
]

RENYI = Theorem(
    key="CKS20.prop12",
    where="Renyi composition (Mironov 2017, Prop. 1), conversion by Canonne, Kamath, Steinke (2020), Prop. 12",
    url="https://arxiv.org/abs/2004.00010",
)
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
PRIVACY_LOSS = Theorem(
    key="DGKMPS22",
    where="privacy-loss distributions, rounded up (Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022)",
    url="https://arxiv.org/abs/2207.04380",
)
PRIVACY_LOSS_REPLACE = Theorem(
    key="dovetail.poisson-replacement",
    where="the dominating pair of docs/proofs/poisson-replacement.md, " + PRIVACY_LOSS.where,
    url=PRIVACY_LOSS.url,
)
PURE = Theorem(key="DR14.thm3.16", where="basic composition (Dwork, Roth 2014, Thm. 3.16)")

_ORDERS = tuple(1 + x / 10 for x in range(1, 100)) + tuple(range(11, 65)) + (80, 96, 128, 192, 256, 384, 512, 1024)
_OUTWARD = 1 + 1e-9
_MOST_CASES = 64  # ways in which subjects may be spread over users that are composed one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The privacy of a composition by one theorem: eps at a delta, and delta at an eps."""

    theorem: Theorem
    eps: Callable[[float], float]
    delta: Callable[[float], float]


def fits(rounds: Sequence[Round], *, eps: float, delta: float) -> bool:
    """Whether some accountant certifies these rounds at (eps, delta); the cheap ones are asked first."""
    _validate.in_interval(0, 1, delta=delta)
    if any(isinstance(item.mechanism, NonPrivate) for item in rounds):
        return False
    paid = charges(rounds)
    for accountant in (exact_gaussian, renyi, pure, sampled_shuffles, privacy_loss):
        try:
            if not paid or accountant(paid).eps(delta) <= eps:
                return True
        except NotApplicable:
            continue
    return False


def bound(rounds: Sequence[Round], *, delta: float) -> Bound:
    """The smallest certified eps of these rounds, without the rest of a statement: for calibration."""
    _validate.in_interval(0, 1, delta=delta)
    for item in rounds:
        if isinstance(item.mechanism, NonPrivate):
            return Bound(eps=math.inf, delta=delta, theorem=Theorem(key="none", where=item.mechanism.reason))
    return best_bound(charges(rounds), delta=delta)


def best_bound(paid: Sequence[Charge], *, delta: float) -> Bound:
    """The smallest eps that an applicable accountant gives; `NotApplicable` with every reason if none applies."""
    if not paid:
        return Bound(eps=0.0, delta=0.0, theorem=PURE)
    bounds, reasons = [], []
    for accountant in ACCOUNTANTS:
        try:
            curve = accountant(paid)
            bounds.append(Bound(eps=curve.eps(delta), delta=delta, theorem=curve.theorem))
        except NotApplicable as error:
            reasons.append(str(error))
        else:
            if accountant in (exact_gaussian, personal):
                break
    if not bounds:
        raise NotApplicable("; ".join(reasons))
    return min(bounds, key=lambda bound: bound.eps)


def exact_gaussian(paid: Sequence[Charge]) -> Curve:
    """Gaussian releases in which nobody is sampled: exact."""
    squares = []
    for charge in paid:
        if not isinstance(charge.mechanism, Gaussian) or not isinstance(charge.sampling, Everyone):
            raise NotApplicable("the exact Gaussian formula needs Gaussian noise and no sampling of users")
        squares.append(charge.times * charge.mechanism.mu**2)
    mu = math.sqrt(math.fsum(squares)) * (1 + 1e-15 * (len(squares) + 4))
    return Curve(
        theorem=gaussian.ANALYTIC,
        eps=lambda delta: gaussian.eps_of(mu, delta=_proper(delta)),
        delta=lambda eps: gaussian.delta_of(mu, eps=eps),
    )


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
                f"not certified: of delta={delta}, {at_least:.3g} would be spent on reports that meet a full "
                "coordinate and on imperfect mixing"
            )
        return eps_after_spending(curve.eps, spent, delta=_proper(delta))

    return Curve(theorem=curve.theorem, eps=eps, delta=lambda eps: min(1.0, curve.delta(eps) + spent(eps)))


def _named(paid: Sequence[Charge], theorem: Theorem) -> Theorem:
    """The theorem with those that gave the releases' divergences."""
    found = (releases.theorem(charge.mechanism) for charge in paid)
    used = list(dict.fromkeys(item for item in found if item is not None))
    if not used:
        return theorem
    where = "; ".join([*(item.where for item in used), theorem.where])
    return Theorem(key=f"{used[0].key}+{theorem.key}", where=where, url=used[0].url)


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
    usable = np.isfinite(total)
    if not usable.any():
        raise NotApplicable("no Renyi order is finite for this composition")
    at, total = np.asarray(orders)[usable], total[usable]
    curve = Curve(
        theorem=_named(paid, theorem),
        eps=lambda delta: float(rdp.compute_epsilon(at, total, _proper(delta))[0]) * _OUTWARD,
        delta=lambda eps: min(1.0, float(rdp.compute_delta(at, total, eps)[0]) * _OUTWARD),
    )
    return _after_spending(paid, curve)


def _orders(paid: Sequence[Charge]) -> tuple[float, ...]:
    """Orders at which these charges are known best."""
    if not all(isinstance(charge.mechanism, Crowd | Personalized | SplitAndMix) for charge in paid):
        return _ORDERS
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
    parts = [[one.self_compose(charge.times) for one in losses] for charge, losses in zip(paid, possible, strict=True)]
    totals = [functools.reduce(lambda a, b: a.compose(b), case) for case in itertools.product(*parts)]
    replaced = any(
        isinstance(c.sampling, Poisson) and getattr(c.mechanism, "neighbors", None) is Neighbors.REPLACE_ONE
        for c in paid
    )

    def eps(delta: float) -> float:
        return max(0.0, *(float(total.get_epsilon_for_delta(_proper(delta))) for total in totals)) * _OUTWARD

    def delta(eps: float) -> float:
        return min(1.0, max(float(total.get_delta_for_epsilon(eps)) for total in totals) * _OUTWARD)

    theorem = _named(paid, PRIVACY_LOSS_REPLACE if replaced else PRIVACY_LOSS)
    return _after_spending(paid, Curve(theorem=theorem, eps=eps, delta=delta))


def _grid(paid: Sequence[Charge]) -> float:
    """One interval for all: the finest, unless subjects are among them, whose losses are slow to compute."""
    subjects = [releases.resolution(c.mechanism) for c in paid if isinstance(c.mechanism, SampledSubject)]
    return min(subjects) if subjects else min(releases.resolution(c.mechanism) for c in paid)


def personal(paid: Sequence[Charge]) -> Curve:
    """Equal rounds of personal budgets: exact for one coordinate, Renyi at refined orders for more."""
    if len(paid) != 1 or not isinstance(paid[0].mechanism, Personalized) or not isinstance(paid[0].sampling, Everyone):
        raise NotApplicable("personalised clones need equal rounds with personal budgets and no sampling of users")
    event = paid[0].mechanism
    whole = dataclasses.replace(event, coordinates=event.coordinates * paid[0].times)
    return Curve(
        theorem=personalized.CLONES if whole.coordinates == 1 else personalized.CLONES_RENYI,
        eps=lambda delta: personalized.eps(whole, delta=_proper(delta)).eps,
        delta=_from_delta_only,
    )


def _from_delta_only(eps: float) -> float:
    raise NotApplicable("this accountant goes from a delta to an eps only")


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
    return Curve(theorem=theorem, eps=lambda delta: bound(delta).eps, delta=_from_delta_only)


def pure(paid: Sequence[Charge]) -> Curve:
    """Basic composition of pure mechanisms."""
    terms = []
    for charge in paid:
        if not isinstance(charge.sampling, Everyone):
            raise NotApplicable("basic composition without delta needs pure mechanisms and no sampling of users")
        terms.append(charge.times * releases.pure_eps(charge.mechanism))
    total = math.fsum(terms) * (1 + 1e-15 * (len(terms) + 4))
    return Curve(theorem=PURE, eps=lambda delta: total, delta=lambda eps: 0.0 if eps >= total else 1.0)


ACCOUNTANTS: tuple[Callable[[Sequence[Charge]], Curve], ...] = (
    exact_gaussian,
    personal,
    privacy_loss,
    renyi,
    sampled_shuffles,
    pure,
)


def _proper(delta: float) -> float:
    if not 0 < delta < 1:
        raise NotApplicable(f"this theorem needs 0 < delta < 1, got delta={delta}")
    return delta
