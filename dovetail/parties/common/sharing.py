"""How contributions are shared, added up and read: in integers modulo a power of two, or in a field with proofs.

Everybody asks the same object: the user splits, aggregators check and add up, the analyzer reads. A verified upload is
the eight bytes that every share begins with (`shares`), the public share, and the aggregator's own share with its share
of the proofs, as `vdaf.pine` or `vdaf.levels` writes them.
"""

from __future__ import annotations

import abc
import hashlib
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from dovetail.parties.common import shares
from dovetail.parties.common.wire import Malformed
from dovetail.protocols import Contribution
from dovetail.vdaf.field import FIELD64, Malencoded
from dovetail.vdaf.systems import ProofSystem, SharedReport, Unlucky

__all__ = ["PlainSharing", "Sharing", "VerifiedSharing", "proof_nonce", "sharing_of"]

_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_NONCE = 16  # bytes


def proof_nonce(task_id: bytes, round: int, sender: bytes, report: bytes) -> bytes:
    """What binds a proof to one report of one user in one round of one task."""
    parts = b"dovetail proof\0", task_id, round.to_bytes(4, "big"), sender, report
    return hashlib.sha256(b"".join(parts)).digest()[:_NONCE]


class Sharing(abc.ABC):
    """One way to share a contribution between so many aggregators."""

    def __init__(self, shared: Contribution, count: int) -> None:
        self._length, self._bits, self._count = shared.length, shared.bits, count

    @abc.abstractmethod
    def size(self, index: int) -> int:
        """Bytes of what the aggregator with this index gets."""

    @property
    @abc.abstractmethod
    def sum_size(self) -> int:
        """Bytes of an aggregator's sum."""

    @abc.abstractmethod
    def split(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """User: what every aggregator gets of a contribution."""

    @abc.abstractmethod
    def check(self, content: bytes, index: int) -> None:
        """Aggregator: refuse what has another form."""

    @abc.abstractmethod
    def nothing(self) -> np.ndarray:
        """Aggregator: the sum of nobody's shares."""

    @abc.abstractmethod
    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """Aggregator: add what it got from a user to a running sum, in place."""

    @abc.abstractmethod
    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """Aggregator: add the sum of other users' shares to a running sum, in place."""

    @abc.abstractmethod
    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """Aggregator: the sum that it hands on, with its noise."""

    @abc.abstractmethod
    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """Analyzer: a sum as arrays that add up, without reduction, over all aggregators."""

    @abc.abstractmethod
    def joined(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """Analyzer: what `Contribution.tally` takes, from what these arrays add up to."""


class PlainSharing(Sharing):
    """Integers modulo 2^bits: the last aggregator gets them packed, the others seeds."""

    def size(self, index: int) -> int:
        """A seed, or packed integers."""
        return shares.share_size(self._length, self._bits, last=self._last(index))

    @property
    def sum_size(self) -> int:
        """Packed integers."""
        return shares.share_size(self._length, self._bits, last=True)

    def split(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """Seeds, and what is left."""
        return shares.split(values, self._bits, self._count, random_bytes=random_bytes)

    def check(self, content: bytes, index: int) -> None:
        """Its form is all there is to check."""
        shares.check_share(content, self._length, self._bits, last=self._last(index))

    def nothing(self) -> np.ndarray:
        """Zeros."""
        return np.zeros(self._length, np.uint32)

    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """Modulo 2^32."""
        shares.add_share(total, content, self._bits, last=self._last(index))

    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """Modulo 2^32."""
        total += other

    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """In the form of a packed share."""
        return shares.encode_sum(total if noise is None else total + noise, self._bits)

    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """The residues."""
        return [shares.decode_sum(data, self._length, self._bits)]

    def joined(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """Modulo 2^bits."""
        return added[0] & np.uint32(2**self._bits - 1)

    def _last(self, index: int) -> bool:
        return index == self._count - 1


class VerifiedSharing(Sharing):
    """Elements of a field, with a proof that they are integers as the contribution says.

    Guarantees:
        A report that has the form of one, and whose proof all aggregators accept, adds such integers to the sum, but
        for the proof's soundness error.
    """

    def __init__(self, shared: Contribution, count: int) -> None:
        super().__init__(shared, count)
        if shared.proof is None or shared.proof.shares != count:
            raise ValueError(f"expected a contribution with proofs for {count} aggregators, got another one")
        self.proof: ProofSystem = shared.proof

    def size(self, index: int) -> int:
        """Head, public share, own share."""
        return shares.FIELD_HEAD + self.proof.public_size + self.proof.share_size(index)

    @property
    def sum_size(self) -> int:
        """Head, and elements."""
        return shares.FIELD_HEAD + FIELD64.size * self._length

    def split(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """Shares with proofs; drawn again where the wraparound checks fail, less often than once in 2^100."""
        while True:
            try:
                public, parts = self.proof.shard(values, nonce, random_bytes(self.proof.rand_size))
            except Unlucky:
                continue
            return [self._head(index) + public + part for index, part in enumerate(parts)]

    def check(self, content: bytes, index: int) -> None:
        """Lengths, and that elements are below the modulus."""
        if content[: shares.FIELD_HEAD] != self._head(index):
            raise Malformed(f"expected a share of {self._length} field elements with proof, got another one")
        try:
            self.proof.check(index, self.report(content, bytes(_NONCE)))
        except Malencoded as error:
            raise Malformed(str(error)) from error

    def report(self, content: bytes, nonce: bytes) -> SharedReport:
        """What is verified."""
        body = content[shares.FIELD_HEAD :]
        return SharedReport(nonce, body[: self.proof.public_size], body[self.proof.public_size :])

    def nothing(self) -> np.ndarray:
        """Zeros."""
        return FIELD64.zeros(self._length)

    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """In the field."""
        self.merge(total, self.proof.output(index, self.report(content, b"").share))

    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """In the field."""
        total[...] = FIELD64.add(total, other)

    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """Head, and elements."""
        noisy = total if noise is None else FIELD64.add(total, FIELD64.elements(noise))
        return self._head(0) + FIELD64.encode(noisy)

    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """The lower and the upper halves of the elements."""
        if len(data) != self.sum_size or data[: shares.FIELD_HEAD] != self._head(0):
            raise Malformed(f"expected a sum of {self._length} field elements, got another one")
        try:
            found = FIELD64.decode(data[shares.FIELD_HEAD :])
        except Malencoded as error:
            raise Malformed(str(error)) from error
        return [found & _LOW, found >> _HALF]

    def joined(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """As signed integers."""
        high = FIELD64.mul(added[1], FIELD64.scalar(2**32))
        return FIELD64.centred(FIELD64.add(added[0], high))

    def _head(self, index: int) -> bytes:
        return shares.field_head(self._length, packed=index == 0)


def sharing_of(shared: Contribution, count: int) -> Sharing:
    """How a contribution is shared between so many aggregators."""
    return (PlainSharing if shared.proof is None else VerifiedSharing)(shared, count)
