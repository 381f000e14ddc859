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
    """A stream that a seed of 32 bytes stands for, apart from those for other tags and binders."""

    name: ClassVar[str]

    @abc.abstractmethod
    def __init__(self, seed: bytes, tag: bytes, *binder: bytes) -> None: ...

    @abc.abstractmethod
    def next(self, length: int) -> bytes:
        """So many further bytes of the stream."""

    def vector(self, field: Field, length: int) -> np.ndarray:
        """The next field elements; integers above the modulus are passed over."""
        elements = field.read(self.next(length * field.size))
        fine = elements < field.modulus
        if np.all(fine):
            return elements
        kept = elements[fine]
        return np.concatenate([kept, self.vector(field, length - len(kept))])

    @classmethod
    def seed(cls, seed: bytes, tag: bytes, *binder: bytes) -> bytes:
        """A seed derived from this one, a tag and whatever it is bound to."""
        return cls(seed, tag, *binder).next(SEED)

    @classmethod
    def expand(cls, field: Field, seed: bytes, tag: bytes, binder: bytes, length: int) -> np.ndarray:
        """So many uniform field elements, derived from a seed."""
        return cls(seed, tag, binder).vector(field, length)


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
    """The stream of draft-irtf-cfrg-vdaf."""

    name = "TurboShake128"

    def __init__(self, seed: bytes, tag: bytes, *binder: bytes) -> None:
        from Crypto.Hash import TurboSHAKE128

        self._state = TurboSHAKE128.new(domain=1)
        for part in (len(tag).to_bytes(2, "little"), tag, bytes([len(seed)]), seed, *binder):
            self._state.update(part)

    def next(self, length: int) -> bytes:
        """The next bytes that are squeezed out."""
        return self._state.read(length)
