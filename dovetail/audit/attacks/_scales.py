"""A noise scale that depends on the data shows itself.

All updates lie along one direction. The released sum has pure noise in the other dim - 1 coordinates, and its squared
norm there is a scaled chi-square, in both worlds; in many dimensions no two scales look alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import gammainc, gammaincc

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.noise import log_cells

__all__ = ["scaled_noise"]

_CELLS = 4000
_TINY = 1e-300  # below, doubles cannot tell a tail from none


def scaled_noise(
    attack: str, dim: int, first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> ExactAttack:
    """The squared norm of noise in `dim` coordinates whose variance is random: (probability, variance) in both worlds.

    Tails beyond what a double holds go into the slack, so that no eps is found above about 690.
    """
    variances = [variance for world in (first, second) for weight, variance in world if weight > 0]
    spread = 40 * math.sqrt(2 * dim) + 800
    low, high = min(variances) * max(1e-3, dim - spread), max(variances) * (dim + spread)
    cuts = np.geomspace(low, high, _CELLS)
    laws = []
    for world in (first, second):
        below = sum(weight * gammainc(dim / 2, cuts / (2 * variance)) for weight, variance in world)
        above = sum(weight * gammaincc(dim / 2, cuts / (2 * variance)) for weight, variance in world)
        laws.append(log_cells(np.log(np.maximum(below, _TINY)), np.log(np.maximum(above, _TINY))))
    return ExactAttack(attack=attack, log_first=laws[0], log_second=laws[1], slack=4 * _TINY)
