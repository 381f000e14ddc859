"""LDP-FL: every client randomizes its own update before anybody sees it (FLAME's and the survey's baseline).

- ``randomizer = "gaussian"``: L2-clip to `clip_norm`, add N(0, (noise_multiplier * clip_norm)^2) to each coordinate.
- ``randomizer = "laplace"``: clip each coordinate to [-clip_value, clip_value], add Laplace noise of scale
  2 clip_value / eps_local to each; eps_local is the budget of one coordinate.

Nobody need be trusted. Any two updates are neighbours of each other, so the sensitivity is the diameter of the clipped
set, and neither sampling nor the number of users helps against a server that sees who sent what.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from dovetail import _validate, events
from dovetail._jax import jax, jnp
from dovetail.events import Disjoint, Everyone, Mechanism, Round, Separated, View
from dovetail.mechanisms import ExactSampler
from dovetail.mechanisms.gaussian import GaussianRandomizer, clip_l2, normal
from dovetail.mechanisms.laplace import LaplaceRandomizer
from dovetail.protocols._base import CLIP_NORM, CLIP_VALUE, Cohort, Protocol
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._fast import Fast
from dovetail.protocols._scopes import local_scope
from dovetail.protocols._shared_sums import GridReports
from dovetail.shufflers import Layout, Reports
from dovetail.statements import Neighbors, NotApplicable

__all__ = ["LdpFl"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LdpFl(Protocol, Fast):
    """Local differential privacy: the server is untrusted.

    Guarantees:
        The estimate is unbiased for the mean of the clipped updates.
    """

    name: ClassVar[str] = "ldp_fl"
    references: ClassVar[tuple[str, ...]] = ("FLAME", "Survey")
    undeployed: ClassVar[str] = "has no messages for a shuffler; aggregators can add up its Laplace reports on a grid"
    resizable: ClassVar[bool] = True

    randomizer: Literal["gaussian", "laplace"] = "gaussian"
    """Randomizer of a report."""
    clip_norm: float | None = None
    """Largest L2 norm of an update; larger ones are scaled down."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise divided by the clip norm; calibrated if not given."""
    clip_value: float | None = None
    """Coordinates are clipped to plus or minus this."""
    eps_local: float | None = None
    """The budget of one report; calibrated if not given."""

    def __post_init__(self) -> None:
        _validate.one_of(("gaussian", "laplace"), randomizer=self.randomizer)
        gaussian = {"clip_norm": self.clip_norm, "noise_multiplier": self.noise_multiplier}
        laplace = {"clip_value": self.clip_value, "eps_local": self.eps_local}
        mine, other = (gaussian, laplace) if self.randomizer == "gaussian" else (laplace, gaussian)
        for key, value in other.items():
            if value is not None:
                raise ValueError(f"expected no {key} with randomizer={self.randomizer!r}, got {key}={value!r}")
        clip, noise = mine.items()
        if clip[1] is None:
            object.__setattr__(self, clip[0], CLIP_NORM if self.randomizer == "gaussian" else CLIP_VALUE)
        (_validate.clip_norm if clip[0] == "clip_norm" else _validate.positive)(
            **_validate.not_none(**{clip[0]: clip[1]})
        )
        _validate.positive(**_validate.not_none(**{noise[0]: noise[1]}))

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: Gaussian noise of the clip norm; nothing for Laplace noise."""
        return {} if settings.get("randomizer") == "laplace" else {"noise_multiplier": 1.0, "clip_norm": 1.0}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: Gaussian noise, the usual one, and Laplace noise."""
        return [{}, {"randomizer": "laplace", "eps_local": 1.0}]

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the noise multiplier, or the budget of a coordinate."""
        return "noise_multiplier" if self.randomizer == "gaussian" else "eps_local"

    @property
    def local_randomizer(self) -> GaussianRandomizer | LaplaceRandomizer:
        """The randomizer that every client runs."""
        if self.clip_norm is not None and self.noise_multiplier is not None:
            return GaussianRandomizer(std=self.noise_multiplier * self.clip_norm, clip_norm=self.clip_norm)
        if self.clip_value is not None and self.eps_local is not None:
            return LaplaceRandomizer(eps_local=self.eps_local, low=-self.clip_value, high=self.clip_value)
        raise ValueError(f"expected the noise to be set or calibrated, got {self}")

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, each of them reported by every client; there is no shuffler."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=0)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The clipped update with the client's own noise."""
        return Reports(slot=None, value=self.local_randomizer(x, key=key), valid=jnp.ones(()))

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray:
        """The log density of a report: of each coordinate, or, for Gaussian noise, of the whole update."""
        density = self.local_randomizer.log_density(value, x)
        return density[..., None] if self.local_randomizer.vector else density

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What users share between aggregators: Laplace reports on a grid, drawn exactly; refuses Gaussian noise.

        See docs/proofs/grid-reports.md.
        """
        local = self.local_randomizer
        if not isinstance(local, LaplaceRandomizer):
            raise NotApplicable(
                "expected randomizer='laplace' for reports that can be shared as sums, got 'gaussian': rounded to a "
                "grid, an update may be longer than clip_norm, and discrete noise is not the one that is accounted"
            )
        budgets = local.eps_local, local.eps_local
        return _LocalReports.for_budgets(
            clip_value=local.high, budgets=budgets, conditioned=False, dim=dim, users=cohort.max_uploads
        )

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum of the reports over the planned size."""
        return tally / size, state

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The reports of one user, as a server that knows who sent them sees them."""
        scope = local_scope(neighbors)
        fixed = isinstance(cohort.participation, Disjoint | Separated)
        participation = cohort.participation if fixed else Everyone()
        return View(round=Round(mechanism=self._mechanism(dim), participation=participation), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of one client's reports: what the server sees is all there is."""
        return self._mechanism(dim)

    def _mechanism(self, dim: int) -> Mechanism:
        """The event of one client's report on `dim` coordinates."""
        local = self.local_randomizer
        if isinstance(local, GaussianRandomizer):
            return events.Gaussian(std=local.std, sensitivity=local.sensitivity, neighbors=Neighbors.REPLACE_ONE)
        return events.Laplace(
            scale=local.scale, sensitivity=local.high - local.low, count=dim, neighbors=Neighbors.REPLACE_ONE
        )

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the average of `size` independent noises, on each coordinate."""
        local = self.local_randomizer
        return (local.std if isinstance(local, GaussianRandomizer) else local.scale * math.sqrt(2)) / math.sqrt(size)

    def clip_update(self, x: jax.Array, state: Any) -> jax.Array:
        """The update, scaled down as a whole to the clip norm, or clipped coordinate by coordinate."""
        if self.clip_value is not None:
            return jnp.clip(x, -self.clip_value, self.clip_value)
        return clip_l2(x, self.clip_norm)

    def clip_norm_at(self, state: Any) -> float | None:
        """The clip norm of L2 clipping; None where coordinates are clipped, which is no scaling."""
        return self.clip_norm

    def tally_of_sum(self, total: jax.Array, count: jax.Array, *, key: jax.Array) -> jax.Array:
        """The sum with all clients' Gaussian noises, drawn as one of `count` times the variance."""
        local = self.local_randomizer
        if not isinstance(local, GaussianRandomizer):
            raise ValueError(f"expected Gaussian noise, got randomizer={self.randomizer!r}")
        return total + local.std * jnp.sqrt(count) * normal(key, total.shape, total.dtype)


class _LocalReports(GridReports):
    """Grid reports of clients that all have the same budget; the tally is their plain sum."""

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: its cells at the one budget, whatever `budget` says."""
        return super().draw(x, sampler=sampler, budget=self.budgets[0])

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """Analyzer: the sum of the reports."""
        return jnp.asarray(self.sum_of_reports(total, users), jnp.float32)
