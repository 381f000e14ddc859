"""Laplace and Clip-Laplace reports on a public grid, drawn exactly: what deployed clients of personal budgets report.

The grid has cells [k h, (k+1) h) with h = C / `steps`. A client rounds its clipped value at random and without bias to
an edge j h, in [-C, C] too, and reports the cell that holds the continuous report on that edge, noise of scale
2C / eps_local. All cells lie on one side of an edge, and d cells from it the mass is proportional to q^d, with
q = exp(-eps_local / (2 steps)): one table of d and a fair sign serve every input. A report that is

- *conditioned* on the grid (Clip-Laplace on [-C, C]) is drawn again while it is beyond; with S(m) = 1 + q + .. +
  q^(m-1) it is accepted with probability (S(a) + S(b)) / (2 S(a + b)) >= 1/2, for S is concave;
- *clamped* to the grid (Laplace) counts all of the tail in its outermost cell, which is post-processing.

Weights are integers: 2^288, then q times the one before, rounded down. With q from `decimal` to 130 digits, and rounded
down to Q 2^-288, each step is off by less than 2, so the d-th weight by at most 2d. n weights are off by n^2 at most,
and what lies beyond the last one that is not 0 is below 2n / (1 - q). The tail, the last weight over 1 - Q 2^-288, is
off by 2n / (1 - q) + 1 / (1 - q)^2 + 1 at most. That is against a total of at least 2^288, or of 2^288 / (1 - q) with a
tail, and 1 / (1 - q) <= 1 + 2 steps / eps_local. So the law is off by (n^2 + 2n + 3 + 2 steps / eps_local) 2^-288, the
table (`_tables`) adds 2n 2^-288, and conditioning on what has probability 1/2 at least multiplies by 4. Why every
certificate of the continuous reports holds: docs/proofs/grid-reports.md.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail.mechanisms._base import clamp_float64, convert_fields_to_float
from dovetail.mechanisms.exact import ExactSampler, round_at_random
from dovetail.mechanisms.exact_skellam import BITS, SignedTable

__all__ = ["MOST_REACH", "GridLaplace", "ReportGrid"]

_DIGITS = 130  # decimal ones of exponentials: with eps_local / (2 steps) >= 1e-15, differences have 115 left, 380 bits
_SMALLEST = 1e-9  # budget
_MOST_STEPS = 2**16
MOST_REACH = 2**19  # cells on one side of 0: a table of so many entries takes about a second


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportGrid:
    """Cells -reach .. reach - 1 of width clip_value / steps; the public map from continuous reports to integers.

    Guarantees:
        `round_to_edges` are integers in -steps .. steps, whatever the input, and unbiased for the clipped value (to
        2^-53). `values` of a sum of cells is the sum of the cells' midpoints.
    """

    clip_value: float
    steps: int
    reach: int

    def __post_init__(self) -> None:
        _validate.positive(clip_value=self.clip_value)
        _validate.integer(steps=self.steps, reach=self.reach)
        _validate.in_interval(1, _MOST_STEPS, steps=self.steps)
        _validate.in_interval(self.steps, MOST_REACH, reach=self.reach)
        convert_fields_to_float(self, "clip_value")

    @property
    def width(self) -> float:
        """h, the width of a cell."""
        return self.clip_value / self.steps

    def round_to_edges(self, x: npt.ArrayLike, *, sampler: ExactSampler) -> np.ndarray:
        """Each entry of x, clipped to [-C, C] and rounded at random to an edge of the grid; indices, int64."""
        position = clamp_float64(x, -self.clip_value, self.clip_value) / self.clip_value * self.steps
        return np.clip(round_at_random(position, sampler), -self.steps, self.steps)

    def sum_of_midpoints(self, total: Any, count: Any) -> Any:
        """The sum, in the units of the data, of the midpoints of `count` cells whose indices add up to `total`."""
        return (total + count / 2) * self.width


@dataclasses.dataclass(frozen=True)
class GridLaplace:
    """Reports on a grid at budget eps_local: Laplace noise of scale 2C / eps_local around an edge, told as a cell.

    Guarantees:
        Given an edge, a cell is within `distance` <= 2^-200 in total variation of the one that holds the continuous
        report on that edge; the budget is eps_local exactly.
        Conditioned on the grid it is Clip-Laplace's, and the grid must be the box of the inputs.
        Clamped to it, the mean of the midpoints is the edge but for less than scale * exp(-(reach - steps) h / scale).

    References:
        Liu et al. (AAAI 2023), Def. 4, for Clip-Laplace.
    """

    eps_local: float
    grid: ReportGrid
    conditioned: bool = False

    def __post_init__(self) -> None:
        _validate.at_least(_SMALLEST, eps_local=self.eps_local)
        _validate.finite(eps_local=self.eps_local)
        convert_fields_to_float(self, "eps_local")
        if self.conditioned != (self.grid.reach == self.grid.steps):
            raise ValueError(f"expected the box of the inputs for conditioned reports alone, got {self.grid}")

    @property
    def distance(self) -> float:
        """Total variation between one report and a cell of the continuous one, at most."""
        size = self.grid.steps + self.grid.reach
        error = size**2 + 4 * size + 3 + 2 * self.grid.steps / self.eps_local
        return math.ldexp(error * (1 + 2.0**-50), -BITS) * (4 if self.conditioned else 1)

    def __call__(self, edges: np.ndarray, *, sampler: ExactSampler) -> np.ndarray:
        """A cell for every edge, as int64 in -reach .. reach - 1."""
        grid = self.grid
        table = _offset_table(self.eps_local, self.grid, self.conditioned)
        if not self.conditioned:
            return np.clip(edges + _draw_offsets(table, edges.size, sampler), -grid.reach, grid.reach - 1)
        cells = edges + _draw_offsets(table, edges.size, sampler)
        while (beyond := np.flatnonzero((cells < -grid.reach) | (cells >= grid.reach))).size:
            cells[beyond] = edges[beyond] + _draw_offsets(table, beyond.size, sampler)
        return cells

    def log_mass(self, cell: npt.ArrayLike, edge: npt.ArrayLike) -> np.ndarray:
        """The log probability of a cell given an edge, in float64; -inf beyond the grid."""
        cell = np.asarray(cell)
        edge = np.asarray(edge)
        reach = self.grid.reach
        rate = self.eps_local / (2 * self.grid.steps)
        distance = np.where(cell >= edge, cell - edge, edge - 1 - cell)
        log_mass = -distance * rate + math.log(-math.expm1(-rate) / 2)
        if self.conditioned:
            log_mass = log_mass - np.log(-(np.expm1(-rate * (reach - edge)) + np.expm1(-rate * (reach + edge))) / 2)
        else:
            log_mass = np.where((cell == -reach) | (cell == reach - 1), -distance * rate - math.log(2), log_mass)
        return np.where((cell >= -reach) & (cell < reach), log_mass, -np.inf)

    def reaches_size(
        self, size: Fraction, cells: np.ndarray, edges: np.ndarray, *, sampler: ExactSampler
    ) -> np.ndarray:
        """Whether the continuous report behind each cell is at least `size` cell widths away from 0.

        Most cells tell. Within one that holds size or -size the density is exponential and falls away from the edge:
        the answer is an exact coin, whose probability is rounded down to a multiple of 2^-288.

        Arguments:
            size: in cell widths, >= 0.
            cells: what `__call__` gave.
            edges: what it was given.
        """
        whole, part = divmod(size, 1)
        magnitudes = np.where(cells >= 0, cells, -1 - cells)
        reached = magnitudes >= whole + (part > 0)
        if part:
            falling = (cells >= edges) == (cells >= 0)  # whether the density falls away from 0 within the cell
            for outward in (True, False):
                open_cells = np.flatnonzero((magnitudes == whole) & (falling == outward))
                prob = _prob_beyond_in_cell(self.eps_local, self.grid.steps, part, outward)
                reached[open_cells] = sampler.bernoullis(prob, open_cells.size)
        return reached


def _draw_offsets(table: SignedTable, size: int, sampler: ExactSampler) -> np.ndarray:
    """The cell less the edge, for `size` draws: d to the right of the edge, -1 - d to the left."""
    magnitude, sign = table.draw(size, sampler=sampler)
    magnitude ^= sign
    return magnitude


@functools.lru_cache(maxsize=64)
def _offset_table(eps_local: float, grid: ReportGrid, conditioned: bool) -> SignedTable:
    """The law of how many cells lie between edge and report; clamped reports have all of the tail in the last entry.

    Cached: do not write to it. Weights are rounded down; how far that moves the law is in the module's text.
    """
    # cells on one side of an edge, at most
    unit = 1 << BITS
    most = grid.steps + grid.reach
    ratio = math.floor(Fraction(_decay_over_cells(eps_local, grid.steps, Fraction(1))) * unit)
    weights: list[int] = []
    weight = unit
    while weight and len(weights) < most - 1:
        weights.append(weight)
        weight = weight * ratio >> BITS
    weights.append(weight if conditioned else (weight << BITS) // (unit - ratio))
    return SignedTable.of(weights)


@functools.lru_cache(maxsize=256)
def _prob_beyond_in_cell(eps_local: float, steps: int, part: Fraction, outward: bool) -> Fraction:
    """P(y >= part) for y in [0, 1] within a cell, with density falling (or, not outward, rising) in y; rounded down."""
    with decimal.localcontext(prec=_DIGITS):
        whole = _decay_over_cells(eps_local, steps, Fraction(1))
        near = _decay_over_cells(eps_local, steps, part if outward else 1 - part)
        prob = (near - whole if outward else 1 - near) / (1 - whole)
    return Fraction(math.floor(Fraction(prob) * 2**BITS), 2**BITS)


def _decay_over_cells(eps_local: float, steps: int, cells: Fraction) -> Decimal:
    """exp(-eps_local cells / (2 steps)), rounded down in its last digit."""
    exponent = -Fraction(eps_local) * cells / (2 * steps)
    with decimal.localcontext(prec=_DIGITS) as context:
        return context.next_minus((Decimal(exponent.numerator) / Decimal(exponent.denominator)).exp())
