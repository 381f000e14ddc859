"""Exact Skellam noise, and vectors as integers: what a deployed client of split-and-mix draws.

Skellam noise is the difference of two Poissons, each drawn by inversion of a table of its distribution function. The
table starts at the mode m with the weight 2^320 and follows w(k+1) = w(k) rate / (k+1) and w(k-1) = w(k) k / rate in
integers, rounded down, until the weights are 0; it is then scaled so that its total is 2^320. No logarithm or factorial
is needed, and a draw has the law of the table exactly: a 320-bit uniform is compared with it, its upper bits first.

Against the Poisson law, with v(k) the exact weights: each step rounds off less than 1 and no ratio exceeds 1, hence
v(k) - w(k) <= |k - m|. After U steps up and D down the weights are 0 and the exact ones below U and D, and geometric
series bound what lies beyond by m + U + 1 and by rate. So V - W, the difference of the totals, is at most
(U + D)^2 + 2 rate + 2. As w <= v, the normalised laws differ by at most (V - W) / V in total variation, and V >= 2^320;
scaling rounds every entry of the table by less than 1. Up to a rate of 2^28 the sum is below 2^-240.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.mechanisms._base import freeze_floats
from dovetail.mechanisms.exact import ExactSampler, round_at_random
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.mechanisms.skellam import ATTEMPTS, Encoding

__all__ = ["ExactSkellam", "encode", "split"]

_BITS = 320
_UPPER = 53  # bits that are compared first, all draws at once
_LARGEST_VARIANCE = 2.0**29


@dataclasses.dataclass(frozen=True)
class ExactSkellam:
    """Skellam noise of mean zero: the difference of two independent Poissons of rate variance / 2 each.

    Guarantees:
        A draw is within `distance` <= 2^-240 of the Skellam law in total variation; the rate is variance / 2 exactly.
        The sum of m draws is within m `distance` of the Skellam law of variance m `variance`.
    """

    variance: float

    def __post_init__(self) -> None:
        _validate.positive(variance=self.variance)
        _validate.at_most(_LARGEST_VARIANCE, variance=self.variance)
        freeze_floats(self, "variance")

    @property
    def distance(self) -> float:
        """Total variation between a draw and the Skellam law, at most: that of its two Poissons together."""
        return 2 * _poisson(self.variance).distance

    def __call__(self, size: int, *, sampler: ExactSampler) -> np.ndarray:
        """`size` independent draws, as int64."""
        table = _poisson(self.variance)
        return table.draw(size, sampler) - table.draw(size, sampler)


class _Table(NamedTuple):
    """A distribution function in units of 2^-320: `below[i]` is that of `first` + i; and its upper 53 bits."""

    first: int
    below: list[int]
    upper: np.ndarray
    distance: float

    def draw(self, size: int, sampler: ExactSampler) -> np.ndarray:
        """The number of entries that do not exceed a uniform on 0 .. 2^320 - 1, plus `first`."""
        words = sampler.integers(2**_UPPER, size)
        index = np.searchsorted(self.upper, words, side="left")
        after = np.searchsorted(self.upper, words, side="right")
        for tie in np.flatnonzero(index != after):
            rest = sampler.randbelow(1 << (_BITS - _UPPER))
            uniform = int(words[tie]) << (_BITS - _UPPER) | rest
            index[tie] = bisect.bisect_right(self.below, uniform, int(index[tie]), int(after[tie]))
        return index.astype(np.int64) + self.first


@functools.lru_cache(maxsize=8)
def _poisson(variance: float) -> _Table:
    """The table of the Poisson law of rate variance / 2."""
    rate = Fraction(variance) / 2
    mode = math.floor(rate)
    lower, upper = _weights_below(rate, mode), _weights_from(rate, mode)
    weights = [*reversed(lower), *upper]
    total, sum_so_far, below = sum(weights), 0, []
    for weight in weights:
        sum_so_far += weight
        below.append((sum_so_far << _BITS) // total)
    missing = (len(weights) + 1) ** 2 + 2 * math.ceil(rate) + 2  # U + D is one more than there are entries
    distance = math.ldexp(float(missing + len(weights)), -_BITS) * (1 + 2.0**-50)
    return _Table(mode - len(lower), below, np.array([entry >> (_BITS - _UPPER) for entry in below]), distance)


def _weights_from(rate: Fraction, mode: int) -> list[int]:
    """w(mode), w(mode + 1), ... while they are positive."""
    k, weight, weights = mode, 1 << _BITS, []
    while weight:
        weights.append(weight)
        k += 1
        weight = weight * rate.numerator // (rate.denominator * k)
    return weights


def _weights_below(rate: Fraction, mode: int) -> list[int]:
    """w(mode - 1), w(mode - 2), ... while they are positive; there is none below w(0)."""
    k, weights = mode, []
    weight = (k * rate.denominator << _BITS) // rate.numerator
    while weight:
        weights.append(weight)
        k -= 1
        weight = weight * k * rate.denominator // rate.numerator
    return weights


def encode(encoding: Encoding, x: np.ndarray, *, sampler: ExactSampler) -> np.ndarray:
    """The integers for one vector x of shape (dim,), as int64: `Encoding` with coins from the sampler.

    Guarantees:
        The integer vector has norm at most `encoding.norm`, checked in integers, whatever the input.
        Rounding is that of `Encoding`: up or down without bias (to 2^-53), repeated up to eight times while the vector
        is too long, then towards zero.
    """
    if np.shape(x) != (encoding.dim,):
        raise ValueError(f"expected x of shape ({encoding.dim},), got shape={np.shape(x)}")
    value = clip_l2(np.asarray(x, np.float64), encoding.clip_norm) * encoding.scale
    limit = math.floor(Fraction(encoding.norm) ** 2)
    for _ in range(ATTEMPTS):
        rounded = round_at_random(value, sampler)
        if int(rounded @ rounded) <= limit:
            return rounded
    inward = np.trunc(value).astype(np.int64)
    return inward if int(inward @ inward) <= limit else np.zeros_like(inward)


def split(values: np.ndarray, shares: int, modulus: int, *, sampler: ExactSampler) -> np.ndarray:
    """Additive shares of every integer modulo `modulus` (a power of two up to 2^32), along a new last axis; uint32.

    Guarantees:
        The shares of a value add up to it modulo `modulus`.
        Any shares - 1 of them are independent and uniform, whatever the value.
    """
    free = sampler.integers(modulus, values.size * (shares - 1)).reshape(*values.shape, shares - 1)
    last = (values - free.sum(axis=-1)) & (modulus - 1)
    return np.concatenate([free, last[..., None]], axis=-1).astype(np.uint32)
