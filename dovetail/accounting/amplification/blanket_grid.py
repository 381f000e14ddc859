"""The law of a blanket likelihood ratio on a grid, and the mean excess of a sum of such draws, both rounded outward.

Every point of the law is split between its two neighbours on the grid. That keeps the mean and is a spread, so the mean
of any convex function of a sum of such draws can only rise. The victim's report is one of C + 1 draws, and what is
asked for is ``E_C[E[(L_1 + ... + L_(C+1))_+] / (C + 1)]``. A law of C enters by its generating function alone
(`BinomialDraws`, `CountedDraws`). The sum is taken by a transform of the exponentially tilted law
(`numerics.Spectrum`): relative precision at any delta, aliasing that only adds mass, rounding errors charged.
"""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np
from scipy.fft import next_fast_len
from scipy.optimize import brentq

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.numerics import ULP, Spectrum
from dovetail.statements import NotApplicable

__all__ = ["MOST_POINTS", "BinomialDraws", "CountedDraws", "Draws", "Grid", "mean_excess"]

MOST_POINTS = 2**21  # of the grid of one draw
_CELL_ERROR = 1e-15  # times the number of points: what rounding may do to the splits between neighbours
_DECAY = 36.0  # a circle is at least so many times 1/slope: what is left wraps around
_WIDE = 13.0  # and so many deviations of the sum
_NEAR = 0.3  # how far the best log slope may be from that of a Gaussian sum
_AT_ONCE = 200_000  # powers that are held at once
_NEGLIGIBLE = -60.0  # log of Fourier coefficients, and of terms, that are bounded instead of summed


class Grid:
    """A law on a grid: `probs[i]` is the probability of (first + i) * step; the points cover [bottom, top].

    It begins without any mass, which `add_points` and `add_power_law` add, never moving a mean.
    """

    def __init__(self, *, bottom: float, top: float, step: float) -> None:
        self.step = step
        self.first = math.floor(bottom / step) - 1
        self.probs = np.zeros(math.ceil(top / step) + 2 - self.first)

    @classmethod
    def from_law(
        cls,
        values: np.ndarray,
        probs: np.ndarray,
        *,
        mean_draws: float,
        resolution: float,
        max_points: int = MOST_POINTS,
    ) -> Grid:
        """The law of finitely many values, of which some are positive, in steps of so many standard deviations.

        Draws so negative that a crowd of this mean size practically never makes up for them are raised to a floor,
        which can only raise the mean excess.

        Arguments:
            values: of one draw; the largest is above 0.
            probs: the probability of each.
            mean_draws: the mean number of draws that are summed.
            resolution: the step in standard deviations of one draw.
            max_points: about how many points the grid may have; its steps grow where it would have more.
        """
        top = float(values.max())
        bottom = float(values.min())
        mean = float(values @ probs)
        std = math.sqrt(max(float((values - mean) ** 2 @ probs), 0.0))
        floor = max(bottom, 2 * min(mean, 0.0) - top * (mean_draws + 12 * math.sqrt(mean_draws) + 30))
        step = max(min(std, top) * resolution, (top - floor) / max_points)
        if not top - floor <= 2 * max_points * top:
            raise NotApplicable(f"the range of L, {top - floor:.3g}, is more than a grid resolves")
        grid = cls(bottom=floor, top=top, step=top / math.ceil(top / step))
        grid.add_points(np.maximum(values, floor), probs)
        return grid

    @property
    def values(self) -> np.ndarray:
        """The values of the grid's points, rising."""
        return (self.first + np.arange(self.probs.size)) * self.step

    def add_points(self, values: np.ndarray, probs: np.ndarray) -> None:
        """Add atoms, each split between its two neighbours on the grid so that its mean stays."""
        place = np.asarray(values, dtype=float) / self.step - self.first
        left = np.clip(place.astype(np.int64), 0, self.probs.size - 2)
        right_share = np.clip(place - left, 0.0, 1.0)
        self.probs += np.bincount(left, probs * (1 - right_share), self.probs.size)
        self.probs += np.bincount(left + 1, probs * right_share, self.probs.size)

    def add_power_law(self, *, low: float, high: float, start: float, scale: float, mirrored: bool = False) -> None:
        """Add the density scale (l - low + start)^(-3/2) on [low, high] (of -l, if mirrored), split cell by cell.

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


class Draws(abc.ABC):
    """A law of the number C of blanket draws beside the victim's, as the function T(z) = E[z^(C+1) / (C+1)].

    T may differ by a constant, which stands for a sum of no draws, and has no negative coefficient. All methods take
    `log_mgf`, the logarithm of the moment M = E[e^(slope L)] of one draw.
    """

    @abc.abstractmethod
    def log_generating_function(self, log_mgf: float) -> float:
        """log T(M), rounded up."""

    @abc.abstractmethod
    def tilted_mean(self, log_mgf: float) -> float:
        """The mean number of draws under T's terms at M, d log T / d log M: to choose by, never for a bound."""

    @abc.abstractmethod
    def normalized_spectrum(self, log_mgf: float, phi: np.ndarray, size: int, error: float) -> Spectrum:
        """The Fourier coefficients of the tilted law of the sum, T(M phi) over T(M), and how far they may be off.

        Arguments:
            log_mgf: log M.
            phi: the Fourier coefficients of one tilted draw, of which each is right to `error`.
            size: the number of points of the circle.
            error: of each entry of `phi`.
        """


@dataclasses.dataclass(frozen=True)
class BinomialDraws(Draws):
    """C ~ Bin(draws - 1, prob): T(z) = (1 - prob + prob z)^draws / (prob draws), up to its constant."""

    draws: int
    prob: float

    def __post_init__(self) -> None:
        _validate.integer(draws=self.draws)
        _validate.at_least(1, draws=self.draws)
        _validate.positive(prob=self.prob)
        _validate.at_most(1, prob=self.prob)

    def _log_moment_of_one_draw(self, log_mgf: float) -> float:
        """log(1 - prob + prob M): the moment of a draw that is there with this probability."""
        return math.log1p(self.prob * math.expm1(log_mgf))

    def log_generating_function(self, log_mgf: float) -> float:
        """log T(M), rounded up; T is a power here: (1 - prob + prob M)^draws / (prob draws)."""
        log_generating_function = self.draws * self._log_moment_of_one_draw(log_mgf) - math.log(self.prob * self.draws)
        return log_generating_function + 8e-15 * self.draws * (1 + abs(log_mgf))

    def tilted_mean(self, log_mgf: float) -> float:
        """The mean number of draws, each of which is there with probability prob M / (1 - prob + prob M)."""
        return self.draws * self.prob * math.exp(log_mgf - self._log_moment_of_one_draw(log_mgf))

    def normalized_spectrum(self, log_mgf: float, phi: np.ndarray, size: int, error: float) -> Spectrum:
        """The coefficients of the sum: the same power of each of one draw's; tiny ones are left out and charged."""
        there = self.tilted_mean(log_mgf) / self.draws
        base = 1 - there + there * phi
        where = np.flatnonzero(np.abs(base) > math.exp(_NEGLIGIBLE / self.draws) - 2 * error)
        base = base[where]
        off = 4 * self.draws * error * (np.abs(base) + error) ** (self.draws - 1)
        return Spectrum(size, where, np.exp(self.draws * np.log(base)), off, math.exp(_NEGLIGIBLE))


class CountedDraws(Draws):
    """A law of C by its probabilities (`weights`) at some rising counts."""

    def __init__(self, counts: np.ndarray, weights: np.ndarray) -> None:
        self._draws = np.asarray(counts, dtype=float) + 1
        with np.errstate(divide="ignore"):
            self._log_terms = np.log(weights) - np.log(self._draws)

    def _log_generating_function_and_terms(self, log_mgf: float) -> tuple[float, np.ndarray]:
        """log T(M), and the part of T(M) that each count's term is."""
        exponent = self._log_terms + self._draws * log_mgf
        top = float(exponent.max())
        terms = np.exp(exponent - top)
        total = float(terms.sum())
        return top + math.log(total), terms / total

    def log_generating_function(self, log_mgf: float) -> float:
        """log T(M), rounded up: summed term by term, in logarithms."""
        log_generating_function, terms = self._log_generating_function_and_terms(log_mgf)
        slack = 8e-15 * float(self._draws.max()) * (1 + abs(log_mgf))
        return log_generating_function + slack + ULP * (len(terms) + abs(log_generating_function) + 8)

    def tilted_mean(self, log_mgf: float) -> float:
        """The mean of C + 1, each count weighed by its term of T(M)."""
        return float(self._log_generating_function_and_terms(log_mgf)[1] @ self._draws)

    def normalized_spectrum(self, log_mgf: float, phi: np.ndarray, size: int, error: float) -> Spectrum:
        """The coefficients of the sum, term by term; those where |phi| makes every term negligible are left out."""
        _, terms = self._log_generating_function_and_terms(log_mgf)
        kept = terms > math.exp(_NEGLIGIBLE)
        few = len(terms) * math.exp(_NEGLIGIBLE)  # more than all terms that are left out
        terms, powers = terms[kept], self._draws[kept]
        modulus = np.abs(phi) + error
        where = np.flatnonzero(modulus > math.exp(_NEGLIGIBLE / powers[0]))
        off = few + 4 * error * _evaluate_polynomial(terms * powers, powers, modulus[where]) / modulus[where]
        return Spectrum(size, where, _evaluate_polynomial(terms, powers, phi[where]), off, few + math.exp(_NEGLIGIBLE))


def _evaluate_polynomial(terms: np.ndarray, powers: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The sum of terms at^powers, the powers rising: by Horner's rule, or all powers at once where they are few."""
    gaps = np.diff(powers)
    if len(gaps) and (gaps == gaps[0]).all() and points.size * len(powers) <= _AT_ONCE:
        rising = np.cumprod(np.broadcast_to(points ** gaps[0], (len(gaps), points.size)), axis=0)
        return (terms[0] + terms[1:] @ rising) * points ** powers[0]
    steps = {gap: points**gap for gap in set(gaps.tolist())}
    total = np.full(points.shape, terms[-1], dtype=points.dtype)
    for term, gap in zip(terms[-2::-1].tolist(), gaps[::-1].tolist(), strict=True):
        total = total * steps[gap] + term
    return total * points ** powers[0]


def mean_excess(grid: Grid, draws: Draws) -> float:
    """E_C[E[(L_1 + ... + L_(C+1))_+] / (C + 1)], rounded up; each L is drawn from the grid.

    For x > 0, E[X_+] = M(x)^n sum_j (j h)_+ e^(-x j h) P_x(X = j h), with P_x the tilted law of a sum of n. Summing
    over all j in Fourier space wraps P_x around a circle of N points; the weights are positive, so wrapping only adds.

    Arguments:
        grid: the law of one draw of L.
        draws: the law of how many draws there are.

    Guarantees:
        Never below the exact value on the grid.
    """
    step = grid.step
    values = grid.values
    law = grid.probs
    slope = _best_slope(values, law, draws)
    log_mgf, tilted = _tilt_grid(grid, slope)
    count = draws.tilted_mean(log_mgf)
    mean = float(tilted @ values)
    spread = math.sqrt(max(float(tilted @ (values - mean) ** 2), 0.0))
    reach = max(_DECAY / slope, _WIDE * math.sqrt(count) * spread, values[-1] - values[0] + 2 * step)
    size = next_fast_len(min(math.ceil(reach / step), 2 * MOST_POINTS), real=True)
    circle = np.bincount(np.arange(grid.first, grid.first + law.size) % size, tilted, size)
    phi = numerics.fourier_coefficients(circle, size)
    spectrum = draws.normalized_spectrum(log_mgf, phi, size, numerics.transform_error(size) + _CELL_ERROR * values.size)
    angle = -slope * step + 2j * math.pi * spectrum.where / size
    kernel = step * np.exp(angle) / np.expm1(angle) ** 2  # sum over j >= 0 of j h e^(j angle)
    total = spectrum.weighted_sum(kernel, step / math.expm1(-slope * step) ** 2)
    return total * math.exp(draws.log_generating_function(log_mgf)) * (1 + 1e-12)


def _tilt_grid(grid: Grid, slope: float) -> tuple[float, np.ndarray]:
    """(log M, law), log M rounded up: M law is at least e^(slope value) times the grid's probabilities."""
    slope *= grid.step
    with np.errstate(divide="ignore"):
        log_sum, law = numerics.tilt(np.log(grid.probs), slope * np.arange(1.0 - grid.probs.size, 1.0))
    last = slope * (grid.first + grid.probs.size - 1)
    return last + log_sum + ULP * (4 * abs(last) + 4 * abs(log_sum) + 4), law


def _best_slope(values: np.ndarray, law: np.ndarray, draws: Draws) -> float:
    """About the slope x that makes T(M(x)) / x^2 smallest; any slope gives a bound, and near the best all are alike."""

    def derivative(log_slope: float) -> float:
        slope = math.exp(log_slope)
        weights = law * np.exp(slope * (values - values[-1]))
        total = float(weights.sum())
        return slope * draws.tilted_mean(slope * values[-1] + math.log(total)) * float(weights @ values) / total - 2

    mean = float(values @ law)
    crowd = draws.tilted_mean(0.0)
    variance = max(float((values - mean) ** 2 @ law), 1e-300)
    guess = 4 / crowd / (mean + math.sqrt(mean * mean + 8 * variance / crowd))  # of a sum that is about Gaussian
    scale = math.log(values[-1])
    lowest, highest = -scale - 40.0, -scale + 6.0
    middle = min(max(math.log(guess), lowest + _NEAR), highest - _NEAR) if guess > 0 else lowest + _NEAR
    low, high = middle - _NEAR, middle + _NEAR
    if derivative(low) > 0:
        low, high = lowest, low
    elif derivative(high) <= 0:
        low, high = high, highest
        if derivative(high) <= 0:
            return math.exp(high)
    return math.exp(brentq(derivative, low, high, xtol=0.08))
