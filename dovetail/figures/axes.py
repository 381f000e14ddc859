"""Axes with round tick values: 1, 2 or 5 times a power of ten, on a linear or a logarithmic scale."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

__all__ = ["Axis", "fit_axis", "short_number"]

_LARGEST, _SMALLEST = 1e300, 1e-290  # beyond them spans and steps overflow
_LOG_RANGE = (1e-150, 1e150)  # values with a place on a logarithmic axis: products of two of them do not overflow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A range of values with its ticks in increasing order, and a label for each tick; `low` < `high`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    log: bool = False

    def shows(self, value: float | str | None) -> bool:
        """Whether the value has a place on this axis: a finite number, above 0 on a logarithmic one."""
        return isinstance(value, float) and _is_drawable(value, self.log)

    def position_of(self, value: float) -> float:
        """Where the value lies, from 0 (the low end) to 1; what lies beyond an end is put at it."""
        if self.log:
            low, high = math.log10(self.low), math.log10(self.high)
            value = math.log10(value) if value > 0 else low
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def value_at(self, position: float) -> float:
        """The value at a position from 0 (the low end) to 1: the inverse of `position_of`."""
        if self.log:
            return float(self.low ** (1 - position) * self.high**position)
        return self.low + position * (self.high - self.low)


def fit_axis(
    values: Iterable[float], *, log: bool = False, percent: bool = False, zero: bool = False, tight: bool = False
) -> Axis:
    """The axis on which every drawable value has a place, with about six ticks.

    Arguments:
        log: whether the scale is logarithmic; values that are not positive have no place on it.
        percent: whether labels are percentages.
        zero: whether 0 has a place, too.
        tight: whether the axis ends a little beyond the values instead of at a tick.
    """
    shown = [value for value in values if _is_drawable(value, log)]
    if not shown or (zero and not log):
        shown.append(1.0 if log else 0.0)
    whole = _logarithmic_axis(shown) if log else _linear_axis(shown, percent)
    return _tighten(whole, shown) if tight else whole


def _tighten(wide: Axis, values: list[float]) -> Axis:
    """The axis cut to the values and a margin of 3 % of their span; as it was if fewer than two ticks would be left."""
    low, high = wide.position_of(min(values)), wide.position_of(max(values))
    pad = 0.03 * (high - low)
    low, high = (max(0.0, low - pad), min(1.0, high + pad))
    inside = [i for i, tick in enumerate(wide.ticks) if low <= wide.position_of(tick) <= high]
    if len(inside) < 2:
        return wide
    ticks = tuple(wide.ticks[i] for i in inside)
    labels = tuple(wide.labels[i] for i in inside)
    return dataclasses.replace(wide, low=wide.value_at(low), high=wide.value_at(high), ticks=ticks, labels=labels)


def short_number(value: float) -> str:
    """A finite number in few characters: 60,000, 0.25, 1e-6."""
    if value and not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _is_drawable(value: float, log: bool) -> bool:
    return _LOG_RANGE[0] < value < _LOG_RANGE[1] if log else abs(value) < _LARGEST  # False for NaN as well


def _linear_axis(values: list[float], percent: bool) -> Axis:
    """A linear axis from a tick at or below the smallest value to one at or above the largest."""
    low, high = min(values), max(values)
    most = max(abs(low), abs(high))
    if high - low <= max(1e-9 * most, _SMALLEST):
        pad = 0.1 * most if most > _SMALLEST else 1.0
        low, high = (low - pad if low else 0.0), high + pad
        if percent:
            low, high = max(low, 0.0), (min(high, 1.0) if low < 1.0 else high)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(i * step for i in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, labels=_tick_labels(ticks, step, percent))


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough` (> 0), but for rounding."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _tick_labels(ticks: tuple[float, ...], step: float, percent: bool) -> tuple[str, ...]:
    """Each tick with as many digits as the step has."""
    if percent:
        ticks = tuple(100 * tick for tick in ticks)
        step = 100 * step
    most = max(abs(tick) for tick in ticks)
    end = "%" if percent else ""
    if most >= 1e6 or step < 1e-4:
        digits = max(1, math.ceil(math.log10(most / step) + 1e-9) + 1)
        return tuple(_shorten_exponent(f"{tick:.{digits}g}") + end for tick in ticks)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return tuple(f"{tick if abs(tick) > step / 2 else 0.0:,.{decimals}f}" + end for tick in ticks)


def _logarithmic_axis(values: list[float]) -> Axis:
    """A logarithmic axis for values above 0.

    Ticks are 1, 2 and 5 times powers of ten where the values span at most two decades, otherwise powers of ten alone.
    """
    low, high = math.log10(min(values)), math.log10(max(values))
    first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    last = max(last, first + 1)
    if last - first <= 2:
        every = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
        start = max(i for i, tick in enumerate(every) if i == 0 or tick <= min(values) * (1 + 1e-9))
        end = min(i for i, tick in enumerate(every) if i == len(every) - 1 or tick >= max(values) * (1 - 1e-9))
        ticks = tuple(every[start : max(end, start + 1) + 1])
    else:
        stride = math.ceil((last - first) / 6)
        last += -(last - first) % stride
        ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks, labels=tuple(short_number(tick) for tick in ticks), log=True)


def _shorten_exponent(text: str) -> str:
    """The number without zeros in front of its exponent: 1e-06 becomes 1e-6."""
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
