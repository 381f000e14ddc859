"""DP-FL: a trusted curator clips, adds up, and adds Gaussian noise (Geyer et al. 2017; McMahan et al. 2018).

Each update is scaled to L2 norm at most `clip_norm`; the server adds N(0, (noise_multiplier * clip_norm)^2) to every
coordinate of the sum and divides by the planned cohort size, a public constant.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dovetail import _validate
from dovetail.events import FixedSize, Gaussian, Poisson, Round, View
from dovetail.mechanisms.gaussian import clip_factor, clip_l2
from dovetail.protocols._base import Cohort, Protocol
from dovetail.shufflers import Layout, Reports
from dovetail.statements import Neighbors, Scope, Trust, Unit

__all__ = ["DpFl"]

_REMOVAL = "a user that is removed stays on the public roster and contributes nothing"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpFl(Protocol):
    """Client-level differential privacy with a trusted curator.

    Guarantees:
        The released sum has sensitivity `clip_norm` (add-remove) or twice that (replace-one), whatever clients send.
        The noise does not depend on who took part.
    """

    name: ClassVar[str] = "dp_fl"

    clip_norm: float
    noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        _validate.positive(clip_norm=self.clip_norm)
        if self.noise_multiplier is not None:
            _validate.positive(noise_multiplier=self.noise_multiplier)

    @property
    def noise_field(self) -> str:
        """The noise multiplier."""
        return "noise_multiplier"

    @property
    def std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum."""
        if self.noise_multiplier is None:
            raise ValueError("expected noise_multiplier to be set or calibrated, got noise_multiplier=None")
        return self.noise_multiplier * self.clip_norm

    def layout(self, dim: int) -> Layout:
        """Every client reports every coordinate to the curator."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=0)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The clipped update; the curator adds the noise."""
        return Reports(slot=None, value=clip_l2(x, self.clip_norm), valid=jnp.ones(()))

    def estimate(self, tally: jax.Array, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The noised sum over the planned size."""
        noise = self.std * jax.random.normal(key, tally.shape, tally.dtype)
        return (tally + noise) / size, state

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One Gaussian release of the clipped sum."""
        if isinstance(cohort.participation, Poisson | FixedSize) and cohort.min_size > 0:
            raise ValueError(
                "expected min_size = 0 where the sample is secret (a withheld round would tell of who was drawn), "
                f"got min_size={cohort.min_size}"
            )
        sensitivity = self.clip_norm * (2 if neighbors is Neighbors.REPLACE_ONE else 1)
        scope = Scope(
            trust=Trust.CURATOR,
            adversary="observer of every model",
            neighbors=neighbors,
            unit=Unit.USER,
            assumptions=(
                "the curator clips, adds the noise and keeps the updates to itself",
                "who drops out does not depend on the data",
                *((_REMOVAL,) if neighbors is Neighbors.ADD_REMOVE else ()),
            ),
        )
        mechanism = Gaussian(std=self.std, sensitivity=sensitivity, neighbors=neighbors)
        return View(round=Round(mechanism=mechanism, participation=cohort.participation), scope=scope)

    def noise_std(self, size: int, dim: int) -> float:
        """The curator's noise over the size."""
        return self.std / size

    def scaling(self, norm: jax.Array) -> jax.Array:
        """min(1, clip_norm / norm)."""
        return clip_factor(norm, self.clip_norm)
