"""Binary reports, exactly: one biased bit among others that nobody tells apart.

Each of m others shows 1 with probability p or 1 - p, p = e^eps/(1 + e^eps), as its bit says; some dummies are fair.
With k of the others' bits 1 the number of ones beside the victim's is X_k = Bin(k, p) + Bin(m - k, 1 - p) +
Bin(dummies, 1/2), and the likelihood ratio of the victim's two bits rises in the number of ones, so that

    delta(eps') = max over k and j of  (p - alpha (1 - p)) P(X_k = j - 1) - (alpha - 1) P(X_k >= j),   alpha = e^eps',

exactly, with no one's exposure revealed (docs/proofs/binary.md). The largest k is not always an end, so all are looked
at: in a large crowd in blocks, of which all but the users that may differ are kept. The law of X_k is taken by an FFT
of its exponentially tilted law, with the error charged; what lies beyond the window is left out of P(X_k >= j), which
is the safe side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np
from scipy.fft import next_fast_len

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.amplification.clones import binomial_counts
from dovetail.accounting.loss_distributions import LossDistribution
from dovetail.accounting.numerics import ULP, Spectrum
from dovetail.accounting.pairs import symmetric
from dovetail.accounting.pairs.binomial import BinomialPair
from dovetail.accounting.pairs.symmetric import Nodes, SymmetricPair, nodes_for, pair_dominating_curve
from dovetail.statements import NotApplicable, Theorem

__all__ = ["BINARY", "BinaryReports"]

BINARY = Theorem(
    key="dovetail.binary", where="binary reports exactly, for all inputs of the others (docs/proofs/binary.md)"
)

_MOST_MESSAGES = 4_000_000  # in one crowd
_MOST_NUMBERS = 100_000  # of probabilities that are held at once: blocks times the window of each
_WIDE = 4096  # points, of which fewer blocks are told apart
_HALF_WINDOW = 8.5  # standard deviations on either side that a window holds
_CLEAR = 1e4  # times its error is a probability where a threshold is looked for
_NEAR = 3.5  # standard deviations on either side of a tilted mean where a threshold is looked for
_LARGEST_EXPONENT = 600.0  # of a tilt that is taken back
_NEGLIGIBLE = -60.0  # log of Fourier coefficients that are charged, not summed
_APART = 4.0  # standard deviations between tilts
_LEAST = 1e-250  # a delta below which the curve is not asked
_UNDERFLOW = 1e-300  # stands for a delta that may have underflowed


@dataclasses.dataclass(frozen=True, kw_only=True)
class BinaryReports:
    """A bit by randomized response at eps_local among so many others' and fair dummies.

    With an `inclusion` below 1, each of the others sends a report with that probability, and so does the victim; fair
    dummies take the places of those that do not, up to `places` messages beside the victim's (its report, or a dummy).
    How many others report is revealed; where they are more than the places, nothing is counted here.

    Guarantees:
        Never below the enumeration of all outcomes and all inputs of the others; equal to it in small crowds.
    """

    others: int
    places: int
    eps_local: float
    inclusion: float = 1.0

    def __post_init__(self) -> None:
        _validate.integer(others=self.others, places=self.places)
        _validate.non_negative(others=self.others, places=self.places)
        _validate.positive(eps_local=self.eps_local, inclusion=self.inclusion)
        _validate.at_most(1, inclusion=self.inclusion)

    @property
    def tilt(self) -> float:
        """The victim's message shows 1 with probability (1 + tilt)/2 or (1 - tilt)/2; rounded up."""
        return min(1.0, self.inclusion * math.tanh(self.eps_local / 2) * (1 + 1e-15))

    @property
    def eps_pure(self) -> float:
        """The largest privacy loss of one coordinate, rounded up."""
        return self.eps_local if self.inclusion == 1 else 2 * math.atanh(self.tilt) * (1 + 1e-15)

    @property
    def coins(self) -> BinomialPair:
        """The pair that also reveals who of the others is exposed: never below this one, and known for any crowd."""
        return BinomialPair(others=self.places, exposed=self.others, prob_exposed=self.tilt, tilt=self.tilt)

    def pair(self, *, folds: int) -> SymmetricPair:
        """The pair that dominates so many coordinates, each with any inputs of the others."""
        _validate.at_least(1, folds=folds)
        return dataclasses.replace(_pair_of_one_coordinate(self, nodes_for(folds)), folds=folds)

    def delta(self, eps: float) -> float:
        """delta at eps >= 0 of one coordinate, whatever the others hold; rounded up.

        `NotApplicable` where the crowd is too large, or the probabilities are not clear of their error.
        """
        _validate.non_negative(eps=eps)
        return 0.0 if eps >= self.eps_pure else max(_Crowd.of_reports(self).delta(eps), _UNDERFLOW)

    def gain_of_one(self, eps: float) -> float:
        """(1 + tilt)/2 - e^eps (1 - tilt)/2, rounded up: what delta gains where the victim's message shows 1.

        It is small near eps_pure, and computed so that nothing cancels.
        """
        if self.inclusion == 1:
            return -math.expm1(eps - self.eps_local) / (1 + math.exp(-self.eps_local)) * (1 + 1e-14)
        t = math.tanh(eps / 2)
        return (1 + math.exp(eps)) / 2 * (self.tilt - t + 4 * ULP * (self.tilt + t)) * (1 + 1e-14)


@functools.lru_cache(maxsize=64)
def _pair_of_one_coordinate(reports: BinaryReports, nodes: Nodes) -> SymmetricPair:
    """The pair of one coordinate.

    Where the exact curve is not known at some eps, delta is that at the eps before, or that of `coins`.
    """
    last = 1.0  # the curve falls, so what it was at a smaller eps still holds

    @functools.cache
    def revealed_loss() -> LossDistribution:
        coins = reports.coins
        return coins.loss(interval=symmetric.composition_interval(coins))

    def delta_at(eps: float) -> float:
        try:
            return reports.delta(eps)
        except NotApplicable:
            return revealed_loss().delta(eps)

    def falling(eps: float) -> float:
        nonlocal last
        if eps == 0:
            last = delta_at(eps)
        with contextlib.suppress(NotApplicable):
            last = min(last, delta_at(eps))
        return last

    return pair_dominating_curve(falling, eps_pure=reports.eps_pure, nodes=nodes, least=max(_LEAST, nodes.least))


class _Law(NamedTuple):
    """The laws of the number X of ones beside the victim's, in a window of counts: one row for each block.

    The best threshold is inside of the window if its value is above those at all ends that are `open`.
    """

    at: np.ndarray  # P(X = j) over e^log_scale, rounded up
    tail: np.ndarray  # P(X >= j) over e^log_scale, rounded down
    inside: np.ndarray  # which columns of j may be used as thresholds: one column fewer
    ends: np.ndarray  # two columns: the first and the last of these columns
    open: np.ndarray  # two columns: whether the window ends there before the possible counts do
    log_scale: np.ndarray  # one number for each block, rounded up


class _Crowd:
    """All that the others may hold, in blocks of similar inputs, with the laws of the number of ones.

    `_users` has a row for each block: at least so many others hold 1, so many hold 0, and so many messages are fair;
    who is not counted there is revealed. `_group` has for each block the index of the number of others that report, and
    `_weights` for each such index its probability; `_left` is the delta of numbers that are not looked at.
    """

    def __init__(self, reports: BinaryReports) -> None:
        if reports.places > _MOST_MESSAGES:
            raise NotApplicable(f"{reports.places} messages are more than the {_MOST_MESSAGES} that are told apart")
        self._eps = reports.eps_local
        self._messages = reports.places
        self._p, self._q = 1 / (1 + math.exp(-self._eps)), math.exp(-self._eps) / (1 + math.exp(-self._eps))
        self._gain_of_one = reports.gain_of_one
        self._tilt = reports.tilt
        self._std = math.sqrt(reports.places) / 2 + 1
        self._points = next_fast_len(min(self._messages + 2, math.ceil(2 * _HALF_WINDOW * self._std) + 64), real=True)
        most = max(64, _MOST_NUMBERS // self._points)
        if reports.inclusion == 1 and reports.others <= reports.places:
            self._weights = np.ones(1)
            self._left = 0.0
            ones, zeros = _split_into_blocks(reports.others, min(reports.others + 1, most))
            self._group = np.zeros(len(ones), np.int64)
            self._users = np.stack([ones, zeros, np.full_like(ones, reports.places - reports.others)], axis=1)
        else:
            blocks = (3 if self._points < _WIDE else 2) * most  # of numbers and of what they hold
            self._group_by_reporters(reports, blocks)
        self._users = self._users.astype(float)

    def _group_by_reporters(self, reports: BinaryReports, max_blocks: int) -> None:
        """Set blocks, groups and weights: a group for every number of others that report, or for a few numbers each.

        `max_blocks` is about how many blocks there may be in all.
        """
        law = binomial_counts(reports.others, reports.inclusion, tail=1e-40)
        if np.any(np.diff(law.counts) != 1):  # blocks that stand at their lowest count: of reports, more is worse
            raise NotApplicable(f"{reports.others} others are too many to tell apart how many of them report")
        fits = law.counts <= reports.places
        counts, weights = law.counts[fits], law.weights[fits]
        self._left = (law.below + (law.above if fits.all() else 0.0)) * reports.tilt
        if not weights.sum() > 1e-12:
            raise NotApplicable(f"more than {reports.places} of {reports.others} others report as a rule")
        starts = np.unique(np.linspace(0, len(counts), min(len(counts), math.isqrt(max_blocks)) + 1).astype(np.int64))[
            :-1
        ]
        self._weights = np.add.reduceat(weights, starts)
        lowest, highest = counts[starts], counts[np.append(starts[1:], len(counts)) - 1]
        rows, group = [], []
        for index, (low, high) in enumerate(zip(lowest.tolist(), highest.tolist(), strict=True)):
            ones, zeros = _split_into_blocks(low, min(low + 1, max(1, max_blocks // len(starts))))
            rows.append(np.stack([ones, zeros, np.full_like(ones, reports.places - high)], axis=1))
            group.append(np.full(len(ones), index))
        self._users, self._group = np.concatenate(rows), np.concatenate(group)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def of_reports(reports: BinaryReports) -> _Crowd:
        """The crowd of these reports: the last few are kept, with the laws that they have computed."""
        return _Crowd(reports)

    def delta(self, eps: float) -> float:
        """delta at eps, rounded up: the largest of all blocks of a group, averaged over the groups.

        `hit` and `miss` are what delta gains or loses where the victim's message shows 1 or 0.
        """
        alpha = math.exp(eps)
        hit = self._gain_of_one(eps)
        miss = (math.expm1(eps) + (1 + alpha) * self._tilt) / 2
        if not hit > 1e-12 * miss:
            raise NotApplicable(f"eps={eps:.6g} is too close to the largest loss")
        saddle = math.log(miss / hit)  # where the best threshold is the mean: P(X = j - 1) / P(X = j) = miss / hit
        steps = saddle * self._std / _APART
        law = self._laws_near_tilted_means(
            saddle if self._holds_all_counts or steps > 4 else round(steps) * _APART / self._std
        )
        excess = hit * law.at[:, :-1] - math.expm1(eps) * (1 - 1e-14) * law.tail[:, 1:]
        best = np.where(law.inside, excess, -np.inf).max(axis=1)
        if not np.isfinite(best).all():
            raise NotApplicable("the law of a count is nowhere clear of its error")
        if not (excess[np.arange(len(best))[:, None], law.ends] < best[:, None]).all(where=law.open):
            raise NotApplicable("the best threshold lies outside the window of counts")  # values rise, then fall
        deltas = np.exp(np.minimum(law.log_scale + np.log(np.maximum(best, 1e-300)), 0.0))
        worst = np.zeros(len(self._weights))
        np.maximum.at(worst, self._group, deltas)
        return numerics.as_probability_bound(float(worst @ self._weights) * (1 + 1e-12) + self._left)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - a crowd is kept as long as its laws are
    def _laws_near_tilted_means(self, tilt: float) -> _Law:
        """The laws of all blocks near their tilted means.

        By an FFT of the tilted laws, e^(tilt j) P(X = j)/M with M = E[e^(tilt X)], each point right to `error`.
        """
        grow = math.expm1(tilt)
        moments = np.array([1 + prob * grow for prob in (self._p, self._q, 0.5)])  # E[e^(tilt bit)]
        tilted = np.array([self._p, self._q, 0.5]) * (1 + grow) / moments
        users = self._users
        n = self._points
        mean = users @ tilted
        first = np.zeros(len(users), np.int64) if self._holds_all_counts else np.floor(mean).astype(np.int64) - n // 2
        turn = 2 * math.pi / n * np.arange(n // 2 + 1)
        logs = np.stack([np.log1p(prob * np.expm1(1j * turn)) for prob in tilted])
        alive = (users @ logs.real).max(axis=0) > _NEGLIGIBLE
        back = 1j * (first[:, None] * turn[alive] % (2 * math.pi))
        values = np.exp(users @ logs[:, alive] - back).conj()
        off = 8 * ULP * (self._messages + np.abs(first).max() + 64) * np.abs(values)
        spectrum = Spectrum(n, np.flatnonzero(alive), values, off, math.exp(_NEGLIGIBLE))
        law, error = spectrum.law(), spectrum.error_of_a_point() + self._wrapped_mass(n)
        log_moment = users @ np.log(moments)
        return self._untilt(law, error[:, None], tilt, first, mean - first, log_moment)

    @property
    def _holds_all_counts(self) -> bool:
        """Whether a window holds all counts that are possible, so that nothing wraps around."""
        return self._points > self._messages

    def _wrapped_mass(self, points: int) -> float:
        """An upper bound on the mass that wraps around into the window: Bernstein's, for half a window and further."""
        away = points / 2 - 2
        return 0.0 if self._holds_all_counts else 2 * math.exp(-(away**2) / (2 * (self._messages / 4 + away / 3)))

    def _untilt(
        self,
        law: np.ndarray,
        error: np.ndarray,
        tilt: float,
        first: np.ndarray,
        mean: np.ndarray,
        log_moment: np.ndarray,
    ) -> _Law:
        """The laws with their tilt taken back, near the tilted means and where the error is small beside the law.

        Arguments:
            law: the tilted laws, a row for each block, on the counts from `first` on.
            error: how far each point of a row may be off: one column.
            tilt: per count.
            first: the first count of each row.
            mean: the tilted mean of each row, as a column of the window.
            log_moment: log M of each row.
        """
        n = law.shape[1]
        half_width = math.ceil(_NEAR * self._std)
        begin, end = (
            (0, n) if self._holds_all_counts else (max(0, n // 2 - half_width), min(n, n // 2 + half_width + 2))
        )
        centre = mean[:, None] if tilt * n > _LARGEST_EXPONENT else np.full((1, 1), n // 2)
        along = -tilt * (np.arange(begin, n, dtype=float) - centre)
        factor = np.exp(np.minimum(along, _LARGEST_EXPONENT))
        further = np.einsum("ij,ij->i", law[:, end:], np.broadcast_to(factor[:, end - begin :], law[:, end:].shape))
        further = np.maximum(further - error[:, 0] * factor[:, end - begin :].sum(axis=1), 0.0)
        law, along, factor = law[:, begin:end], along[:, : end - begin], factor[:, : end - begin]
        clear = (law > _CLEAR * error) & (np.abs(along) < _LARGEST_EXPONENT)
        low, high = clear.argmax(axis=1), law.shape[1] - 1 - clear[:, ::-1].argmax(axis=1)
        high = np.minimum(high + 1, min(law.shape[1] - 1, self._messages + 1))
        tail = np.cumsum((np.maximum(law - error, 0.0) * factor)[:, ::-1], axis=1)[:, ::-1] + further[:, None]
        slack = ULP * (n + 1024)
        scale = log_moment - tilt * (first + centre[:, 0])
        scale += 16 * ULP * (np.abs(log_moment) + tilt * (np.abs(first) + n) + self._messages + 16)
        start, stop = int(low.min()), int(high.max()) + 1
        index = np.arange(start, stop - 1)
        inside = (index >= low[:, None]) & (index < high[:, None]) & clear.any(axis=1)[:, None]
        ends = np.stack([low, np.maximum(high - 1, low)], axis=1) - start
        first = first + begin
        real = np.stack([first + low > 0, first + high < self._messages + 1], axis=1)
        at = (law[:, start:stop] + error) * factor[:, start:stop] * (1 + slack)
        return _Law(at, tail[:, start:stop] * (1 - slack), inside, ends, real, scale)


def _split_into_blocks(num_others: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """What this many others may hold, in blocks of similar numbers: (fewest ones, fewest zeros) of every block."""
    edges = np.unique(np.round(np.linspace(0, num_others + 1, num_blocks + 1)).astype(np.int64))
    return edges[:-1], num_others - (edges[1:] - 1)
