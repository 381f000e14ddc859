"""Sealing: HPKE (RFC 9180) from `cryptography`, one fresh encapsulation a message, bound to what it is for.

The suite is DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-128-GCM in base mode. `Purpose` is mandatory and goes into
HPKE's `info`: a message that was sealed for another task, round, role or key does not open. Base mode says nothing
about who sealed a message; dummies and reports must look alike.

Plaintexts of a purpose have one length, and so have ciphertexts: `OVERHEAD` bytes more. Opening many is spread over
worker processes, for one message costs a scalar multiplication.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import struct
from collections.abc import Iterable, Iterator, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from dovetail import _validate

__all__ = ["OVERHEAD", "VERSION", "Purpose", "Unsealable", "open_all", "open_sealed", "seal"]

VERSION = 1
OVERHEAD = 32 + 16  # the encapsulated key, and the tag
_SUITE = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_128_GCM)
_ROLES = ("report", "dummy-source", "model")
_CHUNK = 512  # messages that a worker opens at a time


class Unsealable(ValueError):  # noqa: N818 - it says what is wrong with a message; a tally goes on without it
    """A ciphertext that was not sealed for this key and purpose, or was changed since."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a message is for; both ends must agree on every field."""

    task_id: bytes
    round: int
    role: str
    key_id: bytes
    version: int = VERSION

    def __post_init__(self) -> None:
        if len(self.task_id) != 32:
            raise ValueError(f"expected a task id of 32 bytes, got {len(self.task_id)}")
        if len(self.key_id) != 8:
            raise ValueError(f"expected a key id of 8 bytes, got {len(self.key_id)}")
        _validate.integer(round=self.round, version=self.version)
        _validate.in_interval(0, 2**32 - 1, round=self.round)
        _validate.one_of(_ROLES, role=self.role)

    @property
    def info(self) -> bytes:
        """An encoding that no two purposes share: every field has a fixed place and length."""
        role = _ROLES.index(self.role)
        return b"dovetail" + struct.pack(">HBI", self.version, role, self.round) + self.key_id + self.task_id


def seal(plaintext: bytes, key: X25519PublicKey, purpose: Purpose) -> bytes:
    """The plaintext for the holder of the private key, under a fresh encapsulation: `OVERHEAD` bytes longer."""
    return _SUITE.encrypt(plaintext, key, info=purpose.info)


def open_sealed(ciphertext: bytes, key: X25519PrivateKey, purpose: Purpose) -> bytes:
    """What was sealed; refuses whatever is not for this key and purpose."""
    if len(ciphertext) < OVERHEAD:
        raise Unsealable(f"expected a ciphertext of at least {OVERHEAD} bytes, got {len(ciphertext)}")
    try:
        return _SUITE.decrypt(ciphertext, key, info=purpose.info)
    except (InvalidTag, ValueError) as error:
        raise Unsealable("expected a message sealed for this key, task, round and role, got another one") from error


def open_all(
    ciphertexts: Iterable[bytes], key: X25519PrivateKey, purpose: Purpose, *, workers: int | None = None
) -> Iterator[bytes | None]:
    """The plaintexts in order, None where one does not open; a bounded number of messages is held at a time."""
    workers = workers or os.cpu_count() or 1
    _validate.at_least(1, workers=workers)
    chunks = _chunks(ciphertexts)
    if workers == 1:
        for chunk in chunks:
            yield from _open_chunk(chunk, key.private_bytes_raw(), purpose)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy threads that hold locks
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        waiting: list[concurrent.futures.Future[list[bytes | None]]] = []
        for chunk in chunks:
            waiting.append(pool.submit(_open_chunk, chunk, key.private_bytes_raw(), purpose))
            if len(waiting) > 2 * workers:
                yield from waiting.pop(0).result()
        for future in waiting:
            yield from future.result()


def _chunks(items: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _open_chunk(ciphertexts: Sequence[bytes], key: bytes, purpose: Purpose) -> list[bytes | None]:
    private = X25519PrivateKey.from_private_bytes(key)
    return [_opened(ciphertext, private, purpose) for ciphertext in ciphertexts]


def _opened(ciphertext: bytes, key: X25519PrivateKey, purpose: Purpose) -> bytes | None:
    try:
        return open_sealed(ciphertext, key, purpose)
    except Unsealable:
        return None
