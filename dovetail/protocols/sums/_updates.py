"""What a client of secagg adds to a sum: its integers, with a part of the noise, or with a proof of their norm."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np

from dovetail._jax import jax, jnp
from dovetail.mechanisms import ExactSampler, exact_skellam, skellam
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.protocols._contributions import Contribution, proof_assumptions
from dovetail.protocols.sums._skellam import WholeNoise
from dovetail.vdaf.pine import Pine

__all__ = ["EncodedUpdate", "ProvenUpdate"]


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

    def __post_init__(self) -> None:
        _ = self.proof

    @property
    def squared_norm(self) -> int:
        """That of the norm that is accounted, rounded down: the one that rounding is repeated for."""
        return math.floor(Fraction(self.encoding.norm) ** 2)

    @property
    def proof(self) -> Pine:
        """Of the norm."""
        return Pine.of(dim=self.length, squared=self.squared_norm, shares=self.aggregators)

    @property
    def distance(self) -> float:
        """The zero-knowledge error of the proof."""
        return self.proof.knowledge_error

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Of privacy, and of robustness."""
        return (*super().assumptions, *proof_assumptions(self.proof, "an update longer than the certified norm"))

    def tally(self, total: np.ndarray, users: int) -> jax.Array:
        """The residues, with all noise in them."""
        return super().tally(np.asarray(total, np.int64) & (self.modulus - 1), users)

    def _residues(self, value: np.ndarray) -> np.ndarray:
        return value.astype(np.int64)
