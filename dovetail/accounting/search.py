"""The smallest noise, number, eps or delta that meets a privacy target, always rounded conservatively.

Any protocol parameter that moves eps in one direction can be calibrated: the accountant is asked, not a formula
inverted, so what is calibrated is what will be certified. Every search returns a point that it has evaluated itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from scipy.optimize import brentq

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import NotApplicable

__all__ = [
    "eps_after_spending",
    "smallest_delta",
    "smallest_eps",
    "smallest_integer",
    "smallest_noise",
    "smallest_point",
]

_LOWEST, _HIGHEST = 2.0**-20, 2.0**40
_LEAST_DELTA = 1e-30  # where the search for a delta begins
_TINY = 1e-290  # stands for a delta that may underflow


def smallest_noise(eps_of: Callable[[float], float], *, eps: float, tolerance: float = 1e-6) -> float:
    """The smallest noise at which `eps_of(noise) <= eps`, to a relative tolerance, from above.

    `eps_of` falls as noise grows. A parameter that works the other way (an `eps_local`) is calibrated through its
    inverse.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated.
        eps_of(result / (1 + 10 * tolerance)) > eps, unless the result is the smallest noise tried (2^-20).
    """
    _validate.positive(eps=eps)

    @functools.cache
    def ask(noise: float) -> float:
        return numerics.eps_bound(eps_of(noise))

    noise = 1.0
    if ask(noise) > eps:
        while ask(noise) > eps:
            noise *= 2
            if noise > _HIGHEST:
                raise ValueError(f"expected a target that noise up to 2^40 can meet, got eps={eps}")
        bracket = (noise / 2, noise)
    else:
        while ask(noise) <= eps:
            noise /= 2
            if noise < _LOWEST:
                return noise * 2
        bracket = (noise, noise * 2)

    def gap(log_noise: float) -> float:
        return math.log(min(max(ask(math.exp(log_noise)), 1e-300), 1e300) / eps)

    noise = math.exp(brentq(gap, math.log(bracket[0]), math.log(bracket[1]), xtol=tolerance / 2))
    while ask(noise) > eps:
        noise *= 1 + tolerance
    return noise


def smallest_integer(eps_of: Callable[[int], float], *, eps: float, low: int, high: int) -> int:
    """The smallest whole number in [low, high] at which `eps_of` <= eps, where more means more privacy (a padding).

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated.
    """
    _validate.positive(eps=eps)
    if not eps_of(high) <= eps:
        raise ValueError(f"expected a target that a value up to {high} can meet, got eps={eps}")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if eps_of(middle) <= eps else (middle + 1, high)
    return high


def smallest_eps(delta_at: Callable[[float], float], *, delta: float, high: float, tolerance: float = 1e-9) -> float:
    """The smallest eps at which a falling `delta_at(eps) <= delta`, to a relative tolerance, from above.

    sqrt(log(1/delta_at)) is nearly linear in eps, so Brent's method on it takes few evaluations. `high` is where the
    search starts; it is doubled as long as delta is not met there.

    Guarantees:
        delta_at(result) <= delta: the returned point itself was evaluated.
    """
    _validate.in_open_interval(0, 1, delta=delta)

    @functools.cache
    def ask(eps: float) -> float:
        return numerics.probability(delta_at(eps))

    target = math.sqrt(-math.log(delta))

    def height(eps: float) -> float:
        return math.sqrt(-math.log(min(max(ask(eps), _TINY), 1.0))) - target

    low = 0.0
    if ask(low) <= delta:
        return low
    for _ in range(60):
        if height(high) > 0:
            break
        low, high = high, 2 * high
    else:
        return math.inf
    eps, step = float(brentq(height, low, high, xtol=1e-300, rtol=tolerance / 4)), tolerance / 4
    while ask(eps) > delta:
        eps, step = min(eps * (1 + step), high), 2 * step
    return eps


def smallest_delta(eps_of: Callable[[float], float], *, eps: float) -> float:
    """About the smallest delta with eps_of(delta) <= eps, for a theorem that goes from a delta to an eps only.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated; 1 if there is none.
    """
    _validate.non_negative(eps=eps)

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


def smallest_point(holds: Callable[[float], bool], *, low: float, high: float) -> float:
    """The smallest point of an interval from which on a condition holds, to the last digits; infinite if it never does.

    Guarantees:
        holds(result), unless it is infinite.
    """
    _validate.finite(low=low, high=high)
    if not holds(high):
        return math.inf
    while True:
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-15 * abs(high):
            return high
        low, high = (low, middle) if holds(middle) else (middle, high)


def eps_after_spending(
    eps_of: Callable[[float], float], spent: Callable[[float], float], *, delta: float, steps: int = 40
) -> float:
    """The smallest eps with eps_of(delta - spent(eps)) <= eps, where a larger eps may spend more of delta.

    Climbs from 0: each eps is what is needed for the delta that the last one left. Steps become a little longer than
    that, so that the climb ends.

    Guarantees:
        eps_of(delta - spent(result)) <= result, always: the returned point itself was evaluated.
        `NotApplicable` where nothing is left of delta.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    eps = 0.0
    for step in range(steps):
        left = delta * (1 - 1e-10) - spent(eps)
        if left <= 0:
            raise NotApplicable(f"not certified: at eps={eps:.4g}, more than delta={delta} is spent beside the noise")
        needed = numerics.eps_bound(eps_of(left))
        if needed <= eps:
            return eps
        if math.isinf(needed):
            return needed
        eps = needed * (1 + 1e-12 * 4.0 ** min(step, 12))
    raise NotApplicable(f"not certified: no eps found at delta={delta}")
