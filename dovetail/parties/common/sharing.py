"""How contributions are shared, added up and read: in integers modulo a power of two, or in a field with proofs.

Every party asks the same object, a `Sharing`: the user shards, aggregators check and add up, the analyzer unshards. A
verified upload is the eight bytes that every share begins with, the public share, and the aggregator's own share with
its share of the proofs, as `vdaf.pine` or `vdaf.levels` writes them.

Below the classes are additive shares of a vector of integers, as bytes: all but the last are seeds, the last makes up
the value. A share begins with eight bytes: the version of this format, the group (integers modulo 2^bits, or the 64-bit
field of verified sums), its bits, the form (a seed, or packed integers) and their number in four bytes, little endian.
What follows are the 32 bytes of a seed, or the integers, `bits` bits each, least bit first, one after the other without
gaps. A seed stands for the key stream of AES-128 in counter mode, its first half as the key and its second as the first
counter block, read as packed integers. `docs/wire.md` has test vectors.
"""

from __future__ import annotations

import abc
import hashlib
import secrets
import struct
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dovetail import _validate
from dovetail.parties.common.wire import Malformed
from dovetail.protocols import Contribution
from dovetail.vdaf.field import FIELD64, Malencoded
from dovetail.vdaf.systems import ProofSystem, SharedReport, Unlucky

__all__ = [
    "FIELD_HEAD",
    "SEED",
    "VERSION",
    "PlainSharing",
    "Sharing",
    "VerifiedSharing",
    "add_share",
    "check_share",
    "decode_sum",
    "encode_sum",
    "field_head",
    "pack",
    "proof_nonce",
    "shard_additively",
    "share_size",
    "sharing_of",
    "unpack",
]

_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)
_NONCE = 16  # bytes


def proof_nonce(task_id: bytes, round: int, sender: bytes, report: bytes) -> bytes:
    """The nonce that binds a proof to one report of one user in one round of one task."""
    parts = b"dovetail proof\0", task_id, round.to_bytes(4, "big"), sender, report
    return hashlib.sha256(b"".join(parts)).digest()[:_NONCE]


class Sharing(abc.ABC):
    """One way to share a contribution between aggregators.

    Arguments:
        shared: what is shared: how many integers, of how many bits.
        count: number of aggregators.
    """

    def __init__(self, shared: Contribution, count: int) -> None:
        self._length = shared.length
        self._bits = shared.bits
        self._count = count

    @abc.abstractmethod
    def size(self, index: int) -> int:
        """Bytes of what the aggregator with this index gets."""

    @property
    @abc.abstractmethod
    def sum_size(self) -> int:
        """Bytes of an aggregator's sum."""

    @abc.abstractmethod
    def shard(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """User: shard a contribution.

        Arguments:
            values: the integers of the contribution.
            nonce: what a proof is bound to (`proof_nonce`).
            random_bytes: where random bytes come from; tests put others in.

        Returns: for every aggregator, the share that it gets.
        """

    @abc.abstractmethod
    def check(self, content: bytes, index: int) -> None:
        """Aggregator: refuse a share that has not the form of one for this index."""

    @abc.abstractmethod
    def empty_sum(self) -> np.ndarray:
        """Aggregator: the sum of no shares at all, which others are added to."""

    @abc.abstractmethod
    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """Aggregator: add a user's share to a running sum, in place."""

    @abc.abstractmethod
    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """Aggregator: add the sum of other users' shares to a running sum, in place."""

    @abc.abstractmethod
    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """Aggregator: the sum as bytes for the analyzer, with the aggregator's noise if it adds any."""

    @abc.abstractmethod
    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """Analyzer: decode an aggregator's sum, as arrays that can be added up over aggregators without reduction."""

    @abc.abstractmethod
    def unshard(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """Analyzer: the integers that `Contribution.tally` takes.

        Arguments:
            added: the arrays of `read_sum`, added up over all aggregators.
        """


class PlainSharing(Sharing):
    """Integers modulo 2^bits: the last aggregator gets them packed, the others seeds."""

    def size(self, index: int) -> int:
        """Bytes of a seed, or of packed integers for the last one."""
        return share_size(self._length, self._bits, last=self._is_last(index))

    @property
    def sum_size(self) -> int:
        """Bytes of packed integers."""
        return share_size(self._length, self._bits, last=True)

    def shard(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """Seeds for all but the last, and packed integers that make up the value; nothing is bound to the nonce."""
        return shard_additively(values, self._bits, self._count, random_bytes=random_bytes)

    def check(self, content: bytes, index: int) -> None:
        """Refuse a share of another form; there is nothing else to check."""
        check_share(content, self._length, self._bits, last=self._is_last(index))

    def empty_sum(self) -> np.ndarray:
        """Zeros modulo 2^32."""
        return np.zeros(self._length, np.uint32)

    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """Add a share, modulo 2^32."""
        add_share(total, content, self._bits, last=self._is_last(index))

    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """Add a sum, modulo 2^32."""
        total += other

    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """The sum in the form of a packed share."""
        return encode_sum(total if noise is None else total + noise, self._bits)

    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """The residues modulo 2^bits."""
        return [decode_sum(data, self._length, self._bits)]

    def unshard(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """The added residues, reduced modulo 2^bits."""
        return added[0] & np.uint32(2**self._bits - 1)

    def _is_last(self, index: int) -> bool:
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
            proofs = "none" if shared.proof is None else f"those for {shared.proof.shares} aggregators"
            raise ValueError(f"expected a contribution with proofs for {count} aggregators, got {proofs}")
        self.proof: ProofSystem = shared.proof

    def size(self, index: int) -> int:
        """Bytes of head, public share and own share."""
        return FIELD_HEAD + self.proof.public_size + self.proof.share_size(index)

    @property
    def sum_size(self) -> int:
        """Bytes of head and field elements."""
        return FIELD_HEAD + FIELD64.size * self._length

    def shard(
        self, values: np.ndarray, *, nonce: bytes, random_bytes: Callable[[int], bytes] = secrets.token_bytes
    ) -> list[bytes]:
        """Shares with proofs; drawn anew where the wraparound checks fail, less often than once in 2^100."""
        while True:
            try:
                public, parts = self.proof.shard(values, nonce, random_bytes(self.proof.rand_size))
            except Unlucky:
                continue
            return [self._share_head(index) + public + part for index, part in enumerate(parts)]

    def check(self, content: bytes, index: int) -> None:
        """Refuse other lengths, and elements above the modulus; the proof is verified later."""
        if content[:FIELD_HEAD] != self._share_head(index):
            raise Malformed(
                f"this is not a share of {self._length} field elements with its proof: its first bytes differ"
            )
        try:
            self.proof.check_encoding(index, self.report_to_verify(content, bytes(_NONCE)))
        except Malencoded as error:
            raise Malformed(str(error)) from error

    def report_to_verify(self, content: bytes, nonce: bytes) -> SharedReport:
        """A share with its proof, as the proof system verifies it."""
        body = content[FIELD_HEAD:]
        return SharedReport(nonce, body[: self.proof.public_size], body[self.proof.public_size :])

    def empty_sum(self) -> np.ndarray:
        """Zeros of the field."""
        return FIELD64.zeros(self._length)

    def add(self, total: np.ndarray, content: bytes, index: int) -> None:
        """Add a share, in the field."""
        self.merge(total, self.proof.output_share(index, self.report_to_verify(content, b"").share))

    def merge(self, total: np.ndarray, other: np.ndarray) -> None:
        """Add a sum, in the field."""
        total[...] = FIELD64.add(total, other)

    def encode_sum(self, total: np.ndarray, noise: np.ndarray | None) -> bytes:
        """Head, and elements with the noise added in the field."""
        noisy = total if noise is None else FIELD64.add(total, FIELD64.elements(noise))
        return self._share_head(0) + FIELD64.encode(noisy)

    def read_sum(self, data: bytes) -> list[np.ndarray]:
        """The lower and the upper halves of the elements."""
        if len(data) != self.sum_size or data[:FIELD_HEAD] != self._share_head(0):
            raise Malformed(
                f"expected a sum of {self._length} field elements in {self.sum_size} bytes, got {len(data)} bytes"
            )
        try:
            elements = FIELD64.decode(data[FIELD_HEAD:])
        except Malencoded as error:
            raise Malformed(str(error)) from error
        return [elements & _LOW, elements >> _HALF]

    def unshard(self, added: Sequence[np.ndarray]) -> np.ndarray:
        """The sums as signed integers, from the added lower and upper halves."""
        high = FIELD64.mul(added[1], FIELD64.scalar(2**32))
        return FIELD64.center(FIELD64.add(added[0], high))

    def _share_head(self, index: int) -> bytes:
        return field_head(self._length, packed=index == 0)


def sharing_of(shared: Contribution, count: int) -> Sharing:
    """How a contribution is shared between so many aggregators: with proofs if it has any."""
    return (PlainSharing if shared.proof is None else VerifiedSharing)(shared, count)


VERSION = 1
SEED = 32  # bytes
_MODULO_POWER_OF_TWO, _FIELD64 = 0, 1
_SEEDED, _PACKED = 0, 1
_HEAD = struct.Struct("<BBBBI")
FIELD_HEAD = _HEAD.size
_BLOCK = 1 << 16  # integers at a time; a multiple of eight, so that blocks end with a byte


def shard_additively(
    values: np.ndarray, bits: int, count: int, *, random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> list[bytes]:
    """Shard a vector of integers additively.

    Arguments:
        values: integers below 2^bits, uint32.
        bits: bits of the group, 1 to 32.
        count: number of shares.
        random_bytes: where the seeds come from; tests put others in.

    Guarantees:
        They add up to the vector modulo 2^bits.
        All but one of them, whichever, tell nothing about the vector to whoever cannot tell AES-128 from random.
    """
    _validate.integer(count=count, bits=bits)
    _validate.at_least(2, count=count)
    _validate.in_interval(1, 32, bits=bits)
    seeds = [random_bytes(SEED) for _ in range(count - 1)]
    streams = [_Stream(seed) for seed in seeds]
    head = _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED, len(values))
    packed = []
    for low in range(0, len(values), _BLOCK):
        left = values[low : low + _BLOCK].astype(np.uint32)
        for stream in streams:
            left -= stream.next_integers(len(left), bits)
        packed.append(pack(left, bits))
    seeded = _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _SEEDED, len(values))
    return [*(seeded + seed for seed in seeds), head + b"".join(packed)]


def share_size(length: int, bits: int, *, last: bool) -> int:
    """Bytes of a share of `length` integers of `bits` bits: packed integers for the last one, seeds for the others."""
    return _HEAD.size + (_packed_size(length, bits) if last else SEED)


def check_share(share: bytes, length: int, bits: int, *, last: bool) -> None:
    """Refuse a share that has not the form of one of `length` integers modulo 2^bits."""
    size = share_size(length, bits, last=last)
    if len(share) != size:
        raise Malformed(f"expected a share of {size} bytes, got {len(share)} bytes")
    if _HEAD.unpack_from(share) != (VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED if last else _SEEDED, length):
        raise Malformed(
            f"this is not a share of {length} integers modulo 2^{bits}: its first bytes, {share[:8].hex()}, differ"
        )


def add_share(total: np.ndarray, share: bytes, bits: int, *, last: bool) -> None:
    """Add a share to a running sum, uint32 of the shares' length, in place; refuses a share of another form."""
    check_share(share, len(total), bits, last=last)
    body = memoryview(share)[_HEAD.size :]
    stream = None if last else _Stream(bytes(body))
    for low in range(0, len(total), _BLOCK):
        part = total[low : low + _BLOCK]
        if stream is not None:
            part += stream.next_integers(len(part), bits)
        else:
            part += unpack(body[low * bits // 8 :], len(part), bits)


def encode_sum(total: np.ndarray, bits: int) -> bytes:
    """The sum that an aggregator hands on, in the form of a packed share."""
    return _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED, len(total)) + pack(total, bits)


def decode_sum(data: bytes, length: int, bits: int) -> np.ndarray:
    """The sum that `encode_sum` wrote, uint32 below 2^bits; refuses any other form."""
    total = np.zeros(length, np.uint32)
    add_share(total, data, bits, last=True)
    return total


def field_head(length: int, *, packed: bool) -> bytes:
    """The eight bytes that shares of elements of the 64-bit field begin with."""
    return _HEAD.pack(VERSION, _FIELD64, 64, _PACKED if packed else _SEEDED, length)


def pack(values: np.ndarray, bits: int) -> bytes:
    """Pack integers, taken modulo 2^bits, into `bits` bits each."""
    groups = -(-len(values) // 8)
    padded = np.zeros((groups, 8), np.uint64)
    padded.reshape(-1)[: len(values)] = values.astype(np.uint64) & np.uint64(2**bits - 1)
    out = np.zeros((groups, bits), np.uint8)
    for place in range(8):
        for byte, shift in _bytes_holding_integer(place, bits):
            part = padded[:, place] << np.uint64(shift) if shift >= 0 else padded[:, place] >> np.uint64(-shift)
            out[:, byte] |= part.astype(np.uint8)
    return out.tobytes()[: _packed_size(len(values), bits)]


def unpack(data: bytes | memoryview, count: int, bits: int) -> np.ndarray:
    """The first `count` integers of `bits` bits each, as uint32."""
    groups = -(-count // 8)
    size = _packed_size(count, bits)
    raw = np.zeros(groups * bits, np.uint8)
    raw[:size] = np.frombuffer(data, np.uint8, size)
    rows = raw.reshape(groups, bits)
    out = np.zeros((groups, 8), np.uint64)
    for place in range(8):
        for byte, shift in _bytes_holding_integer(place, bits):
            part = rows[:, byte].astype(np.uint64)
            out[:, place] |= part >> np.uint64(shift) if shift >= 0 else part << np.uint64(-shift)
    return (out & np.uint64(2**bits - 1)).astype(np.uint32).reshape(-1)[:count]


class _Stream:
    """The key stream of a seed."""

    def __init__(self, seed: bytes) -> None:
        self._cipher = Cipher(algorithms.AES128(seed[:16]), modes.CTR(seed[16:])).encryptor()

    def next_integers(self, count: int, bits: int) -> np.ndarray:
        """The next ones; a multiple of eight, but for the last time."""
        return unpack(self._cipher.update(bytes(_packed_size(count, bits))), count, bits)


def _bytes_holding_integer(place: int, bits: int) -> Sequence[tuple[int, int]]:
    """The bytes of a group of eight that hold the integer at a place, and at which bit of each it begins."""
    first = place * bits // 8
    last = ((place + 1) * bits - 1) // 8
    return [(byte, place * bits - 8 * byte) for byte in range(first, last + 1)]


def _packed_size(count: int, bits: int) -> int:
    return -(-count * bits // 8)
