"""A lower bound on eps from a single run with many canaries (Steinke, Nasr, Jagielski 2023).

Each of m canaries is put into one of two neighbouring worlds (in or out, or one record or another) by a fair coin of
its own. From what the run released, an attacker guesses r of the coins, r fixed beforehand, and v guesses are right.
If the run is (eps, delta)-DP for the flip of one coin, then (their Thm. 5.2) with f(v) = P[Bin(r, e^eps / (1 + e^eps))
>= v]

    P[at least v are right] <= f(v) + 2 m delta max_{i = 1..m} (f(v - i) - f(v)) / i.

Every eps at which this is at most 1 - confidence is refuted, and with it all below, for they promise more: the bound
needs no monotony in eps, and no independence of the guesses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from scipy import special

from dovetail import _validate
from dovetail.audit.bounds import LowerBound
from dovetail.statements import Theorem

__all__ = ["THEOREM", "best_bound_of_guesses", "lower_bound", "p_value"]

THEOREM = Theorem(
    key="SNJ23.thm5.2",
    where="Steinke, Nasr, Jagielski (NeurIPS 2023), Thm. 5.2",
    url="https://arxiv.org/abs/2305.08846",
)
_OUTWARD = 1 + 1e-9  # raises a binomial tail by more than its error
_STEPS = 45  # of bisection


def p_value(*, eps: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """An upper bound on the probability of at least `right` right guesses, if the run is (eps, delta)-DP.

    Arguments:
        canaries: how many coins were tossed.
        guesses: how many of them were guessed, a number fixed beforehand.
        right: how many guesses are right.

    Guarantees:
        Where it is at most 1/2, not below the probability of at least `right` right guesses under any (eps, delta)-DP
        run: the theorem's, held against linear programs at small numbers. (Above 1/2 there are runs that exceed it.)
        With delta = 0 it is that of randomized response, which no run exceeds.
    """
    _validate.non_negative(eps=eps)
    _validate.in_interval(0, 1, delta=delta)
    _check_counts(canaries, guesses, right)
    if right == 0:
        return 1.0
    at_least = np.arange(right, 0, -1)
    tails = np.append(special.betainc(at_least, guesses - at_least + 1, special.expit(eps)), 1.0)  # f(v), ..., f(0)
    steepest = float(np.max((tails[1:] - tails[0]) / np.arange(1, right + 1)))  # beyond i = v it only falls
    return min(1.0, _OUTWARD * (float(tails[0]) + 2 * canaries * delta * steepest))


def lower_bound(*, canaries: int, guesses: int, right: int, delta: float, confidence: float, attack: str) -> LowerBound:
    """The largest eps that is refuted at this delta with this confidence; 0 if none is.

    Guarantees:
        Above the true eps with probability at most 1 - confidence, over the coins and the run.
        Never smaller for more right guesses, a smaller delta or a smaller confidence.
    """
    _validate.in_interval(0, 1, delta=delta)
    _validate.in_open_interval(0.5, 1, confidence=confidence)
    _check_counts(canaries, guesses, right)

    def is_refuted(eps: float) -> bool:
        return p_value(eps=eps, delta=delta, canaries=canaries, guesses=guesses, right=right) <= 1 - confidence

    low, high = 0.0, 1.0
    if is_refuted(0.0):
        while is_refuted(high):
            low, high = high, 2 * high
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return LowerBound(eps=low, delta=delta, attack=attack, confidence=confidence, trials=1)


def best_bound_of_guesses(
    tried: Mapping[int, int], *, canaries: int, delta: float, confidence: float, attack: str
) -> tuple[int, LowerBound]:
    """The best bound over several numbers of guesses, which were fixed beforehand.

    Arguments:
        tried: by each number of guesses, how many of them were right.

    Returns: the number of guesses that gives the largest bound, and that bound.

    Guarantees:
        As `lower_bound`: the chance of error is divided by how many numbers were tried.
    """
    if not tried:
        raise ValueError("no number of guesses to try: `tried` is empty")
    _validate.in_open_interval(0.5, 1, confidence=confidence)
    each = 1 - (1 - confidence) / len(tried)
    bounds = {
        guesses: lower_bound(
            canaries=canaries, guesses=guesses, right=right, delta=delta, confidence=each, attack=attack
        )
        for guesses, right in tried.items()
    }
    guesses = max(bounds, key=lambda number: bounds[number].eps)
    return guesses, dataclasses.replace(bounds[guesses], confidence=confidence)


def _check_counts(canaries: int, guesses: int, right: int) -> None:
    """Refuse counts other than 1 <= guesses <= canaries and 0 <= right <= guesses."""
    _validate.integer(canaries=canaries, guesses=guesses, right=right)
    _validate.at_least(1, canaries=canaries)
    _validate.in_interval(1, canaries, guesses=guesses)
    _validate.in_interval(0, guesses, right=right)
