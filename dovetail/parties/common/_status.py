"""What an analyzer says to everybody: where its training stands, and models; signed, so that any cache may pass it on.

What is signed names the task and the round, in bytes of fixed places. A copy that is passed on is as good as the
original; one that was changed, or that is another task's, does not fit the key that the signed task names. An old copy
fits: who reads it looks at the round, and at the second at which that closes.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature

from dovetail.parties.common.keys import KeyPair, PublicKey

__all__ = ["CLOCK_SKEW", "Forged", "RoundStatus", "check_model", "check_status", "sign_model", "sign_status"]

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
        key.verifying().verify(signature, message)
    except InvalidSignature:
        return False
    return True
