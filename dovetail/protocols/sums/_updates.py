"""What a client of secagg adds to a sum: its integers, with a part of the noise, or with a proof of their norm."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

from dovetail._jax import jax, jnp
from dovetail.mechanisms import ExactSampler, exact_skellam, skellam
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.protocols._contributions import Contribution
from dovetail.protocols.sums._skellam import WholeNoise
from dovetail.vdaf.pine import Pine

__all__ = ["EncodedUpdate", "ProvenUpdate"]

_HASHES = 2.0**45  # that a hostile user computes for a report, in what the statement says of robustness


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedUpdate(Contribution):
    """The encoded update, with `part` of the noise; `whole` is what an aggregator adds to its sum.

    Guarantees:
        `distance` and `noise_distance` cover the noise, the one thing that is not drawn exactly.
    """

    encoding: skellam.Encoding
    part: WholeNoise | None
    whole: WholeNoise | None
    modulus: int

    @property
    def length(self) -> int:
        """One integer per coordinate."""
        return self.encoding.dim

    @property
    def bits(self) -> int:
        """Those of the modulus."""
        return self.modulus.bit_length() - 1

    @property
    def distance(self) -> float:
        """That of the client's noise on every coordinate."""
        return 0.0 if self.part is None else self.length * self.part.distance

    @property
    def noise_distance(self) -> float:
        """That of the aggregator's noise on every coordinate."""
        return 0.0 if self.whole is None else self.length * self.whole.distance

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """The encoded update with the client's part of the noise."""
        if np.shape(x) != (self.length,):
            raise ValueError(f"expected an update of shape ({self.length},), got shape={np.shape(x)}")
        value = exact_skellam.encode(self.encoding, finite_or_zero(np.asarray(x)), sampler=sampler)
        if self.part is not None:
            value = value + self.part(self.length, sampler=sampler)
        return self._residues(value)

    def noise(self, *, sampler: ExactSampler) -> np.ndarray | None:
        """All noise, where aggregators bring it."""
        return None if self.whole is None else self._residues(self.whole(self.length, sampler=sampler))

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """The residues, with all noise in them."""
        return jnp.asarray(np.asarray(total, np.uint32))

    def _residues(self, value: np.ndarray) -> np.ndarray:
        return (value & (self.modulus - 1)).astype(np.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvenUpdate(EncodedUpdate):
    """The encoded update, with a proof of its norm (PINE); integers are signed.

    Guarantees:
        What proofs tell is within `distance` of what follows from public randomness.
        Refuses parameters for which the proof is not known to be sound, or the sum would wrap around in the field.

    References:
        Rothblum, Omri, Chen, Talwar (2023), "PINE: efficient verification of a Euclidean norm bound of a secret-shared
        vector"; docs/proofs/verified.md.
    """

    aggregators: int

    @property
    def squared_norm(self) -> int:
        """That of the norm that is accounted, rounded down: the one that rounding is repeated for."""
        return math.floor(Fraction(self.encoding.norm) ** 2)

    @property
    def pine(self) -> Pine:
        """The proof system."""
        return Pine.of(dim=self.length, squared=self.squared_norm, shares=self.aggregators)

    @property
    def distance(self) -> float:
        """That wraparound checks of an honest update fail and are drawn again: the zero-knowledge error."""
        return self.pine.layout.unlucky

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Of privacy, and of robustness."""
        error = math.ceil(math.log2(self.pine.soundness_error(_HASHES)))
        return (
            *super().assumptions,
            "HMAC-SHA256 and AES-128 in counter mode behave like random functions, for what a client's proof does not "
            "tell",
            "an aggregator answers one query about each report: it writes down the round's key before it answers",
            f"(robustness, not privacy) if all {self.aggregators} aggregators follow the protocol, an update longer "
            f"than the certified norm counts with probability at most 2^{error}, per report of a user that computes "
            "2^45 hashes",
        )

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """The residues, with all noise in them."""
        return super().tally(np.asarray(total, np.int64) & (self.modulus - 1), users)

    def _residues(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.int64)
