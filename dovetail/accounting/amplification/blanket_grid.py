"""The law of a blanket likelihood ratio on a grid, and the mean excess of its n-fold sum, both rounded outward.

Every point of the law is split between its two neighbours on the grid. That keeps the mean and is a spread, so the mean
of any convex function of a sum of such draws can only rise. The n-fold sum is taken by an FFT of the exponentially
tilted law: relative precision at any delta, aliasing that only adds mass, rounding errors charged.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.fft import next_fast_len, rfft
from scipy.optimize import brentq

from dovetail import _validate

__all__ = ["MOST_POINTS", "Grid", "expected_excess"]

MOST_POINTS = 2**21
_FFT_ERROR = 2e-14  # of one Fourier coefficient of a probability vector, as computed
_CELL_ERROR = 1e-15  # times the number of points: what rounding may do to the splits between neighbours
_NEGLIGIBLE = -120.0  # log of Fourier coefficients that are bounded instead of summed


class Grid:
    """Probabilities on the points (first + i) * step that cover [bottom, top]."""

    def __init__(self, *, bottom: float, top: float, step: float) -> None:
        self.step = step
        self.first = math.floor(bottom / step) - 1
        self.probs = np.zeros(math.ceil(top / step) + 2 - self.first)

    @property
    def values(self) -> np.ndarray:
        """The points."""
        return (self.first + np.arange(self.probs.size)) * self.step

    def add_point(self, value: float, prob: float) -> None:
        """Adds an atom, split without moving its mean."""
        place = value / self.step - self.first
        left = min(int(place), self.probs.size - 2)
        self.probs[left] += prob * (left + 1 - place)
        self.probs[left + 1] += prob * (place - left)

    def add_power_law(self, *, low: float, high: float, start: float, scale: float, mirrored: bool = False) -> None:
        """Adds the density scale (l - low + start)^(-3/2) on [low, high] (of -l, if mirrored), split cell by cell.

        Over one cell [s, t], with w = sqrt(l - low + start): the mass is 2 scale (t-s) / (w_s w_t (w_s + w_t)), and the
        integral of (l - s) is 2 scale (t-s)^2 / ((w_s + w_t)^2 w_t).
        """
        inner = np.arange(math.floor(low / self.step) + 1, math.ceil(high / self.step))
        cells = np.append(math.floor(low / self.step), inner)
        edges = np.concatenate([[low], inner * self.step, [high]])
        along = np.maximum(edges - low, 0.0)
        w0, w1 = np.sqrt(along[:-1] + start), np.sqrt(along[1:] + start)
        width = np.maximum(np.diff(along), 0.0)
        mass = 2 * scale * width / (w0 * w1 * (w0 + w1))
        excess = 2 * scale * (width / (w0 + w1)) ** 2 / w1 + mass * (edges[:-1] - cells * self.step)
        right = np.clip(excess / self.step, 0.0, mass)
        places, sign = (-cells - self.first, -1) if mirrored else (cells - self.first, 1)
        np.add.at(self.probs, places, mass - right)
        np.add.at(self.probs, places + sign, right)


def expected_excess(grid: Grid, *, draws: int, prob: float) -> float:
    """E[(Z_1 + ... + Z_draws)_+], rounded up; Z is 0 or, with probability `prob`, a draw from the grid.

    For x > 0, E[X_+] = M(x)^n sum_j (j h)_+ e^(-x j h) P_x(X = j h), with P_x the tilted law. Summing over all j in
    Fourier space wraps P_x around a circle of N points; the weights are positive, so wrapping only adds.

    Guarantees:
        Never below the exact value on the grid.
    """
    _validate.integer(draws=draws)
    _validate.at_least(1, draws=draws)
    _validate.positive(prob=prob)
    _validate.at_most(1, prob=prob)
    n, step, values = draws, grid.step, grid.values
    error = _FFT_ERROR + _CELL_ERROR * values.size
    law = prob * grid.probs
    law[-grid.first] += 1 - prob
    slope = _tilt(values, law, n)
    log_mgf, tilted, spread = _tilted(values, law, slope)
    reach = max(45 / slope, 16 * math.sqrt(n) * spread, values[-1] - values[0] + 2 * step)
    size = next_fast_len(min(math.ceil(reach / step), 2 * MOST_POINTS), real=True)
    circle = np.bincount(np.arange(grid.first, grid.first + law.size) % size, weights=tilted, minlength=size)
    phi = rfft(circle)
    k = np.flatnonzero(np.abs(phi) > math.exp(_NEGLIGIBLE / n) - 2 * error)
    phi, others = phi[k], phi.size - k.size
    twice = np.where((k == 0) | (2 * k == size), 1.0, 2.0)
    angle = -slope * step + 2j * math.pi * k / size
    kernel = step * np.exp(angle) / np.expm1(angle) ** 2  # sum over j >= 0 of j h e^(j angle)
    total = float((twice * (np.exp(n * np.log(phi)) * kernel).real).sum())
    charge = 4 * n * error * float((twice * np.abs(kernel) * (np.abs(phi) + error) ** n).sum())
    charge += 2 * others * math.exp(_NEGLIGIBLE) * step / math.expm1(-slope * step) ** 2
    log_scale = n * log_mgf + 8e-15 * n * (1 + abs(log_mgf))
    return (total + charge) / size * math.exp(log_scale) * (1 + 1e-12)


def _tilted(values: np.ndarray, law: np.ndarray, slope: float) -> tuple[float, np.ndarray, float]:
    """Log m.g.f. at the slope, the tilted law, and its standard deviation."""
    exponent = slope * values
    top = float(exponent.max())
    weights = law * np.exp(exponent - top)
    total = float(weights.sum())
    tilted = weights / total
    mean = float((tilted * values).sum())
    return top + math.log(total), tilted, math.sqrt(max(float((tilted * (values - mean) ** 2).sum()), 0.0))


def _tilt(values: np.ndarray, law: np.ndarray, n: int) -> float:
    """The slope x that makes M(x)^n / x^2 smallest."""

    def derivative(log_slope: float) -> float:
        slope = math.exp(log_slope)
        _, tilted, _ = _tilted(values, law, slope)
        return slope * n * float((tilted * values).sum()) - 2

    scale = math.log(values[-1])
    low, high = -scale - 40.0, -scale + 6.0
    if derivative(high) <= 0:
        return math.exp(high)
    return math.exp(brentq(derivative, low, high, xtol=1e-3))
