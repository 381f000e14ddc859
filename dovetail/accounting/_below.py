"""Sums of privacy losses from below: what no exact arithmetic could undercut.

The losses of the parts are rounded down, and their sum is taken by the same tilted transform as in `tilting`. What that
adds to an upper bound is taken away here: the error of the transform, the mass that it may wrap around into the window
(Chernoff's bound on either side), and nothing is counted above the window or as an infinite loss.
"""

from __future__ import annotations

import math

import numpy as np

from dovetail.accounting import numerics
from dovetail.accounting.numerics import ULP
from dovetail.accounting.tilting import LossPart, Total

__all__ = ["TotalBelow"]

_LARGEST_EXPONENT = 700.0


class TotalBelow(Total):
    """The sum of the losses of all parts, whose probabilities are lower ends: of every loss, or of all from it on."""

    def lower_eps(self, delta: float) -> float:
        """An eps, a multiple of the interval, at which delta is still above this one; 0 where none is known.

        Guarantees:
            Never above the exact eps of the parts.
        """
        if not self._parts:
            return 0.0
        first, least = self._least(math.log(delta))
        place = np.flatnonzero(least > delta)
        return max(0.0, (first + int(place[-1])) * self._interval * (1 - 4 * ULP)) if len(place) else 0.0

    def _least(self, log_delta: float) -> tuple[int, np.ndarray]:
        """The first index of a window, and delta at its indices, rounded down."""
        if sum(part.times for part in self._parts) == 1:
            only = self._parts[0]
            return only.lowest, self._excess(only.probs, 0.0) * (1 - 256 * ULP)
        wanted = (self._log_moments + self._log_best - log_delta) / self._slopes
        slope = float(self._slopes[int(np.argmin(wanted))])
        last, _ = self._end(log_delta)
        first, size = self._extent(slope, last, None)
        terms, slack, laws = [], [], []
        for part in self._parts:
            log_sum, law = numerics.tilted(part.log_probs, _along(part, slope), down=True)
            terms.append(part.times * log_sum)
            slack.append(part.times * ULP * (4 + 4 * abs(log_sum)))
            laws.append((law, part.times))
        summed, error = numerics.summed(laws, size)
        law = np.roll(summed, (self._lowest - first) % size)[: last - first + 1]
        gap, h = slope * (self._highest - first), self._interval
        log_moment = math.fsum(terms) - math.fsum(slack)
        wrapped = self._beyond(slope, log_moment, first, size) * min(1.0, h / slope)  # the largest weight of a loss
        excess = self._excess(law, slope) * (1 - 16 * ULP * (slope + h + 64))
        excess -= error * numerics.decaying_norm(slope, h, len(law)) + wrapped
        exponent = log_moment + gap * (1 - 4 * ULP) - slope * np.arange(len(law))
        exponent -= 4 * ULP * (abs(log_moment) + 2 * gap)
        known = (excess > 0) & (exponent < _LARGEST_EXPONENT)
        return first, np.where(known, np.exp(np.where(known, exponent, 0.0)) * excess * (1 - 8 * ULP), 0.0)

    def _beyond(self, slope: float, log_moment: float, first: int, size: int) -> float:
        """An upper bound on the tilted mass outside of the circle."""
        here, found = float(self._about(np.array([slope]))[0]), []
        for sign, reach in ((1.0, self._highest - first - size), (-1.0, self._highest - first + 1)):
            about = self._about(slope + sign * self._slopes) - here
            steep = float(self._slopes[int(np.argmin(about - sign * self._slopes * (self._highest - reach)))])
            terms, slack = [], []
            for part in self._parts:
                log_sum, law = numerics.tilted(part.log_probs, _along(part, slope + sign * steep))
                terms.append(part.times * log_sum)
                slack.append(part.times * ULP * (len(law) + 4 + 4 * abs(log_sum)))
            exponent = math.fsum(terms) + math.fsum(slack) - log_moment + sign * steep * reach
            found.append(numerics.exp(exponent + 8 * ULP * (abs(exponent) + abs(log_moment) + steep * abs(reach))))
        return sum(found)


def _along(part: LossPart, slope: float) -> np.ndarray:
    return slope * np.arange(1.0 - len(part.probs), 1.0)
