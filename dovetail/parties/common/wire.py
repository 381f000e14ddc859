"""What parties send to each other: messages of fixed shape, signed requests, and what is public about a round.

Messages travel as plain bytes, so that one comparison of lengths tells a malformed one: an upload is its random report
id and what is sealed to the shuffler or aggregator that it is for. To a shuffler that is the slots (32-bit words), then
ciphertexts for the analyzer, all of one length; to an aggregator, a share. A request is signed with the sender's
Ed25519 key over method, path, and length and hash of the body, which are in its head: who sent it is known before any
of the body is read. Paths name task, round and, for an upload, whom it is for. So whatever is posted can be sent again
without effect, and who carries a request for somebody else cannot change it.

The analyzer signs what it tells everybody, status and models, so that any cache may pass it on. What is signed names
the task and the round, in bytes of fixed places. A copy that was changed, or that is another task's, does not fit the
key that the signed task names. An old copy does: who reads it looks at the round, and at the second at which that
closes.
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
    "authenticate_request",
    "check_model",
    "check_status",
    "decode_vector",
    "encode_vector",
    "request_headers",
    "sign_model",
    "sign_request",
    "sign_status",
    "signature_of",
    "upload_path",
    "verify_request_head",
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
_STRANGER = "not signed by a key that is enrolled here and has not expired"  # whatever is wrong with it


class Malformed(ValueError):  # noqa: N818 - it says what is wrong with bytes that came in
    """Bytes that have not the form which they should have."""


class Unknown(ValueError):  # noqa: N818 - it says why a request is turned away
    """A request whose sender is not known, or whose signature does not fit."""


class TooEarly(ValueError):  # noqa: N818 - it says why something is not taken yet
    """Something about a round that is not open yet."""


class TooLate(ValueError):  # noqa: N818 - it says why something is not taken
    """Something about a round that is over."""


class Packed(msgspec.Struct, frozen=True):
    """Messages for the analyzer: the slot of each, and their ciphertexts of one length, one after the other."""

    slots: np.ndarray
    sealed: bytes

    @property
    def length(self) -> int:
        """Bytes of a ciphertext."""
        return len(self.sealed) // max(1, len(self.slots))

    def ciphertexts(self) -> list[bytes]:
        """The ciphertexts, in the order of `slots`."""
        length = self.length
        return [self.sealed[i * length : (i + 1) * length] for i in range(len(self.slots))]

    def encode(self) -> bytes:
        """The messages as bytes: all slots as 32-bit words, little endian, then all ciphertexts."""
        return self.slots.astype("<u4").tobytes() + self.sealed

    @staticmethod
    def size(count: int, *, length: int) -> int:
        """Length in bytes of `count` encoded messages whose ciphertexts have `length` bytes."""
        return count * (_SLOT + length)

    @classmethod
    def of(cls, messages: list[tuple[int, bytes]]) -> Packed:
        """Pack (slot, ciphertext) pairs."""
        return cls(np.array([slot for slot, _ in messages], np.int64), b"".join(sealed for _, sealed in messages))

    @classmethod
    def decode(cls, data: bytes, *, length: int) -> Packed:
        """What `encode` wrote; refuses bytes that are no whole number of messages with `length` bytes of ciphertext."""
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
        """The upload as bytes: its report id, then what is sealed."""
        return self.report + self.sealed

    @classmethod
    def decode(cls, data: bytes) -> Upload:
        """What `encode` wrote."""
        if len(data) < REPORT_ID:
            raise Malformed(
                f"expected an upload that begins with a report id of {REPORT_ID} bytes, got {len(data)} bytes"
            )
        return cls(data[:REPORT_ID], data[REPORT_ID:])


class Closed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a shuffler or aggregator says when it has closed a round.

    Arguments:
        state: "sent", or "void" if nothing is sent because the round fell below the minimum or peers disagreed.
        parts: how many parts it has sent.
        uploads: how many uploads are in them.
        batch: the id of what it sent: drawn once, when the round was closed; for a sum, the hash of whom it is over.
    """

    state: Literal["sent", "void"]
    parts: _Count
    uploads: _Count
    batch: _Batch


class Verifiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the aggregator with this index found about a round's reports, in the order of their ids, one page of it.

    A result is its share of the verifier, followed by the SHA-256 of the public share; all pages have `total` of them.
    """

    index: _Count
    total: _Count
    results: list[bytes] = msgspec.field(name="told")


def upload_path(task_id: bytes, round: int, index: int) -> str:
    """The path of uploads to the shuffler or aggregator with this index."""
    return f"/v1/tasks/{task_id.hex()}/rounds/{round}/uploads/{index}"


def sign_request(pair: KeyPair, method: str, path: str, body: bytes) -> dict[str, str]:
    """The headers of a request that is signed with this key pair."""
    return request_headers(pair.public.key_id, signature_of(pair, method, path, body), body)


def request_headers(sender: bytes, signature: bytes, body: bytes) -> dict[str, str]:
    """The headers of a request whose signature was made elsewhere.

    Arguments:
        sender: id of the key that signed the request.
        signature: what `signature_of` gave.
        body: the body that was signed.
    """
    return {_KEY: sender.hex(), SIGNATURE: signature.hex(), _DIGEST: hashlib.sha256(body).hexdigest()}


def signature_of(pair: KeyPair, method: str, path: str, body: bytes) -> bytes:
    """The signature of a request, for `request_headers`."""
    return pair.sign(_request_bytes(method, path, len(body), hashlib.sha256(body).digest()))


class RequestHead(NamedTuple):
    """What the signed head of a request proves: who sent it, and length and hash of its body."""

    sender: bytes
    length: int
    digest: bytes

    def check(self, body: bytes) -> None:
        """Refuse a body other than the one that was signed."""
        if len(body) != self.length or hashlib.sha256(body).digest() != self.digest:
            raise Unknown(_STRANGER)


def verify_request_head(
    keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str]
) -> RequestHead:
    """Verify the signature of a request by its head alone, so that nothing of a stranger's body need be read.

    Whatever is wrong, the refusal is the same, and takes as long: it does not tell whose keys are known.

    Arguments:
        keys: the keys of those who may send it, by key id.
        method: of the request.
        path: of the request.
        headers: of the request.
    """
    try:
        key_id = bytes.fromhex(headers.get(_KEY, ""))
        signature = bytes.fromhex(headers.get(SIGNATURE, ""))
        digest = bytes.fromhex(headers.get(_DIGEST, ""))
        length = int(headers.get("content-length", "0"))
        signed = _request_bytes(method, path, length, digest)
    except (ValueError, OverflowError) as error:
        raise Unknown(_STRANGER) from error
    key = keys.get(key_id)
    has_sizes = len(signature) == _SIGNATURE_SIZE and len(digest) == _DIGEST_SIZE
    is_known = key is not None and has_sizes and key.use == "sign" and not key.is_expired()
    try:
        nacl.bindings.crypto_sign_open(signature + signed, key.public if key is not None and is_known else _NOBODY)
    except (nacl.exceptions.CryptoError, ValueError) as error:
        raise Unknown(_STRANGER) from error
    if not is_known:
        raise Unknown(_STRANGER)
    return RequestHead(key_id, length, digest)


def authenticate_request(
    keys: Mapping[bytes, PublicKey], method: str, path: str, headers: Mapping[str, str], body: bytes
) -> bytes:
    """Verify a whole request; refuses one of any other sender than these.

    Returns: the id of the key that it was signed with.
    """
    head = verify_request_head(keys, method, path, headers)
    head.check(body)
    return head.sender


def _request_bytes(method: str, path: str, length: int, digest: bytes) -> bytes:
    return b"dovetail request\0" + f"{method} {path}".encode() + b"\0" + length.to_bytes(8, "big") + digest


def encode_vector(vector: np.ndarray) -> bytes:
    """A model or an update as bytes: float32, little endian."""
    return np.ascontiguousarray(vector, "<f4").tobytes()


def decode_vector(data: bytes, dim: int | None) -> np.ndarray:
    """The vector in these bytes; refuses one of another length than `dim`, if that is given."""
    if len(data) != 4 * (len(data) // 4 if dim is None else dim):
        length = "whole numbers of 4 bytes" if dim is None else f"{dim} numbers of 4 bytes"
        raise Malformed(f"expected a vector of {length}, got {len(data)} bytes")
    return np.frombuffer(data, "<f4").astype(np.float32)


CLOCK_SKEW = 60.0  # seconds by which clocks may differ
_Round = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Second = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
_Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Forged(ValueError):  # noqa: N818 - it says what came
    """Something that the analyzer did not sign, or not for this task and round."""


class RoundStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a training stands, in public terms.

    Arguments:
        task_id: the task.
        round: the round that is open, on the model of round - 1; the last one if the training is over.
        over: whether the training is over.
        head: hash of the analyzer's ledger when it opened the round: who remembers it notices one that was set back.
        closes: the second at which the round takes in no more reports; 0 if that is not told.
        signature: by the key which the task names for it, if it names one.
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
    return msgspec.structs.replace(status, signature=pair.sign(_status_bytes(status)))


def check_status(status: RoundStatus, *, task_id: bytes, key: PublicKey | None) -> None:
    """Refuse another task's status and, if there is a key to sign with, one that it has not signed."""
    if status.task_id != task_id:
        raise Forged(f"this status belongs to another task than {task_id.hex()}")
    if key is not None and not key.has_signed(_status_bytes(status), status.signature):
        raise Forged(
            "the status does not bear the analyzer's signature: it was changed on its way, or is not the analyzer's"
        )


def sign_model(data: bytes, *, task_id: bytes, round: int, pair: KeyPair) -> bytes:
    """The analyzer's signature of the model after a round."""
    return pair.sign(_model_bytes(data, task_id, round))


def check_model(data: bytes, signature: bytes, *, task_id: bytes, round: int, key: PublicKey) -> None:
    """Refuse a model that the analyzer has not signed as that of this task and round."""
    if not key.has_signed(_model_bytes(data, task_id, round), signature):
        raise Forged(
            f"the model after round {round} does not bear the analyzer's signature: it was changed on its way, or is "
            "another round's or task's"
        )


def _status_bytes(status: RoundStatus) -> bytes:
    numbers = status.round.to_bytes(4, "big") + status.over.to_bytes(1, "big") + status.closes.to_bytes(8, "big")
    return b"dovetail status\0" + status.task_id + numbers + status.head


def _model_bytes(data: bytes, task_id: bytes, round: int) -> bytes:
    return b"dovetail model\0" + task_id + round.to_bytes(4, "big") + hashlib.sha256(data).digest()
