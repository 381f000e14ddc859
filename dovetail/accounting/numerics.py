"""The gate that every bound passes, and what rounding may do to sums and transforms.

A number that could not be computed is no bound: it becomes infinite (an eps) or 1 (a delta), never 0. ``max(0.0, nan)``
is 0 and ``min(nan, x)`` is NaN, so bounds are made through this file, and `compose` takes none that is no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = [
    "ULP",
    "binomial_outward",
    "decaying_norm",
    "eps_bound",
    "exp",
    "lower_hull",
    "power",
    "probability",
    "smallest",
    "transform_error",
]

ULP = 2.0**-52
_PER_STAGE = 6  # roundings that a halving of a transform costs at the most, twiddle factors included


def eps_bound(value: float) -> float:
    """An upper bound on eps as it may be stated: a finite negative number says 0, what is no number says nothing.

    Guarantees:
        NaN and minus infinity are infinite; never NaN, never negative.
    """
    value = float(value)
    if math.isnan(value) or value == -math.inf:
        return math.inf
    return max(0.0, value)


def probability(value: float) -> float:
    """An upper bound on a probability as it may be stated: at most 1, and 1 for NaN and for a negative number."""
    value = float(value)
    return value if 0 <= value <= 1 else 1.0


def smallest(values: Iterable[float] | np.ndarray) -> float:
    """The smallest of several upper bounds, of which each holds; NaN and minus infinity are none; infinite if none is.

    It may be negative: a bound by itself, it has still to pass `eps_bound`.
    """
    found = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    found = found[~np.isnan(found) & (found > -np.inf)]
    return float(found.min()) if found.size else math.inf


def exp(value: float) -> float:
    """e^value; infinite where it would overflow, and for NaN."""
    return math.exp(value) if value < 709.0 else math.inf


def binomial_outward(trials: Any) -> Any:
    """The factor that covers the error of a binomial probability or tail, which grows with the number of trials.

    At a million trials scipy is off by up to 1.8e-12, at 1e12 by up to 2.7e-9 (tests/accounting/test_numerics.py).
    """
    return 1 + 1e-14 * np.sqrt(trials + 16.0)


def transform_error(length: int) -> float:
    """How far a computed Fourier coefficient of a vector of so many numbers may be off, relative to their sum.

    It is also the relative error of a transform in the Euclidean norm. Lengths have no prime factors above 11.
    """
    return _PER_STAGE * ULP * math.log2(max(length, 2))


def power(values: np.ndarray, times: int) -> np.ndarray:
    """values^times, by squaring: right to less than four roundings for each of the times."""
    result = None
    while True:
        if times & 1:
            result = values if result is None else result * values
        times >>= 1
        if not times:
            return values if result is None else result
        values = values * values


def lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The corners, one per row, of the lower convex hull of points at rising x."""
    hull: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _rise(hull[-1], point) <= _rise(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _rise(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def decaying_norm(slope: float, interval: float, count: int) -> float:
    """The Euclidean norm of (1 - e^(-h m)) e^(-slope m), m = 1, 2, ..., count, or a little more."""
    if slope == 0:
        return math.sqrt(count)
    square = math.exp(-2 * slope)
    linear = interval * math.sqrt(square * (1 + square) / -(math.expm1(-2 * slope) ** 3))
    return min(math.sqrt(min(float(count), 1 / math.expm1(2 * slope))), linear) * (1 + 1e-9)
