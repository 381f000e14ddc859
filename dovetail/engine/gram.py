"""Norms of gradients of linear models that are never formed, by Gram matrices: for a few records per client.

The gradient of a client with rows x_i (the constant feature among them) and residuals r_i is the sum of x_i (x) r_i, of
squared norm sum_ij <x_i, x_j> <r_i, r_j>. Views of one record are nearly equal, and so the sum may cancel in single
precision; what `norms` returns is therefore that sum plus a worst-case bound on all rounding, relative to
(sum_i |x_i| |r_i|)^2, which does not cancel: clipping by it is clipping (docs/proofs/views.md).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.data._base import Clients

__all__ = ["CANCELLED", "LONGEST", "MOST_ROWS", "Products", "lengthened", "norms", "products", "rounding", "serves"]

MOST_ROWS = 16  # above, gradients themselves are no slower
_UNIT = 2.0**-24  # half the distance of neighbouring float32 numbers, relative
_LARGEST_ROUNDING = 0.01
CANCELLED = 16.0  # how many times its own length a client's gradient may be the sum of
LONGEST = 2.0**80  # of a row: beside a longer one, coefficients that are flushed to zero would count
_BLOCK = 1 << 23  # numbers of inputs that are in double precision at a time


class Products(NamedTuple):
    """What is public to a client about its rows: their cosines (clients, rows, rows) and lengths (clients, rows)."""

    cosines: jax.Array | np.ndarray
    lengths: jax.Array | np.ndarray


def rounding(rows: int, classes: int) -> float:
    """The bound on all rounding of a squared norm, as a part of (sum_i |x_i| |r_i|)^2; docs/proofs/views.md, Thm. 1."""
    operations = (rows**2 * classes + 2 * (rows + classes) + 32) * _UNIT
    return operations / (1 - operations)


def lengthened(norms: jax.Array, reach: jax.Array, counts: jax.Array, classes: int) -> jax.Array:
    """The norms of clients with these counts of rows as every form states them, `reach` being sum_i |x_i| |r_i|.

    Those by Gram matrices are raised by a bound on their rounding, so for clients with as few rows all others are, too,
    and what cancels to less than a sixteenth is taken for that. Which form a client is computed in depends on the
    largest client of its class: it may not tell the others of it.

    Guarantees:
        Never below the norms that are given; raised by the client's own rows alone.
    """
    part = _parts(counts, classes)
    raised = jnp.maximum(jnp.hypot(norms, jnp.sqrt(part) * reach), reach / CANCELLED)
    return jnp.where(part > 0, raised, norms)


def _parts(counts: jax.Array, classes: int) -> jax.Array:
    """The rounding bounds for these counts of rows; 0 for as many as no Gram matrix is used for, and for none."""
    bounds = [rounding(rows, classes) for rows in range(MOST_ROWS + 1)]
    used = [bound if rows and bound <= _LARGEST_ROUNDING else 0.0 for rows, bound in enumerate(bounds)]
    up = np.nextafter(np.array([*used, 0.0], np.float32), np.float32(np.inf))
    table = np.where(np.array([*used, 0.0]) > 0, up, np.float32(0))
    return jnp.asarray(table)[jnp.minimum(counts, MOST_ROWS + 1)]


def serves(rows: int, classes: int) -> bool:
    """Whether norms by Gram matrices are worth it for clients of so many rows."""
    return 2 <= rows <= MOST_ROWS and rounding(rows, classes) <= _LARGEST_ROUNDING


def products(inputs: np.ndarray, clients: Clients, *, constant: float) -> Products:
    """Cosines and lengths of every client's rows with their constant feature, from double precision.

    Guarantees:
        A length is not below that of its row, a cosine is that of the lengths as stated, each up to float32 rounding;
        the length of a row that is longer than 2^80 is infinite.
        Rows that do not count have length and cosines zero.
    """
    rows = clients.most
    real = np.arange(rows) < clients.counts[:, None]
    cosines = np.zeros((len(real), rows, rows), np.float32)
    lengths = np.zeros((len(real), rows), np.float32)
    flat = inputs.reshape(len(inputs), -1)
    size = max(1, _BLOCK // (rows * flat.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        for low in range(0, len(real), size):
            part = slice(low, low + size)
            held = flat[clients.rows(np.arange(len(real))[part], width=rows)]
            held = held * np.float32(1 / 255) if held.dtype == np.uint8 else held
            double = held.astype(np.float64)
            both = real[part, :, None] & real[part, None]
            inner = np.where(both, double @ double.swapaxes(1, 2) + constant**2, 0)
            norm = np.sqrt(np.diagonal(inner, axis1=1, axis2=2))
            rounded = np.nextafter(norm.astype(np.float32), np.float32(np.inf)) * (norm != 0)
            lengths[part] = np.where(norm <= LONGEST, rounded, np.inf)
            outer = lengths[part].astype(np.float64)
            outer = outer[:, :, None] * outer[:, None]
            cosines[part] = np.where(inner == 0, 0, inner / np.where(outer == 0, 1, outer))
    return Products(cosines, lengths)


def norms(known: Products, residuals: jax.Array, counts: jax.Array) -> jax.Array:
    """Upper bounds on the norms of the clients' gradients, from residuals (clients, rows, classes).

    Guarantees:
        Never below the exact norm of the sum of x_i (x) r_i, wherever that is above 2^-60.
        Above it by no more than the rounding bound for the client's own `counts` of rows, or a sixteenth of the sum of
        the norms of what cancels; not finite where a part of it is not.
    """
    classes = residuals.shape[2]
    parts = known.lengths[:, :, None] * residuals
    unit = jnp.clip(jnp.max(jnp.abs(parts), axis=(1, 2)), 2.0**-70, 2.0**126)
    scaled = parts / unit[:, None, None]
    inner = jnp.sum(scaled[:, :, None] * scaled[:, None], axis=3)
    square = jnp.sum(known.cosines * inner, axis=(1, 2))
    reach = jnp.sum(jnp.sqrt(jnp.sum(scaled * scaled, axis=2)), axis=1)
    raised = jnp.sqrt(jnp.maximum(square, 0.0) + _parts(counts, classes) * (reach * reach))
    return unit * jnp.maximum(raised, reach / CANCELLED)
