"""The parameter that meets a privacy target, never on the unsafe side.

Any protocol parameter that moves eps in one direction can be calibrated: `certify` is asked, not a formula inverted, so
what is calibrated is what will be certified.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from scipy.optimize import brentq

from dovetail import _validate
from dovetail.statements import NotApplicable

__all__ = ["eps_after_spending", "smallest_integer", "smallest_noise"]

_LOWEST, _HIGHEST = 2.0**-20, 2.0**40


def smallest_noise(eps_of: Callable[[float], float], *, eps: float, tolerance: float = 1e-6) -> float:
    """The smallest noise at which `eps_of(noise) <= eps`, to a relative tolerance, from above.

    `eps_of` falls as noise grows. A parameter that works the other way (an `eps_local`) is calibrated through its
    inverse.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated.
        eps_of(result / (1 + 10 * tolerance)) > eps, unless the result is the smallest noise tried (2^-20).
    """
    _validate.positive(eps=eps)
    ask = functools.lru_cache(maxsize=None)(eps_of)

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
        needed = eps_of(left)
        if needed <= eps:
            return eps
        if math.isinf(needed):
            return needed
        eps = needed * (1 + 1e-12 * 4.0 ** min(step, 12))
    raise NotApplicable(f"not certified: no eps found at delta={delta}")
