"""Lower bounds on what an adversary learns, and the exact laws that they are read off.

An attack looks at one statistic of its view and says "first world" where the statistic has certain values. If that
happens with probability p in the first world and q in a neighbouring one, no (eps, delta) with p > e^eps q + delta can
hold: eps is at least log((p - delta) / q). An `ExactAttack` has the exact law of the statistic in both worlds and takes
the best threshold, on the statistic or on its likelihood ratio, in either order of the worlds. Everything is rounded
down: an error may only make an attack look weaker.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from dovetail import _validate
from dovetail.statements import check_guarantee

__all__ = ["ExactAttack", "LowerBound", "best_bound", "disjoint_attack"]

_RELATIVE = 1e-9  # more than the relative error of a probability from a closed form, and of sums of millions of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No smaller eps holds at this delta: surely, or with `confidence` where `trials` runs were counted.

    `attack` describes what the adversary looks at; `trials` is 0 for an exact bound, whose `confidence` is 1.
    """

    eps: float
    delta: float
    attack: str
    confidence: float = 1.0
    trials: int = 0

    def __post_init__(self) -> None:
        check_guarantee(eps=self.eps, delta=self.delta)
        _validate.in_interval(0, 1, confidence=self.confidence)

    @property
    def is_unbounded(self) -> bool:
        """Whether no finite eps holds."""
        return math.isinf(self.eps)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExactAttack:
    """A statistic, its values in order, and the log probability of each in two neighbouring worlds.

    `log_first` and `log_second` are natural logarithms, value by value, -inf where a value is impossible. `slack` is
    more than the error of any sum of these probabilities; 0 where they are exact up to rounding, as closed forms are.
    Then a value that has probability 0 in one world alone shows that no finite eps holds. `pure_eps` is a lower bound
    on eps at delta = 0 that is known beside the laws: a supremum of log ratios in closed form, infinite where it has
    none.

    Guarantees:
        `eps` and `delta` are never above what the two laws allow, nor what any set of values within `slack` allows.
        They are inverse to each other where the best set of values is a tail of the likelihood ratio, as it is for
        exact laws.
    """

    attack: str
    log_first: np.ndarray
    log_second: np.ndarray
    slack: float = 0.0
    pure_eps: float = 0.0

    def __post_init__(self) -> None:
        if self.log_first.shape != self.log_second.shape or self.log_first.ndim != 1:
            raise ValueError(
                f"the two laws are not on the same values: shapes {self.log_first.shape}, {self.log_second.shape}"
            )
        _validate.non_negative(slack=self.slack)
        if not self.pure_eps >= 0:
            raise ValueError(f"pure_eps must not be negative, got pure_eps={self.pure_eps!r}")

    def eps(self, *, delta: float) -> LowerBound:
        """The largest eps that some threshold refutes at this delta, rounded down; 0 if none refutes anything.

        A threshold's power p is lowered by the slack and by `_RELATIVE`, its false alarms q are raised by both: then
        log((p - delta) / q) is not above what the exact laws give.
        """
        _validate.in_interval(0, 1, delta=delta)
        largest = self.pure_eps if delta == 0 else 0.0
        for log_p, log_q in self._log_tails_of_both_worlds():
            power = _log_of_difference(log_p + math.log1p(-_RELATIVE), delta + self.slack)
            attainable = power > -np.inf
            if attainable.any():
                alarm = log_q[attainable] + math.log1p(_RELATIVE)
                alarm = np.logaddexp(alarm, math.log(self.slack)) if self.slack else alarm
                largest = max(largest, float(np.max(power[attainable] - alarm)))
        return LowerBound(eps=largest, delta=delta, attack=self.attack)

    def delta(self, *, eps: float) -> float:
        """The largest delta that some set of values shows to be needed at this eps >= 0, rounded down.

        Without slack it is sum max(0, p - e^eps q) over all values, for the worlds in either order.
        """
        _validate.non_negative(eps=eps)
        with np.errstate(over="ignore"):
            worlds = np.exp(np.stack([self.log_first, self.log_second]))
            missed = self.slack * (1 + float(np.exp(eps))) if self.slack else 0.0
            factor = float(np.exp(eps)) * (1 + _RELATIVE)
        largest = 0.0
        for p, q in (worlds, worlds[::-1]):
            with np.errstate(invalid="ignore"):
                gap = p * (1 - _RELATIVE) - np.where(q > 0, q * factor, 0.0)
            largest = max(largest, float(np.sum(gap[gap > 0])) * (1 - _RELATIVE) - missed)
        return largest

    def _log_tails_of_both_worlds(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs of arrays: the log probabilities of all tails in one world, and of the same tails in the other.

        Tails of the statistic and of its likelihood ratio, upper and lower ones, with either world first. Ratios alone
        would do for exact laws; where the laws carry errors, values of no consequence may have the largest ratios.
        """
        possible = (self.log_first > -np.inf) | (self.log_second > -np.inf)
        first, second = self.log_first[possible], self.log_second[possible]
        by_ratio = np.argsort(first - second, kind="stable")
        tails = []
        for order in (slice(None), by_ratio):
            for turned in (slice(None, None, -1), slice(None)):
                both = [np.logaddexp.accumulate(log[order][turned]) for log in (first, second)]
                tails += [(both[0], both[1]), (both[1], both[0])]
        return tails


def disjoint_attack(attack: str) -> ExactAttack:
    """The attack by a statistic that always has one value in the first world and another in the second: eps = inf."""
    certain = np.array([0.0, -np.inf])
    return ExactAttack(attack=attack, log_first=certain, log_second=certain[::-1])


def best_bound(bounds: Sequence[LowerBound]) -> LowerBound:
    """The largest of these lower bounds; at most one of them may be counted.

    Exact bounds hold surely, so that choosing among them costs no confidence.
    """
    return max(bounds, key=lambda bound: bound.eps)


def _log_of_difference(log_p: np.ndarray, amount: float) -> np.ndarray:
    """log(p - amount) from log p, for amount >= 0; -inf where p is not above it."""
    if amount == 0:
        return log_p
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        left = -np.expm1(math.log(amount) - log_p)
        return np.where(left > 0, log_p + np.log(np.maximum(left, 0)), -np.inf)
