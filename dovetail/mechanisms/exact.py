"""Exact samplers over a cryptographic bit source: integers and rationals only, no floating-point noise.

Everything is built from uniform integers. Bernoulli(p) compares a uniform with p; Bernoulli(exp(-g)) is von Neumann's
series; the discrete Laplace law is a uniform remainder with a geometric quotient; the discrete Gaussian is a rejection
from it. The laws are exact, given uniform independent bytes. Running time depends on the values drawn: timing is not
hidden. Written from Canonne, Kamath, Steinke (NeurIPS 2020), "The discrete Gaussian for differential privacy".
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction
from typing import NoReturn

import numpy as np

from dovetail import _validate

__all__ = ["EntropyExhausted", "ExactSampler", "round_at_random"]

_WORD = 1 << 64
_BLOCK = 1 << 16  # numbers that are rounded at a time


class EntropyExhausted(RuntimeError):  # noqa: N818 - named after what happened
    """The bit source returned fewer bytes than it was asked for."""


class ExactSampler:
    """Exact draws from bytes of `entropy`, which is the operating system's generator unless a test injects another.

    Single draws take 64-bit words from a pool that is filled `pool_words` at a time; arrays ask for their own bytes.

    Guarantees:
        The draws are a function of the bytes alone.
        No word is used twice: it leaves the pool in one atomic step, a forked child drops the pool it inherits, and
        copying is refused.
        A source that runs dry raises `EntropyExhausted`; nothing is ever padded.
    """

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom, *, pool_words: int = 512) -> None:
        _validate.integer(pool_words=pool_words)
        _validate.at_least(1, pool_words=pool_words)
        self._entropy = entropy
        self._pool_words = pool_words
        self._pool: list[int] = []
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an ExactSampler cannot be copied or pickled: the copy would repeat its randomness")

    def randbelow(self, bound: int) -> int:
        """A uniform integer in 0 .. bound - 1."""
        _validate.integer(bound=bound)
        if bound < 1:
            raise ValueError(f"expected bound >= 1, got bound={bound!r}")
        return self._randbelow(int(bound))

    def bernoulli(self, prob: Fraction | int) -> bool:
        """True with probability exactly `prob`."""
        prob = _require_rational_probability(prob)
        return self._randbelow(prob.denominator) < prob.numerator

    def bernoulli_exp(self, exponent: Fraction | int) -> bool:
        """True with probability exactly exp(-exponent), exponent >= 0.

        References:
            Canonne, Kamath, Steinke (2020), Alg. 1.
        """
        exponent = _require_rational(exponent=exponent)
        if exponent < 0:
            raise ValueError(f"expected exponent >= 0, got exponent={exponent!r}")
        return self._bernoulli_exp(exponent.numerator, exponent.denominator)

    def discrete_laplace(self, scale: Fraction | int) -> int:
        """An integer z with probability proportional to exp(-|z| / scale).

        References:
            Canonne, Kamath, Steinke (2020), Alg. 2.
        """
        scale = _require_positive_rational(scale=scale)
        return self._discrete_laplace(scale.numerator, scale.denominator)

    def discrete_gaussian(self, sigma_squared: Fraction | int) -> int:
        """An integer z with probability proportional to exp(-z^2 / (2 sigma_squared)).

        References:
            Canonne, Kamath, Steinke (2020), Alg. 3.
        """
        sigma_squared = _require_positive_rational(sigma_squared=sigma_squared)
        n, d = sigma_squared.numerator, sigma_squared.denominator
        t = math.isqrt(n // d) + 1
        while True:
            y = self._discrete_laplace(t, 1)
            # (|y| - sigma^2 / t)^2 / (2 sigma^2), over the common denominator
            if self._bernoulli_exp((abs(y) * d * t - n) ** 2, 2 * n * d * t * t):
                return y

    def bernoullis(self, prob: Fraction | int, size: int) -> np.ndarray:
        """`size` exact draws of Bernoulli(prob): 64 binary digits of prob at a time, further ones only on a tie."""
        prob = _require_rational_probability(prob)
        digit, rest = divmod(prob.numerator * _WORD, prob.denominator)
        if digit == _WORD:
            return np.ones(size, bool)
        words = self._read_words(size)
        below = words < np.uint64(digit)
        ties = np.flatnonzero(words == np.uint64(digit))
        if rest and ties.size:
            below[ties] = self.bernoullis(Fraction(rest, prob.denominator), ties.size)
        return below

    def integers(self, bound: int, size: int) -> np.ndarray:
        """`size` independent uniform integers in 0 .. bound - 1, as int64; by rejection, exact."""
        _validate.integer(bound=bound)
        _validate.in_interval(1, 2**63 - 1, bound=bound)
        limit = np.uint64((_WORD - 1) // bound * bound)
        words = self._read_words(size)
        while (rejected := np.flatnonzero(words >= limit)).size:
            words[rejected] = self._read_words(rejected.size)
        return (words % np.uint64(bound)).astype(np.int64)

    def uint32s(self, size: int) -> np.ndarray:
        """`size` independent uniform 32-bit words."""
        return np.frombuffer(self._read_bytes(4 * size), "<u4").astype(np.uint32)

    def _read_words(self, count: int) -> np.ndarray:
        """`count` uniform 64-bit words, straight from the source and not from the pool."""
        return np.frombuffer(self._read_bytes(8 * count), "<u8").astype(np.uint64)

    def _read_bytes(self, size: int) -> bytes:
        """Exactly `size` fresh bytes; raises `EntropyExhausted` where the source gives fewer."""
        fresh = self._entropy(size)
        if len(fresh) != size:
            raise EntropyExhausted(f"expected {size} bytes from the bit source, got {len(fresh)}")
        return fresh

    def _next_word(self) -> int:
        """One uniform 64-bit word from the pool.

        `pop` takes a word in one atomic step, so that no two threads get the same; a forked child starts a pool of its
        own.
        """
        if self._process != os.getpid():
            self._pool, self._process = [], os.getpid()
        try:
            return self._pool.pop()
        except IndexError:
            fresh: list[int] = self._read_words(self._pool_words)[::-1].tolist()
            word = fresh.pop()
            self._pool = fresh
            return word

    def _randbelow(self, bound: int) -> int:
        """A uniform integer in 0 .. bound - 1, by rejection from the least number of bits that hold it; bound >= 1."""
        bits = (bound - 1).bit_length()
        if bits == 0:
            return 0
        mask = (1 << bits) - 1
        extra = (bits - 1) // 64
        while True:
            value = self._next_word()
            for _ in range(extra):
                value = value << 64 | self._next_word()
            if (value := value & mask) < bound:
                return value

    def _bernoulli_exp(self, numerator: int, denominator: int) -> bool:
        """True with probability exactly exp(-numerator / denominator), for integers >= 0 and >= 1.

        It is von Neumann's series for n <= d; a larger n is taken in unit steps.
        """
        while numerator > denominator:
            if not self._bernoulli_exp(1, 1):
                return False
            numerator -= denominator
        k = 1
        while self._randbelow(denominator * k) < numerator:
            k += 1
        return k % 2 == 1

    def _discrete_laplace(self, scale_numerator: int, scale_denominator: int) -> int:
        """An integer z with probability proportional to exp(-|z| / scale), a quotient of integers >= 1."""
        while True:
            u = self._randbelow(scale_numerator)
            if not self._bernoulli_exp(u, scale_numerator):
                continue
            v = 0
            while self._bernoulli_exp(1, 1):
                v += 1
            y = (u + scale_numerator * v) // scale_denominator
            negative = self._randbelow(2)
            if negative and y == 0:
                continue
            return -y if negative else y


def round_at_random(numbers: np.ndarray, sampler: ExactSampler) -> np.ndarray:
    """Each number rounded up or down, without bias (to 2^-53), as int64.

    Numbers are finite and below 2^63 in magnitude.

    A 32-bit word is compared with the fraction's first 32 binary digits; 53 further ones decide where they are equal.
    """
    rounded = np.empty(np.shape(numbers), np.int64)
    flat = np.asarray(numbers, np.float64).reshape(-1)
    into = rounded.reshape(-1)
    for begin in range(0, flat.size, _BLOCK):
        value = flat[begin : begin + _BLOCK]
        lower = np.floor(value)
        scaled = (value - lower) * 2.0**32
        first = np.minimum(scaled, 2.0**32 - 1).astype(np.uint32)  # value - lower may be 1, by rounding
        words = sampler.uint32s(value.size)
        upward = words < first
        ties = np.flatnonzero(words == first)
        if ties.size:
            upward[ties] = sampler.integers(2**53, ties.size) < (scaled[ties] - first[ties]) * 2.0**53
        into[begin : begin + _BLOCK] = lower.astype(np.int64) + upward
    return rounded


def _require_rational(**values: Fraction | int) -> Fraction:
    """The one named value as a Fraction; refuses floats and booleans, which are no exact numbers."""
    ((name, value),) = values.items()
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise ValueError(f"expected {name} to be a Fraction or an integer, got {name}={value!r}")
    return Fraction(value)


def _require_positive_rational(**values: Fraction | int) -> Fraction:
    """The one named value as a Fraction; refuses what is not above 0."""
    value = _require_rational(**values)
    if value <= 0:
        ((name, _),) = values.items()
        raise ValueError(f"expected {name} > 0, got {name}={value!r}")
    return value


def _require_rational_probability(prob: Fraction | int) -> Fraction:
    """A probability as a Fraction; refuses what is not in [0, 1]."""
    prob = _require_rational(prob=prob)
    if not 0 <= prob <= 1:
        raise ValueError(f"expected 0 <= prob <= 1, got prob={prob!r}")
    return prob
