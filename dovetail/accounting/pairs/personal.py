"""Who hides a victim among users with unequal public budgets, as a curve and as a dominating pair.

Two bounds hold for every victim, and the smaller counts at each eps. By *clones* another user's report repeats, with
probability ``q_i = min(1, 2 c_i E/(E+1))``, a coin that hides the victim's, where ``E = e^(eps_v)`` and ``c_i`` is the
infimum of the ratio of user i's density to the victim's (docs/proofs/personalized-clones.md; `binomial`). By a
*blanket*, it is a draw from one law with probability g_i (docs/proofs/blankets.md; `blanket_pair`). More of either
never hurt, so users of similar budgets share the bound of the largest budget among them with the least hiding of any.

Laplace noise of unequal scales has ``c_i = 0`` wherever ``eps_i > eps_v``, because of the far tail alone. There the
victim's outcomes are also cut into a near and a far region of fixed probability, each with clones of its own.

A user hides a victim with a probability that depends on its own budget. Where there are many users, those of
neighbouring budgets are taken together (`budget_classes`), each with the least probability of any of them.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dovetail.accounting.amplification import blanket, frontier
from dovetail.accounting.amplification.clones import CloneCounts
from dovetail.accounting.amplification.frontier import Frontier
from dovetail.accounting.pairs import symmetric
from dovetail.accounting.pairs.binomial import (
    MANY_COINS,
    SOME_COINS,
    Coins,
    Hiding,
    PoissonBinomialPair,
    clone_counts,
    coarsen_counts,
)
from dovetail.accounting.pairs.blanket_pair import BlanketCrowd
from dovetail.accounting.pairs.symmetric import SymmetricPair
from dovetail.events import Personalized
from dovetail.statements import NotApplicable

__all__ = [
    "Classes",
    "ProbsOf",
    "budget_classes",
    "budget_range",
    "budgets_of",
    "delta_curve",
    "halve_group",
    "hiding_coins",
    "pair",
    "split_by_budget",
    "users_by_budget",
    "victim_groups",
]

_DOWN = 1 - 1e-13  # rounds a probability of hiding down by more than its error
_FAR = (1e-9, 1e-3)  # probabilities of the far region that are tried for Laplace noise
_WIDTHS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0)  # half widths of a plateau that are tried
_LEAST_BUDGET = 1e-6  # below, roundings of ratios to the blanket would matter, and clones do as well
_MANY_USERS = 200  # users, of whom one more or less does not matter
_ABOUT = 1.005  # a group's loss may be so much above the worst of single users before it is halved
_SIMILAR = 1.2  # ratio of losses by clones and by a plateau of which either may be the smaller
_CLEARLY = 0.998  # ratio at which the plateau's is the smaller
_SAMPLE = 200  # budgets by which a plateau is chosen
_DISTINCT = 4  # budgets that are looked at one by one
_NARROW = 1.005  # ratio of budgets that are not told apart
_MOST_CLASSES = 2000  # of budgets

ProbsOf = Callable[[np.ndarray], np.ndarray]  # from users' budgets to the probability with which each hides a victim


@functools.lru_cache(maxsize=4)
def budgets_of(event: Personalized) -> np.ndarray:
    """Every user's eps_local, by its index; kept, and not to be written to."""
    budgets = np.array(event.eps_locals, dtype=float)
    budgets.flags.writeable = False
    return budgets


_last_orders: deque[np.ndarray] = deque(maxlen=1)  # what `_sorted_budgets` returned last


def users_by_budget(event: Personalized) -> np.ndarray:
    """The indices of all users by rising budgets; kept, and not to be written to."""
    return _sorted_budgets(event)[0]


@functools.lru_cache(maxsize=4)
def _sorted_budgets(event: Personalized) -> tuple[np.ndarray, np.ndarray]:
    """The indices of all users by rising budgets, and those budgets.

    The last order is tried first: calibration asks about the same budgets times a factor.
    """
    budgets = budgets_of(event)
    for order in tuple(_last_orders):
        if len(order) == len(budgets) and np.all(np.diff(rising := budgets[order]) >= 0):
            return order, rising
    order = np.argsort(budgets)
    order.flags.writeable = False
    _last_orders.append(order)
    return order, budgets[order]


def budget_range(event: Personalized, members: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest budget of these users; fast if `members` is a slice of `users_by_budget`."""
    budgets = budgets_of(event)
    if members.base is not None and members.base is users_by_budget(event):
        return float(budgets[members[0]]), float(budgets[members[-1]])
    return float(budgets[members].min()), float(budgets[members].max())


def split_by_budget(event: Personalized, members: np.ndarray, max_budget: float) -> list[np.ndarray]:
    """[users of budgets up to `max_budget`, the others]; slices again if `members` is one of `users_by_budget`."""
    budgets = budgets_of(event)
    if members.base is not None and members.base is users_by_budget(event):
        cut = bisect.bisect_right(members, max_budget, key=budgets.__getitem__)
        return [members[:cut], members[cut:]]
    smaller = budgets[members] <= max_budget
    return [members[smaller], members[~smaller]]


class Classes(NamedTuple):
    """Users in classes of neighbouring budgets: three arrays with an entry for each class, by rising budgets."""

    low: np.ndarray  # the smallest budget of the class
    high: np.ndarray  # its largest one
    counts: np.ndarray  # how many users it has


@functools.lru_cache(maxsize=4)
def budget_classes(event: Personalized) -> Classes:
    """One class for each budget that somebody has, or for a few neighbouring ones where there are many."""
    _, ordered = _sorted_budgets(event)
    firsts = np.flatnonzero(np.diff(ordered, prepend=-np.inf))
    values, counts = ordered[firsts], np.diff(firsts, append=len(ordered))
    starts = np.arange(0, len(values), max(1, len(values) // _MOST_CLASSES))
    ends = np.append(starts[1:], len(values)) - 1
    return Classes(values[starts], values[ends], np.add.reduceat(counts, starts))


def hiding_coins(event: Personalized, victims: np.ndarray | None, probs_of: ProbsOf) -> Coins:
    """The coins by which the honest others hide any one of these victims, at the least.

    The colluders and the victim are taken to be those who hide most. `probs_of(budgets)` rises and then falls with the
    budget, so that a class hides no less than at one of its ends.

    Arguments:
        event: whose users hide the victims.
        victims: indices of users, of whom one is the victim; None for all users.
        probs_of: how probably a user of each budget hides a victim, rounded down.
    """
    budgets = budgets_of(event)
    if len(budgets) > MANY_COINS:
        low, high, counts = budget_classes(event)
        probs = np.minimum(probs_of(low), probs_of(high))
        order = np.argsort(probs)
        probs, counts = probs[order], counts[order]
        gone = np.maximum(0, np.cumsum(counts) - (len(budgets) - 1 - event.colluders))  # those who hide most
        return Coins(probs, counts - np.minimum(counts, gone))
    probs = probs_of(budgets)
    gone = np.argmax(probs) if victims is None else victims[np.argmax(probs[victims])]
    others = np.delete(probs, gone)
    return Coins(*np.unique(np.sort(others)[: len(others) - event.colluders], return_counts=True))


def _fewest_clones(event: Personalized, victims: np.ndarray, far: float = 0.0) -> Hiding:
    """The clones (q_i of the module's first lines) that every victim of this group has, for its largest budget.

    Rounded down. As functions of eps_i the probabilities are log-concave, or fall: a class hides no less than at its
    ends.

    Arguments:
        event: whose users hide the victims.
        victims: indices of users with similar budgets.
        far: for Laplace noise, the probability of the far region of outcomes; 0 if they are not cut.
    """
    low, high = budget_range(event, victims)

    def probs(eps_locals: np.ndarray) -> np.ndarray:
        small = np.exp(-eps_locals)
        match event.kind:
            case "clip_laplace":
                return eps_locals * small / -np.expm1(-eps_locals) * (math.tanh(high / 2) / (high / 2))
            case "laplace":
                return eps_locals * small * (2 / (1 + math.exp(-high)) / high)
        rest = event.levels - 1
        return 2 * small / (1 + rest * small) * ((1 + rest * math.exp(-high)) / (1 + math.exp(-high)))

    def region(mass: float, share: ProbsOf) -> tuple[float, Coins]:
        return mass, hiding_coins(event, victims, lambda eps: np.minimum(1.0, mass * probs(eps) * share(eps) * _DOWN))

    if event.kind != "laplace":
        return (region(1.0, np.ones_like),)
    near = region(1 - far, lambda eps: far ** np.maximum(0.0, eps / low - 1) if far else 1.0 * (eps <= low))
    return (region(far, lambda eps: 1.0 * (eps <= low)), near) if far else (near,)


def _ways_to_hide(event: Personalized, victims: np.ndarray) -> list[Hiding]:
    """The ways to hide these victims among clones that are worth asking; each alone is a valid bound."""
    plain = _fewest_clones(event, victims)
    hidings = [plain]
    for far in _FAR if event.kind == "laplace" else ():
        hiding = _fewest_clones(event, victims, far)
        if hiding[-1][1].mean > 1.5 * plain[0][1].mean:
            hidings.append(hiding)
    return hidings


def _blanket_crowd(event: Personalized, victims: np.ndarray) -> BlanketCrowd:
    """These victims among draws from a blanket: the largest frontier of any, the fewest draws of any.

    `NotApplicable` for budgets outside of [1e-6, `symmetric.LARGEST_LOSS`], and where Laplace noise has no plateau.
    """
    low, high = budget_range(event, victims)
    if not _LEAST_BUDGET <= high <= symmetric.LARGEST_LOSS:
        raise NotApplicable(f"no blanket for a budget of {high:.4g}")
    match event.kind:
        case "clip_laplace":
            own = frontier.clip_laplace(high)
            if event.threshold:  # which only takes away; where it takes little, covering it costs more
                behind = blanket.threshold_frontier(high, float(budget_classes(event).low[0]), event.threshold)
                own = min(own, behind, key=lambda candidate: candidate.spread)
        case "laplace":
            own, floors = _best_plateau(event, low, high)
            return BlanketCrowd(own, _count_draws(event, hiding_coins(event, victims, floors)))
        case _:
            own = frontier.randomized_response(high, 1 / event.levels)
    if len(event.eps_locals) > _MANY_USERS:  # one user more or less: the same for all victims
        return BlanketCrowd(own, _draws_for_any_victim(event))
    return BlanketCrowd(own, _count_draws(event, hiding_coins(event, victims, _common_blanket_probs(event))))


def _may_bound_counts(event: Personalized) -> bool:
    """Whether laws of counts may be bounded instead of computed: in large crowds, on many coordinates.

    Of many coordinates the bulk of each law decides, not its tails. The number of colluders must not matter here, or
    a bound might fall as colluders are added.
    """
    return event.coordinates >= symmetric.MANY_FOLDS and len(event.eps_locals) > SOME_COINS


def _count_draws(event: Personalized, coins: Coins) -> CloneCounts:
    """The law of the number of draws, on fewer counts: rounded down, which is the safe side."""
    return coarsen_counts(clone_counts(coins, bounded=_may_bound_counts(event)), parts=4)


def _common_blanket_probs(event: Personalized) -> ProbsOf:
    """g_i, rounded down, against a blanket that does not depend on the victim: for any kind but Laplace."""
    if event.kind == "clip_laplace":
        return blanket.clip_laplace_blanket_probs
    return functools.partial(blanket.level_blanket_probs, levels=event.levels)


@functools.lru_cache(maxsize=4)
def _draws_for_any_victim(event: Personalized) -> CloneCounts:
    """The law of the number of draws where the blanket does not depend on the victim, who is taken to hide most."""
    return _count_draws(event, hiding_coins(event, None, _common_blanket_probs(event)))


def _best_plateau(event: Personalized, low: float, high: float) -> tuple[Frontier, ProbsOf]:
    """A victim's frontier and the others' g_i against the plateau that seems best, for Laplace noise.

    Arguments:
        event: whose users hide the victims.
        low: the smallest budget of the victims: users with more hide none of them.
        high: their largest budget, that of the plateau.
    """
    budgets = budget_classes(event).high
    budgets = budgets[budgets <= low]
    budgets = budgets[np.linspace(0, len(budgets) - 1, min(len(budgets), _SAMPLE)).astype(np.int64)]

    def loss(half_width: float) -> float:
        hiding = float(blanket.laplace_blanket_probs(budgets, high, half_width).mean())
        return blanket.laplace_frontier(high, half_width).spread / math.sqrt(hiding + 1e-300)

    best = min(_WIDTHS, key=loss) if len(budgets) else _WIDTHS[0]

    def blanket_probs(eps_locals: np.ndarray) -> np.ndarray:
        return np.where(eps_locals <= low, blanket.laplace_blanket_probs(eps_locals, high, best), 0.0)

    return blanket.laplace_frontier(high, best), blanket_probs


def _estimate_clone_and_plateau_stds(event: Personalized, members: np.ndarray) -> tuple[float, float]:
    """About the std of the loss under Laplace noise (by clones, by a plateau): to choose by, never for a bound."""
    low, high = budget_range(event, members)
    hiding_users = max(sum(coins.mean for _, coins in hiding) for hiding in _ways_to_hide(event, members))
    by_clones = 2 * math.tanh(high / 2) / math.sqrt(hiding_users + 1)
    try:
        own, floors = _best_plateau(event, low, high)
    except NotApplicable:
        return by_clones, math.inf
    return by_clones, own.spread / math.sqrt(hiding_coins(event, members, floors).mean + 1)


def delta_curve(event: Personalized, victims: np.ndarray) -> Callable[[float], float]:
    """The curve of delta that holds for each of these victims on one coordinate, in both directions.

    Arguments:
        event: whose users hide the victims; its number of coordinates says only how precise the tails must be.
        victims: indices of users with similar budgets.

    Returns: a function from eps >= 0 to delta, rounded up; 1 where no bound applies, 0 from the largest budget on.
    """
    users, (_, top) = len(event.eps_locals), budget_range(event, victims)
    by_clones = True
    by_blanket = _LEAST_BUDGET <= top <= symmetric.LARGEST_LOSS
    if users > _MANY_USERS and by_blanket:  # one of them is enough: of boxes and levels, the blanket
        clones, plateau = (
            _estimate_clone_and_plateau_stds(event, victims) if event.kind == "laplace" else (math.inf, 0.0)
        )
        if event.kind == "rr" and event.levels == 2:  # whose blanket is the clones', which need no grid
            clones = 0.0
            plateau = math.inf
        alone = _may_bound_counts(event)
        by_blanket = plateau < (_CLEARLY if alone else _SIMILAR) * clones
        by_clones = not by_blanket if alone else clones < _SIMILAR * plateau
    bounds: list[Callable[[float], float]] = []
    if by_blanket:
        with contextlib.suppress(NotApplicable):
            bounds.append(_blanket_crowd(event, victims).delta)
    if by_clones or not bounds:
        bounds += [
            PoissonBinomialPair(hiding, top, _may_bound_counts(event)).delta for hiding in _ways_to_hide(event, victims)
        ]

    def delta(eps: float) -> float:
        least = 1.0
        for bound in bounds:
            with contextlib.suppress(NotApplicable):
                least = min(least, bound(eps))
        return least if eps < top else 0.0

    return delta


def pair(event: Personalized, victims: np.ndarray, *, coarse: bool = False) -> SymmetricPair:
    """The pair of all coordinates that dominates for each of these victims.

    Arguments:
        event: whose users hide the victims.
        victims: indices of users with similar budgets.
        coarse: whether the curve is asked at fewer eps.
    """
    _, top = budget_range(event, victims)
    nodes = symmetric.nodes_for(event.coordinates, coarse=coarse)
    return symmetric.pair_dominating_curve(
        delta_curve(event, victims), eps_pure=top, folds=event.coordinates, nodes=nodes
    )


@functools.lru_cache(maxsize=8)
def victim_groups(event: Personalized) -> tuple[np.ndarray, ...]:
    """Groups of users, as indices, one of which the worst victim is in.

    Groups are so small that the largest loss of a group is about that of its worst member, or smaller than another's.
    Budgets by which all users hide a victim alike are one group: the largest is the worst. Laplace noise hides no one
    of a smaller budget, so there groups are halved while theirs may be the worst.
    """
    by_budget = budget_classes(event)
    if len(by_budget.low) <= _DISTINCT:
        ends = np.cumsum(by_budget.counts)
        return tuple(
            users_by_budget(event)[end - count : end] for end, count in zip(ends, by_budget.counts, strict=True)
        )
    if event.kind != "laplace":
        return (np.arange(len(event.eps_locals)),)

    below, largest = split_by_budget(
        event, users_by_budget(event)[:], float(by_budget.high[-1]) / _NARROW * (1 - 1e-15)
    )
    results = [largest]
    worst = min(_estimate_clone_and_plateau_stds(event, largest))
    left = [below] if len(below) else []
    while left:
        members = left.pop()
        worst = max(
            worst, min(_estimate_clone_and_plateau_stds(event, members[-1:]))
        )  # of one user, whom nobody else makes worse
        here = min(_estimate_clone_and_plateau_stds(event, members))
        halves = halve_group(event, members)
        if here <= _ABOUT * worst or len(halves) == 1:
            results.append(members)
        else:
            left += halves
    return tuple(results)


def halve_group(event: Personalized, members: np.ndarray) -> list[np.ndarray]:
    """[users of smaller budgets, users of larger ones]; [all of them] where budgets are about equal, or it is no use.

    Only of Laplace noise do users of smaller budgets hide behind fewer others.

    Arguments:
        event: whose users they are.
        members: indices of users with similar budgets.
    """
    low, high = budget_range(event, members)
    if high <= low * _NARROW or event.kind != "laplace":
        return [members]
    return split_by_budget(event, members, math.sqrt(low * high))
