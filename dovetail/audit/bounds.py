"""Lower bounds on what an adversary learns, and the exact laws that they are read off.

An attack looks at one statistic of its view and says "first world" where the statistic has certain values. If that
happens with probability p in the first world and q in a neighbouring one, no (eps, delta) with p > e^eps q + delta can
hold: eps is at least log((p - delta) / q). A `ExactAttack` has the exact law of the statistic in both worlds and takes
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

__all__ = ["ExactAttack", "LowerBound", "best", "disjoint"]

_RELATIVE = 1e-9  # more than the relative error of a probability from a closed form, and of sums of millions of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowerBound:
    """No smaller eps holds at this delta: surely, or with `confidence` where `trials` runs were counted."""

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

    `slack` is more than the error of any sum of these probabilities; 0 where they are exact up to rounding, as closed
    forms are. Then a value that has probability 0 in one world alone shows that no finite eps holds. `pure` is what is
    known at delta = 0 beside that: a supremum of log ratios in closed form, infinite where they have no bound.

    Guarantees:
        `eps` and `delta` are never above what the two laws allow, nor what any set of values within `slack` allows.
        They are inverse to each other where the best set of values is a tail of the likelihood ratio, as it is for
        exact laws.
    """

    attack: str
    log_first: np.ndarray
    log_second: np.ndarray
    slack: float = 0.0
    pure: float = 0.0

    def __post_init__(self) -> None:
        if self.log_first.shape != self.log_second.shape or self.log_first.ndim != 1:
            raise ValueError(
                f"the two laws are not on the same values: shapes {self.log_first.shape}, {self.log_second.shape}"
            )
        _validate.non_negative(slack=self.slack)
        if not self.pure >= 0:
            raise ValueError(f"pure must not be negative, got pure={self.pure!r}")

    def eps(self, *, delta: float) -> LowerBound:
        """The largest eps that some threshold refutes at this delta."""
        _validate.in_interval(0, 1, delta=delta)
        largest = self.pure if delta == 0 else 0.0
        for log_p, log_q in self._tails():
            power = _log_minus(log_p + math.log1p(-_RELATIVE), delta + self.slack)
            attainable = power > -np.inf
            if attainable.any():
                alarm = log_q[attainable] + math.log1p(_RELATIVE)
                alarm = np.logaddexp(alarm, math.log(self.slack)) if self.slack else alarm
                largest = max(largest, float(np.max(power[attainable] - alarm)))
        return LowerBound(eps=largest, delta=delta, attack=self.attack)

    def delta(self, *, eps: float) -> float:
        """The largest delta that some set of values shows to be needed at this eps."""
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

    def _tails(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Log probabilities of all tails, of the statistic and of its likelihood ratio, in both orders of the worlds.

        Where the laws carry errors, these put values of no consequence first in the order of ratios: hence both.
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


def disjoint(attack: str) -> ExactAttack:
    """A statistic that has one value in the first world and another in the second, always."""
    certain = np.array([0.0, -np.inf])
    return ExactAttack(attack=attack, log_first=certain, log_second=certain[::-1])


def best(bounds: Sequence[LowerBound]) -> LowerBound:
    """The largest of these lower bounds; exact ones need no correction for having been many."""
    return max(bounds, key=lambda bound: bound.eps)


def _log_minus(log_p: np.ndarray, amount: float) -> np.ndarray:
    """log(p - amount), -inf where nothing is left."""
    if amount == 0:
        return log_p
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        left = -np.expm1(math.log(amount) - log_p)
        return np.where(left > 0, log_p + np.log(np.maximum(left, 0)), -np.inf)
