"""What is to be learned, by which protocol, from how many, for how much: signed, and named by its hash.

A `TrainingTask` says everything that clients, shufflers and analyzer must agree on. Its id is the SHA-256 of its
canonical JSON, and every sealed message is bound to that id: parties that were told different things do not understand
each other. What a task costs a user follows from it alone (`costs`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
from typing import Any

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature

from dovetail import _validate, protocols
from dovetail._structs import ready
from dovetail.events import Everyone
from dovetail.parties.common.keys import KeyPair, PublicKey, ServiceKeys
from dovetail.parties.common.measures import Measure, measured_size, update_norm
from dovetail.parties.common.sealing import OVERHEAD, REPORT_ID, Purpose
from dovetail.parties.common.sharing import Sharing, sharing_of
from dovetail.parties.common.wire import Packed

__all__ = ["Deal", "SignedTask", "TrainingTask", "cohort_of", "sign", "task_id_of", "verify"]

_VERSION = 2
_LARGEST_TASK = 1 << 20  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deal:
    """Which shuffler holds which slots: `holder` and `place` (the slot's number there) by slot, `slots` by shuffler."""

    holder: np.ndarray
    place: np.ndarray
    slots: tuple[np.ndarray, ...]


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training in public terms.

    A round takes in `min_clients` to `max_clients` users, of whom up to `colluders` may be fake or the adversary's, and
    is open for `round_seconds`. `eps` and `delta` are the budget of all `rounds` together; without an `eps` nothing is
    promised. `analyzer` is the key that reports are sealed to. Reports travel through `shufflers`: one, or more that
    slots are dealt to, in as many groups of equal size as the protocol has parties that shuffle. Or they travel as
    shares of their sum between `aggregators`, two or more. Their keys are here, so that users know whom they talk to.
    `measures` are added up beside updates, their coordinates part of `dim`; `held_out` is the share of users that
    report them in place of an update.
    """

    name: str
    protocol: str
    settings: dict[str, Any]
    dim: int
    rounds: int
    min_clients: int
    max_clients: int
    round_seconds: float
    delta: float
    analyzer: PublicKey
    shufflers: tuple[ServiceKeys, ...] = ()
    aggregators: tuple[ServiceKeys, ...] = ()
    eps: float | None = None
    colluders: int = 0
    measures: tuple[Measure, ...] = ()
    held_out: float = 0.0
    version: int = _VERSION

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"expected a task of version {_VERSION}, got version={self.version}")
        if ":" in self.protocol:
            raise ValueError(f"expected the name of an installed protocol in a task, got {self.protocol!r}")
        protocols.find(self.protocol)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds, max_clients=self.max_clients)
        _validate.in_interval(1, self.max_clients, min_clients=self.min_clients)
        _validate.non_negative(colluders=self.colluders)
        _validate.positive(round_seconds=self.round_seconds, **({} if self.eps is None else {"eps": self.eps}))
        _validate.in_open_interval(0, 1, delta=self.delta)
        for name in ("round_seconds", "delta", "eps"):  # 600 and 600.0 are spelled differently, and are one task
            if getattr(self, name) is not None:
                msgspec.structs.force_setattr(self, name, float(getattr(self, name)))
        if self.analyzer.use != "seal":
            raise ValueError("expected a key to seal with for the analyzer, got one to sign with")
        if bool(self.shufflers) == bool(self.aggregators):
            raise ValueError("expected either shufflers or aggregators in a task, got both or neither")
        for use in ("sign", "seal"):
            if len({getattr(keys, use).public for keys in self.intermediaries}) < len(self.intermediaries):
                raise ValueError("expected different keys for every shuffler or aggregator, got one key twice")
        self._check_measures()
        if self.aggregators:
            self.contribution()
            return
        self.deal()
        padding = self.build()[0].layout(self.dim).padding
        if padding is not None and padding.overflow != "drop" and padding.pad_to < self.max_clients:
            raise ValueError(f"expected overflow = 'drop' where slots may overflow, got {padding.overflow!r}")

    def _check_measures(self) -> None:
        _validate.in_interval(0, 1, held_out=self.held_out)
        if self.held_out and not self.measures:
            raise ValueError(f"expected measures for users that are held out, got held_out={self.held_out} without any")
        if not self.measures:
            return
        if not self.model_dim > 0:
            raise ValueError(f"expected dim above the measures' {measured_size(self.measures)}, got dim={self.dim}")
        clip_norm = getattr(self.build()[0], "clip_norm", None)
        if not self.aggregators or clip_norm is None:
            raise ValueError(f"expected measures with sums of vectors clipped in norm (secagg), got {self.protocol!r}")
        update_norm(self.measures, clip_norm)

    @property
    def model_dim(self) -> int:
        """Numbers of an update, without the measures beside it."""
        return self.dim - measured_size(self.measures)

    def build(self) -> tuple[protocols.Protocol, protocols.Cohort]:
        """The protocol object that every party runs, and the cohort it is settled on."""
        return _built(self.body)

    @property
    def budget(self) -> float:
        """The eps of all rounds; infinite if there is no guarantee."""
        return math.inf if self.eps is None else self.eps

    @property
    def intermediaries(self) -> tuple[ServiceKeys, ...]:
        """The keys of those between users and analyzer: shufflers, or aggregators."""
        return self.shufflers or self.aggregators

    def messages(self) -> protocols.Messages:
        """What clients send through shufflers."""
        return self.build()[0].messages(self.dim)

    def contribution(self) -> protocols.Contribution:
        """What clients share between aggregators."""
        protocol, cohort = self.build()
        return protocol.contribution(cohort, self.dim)

    def sharing(self) -> Sharing:
        """How they share it."""
        return sharing_of(self.contribution(), len(self.aggregators))

    @property
    def verified(self) -> bool:
        """Whether aggregators verify what clients share."""
        return bool(self.aggregators) and self.contribution().proof is not None

    @property
    def length(self) -> int:
        """Bytes of a sealed message, the same for all."""
        return self.messages().size + OVERHEAD

    @property
    def upload_bytes(self) -> int:
        """Bytes that a user sends in a round, to all shufflers or aggregators together, before TLS."""
        count = len(self.intermediaries)
        if self.aggregators:
            content = sum(map(self.sharing().size, range(count)))
        else:
            content = Packed.size(self.messages().per_client, length=self.length)
        return content + count * (REPORT_ID + OVERHEAD)

    def deal(self) -> Deal:
        """Slots in turn to the shufflers that may hold them."""
        messages = self.messages()
        party = messages.shuffler_of(np.arange(messages.slots))
        parties, processes = int(party.max()) + 1, len(self.shufflers)
        if processes % parties or processes < parties:
            raise ValueError(f"expected {parties} shufflers or a multiple of that, got {processes}")
        rank = np.empty_like(party)
        for one in range(parties):
            rank[party == one] = np.arange(np.sum(party == one))
        each = processes // parties
        if each > np.min(np.bincount(party)):
            raise ValueError(f"expected at most one shuffler per slot, got {processes} for {messages.slots} slots")
        return Deal(
            holder=party * each + rank % each,
            place=rank // each,
            slots=tuple(np.flatnonzero(party * each + rank % each == index) for index in range(processes)),
        )

    def purpose(self, round: int) -> Purpose:
        """What reports and dummies of a round are sealed for."""
        return Purpose(task_id=self.task_id, round=round, role="report", key_id=self.analyzer.key_id)

    def upload_purpose(self, round: int, index: int, *, sender: bytes, report: bytes) -> Purpose:
        """What a user's upload to a shuffler or aggregator is sealed for."""
        key_id = self.intermediaries[index].seal.key_id
        return Purpose(task_id=self.task_id, round=round, role="upload", key_id=key_id, sender=sender, report=report)

    def sum_purpose(self, round: int, index: int, *, batch: bytes) -> Purpose:
        """What an aggregator's sum over a batch of users is sealed for."""
        sender, key_id = self.aggregators[index].sign.key_id, self.analyzer.key_id
        return Purpose(task_id=self.task_id, round=round, role="sum", key_id=key_id, sender=sender, report=batch)

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


def sign(task: TrainingTask, pair: KeyPair) -> SignedTask:
    """The task, with the signature of who is behind it.

    Guarantees:
        No key that is needed in a round expires before the last round's time is up, if the first one opens now.
    """
    end = time.time() + task.rounds * task.round_seconds
    if whose := _first_expired(task, pair.public, now=end):
        raise ValueError(
            f"expected a key of {whose} that outlives {task.rounds} rounds of {task.round_seconds:g} seconds, "
            "got one that expires before"
        )
    return SignedTask(body=task.body, signature=pair.sign(_signed(task.body)), signer=pair.public)


def verify(signed: SignedTask, *, signer: bytes, fresh: bool = True) -> TrainingTask:
    """The task, if the holder of the key with id `signer` signed it; refuses everything else.

    Guarantees:
        Only canonical JSON is accepted, so a task has one id.
        If `fresh`, no key of signer, analyzer or shufflers has expired; services finish what was begun before.
    """
    if len(signed.body) > _LARGEST_TASK:
        raise ValueError(f"expected a task of at most {_LARGEST_TASK} bytes, got {len(signed.body)}")
    if signed.signer.key_id != signer:
        raise ValueError(f"expected a task signed by {signer.hex()}, got one by {signed.signer.key_id.hex()}")
    try:
        signed.signer.verifying().verify(signed.signature, _signed(signed.body))
    except InvalidSignature as error:
        raise ValueError("expected a task with its signer's signature, got one with a wrong signature") from error
    try:
        task = msgspec.json.decode(signed.body, type=ready(TrainingTask))
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a task, got invalid content ({error})") from error
    if task.body != signed.body:
        raise ValueError("expected a task in canonical JSON, got it in another form")
    if fresh and (whose := _first_expired(task, signed.signer, now=time.time())):
        raise ValueError(f"expected a key of {whose} that has not expired, got one that has")
    return task


def _first_expired(task: TrainingTask, signer: PublicKey, *, now: float) -> str | None:
    """Whose key is of no use any more: users refuse the task, or the analyzer what a shuffler sends."""
    kind = "shuffler" if task.shufflers else "aggregator"
    if signer.expired(now) or task.analyzer.expired(now):
        return "the signer" if signer.expired(now) else "the analyzer"
    return next((f"{kind} {index}" for index, keys in enumerate(task.intermediaries) if keys.expired(now)), None)


def _signed(body: bytes) -> bytes:
    return b"dovetail task\0" + body


@functools.lru_cache(maxsize=64)
def _built(body: bytes) -> tuple[protocols.Protocol, protocols.Cohort]:
    """By a task's JSON, which is read here without checks that would ask for this very thing."""
    task = msgspec.json.decode(body)
    cohort = cohort_of(
        task["min_clients"], task["max_clients"], task["colluders"], aggregators=len(task["aggregators"]) or None
    )
    return protocols.build(task["protocol"], task["settings"]).settle(cohort, task["dim"]), cohort


def cohort_of(
    min_clients: int, max_clients: int, colluders: int, *, aggregators: int | None = None
) -> protocols.Cohort:
    """What is public about the users of every round of a task."""
    return protocols.Cohort(
        participation=Everyone(),
        size=max_clients,
        min_size=min_clients,
        colluders=colluders,
        aggregators=aggregators,
    )
