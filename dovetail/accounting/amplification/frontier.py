"""How well a report singles out its sender against a blanket: the frontier F of a randomizer.

F(l) is the largest probability that any input gives to a set of blanket mass l, made concave. For a victim that hides
among draws from the blanket only F matters (docs/proofs/blankets.md): whatever its two inputs, ``L = (a - alpha b)/w``
is below ``F'(u) - alpha F'(1 - u)``, u uniform, in convex order. Here F is a polygon from (0, 0) to (1, 1), that is, a
law of slopes: finitely many ratios to the blanket and the blanket's mass at each of them. Where F is curved the polygon
runs above it; larger frontiers are safe.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from dovetail import _validate
from dovetail.accounting import numerics

__all__ = ["Frontier", "clip_laplace", "from_cells", "from_excess", "move_cells_to_ends", "randomized_response"]

_ROUNDINGS = 1e-13  # more than the relative error of a slope
_TANGENTS = 128  # to a curved frontier, for small budgets


@dataclasses.dataclass(frozen=True, eq=False)
class Frontier:
    """The polygon F by its slopes, which fall, and the blanket's mass at each: the length of u that it holds for.

    Masses sum to 1, and so does the sum of mass times slope, to 1e-9. The arrays are shared: do not write to them.
    """

    slopes: np.ndarray
    masses: np.ndarray

    def __post_init__(self) -> None:
        _validate.finite_array(slopes=self.slopes, masses=self.masses)
        if (self.masses < 0).any() or (np.diff(self.slopes) > 0).any() or (self.slopes < 0).any():
            lowest = self.slopes.min(initial=0.0)
            least = self.masses.min(initial=0.0)
            raise ValueError(
                f"expected falling slopes and masses, none negative, got a least slope of {lowest} and mass of {least}"
            )
        whole, mean = float(self.masses.sum()), float(self.masses @ self.slopes)
        if abs(whole - 1) > 1e-9 or abs(mean - 1) > 1e-9:
            raise ValueError(f"expected masses that sum to 1 and a mean slope of 1, got {whole} and {mean}")

    @functools.cached_property
    def _slope_pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """F'(u) rounded up, F'(1 - u) rounded down, and the lengths of u for which they hold."""
        ends = np.append(np.cumsum(self.masses)[:-1], 1.0)
        cuts = np.unique(np.concatenate([[0.0], ends, 1 - ends]))
        middle = (cuts[:-1] + cuts[1:]) / 2
        last = len(ends) - 1
        here = self.slopes[np.minimum(np.searchsorted(ends, middle, side="right"), last)]
        mirrored = self.slopes[np.minimum(np.searchsorted(ends, 1 - middle, side="right"), last)]
        off = _ROUNDINGS + 4 * abs(float(self.masses @ self.slopes) - 1) + 4 * abs(float(self.masses.sum()) - 1)
        return here * (1 + off), mirrored * (1 - off), np.diff(cuts)

    def law_of_l(self, exp_eps: float) -> tuple[np.ndarray, np.ndarray]:
        """Values of F'(u) - alpha F'(1 - u), rounded up, and their probabilities: the worst L at alpha = e^eps."""
        here, mirrored, lengths = self._slope_pairs
        return here - exp_eps * mirrored, lengths

    def delta_without_crowd(self, exp_eps: float) -> float:
        """delta at alpha = e^eps where nobody hides the victim, rounded up: E[(F'(u) - alpha F'(1 - u))_+]."""
        values, lengths = self.law_of_l(exp_eps)
        return float(np.maximum(values, 0.0) @ lengths) * (1 + _ROUNDINGS)

    @property
    def spread(self) -> float:
        """The standard deviation of F'(u) - F'(1 - u): to choose by, never for a bound."""
        values, lengths = self.law_of_l(1.0)
        return math.sqrt(float(values**2 @ lengths))


def randomized_response(eps_local: float, mass: float, *, slack: float = 0.0) -> Frontier:
    """The frontier of reports for which a set of this mass is e^eps_local times as likely as all else.

    The set is a level, or a cap of the sphere; the blanket is the uniform law. `slack` is the relative error of the
    mass: both slopes move outward by it, and the corner to where they meet.

    Arguments:
        eps_local: of the report.
        mass: the part of all outcomes that an input makes likely, in (0, 1).
        slack: relative error of the mass.
    """
    _validate.positive(eps_local=eps_local)
    _validate.in_open_interval(0, 1, mass=mass)
    small = math.exp(-eps_local)
    likely = 1 / (mass + (1 - mass) * small)
    top, bottom = likely * (1 + slack), likely * small * (1 - slack)
    corner = (1 - bottom) / (top - bottom) if slack else mass
    return Frontier(np.array([top, bottom]), np.array([corner, 1 - corner]))


def clip_laplace(eps_local: float) -> Frontier:
    """F(l) = (1 - e^(-eps l))/(1 - e^-eps): Clip-Laplace at an end of its box, against the uniform law on the box.

    F is cut into equal cells with a tangent at every cut: a cell's mass goes to its two end slopes.
    """
    _validate.positive(eps_local=eps_local)
    cells = _TANGENTS + math.ceil(16 * eps_local)
    width = eps_local / cells
    left = 0.5 - width / 12 + width**3 / 720 if width < 1e-2 else 1 / width - 1 / math.expm1(width)
    slopes = eps_local / -math.expm1(-eps_local) * np.exp(-width * np.arange(cells + 1))
    masses = np.append(np.full(cells, left), 0.0) + np.append(0.0, np.full(cells, 1 - left))
    return Frontier(slopes, masses / cells)


def from_cells(blanket: np.ndarray, report: np.ndarray, lowest: np.ndarray, highest: np.ndarray) -> Frontier:
    """The frontier of one law that is known cell by cell, against a blanket of these masses.

    In a cell the ratio of report to blanket stays between `lowest` and `highest`: the cell's mass goes to these two, so
    that the probability of the report is kept.

    Arguments:
        blanket: the blanket's mass of every cell.
        report: the report's mass of every cell.
        lowest: the least ratio of report to blanket in a cell.
        highest: the largest ratio in a cell.
    """
    ratios, masses = move_cells_to_ends(blanket, report, lowest, highest)
    return Frontier(ratios[::-1], masses[::-1])


def move_cells_to_ends(
    blanket: np.ndarray, report: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A law that is known cell by cell, as in `from_cells`; of several laws, row by row.

    Returns: the ratios to the blanket, rising along the last axis, and the blanket's mass at each: twice as many as
        cells.
    """
    upper = (report / blanket - lowest) / np.maximum(highest - lowest, 1e-300)
    upper = np.clip(upper, 0.0, 1.0) * blanket
    ratios, masses = np.concatenate([highest, lowest], axis=-1), np.concatenate([upper, blanket - upper], axis=-1)
    order = np.argsort(ratios, axis=-1)
    return np.take_along_axis(ratios, order, axis=-1), np.take_along_axis(masses, order, axis=-1)


def from_excess(thresholds: np.ndarray, excess: np.ndarray) -> Frontier:
    """The frontier of all laws of ratios r to the blanket with E[(r - t)_+] at most these numbers, at rising t.

    Between the points that holds for their lower convex hull, for the excess of any law is convex. The first t is at
    most the least ratio, where the excess is 1 - t, and the last at least the largest, where it is 0.

    Arguments:
        thresholds: thresholds t, rising.
        excess: an upper bound on E[(r - t)_+] at each of them.
    """
    ends = numerics.lower_hull(thresholds, excess)
    rises = np.concatenate([[-1.0], np.diff(ends[:, 1]) / np.diff(ends[:, 0]), [0.0]])
    return Frontier(ends[::-1, 0], np.maximum(np.diff(rises), 0.0)[::-1])
