"""Exact Skellam noise, and vectors as integers: what a deployed client of an integer sum draws.

The file begins with the noise (`ExactSkellam`), goes on with a vector's encoding and its additive shares, and ends with
`SignedTable`, by which laws are drawn from tables of integers.

*Noise*. Skellam noise X of variance v has P(X = k) = p(k) = e^-v I_k(v). It is drawn by inversion of a table of |X|,
with a fair sign. The weights w(k), up to a factor p(k), follow from above by the recurrence of I_k, in integers rounded
down: w(K+1) = 0, w(K) = 2^288, w(k-1) = w(k+1) + 2k w(k) / v. No exponential or Bessel function is needed.

How far that is from Skellam's law, with t(k) the same recurrence without rounding:

- *Start*. I_k and (-1)^k K_k solve the recurrence, so t(k) = a (I_k -+ I_(K+1) K_k / K_(K+1)) with a > 0. As K_k rises
  in k, t(k) / a is within I_(K+1) of I_k. By Chernoff's bound P(X > K) <= T = 2^-264 (`_skellam_law`), so e^-v t / a is
  within T of p at every k <= K, and what lies beyond has mass 2 T: (2K + 3) T in all, over both signs.
- *Rounding*. What is rounded off before w(i-1), less than 1, changes w(k) by at most t(k) / t(i-1): the coefficients
  are positive, and t / t(i-1) starts no smaller. As t(k-1) >= t(k+1), all t are at least min(t(K), t(K-1)), that is
  2^288 min(1, 2K / v). Hence 0 <= t(k) - w(k) <= t(k) max(K, v / 2) 2^-288.
- A measure whose L1 distance from a law is D has, normalised, a total variation of at most D from it. The table adds
  2^-287 for each entry.

Distances stay below 2^-240 for every variance that is accepted.

*Tables*. A table is a distribution function of magnitudes 0, 1, 2, ... in units of 2^-288, and a draw the number of its
entries that do not exceed a uniform on 0 .. 2^288 - 1: the law of the table exactly, with a fair sign beside it. The
uniform is read from one 32-bit word, 31 bits of it and the sign; further bits are read only where these are the upper
bits of an entry. The first of the 31 say where to begin (`SignedTable.first`), so that a draw costs about the same
however long the table is. Scaling sums of weights to 2^288, of which 319 bits are kept at least, moves every entry by
less than 2, and so the law by at most 2^-287 for each entry, in total variation.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dovetail import _validate
from dovetail.mechanisms._base import convert_fields_to_float
from dovetail.mechanisms.exact import ExactSampler, round_at_random
from dovetail.mechanisms.gaussian import clip_l2
from dovetail.mechanisms.skellam import ATTEMPTS, Encoding

__all__ = [
    "BITS",
    "ExactSkellam",
    "SignedTable",
    "encode",
    "split_into_shares",
]

_TAIL = 264  # what is beyond the table has probability 2^-264 at most
_LARGEST_VARIANCE = 2.0**29  # 443,000 entries


@dataclasses.dataclass(frozen=True)
class ExactSkellam:
    """Skellam noise of mean zero: the law of the difference of two independent Poissons of rate variance / 2 each.

    Guarantees:
        A draw is within `distance` <= 2^-240 of the Skellam law in total variation, of this variance exactly.
        The sum of m draws is within m `distance` of the Skellam law of variance m `variance`.
    """

    variance: float

    def __post_init__(self) -> None:
        _validate.positive(variance=self.variance)
        _validate.at_most(_LARGEST_VARIANCE, variance=self.variance)
        convert_fields_to_float(self, "variance")

    @property
    def distance(self) -> float:
        """The total variation between a draw and the Skellam law, at most; rounded up."""
        return _skellam_law(self.variance).distance

    def __call__(self, size: int, *, sampler: ExactSampler) -> np.ndarray:
        """`size` independent draws, as int64."""
        magnitude, sign = _skellam_law(self.variance).table.draw(size, sampler=sampler)
        magnitude ^= sign  # with what follows: -magnitude where the sign is -1
        magnitude -= sign
        return magnitude


class _Law(NamedTuple):
    """The table of |X| for Skellam noise X of one variance, and how far it is from that law."""

    table: SignedTable
    distance: float


@functools.lru_cache(maxsize=8)
def _skellam_law(variance: float) -> _Law:
    """The law of Skellam noise of this variance: the table of its magnitudes, and its distance, rounded up.

    Cached: do not write to it. The factor 1 + 2^-50 covers the rounding of the distance.
    """
    largest = _largest_magnitude(variance)
    weights = _skellam_weights(Fraction(variance), largest)
    table = SignedTable.of([weights[0], *(2 * weight for weight in weights[1:])])
    tails = math.ldexp(2.0 * largest + 3, -_TAIL)
    rounding = math.ldexp(2 * max(largest, variance) + 2 * (largest + 1), -BITS)
    return _Law(table, (tails + rounding) * (1 + 2.0**-50))


def _skellam_weights(variance: Fraction, largest: int) -> list[int]:
    """w(0) .. w(K), K = `largest`: Skellam's probabilities up to a factor, by its recurrence, from above."""
    n, d = variance.numerator, 2 * variance.denominator
    above, here = 0, 1 << BITS
    weights = [here]
    for k in range(largest * d, 0, -d):
        above, here = here, above + here * k // n
        weights.append(here)
    weights.reverse()
    return weights


def _largest_magnitude(variance: float) -> int:
    """The least K for which Chernoff's bound says P(X > K) <= 2^-264.

    The exponent is asked to be larger by 1, so that floats may round.
    """

    def exponent(k: int) -> float:
        root = math.hypot(k, variance)
        return k * (k / (root + variance) - math.asinh(k / variance))

    return bisect.bisect_left(range(1, 2**20), math.log(2) * _TAIL + 1, key=lambda k: -exponent(k))


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


def split_into_shares(values: np.ndarray, shares: int, modulus: int, *, sampler: ExactSampler) -> np.ndarray:
    """Additive shares of every integer modulo `modulus` (a power of two up to 2^32), along a new last axis; uint32.

    Guarantees:
        The shares of a value add up to it modulo `modulus`.
        Any shares - 1 of them are independent and uniform, whatever the value.
    """
    free = sampler.integers(modulus, values.size * (shares - 1)).reshape(*values.shape, shares - 1)
    last = (values - free.sum(axis=-1)) & (modulus - 1)
    return np.concatenate([free, last[..., None]], axis=-1).astype(np.uint32)


BITS = 288
_UPPER = 31  # bits that are compared first, all draws at once
_KEPT = 32  # bits of sums that are kept beyond those of the table
_LEAST_FIRST, _MOST_FIRST = 8, 18  # bits of a word that say where to begin
_STEPS = 2  # from there, one entry at a time; whoever is not there yet is sought by halving
_BLOCK = 1 << 16  # draws at a time, so that what they need beside the result stays small


class SignedTable(NamedTuple):
    """A law of magnitudes as a distribution function in units of 2^-288: `below[i]` is that of i, ascending to 2^288.

    `upper` holds the upper 31 bits of every entry, by which draws are sorted first; `first`, for the first bits of
    these, how many entries are below all that begin so.
    """

    below: list[int]
    upper: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, weights: Iterable[int]) -> SignedTable:
        """The law proportional to these weights, which are not negative and not all 0."""
        sums = list(itertools.accumulate(weights))
        spare = max(0, sums[-1].bit_length() - BITS - _KEPT)
        total = sums[-1] >> spare
        below = [(entry >> spare << BITS) // total for entry in sums]
        upper = np.array([entry >> (BITS - _UPPER) for entry in below], np.uint32)
        bits = min(_MOST_FIRST, _UPPER, max(_LEAST_FIRST, (4 * len(upper)).bit_length()))
        begins = np.arange(1 << bits, dtype=np.uint32) << np.uint32(_UPPER - bits)
        return cls(below, upper, np.searchsorted(upper, begins).astype(np.int32))

    def draw(self, size: int, *, sampler: ExactSampler) -> tuple[np.ndarray, np.ndarray]:
        """`size` independent magnitudes, and a fair sign for each: 0, or -1 for a negative one; both int64."""
        magnitudes = np.empty(size, np.int64)
        signs = np.empty(size, np.int64)
        for begin in range(0, size, _BLOCK):
            block = slice(begin, min(size, begin + _BLOCK))
            words = sampler.uint32s(block.stop - begin)
            signs[block] = words.view(np.int32) >> 31
            magnitudes[block] = self._invert_distribution(words & np.uint32((1 << _UPPER) - 1), sampler)
        return magnitudes, signs

    def _invert_distribution(self, words: np.ndarray, sampler: ExactSampler) -> np.ndarray:
        """The number of entries that do not exceed a uniform with these upper bits."""
        bits = len(self.first).bit_length() - 1
        index = self.first[words >> np.uint32(_UPPER - bits)]
        for _ in range(_STEPS):
            index += self.upper[index] < words  # the last entry is above all words
        entry = self.upper[index]
        far = np.flatnonzero(entry < words)
        if far.size:
            index[far] = np.searchsorted(self.upper, words[far])
            entry[far] = self.upper[index[far]]
        for tie in np.flatnonzero(entry == words):
            word = int(words[tie])
            uniform = word << (BITS - _UPPER) | sampler.randbelow(1 << (BITS - _UPPER))
            after = int(np.searchsorted(self.upper, words[tie], side="right"))
            index[tie] = bisect.bisect_right(self.below, uniform, int(index[tie]), after)
        return index
