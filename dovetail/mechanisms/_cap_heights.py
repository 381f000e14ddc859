"""Heights of uniform points of a sphere above a threshold, by the inverse of their exact law, as tables of cubics."""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import special

from dovetail.accounting.releases import privunit as accounting
from dovetail.accounting.releases.privunit import Cap

__all__ = ["PER_UNIT", "UNITS", "inverse_cdf"]

PER_UNIT = 32  # cubics per unit of the exponent: the error is below that of float32
UNITS = 23  # -log of the smallest uniform, 2^-33, is 22.9


@functools.lru_cache(maxsize=16)
def inverse_cdf(cap: Cap) -> np.ndarray:
    """Cubics for (t, sqrt(1 - t^2)) by exponent, of shape (2, intervals, 2, 4), for outside and inside the cap."""
    mass = accounting.cap_mass(dim=cap.dim, threshold=cap.threshold)
    return np.stack([_tail_inverse(cap.dim, 0.0), _tail_inverse(cap.dim, -math.log(2 * mass))]).astype(np.float32)


def _tail_inverse(dim: int, start: float) -> np.ndarray:
    """Hermite cubics of t and sqrt(1 - t^2) in e, where P(T >= t) = exp(-start - e) / 2 and 0 <= e <= 23.

    In e both are smooth and evenly spread, however thin the tail: beyond a threshold near which all of it crowds, too.
    """
    exponent = start + np.arange(PER_UNIT * UNITS + 1) / PER_UNIT
    tail, b = np.exp(-exponent), (dim - 1) / 2
    t, reach = np.sqrt(special.betainccinv(0.5, b, tail)), np.sqrt(special.betaincinv(b, 0.5, tail))
    slope = np.exp(special.betaln(0.5, b) - exponent - (dim - 3) * np.log(reach)) / 2  # P(T >= t) over T's density
    value, step = np.stack([t, reach], axis=-1), np.stack([slope, -slope * t / reach], axis=-1) / PER_UNIT
    rise = np.diff(value, axis=0)
    square, cube = 3 * rise - 2 * step[:-1] - step[1:], step[:-1] + step[1:] - 2 * rise
    return np.stack([value[:-1], step[:-1], square, cube], axis=-1)
