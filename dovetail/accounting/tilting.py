"""Sums of many privacy losses on one grid, summed up near the eps that is asked about: from above and from below.

**From above** (`Total`). Every law is tilted: its probabilities are multiplied by e^(slope loss) and divided by their
sum, so that losses near the eps in question become the likely ones. One FFT of the product of powers gives the tilted
law of the sum, and dividing by e^(slope loss) takes the tilt back. The error of the transform is about the same at
every loss, so that it is small beside any delta, however small. It is added to delta all the same, as are infinite
losses and the mass above the window (Chernoff's bound). What the transform wraps around into the window adds to delta.

With C_j the mass at index j and above, and D_j the delta at j intervals, ``D_(j-1) = (1 - e^-h) C_j + e^-h D_j``:
nothing is subtracted. Between two multiples of the interval delta is linear in e^eps: a chord of upper bounds is one.

**From below** (`TotalBelow`), what no exact arithmetic could undercut. The losses of the parts are rounded down, and
their sum is taken by the same tilted transform. What that adds to an upper bound is taken away here: the error of the
transform, the mass that it may wrap around into the window (Chernoff's bound on either side), and nothing is counted
above the window or as an infinite loss.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.fft import next_fast_len

from dovetail.accounting import numerics
from dovetail.accounting.numerics import ULP
from dovetail.statements import NotApplicable

__all__ = [
    "LossPart",
    "Total",
    "TotalBelow",
]

_MOST_POINTS = 2**25  # of one transform
_LEVEL = math.log(100.0)  # deltas within such a factor share a tilt, and so a window
_ABOVE = math.log(1e-12)  # what may lie above the window, relative to delta
_AROUND = math.log(1e-13)  # about what may be wrapped around from either side, after the tilt
_SLOPES = 96  # slopes that are tried
_STEEPEST = 40.0  # the largest of them, in units of one over the interval
_TINY = 1e-300  # stands for what underflows
_FEW_VIEWS = 3  # windows that are kept
_FEW_PARTS = 16  # different parts, of which more are sketched less finely


@dataclasses.dataclass(frozen=True, eq=False)
class LossPart:
    """`times` independent copies of one loss.

    `probs[i]` is the probability of a loss of `lowest + i` intervals, `infinite` that of an infinite loss. What is
    rounded up may sum to a little more than 1. Arrays are shared and cached: do not write to them.
    """

    lowest: int
    probs: np.ndarray
    infinite: float
    times: int

    def __post_init__(self) -> None:
        if not np.isfinite(self.probs).all() or not (self.probs >= 0).all() or not self.infinite >= 0:
            raise NotApplicable("a probability of this privacy loss could not be computed")

    @property
    def highest(self) -> int:
        """The index of the largest finite loss."""
        return self.lowest + len(self.probs) - 1

    @functools.cached_property
    def log_probs(self) -> np.ndarray:
        """The logarithms of the probabilities; -inf where one is 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.probs)

    def tilt(self, slope: float) -> tuple[float, np.ndarray]:
        """(log M, law), the law with sum 1, such that M law >= e^(slope (index - highest)) probs at every index."""
        return numerics.tilt(self.log_probs, slope * np.arange(1.0 - len(self.probs), 1.0))

    def sketch_law(self, fineness: int) -> tuple[np.ndarray, np.ndarray]:
        """A coarse picture of the law: to choose slopes and windows by, never for a bound.

        Indices are taken in blocks that grow with the distance from the mean, by one in `fineness`.

        Returns: the mean index of every block, and the logarithm of its mass.
        """
        count = len(self.probs)
        weighted = self.probs * np.arange(count)
        mean = int(weighted.sum() / self.probs.sum())
        steps = max(1, math.ceil(math.log(max(2.0, count / fineness)) * (fineness + 1)))
        away = np.concatenate([np.arange(fineness), np.floor(fineness * (1 + 1 / fineness) ** np.arange(steps + 1))])
        starts = np.unique(np.concatenate([mean - away, mean + away, [0]]).astype(np.int64))
        starts = starts[(starts >= 0) & (starts < count)]
        mass = np.add.reduceat(self.probs, starts)
        positive = mass > 0
        return self.lowest + np.add.reduceat(weighted, starts)[positive] / mass[positive], np.log(mass[positive])


@dataclasses.dataclass(frozen=True, eq=False)
class _View:
    """A window of indices with upper bounds on delta: e^(log_scale - slope (index - first)) excess + aside at each."""

    first: int  # the window's first index
    excess: np.ndarray  # the tilted excess at every index of the window
    slope: float
    log_scale: float
    aside: float  # delta of infinite losses and of what lies above the window, the same at every index

    def delta_at(self, index: int) -> float:
        """Delta at this index, rounded up; the index must not be below `first`."""
        place = index - self.first
        if place >= len(self.excess):
            return numerics.as_probability_bound(self.aside)
        exponent = self.log_scale - self.slope * place
        factor = numerics.exp_or_infinity(exponent + 2 * ULP * (abs(exponent) + 2 * self.slope * place))
        return numerics.as_probability_bound((factor * float(self.excess[place]) + self.aside) * (1 + 8 * ULP) + _TINY)


class Total:
    """The sum of the independent losses of all parts, each a multiple of `interval`, from above.

    Guarantees:
        `eps` and `delta` are never below those of the exact sum of the parts' laws.
    """

    def __init__(self, parts: Sequence[LossPart], interval: float) -> None:
        kept = [part for part in (_trim_zeros(part) for part in parts) if part is not None]
        self._parts = kept
        self._interval = interval
        self._lowest = sum(part.times * part.lowest for part in kept)
        self._highest = sum(part.times * part.highest for part in kept)
        self._infinite = 1.0
        if len(kept) == len(parts) and all(part.infinite < 1 for part in kept):
            lost = -math.expm1(math.fsum(part.times * math.log1p(-part.infinite) for part in kept))
            self._infinite = numerics.as_probability_bound(lost * (1 + 1e-12))
        self._views: dict[int, _View] = {}

    def eps(self, delta: float) -> float:
        """The smallest eps >= 0 at this delta (above 0), rounded up; infinite where there is none."""
        if not self._infinite < delta:
            return math.inf
        view = self._view_near_level(math.floor(math.log(delta) / _LEVEL))
        low, high = max(view.first, 0), max(view.first + len(view.excess), 0)
        if view.delta_at(low) <= delta:
            return low * self._interval
        if not view.delta_at(high) <= delta:
            return math.inf
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if view.delta_at(middle) <= delta else (middle, high)
        above, below = view.delta_at(low), view.delta_at(high)
        # between two multiples delta is at most the chord, linear in e^eps; a larger part of it means a larger eps
        part = min(1.0, (above - delta) / (above - below) * (1 + 8 * ULP))
        return (low * self._interval + math.log1p(part * math.expm1(self._interval))) * (1 + 8 * ULP)

    def delta(self, eps: float) -> float:
        """The smallest delta at this eps, rounded up; eps must be at least 0."""
        index = math.floor(eps / self._interval)
        if self._infinite == 1 or index > self._highest:
            return self._infinite
        least = max(self._estimate_log_delta(eps), math.log(self._infinite + _TINY))
        view = self._view_near_level(math.floor(least / _LEVEL), index)
        # On the chord from `low` down to `high` delta is low - (low - high) part: a smaller part is the safe side.
        # 1 - 8 ULP pays for both expm1 and their quotient, 4 ULP (1 + index) for the rounding of index * interval in
        # units of the interval (which takes index >= 0), and 1 + 4 ULP for the last line.
        low, high = view.delta_at(index), view.delta_at(index + 1)
        part = math.expm1(max(0.0, eps - index * self._interval)) / math.expm1(self._interval) * (1 - 8 * ULP)
        part = min(1.0, max(0.0, part - 4 * ULP * (1 + index)))
        return numerics.as_probability_bound((low - (low - high) * part) * (1 + 4 * ULP))

    @functools.cached_property
    def _slopes_to_try(self) -> np.ndarray:
        """The slopes that are tried, rising, per index: from a thousandth of one over the sum's std to the steepest."""
        variance = 0.0
        for part in self._parts:
            index = np.arange(float(len(part.probs)))
            mean = float(index @ part.probs) / float(part.probs.sum())
            variance += part.times * float((index - mean) ** 2 @ part.probs)
        return np.geomspace(min(1e-3 / math.sqrt(variance + 1e-6), 1.0), _STEEPEST, _SLOPES)

    @functools.cached_property
    def _sketches(self) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """For every part how often it is in the sum, and its sketch: indices and logarithms of masses."""
        fineness = 128 if len(self._parts) <= _FEW_PARTS else 32
        return [(part.times, *part.sketch_law(fineness)) for part in self._parts]

    def _estimate_log_moments(self, slopes: np.ndarray) -> np.ndarray:
        """About the logarithm of the mean of e^(slope sum), for each of these slopes: never for a bound."""
        total = np.zeros(len(slopes))
        for times, index, log_mass in self._sketches:
            exponent = np.multiply.outer(slopes, index) + log_mass
            top = exponent.max(axis=1)
            total += times * (top + np.log(np.exp(exponent - top[:, None]).sum(axis=1)))
        return total

    @functools.cached_property
    def _log_moments(self) -> np.ndarray:
        return self._estimate_log_moments(self._slopes_to_try)

    @functools.cached_property
    def _log_largest_factor(self) -> np.ndarray:
        """For every slope the log of the largest (1 - e^-x) e^(-a x) over x > 0, with a = slope over interval.

        Delta at eps is at most this times e^(-a eps) times the mean of e^(slope sum).
        """
        a = np.minimum(self._slopes_to_try, 1e300 * self._interval) / self._interval
        return -a * np.log1p(1 / a) - np.log1p(a)

    def _estimate_log_delta(self, eps: float) -> float:
        """About the logarithm of delta at this eps, by moments alone: to choose a window by."""
        bounds = self._log_moments + self._log_largest_factor - self._slopes_to_try * (eps / self._interval)
        return min(0.0, numerics.smallest_bound(bounds))

    def _view_near_level(self, level: int, index: int | None = None) -> _View:
        """The window for deltas near e^(level `_LEVEL`), kept; given an index, one that does not begin above it."""
        view = self._views.get(level)
        if view is None or (index is not None and index < view.first):
            if len(self._views) >= _FEW_VIEWS:
                self._views.clear()
            view = self._views[level] = self._compute_view(level * _LEVEL, index)
        return view

    def _compute_view(self, log_delta: float, index: int | None) -> _View:
        """The window for deltas from e^log_delta to 100 times that; a single loss needs neither tilt nor transform."""
        if sum(part.times for part in self._parts) == 1:
            only = self._parts[0]
            first = only.lowest if index is None else min(index, only.lowest)
            law = np.concatenate([np.zeros(only.lowest - first), only.probs])
            return self._view_of_law(law, first, slope=0.0, error=0.0, log_scale=0.0, above=0.0)
        wanted = (self._log_moments + self._log_largest_factor - log_delta - _LEVEL / 2) / self._slopes_to_try
        slope = float(self._slopes_to_try[int(np.argmin(wanted))])
        last, above = self._window_end(log_delta)
        first, size = self._choose_circle(slope, last, index)
        law, error, log_scale = self._tilted_sum(slope, first, size)
        return self._view_of_law(
            law[: last - first + 1], first, slope=slope, error=error, log_scale=log_scale, above=above
        )

    def _choose_circle(self, slope: float, last: int, index: int | None) -> tuple[int, int]:
        """First index and number of points of a circle for the transform.

        It holds about all of the tilted sum up to `last`, and `index` if one is given; what lies beyond wraps around.
        """
        low, high = self._bulk_range(slope)
        first = min(low, last) if index is None else min(low, last, index)
        size = next_fast_len(max(last, high) - first + 1, real=True)
        if size > _MOST_POINTS:
            raise NotApplicable(f"the losses of this composition are too many to tell apart: {size:.3g} of them")
        return first, size

    def _window_end(self, log_delta: float) -> tuple[int, float]:
        """The last index of the window for this delta, and an upper bound on the mass above it (Chernoff's)."""
        steep = float(
            self._slopes_to_try[int(np.argmin((self._log_moments - log_delta - _ABOVE) / self._slopes_to_try))]
        )
        terms, slack = [], []
        for part in self._parts:
            log_sum, _ = part.tilt(steep)
            terms.append(part.times * log_sum)
            slack.append(part.times * ULP * (len(part.probs) + 4 + 4 * abs(log_sum)))
        log_moment = math.fsum(terms) + math.fsum(slack)  # of e^(steep (sum - highest))
        last = self._highest + math.ceil((log_moment - log_delta - _ABOVE) / steep)
        if last >= self._highest:
            return self._highest, 0.0
        gap = steep * (self._highest - last - 1)
        return last, numerics.exp_or_infinity(log_moment + gap * (1 + 4 * ULP))

    def _bulk_range(self, slope: float) -> tuple[int, int]:
        """(first, last) index between which about all of the tilted sum lies; what wraps around costs tightness."""
        here = float(self._estimate_log_moments(np.array([slope]))[0]) + _AROUND
        low = -numerics.smallest_bound(
            (self._estimate_log_moments(slope - self._slopes_to_try) - here) / self._slopes_to_try
        )
        high = numerics.smallest_bound(
            (self._estimate_log_moments(slope + self._slopes_to_try) - here) / self._slopes_to_try
        )
        first = max(self._lowest, math.floor(low)) if math.isfinite(low) else self._lowest
        return first, min(self._highest, math.ceil(high)) if math.isfinite(high) else self._highest

    def _tilted_sum(self, slope: float, first: int, size: int) -> tuple[np.ndarray, float, float]:
        """The law of the sum, tilted, on a circle of `size` indices from `first` on.

        Returns: the law; how far it may be off in the Euclidean norm; and log_scale, rounded up, such that
            e^(log_scale - slope (index - first)) times the law is at least the untilted probability at index.
        """
        terms, slack = [], []

        def tilted_laws() -> Iterator[tuple[np.ndarray, int]]:
            for part in self._parts:
                log_sum, law = part.tilt(slope)
                terms.append(part.times * log_sum)
                slack.append(part.times * ULP * (-(-len(law) // size) + 4 + 4 * abs(log_sum)))
                yield law, part.times

        summed, error = numerics.law_of_sum(tilted_laws(), size)
        gap = slope * (self._highest - first)
        log_scale = math.fsum(terms) + gap + math.fsum(slack) + 4 * ULP * gap
        return np.roll(summed, (self._lowest - first) % size), error, log_scale

    def _view_of_law(
        self, law: np.ndarray, first: int, *, slope: float, error: float, log_scale: float, above: float
    ) -> _View:
        """The view that this tilted law gives, rounded up.

        Arguments:
            law: tilted probabilities at the indices from `first` on.
            first: the window's first index.
            slope: of the tilt, per index.
            error: how far the law may be off in the Euclidean norm.
            log_scale: as `_tilted_sum` returns it.
            above: the untilted mass above the window.
        """
        excess = self._decaying_excess(law, slope) * (1 + 8 * ULP * (slope + self._interval + 64))
        excess += error * numerics.decaying_norm(slope, self._interval, len(law))
        return _View(first, excess, slope, log_scale, numerics.as_probability_bound(self._infinite + above))

    def _decaying_excess(self, law: np.ndarray, slope: float) -> np.ndarray:
        """At every index j the sum over m > 0 of (1 - e^(-h m)) e^(-slope m) law[j + m], h the interval.

        That is delta at j intervals of what the law is tilted from, up to the scale. Right to some roundings, which the
        caller adds or takes away.
        """
        h = self._interval
        mass = numerics.decaying_sums(law, slope)
        return math.exp(-slope) * -math.expm1(-h) * np.append(numerics.decaying_sums(mass, slope + h)[1:], 0.0)


def _trim_zeros(part: LossPart) -> LossPart | None:
    """The part without probabilities of 0 at its ends; None where no loss is finite."""
    positive = np.flatnonzero(part.probs)
    if not len(positive):
        return None
    low, high = int(positive[0]), int(positive[-1]) + 1
    if high - low == len(part.probs):
        return part
    return LossPart(part.lowest + low, part.probs[low:high], part.infinite, part.times)


_LARGEST_EXPONENT = 700.0  # e to a larger one may overflow


class TotalBelow(Total):
    """The sum of the losses of all parts, from below.

    The parts' probabilities are lower bounds, either on the probability of each loss or on that of each loss and all
    larger ones. Only `lower_eps` is to be asked: `eps` and `delta` would bound nothing.
    """

    def lower_eps(self, delta: float) -> float:
        """An eps, a multiple of the interval, at which the exact delta is above this one; 0 where none is known.

        Guarantees:
            Never above the exact eps of the parts.
        """
        if not self._parts:
            return 0.0
        first, least = self._lower_deltas(math.log(delta))
        place = np.flatnonzero(least > delta)
        return max(0.0, (first + int(place[-1])) * self._interval * (1 - 4 * ULP)) if len(place) else 0.0

    def _lower_deltas(self, log_delta: float) -> tuple[int, np.ndarray]:
        """The first index of a window for deltas near e^log_delta, and delta at its indices, rounded down.

        The same steps as `_tilted_sum` and `_view_of_law`, with every error taken away instead of added.
        """
        if sum(part.times for part in self._parts) == 1:
            only = self._parts[0]
            return only.lowest, self._decaying_excess(only.probs, 0.0) * (1 - 256 * ULP)
        wanted = (self._log_moments + self._log_largest_factor - log_delta) / self._slopes_to_try
        slope = float(self._slopes_to_try[int(np.argmin(wanted))])
        last, _ = self._window_end(log_delta)
        first, size = self._choose_circle(slope, last, None)
        terms, slack, laws = [], [], []
        for part in self._parts:
            log_sum, law = numerics.tilt(part.log_probs, _tilt_exponents(part, slope), down=True)
            terms.append(part.times * log_sum)
            slack.append(part.times * ULP * (4 + 4 * abs(log_sum)))
            laws.append((law, part.times))
        summed, error = numerics.law_of_sum(laws, size)
        law = np.roll(summed, (self._lowest - first) % size)[: last - first + 1]
        gap = slope * (self._highest - first)
        h = self._interval
        log_moment = math.fsum(terms) - math.fsum(slack)
        largest_weight = min(1.0, h / slope)  # of (1 - e^(-h m)) e^(-slope m), over m > 0
        wrapped = self._mass_outside_circle(slope, log_moment, first, size) * largest_weight
        excess = self._decaying_excess(law, slope) * (1 - 16 * ULP * (slope + h + 64))
        excess -= error * numerics.decaying_norm(slope, h, len(law)) + wrapped
        exponent = log_moment + gap * (1 - 4 * ULP) - slope * np.arange(len(law))
        exponent -= 4 * ULP * (abs(log_moment) + 2 * gap)
        usable = (excess > 0) & (exponent < _LARGEST_EXPONENT)
        return first, np.where(usable, np.exp(np.where(usable, exponent, 0.0)) * excess * (1 - 8 * ULP), 0.0)

    def _mass_outside_circle(self, slope: float, log_moment: float, first: int, size: int) -> float:
        """An upper bound on the tilted mass outside of the circle, by Chernoff's bound on either side.

        Arguments:
            slope: of the tilt, per index.
            log_moment: log of the mean of e^(slope (sum - highest)), rounded down.
            first: the circle's first index.
            size: its number of points.
        """
        here = float(self._estimate_log_moments(np.array([slope]))[0])
        masses = []
        # on either side, how far the first index beyond the circle is below the highest one
        for sign, to_highest in ((1.0, self._highest - first - size), (-1.0, self._highest - first + 1)):
            about = self._estimate_log_moments(slope + sign * self._slopes_to_try) - here
            steep = float(
                self._slopes_to_try[int(np.argmin(about - sign * self._slopes_to_try * (self._highest - to_highest)))]
            )
            terms, slack = [], []
            for part in self._parts:
                log_sum, law = numerics.tilt(part.log_probs, _tilt_exponents(part, slope + sign * steep))
                terms.append(part.times * log_sum)
                slack.append(part.times * ULP * (len(law) + 4 + 4 * abs(log_sum)))
            exponent = math.fsum(terms) + math.fsum(slack) - log_moment + sign * steep * to_highest
            masses.append(
                numerics.exp_or_infinity(
                    exponent + 8 * ULP * (abs(exponent) + abs(log_moment) + steep * abs(to_highest))
                )
            )
        return sum(masses)


def _tilt_exponents(part: LossPart, slope: float) -> np.ndarray:
    """slope (index - highest) at every index of the part."""
    return slope * np.arange(1.0 - len(part.probs), 1.0)
