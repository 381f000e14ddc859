"""Vectors of small integers with a proof: Prio3's SumVec over the 64-bit field, for several proofs and reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from dovetail.vdaf.circuits import SumVec
from dovetail.vdaf.field import FIELD64
from dovetail.vdaf.flp import FullyLinearProof
from dovetail.vdaf.prio3 import Prio3
from dovetail.vdaf.systems import Queried, SharedReport
from dovetail.vdaf.xof import SEED, HmacSha256Aes128

__all__ = ["LevelProofs"]

_NUMBER = 0xFFFFFFFF  # of no public variant
_CONTEXT = b"dovetail"
_LARGEST_CHUNKS = 4096


@dataclasses.dataclass(frozen=True, eq=False)
class LevelProofs:
    """That each of `size` integers is from 0 to `largest`: a `ProofSystem` of two proofs, with the shortest chunks.

    Guarantees:
        Honest reports are accepted, but for test points that are roots of unity.
        What aggregators tell each other about an honest report is uniform, given public randomness.
    """

    prio3: Prio3
    chunk: int

    @classmethod
    @functools.lru_cache(maxsize=32)
    def shipped_variant(cls, *, size: int, largest: int, shares: int = 2) -> LevelProofs:
        """The variant that ships: Prio3 over the 64-bit field, with the chunk length that makes proofs shortest.

        Arguments:
            size: integers in a report.
            largest: the largest that an integer may be; the smallest is 0.
            shares: how many aggregators there are.
        """
        length = size * largest.bit_length()
        chunks = sorted({-(-length // rows) for rows in range(1, 1 + min(length, _LARGEST_CHUNKS))})

        def flp(chunk: int) -> FullyLinearProof:
            return FullyLinearProof(SumVec(FIELD64, size=size, largest=largest, chunk=chunk), "values")

        chunk = min(chunks, key=lambda chunk: flp(chunk).proof_length)
        circuit = SumVec(FIELD64, size=size, largest=largest, chunk=chunk)
        proof = FullyLinearProof(circuit, "values")
        return cls(Prio3(proof, circuit, _NUMBER, HmacSha256Aes128, shares=shares, proofs=2, context=_CONTEXT), chunk)

    @property
    def shares(self) -> int:
        """How many aggregators there are."""
        return self.prio3.shares

    @property
    def num_elements(self) -> int:
        """Field elements that an aggregator works with per report: one for each bit of each integer."""
        return self.prio3.proof.circuit.length

    @property
    def public_size(self) -> int:
        """Bytes of the public share: a part of the joint randomness, `SEED` bytes, for each aggregator."""
        return SEED * self.shares

    @property
    def rand_size(self) -> int:
        """Random bytes that a user draws."""
        return self.prio3.rand_size

    @property
    def verifier_size(self) -> int:
        """Bytes of a verifier share: both proofs' verifiers, and a part of the joint randomness."""
        return FIELD64.size * self.prio3.proof.verifier_length * self.prio3.proofs + SEED

    @property
    def zero_knowledge_error(self) -> float:
        """Zero, the zero-knowledge error: what the proofs tell follows exactly from public randomness."""
        return 0.0

    def soundness_error(self, hashes: float) -> float:
        """The probability that a report with an integer out of range is accepted, at most; rounded up.

        Joint randomness hides it with probability chunk / modulus per proof, the test point with 2 order / modulus
        (`docs/proofs/verified.md`, 5). The factor 1 + 1e-9 covers the rounding of this sum.

        Arguments:
            hashes: how many hashes the sender computes to find lucky joint randomness.
        """
        flp = self.prio3.proof
        modulus = FIELD64.modulus
        joint = self.chunk / modulus
        point = 2 * flp.order / (modulus - flp.order)
        return min(1.0, (hashes * joint**2 + 2 * min(1.0, hashes * joint) * point + point**2) * (1 + 1e-9))

    def share_size(self, index: int) -> int:
        """Bytes of an aggregator's share: seed and blind, or, for the leader (index 0), all elements and a blind."""
        flp = self.prio3.proof
        whole = FIELD64.size * (flp.circuit.length + self.prio3.proofs * flp.proof_length)
        return 2 * SEED if index else whole + SEED

    def shard(self, integers: np.ndarray, nonce: bytes, rand: bytes) -> tuple[bytes, list[bytes]]:
        """User: the public share, and each aggregator's share, the leader's first.

        `rand` has `rand_size` random bytes.
        """
        return self.prio3.shard(integers, nonce, rand)

    def check_encoding(self, index: int, report: SharedReport) -> None:
        """Refuse, with `Malencoded`, a report whose shares have another length or elements that are not canonical."""
        self.prio3.check_encoding(index, report.public, report.share)

    def query(self, key: bytes, index: int, reports: Sequence[SharedReport]) -> list[Queried]:
        """An aggregator's answers about its shares of some reports, in their order.

        `key` is the round's, shared by all.
        """
        states = [self.prio3.verify_init(key, index, *report) for report in reports]
        return [Queried(state.seed, verifier) for state, verifier in states]

    def decide(self, verifiers: Sequence[Sequence[bytes]]) -> list[bytes | None]:
        """For every report, the seed that all must have found; None if it is refused, or a verifier has no form."""
        return [
            self.prio3.verifier_shares_to_message(list(one)) if self._is_well_formed(one) else None for one in verifiers
        ]

    def public_share_of(self, verifiers: Sequence[bytes]) -> bytes:
        """The public share that fits these verifier shares of one report: its parts of the joint randomness."""
        return b"".join(one[-SEED:] for one in verifiers)

    def output_share(self, index: int, share: bytes) -> np.ndarray:
        """The aggregator's share of the integers, (size,) elements; `share` has passed `check`."""
        return self.prio3.output_share(index, share)

    def _is_well_formed(self, row: Sequence[bytes]) -> bool:
        """Whether there is a verifier share of each aggregator, of the right length and made of canonical elements."""
        return len(row) == self.shares and all(
            len(one) == self.verifier_size and bool(np.all(FIELD64.decode_unchecked(one[:-SEED]) < FIELD64.modulus))
            for one in row
        )
