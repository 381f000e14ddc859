"""S-APES: APES with sparsified reports (Liu, Zhao, Xiong, Liu, Chen, AAAI 2023, Alg. 2).

A client perturbs all coordinates, keeps some of its reports, and puts a fresh draw around 0 in the place of the others.

- ``sparsify = "threshold"`` (the default, a repair): reports of at least a public size are kept, a share `keep` of
  them where there is no signal. Every report is treated alike and on its own, and replaced by a draw at the smallest
  budget: the analyzer could do that after the shuffle, so what is certified for APES holds, and less is revealed.
- ``sparsify = "top"`` (``published = true``): the b = keep * d largest of each client. Whether a report is kept depends
  on all other coordinates of its sender, so a shuffled coordinate is not what APES shows of it, and nothing is
  certified (see `_COUPLED`).
- ``sparsify = "random"`` (Fig. 3b): b coordinates that do not depend on the data; APES on inputs that are 0 elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np

from dovetail import _validate, claims
from dovetail._imports import LateModule
from dovetail._jax import jax, jnp
from dovetail.events import Mechanism, NonPrivate
from dovetail.mechanisms import ExactSampler
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Formula
from dovetail.protocols._shared_sums import GridReports
from dovetail.protocols.flame._select import top_mask
from dovetail.protocols.personal.apes import Apes, midpoints
from dovetail.statements import NotApplicable

__all__ = ["SApes"]

_stats = LateModule("scipy.stats")  # whose import takes half a second

_COUPLED = (
    "not certified: which of a client's reports are largest depends on all coordinates, so a shuffled coordinate "
    "reveals something about the others too (eps_local .05, d = 16 million, n = 40,000, keep .7, delta 1e-5: a count "
    "of reports shows eps 7, and APES is certified 2.4)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SApes(Apes):
    """Personal Clip-Laplace, sparsified, shuffled.

    The estimate is APES's, as in the paper, although part of the reports is replaced by draws around 0: it is pulled
    towards 0 beyond the bias of APES. At small budgets 1 - (1 - keep)^2 of small values and 1 - (1 - keep)^3 of those
    at the ends of the box are left, and the share `keep` of both by a random selection.

    Guarantees:
        With keep = 1 reports have the law of APES's.
        A report that is not kept does not depend on the data but for not being kept.

    References:
        Liu et al. (AAAI 2023), Alg. 2 and Prop. 1, with scale 2C / eps_i as in Alg. 1.
    """

    name: ClassVar[str] = "s_apes"
    formula: ClassVar[Formula] = staticmethod(claims.apes.s_apes)

    keep: float = 0.2
    """Share of reports that are kept."""
    sparsify: Literal["threshold", "top", "random"] | None = None
    """`threshold` (certified like APES), `top` (as published) or `random`."""
    published: bool = False
    """Run the protocol as its paper prints it; the statement says what is then guaranteed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsify is None:
            object.__setattr__(self, "sparsify", "top" if self.published else "threshold")
        _validate.positive(keep=self.keep)
        _validate.at_most(1, keep=self.keep)
        _validate.one_of(("threshold", "top", "random"), sparsify=self.sparsify)
        _validate.one_of(("clip_laplace",), randomizer=self.randomizer)

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: a fifth of the coordinates is kept, or all where there are few."""
        return {**super().example(dim, settings), "keep": 0.2 if dim >= 5 else 1.0}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: both ways to keep reports that depend on them, and a random choice."""
        ways: list[dict[str, Any]] = [{}, {"published": True}, {"sparsify": "random"}]
        return [{"budgets": [2.0, 8.0], "keep": 0.5, **way} for way in ways]

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with every user's own budget; refuses to keep less than one coordinate."""
        if self.num_kept(dim) < 1:
            raise ValueError(f"expected keep * {dim} >= 1 coordinates, got keep={self.keep}")
        return super().settle(cohort, dim)

    def num_kept(self, dim: int) -> int:
        """The number b of coordinates that are kept (about as many, by a threshold)."""
        return round(self.keep * dim)

    @property
    def threshold(self) -> float:
        """The size that a share `keep` of reports around 0 reaches at the smallest budget."""
        rate = float(self.eps_locals.min()) / (2 * self.clip_value)
        return -math.log1p((1 - self.keep) * math.expm1(-rate * self.output_bound)) / rate

    def perturb(self, x: jax.Array, budget: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: a report on every coordinate, of which some are kept and the others are drawn anew around 0."""
        key_report, key_fresh, key_choice = jax.random.split(key, 3)
        report = super().perturb(x, budget, key=key_report)
        fresh_budget = budget
        match self.sparsify:
            case "threshold":
                is_kept = jnp.abs(report) >= self.threshold
                fresh_budget = jnp.asarray(self.eps_locals.min(), budget.dtype)
            case "top":
                is_kept = top_mask(report, self.num_kept(len(x)))
            case _:
                is_kept = top_mask(jax.random.uniform(key_choice, x.shape), self.num_kept(len(x)))
        return jnp.where(is_kept, report, super().perturb(jnp.zeros_like(x), fresh_budget, key=key_fresh))

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray | None:
        """None: a report is kept or drawn anew by what it was."""
        return None

    def _second_moments(self, dim: int) -> np.ndarray:
        """E[y^2] of each user's report y on a coordinate that is 0, after sparsifying, (users,)."""
        budgets = self.eps_locals
        sizes = self._quantiles_of_size(budgets)
        fresh = np.mean(sizes**2, axis=1)
        match self.sparsify:
            case "threshold":
                kept = sizes >= self.threshold
                fresh = fresh[np.argmin(budgets)]
            case "top":  # a report is kept if fewer than b of the others are larger
                kept = np.broadcast_to(
                    _stats.binom.cdf(self.num_kept(dim) - 1, dim - 1, 1 - midpoints(sizes.shape[1])), sizes.shape
                )
            case _:
                kept = np.full(sizes.shape, self.num_kept(dim) / dim)
        return np.mean(sizes**2 * kept, axis=1) + (1 - kept.mean(axis=1)) * fresh

    def contribution(self, cohort: Cohort, dim: int) -> GridReports:
        """Reports on a grid, sparsified; refuses the selection that couples coordinates."""
        whole = super().contribution(cohort, dim)
        if self.sparsify == "threshold":
            size = Fraction(self.threshold / self.output_bound) * whole.grid.steps  # the event's threshold, in cells
            return _Thresholded(**vars(whole), threshold=size)
        if self.num_kept(dim) == dim:
            return whole
        if self.sparsify == "top":
            raise NotApplicable(f"expected a selection of which something is certified, got sparsify='top': {_COUPLED}")
        return _RandomCoordinates(**vars(whole), kept=self.num_kept(dim))

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """APES's event, seen through the threshold where there is one; nothing where coordinates are coupled."""
        if self.sparsify == "top" and self.num_kept(dim) < dim:
            return NonPrivate(reason=_COUPLED)
        event = super().mechanism(cohort, dim)
        if self.sparsify != "threshold" or self.output_bound > self.clip_value:
            return event
        return dataclasses.replace(event, threshold=self.settle(cohort, dim).threshold / self.output_bound)

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]] | None:
        """The event that the paper's claim speaks of, with b, the number of reports that are kept."""
        about = super().published_event(cohort, dim)
        return about and (about[0], {"kept": self.num_kept(dim)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Thresholded(GridReports):
    """Continuous reports below `threshold` cell widths are replaced by draws around 0 at the smallest budget.

    Only then are they reported as cells.
    """

    threshold: Fraction

    @property
    def total_variation(self) -> float:
        """The distance of a whole report's law: a report, a draw around 0 and a coin for every coordinate."""
        return 2 * super().total_variation + math.ldexp(self.dim, -256)

    def draw_cells(self, x: np.ndarray, budget: float, *, sampler: ExactSampler) -> np.ndarray:
        """A cell for every coordinate: those of reports that are kept, and fresh ones."""
        edges = self.grid.round_to_edges(x, sampler=sampler)
        law = self.law(budget)
        cells = law(edges, sampler=sampler)
        replaced = np.flatnonzero(~law.reaches_size(self.threshold, cells, edges, sampler=sampler))
        cells[replaced] = self.law(self.budgets[0])(np.zeros(replaced.size, np.int64), sampler=sampler)
        return cells


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RandomCoordinates(GridReports):
    """Reports on `kept` coordinates that do not depend on the data, and on 0 in the others."""

    kept: int

    def draw_cells(self, x: np.ndarray, budget: float, *, sampler: ExactSampler) -> np.ndarray:
        """A cell for every coordinate of x, after all but `kept` coordinates, chosen at random, are set to 0."""
        kept = np.argpartition(sampler.integers(2**63 - 1, self.dim), self.kept)[: self.kept]
        sparse = np.zeros_like(x)
        sparse[kept] = x[kept]
        return super().draw_cells(sparse, budget, sampler=sampler)
