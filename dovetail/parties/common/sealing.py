"""Sealing messages: HPKE, a fresh encapsulation a message, bound to what it is for.

`Purpose` is mandatory and goes into HPKE's `info`: a message that was sealed for another task, round, role or key does
not open. The suite's base mode says nothing about who sealed a message; dummies and reports must look alike.

Plaintexts of a purpose have one length, and so have ciphertexts: `OVERHEAD` bytes more. Sealing and opening many is
spread over worker processes, for every message takes scalar multiplications.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from dovetail import _validate, hpke
from dovetail.hpke import OVERHEAD
from dovetail.parties.common.keys import KEY_ID

__all__ = ["OVERHEAD", "REPORT_ID", "VERSION", "Purpose", "Unsealable", "Workers", "open_sealed", "seal"]

_LOG = logging.getLogger(__name__)
VERSION = 1
REPORT_ID = 16  # bytes of the id of an upload
_ROLES = ("report", "model", "upload", "sum")  # dummies are sealed as reports: nothing may tell them apart
_NAMES_SENDER = ("upload", "sum")
_CHUNK = 512  # messages that a worker opens at a time
_REPLACED = 3  # times that dead workers are replaced before this process does the work
_FEW = 64  # messages that are not worth the way to another process


class Unsealable(ValueError):  # noqa: N818 - it says what is wrong with a message; a tally goes on without it
    """A ciphertext that was not sealed for this key and purpose, or was changed since."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a message is for; both ends must agree on every field, or it does not open.

    Arguments:
        task_id: the task.
        round: the round.
        role: "report", "model", "upload" or "sum"; dummies are sealed as reports.
        key_id: id of the key that it is sealed to.
        sender: id of the sender's key, for uploads and sums: nobody can pass on another's upload as its own.
        report: id of the upload, or hash of whom the sum is over.
        version: of this format.
    """

    task_id: bytes
    round: int
    role: str
    key_id: bytes
    sender: bytes = b""
    report: bytes = b""
    version: int = VERSION

    def __post_init__(self) -> None:
        if len(self.task_id) != 32:
            raise ValueError(f"expected a task id of 32 bytes, got {len(self.task_id)} bytes")
        if len(self.key_id) != KEY_ID:
            raise ValueError(f"expected a key id of {KEY_ID} bytes, got {len(self.key_id)} bytes")
        _validate.integer(round=self.round, version=self.version)
        _validate.in_interval(0, 2**32 - 1, round=self.round)
        _validate.one_of(_ROLES, role=self.role)
        sizes = (KEY_ID, REPORT_ID) if self.role in _NAMES_SENDER else (0, 0)
        if (len(self.sender), len(self.report)) != sizes:
            raise ValueError(
                f"expected a sender of {KEY_ID} bytes and a report of {REPORT_ID} for uploads and sums, none for "
                f"others, got {len(self.sender)} and {len(self.report)} for role={self.role!r}"
            )

    @property
    def info(self) -> bytes:
        """An encoding that no two purposes share: every field has a fixed place, and a length that the role tells."""
        head = struct.pack(">HBI", self.version, _ROLES.index(self.role), self.round)
        return b"dovetail" + head + self.key_id + self.task_id + self.sender + self.report


def seal(plaintext: bytes, key: X25519PublicKey, purpose: Purpose) -> bytes:
    """Seal a plaintext to the holder of the private key, afresh each time: `OVERHEAD` bytes longer."""
    return hpke.encrypt(plaintext, key, purpose.info)


def open_sealed(ciphertext: bytes, key: X25519PrivateKey, purpose: Purpose) -> bytes:
    """The plaintext of a ciphertext; refuses whatever was not sealed for this key and purpose."""
    if len(ciphertext) < OVERHEAD:
        raise Unsealable(f"expected a ciphertext of at least {OVERHEAD} bytes, got {len(ciphertext)} bytes")
    try:
        return hpke.decrypt(ciphertext, key, purpose.info)
    except (InvalidTag, ValueError) as error:
        raise Unsealable(
            f"this was not sealed for the key {purpose.key_id.hex()} as {purpose.role} of round {purpose.round} of "
            "this task, or was changed since"
        ) from error


class Workers:
    """Processes that seal and open many messages.

    Arguments:
        workers: how many processes; 1: this process itself; None: one a core.

    Guarantees:
        Plaintexts come in the order of their ciphertexts, None where one does not open.
        A process that dies is replaced, and what it did is done again.
        The processes end with the one that started them, also if it is killed.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or os.cpu_count() or 1
        _validate.at_least(1, workers=self.workers)
        self._lock = threading.Lock()
        self._pool = self._make_pool() if self.workers > 1 else None

    def _make_pool(self) -> concurrent.futures.ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")  # a fork would copy threads that hold locks
        return concurrent.futures.ProcessPoolExecutor(self.workers, mp_context=spawn, initializer=_end_with_parent)

    def _replace(self, broken: concurrent.futures.ProcessPoolExecutor) -> None:
        """Start a new pool in the place of one of which a process died: such a pool takes no more work."""
        with self._lock:
            if self._pool is broken:
                _LOG.warning(
                    "a process that seals and opens messages died and is replaced (was it killed for want of memory?)"
                )
                self._pool = self._make_pool()
        broken.shutdown(wait=False, cancel_futures=True)

    def open_all(self, ciphertexts: Sequence[bytes], key: X25519PrivateKey, purpose: Purpose) -> list[bytes | None]:
        """The plaintexts of these ciphertexts, in their order; None for one that does not open."""
        return self._spread_over_workers(_open_chunk, ciphertexts, key.private_bytes_raw(), purpose)

    def seal_all(self, plaintexts: Sequence[bytes], key: X25519PublicKey, purpose: Purpose) -> list[bytes]:
        """The ciphertexts of these plaintexts, in their order, each under an encapsulation of its own."""
        return self._spread_over_workers(_seal_chunk, plaintexts, key.public_bytes_raw(), purpose)

    def stop(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _spread_over_workers(
        self, work: Callable[..., list[Any]], items: Sequence[bytes], key: bytes, purpose: Purpose
    ) -> list[Any]:
        """The results of `work` in the items' order; in this process if they are few, or if processes keep dying."""
        size = max(1, min(_CHUNK, -(-len(items) // self.workers)))
        chunks = [items[i : i + size] for i in range(0, len(items), size)]
        for _ in range(_REPLACED):
            pool = self._pool
            if pool is None or len(items) < _FEW:
                break
            try:
                waiting = [pool.submit(work, chunk, key, purpose) for chunk in chunks]
                return [item for future in waiting for item in future.result()]
            except (BrokenProcessPool, concurrent.futures.CancelledError):
                self._replace(pool)
            except RuntimeError:
                if pool is self._pool:
                    raise  # else another thread has replaced it
        return [item for chunk in chunks for item in work(chunk, key, purpose)]


def _end_with_parent() -> None:
    """A pool that waits for work does not notice that nobody is left to give it any."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _open_chunk(ciphertexts: Sequence[bytes], key: bytes, purpose: Purpose) -> list[bytes | None]:
    private = X25519PrivateKey.from_private_bytes(key)
    return [_open_or_none(ciphertext, private, purpose) for ciphertext in ciphertexts]


def _open_or_none(ciphertext: bytes, key: X25519PrivateKey, purpose: Purpose) -> bytes | None:
    try:
        return open_sealed(ciphertext, key, purpose)
    except Unsealable:
        return None


def _seal_chunk(plaintexts: Sequence[bytes], key: bytes, purpose: Purpose) -> list[bytes]:
    public = X25519PublicKey.from_public_bytes(key)
    return [seal(plaintext, public, purpose) for plaintext in plaintexts]
