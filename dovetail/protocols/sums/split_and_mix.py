"""Split-and-mix: a sum of vectors over several shufflers, none trusted alone (after Balle, Bell, Gascon, Nissim 2020).

A client clips its update to L2 norm `clip_norm`, encodes it in integers, adds its part of a Skellam noise and splits
every coordinate into additive shares modulo `modulus`. Share j goes to shuffler j mod `shufflers`; each (coordinate,
share) is a slot, permuted separately. The analyzer adds up all shares of a coordinate and sees the noisy sum and almost
nothing else. The noise of the enforced minimum of honest clients adds up to `noise_multiplier`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

from dovetail import _validate, events
from dovetail._jax import jax, jnp
from dovetail.events import DataIndependent, Mechanism, NonPrivate, Poisson, Round, View
from dovetail.mechanisms import ExactSkellam, skellam
from dovetail.protocols._base import Cohort
from dovetail.protocols._scopes import DROPOUT, SLOTS_TELL_NOTHING, enrolment_assumption
from dovetail.protocols.sums._skellam import NoisySum, removal_assumption, rounding_assumption
from dovetail.protocols.sums._sums import Shares
from dovetail.shufflers import Layout, Reports, ShuffledReports
from dovetail.statements import Neighbors, NotApplicable, Scope, Trust, Unit

__all__ = ["SplitAndMixProtocol"]

_ALL_SHARES = "all shufflers together see every share, and the noise of one client is too small to protect it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitAndMixProtocol(NoisySum):
    """Central noise without a curator.

    `noise_multiplier` is the standard deviation of the honest clients' noise on a coordinate of the sum, over
    `clip_norm`. Scale, modulus, shares and `honest`, the number of clients that reach this noise, follow from the
    cohort unless given. Shares are so many that the view is within `mixing_error` of the ideal in total variation,
    also when `colluding_shufflers` of the shufflers show their slots to the analyzer.

    Guarantees:
        The estimate is unbiased for the mean of the clipped updates, but for `mechanisms.skellam.Encoding.bias`.
        The noise of the enforced minimum of honest clients has at least the declared variance.
        Refuses one shuffler, which would hold all shares, and a modulus in which the sum may wrap around.

    References:
        Balle, Bell, Gascon, Nissim (CCS 2020); Agarwal, Kairouz, Liu (NeurIPS 2021); Kairouz, Liu, Steinke (ICML 2021).
    """

    name: ClassVar[str] = "split_and_mix"
    references: ClassVar[tuple[str, ...]] = ("BBGN20", "AKL21")
    unshared: ClassVar[str] = "hides its sums by mixing shares in shufflers; use 'secagg' with aggregators"
    trust_settings: ClassVar[tuple[str, ...] | None] = ("shufflers", "colluding_shufflers", "mixing_error")

    shares: int | None = None
    """Number of shares per coordinate; follows from `mixing_error`."""
    shufflers: int = 2
    """Number of shufflers among which shares are split."""
    colluding_shufflers: int = 0
    """Number of shufflers that may collude with the analyzer."""
    mixing_error: float = 1e-12
    """Largest total variation distance between the analyzer's view and the sum alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.integer(shufflers=self.shufflers, colluding_shufflers=self.colluding_shufflers)
        _validate.in_open_interval(0, 1, mixing_error=self.mixing_error)
        if self.shufflers < 2:
            raise ValueError(f"expected shufflers >= 2 (one shuffler would hold all shares), got {self.shufflers}")
        _validate.in_interval(0, self.shufflers - 1, colluding_shufflers=self.colluding_shufflers)
        _validate.integer(**_validate.not_none(shares=self.shares))
        if self.shares is not None and self.shares < self.shufflers:
            raise ValueError(
                f"expected at least one share for each of {self.shufflers} shufflers, got shares={self.shares}"
            )

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: five shares.

        The code is that of as many as hide a value, in less time and among fewer users.
        """
        return [{"shares": 5}]

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """Scale, modulus and shares for this cohort; every honest client of its minimum adds an equal part of noise."""
        if cohort.aggregators is not None:
            raise self.not_shared()
        present = cohort.crowd() - cohort.colluders
        honest = self.count_honest(cohort)
        scale, modulus = skellam.choose_resolution(
            clip_norm=self.clip_norm,
            dim=dim,
            num_users=cohort.max_uploads,
            noise_std=self.std * math.sqrt(cohort.max_uploads / honest),
            scale=self.scale,
            modulus=self.modulus,
        )
        shares = self.shares
        if shares is None:
            hidden = skellam.shares_for(honest=present, modulus=modulus, distance=self.mixing_error / dim)
            shares = max(self.shufflers, hidden)
            while shares - self._colluding_slots(shares) < hidden:
                shares += 1
        return dataclasses.replace(self, scale=scale, modulus=modulus, shares=shares, honest=honest)

    def _colluding_slots(self, shares: int) -> int:
        """How many slots of a coordinate the colluding shufflers hold, at most, as slots are assigned in turn."""
        each, rest = divmod(shares, self.shufflers)
        return self.colluding_shufflers * each + min(self.colluding_shufflers, rest)

    def layout(self, dim: int) -> Layout:
        """A slot for every share of every coordinate; the shares of a coordinate are neighbours."""
        slots = dim * self.require("shares")
        return Layout(slots=slots, reports_per_client=slots, shufflers=self.shufflers)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The shares of the encoded update with the client's part of the noise: all of them, or nothing."""
        key_round, key_noise, key_shares = self._split_client_key(key)
        noise = skellam.draw_skellam(self.part_variance, x.shape, key=key_noise)
        noisy = self.encoding(len(x))(x, key=key_round) + noise
        shares = skellam.split_into_shares(noisy, self.require("shares"), self.require("modulus"), key=key_shares)
        return Reports(slot=None, value=shares.ravel(), valid=jnp.ones((), bool))

    def messages(self, dim: int) -> Shares:
        """One share in every message."""
        return Shares(
            encoding=self.encoding(dim),
            noise=ExactSkellam(self.part_variance),
            shares=self.require("shares"),
            modulus=self.require("modulus"),
            shufflers=self.shufflers,
        )

    def tally(self, reports: ShuffledReports, dim: int) -> jax.Array:
        """The sum of every coordinate's shares, as residues modulo 2^32."""
        if reports.slot is not None:
            value = jnp.where(reports.valid, reports.value, jnp.uint32(0))
            return jnp.zeros(dim, jnp.uint32).at[reports.slot // self.require("shares")].add(value, mode="drop")
        valid = reports.valid if reports.valid.ndim > 1 else reports.valid[:, None]
        slots = jnp.sum(jnp.where(valid, reports.value, jnp.uint32(0)), axis=0, dtype=jnp.uint32)
        return jnp.sum(slots.reshape(dim, -1), axis=1, dtype=jnp.uint32)

    def draw_whole_noise(self, shape: tuple[int, ...], users: jax.Array, *, key: jax.Array) -> jax.Array:
        """All noise on the sum, in integers: the parts of all clients together."""
        return skellam.draw_skellam(self.part_variance, shape, key=key, times=users)

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the estimate at zero updates, from all clients' noise.

        Zeros are encoded without rounding.
        """
        return math.sqrt(self.part_variance / size) / self.require("scale")

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The noisy sum that the analyzer sees, and how well the shares hide the rest."""
        crowd = cohort.crowd()
        shares = self.require("shares")
        encoding = self.encoding(dim)
        mechanism = events.SplitAndMix(
            num_users=crowd,
            coordinates=dim,
            clip_norm=encoding.clip_norm,
            scale=encoding.scale,
            noise_variance=self.part_variance * max(1, crowd - cohort.colluders),
            modulus=self.require("modulus"),
            shares=shares,
            colluders=cohort.colluders,
            colluding_slots=self._colluding_slots(shares),
            rounding_tail=encoding.rounding_tail,
            neighbors=neighbors,
        )
        scope = self._scope(cohort, encoding, neighbors)
        return View(round=Round(mechanism=mechanism, participation=cohort.participation), scope=scope)

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """Nothing is certified: all shares of the update with a small part of the noise."""
        return NonPrivate(reason=_ALL_SHARES)

    def slots_seen(self, dim: int) -> DataIndependent:
        """Slots tell nothing: every client fills every slot."""
        return SLOTS_TELL_NOTHING

    def _scope(self, cohort: Cohort, encoding: skellam.Encoding, neighbors: Neighbors) -> Scope:
        """Whom the statement is about; refuses a Poisson sample whose size the number of shares tells."""
        if isinstance(cohort.participation, Poisson) and cohort.uploads is None:
            raise NotApplicable(
                "the number of shares tells how many users a Poisson sample has; with cohort.kind = 'secret' all upload"
            )
        colluding = self.colluding_shufflers
        return Scope(
            trust=Trust.SHUFFLE,
            adversary=f"analyzer with {colluding} of the shufflers" if colluding else "analyzer",
            neighbors=neighbors,
            unit=Unit.USER,
            assumptions=(
                "users draw fresh, independent noise and shares",
                f"the shares of every value are split among {self.shufflers} shufflers, so that none holds all of them",
                f"the {self.shufflers} shufflers do not all collude, with or without the analyzer, and "
                f"{f'at most {colluding}' if colluding else 'none'} of them colludes with the analyzer",
                "every share of every coordinate is permuted on its own, uniformly, with fresh randomness",
                f"a round counts only users whose shares all arrived, releases nothing unless there are at least "
                f"{cohort.min_size} of them, and {DROPOUT}",
                f"{enrolment_assumption(cohort)}; each honest user adds its part of the noise",
                rounding_assumption(encoding),
                *removal_assumption(neighbors, noise=True),
            ),
        )
