"""From Renyi divergences to eps at a delta and back (Canonne, Kamath, Steinke 2020, Prop. 12).

A divergence D(a) of order a > 1 gives ``eps = D(a) + log(1 - 1/a) - (log delta + log a) / (a - 1)`` for any delta, and
``log delta = (a - 1) (D(a) - eps + log(1 - 1/a)) - log a`` for any eps. Every order is a valid bound: the smallest of
them counts.
"""

from __future__ import annotations

import math

import numpy as np

from dovetail import _validate
from dovetail.statements import Theorem

__all__ = ["RENYI", "eps_by_order", "log_delta_by_order"]

RENYI = Theorem(
    key="CKS20.prop12",
    where="Renyi composition (Mironov 2017, Prop. 1), conversion by Canonne, Kamath, Steinke (2020), Prop. 12",
    url="https://arxiv.org/abs/2004.00010",
)


def eps_by_order(orders: np.ndarray, divergences: np.ndarray, *, delta: float) -> np.ndarray:
    """The eps at this delta that each order gives; it may be negative."""
    _validate.in_open_interval(0, 1, delta=delta)
    return divergences + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)


def log_delta_by_order(orders: np.ndarray, divergences: np.ndarray, *, eps: float) -> np.ndarray:
    """The logarithm of the delta at this eps that each order gives; it may be positive."""
    _validate.non_negative(eps=eps)
    return (orders - 1) * (divergences - eps + np.log1p(-1 / orders)) - np.log(orders)
