"""What is to be learned, by which protocol, from how many, for how much: signed, and named by its hash.

A `Task` says everything that clients, shufflers and analyzer must agree on. Its id is the SHA-256 of its canonical
JSON, and every sealed message is bound to that id: parties that were told different things do not understand each
other. What a task costs a user follows from it alone (`cost`), by the quote that `dovetail account protocol` prints.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature

from dovetail import _validate, protocols, quotes
from dovetail.events import Everyone
from dovetail.parties.keys import KeyPair, PublicKey
from dovetail.statements import Statement

__all__ = ["SignedTask", "Task", "cost", "sign", "task_id_of", "verify"]

_VERSION = 1
_LARGEST_TASK = 1 << 20  # bytes


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training in public terms.

    A round takes in `min_clients` to `max_clients` users, of whom up to `colluders` may be fake or the adversary's, and
    is open for `round_seconds`. `eps` and `delta` are the budget of all `rounds` together. `analyzer` is the key that
    reports are sealed to, `shufflers` the keys that its shufflers sign with.
    """

    name: str
    protocol: str
    settings: dict[str, Any]
    dim: int
    rounds: int
    min_clients: int
    max_clients: int
    round_seconds: float
    eps: float
    delta: float
    analyzer: PublicKey
    shufflers: tuple[PublicKey, ...]
    colluders: int = 0
    version: int = _VERSION

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"expected a task of version {_VERSION}, got version={self.version}")
        _validate.known("protocol", self.protocol, protocols.PROTOCOLS)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds, max_clients=self.max_clients)
        _validate.in_interval(1, self.max_clients, min_clients=self.min_clients)
        _validate.non_negative(colluders=self.colluders)
        _validate.positive(round_seconds=self.round_seconds, eps=self.eps)
        _validate.in_open_interval(0, 1, delta=self.delta)
        if self.analyzer.use != "seal" or any(key.use != "sign" for key in self.shufflers):
            raise ValueError("expected a key to seal with for the analyzer and keys to sign with for the shufflers")
        self.build()

    def build(self) -> tuple[protocols.Protocol, protocols.Cohort]:
        """The protocol object that every party runs, and the cohort it is settled on."""
        cohort = protocols.Cohort(
            participation=Everyone(), size=self.max_clients, min_size=self.min_clients, colluders=self.colluders
        )
        return protocols.build(self.protocol, self.settings).settle(cohort, self.dim), cohort

    @property
    def body(self) -> bytes:
        """The canonical JSON: keys in order, no spaces."""
        return msgspec.json.encode(self, order="deterministic")

    @property
    def task_id(self) -> bytes:
        """The SHA-256 of the canonical JSON."""
        return task_id_of(self.body)


class SignedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task's canonical JSON, as it was signed."""

    body: bytes
    signature: bytes
    signer: PublicKey


def task_id_of(body: bytes) -> bytes:
    """The id of the task with this canonical JSON."""
    return hashlib.sha256(body).digest()


def sign(task: Task, pair: KeyPair) -> SignedTask:
    """The task, with the signature of who is behind it."""
    return SignedTask(body=task.body, signature=pair.sign(_signed(task.body)), signer=pair.public)


def verify(signed: SignedTask, *, signer: bytes) -> Task:
    """The task, if the holder of the key with id `signer` signed it; refuses everything else.

    Guarantees:
        Only canonical JSON is accepted, so a task has one id.
        The signer's key and the analyzer's have not expired.
    """
    if len(signed.body) > _LARGEST_TASK:
        raise ValueError(f"expected a task of at most {_LARGEST_TASK} bytes, got {len(signed.body)}")
    if signed.signer.key_id != signer:
        raise ValueError(f"expected a task signed by {signer.hex()}, got one by {signed.signer.key_id.hex()}")
    try:
        signed.signer.verifying().verify(signed.signature, _signed(signed.body))
    except InvalidSignature as error:
        raise ValueError("expected a task with its signer's signature, got another one") from error
    try:
        task = msgspec.json.decode(signed.body, type=Task)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a task, got something else ({error})") from error
    if task.body != signed.body:
        raise ValueError("expected a task in canonical JSON, got another spelling of it")
    for key, whose in ((signed.signer, "signer"), (task.analyzer, "analyzer")):
        if key.expired():
            raise ValueError(f"expected a key of the {whose} that has not expired, got one that has")
    return task


def _signed(body: bytes) -> bytes:
    return b"dovetail task\0" + body


@functools.lru_cache(maxsize=256)
def _cost(body: bytes, rounds: int) -> tuple[Statement, Statement]:
    task = msgspec.json.decode(body, type=Task)
    protocol, cohort = task.build()
    view = protocol.view(cohort, task.dim, neighbors=protocol.relation)
    quote = quotes.state(protocol, [cohort] * rounds, task.dim, [view.round] * rounds, view.scope, delta=task.delta)
    return quote.certified, quote.local


def cost(task: Task, rounds: int) -> tuple[Statement, Statement]:
    """What so many rounds of a task cost a user: against the analyzer, and if nobody is trusted.

    Rounds are counted with the fewest users that one may have; how many really come is nobody's promise.
    """
    _validate.integer(rounds=rounds)
    _validate.in_interval(1, task.rounds, rounds=rounds)
    return _cost(task.body, rounds)
