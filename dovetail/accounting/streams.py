"""Noise that is correlated between rounds: what all uploads of a user cost (docs/proofs/correlated-noise.md).

Round t of a stream releases x_t + sum over j of d_j z_(t-j), with independent Gaussian rows z: the rows of C^-1 Z,
where C^-1 is the lower triangular Toeplitz matrix of d. That is C^-1 (C X + Z): one Gaussian mechanism on C X, also
where x_t depends on what was released before (Denisov, McMahan, Rush, Smith, Thakurta, NeurIPS 2022, Thm. 2.1). If d_0
> 0 and all other d_j <= 0, no entry of C is negative, so that uploads that all point in one direction are the worst,
and a user who takes part at rounds t_1 < ... < t_k moves C X by at most its clip norm times the norm of the sum of
these columns of C.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy.signal import lfilter

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.statements import Theorem

__all__ = ["CORRELATED", "amplification_of_uploads", "impulse_response"]

CORRELATED = Theorem(
    key="dovetail.correlated-noise",
    where="Denisov, McMahan, Rush, Smith, Thakurta (NeurIPS 2022), Thm. 2.1; docs/proofs/correlated-noise.md",
    url="https://arxiv.org/abs/2202.08312",
)


def impulse_response(coefficients: tuple[float, ...], rounds: int) -> np.ndarray:
    """The first column of C, of the matrix whose inverse has these coefficients, every entry rounded up.

    Every entry is a sum of products that are not negative, divided by d_0. So its relative error grows by that of one
    step, a few roundings for each coefficient, from entry to entry, and not faster.

    Arguments:
        coefficients: d, the first positive and the others at most 0; others are refused.
        rounds: how many rows the matrix has.
    """
    _check_coefficients(coefficients)
    impulse = np.zeros(rounds)
    impulse[0] = 1.0
    column = lfilter([1.0], np.asarray(coefficients, float), impulse)
    steps = np.arange(1, rounds + 1)
    return np.maximum(column, 0.0) * (1 + 4 * numerics.ULP * (min(len(coefficients), rounds) + 3) * steps)


@functools.lru_cache(maxsize=256)
def amplification_of_uploads(coefficients: tuple[float, ...], rounds: int, uploads: int, separation: int) -> float:
    """By how much one user moves C X at the most, over the L2 sensitivity of one round; rounded up.

    Arguments:
        coefficients: those of the noise, the first positive and the others at most 0.
        rounds: how many the stream has.
        uploads: how often one user takes part at the most.
        separation: how many rounds lie between two of its uploads at the least.

    Guarantees:
        Never below the exact maximum over all patterns of rounds that the schedule allows, and that maximum itself, up
        to rounding, for one upload, and where the column of C never rises. It never falls with `rounds` or `uploads`,
        and never rises with `separation`.
    """
    _validate.integer(rounds=rounds, uploads=uploads, separation=separation)
    _validate.at_least(1, rounds=rounds, uploads=uploads, separation=separation)
    column = impulse_response(coefficients, rounds)
    envelope = np.maximum.accumulate(column[::-1])[::-1]  # never rises: the earliest rounds, closely packed, are worst
    total = _sum_of_shifted(envelope, min(uploads, -(-rounds // separation)), separation)
    if not np.isfinite(total).all():
        return math.inf
    largest = float(total.max())
    count = min(uploads, -(-rounds // separation))
    squares = math.fsum(((total / largest) ** 2).tolist())
    rounding = numerics.ULP * (8 * count + 16 * rounds + 128) * squares
    excess = _squares_of_columns(envelope / largest, rounds, count, separation) - _squares_of_columns(
        column / largest, rounds, count, separation
    )
    return largest * math.sqrt(squares - max(0.0, excess) + rounding)


def _sum_of_shifted(column: np.ndarray, count: int, separation: int) -> np.ndarray:
    """The sum of `count` columns of a Toeplitz matrix with this first one, `separation` apart; nothing is taken off."""
    rounds = len(column)
    if count * separation >= rounds:  # as many as fit: sums along every separation-th entry
        padded = np.zeros(-(-rounds // separation) * separation)
        padded[:rounds] = column
        return np.cumsum(padded.reshape(-1, separation), axis=0).ravel()[:rounds]
    total = np.zeros(rounds)
    for start in range(0, count * separation, separation):
        total[start:] += column[: rounds - start]
    return total


def _squares_of_columns(column: np.ndarray, rounds: int, count: int, separation: int) -> float:
    """The squared norms of `count` columns of a Toeplitz matrix with this first one, `separation` apart, added up."""
    norms = np.cumsum(column**2)
    return math.fsum(float(norms[rounds - 1 - start]) for start in range(0, count * separation, separation))


def _check_coefficients(coefficients: tuple[float, ...]) -> None:
    """Raise ValueError for coefficients that the proof does not cover: then C may have negative entries."""
    first, *others = coefficients or (0.0,)
    _validate.positive(first_coefficient=first)
    for other in others:
        _validate.finite(coefficient=other)
        _validate.at_most(0, coefficient=other)
