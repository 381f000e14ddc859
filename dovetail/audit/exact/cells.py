"""Reports of a local randomizer in finitely many cells, with the exact probability of every cell.

Randomized response has its levels. Real-valued reports are cut into intervals, which the adversary may do to what it
sees. Inputs and reports are positions: 0 is the low end of the interval of inputs, 1 the high end; what lies beyond is
beyond. `scores` turns cells into integers to be added up over messages: where all others hold the same input, the
likelihood ratio of a shuffled slot is mean f_0/g over mean f_1/g, with g the density of the others' reports, and for
many messages its logarithm is linear in the sum of (f_1 - f_0)/g.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np

from dovetail import _validate
from dovetail.audit.exact.sums import ULP
from dovetail.events import Report
from dovetail.statements import NotApplicable

__all__ = ["Cells", "clipped", "error_of", "of_report", "partition", "scored", "scores", "whole_steps"]

_CUTS = 64  # between the two ends; the law of a finer partition hardly differs
_TAILS = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.4, 2.0, 2.8, 4.0, 6.0])  # beyond an end, in scales

Kind = Literal["clip_laplace", "laplace", "rr"]
_LARGEST_BUDGET: dict[Kind, float] = {"rr": 15.0, "laplace": 25.0, "clip_laplace": 25.0}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cells:
    """A family of randomizers on the same cells: levels of randomized response, or intervals between `cuts`.

    `reach` is how far beyond both ends Clip-Laplace reports lie at most.

    Guarantees:
        Masses are those of the randomizer's own density, to about the precision of the dtype; they add up to 1.
    """

    kind: Kind
    levels: int = 2
    cuts: np.ndarray | None = None
    reach: float = 0.0

    def masses(self, eps_local: float | np.ndarray, position: float) -> np.ndarray:
        """The probability of every cell, along a last axis, for an input at this position."""
        _validate.in_interval(0, 1, position=position)
        budget = np.asarray(eps_local, np.longdouble)[..., None]
        most = _LARGEST_BUDGET[self.kind]
        if np.max(budget) > most:
            raise NotApplicable(
                f"exact laws are kept to budgets of at most {most}, where lies are not yet rounded away"
            )
        if self.kind == "rr":
            return self._levels(budget, position)
        if self.cuts is None:
            raise ValueError(f"expected cuts for kind={self.kind!r}, got none")
        below = _signed_mass((self.cuts.astype(np.longdouble) - np.longdouble(position)) * budget)
        bottom = np.full_like(budget, -0.5)
        top = -bottom
        if self.kind == "clip_laplace":
            bottom = _signed_mass((-np.longdouble(self.reach) - position) * budget)
            top = _signed_mass((1 + np.longdouble(self.reach) - position) * budget)
        whole = top - bottom
        below = np.clip(below, bottom, top)
        return np.diff(np.concatenate([bottom, below, top], axis=-1), axis=-1) / whole

    def ends(self, eps_local: float) -> tuple[np.ndarray, np.ndarray]:
        """The masses for an input at the high end, and for one at the low end."""
        return self.masses(eps_local, 1.0), self.masses(eps_local, 0.0)

    def _levels(self, budget: np.ndarray, position: float) -> np.ndarray:
        lie = np.exp(-budget)
        spread = np.longdouble(position) * (self.levels - 1)
        chance = np.maximum(0, 1 - np.abs(np.arange(self.levels) - spread))
        return (lie - np.expm1(-budget) * chance) / (1 + (self.levels - 1) * lie)


def _signed_mass(t: np.ndarray) -> np.ndarray:
    """The mass of Laplace noise of scale 1 between 0 and t, negative where t is."""
    return -np.sign(t) * np.expm1(-np.abs(t)) / 2


@functools.lru_cache(maxsize=64)
def _partition(kind: Kind, levels: int, narrowest: float, widest: float) -> Cells:
    if kind == "rr":
        return Cells(kind=kind, levels=levels)
    if kind == "clip_laplace":
        return clipped(0.0)
    inner = np.linspace(0.0, 1.0, _CUTS + 1)
    if narrowest == widest:  # beyond the ends all ratios are constant
        return Cells(kind=kind, cuts=inner)
    beyond = np.unique(np.concatenate([_TAILS / narrowest, _TAILS / widest]))
    return Cells(kind=kind, cuts=np.concatenate([-beyond[::-1], inner, 1 + beyond]))


def partition(kind: Kind, *, levels: int = 2, narrowest: float = 1.0, widest: float = 1.0) -> Cells:
    """Cells for budgets between these two."""
    return _partition(kind, levels, narrowest, widest)


def clipped(reach: float) -> Cells:
    """Cells for Clip-Laplace reports that lie at most so far beyond both ends."""
    return Cells(kind="clip_laplace", cuts=np.linspace(-reach, 1 + reach, _CUTS + 1)[1:-1], reach=reach)


def of_report(report: Report) -> Cells:
    """The cells of a report whose randomizer is known."""
    if report.kind == "generic" or report.kind == "cap":
        raise ValueError(f"expected a randomizer with cells, got kind={report.kind!r}")
    return partition(report.kind, levels=report.levels)


def error_of(masses: np.ndarray) -> float:
    """More than the rounding errors of all these masses together."""
    return (4 * len(masses) + 16) * ULP


def scores(
    first: np.ndarray, second: np.ndarray, others: np.ndarray, *, messages: float, finest: float = 256.0
) -> np.ndarray:
    """An integer for every cell, from 0 on: (first - second) / others in steps that resolve a sum of so many.

    There are at most `finest` steps to a standard deviation, and fewer for more messages.
    """
    ratio = np.asarray((first - second) / others, np.float64)
    return whole_steps(ratio, others, messages=messages, finest=finest)


def whole_steps(ratio: np.ndarray, others: np.ndarray, *, messages: float, finest: float = 256.0) -> np.ndarray:
    """Scores as integers from 0 on, in steps that resolve the sum of so many messages of this law."""
    law = np.asarray(others, np.float64)
    std = math.sqrt(float(law @ ratio**2) - float(law @ ratio) ** 2)
    steps = min(finest, max(4.0, 2**11 / math.sqrt(messages)))
    steps = min(steps, 2**15 * std / float(np.ptp(ratio)))
    whole = np.rint(ratio / std * steps).astype(np.int64)
    whole -= whole.min()
    return whole // max(1, int(np.gcd.reduce(whole)))


def scored(masses: np.ndarray, points: np.ndarray) -> np.ndarray:
    """The law of the score of one message: the probabilities of 0, 1, 2, ..."""
    law = np.zeros(int(points.max()) + 1, np.longdouble)
    np.add.at(law, points, masses)
    return law
