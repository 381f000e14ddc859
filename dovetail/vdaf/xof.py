"""Seeds into streams of bytes and field elements: what shares, challenges and commitments are made of.

`HmacSha256Aes128` is what ships. `TurboShake128` needs PyCryptodome and is there for interoperability.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dovetail.vdaf.field import Field

__all__ = ["SEED", "HmacSha256Aes128", "TurboShake128", "Xof"]

SEED = 32  # bytes


class Xof(abc.ABC):
    """A stream of pseudorandom bytes from a seed of 32 bytes.

    Other tags and binders give streams that look independent.

    An instance is used up as it is read: two reads give different bytes.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def __init__(self, seed: bytes, tag: bytes, *binder: bytes) -> None: ...

    @abc.abstractmethod
    def next(self, length: int) -> bytes:
        """The next `length` bytes of the stream."""

    def next_vec(self, field: Field, length: int) -> np.ndarray:
        """The next `length` uniform field elements; integers that are not below the modulus are passed over."""
        elements = field.decode_unchecked(self.next(length * field.size))
        fine = elements < field.modulus
        if np.all(fine):
            return elements
        kept = elements[fine]
        return np.concatenate([kept, self.next_vec(field, length - len(kept))])

    @classmethod
    def derive_seed(cls, seed: bytes, tag: bytes, *binder: bytes) -> bytes:
        """A seed derived from this one, a tag and whatever it is bound to."""
        return cls(seed, tag, *binder).next(SEED)

    @classmethod
    def expand(cls, field: Field, seed: bytes, tag: bytes, binder: bytes, length: int) -> np.ndarray:
        """`length` uniform field elements, derived from a seed, a tag and a binder."""
        return cls(seed, tag, binder).next_vec(field, length)


class HmacSha256Aes128(Xof):
    """HMAC-SHA256 makes the key and the first counter block of AES-128 in counter mode."""

    name = "HmacSha256Aes128"

    def __init__(self, seed: bytes, tag: bytes, *binder: bytes) -> None:
        mac = hmac.new(seed, bytes([len(tag)]) + tag, hashlib.sha256)
        for part in binder:
            mac.update(part)
        digest = mac.digest()
        self._stream = Cipher(algorithms.AES128(digest[:16]), modes.CTR(digest[16:])).encryptor()

    def next(self, length: int) -> bytes:
        """The next bytes of the key stream."""
        return self._stream.update(bytes(length))


class TurboShake128(Xof):
    """TurboSHAKE128 as draft-irtf-cfrg-vdaf uses it."""

    name = "TurboShake128"

    def __init__(self, seed: bytes, tag: bytes, *binder: bytes) -> None:
        from Crypto.Hash import TurboSHAKE128

        self._state = TurboSHAKE128.new(domain=1)
        for part in (len(tag).to_bytes(2, "little"), tag, bytes([len(seed)]), seed, *binder):
            self._state.update(part)

    def next(self, length: int) -> bytes:
        """The next bytes that are squeezed out."""
        return self._state.read(length)
