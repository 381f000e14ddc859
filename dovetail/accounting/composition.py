"""Many rounds, one statement: composition of noisy releases.

Rounds over disjoint batches of an epoch concern different users, so an epoch costs what its worst round costs; all else
adds up. The accountants read the resulting charges, each raising `NotApplicable` where its theorem does not reach, and
the smallest bound is kept:

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss;
- `privacy_loss` and `renyi`: numerical privacy-loss distributions and Renyi orders, of Gaussian and Laplace noise by
  dp-accounting, of shuffled rounds by `pairs` and `personalized`;
- `personal`: rounds with personal budgets, for every user at once;
- `sampled_shuffles`: shuffled rounds on secret samples of the users;
- `pure`: basic composition, the only one that needs no delta.

dp-accounting's two accountants disagree on what a noise multiplier means under replacement (one doubles the
sensitivity, the other does not). Our events carry the sensitivity of their own relation; this file translates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from dovetail.accounting import gaussian, pairs, personalized, subsampling
from dovetail.events import (
    Crowd,
    Disjoint,
    Everyone,
    FixedSize,
    Gaussian,
    Laplace,
    Mechanism,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    Round,
    Shuffled,
)
from dovetail.statements import Bound, Neighbors, NotApplicable, Theorem

__all__ = [
    "ACCOUNTANTS",
    "Charge",
    "Curve",
    "best_bound",
    "bound",
    "charges",
    "exact_gaussian",
    "fits",
    "personal",
    "privacy_loss",
    "pure",
    "renyi",
    "sampled_shuffles",
    "spent_delta",
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
_INTERVAL = 1e-4
_OUTWARD = 1 + 1e-9
_ADD_REMOVE = privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = privacy_accountant.NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Charge:
    """A mechanism that one user pays for `times` times; disjoint batches are already folded into epochs."""

    mechanism: Mechanism
    sampling: Everyone | FixedSize | Poisson
    times: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """The privacy of a composition by one theorem: eps at a delta, and delta at an eps."""

    theorem: Theorem
    eps: Callable[[float], float]
    delta: Callable[[float], float]


def fits(rounds: Sequence[Round], *, eps: float, delta: float) -> bool:
    """Whether some accountant certifies these rounds at (eps, delta); the cheap ones are asked first."""
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


def charges(rounds: Iterable[Round]) -> tuple[Charge, ...]:
    """What one user pays for at the most: epochs of disjoint batches count once, everything else each time."""
    counts: Counter[tuple[Mechanism, Everyone | FixedSize | Poisson]] = Counter()
    epochs: dict[int, list[Mechanism]] = {}
    for item in rounds:
        match item.participation:
            case Disjoint(epoch=epoch):
                epochs.setdefault(epoch, []).append(item.mechanism)
            case FixedSize(size=size, population=population) if size == population:
                counts[item.mechanism, Everyone()] += 1
            case Poisson(prob=prob) if prob == 1:
                counts[item.mechanism, Everyone()] += 1
            case Poisson(prob=prob) if prob == 0:
                pass
            case sampling:
                counts[item.mechanism, sampling] += 1
    for mechanisms in epochs.values():
        counts[_worst(mechanisms), Everyone()] += 1
    return tuple(Charge(mechanism=m, sampling=s, times=times) for (m, s), times in counts.items())


def _worst(mechanisms: Sequence[Mechanism]) -> Mechanism:
    distinct = set(mechanisms)
    if len(distinct) == 1:
        return mechanisms[0]
    if all(isinstance(mechanism, Gaussian) for mechanism in distinct):
        return max(distinct, key=lambda mechanism: mechanism.mu)  # type: ignore[union-attr]
    raise NotApplicable("the rounds of an epoch over disjoint batches differ, and there is no order between them")


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


def spent_delta(paid: Sequence[Charge]) -> float:
    """What the rounds cost in delta beside their pairs: reports that meet a full coordinate."""
    return math.fsum(c.times * pairs.spent_delta(c.mechanism) for c in paid if isinstance(c.mechanism, Crowd))


def _after_spending(paid: Sequence[Charge], curve: Curve) -> Curve:
    """The same curve for the whole delta, of which the rounds have spent some already."""
    spent = spent_delta(paid)
    if not spent:
        return curve

    def eps(delta: float) -> float:
        if delta <= spent:
            raise NotApplicable(f"reports meet a full coordinate with probability {spent:.3g}, more than delta={delta}")
        return curve.eps((delta - spent) * (1 - 1e-12))

    return Curve(theorem=curve.theorem, eps=eps, delta=lambda eps: min(1.0, curve.delta(eps) + spent))


def _named(paid: Sequence[Charge], theorem: Theorem) -> Theorem:
    """The theorem with those that gave the shuffled rounds' pairs."""
    used = dict.fromkeys(
        pairs.theorem(c.mechanism) if isinstance(c.mechanism, Crowd) else personalized.CLONES
        for c in paid
        if isinstance(c.mechanism, Crowd | Personalized)
    )
    if not used:
        return theorem
    first = next(iter(used))
    where = "; ".join([*(item.where for item in used), theorem.where])
    return Theorem(key=f"{first.key}+{theorem.key}", where=where, url=first.url)


def renyi(paid: Sequence[Charge]) -> Curve:
    """Renyi orders, added up and converted."""
    shuffled = all(isinstance(charge.mechanism, Crowd | Personalized) for charge in paid)
    orders = tuple(pairs.ORDERS) if shuffled else _ORDERS
    total = np.zeros(len(orders))
    theorem = RENYI
    for charge in paid:
        total += charge.times * _renyi_of_one(charge.mechanism, charge.sampling, orders)
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


@functools.lru_cache(maxsize=256)
def _renyi_of_one(
    mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson, orders: tuple[float, ...]
) -> np.ndarray:
    """Renyi divergence of one release at every order; noise multipliers are std over the event's own sensitivity."""
    match mechanism, sampling:
        case Laplace(), Everyone():
            event = dp_event.LaplaceDpEvent(mechanism.scale / mechanism.sensitivity)
            return mechanism.count * _dp_accounting_renyi(event, _ADD_REMOVE, orders)
        case ((Shuffled() | PaddedBernoulli() | PaddedTopk()), Everyone()):
            return pairs.renyi(mechanism, np.asarray(orders))
        case Personalized(), Everyone():
            return personalized.renyi(mechanism, np.asarray(orders))
        case Gaussian(std=0.0), _:
            return np.full(len(orders), np.inf)
        case Gaussian(), Everyone():
            return _dp_accounting_renyi(dp_event.GaussianDpEvent(1 / mechanism.mu), _ADD_REMOVE, orders)
        case Gaussian(neighbors=Neighbors.ADD_REMOVE), Poisson():
            event = dp_event.PoissonSampledDpEvent(sampling.prob, dp_event.GaussianDpEvent(1 / mechanism.mu))
            return _dp_accounting_renyi(event, _ADD_REMOVE, orders)
        case Gaussian(neighbors=Neighbors.REPLACE_ONE), FixedSize():
            noise = dp_event.GaussianDpEvent(1 / mechanism.mu)
            event = dp_event.SampledWithoutReplacementDpEvent(sampling.population, sampling.size, noise)
            return _dp_accounting_renyi(event, _REPLACE, orders)
    raise NotApplicable(f"no Renyi bound here for {_describe(mechanism, sampling)}")


def _dp_accounting_renyi(
    event: dp_event.DpEvent, relation: privacy_accountant.NeighboringRelation, orders: tuple[float, ...]
) -> np.ndarray:
    accountant = rdp.RdpAccountant(orders=orders, neighboring_relation=relation)
    return np.asarray(accountant.compose(event).rdp)


def privacy_loss(paid: Sequence[Charge]) -> Curve:
    """Numerical privacy-loss distributions, convolved on one grid."""
    grid = min([_INTERVAL, *(pairs.resolution(c.mechanism) for c in paid if isinstance(c.mechanism, Crowd))])
    parts = [
        _loss_of_one(charge.mechanism, charge.sampling, grid).self_compose(charge.times * _repeats(charge.mechanism))
        for charge in paid
    ]
    total = functools.reduce(lambda a, b: a.compose(b), parts)
    replaced = any(
        isinstance(c.sampling, Poisson) and getattr(c.mechanism, "neighbors", None) is Neighbors.REPLACE_ONE
        for c in paid
    )
    curve = Curve(
        theorem=_named(paid, PRIVACY_LOSS_REPLACE if replaced else PRIVACY_LOSS),
        eps=lambda delta: max(0.0, float(total.get_epsilon_for_delta(_proper(delta)))) * _OUTWARD,
        delta=lambda eps: min(1.0, float(total.get_delta_for_epsilon(eps)) * _OUTWARD),
    )
    return _after_spending(paid, curve)


def _repeats(mechanism: Mechanism) -> int:
    return mechanism.count if isinstance(mechanism, Laplace) else 1


@functools.lru_cache(maxsize=64)
def _loss_of_one(
    mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson, grid: float
) -> pld.PrivacyLossDistribution:
    """The privacy-loss distribution of one release (of one coordinate, for Laplace)."""
    match mechanism, sampling:
        case Laplace(), Everyone():
            return pld.from_laplace_mechanism(
                mechanism.scale, sensitivity=mechanism.sensitivity, value_discretization_interval=grid
            )
        case ((Shuffled() | PaddedBernoulli() | PaddedTopk()), Everyone()):
            return pairs.loss(mechanism, interval=grid)
        case Gaussian(std=std), _ if std > 0 and not isinstance(sampling, FixedSize):
            prob = sampling.prob if isinstance(sampling, Poisson) else 1.0
            if mechanism.neighbors is Neighbors.ADD_REMOVE:
                reach, relation = mechanism.sensitivity, _ADD_REMOVE
            else:
                reach, relation = mechanism.sensitivity / 2, _REPLACE  # dp-accounting doubles it again
            return pld.from_gaussian_mechanism(
                std,
                sensitivity=reach,
                sampling_prob=prob,
                neighboring_relation=relation,
                value_discretization_interval=grid,
            )
    raise NotApplicable(f"no privacy-loss distribution here for {_describe(mechanism, sampling)}")


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
        terms.append(charge.times * _pure_eps(charge.mechanism))
    total = math.fsum(terms) * (1 + 1e-15 * (len(terms) + 4))
    return Curve(theorem=PURE, eps=lambda delta: total, delta=lambda eps: 0.0 if eps >= total else 1.0)


def _pure_eps(mechanism: Mechanism) -> float:
    """The local guarantee of one round, which shuffling cannot worsen."""
    match mechanism:
        case Laplace():
            return mechanism.count * mechanism.eps_each
        case Shuffled():
            return mechanism.coordinates * mechanism.report.eps_local
        case Personalized():
            return mechanism.coordinates * max(mechanism.eps_locals)
    raise NotApplicable(f"{type(mechanism).__name__} has no pure guarantee")


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


def _describe(mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson) -> str:
    relation = getattr(mechanism, "neighbors", None)
    under = f" under {relation.value}" if relation else ""
    return f"{type(mechanism).__name__} noise with {type(sampling).__name__} participation{under}"
