"""Reports as sums: what a client adds where aggregators take the place of a shuffler, or of a server.

*Levels.* A slot's reports are added up, and the sum of all clients' levels is a function of what a shuffle shows: for
bits, all that it shows. So a certificate about shuffled levels is one about this sum, for the same crowd. No slot is
padded: nobody sees how many reports one would lack.

*Cells.* Reports with Laplace or Clip-Laplace noise are cells of a public grid, which is fine against the noise of
whoever has the largest budget. Rounding to an edge adds h^2 / 4 to the variance of a report at most, and telling the
cell alone about h^2 / 12; h is C / (4 eps_local) at most, so both together add less than 1 % for every budget up to
1024. Laplace reports are clamped where a report at the smallest budget is with probability 1e-12.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import numpy as np

from dovetail._jax import jnp
from dovetail.mechanisms import ExactSampler, GridLaplace, ReportGrid
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.mechanisms.grid_laplace import MOST_REACH
from dovetail.protocols._base import Cohort
from dovetail.protocols._contributions import Contribution, proof_assumptions
from dovetail.protocols._messages import Levels, Messages, from_bytes
from dovetail.shufflers import SlotSums
from dovetail.statements import NotApplicable
from dovetail.vdaf.levels import LevelProofs

__all__ = ["GridReports", "LevelSums", "ProvenLevelSums", "level_sums"]

_WORD = 32
_CONDITIONED_STEPS = 64
_MOST_STEPS = 4096
_CLAMPED = 1e-12  # the probability that a report is clamped, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelSums(Contribution):
    """One level for every slot, drawn as `Levels` draws its messages, modulo the least power of two that holds all.

    Guarantees:
        The sum over `most` users does not wrap around.
        The sum over a cohort has the law of the sum of its messages, slot by slot.
    """

    levels: Levels
    most: int

    @property
    def length(self) -> int:
        """How many integers a client adds: one per slot."""
        return self.levels.slots

    @property
    def bits(self) -> int:
        """The fewest bits that hold `most` times the highest level, so that the sum does not wrap around."""
        return (self.most * (self.levels.response.levels - 1)).bit_length()

    @property
    def total_variation(self) -> float:
        """The distance of one client's levels from the accounted law: that of its messages."""
        return self.levels.total_variation

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: the level of every slot, uint32 (slots,)."""
        slot, body = self.levels.randomize(x, sampler=sampler)
        levels = np.zeros(self.length, np.uint32)
        levels[slot] = from_bytes(body)
        return levels

    def tally(self, total: np.ndarray, users: int) -> SlotSums:
        """Analyzer: the sums of levels, and that every user has one report in every slot."""
        messages = np.full(self.length, users, np.int32)
        return SlotSums(jnp.asarray(total.astype(np.int32)), jnp.asarray(messages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvenLevelSums(LevelSums):
    """`LevelSums` with a proof that every level is one: from 0 to the highest that the response has."""

    aggregators: int

    @property
    def proof(self) -> LevelProofs:
        """The proof that every level is in range."""
        return LevelProofs.shipped_variant(
            size=self.length, largest=self.levels.response.levels - 1, shares=self.aggregators
        )

    @property
    def total_variation(self) -> float:
        """The distance of the messages' law, and the zero-knowledge error of the proof, added up."""
        return super().total_variation + self.proof.zero_knowledge_error

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What privacy and robustness of the verified sums rest on."""
        return (*super().assumptions, *proof_assumptions(self.proof, "a report out of range"))

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: the level of every slot, as the signed integers (int64) that are proven about."""
        return super().draw(x, sampler=sampler, budget=budget).astype(np.int64)


def level_sums(messages: Messages, cohort: Cohort, *, verified: bool = False) -> LevelSums:
    """How clients add up these messages; refuses those that do not fill every slot, which would show which are filled.

    Arguments:
        messages: what clients would send to a shuffler; levels, one for each slot.
        cohort: what is public about the round; with its aggregators if sums are verified.
        verified: whether each client proves that its levels are in range.
    """
    if not isinstance(messages, Levels) or messages.per_client != messages.slots:
        raise NotApplicable(
            f"expected one level for each of the {messages.slots} slots to share as sums, got {messages.per_client}"
        )
    sums = LevelSums(levels=messages, most=cohort.max_uploads)
    if sums.bits > 32:
        raise NotApplicable(f"expected sums of at most 32 bits, got {sums.bits} for {cohort.max_uploads} users")
    if not verified:
        return sums
    if cohort.aggregators is None:
        raise NotApplicable("expected aggregators for verified sums, got none")
    return ProvenLevelSums(levels=messages, most=cohort.max_uploads, aggregators=cohort.aggregators)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridReports(Contribution):
    """One cell per coordinate, counted from the lowest; `users` is how many cells add up without wrapping, at most.

    `budgets` are the smallest and the largest that a user of the cohort has.

    Guarantees:
        Every cell is, up to `total_variation`, the one that holds the continuous report on an input in [-C, C].
        A budget that no user of the cohort has to spend is refused.
    """

    grid: ReportGrid
    dim: int
    users: int
    budgets: tuple[float, float]
    conditioned: bool

    @classmethod
    def for_budgets(
        cls, *, clip_value: float, budgets: tuple[float, float], conditioned: bool, dim: int, users: int, **more: Any
    ) -> Self:
        """Reports on the grid that suits budgets from the smallest to the largest; refuses grids that are too large.

        Arguments:
            clip_value: C, the bound of a coordinate.
            budgets: the smallest and the largest of the cohort.
            conditioned: whether reports stay in the box (Clip-Laplace); else they are clamped far outside it (Laplace).
            dim: coordinates of an update.
            users: users whose cells are added up, at most.
            more: further fields of a subclass.
        """
        least, largest = budgets
        steps = 1 << max(0, math.ceil(math.log2(4 * largest)))
        steps = min(max(steps, _CONDITIONED_STEPS if conditioned else 1), _MOST_STEPS)
        beyond = 0 if conditioned else math.ceil(-math.log(_CLAMPED) * 2 * steps / least)
        reach = steps + beyond
        if reach > MOST_REACH or (users * (2 * reach - 1)).bit_length() > _WORD:
            raise NotApplicable(
                f"expected at most {2 * MOST_REACH} cells whose sum fits {_WORD} bits, got {2 * reach} cells for the "
                f"Laplace noise of {users} users with budgets from {least:.3g} to {largest:.3g}"
            )
        grid = ReportGrid(clip_value=clip_value, steps=steps, reach=reach)
        return cls(grid=grid, dim=dim, users=users, budgets=budgets, conditioned=conditioned, **more)

    @property
    def length(self) -> int:
        """How many integers a client adds: one cell per coordinate."""
        return self.dim

    @property
    def bits(self) -> int:
        """The fewest bits that hold the sum of everybody's highest cells."""
        return (self.users * (2 * self.grid.reach - 1)).bit_length()

    @property
    def total_variation(self) -> float:
        """The distance, at most, of a client's whole report from the law that is accounted, in total variation.

        It counts all coordinates at the smallest budget, where a report's is largest.
        """
        return self.dim * self.law(self.budgets[0]).distance

    def law(self, budget: float) -> GridLaplace:
        """The law of one coordinate's report at this budget."""
        return GridLaplace(budget, self.grid, self.conditioned)

    def draw_cells(self, x: np.ndarray, budget: float, *, sampler: ExactSampler) -> np.ndarray:
        """A cell for every coordinate of x, int64 in -reach .. reach - 1."""
        return self.law(budget)(self.grid.round_to_edges(x, sampler=sampler), sampler=sampler)

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: its cells, at its own budget; an update whose squared norm is not finite counts as zero."""
        if np.shape(x) != (self.dim,):
            raise ValueError(f"expected an update of shape ({self.dim},), got shape={np.shape(x)}")
        least, largest = self.budgets
        if budget is None or not least <= budget <= largest:
            raise ValueError(f"expected the client's own budget, from {least} to {largest}, got budget={budget!r}")
        cells = self.draw_cells(finite_or_zero(np.asarray(x)), float(budget), sampler=sampler)
        return (cells + self.grid.reach).astype(np.uint32)

    def sum_of_reports(self, total: np.ndarray, users: int) -> np.ndarray:
        """The sum of the reports as numbers, from the sum of so many users' cells."""
        return self.grid.sum_of_midpoints(total.astype(np.int64) - users * self.grid.reach, users)

    def tally(self, total: np.ndarray, users: int) -> Any:
        """Analyzer: sum and number of the reports on every coordinate."""
        reports = jnp.asarray(self.sum_of_reports(total, users), jnp.float32)
        return SlotSums(reports, jnp.full(reports.shape, users, jnp.int32))
