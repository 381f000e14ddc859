"""The parameters of a variant of PINE, and what it derives from seeds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import Field
from dovetail.vdaf.flp import FullyLinearProof
from dovetail.vdaf.norms import NormBits, NormEquality, NormLayout, random_products
from dovetail.vdaf.xof import SEED, HmacSha256Aes128, Xof

__all__ = ["BASIS", "JOINT_PART", "JOINT_SEED", "PINE64", "PROVE", "WRAP_PART", "WRAP_SEED", "PineVariant"]

PINE64 = 0xFFFF1004
BASIS: Literal["coefficients"] = "coefficients"
_VERSION = 1
_SHARE, _PROOF, _JOINT, PROVE, _QUERY, JOINT_SEED, JOINT_PART, _WRAP, WRAP_SEED, WRAP_PART = range(1, 11)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PineVariant:
    """One variant, by its id, for so many aggregators."""

    layout: NormLayout
    chunk: int
    norm_chunk: int
    shares: int = 2
    proofs: int = 2
    norm_proofs: int = 1
    number: int = PINE64
    xof: type[Xof] = HmacSha256Aes128

    def __post_init__(self) -> None:
        _validate.in_interval(2, 255, shares=self.shares)
        _validate.in_interval(1, 255, proofs=self.proofs, norm_proofs=self.norm_proofs)

    @property
    def field(self) -> Field:
        """That of the layout."""
        return self.layout.field

    @functools.cached_property
    def flps(self) -> tuple[tuple[FullyLinearProof, int], tuple[FullyLinearProof, int]]:
        """The kinds of proofs, and how many of each."""
        norm, bits = NormEquality(self.layout, chunk=self.norm_chunk), NormBits(self.layout, chunk=self.chunk)
        return (FullyLinearProof(norm, BASIS), self.norm_proofs), (FullyLinearProof(bits, BASIS), self.proofs)

    def total_length(self, what: str) -> int:
        """Elements in all proofs, verifiers, and so on."""
        return sum(count * getattr(flp, what) for flp, count in self.flps)

    @property
    def counts(self) -> bytes:
        return bytes([self.norm_proofs, self.proofs])

    @property
    def verifier_size(self) -> int:
        """Bytes of a verifier share."""
        return self.field.size * self.total_length("verifier_length") + 2 * SEED

    @property
    def public_size(self) -> int:
        """Bytes of the public share."""
        return 2 * SEED * self.shares

    @property
    def rand_size(self) -> int:
        """Random bytes that a user draws."""
        return SEED * (4 * self.shares - 1)

    def share_size(self, index: int) -> int:
        """Bytes of an aggregator's share; the leader's, with index 0, is the long one."""
        return (
            4 * SEED if index else self.field.size * (self.layout.shared + self.total_length("proof_length")) + 2 * SEED
        )

    def cut(self, rows: np.ndarray, what: str) -> list[np.ndarray]:
        """Both kinds' part of every row, of shape (rows, proofs of that kind, length)."""
        lengths = [count * getattr(flp, what) for flp, count in self.flps]
        parts = np.split(rows, [lengths[0]], axis=-1)
        return [
            part.reshape(len(rows), count, part.shape[-1] // count)
            for part, (_, count) in zip(parts, self.flps, strict=True)
        ]

    def products(self, vector: np.ndarray, seed: bytes) -> np.ndarray:
        checks = self.layout.checks
        stream = self.xof(seed, self.tag(_WRAP)).next(checks * -(-len(vector) // 4))
        return random_products(self.field, vector, stream, checks)

    def parts_of(
        self, usage: int, vector: np.ndarray, shares: list[np.ndarray], blinds: list[bytes], nonce: bytes
    ) -> list[bytes]:
        """Every aggregator's hash of its share, the leader's first."""
        left = vector
        for share in shares:
            left = self.field.sub(left, share[: len(vector)])
        return [
            self.part(usage, index, blind, share[: len(vector)], nonce)
            for index, (blind, share) in enumerate(zip(blinds, [left, *shares], strict=True))
        ]

    def part(self, usage: int, index: int, blind: bytes, share: np.ndarray, nonce: bytes) -> bytes:
        return self.xof.seed(blind, self.tag(usage), bytes([index]), nonce, self.field.encode(share))

    def joint_seed(self, usage: int, parts: Sequence[bytes]) -> bytes:
        return self.xof.seed(bytes(SEED), self.tag(usage), *parts)

    def vector_share(self, index: int, seed: bytes, length: int | None = None) -> np.ndarray:
        size = self.layout.shared if length is None else length
        return self.xof.expand(self.field, seed, self.tag(_SHARE), bytes([index]), size)

    def proof_share(self, index: int, seed: bytes) -> np.ndarray:
        binder = self.counts + bytes([index])
        return self.xof.expand(self.field, seed, self.tag(_PROOF), binder, self.total_length("proof_length"))

    def query_randomness(self, key: bytes, nonce: bytes) -> np.ndarray:
        length = self.total_length("query_length")
        return self.xof.expand(self.field, key, self.tag(_QUERY), self.counts + nonce, length)

    def joint_randomness(self, seed: bytes) -> np.ndarray:
        length = self.proofs * NormBits.joint
        return self.xof.expand(self.field, seed, self.tag(_JOINT), bytes([self.proofs]), length)

    def tag(self, usage: int) -> bytes:
        return bytes([_VERSION]) + self.number.to_bytes(4, "big") + usage.to_bytes(2, "big")
