"""The gate that every bound passes, and what rounding may do to sums and transforms.

A number that could not be computed is no bound: it becomes infinite (an eps) or 1 (a delta), never 0. ``max(0.0, nan)``
is 0 and ``min(nan, x)`` is NaN, so bounds are made through this file, and `compose` takes none that is no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import _ufuncs  # what scipy.stats.binom calls, whose import takes half a second

__all__ = [
    "ULP",
    "binomial_cdf",
    "binomial_outward",
    "binomial_pmf",
    "binomial_sf",
    "decaying_norm",
    "eps_bound",
    "exp",
    "lower_hull",
    "power",
    "probability",
    "smallest",
    "summed",
    "transform_error",
]

ULP = 2.0**-52
_NEGLIGIBLE = -100.0  # log of Fourier coefficients that are charged, not summed
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


def binomial_pmf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C = count) for C ~ Bin(trials, prob), right to `binomial_outward`; 0 for counts that are not possible."""
    return _possible(_ufuncs._binom_pmf, counts, trials, prob, below=0.0, beyond=0.0)


def binomial_cdf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C <= count), right to `binomial_outward`."""
    return _possible(_ufuncs._binom_cdf, counts, trials, prob, below=0.0, beyond=1.0)


def binomial_sf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C > count), right to `binomial_outward`."""
    return _possible(_ufuncs._binom_sf, counts, trials, prob, below=1.0, beyond=0.0)


def _possible(law: Any, counts: Any, trials: Any, prob: float, *, below: float, beyond: float) -> np.ndarray:
    counts, trials = np.floor(np.asarray(counts, dtype=float)), np.asarray(trials, dtype=float)
    if not 0 <= prob <= 1 or (trials < 0).any():
        raise ValueError(f"expected a probability and trials >= 0, got prob={prob} and trials={trials}")
    with np.errstate(all="ignore"):
        found = law(np.clip(counts, 0.0, trials), trials, prob)
    return np.where(counts < 0, below, np.where(counts > trials, beyond, found))


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


def summed(laws: Iterable[tuple[np.ndarray, int]], size: int) -> tuple[np.ndarray, float]:
    """The law of a sum of so many draws from each law, on a circle of `size` points, and its error.

    Each law is on the indices from 0 on; what lies beyond the circle is wrapped around. The error is in the Euclidean
    norm: with coefficients right to e, and m a computed one's modulus plus e, a product of powers is right to the
    product of all m^times times the sum of times e / m: one factor after the other changes, and none exceeds its m.
    Products that are too small to matter are charged and not summed. Laws may be tilted before.
    """
    off = transform_error(size)
    alive = np.arange(size // 2 + 1)
    product, log_m, errors = np.ones(len(alive), dtype=complex), np.zeros(len(alive)), np.zeros(len(alive))
    for law, times in laws:
        wraps = -(-len(law) // size)
        around = law if wraps == 1 else np.pad(law, (0, wraps * size - len(law))).reshape(wraps, size).sum(axis=0)
        spectrum = rfft(around, size)[alive]
        modulus = np.abs(spectrum) + off * (1 + 1e-9)
        log_m += times * np.log(modulus)
        keep = log_m > _NEGLIGIBLE
        errors = errors[keep] + times * (off / modulus[keep] + 4 * ULP)
        product = product[keep] * power(spectrum[keep], times)
        alive, log_m = alive[keep], log_m[keep]
    whole = np.zeros(size // 2 + 1, dtype=complex)
    whole[alive] = product
    spread = math.sqrt(2 / size)
    error = spread * float(np.linalg.norm(np.exp(log_m) * errors))
    error += spread * off * float(np.linalg.norm(product)) + math.sqrt(2) * math.exp(_NEGLIGIBLE)
    return np.maximum(irfft(whole, size), 0.0), error * (1 + 1e-9)


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
