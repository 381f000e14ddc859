"""Polynomials over a field, by their values at roots of unity or by their coefficients.

Transforms run along the last axis but one, for all of the last axis at once: a matrix holds one polynomial per column.
"""

from __future__ import annotations

import functools

import numpy as np

from dovetail.vdaf.field import Field, padded

__all__ = ["between", "coefficients", "lagrange", "next_power_of_two", "values"]


def next_power_of_two(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def values(field: Field, columns: np.ndarray, order: int) -> np.ndarray:
    """The values of polynomials at the roots of unity of this order, from their coefficients, lowest first."""
    return _transformed(field, padded(columns, order - columns.shape[-2], axis=-2), inverse=False)


def coefficients(field: Field, columns: np.ndarray) -> np.ndarray:
    """The coefficients of the polynomials that have these values at the roots of unity."""
    order = columns.shape[-2]
    return field.mul(_transformed(field, columns, inverse=True), field.scalar(field.inverse(order)))


def between(field: Field, columns: np.ndarray) -> np.ndarray:
    """Values halfway between: at w, w^3, w^5, ... for polynomials with these values at 1, w^2, w^4, ..."""
    order = columns.shape[-2]
    powers = field.powers(field.scalar(field.root_of(2 * order)), order)
    twist = field.mul(powers, field.scalar(field.inverse(order)))
    turned = field.mul(_transformed(field, columns, inverse=True), twist[:, None])
    return _transformed(field, turned, inverse=False)


def lagrange(field: Field, point: np.ndarray, order: int) -> np.ndarray:
    """What the values at the roots of unity of this order count for the value at a point, along a new last axis.

    The polynomial that is 1 at w^k and 0 at the other roots is the sum of x^j w^(-jk) / order over j, so that its
    values at a point, for all k, are an inverse transform of the point's powers.
    """
    return coefficients(field, field.powers(point, order)[..., None])[..., 0]


def _transformed(field: Field, columns: np.ndarray, *, inverse: bool) -> np.ndarray:
    """Cooley and Tukey's way, decimating in time."""
    order, width = columns.shape[-2:]
    lead, half = columns.shape[:-2], 1
    found = columns[..., _reversed(order), :]
    while half < order:
        pairs = found.reshape(*lead, order // (2 * half), 2, half, width)
        even = pairs[..., 0, :, :]
        odd = pairs[..., 1, :, :]
        if half > 1:
            odd = field.mul(odd, _twiddles(field, half, inverse)[:, None])
        found = np.stack([field.add(even, odd), field.sub(even, odd)], axis=-3)
        half *= 2
    return found.reshape(*lead, order, width)


@functools.lru_cache(maxsize=64)
def _twiddles(field: Field, half: int, inverse: bool) -> np.ndarray:
    root = field.root_of(2 * half)
    return field.powers(field.scalar(field.inverse(root) if inverse else root), half)


@functools.lru_cache(maxsize=32)
def _reversed(order: int) -> np.ndarray:
    """Numbers with their bits in reverse."""
    found = np.zeros(1, np.int64)
    while len(found) < order:
        found = np.concatenate([2 * found, 2 * found + 1])
    return found
