"""What is to be learned, by which protocol, from how many, for how much: signed, and named by its hash.

A `TrainingTask` says everything that clients, shufflers and analyzer must agree on. Its id is the SHA-256 of its
canonical JSON, and every sealed message is bound to that id: parties that were told different things do not understand
each other. What a task costs a user follows from it alone (`costs`).

Which shuffler holds which slots of a task.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import math
import time
from typing import Any

import msgspec
import numpy as np

from dovetail import _validate, protocols
from dovetail._structs import resolve_fields
from dovetail.events import Everyone
from dovetail.parties.common.keys import KeyPair, PublicKey, ServiceKeys
from dovetail.parties.common.measures import Measure, check_measures, total_size_of_measures
from dovetail.parties.common.sealing import OVERHEAD, REPORT_ID, Purpose
from dovetail.parties.common.sharing import Sharing, sharing_of
from dovetail.parties.common.wire import Packed
from dovetail.protocols import Messages

__all__ = [
    "SignedTask",
    "SlotAssignment",
    "TrainingTask",
    "assign_slots",
    "cohort_of",
    "sign",
    "task_id_of",
    "verify",
]

_VERSION = 2
_LARGEST_TASK = 1 << 20  # bytes
_ABSENT = (b',"nonce":null}', b',"analyzer_sign":null}', b',"begins":null,"ends":null}')  # in this order


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A training in public terms, which its owner signs and everybody agrees on.

    Arguments:
        name: what it is called, for humans.
        protocol: name of an installed protocol.
        settings: the protocol's settings, noise included.
        dim: coordinates of a report: those of the update and those of the `measures`.
        rounds: number of rounds.
        min_clients: users of a round, at least; with fewer nothing is forwarded.
        max_clients: users of a round, at most.
        round_seconds: seconds that a round stays open.
        delta: of the budget of all rounds together.
        analyzer: key that reports are sealed to.
        shufflers: the shufflers that reports travel through: one, or more that slots are assigned to, in as many groups
            of equal size as the protocol has parties that shuffle.
        aggregators: instead, two or more aggregators that reports are shared between.
        eps: of the budget of all rounds together; None: nothing is promised.
        colluders: users of a round that may be fake or the adversary's.
        measures: statistics that are added up beside updates.
        held_out: part of the users that report measures in place of an update.
        version: of this format.
        begins: second from which users take part, if given.
        ends: second until which users take part, if given.
        analyzer_sign: key that status and models are signed with, if they are.
        nonce: random bytes that make it another task than one with the same terms: that one may have been withdrawn,
            or its rounds may be spent.
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
    begins: int | None = None
    ends: int | None = None
    analyzer_sign: PublicKey | None = None
    nonce: bytes | None = None

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
            raise ValueError("reports are sealed to the analyzer's key, and this one is to sign with")
        if self.analyzer_sign is not None and self.analyzer_sign.use != "sign":
            raise ValueError("status and models are signed with the key analyzer_sign, and this one is to seal with")
        if bool(self.shufflers) == bool(self.aggregators):
            raise ValueError(
                "a task names either shufflers or aggregators; "
                f"this one names {len(self.shufflers)} shufflers and {len(self.aggregators)} aggregators"
            )
        for use in ("sign", "seal"):
            if len({getattr(keys, use).public for keys in self.intermediaries}) < len(self.intermediaries):
                raise ValueError(f"two shufflers or aggregators have the same key to {use} with: each needs its own")
        self._check_time_window()
        check_measures(
            self.measures,
            held_out=self.held_out,
            dim=self.dim,
            shared=bool(self.aggregators),
            clip_norm=getattr(self.build()[0], "clip_norm", None),
        )
        if self.aggregators:
            self.contribution()
            return
        self.assign_slots()
        padding = self.build()[0].layout(self.dim).padding
        if padding is not None and padding.overflow != "drop" and padding.pad_to < self.max_clients:
            raise ValueError(
                f"{self.max_clients} users may overflow slots that are padded to {padding.pad_to}: "
                f"this needs overflow = 'drop', not {padding.overflow!r}"
            )

    @property
    def model_dim(self) -> int:
        """Length of the model and of an update: `dim` without the measures."""
        return self.dim - total_size_of_measures(self.measures)

    def build(self) -> tuple[protocols.Protocol, protocols.Cohort]:
        """The protocol object that every party runs, and the cohort it is settled on."""
        return _build_from_body(self.body)

    @property
    def budget(self) -> float:
        """The eps of all rounds; infinite if there is no guarantee."""
        return math.inf if self.eps is None else self.eps

    @property
    def intermediaries(self) -> tuple[ServiceKeys, ...]:
        """The keys of the services between users and analyzer: shufflers, or aggregators."""
        return self.shufflers or self.aggregators

    @property
    def analyzer_id(self) -> bytes:
        """The id that policies pin: of both of the analyzer's keys together, or of the only one that it has."""
        if self.analyzer_sign is None:
            return self.analyzer.key_id
        return ServiceKeys(sign=self.analyzer_sign, seal=self.analyzer).key_id

    def messages(self) -> protocols.Messages:
        """The messages that clients send through shufflers."""
        return self.build()[0].messages(self.dim)

    def contribution(self) -> protocols.Contribution:
        """What clients share between aggregators."""
        protocol, cohort = self.build()
        return protocol.contribution(cohort, self.dim)

    def sharing(self) -> Sharing:
        """How clients share their contribution between the aggregators."""
        return sharing_of(self.contribution(), len(self.aggregators))

    @property
    def has_proofs(self) -> bool:
        """Whether uploads carry proofs, which the aggregators verify."""
        return bool(self.aggregators) and self.contribution().proof is not None

    @property
    def message_bytes(self) -> int:
        """Bytes of a sealed message through shufflers, the same for all."""
        return self.messages().size + OVERHEAD

    @property
    def upload_bytes(self) -> int:
        """Bytes that a user sends in a round, to all shufflers or aggregators together, before TLS."""
        count = len(self.intermediaries)
        if self.aggregators:
            content = sum(map(self.sharing().size, range(count)))
        else:
            content = Packed.size(self.messages().per_client, length=self.message_bytes)
        return content + count * (REPORT_ID + OVERHEAD)

    def assign_slots(self) -> SlotAssignment:
        """Which shuffler holds which slots."""
        return assign_slots(self.messages(), len(self.shufflers))

    def message_purpose(self, round: int) -> Purpose:
        """What reports and dummies of a round are sealed for."""
        return Purpose(task_id=self.task_id, round=round, role="report", key_id=self.analyzer.key_id)

    def upload_purpose(self, round: int, index: int, *, sender: bytes, report: bytes) -> Purpose:
        """What a user's upload to a shuffler or aggregator is sealed for."""
        key_id = self.intermediaries[index].seal.key_id
        return Purpose(task_id=self.task_id, round=round, role="upload", key_id=key_id, sender=sender, report=report)

    def sum_purpose(self, round: int, index: int, *, batch: bytes) -> Purpose:
        """What an aggregator's sum over a batch of users is sealed for."""
        sender = self.aggregators[index].sign.key_id
        key_id = self.analyzer.key_id
        return Purpose(task_id=self.task_id, round=round, role="sum", key_id=key_id, sender=sender, report=batch)

    @property
    def body(self) -> bytes:
        """The canonical JSON: keys in order, no spaces; without the last ones where they are null."""
        body = msgspec.json.encode(self, order="deterministic")
        for absent in _ABSENT:
            body = body.removesuffix(absent) + b"}" if body.endswith(absent) else body
        return body

    def _check_time_window(self) -> None:
        _validate.non_negative(**_validate.not_none(begins=self.begins, ends=self.ends))
        if self.ends is not None and self.ends <= (self.begins or 0):
            raise ValueError(f"a task must end after it begins: begins={self.begins}, ends={self.ends}")

    def is_over(self, now: float | None = None) -> bool:
        """Whether its time is up at the second `now`, by default the present one."""
        return self.ends is not None and (time.time() if now is None else now) >= self.ends

    @functools.cached_property
    def task_id(self) -> bytes:
        """The SHA-256 of the canonical JSON."""
        return task_id_of(self.body)


class SignedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task's canonical JSON, with the signature and the public key of who is behind it."""

    body: bytes
    signature: bytes
    signer: PublicKey


def task_id_of(body: bytes) -> bytes:
    """The id of the task with this canonical JSON."""
    return hashlib.sha256(body).digest()


def sign(task: TrainingTask, pair: KeyPair) -> SignedTask:
    """Sign a task with the key pair of who is behind it.

    Guarantees:
        No key that is needed in a round expires before the last round's time is up, if the first one opens now.
    """
    if task.is_over():
        raise ValueError(f"this task ran {_window_in_words(task)}; it is now {_moment_in_words(time.time())}")
    end = max(time.time(), task.begins or 0) + task.rounds * task.round_seconds
    end = end if task.ends is None else min(end, task.ends)
    if owner := _owner_of_expired_key(task, pair.public, now=end):
        raise ValueError(
            f"a key of {owner} expires before {task.rounds} rounds of {task.round_seconds:g} seconds are over: "
            "make a new one (dovetail keys), or fewer or shorter rounds"
        )
    return SignedTask(body=task.body, signature=pair.sign(_message_to_sign(task.body)), signer=pair.public)


def verify(signed: SignedTask, *, signer: bytes, fresh: bool = True) -> TrainingTask:
    """The task in a signed one; refuses what the signer has not signed.

    Arguments:
        signed: the signed task, as it came.
        signer: id of the key that must have signed it.
        fresh: refuse a task that has not begun or is over, and keys that have expired; services that finish what was
            begun before do not.

    Guarantees:
        Only canonical JSON is accepted, so a task has one id.
        If `fresh`, its time has come and is not up, and no key of signer, analyzer or services has expired.
    """
    if len(signed.body) > _LARGEST_TASK:
        raise ValueError(f"expected a task of at most {_LARGEST_TASK} bytes, got {len(signed.body)} bytes")
    if signed.signer.key_id != signer:
        raise ValueError(f"expected a task signed by {signer.hex()}, got one by {signed.signer.key_id.hex()}")
    if not signed.signer.has_signed(_message_to_sign(signed.body), signed.signature):
        raise ValueError(f"the task does not bear the signature of {signer.hex()}: it was changed after it was signed")
    try:
        task = msgspec.json.decode(signed.body, type=resolve_fields(TrainingTask))
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is not a task of this version ({error})") from error
    if task.body != signed.body:
        raise ValueError("the task is not in canonical JSON: hand it on as it was signed, byte for byte")
    if fresh and (task.is_over() or time.time() < (task.begins or 0)):
        raise ValueError(f"this task runs {_window_in_words(task)}; it is now {_moment_in_words(time.time())}")
    if fresh and (owner := _owner_of_expired_key(task, signed.signer, now=time.time())):
        raise ValueError(f"a key of {owner} has expired: make a new one (dovetail keys) and a new task")
    return task


def _owner_of_expired_key(task: TrainingTask, signer: PublicKey, *, now: float) -> str | None:
    """Whose key of a task has expired: users refuse the task, or the analyzer what a shuffler sends."""
    kind = "shuffler" if task.shufflers else "aggregator"
    if signer.is_expired(now):
        return "the signer"
    if any(key.is_expired(now) for key in (task.analyzer, task.analyzer_sign) if key is not None):
        return "the analyzer"
    return next((f"{kind} {index}" for index, keys in enumerate(task.intermediaries) if keys.is_expired(now)), None)


def _window_in_words(task: TrainingTask) -> str:
    """The time that a task runs, in words."""
    bounds = (("from", task.begins), ("until", task.ends))
    return " ".join(f"{word} {_moment_in_words(second)}" for word, second in bounds if second is not None)


def _moment_in_words(second: float) -> str:
    return datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat(" ", "seconds")


def _message_to_sign(body: bytes) -> bytes:
    return b"dovetail task\0" + body


@functools.lru_cache(maxsize=64)
def _build_from_body(body: bytes) -> tuple[protocols.Protocol, protocols.Cohort]:
    """Build by a task's JSON, which is read here without its checks: those need what is built."""
    task = msgspec.json.decode(body)
    cohort = cohort_of(
        task["min_clients"], task["max_clients"], task["colluders"], aggregators=len(task["aggregators"]) or None
    )
    return protocols.build(task["protocol"], task["settings"]).settle(cohort, task["dim"]), cohort


def cohort_of(
    min_clients: int, max_clients: int, colluders: int, *, aggregators: int | None = None
) -> protocols.Cohort:
    """The cohort of every round of a task."""
    return protocols.Cohort(
        participation=Everyone(), size=max_clients, min_size=min_clients, colluders=colluders, aggregators=aggregators
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """Which shuffler holds which slots.

    Arguments:
        holder: for every slot, the index of its shuffler.
        place: for every slot, its number at that shuffler.
        slots: for every shuffler, its slots.
    """

    holder: np.ndarray
    place: np.ndarray
    slots: tuple[np.ndarray, ...]


def assign_slots(messages: Messages, shufflers: int) -> SlotAssignment:
    """Assign slots in turn to the shufflers that may hold them.

    Arguments:
        messages: what is sent, which says which of the protocol's shufflers may hold a slot.
        shufflers: how many shufflers there are; each of the protocol's is this many divided by the protocol's number.
    """
    group = messages.shuffler_of(np.arange(messages.slots))
    groups = int(group.max()) + 1
    if shufflers % groups or shufflers < groups:
        raise ValueError(f"expected {groups} shufflers or a multiple of that, got {shufflers}")
    rank = np.empty_like(group)  # of a slot, within its group
    for index in range(groups):
        rank[group == index] = np.arange(np.sum(group == index))
    per_group = shufflers // groups
    if per_group > np.min(np.bincount(group)):
        raise ValueError(f"expected at most one shuffler per slot, got {shufflers} for {messages.slots} slots")
    holder = group * per_group + rank % per_group
    return SlotAssignment(
        holder=holder,
        place=rank // per_group,
        slots=tuple(np.flatnonzero(holder == index) for index in range(shufflers)),
    )
