"""Many rounds, one statement: composition of noisy releases.

The accountants read the charges of `charges`, each raising `NotApplicable` where its theorem does not reach, and the
smallest bound is kept:

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss;
- `privacy_loss` and `renyi`: numerical privacy-loss distributions and Renyi orders, of every release in `releases`;
- `personal`: rounds with personal budgets, for every user at once;
- `sampled_shuffles`: shuffled rounds on secret samples of the users;
- `pure`: basic composition, the only one that needs no delta.

Each gives eps at a delta and delta at an eps. What releases spend of delta beside their noise is taken from the whole
(`charges.spent_delta`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from dovetail import _validate
from dovetail.accounting import gaussian, mixtures, pairs, personalized, releases, split_and_mix, subsampling
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
    "check_target",
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
_WHOLE_ORDERS = (*range(2, 33), 40, 48, 64, 96, 128, 256)  # where sampled releases cost little to compute
_OUTWARD = 1 + 1e-9
_MOST_CASES = 64  # ways in which subjects may be spread over users that are composed one by one
_FEW = 4  # different releases that are composed on the finest grid
_LEAST_DELTA = 1e-30  # where the search for a delta begins
_TINIEST = 1e-300  # a delta that underflows is not 0


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
    for accountant in (exact_gaussian, renyi, pure, sampled_shuffles, personal, privacy_loss):
        try:
            if not paid or _curve(accountant, paid).eps(delta) <= eps:
                return True
        except NotApplicable:
            continue
    return False


def bound(rounds: Sequence[Round], *, delta: float | None = None, eps: float | None = None) -> Bound:
    """The smallest certified eps of these rounds at this delta, or the smallest certified delta at this eps.

    It is a statement's number without the rest of it: for calibration, and for stopping at a delta.

    Guarantees:
        Exactly one of delta and eps is given, and the bound has it.
        At an eps for which nothing is certified delta is 1.
    """
    check_target(delta, eps)
    for item in rounds:
        if isinstance(item.mechanism, NonPrivate):
            nothing = Theorem(key="none", where=item.mechanism.reason)
            if eps is None:
                return Bound(eps=math.inf, delta=_given(delta), theorem=nothing)
            return Bound(eps=eps, delta=1.0, theorem=nothing)
    return best_bound(charges(rounds), delta=delta, eps=eps)


def best_bound(paid: Sequence[Charge], *, delta: float | None = None, eps: float | None = None) -> Bound:
    """The smallest eps, or delta, of all accountants; `NotApplicable` with every reason if none applies."""
    check_target(delta, eps)
    if not paid:
        return Bound(eps=0.0 if eps is None else eps, delta=0.0, theorem=PURE)
    bounds, reasons = [], []
    for accountant in ACCOUNTANTS:
        try:
            curve = _curve(accountant, tuple(paid))
            if eps is None:
                bounds.append(Bound(eps=curve.eps(_given(delta)), delta=_given(delta), theorem=curve.theorem))
            else:
                bounds.append(Bound(eps=eps, delta=curve.delta(eps), theorem=curve.theorem))
        except NotApplicable as error:
            reasons.append(str(error))
        else:
            if accountant is exact_gaussian or (accountant is personal and eps is None):
                break
    if not bounds:
        raise NotApplicable("; ".join(reasons))
    return min(bounds, key=lambda bound: bound.eps if eps is None else bound.delta)


def check_target(delta: float | None, eps: float | None) -> None:
    """Exactly one of the two is given, and it is a delta or an eps."""
    if (delta is None) == (eps is None):
        raise ValueError(f"expected exactly one of delta and eps, got delta={delta!r} and eps={eps!r}")
    if eps is None:
        _validate.in_interval(0, 1, delta=_given(delta))
    else:
        _validate.non_negative(eps=eps)


def _given(delta: float | None) -> float:
    return math.nan if delta is None else delta


@functools.lru_cache(maxsize=16)
def _curve(accountant: Callable[[Sequence[Charge]], Curve], paid: tuple[Charge, ...]) -> Curve:
    """An accountant's answer, kept for the next question about the same rounds."""
    return accountant(paid)


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
        delta=lambda eps: min(1.0, max(float(rdp.compute_delta(at, total, eps)[0]) * _OUTWARD, _TINIEST)),
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
        [one.self_compose(charge.times) if charge.times > 1 else one for one in losses]
        for charge, losses in zip(paid, possible, strict=True)
    ]
    totals = [_composed(case) for case in itertools.product(*parts)]
    replaced = any(
        isinstance(c.sampling, Poisson) and getattr(c.mechanism, "neighbors", None) is Neighbors.REPLACE_ONE
        for c in paid
    )

    def eps(delta: float) -> float:
        found = [float(total.get_epsilon_for_delta(_proper(delta))) for total in totals]
        return math.inf if any(map(math.isnan, found)) else max(0.0, *found) * _OUTWARD

    def delta(eps: float) -> float:
        found = [float(total.get_delta_for_epsilon(eps)) for total in totals]
        return 1.0 if any(map(math.isnan, found)) else min(1.0, max(0.0, *found) * _OUTWARD)

    theorem = _named(paid, PRIVACY_LOSS_REPLACE if replaced else PRIVACY_LOSS)
    return _after_spending(paid, Curve(theorem=theorem, eps=eps, delta=delta))


def _composed(losses: Sequence[PrivacyLossDistribution]) -> PrivacyLossDistribution:
    """All of them composed, in a balanced tree: most convolutions are then short."""
    level = list(losses)
    while len(level) > 1:
        odd = level[-1:] if len(level) % 2 else []
        level = [one.compose(other) for one, other in zip(level[::2], level[1::2], strict=False)] + odd
    return level[0]


def _grid(paid: Sequence[Charge]) -> float:
    """One interval of losses for all.

    A few different releases are composed on the finest that one of them asks for. Noisy sums over subjects, or with
    many different noises and sampling rates, on one that resolves their mean square loss, to which a grid adds.
    """
    subject = any(isinstance(charge.mechanism, SampledSubject) for charge in paid)
    if not subject and len(paid) <= _FEW:
        return min(releases.resolution(charge.mechanism) for charge in paid)
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
            min(1.0, personalized.delta(whole, eps=target)) if whole.coordinates == 1 else _delta_by_search(eps, target)
        ),
    )


def _delta_by_search(eps_of: Callable[[float], float], eps: float) -> float:
    """About the smallest delta with eps_of(delta) <= eps, for a theorem that goes from a delta to an eps only.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated; 1 if there is none.
    """

    def holds(delta: float) -> bool:
        try:
            return eps_of(delta) <= eps
        except NotApplicable:
            return False

    low, high = math.log(_LEAST_DELTA), math.log(0.5)
    if not holds(0.5):
        return 1.0
    if holds(_LEAST_DELTA):
        return _LEAST_DELTA
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(math.exp(middle)) else (middle, high)
    return math.exp(high)


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
        delta=lambda eps: _delta_by_search(lambda delta: bound(delta).eps, eps),
    )


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
