"""APES: personal budgets in the shuffle model (Liu, Zhao, Xiong, Liu, Chen, AAAI 2023, "Echo of Neighbors").

Every client perturbs every coordinate by Clip-Laplace with its own budget; each coordinate is shuffled separately. A
Clip-Laplace report is pulled towards 0, the more the smaller its budget, so the analyzer inverts the mean that a
common value of all users would have had (Alg. 1, eq. 1). ``randomizer = "laplace"`` is the variant of Fig. 3(a).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import numpy as np
from scipy import special

from dovetail import _validate, claims
from dovetail._jax import jax
from dovetail.events import Mechanism, NonPrivate
from dovetail.mechanisms import ClipLaplace, LocalRandomizer, laplace
from dovetail.protocols._base import Cohort
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols._shared_sums import GridReports
from dovetail.protocols.personal._personal import Personal, laplace_reports
from dovetail.shufflers import SlotSums
from dovetail.statements import NotApplicable

__all__ = ["Apes", "midpoints"]

_WIDER = "not certified: the proof for personal budgets needs reports that stay in [-C, C] (bound = C)"
_NODES = 4096
_QUANTILES = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apes(Personal, Claimed):
    """Personal Clip-Laplace, shuffled.

    The estimate is biased: the mean report of unequal users is not that of their mean, and what the noise carries
    beyond the attainable means is clamped. With Laplace noise it is the plain average, which is unbiased.

    Guarantees:
        Where all users hold the same value in (-C, C), the estimate tends to it as their number grows.
        Every coordinate of the estimate lies in [-C, C], and grows with the average of the reports.

    References:
        Liu et al. (AAAI 2023), Alg. 1, Def. 4, Thm. 3 and 4; certified by docs/proofs/personalized-clones.md.
    """

    name: ClassVar[str] = "apes"
    shuffled: ClassVar[bool] = True
    formula: ClassVar[Formula] = staticmethod(claims.apes.apes)

    bound: float | None = None
    """Clip-Laplace reports stay within plus or minus this; default: `clip_value`."""
    randomizer: Literal["clip_laplace", "laplace"] = "clip_laplace"
    """Randomizer of a report."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of(("clip_laplace", "laplace"), randomizer=self.randomizer)
        if self.randomizer == "laplace" and self.bound is not None:
            raise ValueError(f"expected no bound with randomizer='laplace', got bound={self.bound!r}")
        ClipLaplace(1.0, -self.clip_value, self.clip_value, self.output_bound)  # refuses a bound within the box

    @property
    def kind(self) -> Literal["clip_laplace", "laplace"]:
        """The name of a report's distribution: that of the randomizer."""
        return self.randomizer

    @property
    def output_bound(self) -> float:
        """A: Clip-Laplace reports lie in [-A, A]."""
        return self.clip_value if self.bound is None else self.bound

    def perturb(self, x: jax.Array, budget: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: Clip-Laplace reports (or Laplace ones) around the clipped x."""
        if self.randomizer == "laplace":
            return laplace_reports(x, budget, self.clip_value, key=key)
        return laplace.draw_clip_laplace(x, budget, self.clip_value, self.output_bound, key=key)

    def randomizer_of(self, budget: float) -> LocalRandomizer:
        """The randomizer of one coordinate at this budget: Clip-Laplace, or Laplace noise."""
        if self.randomizer == "laplace":
            return super().randomizer_of(budget)
        return ClipLaplace(budget, -self.clip_value, self.clip_value, self.output_bound)

    def estimate(self, tally: SlotSums, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The value that, held by all users, has the observed average as its mean report; clamped to [-C, C]."""
        average, state = super().estimate(tally, size, state, key=key)
        if self.randomizer == "laplace":
            return average, state
        return laplace.invert_mean_report(average, self.eps_locals, self.clip_value, self.output_bound), state

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: both randomizers, Clip-Laplace first."""
        return [*super().variants(dim, num_users), {"budgets": [2.0, 8.0], "randomizer": "laplace"}]

    def bias(self, dim: int) -> float:
        """How far the mean estimate may be off: anywhere in the box with Clip-Laplace, of which no less is proven."""
        return 0.0 if self.randomizer == "laplace" else 2 * self.clip_value

    def contribution(self, cohort: Cohort, dim: int) -> GridReports:
        """What users share between aggregators: reports on a grid.

        Refuses reports beyond the box of the inputs, about which nothing is certified.
        """
        if self.output_bound > self.clip_value:
            raise NotApplicable(f"expected reports that can be shared as sums, got bound={self.bound}: {_WIDER}")
        return super().contribution(cohort, dim)

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of a coordinate of the estimate at zero updates.

        Exact but for taking the average of the reports as normal; what is clamped is counted as clamped.
        """
        if self.randomizer == "laplace":
            return super().noise_std(size, dim)
        std = math.sqrt(float(self._second_moments(dim).mean()) / size)
        averages = std * special.ndtri(midpoints(_NODES))
        errors = laplace.invert_mean_report(averages, self.eps_locals, self.clip_value, self.output_bound)
        return math.sqrt(float(np.mean(errors**2)))

    def _second_moments(self, dim: int) -> np.ndarray:
        """E[y^2] of each user's report y on a coordinate that is 0, (users,)."""
        return np.mean(self._quantiles_of_size(self.eps_locals) ** 2, axis=1)

    def _quantiles_of_size(self, budgets: np.ndarray) -> np.ndarray:
        """Evenly spaced quantiles of the absolute report on 0, (budgets, quantiles), rising along a row.

        Column j holds the quantile at `midpoints(...)[j]`, so a mean over a row is a mean over reports; `SApes` relies
        on both.
        """
        rates = budgets[:, None] / (2 * self.clip_value)
        return -np.log1p(midpoints(_QUANTILES) * np.expm1(-rates * self.output_bound)) / rates

    def mechanism(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of a round; nothing is certified where reports may leave the box of the inputs."""
        return NonPrivate(reason=_WIDER) if self.output_bound > self.clip_value else super().mechanism(cohort, dim)


def midpoints(count: int) -> np.ndarray:
    """The midpoints of `count` equal parts of [0, 1], ascending."""
    return (np.arange(count) + 0.5) / count
