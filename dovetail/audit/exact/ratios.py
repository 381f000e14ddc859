"""Sums of log-likelihood ratios: the best statistic of many independent observations, in whole steps.

The observations are cells with exact probabilities in both worlds. Their log-likelihood ratios are rounded to steps, so
that the sum over all observations is a sum of integers; rounding costs the attack little, and its law stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import cells
from dovetail.audit.exact.sums import ULP, SumPart, law, modulus_for, spectrum_of, sums

__all__ = ["RepeatedCells", "far_apart", "likelihoods", "many_alike"]

_LARGEST_RATIO = 40.0  # what has a larger one is as good as certain
_MOST_STEPS = 2**16
_FAR = 4.0  # expected log-likelihood ratios from which on a transform's errors hide the alarms
_POWERS = (0.99, 0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
_TINY = 1e-250  # smaller probabilities may be rounding errors


class RepeatedCells(NamedTuple):
    """So many independent observations: the probabilities of their cells in both worlds, each law within `error`."""

    first: np.ndarray
    second: np.ndarray
    times: int
    error: float


def likelihoods(attack: str, seen: Sequence[RepeatedCells], *, slack: float = 0.0, pure: float = 0.0) -> ExactAttack:
    """The sum of the log-likelihood ratios of all observations.

    At delta = 0 the attack has the ratio of the event that every observation falls into its most telling cell.
    """
    ratios = [_log_ratio(part) for part in seen]
    variance = sum(part.times * _variance(part, ratio) for part, ratio in zip(seen, ratios, strict=True))
    total = sum(part.times for part in seen)
    std = math.sqrt(max(variance / total, 1e-300))
    fine = min(256.0, max(4.0, 2**11 / math.sqrt(total)))
    fine = min(fine, _MOST_STEPS * std / max(float(np.ptp(ratio)) for ratio in ratios))
    worlds: tuple[list[SumPart], list[SumPart]] = ([], [])
    for part, ratio in zip(seen, ratios, strict=True):
        points = np.rint(ratio / std * fine).astype(np.int64)
        points -= points.min()
        for world, masses in zip(worlds, (part.first, part.second), strict=True):
            world.append(SumPart(masses=cells.scored(masses, points), times=part.times, error=part.error + 8 * ULP))
    return sums(attack, *worlds, slack=slack, pure=max(pure, _most_telling(seen)))


def many_alike(
    attack: str, first: np.ndarray, second: np.ndarray, times: int, *, pure: float = 0.0
) -> list[ExactAttack]:
    """All attacks on so many reports or answers in cells of these probabilities, whether the worlds are near or far."""
    seen = RepeatedCells(first, second, times, cells.error_of(first))
    return [likelihoods(attack, [seen], pure=pure), *far_apart(attack, seen)]


def far_apart(attack: str, seen: RepeatedCells) -> list[ExactAttack]:
    """Thresholds on the same sum where the worlds are so far apart that alarms are rarer than a transform's errors.

    With steps of h and T the sum of whole steps s(y), Q(T = t) = Z^n e^(-h t) P'(T = t), where P' has the cells'
    probabilities q(y) e^(h s(y)) / Z, close to P's: a rare event under Q that is common under P' (change of measure).
    Here T is no residue: what P and P' put beyond the modulus is bounded by Chernoff's bound and added to the errors.
    """
    ratio = _log_ratio(seen)
    if seen.times * float(np.asarray(seen.first, np.float64) @ ratio) < _FAR:
        return []
    step = math.sqrt(max(_variance(seen, ratio), 1e-300)) / 64
    step = max(step, float(np.ptp(ratio)) / _MOST_STEPS)
    signed = np.rint(ratio / step).astype(np.int64)
    lowest = int(signed.min())
    tilted = seen.second * np.exp(np.longdouble(step) * signed)
    total = tilted.sum()
    tilted_error = 2 * seen.error * math.exp(step * float(signed.max()))
    parts = [
        SumPart(masses=cells.scored(masses, signed - lowest), times=seen.times, error=error + 64 * ULP)
        for masses, error in ((seen.first, seen.error), (tilted / total, tilted_error))
    ]
    size, centre = modulus_for(parts[:1], parts[1:])
    (first, first_error), (second, second_error) = (law(spectrum_of([part], size), size) for part in parts)
    values = centre - size // 2 + np.arange(size)
    first_error, second_error = (
        error + _outside(part, int(values[0]), int(values[-1]))
        for error, part in zip((first_error, second_error), parts, strict=True)
    )
    first, second = (np.roll(masses, size // 2 - centre)[::-1] for masses in (first, second))
    loss = step * (values[::-1] + seen.times * lowest)
    power, found = np.cumsum(first), []
    for wanted in _POWERS:
        reached = int(np.searchsorted(power, wanted))
        if reached == size or power[reached] <= 2 * first_error:
            continue
        alarm = np.sum(second[: reached + 1] * np.exp(loss[reached] - loss[: reached + 1])) + second_error
        log_alarm = float(seen.times * (np.log(total) + tilted_error) - loss[reached] + np.log(alarm)) + 1e-6
        if log_alarm < -1e-3:
            log_power = math.log(min(1 - 1e-9, float(power[reached]) - first_error))
            if log_power <= log_alarm:
                continue
            logs = [np.array([_log_rest(log), log]) for log in (log_power, log_alarm)]
            found.append(
                ExactAttack(attack=f"{attack}, above {loss[reached]:.4g}", log_first=logs[0], log_second=logs[1])
            )
    return found


def _outside(part: SumPart, low: int, high: int) -> float:
    """More than the probability that the sum of all integers of this part is below `low` or above `high`."""
    masses = np.asarray(part.masses, np.float64)
    mean, variance = part.moments()
    gaps = np.arange(len(masses)) - mean
    slopes = np.geomspace(0.5, 30, 24) / math.sqrt(max(1.0, part.times * variance))
    slopes = slopes[slopes * len(masses) < 600]
    total = 0.0
    for sign, edge in ((1, high - part.times * mean), (-1, part.times * mean - low)):
        bounds = [part.times * math.log(float(np.exp(sign * slope * gaps) @ masses)) - slope * edge for slope in slopes]
        total += math.exp(min(0.0, *bounds)) if bounds else 1.0
    return total * 1.01


def _log_rest(log: float) -> float:
    """log(1 - p), from log p."""
    return math.log(-math.expm1(log))


def _most_telling(seen: Sequence[RepeatedCells]) -> float:
    extremes = np.zeros(2)
    for part in seen:
        possible = (part.first > _TINY) & (part.second > _TINY)
        ratio = np.log(part.first[possible]) - np.log(part.second[possible])
        extremes += part.times * np.array([ratio.max(), -ratio.min()], np.float64)
    return float(extremes.max()) * (1 - 1e-9)


def _log_ratio(part: RepeatedCells) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.asarray(np.log(part.first) - np.log(part.second), np.float64)
    return np.clip(np.nan_to_num(ratio, nan=0.0), -_LARGEST_RATIO, _LARGEST_RATIO)


def _variance(part: RepeatedCells, ratio: np.ndarray) -> float:
    middle = np.asarray(part.first + part.second, np.float64) / 2
    return float(middle @ ratio**2) - float(middle @ ratio) ** 2
