"""Laws of magnitudes 0, 1, 2, ... as tables of integers, drawn exactly, each draw with a fair sign beside it.

A table is a distribution function in units of 2^-288, and a draw the number of its entries that do not exceed a uniform
on 0 .. 2^288 - 1: the law of the table exactly. The uniform is read from one 32-bit word, 31 bits of it and the sign;
further bits are read only where these are the upper bits of an entry. Scaling sums of weights to 2^288, of which 319
bits are kept at least, moves every entry by less than 2, and so the law by at most 2^-287 for each entry, in total
variation.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dovetail.mechanisms.exact import ExactSampler

__all__ = ["BITS", "SignedTable"]

BITS = 288
_UPPER = 31  # bits that are compared first, all draws at once
_KEPT = 32  # bits of sums that are kept beyond those of the table
_BLOCK = 1 << 16  # draws at a time, so that what they need beside the result stays small


class SignedTable(NamedTuple):
    """A distribution function in units of 2^-288, `below[i]` that of i, and its upper 31 bits."""

    below: list[int]
    upper: np.ndarray

    @classmethod
    def of(cls, weights: Iterable[int]) -> SignedTable:
        """The law proportional to these weights, which are not negative and not all 0."""
        sums = list(itertools.accumulate(weights))
        spare = max(0, sums[-1].bit_length() - BITS - _KEPT)
        total = sums[-1] >> spare
        below = [(entry >> spare << BITS) // total for entry in sums]
        return cls(below, np.array([entry >> (BITS - _UPPER) for entry in below], np.uint32))

    def draw(self, size: int, *, sampler: ExactSampler) -> tuple[np.ndarray, np.ndarray]:
        """`size` independent magnitudes, and a fair sign for each: 0, or -1 for a negative one; both int64."""
        magnitudes, signs = np.empty(size, np.int64), np.empty(size, np.int64)
        for begin in range(0, size, _BLOCK):
            block = slice(begin, min(size, begin + _BLOCK))
            words = sampler.uint32s(block.stop - begin)
            signs[block] = words.view(np.int32) >> 31
            magnitudes[block] = self._inverted(words & np.uint32((1 << _UPPER) - 1), sampler)
        return magnitudes, signs

    def _inverted(self, words: np.ndarray, sampler: ExactSampler) -> np.ndarray:
        """The number of entries that do not exceed a uniform with these upper bits."""
        index = np.searchsorted(self.upper, words)
        for tie in np.flatnonzero(self.upper[index] == words):  # the last entry is above all words
            word = int(words[tie])
            uniform = word << (BITS - _UPPER) | sampler.randbelow(1 << (BITS - _UPPER))
            after = int(np.searchsorted(self.upper, words[tie], side="right"))
            index[tie] = bisect.bisect_right(self.below, uniform, int(index[tie]), after)
        return index
