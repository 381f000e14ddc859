"""From Renyi divergences to eps at a delta and back (Canonne, Kamath, Steinke 2020, Prop. 12).

A divergence D(a) of order a > 1 gives ``eps = D(a) + log(1 - 1/a) - (log delta + log a) / (a - 1)`` for any delta, and
``log delta = (a - 1) (D(a) - eps + log(1 - 1/a)) - log a`` for any eps. Every order is a valid bound: the smallest of
them counts. At eps = 0 there is also ``delta <= sqrt(1 - e^-D)`` (Bretagnolle, Huber 1979).
"""

from __future__ import annotations

import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics
from dovetail.accounting.numerics import ULP
from dovetail.statements import Theorem

__all__ = ["RENYI", "delta_of", "eps_by_order", "eps_of", "log_delta_by_order"]

RENYI = Theorem(
    key="CKS20.prop12",
    where="Renyi composition (Mironov 2017, Prop. 1), conversion by Canonne, Kamath, Steinke (2020), Prop. 12",
    url="https://arxiv.org/abs/2004.00010",
)


_LEAST = 1e-300  # the least divergence and the least delta: what underflows is not 0


def eps_of(orders: np.ndarray, divergences: np.ndarray, *, delta: float) -> float:
    """The smallest eps at this delta that an order gives, rounded up; infinite if none does.

    Arguments:
        orders: Renyi orders above 1.
        divergences: the divergence at each of them.
        delta: at which eps is asked for.

    Guarantees:
        An order whose divergence is no number, or negative, says nothing.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    bounds = _as_upper_bounds(divergences)
    if delta**2 * (1 - 1e-12) > -math.expm1(-float(bounds.min(initial=math.inf))):
        return 0.0
    return numerics.as_eps_bound(numerics.smallest_bound(eps_by_order(orders, bounds, delta=delta)))


def delta_of(orders: np.ndarray, divergences: np.ndarray, *, eps: float) -> float:
    """The smallest delta at this eps that an order gives, rounded up; 1 if none does.

    Arguments:
        orders: Renyi orders above 1.
        divergences: the divergence at each of them.
        eps: at which delta is asked for.
    """
    _validate.non_negative(eps=eps)
    bounds = _as_upper_bounds(divergences)
    at_zero = 0.5 * math.log(-math.expm1(-float(bounds.min(initial=math.inf))))
    log_delta = min(at_zero, numerics.smallest_bound(log_delta_by_order(orders, bounds, eps=eps)), 0.0)
    return numerics.as_probability_bound(max(math.exp(log_delta + 1e-12), _LEAST))


def _as_upper_bounds(divergences: np.ndarray) -> np.ndarray:
    """Divergences as upper bounds: infinite where they are no number or negative."""
    bounds = np.asarray(divergences, dtype=float)
    return np.where(bounds >= 0, np.maximum(bounds, _LEAST), np.inf)


def eps_by_order(orders: np.ndarray, divergences: np.ndarray, *, delta: float) -> np.ndarray:
    """The eps at this delta that each order gives, rounded up; it may be negative, and is no bound then by itself.

    Orders are above 1, and divergences are not negative; they may be infinite.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    shrink = np.log1p(-1 / orders)
    spread = (math.log(delta) + np.log(orders)) / (orders - 1)
    terms = (abs(math.log(delta)) + np.log(orders)) / (orders - 1)  # which may cancel in `spread`
    return divergences + shrink - spread + 8 * ULP * (np.abs(divergences) - shrink + terms)


def log_delta_by_order(orders: np.ndarray, divergences: np.ndarray, *, eps: float) -> np.ndarray:
    """The logarithm of the delta at this eps that each order gives, rounded up; it may be positive.

    Orders are above 1, and divergences are not negative; they may be infinite.
    """
    _validate.non_negative(eps=eps)
    shrink = np.log1p(-1 / orders)
    error = 8 * ULP * ((orders - 1) * (np.abs(divergences) + eps - shrink) + np.log(orders))
    return (orders - 1) * (divergences - eps + shrink) - np.log(orders) + error
