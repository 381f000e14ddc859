"""Real summation: the sum of n numbers in [0, 1] at a fixed central (eps, delta), three ways (Survey 5.3).

- ``method = "single"``: one report per user by randomized response on n^(1/3) levels (Balle et al. 2019). More levels
  round less but need more noise; the best choice leaves a squared error that grows as n^(1/3).
- ``method = "unary"``: rounded to about sqrt(n) levels and sent bit by bit, one bit of the code per report (Cheu et
  al. 2019). The bits of a place are shuffled on their own; the squared error does not grow with n.
- ``method = "split"``: split-and-mix in one dimension, a few shares per user; the squared error is that of a curator.
  `noise_multiplier` is the standard deviation of its noise, `mix` holds its other settings; numbers are encoded
  around 1/2.

`single` and `unary` agree exactly on both paths; `split` as `split_and_mix` does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import Mechanism, View
from dovetail.mechanisms import BinaryRandomizedResponse, ExactSampler, RandomizedResponse
from dovetail.mechanisms._base import clamp, clamp_float64
from dovetail.mechanisms.exact import round_at_random
from dovetail.protocols._base import Cohort
from dovetail.protocols._contributions import Contribution
from dovetail.protocols._fast import Fast
from dovetail.protocols._messages import Messages, Sent
from dovetail.protocols.sums._skellam import Collected
from dovetail.protocols.sums._sums import ReportedSum, Shares, check_one_number
from dovetail.protocols.sums.split_and_mix import SplitAndMixProtocol
from dovetail.shufflers import Layout, Reports, ShuffledReports, SlotSums
from dovetail.statements import Neighbors

__all__ = ["RealSum"]

METHODS = ("single", "unary", "split")
_HALF = 0.5  # numbers in [0, 1] are encoded as what they are more than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealSum(ReportedSum, Fast):
    """The sum of n numbers in [0, 1].

    Guarantees:
        `estimate` is unbiased for the sum over the planned size, with `variance` as its exact variance.

    References:
        Balle, Bell, Gascon, Nissim (CRYPTO 2019), section 3, and (CCS 2020); Cheu, Smith, Ullman, Zeber, Zhilyaev
        (EUROCRYPT 2019), section 4. The recursive protocol of Balle et al. (2020) is not built.
    """

    name: ClassVar[str] = "real_sum"
    references: ClassVar[tuple[str, ...]] = ("BBGN19", "BBGN20", "CSUZZ19")

    unshared: ClassVar[str] = "mixes shares in shufflers with method='split'; use 'secagg' or method='unary' instead"

    method: Literal["single", "unary", "split"] = "single"
    """`single` (one report), `unary` (bit by bit) or `split` (shares)."""
    levels: int | None = None
    """Number of levels that a number is rounded to; it depends on the number of users if not given."""
    noise_multiplier: float | None = None
    """Standard deviation of the noise divided by the clip norm; calibrated if not given."""
    mix: SplitAndMixProtocol | Mapping[str, Any] | None = None
    """With `split`: settings of `split_and_mix`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.one_of(METHODS, method=self.method)
        levels = _validate.not_none(levels=self.levels)
        _validate.integer(**levels)
        _validate.at_least(2, **levels)
        _validate.positive(**_validate.not_none(noise_multiplier=self.noise_multiplier))
        split = self.method == "split"
        for name in ("eps_local", "levels") if split else ("noise_multiplier", "mix"):
            if getattr(self, name) is not None:
                raise ValueError(f"expected no {name} with method={self.method!r}, got {name}={getattr(self, name)!r}")
        if split and not isinstance(self.mix, SplitAndMixProtocol):
            object.__setattr__(self, "mix", SplitAndMixProtocol(clip_norm=_HALF, **(self.mix or {})))
        if isinstance(self.mix, SplitAndMixProtocol) and (self.mix.clip_norm != _HALF or self.mix.is_calibrated):
            raise ValueError(
                f"expected mix with clip_norm=0.5 and without noise, which is a setting of real_sum, got {self.mix}"
            )

    @classmethod
    def example(cls, dim: int, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Settings for a first try: a budget for a report; nothing for shares, whose noise multiplier is calibrated."""
        return {} if settings.get("method") == "split" else super().example(dim, settings)

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: each of the three methods, the usual one first."""
        mix = {"mix": {"shares": 5}}
        return [{"method": "single"}, {"method": "unary"}, {"method": "split", "noise_multiplier": 1.0, **mix}]

    @property
    def sharing(self) -> SplitAndMixProtocol | None:
        """The split-and-mix of ``method = "split"``, with the noise if it is set; None for the other methods."""
        if not isinstance(self.mix, SplitAndMixProtocol) or self.noise_multiplier is None:
            return self.mix if isinstance(self.mix, SplitAndMixProtocol) else None
        return self.mix.with_noise(self.noise_multiplier / _HALF)

    @property
    def noise_field(self) -> str:
        """The parameter that calibration sets: the budget of a report; with shares, the noise on the sum."""
        return "noise_multiplier" if self.method == "split" else "eps_local"

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """Levels that balance rounding against lies: the best for the budget, or sqrt(n) steps; or the shares."""
        check_one_number(dim, self.name)
        if self.sharing is not None:
            settled = self.sharing.settle(cohort, dim)
            return dataclasses.replace(self, mix=dataclasses.replace(settled, noise_multiplier=None))
        if self.levels is not None:
            return self
        if self.method == "unary":
            return dataclasses.replace(self, levels=1 + math.ceil(math.sqrt(cohort.size)))
        return dataclasses.replace(self, levels=_best_num_levels(self.require("eps_local")))

    @property
    def local_randomizer(self) -> RandomizedResponse:
        """The randomizer of one report: randomized response on all levels, or on a bit of the unary code."""
        if self.method == "unary":
            return BinaryRandomizedResponse(self.require("eps_local"))
        return RandomizedResponse(self.require("eps_local"), self.require("levels"))

    @property
    def slots(self) -> int:
        """How many reports a user sends: one, or a bit for every step between levels."""
        return self.require("levels") - 1 if self.method == "unary" else 1

    def positions(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        """Client: a position for each slot, (slots,), whose mean is x clipped to [0, 1].

        Of `unary` the code of x, zeros and ones, after unbiased rounding to a level. Of `single` x itself, (1,) and not
        clipped yet, for the randomizer clips. Shares (`split`) have no positions. `exact_positions` has the same law,
        up to the bits that it rounds by.
        """
        if self.method == "single":
            return x
        place: jax.Array = clamp(x, 0.0, 1.0) * self.slots
        level = jnp.floor(place) + jax.random.bernoulli(key, place - jnp.floor(place))
        return (jnp.arange(self.slots) < level).astype(jnp.float32)

    def exact_positions(self, x: np.ndarray, *, sampler: ExactSampler) -> np.ndarray:
        """Deployed client: `positions`, rounded by 53 random bits of the sampler."""
        if self.method == "single":
            return x
        level = round_at_random(clamp_float64(x, 0.0, 1.0) * self.slots, sampler)
        return (np.arange(self.slots) < level).astype(np.float64)

    def messages(self, dim: int) -> Messages:
        """Deployed messages: a level in each, or a share."""
        check_one_number(dim, self.name)
        return super().messages(dim) if self.sharing is None else _SharesAroundZero(**vars(self.sharing.messages(dim)))

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What users share between aggregators: the level of every slot; refuses shares, which shufflers must mix."""
        if self.sharing is not None:
            raise self.not_shared()
        return super().contribution(cohort, dim)

    def layout(self, dim: int) -> Layout:
        """One slot for each report of a user, or the slots of its shares."""
        return super().layout(dim) if self.sharing is None else self.sharing.layout(dim)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The reports, or the shares, of one number."""
        if self.sharing is None:
            return super().randomize(x, state, key=key)
        return self.sharing.randomize(_center_at_zero(x), state, key=key)

    def log_density(self, value: np.ndarray, x: np.ndarray, *, budget: float | None = None) -> np.ndarray | None:
        """The log density of a report of x; None for shares, and for a unary code between 0 and 1.

        There the bits of the code are not independent, so it has no simple form.
        """
        number = clamp_float64(x, 0.0, 1.0)
        if self.method == "split" or (self.method == "unary" and not np.isin(number, (0, 1)).all()):
            return None
        return self.local_randomizer.log_density(value, number)

    def tally(self, reports: ShuffledReports, dim: int) -> SlotSums:
        """Sum and number of the reports in every slot; of shares, their sum modulo 2^32 and the number of users."""
        if self.sharing is None:
            return super().tally(reports, dim)
        valid = reports.valid if reports.valid.ndim == 1 else reports.valid[:, 0]
        if reports.slot is not None:
            valid &= reports.slot[:, 0] == 0  # a user has one message there
        return SlotSums(self.sharing.tally(reports, dim), jnp.sum(valid, keepdims=True, dtype=jnp.int32))

    @property
    def matches_messages_exactly(self) -> bool:
        """Whether the fast path gives the messages' tally from the same keys.

        Not with shares, whose noise is one draw.
        """
        return self.sharing is None

    def collect(
        self, xs: jax.Array, present: jax.Array, state: Any, *, keys: jax.Array, budgets: jax.Array | None = None
    ) -> SlotSums | Collected:
        """The sums of the reports, or of the encoded numbers."""
        if self.sharing is None:
            sums: SlotSums = super().collect(xs, present, state, keys=keys)
            return sums
        return self.sharing.collect(_center_at_zero(xs), present, state, keys=keys)

    def finish(self, collected: SlotSums | Collected, *, key: jax.Array) -> SlotSums:
        """The noise on encoded numbers, in one draw."""
        if self.sharing is None or isinstance(collected, SlotSums):
            return SlotSums(*collected)
        return SlotSums(self.sharing.finish(collected, key=key), collected.users[None])

    def estimate(self, tally: SlotSums, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The unbiased sum over the planned size."""
        if self.sharing is None:
            return super().estimate(tally, size, state, key=key)
        around, _ = self.sharing.estimate(tally.total, size, state, key=key)
        return around + _HALF * tally.messages / size, state

    def bias(self, dim: int) -> float:
        """How far the mean estimate may be off: by what encoding costs, with shares; else 0."""
        return 0.0 if self.sharing is None else self.sharing.bias(dim)

    def variance(self, x: npt.ArrayLike) -> float:
        """The exact variance of the estimated sum of these users' numbers: rounding, and noise."""
        numbers = clamp_float64(x, 0.0, 1.0)
        if self.sharing is not None:
            rounding = _rounding_variance(numbers - _HALF, self.sharing.scale or math.nan)
            return rounding + (self.sharing.noise_std(numbers.size, 1) * numbers.size) ** 2
        if self.method == "single":
            return super().variance(numbers)
        bits = float(self.local_randomizer.debiased_variance(0.0)) / self.slots
        return _rounding_variance(numbers, self.slots) + numbers.size * bits

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """One shuffled report per slot, or the noisy sum of mixed shares."""
        check_one_number(dim, self.name)
        if self.sharing is None:
            return super().view(cohort, dim, neighbors=neighbors)
        return self.sharing.view(cohort, dim, neighbors=neighbors)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """The event of a user's reports; for shares nothing is certified."""
        if self.sharing is None:
            return super().own_reports(cohort, dim)
        return self.sharing.own_reports(cohort, dim)


def _best_num_levels(eps_local: float) -> int:
    """The number of levels b with about the least variance at the worst input.

    With few lies, gamma = b e^-eps_local of them, a report has variance at most gamma / 3 + 1 / (4 (b-1)^2): least at
    (b-1)^3 = 1.5 e^eps_local. At a fixed central budget e^eps_local grows with the number of users.
    """
    return 1 + max(1, round((1.5 * math.exp(min(eps_local, 40.0))) ** (1 / 3)))


class _SharesAroundZero(Shares):
    """Shares of what a number in [0, 1] is above 1/2, which is in [-1/2, 1/2]."""

    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """The shares of one number."""
        return super().randomize(clamp_float64(x, 0.0, 1.0) - _HALF, sampler=sampler)


def _center_at_zero(x: jax.Array) -> jax.Array:
    """What a number, clipped to [0, 1], is above 1/2."""
    return clamp(x, 0.0, 1.0) - _HALF


def _rounding_variance(numbers: np.ndarray, scale: float) -> float:
    """The variance that unbiased rounding to multiples of 1 / scale adds to the sum."""
    part = numbers * scale - np.floor(numbers * scale)
    return float((part * (1 - part)).sum() / scale**2)
