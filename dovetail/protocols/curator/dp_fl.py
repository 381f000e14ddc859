"""DP-FL: a trusted curator clips, adds up, and adds Gaussian noise (Geyer et al. 2017; McMahan et al. 2018).

Each update is scaled to L2 norm at most S; the server adds N(0, (noise_multiplier * S)^2) to every coordinate of the
sum and divides by the planned cohort size, a public constant. S is

- `fixed`: `clip_norm` in every round;
- `adaptive`: it starts at `clip_norm` and follows a quantile of the updates' norms, learned from a noised count of the
  users below it (Andrew, Thakkar, McMahan, Ramaswamy 2021): the count is released too, and accounted for;
- `median`: the median of the round's own norms, un-noised (Geyer Alg. 1). The noise scale then reveals the median,
  so there is no guarantee; it is here to reproduce the paper.

`schedule` changes the noise over the rounds: `constant`, `linear` up to `schedule_end` times the first round's, `held`
(sigma_t^2 / m_t stays what it was in the first round), or a list of factors.

With `cohort.kind = "separated"` the noise of rounds can be correlated (`CorrelatedNoise`; Kairouz, McMahan, Song,
Thakkar, Thakurta, Xu 2021): the model carries less of it where users come rarely.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.claims import geyer
from dovetail.events import FixedSize, Gaussian, Mechanism, NonPrivate, Poisson, Round, View
from dovetail.mechanisms.correlated import NoiseRows, draw_row, start_rows
from dovetail.mechanisms.gaussian import clip_l2, normal
from dovetail.protocols._base import CLIP_NORM, Cohort, Protocol
from dovetail.protocols._claimed import Claimed, Formula
from dovetail.protocols._correlation import CorrelatedNoise
from dovetail.protocols._fast import Fast
from dovetail.protocols._scopes import CURATOR_SEES, DROPOUT, curator_scope
from dovetail.shufflers import Layout, Reports
from dovetail.statements import Neighbors, Scope

__all__ = ["Clipping", "DpFl"]

_REMOVAL = "a user that is removed stays on the public roster and contributes nothing"
_LEAKS = "the noise is scaled to the exact median of the update norms, and so reveals it"
_SHARE_OF_COUNT = 20  # the count of users below the clip norm gets noise of size / 20, which costs little

_FARTHEST = 1e6  # an adaptive clip norm stays within this factor of the first


class Clipping(NamedTuple):
    """The state of a round: the norm that updates are clipped to, its noise over the protocol's own, rows of noise.

    All but `rows` is public: the noise that later rounds take back is the curator's secret; () without correlation.
    """

    clip_norm: jax.Array
    noise_scale: jax.Array
    rows: NoiseRows | tuple[()] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DpFl(CorrelatedNoise, Protocol, Fast, Claimed):
    """Client-level differential privacy with a trusted curator.

    Guarantees:
        The released sum has sensitivity S (add-remove) or 2 S (replace-one), whatever clients send.
        The noise does not depend on who took part, unless S is the median.
        `noise_multiplier` is that of the update; what the adaptive count costs is added in the event.
    """

    name: ClassVar[str] = "dp_fl"
    references: ClassVar[tuple[str, ...]] = ("GKN17", "MRTZ18")
    unshared: ClassVar[str] = "needs a curator for its noise; 'secagg' is the same sum without one"
    resizable: ClassVar[bool] = True
    formula: ClassVar[Formula] = staticmethod(geyer.dp_fl)
    claimed_for: ClassVar[Literal["round", "training"]] = "training"

    clip: float | Literal["fixed", "adaptive", "median"] = "fixed"
    """`fixed`, `adaptive` (a private quantile, accounted for) or `median` (as published by Geyer et al.: no guarantee).
    """
    clip_norm: float | None = None
    """Largest L2 norm of an update; larger ones are scaled down."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise divided by the clip norm; calibrated if not given."""
    quantile: float = 0.5
    """With `adaptive`: target share of updates below the clip norm."""
    clip_rate: float = 0.2
    """With `adaptive`: how fast the clip norm adapts."""
    std_count: float | None = None
    """With `adaptive`: standard deviation of the noise on the count of updates below the clip norm."""
    schedule: Literal["constant", "linear", "held"] | tuple[float, ...] = "constant"
    """Noise over the rounds: `constant`, `linear`, `held` or a list of factors."""
    schedule_end: float = 1.0
    """With `linear`: noise of the last round relative to the first."""

    def __post_init__(self) -> None:
        if not isinstance(self.clip, str):
            if self.clip_norm is not None and self.clip_norm != self.clip:
                raise ValueError(f"expected one clip norm, got clip={self.clip} and clip_norm={self.clip_norm}")
            _validate.clip_norm(clip=self.clip)
            object.__setattr__(self, "clip_norm", float(self.clip))
            object.__setattr__(self, "clip", "fixed")
        _validate.one_of(("fixed", "adaptive", "median"), clip=self.clip)
        if self.clip_norm is None:
            object.__setattr__(self, "clip_norm", CLIP_NORM)
        _validate.clip_norm(clip_norm=self.first_clip_norm)
        _validate.positive(clip_rate=self.clip_rate, schedule_end=self.schedule_end)
        _validate.in_open_interval(0, 1, quantile=self.quantile)
        _validate.positive(**_validate.not_none(noise_multiplier=self.noise_multiplier, std_count=self.std_count))
        if self.std_count is not None and self.clip != "adaptive":
            raise ValueError(f"expected std_count with clip = 'adaptive' only, got clip={self.clip!r}")
        if isinstance(self.schedule, list | tuple):
            for factor in self.schedule:
                _validate.positive(schedule=factor)
            object.__setattr__(self, "schedule", tuple(float(factor) for factor in self.schedule))
        else:
            _validate.one_of(("constant", "linear", "held"), schedule=self.schedule)
        self.check_correlation()
        if self.schedule_end != 1 and self.schedule != "linear":
            raise ValueError(f"expected schedule_end with schedule = 'linear' only, got schedule={self.schedule!r}")

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: noise of the clip norm."""
        return {"noise_multiplier": 1.0}

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: each of the three ways to clip, the usual one first."""
        return [{}, {"clip": "adaptive"}, {"clip": "median"}]

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the noise multiplier."""
        return "noise_multiplier"

    @property
    def first_clip_norm(self) -> float:
        """The clip norm before the first round."""
        return float(self.require("clip_norm"))

    @property
    def std(self) -> float:
        """Standard deviation of the noise on each coordinate of the sum, at the first clip norm and noise scale 1."""
        return self.require("noise_multiplier") * self.first_clip_norm

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """The protocol with the noise on the adaptive count set, and the coefficients of correlated noise.

        The count's noise is so large that it is never most of the cost: any target can be met by more noise.
        """
        settled = self.settle_correlation(cohort, obstacle=self._obstacle_to_correlation(cohort))
        return settled._settle_count(cohort)

    def _obstacle_to_correlation(self, cohort: Cohort) -> str | None:
        """Why rounds need independent noise, in words; None if they do not."""
        if self.clip != "fixed":
            return f"with a fixed clip norm only, got protocol.clip={self.clip!r}"
        if self.schedule != "constant" or cohort.noise_scale != 1:
            return f"where it is as large in every round, got protocol.schedule={self.schedule!r}"
        return None

    def _settle_count(self, cohort: Cohort) -> Self:
        """The protocol with the noise on the adaptive count set; other ways to clip have none."""
        if self.clip != "adaptive" or self.std_count is not None:
            return self
        least = max(1.0, self.noise_multiplier or 0.0)
        return dataclasses.replace(self, std_count=max(least, cohort.size / _SHARE_OF_COUNT))

    def noise_scales(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """The schedule's factors for rounds of these sizes; refuses a list with fewer factors than rounds."""
        match self.schedule:
            case "held":
                return tuple(math.sqrt(size / sizes[0]) for size in sizes)
            case "linear":
                return tuple(np.linspace(1.0, self.schedule_end, len(sizes)).tolist())
            case tuple():
                if len(self.schedule) < len(sizes):
                    raise ValueError(
                        f"expected a schedule of at least {len(sizes)} rounds, got {len(self.schedule)} factors"
                    )
                return self.schedule[: len(sizes)]
        return (1.0,) * len(sizes)

    def layout(self, dim: int) -> Layout:
        """One slot per coordinate, and one for being below an adaptive clip norm; there is no shuffler."""
        reports = dim + (self.clip == "adaptive")
        return Layout(slots=reports, reports_per_client=reports, shufflers=0)

    def init(self, dim: int) -> Clipping:
        """The state before the first round: the first clip norm, and noise scale 1."""
        rows = () if self.coefficients is None else start_rows(self.coefficients, dim)
        return Clipping(jnp.float32(self.first_clip_norm), jnp.float32(1.0), rows)

    @property
    def needs_norms(self) -> bool:
        """Whether `prepare` needs the norms of all updates: it does where they are clipped to their median."""
        return self.clip == "median"

    def prepare(self, state: Clipping, *, noise_scale: jax.Array, norms: jax.Array | None = None) -> Clipping:
        """This round's noise scale, and its median norm if that is what updates are clipped to."""
        if norms is None:
            return state._replace(noise_scale=noise_scale)
        median = jnp.nanmedian(jnp.where(jnp.isfinite(norms), norms, jnp.nan))
        usable = jnp.isfinite(median) & (median >= _validate.SMALLEST_CLIP_NORM)
        return state._replace(clip_norm=jnp.where(usable, median, state.clip_norm), noise_scale=noise_scale)

    def randomize(self, x: jax.Array, state: Clipping, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The clipped update; the curator adds the noise.

        A zero update is on neither side of an adaptive clip norm: who was removed, and stays on the roster without
        records, adds nothing at all.
        """
        value = self.clip_update(x, state)
        if self.clip == "adaptive":
            norm = jnp.linalg.norm(x / state.clip_norm)  # NaN counts as above
            side = jnp.where(norm == 0, 0.0, jnp.where(norm <= 1, 0.5, -0.5))
            value = jnp.append(value, side.astype(value.dtype))
        return Reports(slot=None, value=value, valid=jnp.ones(()))

    def estimate(self, tally: jax.Array, size: int, state: Clipping, *, key: jax.Array) -> tuple[jax.Array, Clipping]:
        """The noised sum over the planned size; the adaptive clip norm moves with the noised count."""
        total = tally
        after = state
        if self.clip == "adaptive":
            key, key_count = jax.random.split(key)
            total = tally[:-1]
            after = self._move_clip_norm(tally[-1], size, state, key=key_count)
        std = self.require("noise_multiplier") * state.clip_norm * state.noise_scale
        if self.coefficients is None or not isinstance(state.rows, NoiseRows):
            return (total + std * normal(key, total.shape, total.dtype)) / size, after
        noise, rows = draw_row(state.rows, self.coefficients, key=key)
        return (total + std * noise) / size, after._replace(rows=rows)

    def public_state(self, state: Clipping) -> Clipping:
        """The state without the rows of noise, which the curator keeps to itself."""
        return state._replace(rows=())

    def skip(self, state: Clipping, *, key: jax.Array) -> Clipping:
        """The state after a round that is not released: with correlated noise it has drawn its row all the same."""
        if self.coefficients is None or not isinstance(state.rows, NoiseRows):
            return state
        return state._replace(rows=draw_row(state.rows, self.coefficients, key=key)[1])

    def _move_clip_norm(self, count: jax.Array, size: int, state: Clipping, *, key: jax.Array) -> Clipping:
        """The state with an adaptive clip norm after a round with this count of users below it, less half of them."""
        noise = self.require("std_count") * normal(key, (), count.dtype)
        below = 0.5 + (count + noise) / size
        moved = state.clip_norm * jnp.exp(-self.clip_rate * (jnp.clip(below, 0, 1) - self.quantile))
        first = self.first_clip_norm
        least = max(first / _FARTHEST, _validate.SMALLEST_CLIP_NORM)
        return state._replace(clip_norm=jnp.clip(moved, least, first * _FARTHEST))

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One Gaussian release of the clipped sum, and of the count beside it, to those who see their own draws."""
        cohort.refuse_minimum_if_secret()
        scope = curator_scope(
            neighbors,
            "the curator clips, adds the noise and keeps the updates to itself",
            DROPOUT,
            *((_REMOVAL,) if neighbors is Neighbors.ADD_REMOVE else ()),
            *_colluding_assumption(cohort),
            *self._cost_of_count(),
            *self.correlation_in_words(),
        )
        return View(
            round=Round(mechanism=self._mechanism(cohort, neighbors), participation=cohort.participation_of_honest),
            scope=scope,
        )

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """Nothing is certified: the curator gets the clipped update as it is."""
        return CURATOR_SEES

    def _mechanism(self, cohort: Cohort, neighbors: Neighbors) -> Mechanism:
        """The event of one round: a Gaussian release, or nothing certified where the median is the clip norm."""
        if self.clip == "median":
            return NonPrivate(reason=_LEAKS)
        independent = self._gaussian(cohort.noise_scale, neighbors)
        if not self.is_correlated:
            return independent
        return self.correlated_event(std=independent.std, sensitivity=independent.sensitivity, neighbors=neighbors)

    def _gaussian(self, noise_scale: float, neighbors: Neighbors) -> Gaussian:
        """The event of a Gaussian release of the sum, with the count if the clip norm is adaptive.

        In units in which sum and count have the same noise: a user moves the count, less 1/2 each, by 1/2 or 1. The
        factor 1 + 1e-15 rounds the sensitivity up.
        """
        std = self.std * noise_scale
        sensitivity = self.first_clip_norm
        if self.clip == "adaptive":
            sensitivity = math.hypot(sensitivity, 0.5 * std / self.require("std_count")) * (1 + 1e-15)
        return Gaussian(
            std=std, sensitivity=sensitivity * (2 if neighbors is Neighbors.REPLACE_ONE else 1), neighbors=neighbors
        )

    def _cost_of_count(self) -> tuple[str, ...]:
        """The sentence on what the adaptive count costs, once noise is set; none for other ways to clip."""
        if self.clip != "adaptive" or self.std_count is None or self.noise_multiplier is None:
            return ()
        fraction = 1 / (1 + (2 * self.std_count / self.noise_multiplier) ** 2)
        return (
            f"the clip norm is set from noised counts, and their {fraction:.2%} of the first round's mu^2 is included",
        )

    def published_event(self, cohort: Cohort, dim: int) -> tuple[Mechanism, dict[str, Any]] | None:
        """The event that Geyer's accountant speaks of: Gaussian noise on the clipped sum, however it was clipped.

        None without a sample of users in each round.
        """
        if not isinstance(cohort.participation, Poisson | FixedSize):
            return None
        clip = "median" if self.clip == "median" else "fixed"
        return self._gaussian(cohort.noise_scale, Neighbors.ADD_REMOVE), {"clip": clip}

    def published_scope(self, scope: Scope) -> Scope:
        """The scope of Geyer's claim, in which users are added or removed."""
        return dataclasses.replace(scope, neighbors=Neighbors.ADD_REMOVE)

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the curator's noise over the size, at the first clip norm and noise scale 1.

        Of correlated noise that of the first round, from which most is taken back later.
        """
        return self.std * (self.coefficients or (1.0,))[0] / size

    def clip_update(self, x: jax.Array, state: Clipping) -> jax.Array:
        """Updates scaled down to norm S."""
        return clip_l2(x, state.clip_norm)

    def clip_norm_at(self, state: Clipping) -> jax.Array | None:
        """The clip norm S; None where clients also report a count, so that scaling is not all that is done."""
        return None if self.clip == "adaptive" else state.clip_norm


def _colluding_assumption(cohort: Cohort) -> tuple[str, ...]:
    """The assumption on colluders in a sample of fixed size, for `participation_of_honest` accounts for them.

    They see whether they were drawn, and so more of who else was.
    """
    if not cohort.colluders or not isinstance(cohort.participation, FixedSize):
        return ()
    population = cohort.population
    return (
        f"at most {cohort.colluders} of the {population} users collude and see whether they were sampled: the "
        f"accounting treats the sample as drawn from the other {population - cohort.colluders} users",
    )
