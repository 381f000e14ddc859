"""Secure aggregation: a noisy sum of vectors by additive shares, of which all aggregators but one may collude.

A client clips its update to L2 norm `clip_norm`, encodes it in integers, and shares them additively between
`aggregators`: any but all of the shares are random numbers. Each aggregator adds up the shares of one agreed set of
users and hands on the sum; the sums add up to that of the users' integers, and nobody sees more. Skellam noise comes

- from the ``users``: each honest client of the enforced minimum adds an equal part of it to its integers, so that the
  sum bears no more noise than it needs;
- or from the ``aggregators``: each adds all of it to its own sum. The honest one's is enough and all that is counted
  on; nothing depends on how many users are honest or stay, and the sum bears the noise of all.

Where aggregators bring the noise, what a client shares is its encoded update and nothing else, so that it can prove the
norm: ``verified`` sums count only users who did (`dovetail.vdaf.pine`).

Aggregators' noise can be correlated between rounds, with `cohort.kind = "separated"`: each adds its own Gaussian rows
of C^-1 Z, rounded to integers (`CorrelatedNoise`). What it hands on is the rounding of a curator's noisy sum, since
clients' integers pass through the rounding unchanged.

The simulation forms a client's integers and their sum; deployed parties form the shares (`Protocol.contribution`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

import numpy as np

from dovetail import _validate
from dovetail._jax import jax, jnp
from dovetail.events import CorrelatedSum, DataIndependent, Mechanism, NonPrivate, Poisson, Round, SkellamSum, View
from dovetail.mechanisms import ExactSampler, exact_skellam, skellam
from dovetail.mechanisms.correlated import NoiseRows, draw_row, start_rows
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.protocols._base import Cohort
from dovetail.protocols._contributions import Contribution, proof_assumptions
from dovetail.protocols._correlation import CorrelatedNoise
from dovetail.protocols._scopes import SLOTS_TELL_NOTHING, enrolment_assumption, shares_scope
from dovetail.protocols.sums._skellam import (
    Collected,
    NoisySum,
    WholeNoise,
    removal_assumption,
    resolve_encoding,
    rounding_assumption,
)
from dovetail.shufflers import Layout, Reports, ShuffledReports
from dovetail.statements import Neighbors, NotApplicable, Scope
from dovetail.vdaf.pine import Pine

__all__ = ["EncodedUpdate", "ProvenUpdate", "SecAgg"]

_NOISE = ("users", "aggregators")
_OWN_NOISE = "all aggregators together see every share, and the noise of one client is too small to protect it"
_NO_NOISE = "all aggregators together see every share, and clients add no noise of their own"
_DRAWN_ONCE = (
    "the honest aggregator draws its noise once per round, adds it to its sum before anyone sees that, and sends the "
    "same sum again if it has to send it twice"
)
_ROUNDED_GAUSSIAN = (
    "an aggregator's noise is the rounding of Gaussian noise, drawn in floating point; a simulation rounds that of all "
    "aggregators together"
)
UNDEPLOYED = "correlated noise is simulated so far: to deploy this protocol set protocol.correlation = 'none'"
_DOWN = 1 - 1e-15  # rounds a product of a few numbers down


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedUpdate(Contribution):
    """The encoded update, with `part` of the noise; `whole` is the noise that an aggregator adds to its sum.

    One of the two is None: noise comes from users or from aggregators. Both are where rounds are `correlated`. Sums are
    read modulo `modulus`, a power of two.

    Guarantees:
        `total_variation` and `noise_total_variation` cover the noise, the one thing that is not drawn exactly.
    """

    encoding: skellam.Encoding
    part: WholeNoise | None
    whole: WholeNoise | None
    modulus: int
    correlated: bool = False

    @property
    def length(self) -> int:
        """How many integers a client adds: one per coordinate."""
        return self.encoding.dim

    @property
    def bits(self) -> int:
        """The bits of an integer below the modulus, which is 2^bits."""
        return self.modulus.bit_length() - 1

    @property
    def total_variation(self) -> float:
        """How far a client's noise, over all coordinates, is from Skellam noise in total variation, at most.

        0 where clients bring no noise.
        """
        return 0.0 if self.part is None else self.length * self.part.distance

    @property
    def noise_total_variation(self) -> float:
        """How far an aggregator's noise, over all coordinates, is from Skellam noise in total variation, at most.

        0 where aggregators bring no noise.
        """
        return 0.0 if self.whole is None else self.length * self.whole.distance

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """Client: its encoded update with its part of the noise, as residues; `budget` is not used."""
        if np.shape(x) != (self.length,):
            raise ValueError(f"expected an update of shape ({self.length},), got shape={np.shape(x)}")
        value = exact_skellam.encode(self.encoding, finite_or_zero(np.asarray(x)), sampler=sampler)
        if self.part is not None:
            value = value + self.part(self.length, sampler=sampler)
        return self._residues(value)

    def noise(self, *, sampler: ExactSampler) -> np.ndarray | None:
        """Aggregator: all noise of the round, as residues; None where clients bring it.

        Refuses noise that takes back that of earlier rounds, which a round by itself does not know.
        """
        if self.correlated:
            raise NotApplicable(UNDEPLOYED)
        return None if self.whole is None else self._residues(self.whole(self.length, sampler=sampler))

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """Analyzer: the sum as residues, with all noise in them."""
        return jnp.asarray(np.asarray(total, np.uint32))

    def _residues(self, value: np.ndarray) -> np.ndarray:
        """Integers modulo `modulus`, uint32."""
        return (value & (self.modulus - 1)).astype(np.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvenUpdate(EncodedUpdate):
    """The encoded update, with a proof of its norm (PINE); integers are signed.

    Guarantees:
        What proofs tell is within `total_variation` of what follows from public randomness.
        Refuses parameters for which the proof is not known to be sound, or the sum would wrap around in the field.

    References:
        Rothblum, Omri, Chen, Talwar (2023), "PINE: efficient verification of a Euclidean norm bound of a secret-shared
        vector"; docs/proofs/verified.md.
    """

    aggregators: int

    def __post_init__(self) -> None:
        _ = self.proof

    @property
    def squared_norm(self) -> int:
        """The largest squared norm of an encoded update: that of the accounted norm, rounded down.

        Rounding is repeated until the integers meet it, so honest updates always do.
        """
        return math.floor(Fraction(self.encoding.norm) ** 2)

    @property
    def proof(self) -> Pine:
        """The proof that the integers have at most the certified norm."""
        return Pine.shipped_variant(dim=self.length, squared=self.squared_norm, shares=self.aggregators)

    @property
    def total_variation(self) -> float:
        """The zero-knowledge error of the proof: clients that prove their norm bring no noise."""
        return self.proof.zero_knowledge_error

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the privacy and the robustness of the verified sum rest on."""
        return (*super().assumptions, *proof_assumptions(self.proof, "an update longer than the certified norm"))

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """Analyzer: the signed sum as residues modulo `modulus`, with all noise in them."""
        return super().tally(np.asarray(total, np.int64) & (self.modulus - 1), users)

    def _residues(self, value: np.ndarray) -> np.ndarray:
        """The integers as they are, int64: residues are taken of their sum, for the proof is about signed integers."""
        return value.astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecAgg(CorrelatedNoise, NoisySum):
    """Central noise without a curator, and with no more trust than that not all aggregators collude.

    `noise_multiplier` is the standard deviation of the certified noise on a coordinate of the sum, over `clip_norm`:
    that of all honest clients together, or that of one aggregator.

    Guarantees:
        The estimate is unbiased for the mean of the clipped updates, but for `mechanisms.skellam.Encoding.bias`.
        The noise of the enforced minimum of honest clients, or of one aggregator, has at least the declared variance.
        Refuses one aggregator, which would hold all shares, and a modulus in which the sum may wrap around.
        Deployed and `verified`, a client that counts adds integers of at most the certified norm, but for the soundness
        error that the statement names, if all aggregators follow the protocol.

    References:
        Agarwal, Kairouz, Liu (NeurIPS 2021); Kairouz, Liu, Steinke (ICML 2021); Corrigan-Gibbs, Boneh (NSDI 2017).
    """

    name: ClassVar[str] = "secagg"
    references: ClassVar[tuple[str, ...]] = ("AKL21",)
    undeployed: ClassVar[str] = "shares sums between aggregators and has no messages for a shuffler"
    same_noise_as: ClassVar[str | None] = "split_and_mix"
    trust_settings: ClassVar[tuple[str, ...] | None] = ("aggregators", "noise", "verified")

    aggregators: int = 2
    """Number of aggregators between which sums are shared; all but one may collude with the analyzer."""
    noise: Literal["users", "aggregators"] = "users"
    """Who adds the noise: `users`, each a part, or `aggregators`, each all of it."""
    verified: bool = False
    """Deployed users prove to the aggregators that what they share is in range (with `noise = "aggregators"`: no longer
    than the clip norm), and count only then."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_correlation()
        _validate.one_of(_NOISE, noise=self.noise)
        _validate.integer(aggregators=self.aggregators)
        if self.aggregators < 2:
            raise ValueError(f"expected aggregators >= 2 (one would hold all shares), got {self.aggregators}")
        if self.honest is not None and not self.has_users_noise:
            raise ValueError(f"expected no honest users to count with noise='aggregators', got honest={self.honest}")

        if self.verified and self.has_users_noise:
            raise ValueError(
                "expected protocol.noise = 'aggregators' with verified = true (the noise of users cannot be told from "
                "a long update), got noise='users'"
            )

    @classmethod
    def variants(cls, dim: int, num_users: int) -> list[dict[str, Any]]:
        """What tests and audits run: noise from users (the usual way, so first), and from three aggregators."""
        return [{}, {"noise": "aggregators", "aggregators": 3}]

    @property
    def has_users_noise(self) -> bool:
        """Whether clients bring the noise."""
        return self.noise == "users"

    @property
    def needs_minimum(self) -> bool:
        """Whether the statement counts on a minimum of users: it does where they bring the noise."""
        return self.has_users_noise

    def noise_scales(self, sizes: Sequence[int]) -> tuple[float, ...]:
        """Factors of 1 for rounds of any sizes, where aggregators bring the noise.

        Users' noise needs rounds of one size.
        """
        return super().noise_scales(sizes) if self.has_users_noise else (1.0,) * len(sizes)

    def settle(self, cohort: Cohort, dim: int) -> Self:
        """Scale and modulus for this cohort, and the coefficients of correlated noise.

        Where clients bring the noise, every honest one of the cohort's minimum adds an equal part of it.
        """
        self._check_num_aggregators(cohort)
        obstacle = "with protocol.noise = 'aggregators' only, got 'users'" if self.has_users_noise else None
        correlated = self.settle_correlation(cohort, obstacle=obstacle)
        counted = (
            dataclasses.replace(correlated, honest=self.count_honest(cohort)) if self.has_users_noise else correlated
        )
        scale, modulus = resolve_encoding(
            counted, dim=dim, num_users=cohort.max_uploads, noise_std=counted._std_of_all_noise(cohort.max_uploads)
        )
        return dataclasses.replace(counted, scale=scale, modulus=modulus)

    def _std_of_all_noise(self, users: int) -> float:
        """The largest standard deviation of all noise on a coordinate of the sum of so many users, in the data's units.

        What is certified is less: the noise of `honest` users, or of one aggregator.
        """
        std = self.std * math.sqrt(users / self.require("honest") if self.has_users_noise else self.aggregators)
        return std * math.hypot(*(self.coefficients or (1.0,)))

    def _check_num_aggregators(self, cohort: Cohort) -> None:
        """Refuse a cohort whose number of aggregators is not the protocol's."""
        if cohort.aggregators not in (None, self.aggregators):
            raise ValueError(
                f"expected protocol.aggregators={cohort.aggregators}, as many as there are, got {self.aggregators}"
            )

    @property
    def whole_variance(self) -> float:
        """The variance of one aggregator's noise on a coordinate, in squared integers."""
        return float((self.std * self.require("scale")) ** 2)

    def layout(self, dim: int) -> Layout:
        """One slot for each integer of a client; there is no shuffler."""
        return Layout(slots=dim, reports_per_client=dim, shufflers=0)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Reports:
        """The encoded update, with the client's part of the noise if clients bring it: what its shares add up to."""
        key_round, key_noise, _ = self._split_client_key(key)
        value = self.encoding(len(x))(x, key=key_round)
        if self.has_users_noise:
            value += skellam.draw_skellam(self.part_variance, x.shape, key=key_noise)
        return Reports(slot=None, value=skellam.to_residues(value), valid=jnp.ones((), bool))

    def tally(self, reports: ShuffledReports, dim: int) -> jax.Array | Collected:
        """The sum of the clients' integers modulo 2^32; aggregators that bring the noise have not added it yet."""
        valid = reports.valid if reports.valid.ndim > 1 else reports.valid[:, None]
        total = jnp.sum(jnp.where(valid, reports.value, jnp.uint32(0)), axis=0, dtype=jnp.uint32)
        return total if self.has_users_noise else Collected(total, jnp.sum(valid[:, 0], dtype=jnp.int32))

    def init(self, dim: int) -> NoiseRows | tuple[()]:
        """The state before the first round: no rows of correlated noise, or nothing."""
        return () if self.coefficients is None else start_rows(self.coefficients, dim)

    def finish(self, collected: Collected, *, key: jax.Array) -> Any:
        """The residues with all noise on them; what was collected, where earlier rounds decide about the noise."""
        return collected if self.is_correlated else super().finish(collected, key=key)

    def public_state(self, state: Any) -> tuple[()]:
        """Nothing: rows of noise are secrets of the aggregators."""
        return ()

    def skip(self, state: Any, *, key: jax.Array) -> Any:
        """The state after a round that is not released: with correlated noise it has drawn its row all the same."""
        return state if self.coefficients is None else draw_row(state, self.coefficients, key=key)[1]

    def draw_whole_noise(self, shape: tuple[int, ...], users: jax.Array, *, key: jax.Array) -> jax.Array:
        """All noise on the sum: every client's part, or every aggregator's noise."""
        if self.has_users_noise:
            return skellam.draw_skellam(self.part_variance, shape, key=key, times=users)
        return skellam.draw_skellam(self.whole_variance, shape, key=key, times=self.aggregators)

    def estimate(self, tally: jax.Array | Collected, size: int, state: Any, *, key: jax.Array) -> tuple[jax.Array, Any]:
        """The sum over the planned size; one without noise gets that of the aggregators here.

        Of correlated noise the rows of all aggregators are drawn as one, of their joint size.
        """
        if not isinstance(tally, Collected):
            return super().estimate(tally, size, state, key=key)
        if self.coefficients is None:
            return super().estimate(self.finish(tally, key=key), size, state, key=key)
        rows, state = draw_row(state, self.coefficients, key=key)
        noise = jnp.round(math.sqrt(self.aggregators * self.whole_variance) * rows).astype(jnp.int32)
        return super().estimate(tally.residues + skellam.to_residues(noise), size, state, key=key)

    def noise_std(self, size: int, dim: int) -> float:
        """The standard deviation of the estimate at zero updates, from all noise (if correlated, in the first round).

        Zeros are encoded without rounding.
        """
        coefficients = self.coefficients or (1.0,)
        return self._std_of_all_noise(size) * (coefficients[0] / math.hypot(*coefficients)) / size

    def contribution(self, cohort: Cohort, dim: int) -> Contribution:
        """What a client shares: its encoded update, with its part of the noise or with a proof of its norm."""
        self._check_num_aggregators(cohort)
        part = WholeNoise(self.part_variance) if self.has_users_noise else None
        whole = None if self.has_users_noise or self.is_correlated else WholeNoise(self.whole_variance)
        common: dict[str, Any] = {
            "encoding": self.encoding(dim),
            "part": part,
            "whole": whole,
            "modulus": self.require("modulus"),
            "correlated": self.is_correlated,
        }
        return ProvenUpdate(**common, aggregators=self.aggregators) if self.verified else EncodedUpdate(**common)

    def view(self, cohort: Cohort, dim: int, *, neighbors: Neighbors) -> View:
        """The noisy sum, all that the analyzer and all aggregators but one see beside random numbers."""
        self._check_num_aggregators(cohort)
        encoding = self.encoding(dim)
        self._refuse_wrapping(cohort, dim)
        mechanism = self._mechanism(cohort, encoding, neighbors)
        scope = self._scope(cohort, encoding, neighbors)
        return View(round=Round(mechanism=mechanism, participation=cohort.participation), scope=scope)

    def _mechanism(self, cohort: Cohort, encoding: skellam.Encoding, neighbors: Neighbors) -> Mechanism:
        """The event of a round: the sum with the noise that is counted on."""
        if self.coefficients is not None:
            return CorrelatedSum(
                coordinates=encoding.dim,
                clip_norm=encoding.clip_norm,
                scale=encoding.scale,
                std=self.std * encoding.scale * _DOWN,
                coefficients=self.coefficients,
                rounding_tail=encoding.rounding_tail,
                neighbors=neighbors,
            )
        return SkellamSum(
            num_users=cohort.crowd() if self.has_users_noise else 0,
            colluders=cohort.colluders if self.has_users_noise else 0,
            coordinates=encoding.dim,
            clip_norm=encoding.clip_norm,
            scale=encoding.scale,
            noise_variance=self._certified_variance(cohort),
            modulus=self.require("modulus"),
            rounding_tail=encoding.rounding_tail,
            neighbors=neighbors,
        )

    def _certified_variance(self, cohort: Cohort) -> float:
        """The variance of the noise that is counted on, in squared integers."""
        if self.has_users_noise:
            return self.part_variance * max(1, cohort.crowd() - cohort.colluders)
        return self.whole_variance

    def _refuse_wrapping(self, cohort: Cohort, dim: int) -> None:
        """Refuse a cohort that is larger than the one that scale and modulus were chosen for."""
        resolve_encoding(
            self, dim=dim, num_users=cohort.max_uploads, noise_std=self._std_of_all_noise(cohort.max_uploads)
        )

    def own_reports(self, cohort: Cohort, dim: int) -> Mechanism:
        """Nothing is certified: all shares of the update, with a small part of the noise at most."""
        return NonPrivate(reason=_OWN_NOISE if self.has_users_noise else _NO_NOISE)

    def slots_seen(self, dim: int) -> DataIndependent:
        """Slots tell nothing: every client shares every coordinate."""
        return SLOTS_TELL_NOTHING

    def _scope(self, cohort: Cohort, encoding: skellam.Encoding, neighbors: Neighbors) -> Scope:
        """Whom the statement is about; refuses a Poisson sample whose size aggregators see."""
        if isinstance(cohort.participation, Poisson) and cohort.uploads is None:
            raise NotApplicable(
                "aggregators see how many users a Poisson sample has; with cohort.kind = 'secret' all upload"
            )
        honest = (f"{enrolment_assumption(cohort)}; each honest user adds its part of the noise",)
        return shares_scope(
            cohort,
            neighbors,
            *(honest if self.has_users_noise else (_DRAWN_ONCE,)),
            *((_ROUNDED_GAUSSIAN,) if self.is_correlated else ()),
            *self.correlation_in_words(),
            rounding_assumption(encoding),
            *removal_assumption(neighbors, noise=self.has_users_noise),
            aggregators=self.aggregators,
            users_noise=self.has_users_noise,
        )
