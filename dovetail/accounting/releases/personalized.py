"""Shuffling reports with unequal public budgets: what each user gets from the others (personalised clones).

Another user's report repeats, with probability ``q_i = min(1, 2 c_i E/(E+1))``, a coin that hides the victim's, where
``E = e^(eps_v)`` and ``c_i`` is the infimum of the ratio of user i's density to the victim's. The victim then is one
biased coin, ``D ~ Bern(E/(E+1))``, among ``C ~ PoissonBinomial(q_i, i != v)`` fair ones, and that pair dominates the
shuffled round in both directions (docs/proofs/personalized-clones.md; `hidden_coin`). More clones never hurt, so users
of similar budgets share the bound of the largest budget among them with the fewest clones of any of them.

Laplace noise of unequal scales has ``c_i = 0`` wherever ``eps_i > eps_v``, because of the far tail alone. There the
victim's outcomes are also cut into a near and a far region of fixed probability, each with clones of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.conversion import RENYI, eps_by_order
from dovetail.accounting.pairs.poisson_binomial import Hiding, PoissonBinomialPair
from dovetail.accounting.releases import crowds
from dovetail.accounting.releases._base import Curve, Release, Sampling, releases
from dovetail.accounting.search import smallest_delta, smallest_eps
from dovetail.events import Everyone, Personalized
from dovetail.statements import Bound, NotApplicable, Proof, Theorem

__all__ = [
    "CLONES",
    "clone_probs",
    "clone_probs_from_pmfs",
    "delta",
    "eps",
    "per_user",
    "renyi",
]

CLONES = Theorem(
    key="dovetail.personalized-clones",
    where="personalised clones (docs/proofs/personalized-clones.md, after Feldman, McMillan, Talwar 2023)",
    url="https://arxiv.org/abs/2208.04591",
)

_DOWN, _UP = 1 - 1e-13, 1 + 1e-9
_FAR = (1e-9, 1e-3)  # probabilities of the far region that are tried for Laplace noise
_PATIENCE = 200  # groups of users that the search for the worst one may measure
_ORDERS = 1 + np.geomspace(0.02, 1000, 24)


def clone_probs(event: Personalized, victim: int, *, far: float = 0.0) -> Hiding:
    """q_i of the honest others, rounded down, for each region of the victim's outcomes (one region unless far > 0).

    The colluders are taken to be those who would have hidden the most.
    """
    _validate.integer(victim=victim)
    _validate.in_interval(0, len(event.eps_locals) - 1, victim=victim)
    _validate.in_interval(0, 0.5, far=far)
    return _fewest_clones(event, np.array([victim]), far)


def clone_probs_from_pmfs(victim: np.ndarray, others: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """The victim's eps and the q_i from probability tables, one row an input and one column an outcome.

    Guarantees:
        With these, `PoissonBinomialPair` is never below the exact divergence of the shuffled reports, whatever the
        tables.
    """
    tables = [np.asarray(table, dtype=float) for table in (victim, *others)]
    for table in tables:
        _validate.finite_array(pmf=table)
        if table.ndim != 2 or table.shape[1] != tables[0].shape[1] or (table < 0).any():
            raise ValueError(f"expected tables of probabilities over the same outcomes, got shape {table.shape}")
        if not np.allclose(table.sum(axis=1), 1, atol=1e-9):
            raise ValueError("expected every row of a table to sum to 1")
    possible = tables[0].max(axis=0) > 0
    top, bottom = tables[0].max(axis=0)[possible], tables[0].min(axis=0)[possible]
    if (bottom == 0).any():
        raise NotApplicable("the victim's randomizer has no finite eps: an outcome is impossible for some input only")
    eps_local = float(np.log(top / bottom).max()) * (1 + 1e-13) + 1e-15
    floors = np.array([(table.min(axis=0)[possible] / top).min() for table in tables[1:]])
    return eps_local, np.minimum(1.0, floors * 2 / (1 + math.exp(-eps_local)) * _DOWN)


def _fewest_clones(event: Personalized, victims: np.ndarray, far: float = 0.0) -> Hiding:
    """q_i that no victim of this group falls short of, for the group's largest budget."""
    eps_locals = np.asarray(event.eps_locals)
    low, high = float(eps_locals[victims].min()), float(eps_locals[victims].max())
    small = np.exp(-eps_locals)
    match event.kind:
        case "clip_laplace":
            probs = eps_locals * small / -np.expm1(-eps_locals) * (math.tanh(high / 2) / (high / 2))
        case "laplace":
            probs = eps_locals * small * (2 / (1 + math.exp(-high)) / high)
        case _:
            rest = event.levels - 1
            probs = 2 * small / (1 + rest * small) * ((1 + rest * math.exp(-high)) / (1 + math.exp(-high)))
    regions = [(1.0, probs)]
    if event.kind == "laplace":
        beyond = np.maximum(0.0, eps_locals / low - 1)
        regions = [(far, np.where(beyond > 0, 0.0, probs))] if far else []
        near = far**beyond if far else beyond == 0
        regions.append((1 - far, probs * near))

    def honest(probs: np.ndarray) -> np.ndarray:
        probs = np.minimum(1.0, probs * _DOWN)
        others = np.delete(probs, victims[np.argmax(probs[victims])])
        return np.sort(others)[: len(others) - event.colluders]

    return tuple((mass, honest(mass * probs)) for mass, probs in regions)


def _hidings(event: Personalized, victims: np.ndarray) -> list[Hiding]:
    """Every way to hide these victims that is worth measuring; each alone is a valid bound."""
    plain = _fewest_clones(event, victims)
    found = [plain]
    for far in _FAR if event.kind == "laplace" else ():
        hiding = _fewest_clones(event, victims, far)
        if hiding[-1][1].sum() > 1.5 * plain[0][1].sum():
            found.append(hiding)
    return found


def delta(event: Personalized, *, eps: float, victim: int | None = None) -> float:
    """delta at eps for one coordinate: of this victim, or (None) of every user."""
    _validate.non_negative(eps=eps)
    return float(_worst(event, lambda hiding, top: np.array([PoissonBinomialPair(hiding, top).delta(eps)]), victim)[0])


def renyi(event: Personalized, orders: np.ndarray, victim: int | None = None) -> np.ndarray:
    """Renyi divergence of all coordinates together: of this victim, or (None) of every user, order by order."""
    one = _worst(event, lambda hiding, top: PoissonBinomialPair(hiding, top).renyi(orders), victim)
    return event.coordinates * one


def eps(event: Personalized, *, delta: float, victim: int | None = None) -> Bound:
    """eps at delta over all coordinates: of this victim, or (None) the maximum over users.

    Guarantees:
        Never below the exact value (brute force at small n), and never above the local guarantee.
        The maximum is at least every user's own bound.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    value = _worst(event, lambda hiding, top: np.array([_eps(event, hiding, top, delta)]), victim)[0]
    return _bound(event, float(value), delta)


@functools.lru_cache(maxsize=16)
def per_user(event: Personalized, *, delta: float, tolerance: float = 0.01) -> tuple[Bound, ...]:
    """eps at delta over all coordinates for every user; budgets within `tolerance` of each other share a bound.

    Guarantees:
        No user's eps is below `eps(event, delta=delta, victim=user)`; equal when no bound is shared.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    _validate.in_interval(0, 1, tolerance=tolerance)
    eps_locals = np.asarray(event.eps_locals)
    order = np.argsort(eps_locals, kind="stable")
    sorted_eps = eps_locals[order]
    answers: dict[int, Bound] = {}
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(sorted_eps, sorted_eps[start] * (1 + tolerance), side="right"))
        members = order[start:stop]
        value = min(_eps(event, hiding, float(sorted_eps[stop - 1]), delta) for hiding in _hidings(event, members))
        answers.update(dict.fromkeys(members.tolist(), _bound(event, value, delta)))
        start = stop
    return tuple(answers[user] for user in range(len(order)))


def _eps(event: Personalized, hiding: Hiding, eps_local: float, delta: float) -> float:
    coin = PoissonBinomialPair(hiding, eps_local)
    if event.coordinates == 1:
        return smallest_eps(coin.delta, delta=delta, high=eps_local)

    def converted(orders: np.ndarray) -> np.ndarray:
        return eps_by_order(orders, event.coordinates * coin.renyi(orders), delta=delta)

    found = converted(_ORDERS)
    best = int(np.argmin(np.where(np.isnan(found), np.inf, found)))
    closer = 1 + np.geomspace(_ORDERS[max(best - 1, 0)] - 1, _ORDERS[min(best + 1, len(_ORDERS) - 1)] - 1, 48)
    return min(event.coordinates * eps_local, numerics.eps_bound(numerics.smallest(converted(closer)) * _UP))


def _proof(event: Personalized) -> Proof:
    """Exact for one coordinate, Renyi over more."""
    return CLONES.proof if event.coordinates == 1 else CLONES.proof.then(RENYI)


def _bound(event: Personalized, value: float, delta: float) -> Bound:
    return Bound(eps=value, delta=delta, proof=_proof(event))


def _worst(event: Personalized, measure: Callable[[Hiding, float], np.ndarray], victim: int | None) -> np.ndarray:
    """The measure of one victim, or an upper bound on everybody's: groups are halved while theirs says too little."""
    eps_locals = np.asarray(event.eps_locals)

    def of(members: np.ndarray) -> np.ndarray:
        top = float(eps_locals[members].max())
        found = np.array([measure(hiding, top) for hiding in _hidings(event, members)])
        return np.where(np.isnan(found), np.inf, found).min(axis=0)

    if victim is not None:
        _validate.in_interval(0, len(eps_locals) - 1, victim=victim)
        return of(np.array([victim]))
    order = np.argsort(eps_locals, kind="stable")
    best = worst = of(order[-1:])
    groups, measured = [order[:-1]], 0
    while groups:
        members = groups.pop()
        bound, measured = of(members), measured + 1
        if len(members) == 1 or measured >= _PATIENCE or (bound <= best * (1 + 1e-3)).all():
            worst = np.maximum(worst, bound)
            best = np.maximum(best, bound) if len(members) == 1 else best
        else:
            middle = len(members) // 2
            groups += [members[:middle], members[middle:]]
    return worst


@releases(Personalized)
class PersonalizedRelease(Release[Personalized]):
    """Reports with personal budgets, for every user at once."""

    orders = crowds.ORDERS
    theorem = CLONES

    def renyi(self, sampling: Sampling, orders: tuple[float, ...]) -> np.ndarray:
        """Everyone: a user keeps its budget."""
        return renyi(self.event, np.asarray(orders)) if sampling == Everyone() else super().renyi(sampling, orders)

    @property
    def pure_eps(self) -> float:
        """The largest budget, of all coordinates."""
        return self.event.coordinates * max(self.event.eps_locals)

    def equal_rounds(self, sampling: Sampling, times: int) -> Curve:
        """Rounds are coordinates: exact for one, Renyi at refined orders for more."""
        if sampling != Everyone():
            raise NotApplicable("personalised clones need equal rounds with personal budgets and no sampling of users")
        whole = self._rounds(times)

        def eps_at(at: float) -> float:
            return eps(whole, delta=at).eps

        def delta_at(target: float) -> float:
            if whole.coordinates == 1:
                return numerics.probability(delta(whole, eps=target))
            return smallest_delta(eps_at, eps=target)

        return Curve(proof=_proof(whole), eps=eps_at, delta=delta_at, best=frozenset({"eps"}))

    def per_user(self, times: int, *, delta: float) -> tuple[float, ...]:
        """What the others hide of each."""
        return tuple(bound.eps for bound in per_user(self._rounds(times), delta=delta, tolerance=0.02))

    def local(self, *, delta: float) -> Bound:
        """The largest budget."""
        return Bound(eps=self.pure_eps, delta=0.0, proof=crowds.LOCAL.proof)

    def _rounds(self, times: int) -> Personalized:
        return dataclasses.replace(self.event, coordinates=self.event.coordinates * times)
