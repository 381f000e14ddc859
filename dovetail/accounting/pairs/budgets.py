"""Users by their public budgets: who is left to hide a victim, and with which probabilities.

A user hides a victim with a probability that depends on its own budget. Where there are many users, those of
neighbouring budgets are taken together, each with the least probability of any of them.
"""

from __future__ import annotations

import bisect
import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dovetail.accounting.pairs.binomial import MANY, Coins
from dovetail.events import Personalized

__all__ = ["Classes", "ProbsOf", "budgets_of", "classes", "honest", "order_of", "span", "split"]

_MOST_CLASSES = 2000

ProbsOf = Callable[[np.ndarray], np.ndarray]  # of budgets


@functools.lru_cache(maxsize=4)
def budgets_of(event: Personalized) -> np.ndarray:
    """Every user's budget."""
    found = np.array(event.eps_locals, dtype=float)
    found.flags.writeable = False
    return found


_last_orders: deque[np.ndarray] = deque(maxlen=1)


def order_of(event: Personalized) -> np.ndarray:
    """All users by rising budgets."""
    return _ordered(event)[0]


@functools.lru_cache(maxsize=4)
def _ordered(event: Personalized) -> tuple[np.ndarray, np.ndarray]:
    """All users by rising budgets, and those budgets; a search scales budgets, which leaves the last order as it is."""
    budgets = budgets_of(event)
    for order in tuple(_last_orders):
        if len(order) == len(budgets) and np.all(np.diff(rising := budgets[order]) >= 0):
            return order, rising
    order = np.argsort(budgets)
    order.flags.writeable = False
    _last_orders.append(order)
    return order, budgets[order]


def span(event: Personalized, members: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest budget of these users; at once, if they are neighbours in `order_of`."""
    budgets = budgets_of(event)
    if members.base is not None and members.base is order_of(event):
        return float(budgets[members[0]]), float(budgets[members[-1]])
    return float(budgets[members].min()), float(budgets[members].max())


def split(event: Personalized, members: np.ndarray, at: float) -> list[np.ndarray]:
    """Those of these users whose budgets are at most this one, and the others."""
    budgets = budgets_of(event)
    if members.base is not None and members.base is order_of(event):
        cut = bisect.bisect_right(members, at, key=budgets.__getitem__)
        return [members[:cut], members[cut:]]
    smaller = budgets[members] <= at
    return [members[smaller], members[~smaller]]


class Classes(NamedTuple):
    """Users by their budgets: the smallest and the largest budget of each class, and how many they are."""

    low: np.ndarray
    high: np.ndarray
    counts: np.ndarray


@functools.lru_cache(maxsize=4)
def classes(event: Personalized) -> Classes:
    """One class for each budget, or for neighbouring budgets where they are many."""
    _, ordered = _ordered(event)
    firsts = np.flatnonzero(np.diff(ordered, prepend=-np.inf))
    values, counts = ordered[firsts], np.diff(firsts, append=len(ordered))
    starts = np.arange(0, len(values), max(1, len(values) // _MOST_CLASSES))
    ends = np.append(starts[1:], len(values)) - 1
    return Classes(values[starts], values[ends], np.add.reduceat(counts, starts))


def honest(event: Personalized, victims: np.ndarray | None, probs_of: ProbsOf) -> Coins:
    """What the honest others do to hide any of these victims (None: of all users), at the least.

    `probs_of(budgets)` rises and then falls with the budget, so that a class hides no less than at one of its ends.
    """
    budgets = budgets_of(event)
    if len(budgets) > MANY:
        low, high, counts = classes(event)
        probs = np.minimum(probs_of(low), probs_of(high))
        order = np.argsort(probs)
        probs, counts = probs[order], counts[order]
        gone = np.maximum(0, np.cumsum(counts) - (len(budgets) - 1 - event.colluders))  # those who hide most
        return Coins(probs, counts - np.minimum(counts, gone))
    probs = probs_of(budgets)
    gone = np.argmax(probs) if victims is None else victims[np.argmax(probs[victims])]
    others = np.delete(probs, gone)
    return Coins(*np.unique(np.sort(others)[: len(others) - event.colluders], return_counts=True))
