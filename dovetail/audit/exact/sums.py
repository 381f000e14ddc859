"""Exact laws of sums of independent integers, and the exact attacks between two of them.

A sum is known by the characteristic functions of its parts: at the M-th roots of unity they multiply, and one inverse
FFT gives the law of the sum modulo M. A statistic modulo M is still a statistic, so nothing is cut off. Transforms run
in extended precision. The error of every frequency is bounded from the roundings on its way, and the sum of all these
bounds is more than the error of any sum of probabilities: it goes into the attack's `slack`.

The best statistic of many independent observations is a sum of log-likelihood ratios. The observations are cells with
exact probabilities in both worlds. Their log-likelihood ratios are rounded to whole steps, so that the sum over all
observations is a sum of integers; rounding costs the attack little, and its law stays exact.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.fft

from dovetail import _validate
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import ULP
from dovetail.statements import NotApplicable

__all__ = [
    "Mixture",
    "RepeatedCells",
    "Spectrum",
    "SumPart",
    "attack_likelihood_ratios",
    "attack_on_laws",
    "attack_sums",
    "attacks_on_far_worlds",
    "attacks_on_repeated_reports",
    "law_of_spectrum",
    "log_abs",
    "modulus_and_centre",
    "power",
    "spectrum_of",
]

_WIDE = 12.0  # standard deviations that the modulus covers to either side
_LARGEST = 2**22  # values of a law


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SumPart:
    """`times` independent integers of one law.

    `masses` are the probabilities of 0, 1, 2, ...; `error` is more than the sum of their errors.
    """

    masses: np.ndarray
    times: int = 1
    error: float = 512 * ULP

    def __post_init__(self) -> None:
        _validate.non_negative(times=self.times, error=self.error)

    @property
    def num_values(self) -> int:
        """How many values one integer has."""
        return len(self.masses)

    def mean_and_variance(self) -> tuple[float, float]:
        """Mean and variance of one integer."""
        masses = np.asarray(self.masses, np.float64)
        values = np.arange(len(masses))
        mean = float(values @ masses)
        return mean, float((values - mean) ** 2 @ masses)

    def characteristic_function(self, size: int) -> tuple[np.ndarray, float]:
        """The characteristic function of one integer, and more than the error of any of its values.

        Arguments:
            size: of which roots of unity; the values are at the first size // 2 + 1, the others are their conjugates.
        """
        padded = np.zeros(size, np.longdouble)
        padded[: len(self.masses)] = self.masses
        return scipy.fft.rfft(padded), self.error + _number_of_roundings(size) * ULP


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """`times` independent sums of `total` integers, of which C follow the law `some`, the others `rest`.

    `weights` are the probabilities of C = start, start + 1, ..., all of them within `error`; what they lack of 1
    belongs into the slack.
    """

    some: SumPart
    rest: SumPart
    total: int
    start: int
    weights: np.ndarray
    times: int = 1
    error: float = 4096 * ULP

    @property
    def num_values(self) -> int:
        """How many values one of the integers has."""
        return max(self.some.num_values, self.rest.num_values)

    def mean_and_variance(self) -> tuple[float, float]:
        """Mean and variance of one sum."""
        probs = np.asarray(self.weights / self.weights.sum(), np.float64)
        number = self.start + np.arange(len(probs))
        average = float(probs @ number)
        mean, variance = self.some.mean_and_variance()
        other_mean, other_variance = self.rest.mean_and_variance()
        between = float(probs @ (number - average) ** 2) * (mean - other_mean) ** 2
        left = self.total - average
        return average * mean + left * other_mean, average * variance + left * other_variance + between

    def characteristic_function(self, size: int) -> tuple[np.ndarray, float]:
        """The characteristic function of one sum, and more than the error of any of its values, as of a `SumPart`.

        It is the sum over C of weight some^C rest^(total - C), by Horner's rule in both.
        """
        some, error = self.some.characteristic_function(size)
        rest, other_error = self.rest.characteristic_function(size)
        value = np.full_like(some, self.weights[-1])
        turned = np.ones_like(rest)
        for weight in self.weights[-2::-1]:
            turned = turned * rest
            value = value * some + weight * turned
        last = self.start + len(self.weights) - 1
        value = value * power(some, self.start) * power(rest, self.total - last)
        return value, (2 * self.total + 8) * (max(error, other_error) + 8 * ULP) + self.error


def attack_sums(
    attack: str,
    first: Sequence[SumPart | Mixture],
    second: Sequence[SumPart | Mixture],
    *,
    slack: float = 0.0,
    pure_eps: float = 0.0,
) -> ExactAttack:
    """The attack by a sum of independent integers.

    Arguments:
        attack: how the attack is described.
        first: the parts of the sum in the first world; `second` likewise. A part in both is transformed once.
        slack: more than the error of any probability that the caller knows of.
        pure_eps: a lower bound on eps at delta = 0 that is known beside the laws.
    """
    size, centre = modulus_and_centre(first, second)
    cache: _Cache = {}
    laws = [law_of_spectrum(spectrum_of(parts, size, cache), size) for parts in (first, second)]
    return attack_on_laws(attack, laws, centre=centre, slack=slack, pure_eps=pure_eps)


def modulus_and_centre(first: Sequence[SumPart | Mixture], second: Sequence[SumPart | Mixture]) -> tuple[int, int]:
    """A power of two that covers both sums widely, and the middle between their means.

    Raises NotApplicable if it would be larger than `_LARGEST`.
    """
    moments = [
        np.sum([part.times * np.array(part.mean_and_variance()) for part in parts if part.times], axis=0)
        for parts in (first, second)
    ]
    (mean, variance), (other_mean, other_variance) = moments
    longest = max(part.num_values for part in (*first, *second))
    width = 2 * _WIDE * math.sqrt(max(variance, other_variance)) + abs(mean - other_mean) + 2 * longest
    size = 1 << math.ceil(math.log2(width + 1))
    if size > _LARGEST:
        raise NotApplicable(f"the sum spreads over {width:.3g} values, and exact laws are kept to {_LARGEST}")
    return size, round((mean + other_mean) / 2)


Spectrum = tuple[np.ndarray, np.ndarray]  # a characteristic function at size // 2 + 1 roots of unity, and its errors
_Cache = dict[int, tuple[np.ndarray, np.ndarray, float]]  # by id(part): its power, log |one factor|, and its error


def spectrum_of(parts: Sequence[SumPart | Mixture], size: int, cache: _Cache | None = None) -> Spectrum:
    """The characteristic function of the sum of these parts, and more than the error of each value.

    Arguments:
        size: of which roots of unity; the values are at the first size // 2 + 1.
        cache: keeps what was computed for a part, for the other world has most of them, too; parts must stay alive.
    """
    cache = {} if cache is None else cache
    value = np.ones(size // 2 + 1, np.clongdouble)
    log_size = np.zeros(size // 2 + 1)
    roundings_of = []
    for part in parts:
        if not part.times:
            continue
        if id(part) not in cache:
            single, error_of_single = part.characteristic_function(size)
            amount = error_of_single + 8 * ULP
            cache[id(part)] = power(single, part.times), np.maximum(log_abs(single), math.log(amount)), amount
        powered, log_single, amount = cache[id(part)]
        value = value * powered
        log_size += part.times * log_single
        roundings_of.append((math.log(1.2 * part.times * amount), log_single))
    error = np.zeros(size // 2 + 1)
    for log_amount, log_single in roundings_of:  # of a product, one factor at a time
        error += np.exp(np.minimum(log_size - log_single + log_amount, 50.0))
    return value, error


def power(base: np.ndarray, times: int) -> np.ndarray:
    """The base to an integer power, by squaring: relative errors grow by the power and no more."""
    result, square = np.ones_like(base), base
    while times:
        if times & 1:
            result = result * square
        times >>= 1
        square = square * square if times else square
    return result


def log_abs(value: np.ndarray) -> np.ndarray:
    """log |value| as float64, far down but finite at 0."""
    return np.log(np.maximum(np.abs(value), np.finfo(np.longdouble).tiny)).astype(np.float64)


def _number_of_roundings(size: int) -> float:
    """How often a value is rounded on its way through a transform of this size, with much to spare."""
    return 6 * math.log2(size)


def law_of_spectrum(spectrum: Spectrum, size: int) -> tuple[np.ndarray, float]:
    """The probabilities of 0 .. size - 1 modulo size, and more than the error of any sum of them."""
    value, error = spectrum
    masses = np.maximum(scipy.fft.irfft(value, size), 0)
    lost = float(np.sum(error) + _number_of_roundings(size) * ULP * np.sum(np.abs(value)))
    return masses, 2 * lost * (1 + 1e-6)


def attack_on_laws(
    attack: str, laws: Sequence[tuple[np.ndarray, float]], *, centre: int, slack: float = 0.0, pure_eps: float = 0.0
) -> ExactAttack:
    """The attack between two laws modulo their length, whose values are put in order from opposite the centre on.

    Arguments:
        laws: for each world the probabilities of 0 .. size - 1, and more than the error of any sum of them.
        centre: the value, modulo size, that comes to stand in the middle.
        slack: further errors, which are added.
    """
    size = len(laws[0][0])
    with np.errstate(divide="ignore"):
        logs = [np.log(np.roll(masses, size // 2 - centre)).astype(np.float64) for masses, _ in laws]
    errors = max(error for _, error in laws)
    return ExactAttack(attack=attack, log_first=logs[0], log_second=logs[1], slack=slack + errors, pure_eps=pure_eps)


# Sums of log-likelihood ratios

_LARGEST_RATIO = 40.0  # |log-likelihood ratios| are cut off here: what has a larger one is as good as certain
_MOST_STEPS = 2**16  # between the smallest and the largest ratio of one observation
_FAR = 4.0  # expected log-likelihood ratios from which on a transform's errors hide the alarms
_POWERS = (0.99, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # of the tests that are tried
_TINY = 1e-250  # smaller probabilities may be rounding errors


class RepeatedCells(NamedTuple):
    """`times` independent observations: the probabilities of their cells in the first and in the second world.

    `error` is more than the sum of the errors of either law.
    """

    first: np.ndarray
    second: np.ndarray
    times: int
    error: float


def attack_likelihood_ratios(
    attack: str, observations: Sequence[RepeatedCells], *, slack: float = 0.0, pure_eps: float = 0.0
) -> ExactAttack:
    """The attack by the sum of the log-likelihood ratios of all observations, rounded to whole steps.

    At delta = 0 the attack has the ratio of the event that every observation falls into its most telling cell.
    Arguments are those of `attack_sums`.
    """
    ratios = [_log_ratio_by_cell(part) for part in observations]
    variance = sum(
        part.times * _variance_of_ratio(part, ratio) for part, ratio in zip(observations, ratios, strict=True)
    )
    total = sum(part.times for part in observations)
    std = math.sqrt(max(variance / total, 1e-300))
    fine = min(256.0, max(4.0, 2**11 / math.sqrt(total)))
    fine = min(fine, _MOST_STEPS * std / max(float(np.ptp(ratio)) for ratio in ratios))
    worlds: tuple[list[SumPart], list[SumPart]] = ([], [])
    for part, ratio in zip(observations, ratios, strict=True):
        points = np.rint(ratio / std * fine).astype(np.int64)
        points -= points.min()
        for world, masses in zip(worlds, (part.first, part.second), strict=True):
            world.append(
                SumPart(masses=cells.law_of_score(masses, points), times=part.times, error=part.error + 8 * ULP)
            )
    return attack_sums(attack, *worlds, slack=slack, pure_eps=max(pure_eps, _largest_log_ratio(observations)))


def attacks_on_repeated_reports(
    attack: str, first: np.ndarray, second: np.ndarray, times: int, *, pure_eps: float = 0.0
) -> list[ExactAttack]:
    """All attacks by the likelihood ratios of `times` independent reports, whether the worlds are near or far.

    Arguments:
        first: the probabilities of a report's cells in the first world; `second` likewise.
        pure_eps: a lower bound on eps at delta = 0 that is known beside the laws.
    """
    observations = RepeatedCells(first, second, times, cells.rounding_error(first))
    return [
        attack_likelihood_ratios(attack, [observations], pure_eps=pure_eps),
        *attacks_on_far_worlds(attack, observations),
    ]


def attacks_on_far_worlds(attack: str, observations: RepeatedCells) -> list[ExactAttack]:
    """Thresholds on the same sum where the worlds are so far apart that alarms are rarer than a transform's errors.

    With steps of h and T the sum of whole steps s(y), Q(T = t) = Z^n e^(-h t) P'(T = t), where P' has the cells'
    probabilities q(y) e^(h s(y)) / Z, close to P's: a rare event under Q that is common under P' (change of measure).
    Here T is no residue: what P and P' put beyond the modulus is bounded by Chernoff's bound and added to the errors.
    """
    ratio = _log_ratio_by_cell(observations)
    if observations.times * float(np.asarray(observations.first, np.float64) @ ratio) < _FAR:
        return []
    step = math.sqrt(max(_variance_of_ratio(observations, ratio), 1e-300)) / 64
    step = max(step, float(np.ptp(ratio)) / _MOST_STEPS)
    signed = np.rint(ratio / step).astype(np.int64)
    lowest = int(signed.min())
    tilted = observations.second * np.exp(np.longdouble(step) * signed)
    total = tilted.sum()
    tilted_error = 2 * observations.error * math.exp(step * float(signed.max()))
    parts = [
        SumPart(masses=cells.law_of_score(masses, signed - lowest), times=observations.times, error=error + 64 * ULP)
        for masses, error in ((observations.first, observations.error), (tilted / total, tilted_error))
    ]
    size, centre = modulus_and_centre(parts[:1], parts[1:])
    (first, first_error), (second, second_error) = (law_of_spectrum(spectrum_of([part], size), size) for part in parts)
    values = centre - size // 2 + np.arange(size)
    first_error, second_error = (
        error + _prob_outside(part, int(values[0]), int(values[-1]))
        for error, part in zip((first_error, second_error), parts, strict=True)
    )
    first, second = (np.roll(masses, size // 2 - centre)[::-1] for masses in (first, second))
    loss = step * (values[::-1] + observations.times * lowest)
    power = np.cumsum(first)
    attacks = []
    for wanted in _POWERS:
        reached = int(np.searchsorted(power, wanted))
        if reached == size or power[reached] <= 2 * first_error:
            continue
        alarm = np.sum(second[: reached + 1] * np.exp(loss[reached] - loss[: reached + 1])) + second_error
        log_alarm = float(observations.times * (np.log(total) + tilted_error) - loss[reached] + np.log(alarm)) + 1e-6
        if log_alarm < -1e-3:
            log_power = math.log(min(1 - 1e-9, float(power[reached]) - first_error))
            if log_power <= log_alarm:
                continue
            logs = [np.array([_log_complement(log), log]) for log in (log_power, log_alarm)]
            attacks.append(
                ExactAttack(attack=f"{attack}, above {loss[reached]:.4g}", log_first=logs[0], log_second=logs[1])
            )
    return attacks


def _prob_outside(part: SumPart, low: int, high: int) -> float:
    """More than the probability that the sum of all integers of this part is below `low` or above `high`."""
    masses = np.asarray(part.masses, np.float64)
    mean, variance = part.mean_and_variance()
    gaps = np.arange(len(masses)) - mean
    slopes = np.geomspace(0.5, 30, 24) / math.sqrt(max(1.0, part.times * variance))
    slopes = slopes[slopes * len(masses) < 600]
    total = 0.0
    for sign, edge in ((1, high - part.times * mean), (-1, part.times * mean - low)):
        bounds = [part.times * math.log(float(np.exp(sign * slope * gaps) @ masses)) - slope * edge for slope in slopes]
        total += math.exp(min(0.0, *bounds)) if bounds else 1.0
    return total * 1.01


def _log_complement(log_prob: float) -> float:
    """log(1 - p) from log p, for 0 < p < 1."""
    return math.log(-math.expm1(log_prob))


def _largest_log_ratio(observations: Sequence[RepeatedCells]) -> float:
    """The largest |log ratio| of what all observations can show together, rounded down.

    Cells that are next to impossible in a world are left out: their probabilities may be rounding errors.
    """
    extremes = np.zeros(2)
    for part in observations:
        possible = (part.first > _TINY) & (part.second > _TINY)
        ratio = np.log(part.first[possible]) - np.log(part.second[possible])
        extremes += part.times * np.array([ratio.max(), -ratio.min()], np.float64)
    return float(extremes.max()) * (1 - 1e-9)


def _log_ratio_by_cell(part: RepeatedCells) -> np.ndarray:
    """log(first / second) of every cell, cut off at `_LARGEST_RATIO` to either side; 0 for impossible cells."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(np.log(part.first) - np.log(part.second), np.float64)
    return np.clip(np.nan_to_num(ratio, nan=0.0), -_LARGEST_RATIO, _LARGEST_RATIO)


def _variance_of_ratio(part: RepeatedCells, ratio: np.ndarray) -> float:
    """The variance of the ratio under the mean of both laws."""
    middle = np.asarray(part.first + part.second, np.float64) / 2
    return float(middle @ ratio**2) - float(middle @ ratio) ** 2
