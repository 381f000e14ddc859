"""The smallest noise, number, eps or delta that meets a privacy target, always rounded conservatively.

Any protocol parameter that moves eps in one direction can be calibrated: the accountant is asked, not a formula
inverted, so what is calibrated is what will be certified. Every search returns a point that it has evaluated itself.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

from scipy.optimize import brentq

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import NotApplicable

__all__ = [
    "eps_after_spending",
    "smallest_eps",
    "smallest_integer",
    "smallest_noise",
    "smallest_point",
]

_HIGHEST = 40 * math.log(2)  # logarithm of the most noise that is tried
_USUAL_SLOPE = -1.0  # of a height along log noise, where nothing is known yet
_FLATTEST_SLOPE = -0.3  # no height is taken to fall more slowly
_LEAST_STEP = 0.05  # beyond an estimated root, in log noise, to be sure
_PATIENCE = 3  # guesses that need not halve the bracket
_LEAST_DELTA = 1e-30  # where the search for a delta begins
_TINY = 1e-290  # stands for a delta that may underflow


def smallest_noise(
    eps_of: Callable[[float], float],
    *,
    eps: float,
    tolerance: float = 1e-6,
    lowest: float = 2.0**-20,
    ruler: Callable[[float], float] = float,
) -> float:
    """The smallest noise, of `lowest` and more, at which `eps_of(noise) <= eps`, to a relative tolerance, from above.

    `eps_of` falls as noise grows. A parameter that works the other way (an `eps_local`) is calibrated through its
    inverse. `ruler` is any rising function of eps: the closer it is to one over noise, the fewer points are asked.

    Arguments:
        eps_of: the eps at a noise; it may be infinite.
        eps: the target.
        tolerance: of the noise, relative to it.
        lowest: the least noise that is tried.
        ruler: a rising function of eps that is about proportional to one over the noise.

    Returns: a noise that was asked about and meets the target.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated.
        eps_of(result / (1 + 2 * tolerance)) > eps, unless the result is the lowest.
    """
    _validate.positive(eps=eps, lowest=lowest)

    def noise_at(log_noise: float) -> float:
        return max(math.exp(log_noise), lowest)

    target = math.log(ruler(eps))

    def height(log_noise: float) -> float:
        value = numerics.as_eps_bound(eps_of(noise_at(log_noise)))
        if math.isinf(value):
            return math.inf
        above = math.log(max(ruler(value), 1e-300)) - target
        return min(0.0, above) if value <= eps else max(above, 1e-300)

    crossing = _find_crossing(height, tolerance, lowest=math.log(lowest))
    if crossing is None:
        raise ValueError(f"no noise up to 2^40 meets eps={eps}: ask for a larger eps or delta")
    return noise_at(crossing)


def _find_crossing(height: Callable[[float], float], tolerance: float, *, lowest: float) -> float | None:
    """A point where a falling function is at most 0, with one above 0 at most a tolerance before; None without one.

    The function is asked as rarely as possible, at points from `lowest` to `_HIGHEST`. By secants, for the logarithm of
    eps is about linear in that of noise. A height so little below 0 that at the flattest slope the tolerance would
    still be kept ends the search. Guesses aim there; where they do not help, at the side of the secant's root that is
    still open, or halfway.
    """
    low = -math.inf  # the height is above 0 here ...
    high = math.inf  # ... and at most 0 here
    x = max(0.0, lowest)
    points: list[tuple[float, float]] = []  # the last three at which the height was finite
    width = math.inf  # of the bracket when it was last halved
    idle = 0  # guesses since then
    step = 0.0
    while True:
        y = height(x)
        low, high = (x, high) if y > 0 else (low, x)
        if y > 0 and x >= _HIGHEST:
            return None
        if (y <= 0 and x <= lowest) or high - low <= tolerance or 0 >= y >= _FLATTEST_SLOPE * tolerance:
            return high
        points = [*points[-2:], (x, y)] if math.isfinite(y) else points
        root, slope = _estimate_root(points, x)
        inside = tolerance / 5 / max(1.0, -slope)  # where the height is little enough below 0
        if high - low == math.inf:
            idle += 1
            beyond = max((root + inside - x) * math.copysign(1.0, y), 0.0) + _LEAST_STEP * (idle > _PATIENCE)
            step = max(beyond, tolerance) if math.isfinite(y) else max(2 * step, math.log(2))
            x = min(max(x + math.copysign(step, y), lowest), _HIGHEST)
            continue
        width, idle = (high - low, 0) if high - low <= width / 2 else (width, idle + 1)
        x = root + inside if high - root > 2 * inside else root - tolerance / 2
        if not low < x < high or idle >= _PATIENCE or not points:
            x = (low + high) / 2
            idle = 0


def _estimate_root(points: list[tuple[float, float]], x: float) -> tuple[float, float]:
    """(root, slope): where the height is about 0, and about its slope there, never flatter than `_FLATTEST_SLOPE`.

    Arguments:
        points: up to three points (x, height), the last one asked last; by one alone the slope is the usual one.
        x: the root where there is no point.
    """
    if not points:
        return x, _USUAL_SLOPE
    slope = _USUAL_SLOPE
    if len(points) > 1 and points[-1][0] != points[-2][0]:
        slope = min((points[-1][1] - points[-2][1]) / (points[-1][0] - points[-2][0]), _FLATTEST_SLOPE)
    root = points[-1][0] - points[-1][1] / slope
    falls = sorted(points, key=lambda point: point[0])
    if len(points) == 3 and all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(falls)):
        (a, fa), (b, fb), (c, fc) = falls  # the parabola x(y) through all three
        bent = a * fb * fc / ((fa - fb) * (fa - fc)) + b * fa * fc / ((fb - fa) * (fb - fc))
        bent += c * fa * fb / ((fc - fa) * (fc - fb))
        if abs(bent - root) < abs(root - points[-1][0]):
            return bent, slope
    return root, slope


def smallest_integer(eps_of: Callable[[int], float], *, eps: float, low: int, high: int) -> int:
    """The smallest whole number in [low, high] at which `eps_of` <= eps, where more means more privacy (a padding).

    Arguments:
        eps_of: the eps at a whole number, falling.
        eps: the target.
        low: the first number that is tried.
        high: the last, which must meet the target.

    Guarantees:
        eps_of(result) <= eps, always: the returned point itself was evaluated.
    """
    _validate.positive(eps=eps)
    if not eps_of(high) <= eps:
        raise ValueError(f"no value up to {high} meets eps={eps}: ask for a larger eps or delta")
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if eps_of(middle) <= eps else (middle + 1, high)
    return high


def smallest_eps(delta_at: Callable[[float], float], *, delta: float, high: float, tolerance: float = 1e-9) -> float:
    """The smallest eps at which a falling `delta_at(eps) <= delta`, to a relative tolerance, from above.

    sqrt(log(1/delta_at)) is nearly linear in eps, so Brent's method on it takes few evaluations. `high` is where the
    search starts; it is doubled as long as delta is not met there.

    Arguments:
        delta_at: the delta at an eps, falling; 1 where none is known.
        delta: the target.
        high: where the search starts.
        tolerance: of the eps, relative to it.

    Returns: infinite where no eps meets the target.

    Guarantees:
        delta_at(result) <= delta: the returned point itself was evaluated.
    """
    _validate.in_open_interval(0, 1, delta=delta)

    @functools.cache
    def ask(eps: float) -> float:
        return numerics.as_probability_bound(delta_at(eps))

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
    eps = float(brentq(height, low, high, xtol=1e-300, rtol=tolerance / 4))
    step = tolerance / 4
    while ask(eps) > delta:
        eps = min(eps * (1 + step), high)
        step = 2 * step
    return eps


def smallest_point(holds: Callable[[float], bool], *, low: float, high: float) -> float:
    """The smallest point of an interval from which on a condition holds, to the last digits; infinite if it never does.

    Arguments:
        holds: a condition that stays true from some point on.
        low: the lower end, at which the condition is not asked.
        high: the upper end, at which it is asked first.

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

    Arguments:
        eps_of: the eps at a delta, that which is left.
        spent: how much of delta goes elsewhere when eps is that of the whole; it never falls as eps rises.
        delta: the whole of it, in (0, 1).
        steps: how often eps may climb.

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
        needed = numerics.as_eps_bound(eps_of(left))
        if needed <= eps:
            return eps
        if math.isinf(needed):
            return needed
        eps = needed * (1 + 1e-12 * 4.0 ** min(step, 12))
    raise NotApplicable(f"not certified: no eps found at delta={delta}")
