"""Prio3: vectors that a circuit accepts, added up by aggregators that verify it (draft-irtf-cfrg-vdaf-20).

The *leader*, aggregator 0, gets its share of vector and proof, the others a seed each. Circuits that need joint
randomness get it from a hash of every aggregator's share under a blind: nobody can choose a vector after the
randomness. A user says what the hashes of the others are; that it told the truth is checked with the proof.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import numpy as np

from dovetail import _validate
from dovetail.vdaf.field import Field, Malencoded
from dovetail.vdaf.flp import FullyLinearProof
from dovetail.vdaf.xof import SEED, Xof

__all__ = ["NONCE", "Encoded", "Prio3", "Verifying"]

NONCE = 16  # bytes
_VERSION = 18  # of the draft's formats
_SHARE, _PROOF, _JOINT, _PROVE, _QUERY, _JOINT_SEED, _JOINT_PART = range(1, 8)


class Encoded(Protocol):
    """What turns measurements into vectors that a circuit accepts, and vectors into what is added up."""

    def encode(self, measurement: np.ndarray) -> np.ndarray:
        """The vector of a measurement."""
        ...

    def truncate(self, vector: np.ndarray) -> np.ndarray:
        """What aggregators add up: a linear function of the vector."""
        ...


class Verifying(NamedTuple):
    """An aggregator in the middle of a verification: its share of what is added up, and the joint seed it computed."""

    share: np.ndarray
    seed: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Prio3:
    """One variant, by its id, for so many aggregators and an application's context."""

    proof: FullyLinearProof
    valid_type: Encoded
    number: int
    xof: type[Xof]
    shares: int = 2
    proofs: int = 1
    context: bytes = b""

    def __post_init__(self) -> None:
        _validate.in_interval(2, 255, shares=self.shares)
        _validate.in_interval(1, 255, proofs=self.proofs)

    @property
    def field(self) -> Field:
        """The field that vectors are shared in."""
        return self.proof.circuit.field

    @property
    def rand_size(self) -> int:
        """Random bytes that a user draws: for each aggregator a seed, and a blind if there is joint randomness."""
        return SEED * self.shares * (2 if self._has_joint_randomness else 1)

    def shard(self, measurement: np.ndarray, nonce: bytes, rand: bytes) -> tuple[bytes, list[bytes]]:
        """The public share, and every aggregator's share, the leader's first; `rand` has `rand_size` uniform bytes."""
        if len(rand) != self.rand_size or len(nonce) != NONCE:
            raise ValueError(f"expected {self.rand_size} random bytes and a nonce of {NONCE}, got others")
        seeds = [rand[i : i + SEED] for i in range(0, len(rand), SEED)]
        step = 2 if self._has_joint_randomness else 1
        helpers = seeds[: step * (self.shares - 1) : step]
        blinds = seeds[1 : step * (self.shares - 1) : step]
        vector = self.valid_type.encode(measurement)
        left = vector
        parts = []
        for index, seed in enumerate(helpers, 1):
            share = self._vector_share(index, seed)
            left = self.field.sub(left, share)
            if self._has_joint_randomness:
                parts.append(self._joint_part(index, blinds[index - 1], share, nonce))
        leader_blind = seeds[-2] if self._has_joint_randomness else b""
        if self._has_joint_randomness:
            parts.insert(0, self._joint_part(0, leader_blind, left, nonce))
        proofs = self._prove(vector, seeds[-1], self._joint_randomness(parts))
        for index, seed in enumerate(helpers, 1):
            proofs = self.field.sub(proofs, self._proofs_share(index, seed))
        leader = self.field.encode(left) + self.field.encode(proofs) + leader_blind
        others = [seed + (blinds[i] if self._has_joint_randomness else b"") for i, seed in enumerate(helpers)]
        return b"".join(parts), [leader, *others]

    def verify_init(self, key: bytes, index: int, nonce: bytes, public: bytes, share: bytes) -> tuple[Verifying, bytes]:
        """An aggregator's first step: what it keeps, and the verifier share that it tells the others.

        Arguments:
            key: the round's, known to all aggregators and to no user.
            index: which aggregator it is; 0 is the leader.
            nonce: the report's.
            public: the public share.
            share: its own share.
        """
        vector, proofs, blind = self._expand_share(index, share)
        parts = self._joint_parts(public)
        part = b""
        if self._has_joint_randomness:
            part = self._joint_part(index, blind, vector, nonce)
            parts[index] = part
        joint = self._joint_randomness(parts)
        query = self.xof.expand(
            self.field, key, self._tag(_QUERY), bytes([self.proofs]) + nonce, self.proof.query_length * self.proofs
        ).reshape(self.proofs, -1)
        copies = np.broadcast_to(vector, (self.proofs, len(vector)))
        verifier = self.proof.query(copies, proofs.reshape(self.proofs, -1), query, joint, self.shares)
        return Verifying(self.valid_type.truncate(vector), self._joint_seed(parts)), self.field.encode(verifier) + part

    def verifier_shares_to_message(self, verifiers: list[bytes]) -> bytes | None:
        """The joint seed that follows from all verifier shares, in the aggregators' order.

        None if the report is refused.
        """
        size = self.field.size * self.proof.verifier_length * self.proofs
        total = self.field.zeros(self.proofs, self.proof.verifier_length)
        parts = []
        for one in verifiers:
            if len(one) != size + (SEED if self._has_joint_randomness else 0):
                raise Malencoded(f"expected a verifier share of another length, got {len(one)} bytes")
            total = self.field.add(total, self.field.decode(one[:size]).reshape(total.shape))
            parts.append(one[size:])
        return self._joint_seed(parts) if np.all(self.proof.decide(total)) else None

    def verify_next(self, state: Verifying, message: bytes | None) -> np.ndarray | None:
        """An aggregator's last step: its share of the sum; None if the message is not the seed that it computed."""
        return state.share if message is not None and message == state.seed else None

    def check_encoding(self, index: int, public: bytes, share: bytes) -> None:
        """Refuse, with `Malencoded`, public and own shares of another length, and elements that are not canonical."""
        self._joint_parts(public)
        self._elements_size(index, share)
        if index == 0:
            self.field.decode(share[: len(share) - (SEED if self._has_joint_randomness else 0)])

    def output_share(self, index: int, share: bytes) -> np.ndarray:
        """The aggregator's share of what is added up, (size,) elements; `share` has passed `check`."""
        if index:
            return self.valid_type.truncate(self._vector_share(index, share[:SEED]))
        return self.valid_type.truncate(self.field.decode(share[: self.field.size * self.proof.circuit.length]))

    @property
    def _has_joint_randomness(self) -> bool:
        """Whether the circuit needs joint randomness; without it there are no blinds, no parts and no seed."""
        return self.proof.circuit.joint > 0

    def _prove(self, vector: np.ndarray, seed: bytes, joint: np.ndarray) -> np.ndarray:
        """All proofs about a vector, one after the other, from the prover's seed."""
        length = self.proof.prove_length * self.proofs
        random = self.xof.expand(self.field, seed, self._tag(_PROVE), bytes([self.proofs]), length)
        copies = np.broadcast_to(vector, (self.proofs, len(vector)))
        return self.proof.prove(copies, random.reshape(self.proofs, -1), joint).reshape(-1)

    def _expand_share(self, index: int, share: bytes) -> tuple[np.ndarray, np.ndarray, bytes]:
        """The aggregator's share of the vector, its share of all proofs, and its blind (empty where there is none)."""
        length = self.proof.circuit.length
        whole = self._elements_size(index, share)
        if index:
            return self._vector_share(index, share[:SEED]), self._proofs_share(index, share[:SEED]), share[SEED:]
        elements = self.field.decode(share[:whole])
        return elements[:length], elements[length:], share[whole:]

    def _elements_size(self, index: int, share: bytes) -> int:
        """Bytes of a share without its blind; refuses one of another length."""
        elements = self.proof.circuit.length + self.proof.proof_length * self.proofs
        whole = SEED if index else self.field.size * elements
        blind = SEED if self._has_joint_randomness else 0
        if len(share) != whole + blind:
            raise Malencoded(f"expected a share of {whole + blind} bytes, got {len(share)}")
        return whole

    def _vector_share(self, index: int, seed: bytes) -> np.ndarray:
        """A helper's share of the vector, expanded from its seed."""
        return self.xof.expand(self.field, seed, self._tag(_SHARE), bytes([index]), self.proof.circuit.length)

    def _proofs_share(self, index: int, seed: bytes) -> np.ndarray:
        """A helper's share of all proofs, expanded from its seed."""
        length = self.proof.proof_length * self.proofs
        return self.xof.expand(self.field, seed, self._tag(_PROOF), bytes([self.proofs, index]), length)

    def _joint_parts(self, public: bytes) -> list[bytes]:
        """The parts of the joint randomness in a public share, one for each aggregator.

        None without joint randomness.
        """
        if len(public) != (SEED * self.shares if self._has_joint_randomness else 0):
            raise Malencoded(f"expected a public share of another length, got {len(public)} bytes")
        return [public[i : i + SEED] for i in range(0, len(public), SEED)]

    def _joint_part(self, index: int, blind: bytes, share: np.ndarray, nonce: bytes) -> bytes:
        """An aggregator's hash of its share of the vector, under its blind: its part of the joint randomness."""
        return self.xof.derive_seed(blind, self._tag(_JOINT_PART), bytes([index]), nonce, self.field.encode(share))

    def _joint_seed(self, parts: list[bytes]) -> bytes:
        """The joint seed that follows from all parts in order; empty without joint randomness."""
        return self.xof.derive_seed(bytes(SEED), self._tag(_JOINT_SEED), *parts) if self._has_joint_randomness else b""

    def _joint_randomness(self, parts: list[bytes]) -> np.ndarray:
        """The joint random elements of every proof, (proofs, joint), from all parts."""
        if not self._has_joint_randomness:
            return self.field.zeros(self.proofs, 0)
        length = self.proof.circuit.joint * self.proofs
        seed = self._joint_seed(parts)
        elements = self.xof.expand(self.field, seed, self._tag(_JOINT), bytes([self.proofs]), length)
        return elements.reshape(self.proofs, -1)

    def _tag(self, usage: int) -> bytes:
        """What keeps hashes for different usages, variants and applications apart."""
        return bytes([_VERSION, 0]) + self.number.to_bytes(4, "big") + usage.to_bytes(2, "big") + self.context
