"""Many rounds, one statement: composition of noisy releases.

Rounds over disjoint batches of an epoch concern different users, so an epoch costs what its worst round costs; all else
adds up. Four accountants read the resulting charges, each raising `NotApplicable` where its theorem does not reach, and
`certify` keeps the smallest bound:

- `exact_gaussian`: Gaussian releases in which nobody is sampled, without any loss;
- `privacy_loss` and `renyi`: dp-accounting's numerical privacy-loss distributions and Renyi orders;
- `pure`: basic composition, the only one that needs no delta.

dp-accounting's two accountants disagree on what a noise multiplier means under replacement (one doubles the
sensitivity, the other does not). Our events carry the sensitivity of their own relation, and this file, the only one
that imports dp-accounting, translates for each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import privacy_loss_distribution as pld
from dp_accounting.rdp import rdp_privacy_accountant as rdp

from dovetail import _validate
from dovetail.accounting import gaussian
from dovetail.events import Disjoint, Everyone, FixedSize, Gaussian, Laplace, Mechanism, NonPrivate, Poisson, Round
from dovetail.statements import (
    TUNING_ASSUMPTION,
    Bound,
    Neighbors,
    NotApplicable,
    Scope,
    Statement,
    Theorem,
    Verdict,
    unbounded,
)

__all__ = [
    "ACCOUNTANTS",
    "Charge",
    "Curve",
    "certify",
    "charges",
    "exact_gaussian",
    "fits",
    "privacy_loss",
    "pure",
    "renyi",
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


def certify(rounds: Sequence[Round], scope: Scope, *, delta: float) -> Statement:
    """The smallest certified eps for these rounds at this delta.

    Guarantees:
        Monotone: more rounds never give a smaller eps.
        The theorem named is the one that gave the number, and its hypotheses were checked.
        A release without noise gives an unbounded statement, never a number.
    """
    _validate.in_interval(0, 1, delta=delta)
    span = _span(rounds)
    for item in rounds:
        if isinstance(item.mechanism, NonPrivate):
            return unbounded(scope, reason=item.mechanism.reason, delta=delta, span=span)
        if item.mechanism.neighbors is not scope.neighbors:
            raise ValueError(
                f"expected events under {scope.neighbors.value}, got an event under {item.mechanism.neighbors.value}"
            )
    paid = charges(rounds)
    best = best_bound(paid, delta=delta)
    premises = tuple(_one_round(charge, scope, delta) for charge in paid if charge.times > 1 or len(paid) > 1)
    return _statement(best, scope, paid, span=span, premises=premises)


def fits(rounds: Sequence[Round], *, eps: float, delta: float) -> bool:
    """Whether some accountant certifies these rounds at (eps, delta); the cheap ones are asked first."""
    if any(isinstance(item.mechanism, NonPrivate) for item in rounds):
        return False
    paid = charges(rounds)
    for accountant in (exact_gaussian, renyi, pure, privacy_loss):
        try:
            if not paid or accountant(paid).eps(delta) <= eps:
                return True
        except NotApplicable:
            continue
    return False


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
            if accountant is exact_gaussian:
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


def renyi(paid: Sequence[Charge]) -> Curve:
    """Renyi orders, added up and converted."""
    total = np.zeros(len(_ORDERS))
    theorem = RENYI
    for charge in paid:
        total += charge.times * _renyi_of_one(charge.mechanism, charge.sampling)
        if isinstance(charge.sampling, Poisson):
            theorem = RENYI_POISSON
        elif isinstance(charge.sampling, FixedSize):
            theorem = RENYI_FIXED_SIZE
    orders = np.asarray(_ORDERS)
    usable = np.isfinite(total)
    if not usable.any():
        raise NotApplicable("no Renyi order is finite for this composition")
    return Curve(
        theorem=theorem,
        eps=lambda delta: float(rdp.compute_epsilon(orders[usable], total[usable], _proper(delta))[0]) * _OUTWARD,
        delta=lambda eps: min(1.0, float(rdp.compute_delta(orders[usable], total[usable], eps)[0]) * _OUTWARD),
    )


@functools.lru_cache(maxsize=256)
def _renyi_of_one(mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson) -> np.ndarray:
    """Renyi divergence of one release at every order; noise multipliers are std over the event's own sensitivity."""
    match mechanism, sampling:
        case Laplace(), Everyone():
            event = dp_event.LaplaceDpEvent(mechanism.scale / mechanism.sensitivity)
            return mechanism.count * _dp_accounting_renyi(event, _ADD_REMOVE)
        case Gaussian(std=0.0), _:
            return np.full(len(_ORDERS), np.inf)
        case Gaussian(), Everyone():
            return _dp_accounting_renyi(dp_event.GaussianDpEvent(1 / mechanism.mu), _ADD_REMOVE)
        case Gaussian(neighbors=Neighbors.ADD_REMOVE), Poisson():
            event = dp_event.PoissonSampledDpEvent(sampling.prob, dp_event.GaussianDpEvent(1 / mechanism.mu))
            return _dp_accounting_renyi(event, _ADD_REMOVE)
        case Gaussian(neighbors=Neighbors.REPLACE_ONE), FixedSize():
            noise = dp_event.GaussianDpEvent(1 / mechanism.mu)
            event = dp_event.SampledWithoutReplacementDpEvent(sampling.population, sampling.size, noise)
            return _dp_accounting_renyi(event, _REPLACE)
    raise NotApplicable(f"no Renyi bound here for {_describe(mechanism, sampling)}")


def _dp_accounting_renyi(event: dp_event.DpEvent, relation: privacy_accountant.NeighboringRelation) -> np.ndarray:
    accountant = rdp.RdpAccountant(orders=_ORDERS, neighboring_relation=relation)
    return np.asarray(accountant.compose(event).rdp)


def privacy_loss(paid: Sequence[Charge]) -> Curve:
    """Numerical privacy-loss distributions, convolved."""
    parts = [
        _loss_of_one(charge.mechanism, charge.sampling).self_compose(charge.times * _repeats(charge.mechanism))
        for charge in paid
    ]
    total = functools.reduce(lambda a, b: a.compose(b), parts)
    replaced = any(
        isinstance(c.sampling, Poisson) and getattr(c.mechanism, "neighbors", None) is Neighbors.REPLACE_ONE
        for c in paid
    )
    return Curve(
        theorem=PRIVACY_LOSS_REPLACE if replaced else PRIVACY_LOSS,
        eps=lambda delta: max(0.0, float(total.get_epsilon_for_delta(_proper(delta)))) * _OUTWARD,
        delta=lambda eps: min(1.0, float(total.get_delta_for_epsilon(eps)) * _OUTWARD),
    )


def _repeats(mechanism: Mechanism) -> int:
    return mechanism.count if isinstance(mechanism, Laplace) else 1


@functools.lru_cache(maxsize=64)
def _loss_of_one(mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson) -> pld.PrivacyLossDistribution:
    """The privacy-loss distribution of one release (of one coordinate, for Laplace)."""
    match mechanism, sampling:
        case Laplace(), Everyone():
            return pld.from_laplace_mechanism(mechanism.scale, sensitivity=mechanism.sensitivity)
        case Gaussian(std=std), _ if std > 0 and not isinstance(sampling, FixedSize):
            prob = sampling.prob if isinstance(sampling, Poisson) else 1.0
            if mechanism.neighbors is Neighbors.ADD_REMOVE:
                return pld.from_gaussian_mechanism(
                    std, sensitivity=mechanism.sensitivity, sampling_prob=prob, neighboring_relation=_ADD_REMOVE
                )
            radius = mechanism.sensitivity / 2  # dp-accounting doubles it again under replacement
            return pld.from_gaussian_mechanism(
                std, sensitivity=radius, sampling_prob=prob, neighboring_relation=_REPLACE
            )
    raise NotApplicable(f"no privacy-loss distribution here for {_describe(mechanism, sampling)}")


def pure(paid: Sequence[Charge]) -> Curve:
    """Basic composition of pure mechanisms."""
    terms = []
    for charge in paid:
        if not isinstance(charge.mechanism, Laplace) or not isinstance(charge.sampling, Everyone):
            raise NotApplicable("basic composition without delta needs pure mechanisms and no sampling of users")
        terms.append(charge.times * charge.mechanism.count * charge.mechanism.eps_each)
    total = math.fsum(terms) * (1 + 1e-15 * (len(terms) + 4))
    return Curve(theorem=PURE, eps=lambda delta: total, delta=lambda eps: 0.0 if eps >= total else 1.0)


ACCOUNTANTS: tuple[Callable[[Sequence[Charge]], Curve], ...] = (exact_gaussian, privacy_loss, renyi, pure)


def _proper(delta: float) -> float:
    if not 0 < delta < 1:
        raise NotApplicable(f"this theorem needs 0 < delta < 1, got delta={delta}")
    return delta


def _describe(mechanism: Mechanism, sampling: Everyone | FixedSize | Poisson) -> str:
    relation = getattr(mechanism, "neighbors", None)
    under = f" under {relation.value}" if relation else ""
    return f"{type(mechanism).__name__} noise with {type(sampling).__name__} participation{under}"


def _one_round(charge: Charge, scope: Scope, delta: float) -> Statement:
    one = dataclasses.replace(charge, times=1)
    return _statement(best_bound((one,), delta=delta), scope, (one,), span=f"one of {charge.times} rounds", premises=())


def _statement(
    bound: Bound, scope: Scope, paid: Sequence[Charge], *, span: str, premises: tuple[Statement, ...]
) -> Statement:
    about = list(dict.fromkeys(itertools.chain(scope.assumptions, _sampling_assumptions(paid), [TUNING_ASSUMPTION])))
    return Statement(
        eps=bound.eps,
        delta=bound.delta,
        trust=scope.trust,
        adversary=scope.adversary,
        neighbors=scope.neighbors,
        unit=scope.unit,
        theorem=bound.theorem,
        assumptions=tuple(about),
        verdict=Verdict.CERTIFIED,
        span=span,
        premises=premises,
    )


def _sampling_assumptions(paid: Sequence[Charge]) -> list[str]:
    said = []
    for charge in paid:
        match charge.sampling:
            case Poisson(prob=prob):
                said.append(
                    f"each user joins a round independently with probability {prob:.4g}, unseen by the adversary"
                )
            case FixedSize(size=size, population=population):
                said.append(f"the {size} of {population} users of a round are drawn uniformly, unseen by the adversary")
    return said


def _span(rounds: Sequence[Round]) -> str:
    epochs = {item.participation.epoch for item in rounds if isinstance(item.participation, Disjoint)}
    text = f"{len(rounds)} round{'s' * (len(rounds) != 1)}"
    return text + (f" in {len(epochs)} epoch{'s' * (len(epochs) != 1)} of disjoint batches" if epochs else "")
