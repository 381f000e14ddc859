"""Blankets of users with unequal budgets: what part of every user's report is a draw from one law, and F against it.

- *Clip-Laplace* in its box: the uniform law w. User i's density is at least ``g_i w, g_i = e_i / (e^e_i - 1)``.
- *Clip-Laplace with a public threshold* (S-APES): the same, seen through the map that draws small reports anew.
- *Levels*: the uniform law, ``g_i = b / (e^e_i + b - 1)``.
- *Laplace* on [0, 1]: a Laplace law of the victim's budget e around a uniform point of [1/2 - t, 1/2 + t], which is a
  blanket of users whose budget is at most e. It is wider than the blanket of equal users, and suits smaller budgets.

Proofs are in docs/proofs/blankets.md.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting.amplification import frontier
from dovetail.accounting.amplification.frontier import Frontier
from dovetail.statements import NotApplicable

__all__ = ["clip_laplace_floors", "laplace_floors", "laplace_frontier", "level_floors", "threshold_frontier"]

_DOWN = 1 - 1e-12
_CELLS = 64  # of a part of the line or of the box; more would not be seen
_LEAST_PLATEAU, _LARGEST_PLATEAU = 1e-3, 100.0
_AT_ONCE = 32
_MOST_BOXES = 5000  # of budgets and inputs that are looked at
_SLACK = 1e-10  # more than the relative error of a ratio of differences
_LEVELS = 256  # ratios at which frontiers are compared
_CLOSE = (4e-3, 1.6e-2, 6.4e-2)  # log ratios of densities, over eps_local, that may be too small to matter


def clip_laplace_floors(eps_locals: np.ndarray) -> np.ndarray:
    """g_i against the uniform law on the box, rounded down."""
    return eps_locals * np.exp(-eps_locals) / -np.expm1(-eps_locals) * _DOWN


def level_floors(eps_locals: np.ndarray, levels: int) -> np.ndarray:
    """g_i against the uniform law on the levels, rounded down."""
    small = np.exp(-eps_locals)
    return levels * small / (1 + (levels - 1) * small) * _DOWN


def laplace_floors(eps_locals: np.ndarray, eps_victim: float, half_width: float) -> np.ndarray:
    """g_i against the plateau of a victim's budget, rounded down; 0 for larger budgets, whose tails are shorter.

    The ratio of densities is least where e^(e s) = [e_i/q + sqrt((e_i/q)^2 + e^2 - e_i^2)] / (e + e_i), with s the
    distance from 1/2 and q = e^(-e t): its logarithm is convex in s.
    """
    _validate.positive(half_width=half_width)
    _need_plateau(eps_victim)
    e, t = eps_victim, half_width
    mine = np.minimum(eps_locals, e)
    q = math.exp(-e * t)
    grown = (mine / q + np.sqrt((mine / q) ** 2 + (e + mine) * (e - mine))) / (e + mine)
    plateau = -math.expm1(-e * t) - q * (np.sqrt(grown) - 1 / np.sqrt(grown)) ** 2 / 2  # 1 - q cosh(e s)
    floors = mine * t * np.exp(-mine / 2 - mine * np.log(grown) / e) / plateau
    return np.where(eps_locals <= e, np.minimum(floors, 1.0) * _DOWN, 0.0)


def _need_plateau(eps_local: float) -> None:
    """Below some budget the masses of cells, differences of nearly equal numbers, are not right to `_SLACK`."""
    if not _LEAST_PLATEAU <= eps_local <= _LARGEST_PLATEAU:
        raise NotApplicable(f"no plateau for a budget of {eps_local:.4g}")


@functools.lru_cache(maxsize=256)
def laplace_frontier(eps_local: float, half_width: float) -> Frontier:
    """F of Laplace noise on [0, 1] against its plateau: of the input 1, for the two ends are the worst.

    Distances are from 1/2. Cells end at 1/2 (the input), at the plateau's ends and where ratios are constant beyond.
    """
    _validate.positive(half_width=half_width)
    _need_plateau(eps_local)
    e, t = eps_local, half_width
    far = max(t, 0.5)
    cuts = np.unique(np.concatenate([np.linspace(-far, far, 2 * _CELLS + 1), [-t, t, 0.5]]))
    width = np.diff(cuts)

    def blanket(s: np.ndarray) -> np.ndarray:
        inside = -math.expm1(-e * t) - 2 * math.exp(-e * t) * np.sinh(e / 2 * np.minimum(np.abs(s), t)) ** 2
        return np.where(np.abs(s) <= t, inside, math.sinh(e * t) * np.exp(-e * np.abs(s))) / (2 * t)

    def blanket_below(s: np.ndarray) -> np.ndarray:  # the mass between 0 and s
        size = np.minimum(np.abs(s), t)
        inside = size - math.exp(-e * t) * np.sinh(e * size) / e
        beyond = math.sinh(e * t) / e * -np.expm1(-e * np.maximum(np.abs(s) - t, 0.0)) * math.exp(-e * t)
        return np.sign(s) * (inside + beyond) / (2 * t)

    def report_below(s: np.ndarray) -> np.ndarray:
        return -np.sign(s - 0.5) * np.expm1(-e * np.abs(s - 0.5)) / 2

    ratio = e / 2 * np.exp(-e * np.abs(cuts - 0.5)) / blanket(cuts)
    tails = np.array([0.5 + float(report_below(cuts[0])), 0.5 - float(report_below(cuts[-1]))])
    ends = np.array([0.5 + float(blanket_below(cuts[0])), 0.5 - float(blanket_below(cuts[-1]))])
    base = np.concatenate([np.diff(blanket_below(cuts)), ends])
    own = np.concatenate([np.diff(report_below(cuts)), tails])
    real = np.concatenate([width > 1e-12, [True, True]])
    lowest = np.concatenate([np.minimum(ratio[:-1], ratio[1:]), ratio[[0, -1]]])
    highest = np.concatenate([np.maximum(ratio[:-1], ratio[1:]), ratio[[0, -1]]])
    return frontier.from_cells(base[real], own[real], lowest[real] * (1 - _SLACK), highest[real] * (1 + _SLACK))


class _Thresholded:
    """Clip-Laplace on [-1, 1] whose reports below the threshold are drawn anew around 0, at a public budget.

    Of a report drawn anew that falls below the threshold again nothing is seen but that: all of these are one cell.
    """

    def __init__(self, fresh: float, threshold: float) -> None:
        outer = np.linspace(threshold, 1.0, _CELLS + 1)
        self._cuts = np.concatenate([-outer[::-1], outer])
        self._middle = _CELLS  # the cell between -threshold and threshold
        self._anew = threshold  # the blanket's mass that is drawn anew
        fresh_rate, at_0 = np.array([fresh]), np.zeros(1)
        self._fresh = self._masses(fresh_rate, at_0)[0]
        self._drawn = self._extremes(fresh_rate, at_0)
        self._blanket = self._pushed(np.diff(self._cuts)[None] / 2)[0]

    def _masses(self, eps_local: np.ndarray, x: np.ndarray) -> np.ndarray:
        """The cells' masses under Clip-Laplace at every x, one row each."""
        away = self._cuts - x[:, None]
        below = -np.sign(away) * np.expm1(-eps_local[:, None] / 2 * np.abs(away))
        return np.diff(below) / (below[:, -1:] - below[:, :1])

    def _extremes(self, eps_local: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest density of every cell under Clip-Laplace at x, against the uniform law."""
        rate, x = eps_local[:, None] / 2, x[:, None]
        peak = -2 * rate / (np.expm1(-rate * (1 - x)) + np.expm1(-rate * (1 + x)))
        left, right = self._cuts[:-1], self._cuts[1:]
        nearest = np.maximum(np.maximum(left - x, x - right), 0.0)
        furthest = np.maximum(np.abs(left - x), np.abs(right - x))
        return peak * np.exp(-rate * furthest), peak * np.exp(-rate * nearest)

    def _pushed(self, masses: np.ndarray) -> np.ndarray:
        """The cells' masses after small reports are drawn anew."""
        anew = masses[:, self._middle]
        pushed = masses + anew[:, None] * self._fresh
        pushed[:, self._middle] = anew * self._fresh[self._middle]
        return pushed

    def near(self, eps_local: np.ndarray, x: np.ndarray, slack: np.ndarray, at: np.ndarray) -> np.ndarray:
        """E[(r - t)_+] at every t, a row for all laws with a density within this log ratio of that of the report on x.

        r is the ratio to the blanket; it is rounded up by splitting the mass of cells.

        At a point beyond the threshold r = (R + a f)/(1 + c f), with R the report's density, f that of a draw anew, a
        and c the masses that are drawn anew. It is monotone in R and in f: its extremes are at the corners of theirs.
        """
        masses = self._masses(eps_local, x)
        anew = masses[:, self._middle, None]
        corners = [(r + anew * f) / (1 + self._anew * f) for r in self._extremes(eps_local, x) for f in self._drawn]
        low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
        low[:, self._middle] = high[:, self._middle] = anew[:, 0] / self._anew
        ratio, mass = frontier.split(self._blanket, self._pushed(masses), low, high)
        none = np.zeros((len(ratio), 1))
        above = np.hstack([np.cumsum(mass[:, ::-1], axis=1)[:, ::-1], none])
        first = np.hstack([np.cumsum((mass * ratio)[:, ::-1], axis=1)[:, ::-1], none])

        def excess(factor: np.ndarray) -> np.ndarray:
            t = at * factor[:, None]
            place = np.stack([np.searchsorted(*row) for row in zip(ratio, t, strict=True)])
            return np.take_along_axis(first, place, axis=1) - t * np.take_along_axis(above, place, axis=1)

        more, less = np.exp(slack)[:, None], np.exp(-slack)[:, None]
        return np.minimum(more * excess(less[:, 0]), 1 - less + less * excess(more[:, 0]))


@functools.lru_cache(maxsize=64)
def threshold_frontier(eps_local: float, fresh: float, threshold: float) -> Frontier:
    """F of S-APES's reports, of all budgets up to this one and all inputs.

    Boxes of budgets and inputs cover them. The logarithm of a density moves by at most 1 per unit of the budget, and by
    at most the budget per unit of x in [-1, 1] (mirrored, in [0, 1]). A box whose laws stay below what is known already
    adds nothing; any other is halved, until its laws are close, and then raises what is known.
    """
    _validate.positive(eps_local=eps_local, fresh=fresh)
    _validate.in_open_interval(0, 1, threshold=threshold)
    laws = _Thresholded(fresh, threshold)
    for close in _CLOSE:
        found = _covered(laws, eps_local, close * eps_local)
        if found is not None:
            return found
    return frontier.clip_laplace(eps_local)  # the map only takes away


def _covered(laws: _Thresholded, eps_local: float, close: float) -> Frontier | None:
    """The frontier of all boxes, halved until their laws are so close; None where that takes too many."""
    bottom, top = eps_local / math.expm1(eps_local), eps_local / -math.expm1(-eps_local)  # of all densities
    at = np.linspace(bottom * _DOWN, top / _DOWN, _LEVELS)
    known = laws.near(np.array([eps_local]), np.ones(1), np.array([close]), at)[0]
    boxes, looked_at = np.array([[0.0, eps_local, 0.0, 1.0]]), 0
    while len(boxes):
        now, boxes = boxes[-_AT_ONCE:], boxes[:-_AT_ONCE]
        looked_at += len(now)
        if looked_at > _MOST_BOXES:
            return None
        low, high, left, right = now.T
        budget, x = (low + high) / 2, (left + right) / 2
        slack = (high - low) / 2 + high * (right - left) / 2
        found = laws.near(budget, x, slack, at)
        leaf = slack <= close
        known = np.max([known, *found[leaf]], axis=0)
        open_ = ~leaf & ~(found <= known).all(axis=1)
        tall, wide = open_ & (high - low > high * (right - left)), open_ & (high - low <= high * (right - left))
        halves = [
            np.stack([low, budget, left, right], axis=1)[tall],
            np.stack([budget, high, left, right], axis=1)[tall],
            np.stack([low, high, left, x], axis=1)[wide],
            np.stack([low, high, x, right], axis=1)[wide],
        ]
        boxes = np.concatenate([boxes, *halves])
    known = np.maximum(known * (1 + 1e-12), np.maximum(1 - at, 0.0))
    known[0], known[-1] = 1 - at[0], 0.0
    return frontier.from_excess(at, known)
