"""The gate that every bound passes, and what rounding may do to sums and transforms.

A number that could not be computed is no bound: it becomes infinite (an eps) or 1 (a delta), never 0. ``max(0.0, nan)``
is 0 and ``min(nan, x)`` is NaN, so bounds are made through this file, and `compose` takes none that is no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import _ufuncs  # what scipy.stats.binom calls, whose import takes half a second

from dovetail.statements import NotApplicable

__all__ = [
    "ULP",
    "Spectrum",
    "as_eps_bound",
    "as_probability_bound",
    "binomial_cdf",
    "binomial_outward_factor",
    "binomial_pmf",
    "binomial_sf",
    "decaying_norm",
    "decaying_sums",
    "exp_or_infinity",
    "fourier_coefficients",
    "law_of_sum",
    "lower_hull",
    "power",
    "smallest_bound",
    "tilt",
    "transform_error",
]

ULP = 2.0**-52
_NEGLIGIBLE = -100.0  # log of Fourier coefficients that are charged, not summed
_TINY = 1e-300  # stands for what underflows
_PER_STAGE = 6  # roundings that a halving of a transform costs at the most, twiddle factors included
_NO_OVERFLOW = 709.0  # e to at most that is a float


def as_eps_bound(value: float) -> float:
    """An upper bound on eps as it may be stated: a finite negative number says 0, what is no number says nothing.

    Guarantees:
        NaN and minus infinity are infinite; never NaN, never negative.
    """
    value = float(value)
    if math.isnan(value) or value == -math.inf:
        return math.inf
    return max(0.0, value)


def as_probability_bound(value: float) -> float:
    """An upper bound on a probability as it may be stated: at most 1, and 1 for NaN and for a negative number."""
    value = float(value)
    return value if 0 <= value <= 1 else 1.0


def smallest_bound(values: Iterable[float] | np.ndarray) -> float:
    """The smallest of several upper bounds, of which each holds; NaN and minus infinity are none; infinite if none is.

    It may be negative: a bound by itself, it has still to pass `as_eps_bound`.
    """
    bounds = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=float)
    bounds = bounds[~np.isnan(bounds) & (bounds > -np.inf)]
    return float(bounds.min()) if bounds.size else math.inf


def exp_or_infinity(value: float) -> float:
    """e^value, to a rounding; infinite where it would overflow, and for NaN."""
    return math.exp(value) if value < _NO_OVERFLOW else math.inf


def binomial_outward_factor(trials: Any) -> Any:
    """1 + e, where e is more than the relative error of a binomial probability or tail from this file.

    Multiply by it to round up; the error grows with the number of trials (a number or an array).

    At a million trials scipy is off by up to 1.8e-12, at 1e12 by up to 2.7e-9 (tests/accounting/test_numerics.py).
    """
    return 1 + 1e-14 * np.sqrt(trials + 16.0)


def binomial_pmf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C = count) for C ~ Bin(trials, prob), right to `binomial_outward_factor`; 0 for impossible counts."""
    return _evaluate_where_possible(_ufuncs._binom_pmf, counts, trials, prob, below=0.0, beyond=0.0)


def binomial_cdf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C <= count), right to `binomial_outward_factor`."""
    return _evaluate_where_possible(_ufuncs._binom_cdf, counts, trials, prob, below=0.0, beyond=1.0)


def binomial_sf(counts: Any, trials: Any, prob: float) -> np.ndarray:
    """P(C > count), right to `binomial_outward_factor`."""
    return _evaluate_where_possible(_ufuncs._binom_sf, counts, trials, prob, below=1.0, beyond=0.0)


def _evaluate_where_possible(
    law: Any, counts: Any, trials: Any, prob: float, *, below: float, beyond: float
) -> np.ndarray:
    """law(count, trials, prob) for counts from 0 to trials; `below` for smaller counts and `beyond` for larger ones.

    Counts are rounded down to whole numbers; counts and trials are broadcast against each other.
    """
    counts = np.floor(np.asarray(counts, dtype=float))
    trials = np.asarray(trials, dtype=float)
    if not 0 <= prob <= 1 or (trials < 0).any():
        raise ValueError(f"expected a probability and trials >= 0, got prob={prob} and trials={trials}")
    with np.errstate(all="ignore"):
        probs = law(np.clip(counts, 0.0, trials), trials, prob)
    return np.where(counts < 0, below, np.where(counts > trials, beyond, probs))


def transform_error(length: int) -> float:
    """How far a computed Fourier coefficient of a vector of so many numbers may be off, relative to their sum.

    It is also the relative error of a transform in the Euclidean norm. Lengths have no prime factors above 11.
    """
    return _PER_STAGE * ULP * math.log2(max(length, 2))


def power(values: np.ndarray, times: int) -> np.ndarray:
    """values^times for times >= 1, by squaring: right to less than four roundings for each of the times."""
    result = None
    while True:
        if times & 1:
            result = values if result is None else result * values
        times >>= 1
        if not times:
            return values if result is None else result
        values = values * values


def tilt(log_probs: np.ndarray, exponents: np.ndarray, *, down: bool = False) -> tuple[float, np.ndarray]:
    """(log M, law), the law with sum 1, such that M law >= e^along times the probabilities; if `down`, <= instead.

    That holds however log M itself is rounded; callers round its error in their own direction.

    A law that is tilted so that the sums in question become the likely ones has them right to a relative error, however
    rare they are. The exponent of e is a logarithm, a product and the difference to the largest exponent; its error is
    that of its terms, each rounded once.

    Arguments:
        log_probs: logarithms of the probabilities, -inf where one is 0.
        exponents: the exponent of the tilt at each of them.
        down: whether to round down instead of up.
    """
    exponent = log_probs + exponents
    top = float(exponent.max())
    if not math.isfinite(top):
        raise NotApplicable("a law could not be tilted: no probability is positive, or one is no number")
    possible = log_probs > -np.inf
    with np.errstate(invalid="ignore"):
        terms = np.abs(log_probs) + np.abs(exponents) + 2 * np.abs(exponent) + abs(top) + 8
        law = np.exp(exponent - top) * (1 - ULP * terms if down else 1 + ULP * terms)
    law = np.where(possible, np.maximum(law, 0.0 if down else _TINY), 0.0)
    total = float(law.sum())
    return top + math.log(total), law / total


def fourier_coefficients(law: np.ndarray, size: int) -> np.ndarray:
    """The Fourier coefficients of a law on the indices from 0 on, wrapped around a circle of `size` points.

    Each is right to `transform_error(size)` times the sum of the law.
    """
    wraps = -(-len(law) // size)
    around = law if wraps == 1 else np.pad(law, (0, wraps * size - len(law))).reshape(wraps, size).sum(axis=0)
    return rfft(around, size)


class Spectrum(NamedTuple):
    """The Fourier coefficients of a law on a circle of `size` points: those that matter, and how far all may be off.

    This is the one place that goes back from coefficients to probabilities. Whatever made the law - powers, a
    generating function, a product that is known - says how far its coefficients may be off; what the way back adds, and
    the coefficients that are left out, is charged here. Coefficients may have rows, one for each of several laws.
    """

    size: int
    where: np.ndarray  # the frequencies that are kept, of 0, ..., size // 2
    values: np.ndarray  # complex: the coefficients at these frequencies, in the last axis
    off: np.ndarray  # how far each of them may be from the exact one
    rest: float  # the largest modulus that a coefficient which was left out may have

    def law(self) -> np.ndarray:
        """The probabilities of all points, each right to `error_of_a_point`, all together to `error`.

        They may come out a little negative.
        """
        whole = np.zeros((*self.values.shape[:-1], self.size // 2 + 1), dtype=complex)
        whole[..., self.where] = self.values
        return irfft(whole, self.size)

    def error_of_a_point(self) -> np.ndarray:
        """How far any one probability of `law` may be off, rounded up: the mean of what all coefficients are off."""
        modulus = self.off + transform_error(self.size) * np.abs(self.values)
        return (2 / self.size * modulus.sum(axis=-1) + self.rest) * (1 + 1e-9)

    def error(self) -> float:
        """How far `law` may be off in the Euclidean norm, rounded up; for coefficients in one row."""
        spread = math.sqrt(2 / self.size)
        norm = float(np.linalg.norm(self.off)) + transform_error(self.size) * float(np.linalg.norm(self.values))
        return (spread * norm + math.sqrt(2) * self.rest) * (1 + 1e-9)

    def weighted_sum(self, kernel: np.ndarray, largest: float) -> float:
        """The sum of weight times probability over all points, rounded up, for weights that are not negative.

        Arguments:
            kernel: at each of these frequencies the sum of the weights times e^(i angle index), right to a few ULP.
            largest: the sum of the weights alone, which no modulus of the kernel exceeds.
        """
        off = self.off + 32 * ULP * np.abs(self.values)
        twice = np.where((self.where == 0) | (2 * self.where == self.size), 1.0, 2.0)
        total = float((twice * (self.values * kernel).real).sum()) + float((twice * np.abs(kernel) * off).sum())
        return (total + (self.size + 2) * self.rest * largest) / self.size


def law_of_sum(laws: Iterable[tuple[np.ndarray, int]], size: int) -> tuple[np.ndarray, float]:
    """The law of a sum of so many draws from each law, on a circle of `size` points, and its error.

    Each law is on the indices from 0 on; what lies beyond the circle is wrapped around. Laws may be tilted before, and
    their sums are at most about 1.

    Arguments:
        laws: each law with how many draws of it there are, 1 or more.
        size: of the circle; a length that `scipy.fft` is fast for.

    Returns: the law, not negative, and how far it may be off in the Euclidean norm, rounded up.

    With coefficients right to e, and m a computed one's modulus plus e, a product of powers is right to the
    product of all m^times times the sum of times e / m: one factor after the other changes, and none exceeds its m.
    Products that are too small to matter are charged and not summed.
    """
    off = transform_error(size)
    alive = np.arange(size // 2 + 1)
    product = np.ones(len(alive), dtype=complex)
    log_m = np.zeros(len(alive))
    errors = np.zeros(len(alive))
    for law, times in laws:
        law_coefficients = fourier_coefficients(law, size)[alive]
        modulus = np.abs(law_coefficients) + off * (1 + 1e-9)
        log_m += times * np.log(modulus)
        keep = log_m > _NEGLIGIBLE
        errors = errors[keep] + times * (off / modulus[keep] + 4 * ULP)
        product = product[keep] * power(law_coefficients[keep], times)
        alive, log_m = alive[keep], log_m[keep]
    spectrum = Spectrum(size, alive, product, np.exp(log_m) * errors, math.exp(_NEGLIGIBLE))
    return np.maximum(spectrum.law(), 0.0), spectrum.error()


def lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The corners of the lower convex hull of points (x, y) at strictly rising x: one (x, y) per row, x rising."""
    hull: list[tuple[float, float]] = []
    for point in zip(x.tolist(), y.tolist(), strict=True):
        while len(hull) > 1 and _slope_between(hull[-1], point) <= _slope_between(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _slope_between(a: tuple[float, float], b: tuple[float, float]) -> float:
    """The slope of the line through two points (x, y)."""
    return (b[1] - a[1]) / (b[0] - a[0])


def decaying_sums(values: np.ndarray, slope: float) -> np.ndarray:
    """The sum over m >= 0 of e^(-slope m) values[j + m], at every j, of numbers that are not negative.

    By doubling: each pass takes twice as many terms together. A sum of n terms is right to 2 roundings for each of the
    log2(n) passes, those of e^(-slope m) included; terms below e^-745 of the first underflow.
    """
    sums = values.copy()
    span = 1
    while span < len(sums) and slope * span < 745:
        sums[:-span] += math.exp(-slope * span) * sums[span:]
        span *= 2
    return sums


def decaying_norm(slope: float, interval: float, count: int) -> float:
    """The Euclidean norm of (1 - e^(-h m)) e^(-slope m) over m = 1, ..., count, h the interval; rounded up.

    Slope and interval are not negative.
    """
    if slope == 0:
        return math.sqrt(count)
    square = math.exp(-2 * slope)
    linear = interval * math.sqrt(square * (1 + square) / -(math.expm1(-2 * slope) ** 3))
    return min(math.sqrt(min(float(count), 1 / math.expm1(2 * slope))), linear) * (1 + 1e-9)
