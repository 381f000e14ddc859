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

__all__ = ["smallest_integer", "smallest_noise"]

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
