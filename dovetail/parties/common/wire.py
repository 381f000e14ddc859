"""What parties say to each other: messages of fixed shape, requests that are signed, what is known of a round.

Messages travel as plain bytes, so that one comparison of lengths tells a malformed one: an upload is its random report
id and what is sealed to the shuffler or aggregator that it is for. To a shuffler that is the slots (32-bit words), then
ciphertexts for the analyzer, all of one length; to an aggregator, a share. A request is signed with the sender's
Ed25519 key over method, path, and length and hash of the body, which are in its head: who sent it is known before any
of the body is read. Paths name task, round and, for an upload, whom it is for. So a request that is sent again says the
same thing again, to the same party, and everything that is posted can be said twice without effect; who carries a
request for somebody else cannot change it.

What an analyzer says to everybody: where its training stands, and models; signed, so that any cache may pass it on.

What is signed names the task and the round, in bytes of fixed places. A copy that is passed on is as good as the
original; one that was changed, or that is another task's, does not fit the key that the signed task names. An old copy
fits: who reads it looks at the round, and at the second at which that closes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import msgspec
import nacl.bindings
import nacl.exceptions
import numpy as np
from cryptography.exceptions import InvalidSignature

from dovetail.parties.common.keys import KeyPair, PublicKey
from dovetail.parties.common.sealing import REPORT_ID

__all__ = [
    "BATCH_ID",
    "CLOCK_SKEW",
    "PART",
    "REPORT_ID",
    "RETRY_AFTER",
    "SIGNATURE",
    "Closed",
    "Forged",
    "Malformed",
    "Packed",
    "RequestHead",
    "RoundStatus",
    "TooEarly",
    "TooLate",
    "Unknown",
    "Upload",
    "Verifiers",
    "authenticate",
    "check_head",
    "check_model",
    "check_status",
    "request_headers",
    "sign_model",
    "sign_request",
    "sign_status",
    "signature_of",
    "upload_path",
    "vector_from",
    "vector_to",
]

PART = 4096  # messages that travel to the analyzer at a time
BATCH_ID = 16  # bytes
_SLOT = 4  # bytes
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Batch = Annotated[bytes, msgspec.Meta(min_length=BATCH_ID, max_length=BATCH_ID)]
SIGNATURE = "dovetail-signature"  # of a request, or of a model in an answer
_KEY, _DIGEST = "dovetail-key", "dovetail-digest"
_NOBODY = bytes.fromhex("3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29")  # checked for strangers
_SIGNATURE_SIZE, _DIGEST_SIZE = 64, 32  # bytes
RETRY_AFTER = "dovetail-again"  # in how many seconds to come back, in an answer
_STRANGER = "expected a request signed by a known key, got another one"  # whatever is wrong with it


class Malformed(ValueError):  # noqa: N818 - it says what is wrong with bytes that came in
    """Bytes that are not what they should be."""


class Unknown(ValueError):  # noqa: N818 - it says why a request is turned away
    """A request whose sender is not known, or whose signature does not fit."""


class TooEarly(ValueError):  # noqa: N818 - it says why something is not taken yet
    """Something about a round that is not open."""


class TooLate(ValueError):  # noqa: N818 - it says why something is not taken
    """Something about a round that is over."""


class Packed(msgspec.Struct, frozen=True):
    """Messages: the slot of each, and the ciphertexts one after the other."""

    slots: np.ndarray
    sealed: bytes

    @property
    def length(self) -> int:
        """Bytes of a ciphertext."""
        return len(self.sealed) // max(1, len(self.slots))

    def ciphertexts(self) -> list[bytes]:
        """One by one."""
        length = self.length
        return [self.sealed[i * length : (i + 1) * length] for i in range(len(self.slots))]

    def encode(self) -> bytes:
        """As bytes."""
        return self.slots.astype("<u4").tobytes() + self.sealed

    @staticmethod
    def size(count: int, *, length: int) -> int:
        """Bytes of so many messages with ciphertexts of `length` bytes, encoded."""
        return count * (_SLOT + length)

    @classmethod
    def of(cls, messages: list[tuple[int, bytes]]) -> Packed:
        """These (slot, ciphertext) pairs."""
        return cls(np.array([slot for slot, _ in messages], np.int64), b"".join(sealed for _, sealed in messages))

    @classmethod
    def decode(cls, data: bytes, *, length: int) -> Packed:
        """From bytes, with ciphertexts of `length` bytes; refuses any other length."""
        count, rest = divmod(len(data), cls.size(1, length=length))
        if rest:
            raise Malformed(f"expected messages of {length} bytes with their slots, got {len(data)} bytes in all")
        return cls(np.frombuffer(data, "<u4", count).astype(np.int64), data[_SLOT * count :])


class Upload(msgspec.Struct, frozen=True):
    """What a client gives to one shuffler or aggregator in a round, sealed to it.

    Its random id is the same whenever it is sent again, and at all that the client gives something to.
    """

    report: bytes
    sealed: bytes

    def encode(self) -> bytes:
        """As bytes."""
        return self.report + self.sealed

    @classmethod
    def decode(cls, data: bytes) -> Upload:
        """From bytes."""
        if len(data) < REPORT_ID:
            raise Malformed(f"expected an upload that begins with a report id of {REPORT_ID} bytes, got {len(data)}")
        return cls(data[:REPORT_ID], data[REPORT_ID:])


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a shuffler or aggregator says when a round of its is closed: how many parts it sent, or that none comes.

    `batch` is the id of what it sent: drawn once, when the round was closed; where sums are sent, the hash of whom they
    are over.
    """

    state: Literal["sent", "void"]
    parts: _Count
    uploads: _Count
    batch: _Batch


class Verifiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the aggregator with this index found about a round's reports, in the order of their ids.

    For each its share of the verifier, followed by the SHA-256 of the public share; `total` reports in all pages.
    """

    index: _Count
    total: _Count
    told: list[bytes]


def upload_path(task_id: bytes, round: int, index: int) -> str:
    """Where an upload goes, at the shuffler or aggregator with this index."""
    return f"/v1/tasks/{task_id.hex()}/rounds/{round}/uploads/{index}"


def sign_request(pair: KeyPair, method: str, path: str, body: bytes) -> dict[str, str]:
    """The headers that make a request its sender's."""
    return request_headers(pair.public.key_id, signature_of(pair, method, path, body), body)


def request_headers(sender: bytes, signature: bytes, body: bytes) -> dict[str, str]:
    """The headers of a request with this body that the holder of the key with this id has signed."""
    return {_KEY: sender.hex(), SIGNATURE: signature.hex(), _DIGEST: hashlib.sha256(body).hexdigest()}


def signature_of(pair: KeyPair, method: str, path: str, body: bytes) -> bytes:
    """What `request_headers` takes."""
    return pair.sign(_request(method, path, len(body), hashlib.sha256(body).digest()))


class RequestHead(NamedTuple):
    """What the head of a request proves: who sent it, and how long its body is, and the hash of that."""

    sender: bytes
    length: int
    digest: bytes

    def check(self, body: bytes) -> None:
        """Refuse another body."""
        if len(body) != self.length or hashlib.sha256(body).digest() != self.digest:
            raise Unknown(_STRANGER)


def check_head(keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str]) -> RequestHead:
    """Who sent a request, if it is one of these, by its head alone: nothing of a stranger's body need be read.

    Whatever is wrong, the answer is the same, and takes as long: it does not tell whose keys are known.
    """
    try:
        key_id, signature = bytes.fromhex(headers.get(_KEY, "")), bytes.fromhex(headers.get(SIGNATURE, ""))
        digest, length = bytes.fromhex(headers.get(_DIGEST, "")), int(headers.get("content-length", "0"))
        signed = _request(method, path, length, digest)
    except (ValueError, OverflowError) as error:
        raise Unknown(_STRANGER) from error
    key = keys.get(key_id)
    sized = len(signature) == _SIGNATURE_SIZE and len(digest) == _DIGEST_SIZE
    known = key is not None and sized and key.use == "sign" and not key.is_expired()
    try:
        nacl.bindings.crypto_sign_open(signature + signed, key.public if key is not None and known else _NOBODY)
    except (nacl.exceptions.CryptoError, ValueError) as error:
        raise Unknown(_STRANGER) from error
    if not known:
        raise Unknown(_STRANGER)
    return RequestHead(key_id, length, digest)


def authenticate(
    keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str], body: bytes
) -> bytes:
    """The key id of who sent a request, if it is one of these; refuses others."""
    found = check_head(keys, method, path, headers)
    found.check(body)
    return found.sender


def _request(method: str, path: str, length: int, digest: bytes) -> bytes:
    return b"dovetail request\0" + f"{method} {path}".encode() + b"\0" + length.to_bytes(8, "big") + digest


def vector_to(vector: np.ndarray) -> bytes:
    """A model or an update as bytes: float32, little endian."""
    return np.ascontiguousarray(vector, "<f4").tobytes()


def vector_from(data: bytes, dim: int | None) -> np.ndarray:
    """The vector in these bytes, of `dim` numbers where that is known."""
    if len(data) != 4 * (len(data) // 4 if dim is None else dim):
        raise Malformed(f"expected a vector of {dim or 'whole'} numbers, got {len(data)} bytes")
    return np.frombuffer(data, "<f4").astype(np.float32)


CLOCK_SKEW = 60.0  # seconds by which clocks may differ
_Round = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Second = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Forged(ValueError):  # noqa: N818 - it says what came
    """Something that the analyzer did not sign, or not for this task and round."""


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a training stands, in public terms.

    `round` takes in reports, or was the last one if the training is over; its model is that of round - 1. `head` is the
    hash of the analyzer's ledger when it opened the round: who remembers it notices a ledger that was set back.
    `closes` is the second at which the round takes in no more reports, 0 if that is not told. The signature is that of
    the key which the task names for it, if it names one.
    """

    task_id: _Hash
    round: _Round
    over: bool
    head: _Hash
    closes: _Second = 0
    signature: bytes = b""

    @property
    def seconds_late(self) -> float:
        """How long ago the round closed, by this machine's clock; negative as long as it is open."""
        return time.time() - self.closes if self.closes else 0.0


def sign_status(status: RoundStatus, pair: KeyPair) -> RoundStatus:
    """The status with the analyzer's signature."""
    return msgspec.structs.replace(status, signature=pair.sign(_status(status)))


def check_status(status: RoundStatus, *, task_id: bytes, key: PublicKey | None) -> None:
    """Refuse another task's status and, if there is a key to sign with, one that it has not signed."""
    if status.task_id != task_id:
        raise Forged(f"expected the status of task {task_id.hex()}, got that of another task")
    if key is not None and not _signed(key, status.signature, _status(status)):
        raise Forged("expected a status as the analyzer signed it, got one that was changed or is not the analyzer's")


def sign_model(data: bytes, *, task_id: bytes, round: int, pair: KeyPair) -> bytes:
    """The analyzer's signature of the model after a round."""
    return pair.sign(_model(data, task_id, round))


def check_model(data: bytes, signature: bytes, *, task_id: bytes, round: int, key: PublicKey) -> None:
    """Refuse a model that the analyzer has not signed as that of this task and round."""
    if not _signed(key, signature, _model(data, task_id, round)):
        raise Forged(
            f"expected the model after round {round} as the analyzer signed it, "
            "got one that was changed or is another round's or task's"
        )


def _status(status: RoundStatus) -> bytes:
    numbers = status.round.to_bytes(4, "big") + status.over.to_bytes(1, "big") + status.closes.to_bytes(8, "big")
    return b"dovetail status\0" + status.task_id + numbers + status.head


def _model(data: bytes, task_id: bytes, round: int) -> bytes:
    return b"dovetail model\0" + task_id + round.to_bytes(4, "big") + hashlib.sha256(data).digest()


def _signed(key: PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verifying_key().verify(signature, message)
    except InvalidSignature:
        return False
    return True
