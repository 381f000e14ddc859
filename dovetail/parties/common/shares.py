"""Additive shares of a vector of integers, as bytes: all but the last are seeds, the last makes up the value.

A share begins with eight bytes: the version of this format, the group (integers modulo 2^bits, or the 64-bit field of
verified sums, which `sharing` writes), its bits, the form (a seed, or packed integers) and their number in four bytes,
little endian. What follows are the 32 bytes of a seed, or the integers, `bits` bits each, least bit first, one after
the other without gaps. A seed stands for the key stream of AES-128 in counter mode, its first half as the key and its
second as the first counter block, read as packed integers. `docs/wire.md` has test vectors.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dovetail import _validate
from dovetail.parties.common.wire import Malformed

__all__ = [
    "FIELD_HEAD",
    "SEED",
    "VERSION",
    "add_share",
    "check_share",
    "decode_sum",
    "encode_sum",
    "field_head",
    "pack",
    "share_size",
    "split",
    "unpack",
]

VERSION = 1
SEED = 32  # bytes
_MODULO_POWER_OF_TWO, _FIELD64 = 0, 1
_SEEDED, _PACKED = 0, 1
_HEAD = struct.Struct("<BBBBI")
FIELD_HEAD = _HEAD.size
_BLOCK = 1 << 16  # integers at a time; a multiple of eight, so that blocks end with a byte


def split(
    values: np.ndarray, bits: int, count: int, *, random_bytes: Callable[[int], bytes] = secrets.token_bytes
) -> list[bytes]:
    """The shares of a vector of integers below 2^bits, uint32, for so many aggregators.

    Guarantees:
        They add up to the vector modulo 2^bits.
        All but one of them, whichever, tell nothing about the vector to whoever cannot tell AES-128 from random.
    """
    _validate.integer(count=count, bits=bits)
    _validate.at_least(2, count=count)
    _validate.in_interval(1, 32, bits=bits)
    seeds = [random_bytes(SEED) for _ in range(count - 1)]
    streams = [_Stream(seed) for seed in seeds]
    head, packed = _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED, len(values)), []
    for low in range(0, len(values), _BLOCK):
        left = values[low : low + _BLOCK].astype(np.uint32)
        for stream in streams:
            left -= stream.integers(len(left), bits)
        packed.append(pack(left, bits))
    seeded = _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _SEEDED, len(values))
    return [*(seeded + seed for seed in seeds), head + b"".join(packed)]


def share_size(length: int, bits: int, *, last: bool) -> int:
    """Bytes of a share of so many integers."""
    return _HEAD.size + (_packed_size(length, bits) if last else SEED)


def check_share(share: bytes, length: int, bits: int, *, last: bool) -> None:
    """Refuse a share of another form than this one."""
    size = share_size(length, bits, last=last)
    if len(share) != size:
        raise Malformed(f"expected a share of {size} bytes, got one of {len(share)} bytes")
    if _HEAD.unpack_from(share) != (VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED if last else _SEEDED, length):
        raise Malformed(f"expected a share of {length} integers modulo 2^{bits} in its form, got another one")


def add_share(total: np.ndarray, share: bytes, bits: int, *, last: bool) -> None:
    """Add a share to a running sum, uint32 of the shares' length, in place; refuses a share of another form."""
    check_share(share, len(total), bits, last=last)
    body = memoryview(share)[_HEAD.size :]
    stream = None if last else _Stream(bytes(body))
    for low in range(0, len(total), _BLOCK):
        part = total[low : low + _BLOCK]
        if stream is not None:
            part += stream.integers(len(part), bits)
        else:
            part += unpack(body[low * bits // 8 :], len(part), bits)


def encode_sum(total: np.ndarray, bits: int) -> bytes:
    """The sum that an aggregator hands on, in the form of a packed share."""
    return _HEAD.pack(VERSION, _MODULO_POWER_OF_TWO, bits, _PACKED, len(total)) + pack(total, bits)


def decode_sum(data: bytes, length: int, bits: int) -> np.ndarray:
    """The sum in these bytes, uint32 below 2^bits; refuses any other form."""
    total = np.zeros(length, np.uint32)
    add_share(total, data, bits, last=True)
    return total


def field_head(length: int, *, packed: bool) -> bytes:
    """What shares of elements of the 64-bit field begin with."""
    return _HEAD.pack(VERSION, _FIELD64, 64, _PACKED if packed else _SEEDED, length)


def pack(values: np.ndarray, bits: int) -> bytes:
    """Integers, taken modulo 2^bits, in `bits` bits each."""
    groups = -(-len(values) // 8)
    padded = np.zeros((groups, 8), np.uint64)
    padded.reshape(-1)[: len(values)] = values.astype(np.uint64) & np.uint64(2**bits - 1)
    out = np.zeros((groups, bits), np.uint8)
    for place in range(8):
        for byte, shift in _bytes_of(place, bits):
            part = padded[:, place] << np.uint64(shift) if shift >= 0 else padded[:, place] >> np.uint64(-shift)
            out[:, byte] |= part.astype(np.uint8)
    return out.tobytes()[: _packed_size(len(values), bits)]


def unpack(data: bytes | memoryview, count: int, bits: int) -> np.ndarray:
    """The first `count` integers of `bits` bits each, as uint32."""
    groups, size = -(-count // 8), _packed_size(count, bits)
    raw = np.zeros(groups * bits, np.uint8)
    raw[:size] = np.frombuffer(data, np.uint8, size)
    rows, out = raw.reshape(groups, bits), np.zeros((groups, 8), np.uint64)
    for place in range(8):
        for byte, shift in _bytes_of(place, bits):
            part = rows[:, byte].astype(np.uint64)
            out[:, place] |= part >> np.uint64(shift) if shift >= 0 else part << np.uint64(-shift)
    return (out & np.uint64(2**bits - 1)).astype(np.uint32).reshape(-1)[:count]


class _Stream:
    """The key stream of a seed."""

    def __init__(self, seed: bytes) -> None:
        self._cipher = Cipher(algorithms.AES128(seed[:16]), modes.CTR(seed[16:])).encryptor()

    def integers(self, count: int, bits: int) -> np.ndarray:
        """The next ones; a multiple of eight, but for the last time."""
        return unpack(self._cipher.update(bytes(_packed_size(count, bits))), count, bits)


def _bytes_of(place: int, bits: int) -> Sequence[tuple[int, int]]:
    """The bytes of a group of eight that hold the integer at a place, and at which bit of each it begins."""
    first, last = place * bits // 8, ((place + 1) * bits - 1) // 8
    return [(byte, place * bits - 8 * byte) for byte in range(first, last + 1)]


def _packed_size(count: int, bits: int) -> int:
    return -(-count * bits // 8)
