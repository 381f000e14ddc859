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
from cryptography.exceptions import InvalidSignature

from dovetail import _validate, protocols
from dovetail._structs import ready
from dovetail.events import Everyone
from dovetail.parties.common.keys import KeyPair, PublicKey, ServiceKeys
from dovetail.parties.common.measures import Measure, check_measures, size_of_measures
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
_ABSENT = (b',"nonce":null}', b',"analyzer_sign":null}', b',"begins":null,"ends":null}')  # not in older tasks


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A training in public terms.

    A round takes in `min_clients` to `max_clients` users, of whom up to `colluders` may be fake or the adversary's, and
    is open for `round_seconds`. `eps` and `delta` are the budget of all `rounds` together; without an `eps` nothing is
    promised. `analyzer` is the key that reports are sealed to, `analyzer_sign` the one that status and models are
    signed with, if they are. Reports travel through `shufflers`: one, or more that slots are dealt to, in as many
    groups of equal size as the protocol has parties that shuffle. Or they travel as shares of their sum between
    `aggregators`, two or more. Their keys are here, so that users know whom they talk to. `measures` are added up
    beside updates, their coordinates part of `dim`; `held_out` is the share of users that report them in place of an
    update. Users take part from the second `begins` until the second `ends`, if given. A random `nonce` makes it
    another task than one with the same terms: that one may have been withdrawn, or its rounds may be spent.
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
            raise ValueError("expected a key to seal with for the analyzer, got one to sign with")
        if self.analyzer_sign is not None and self.analyzer_sign.use != "sign":
            raise ValueError("expected a key to sign with for what the analyzer says, got one to seal with")
        if bool(self.shufflers) == bool(self.aggregators):
            raise ValueError("expected either shufflers or aggregators in a task, got both or neither")
        for use in ("sign", "seal"):
            if len({getattr(keys, use).public for keys in self.intermediaries}) < len(self.intermediaries):
                raise ValueError("expected different keys for every shuffler or aggregator, got one key twice")
        self._check_window()
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
            raise ValueError(f"expected overflow = 'drop' where slots may overflow, got {padding.overflow!r}")

    @property
    def model_dim(self) -> int:
        """Numbers of an update, without the measures beside it."""
        return self.dim - size_of_measures(self.measures)

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

    @property
    def analyzer_id(self) -> bytes:
        """What the analyzer is known by: both of its keys, or the one that it has."""
        sign = self.analyzer_sign
        return (self.analyzer if sign is None else ServiceKeys(sign=sign, seal=self.analyzer)).key_id

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
    def has_proofs(self) -> bool:
        """Whether aggregators verify what clients share."""
        return bool(self.aggregators) and self.contribution().proof is not None

    @property
    def message_bytes(self) -> int:
        """Bytes of a sealed message, the same for all."""
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
        """Slots in turn to the shufflers that may hold them."""
        return assign_slots(self.messages(), len(self.shufflers))

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
        """The canonical JSON: keys in order, no spaces; without the last ones if they are null, as tasks once were."""
        whole = msgspec.json.encode(self, order="deterministic")
        for absent in _ABSENT:
            whole = whole.removesuffix(absent) + b"}" if whole.endswith(absent) else whole
        return whole

    def _check_window(self) -> None:
        _validate.non_negative(**_validate.not_none(begins=self.begins, ends=self.ends))
        if self.ends is not None and self.ends <= (self.begins or 0):
            raise ValueError(f"expected a task that ends after it begins, got begins={self.begins}, ends={self.ends}")

    def is_over(self, now: float | None = None) -> bool:
        """Whether its time is up."""
        return self.ends is not None and (time.time() if now is None else now) >= self.ends

    @functools.cached_property
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
    if task.is_over():
        raise ValueError(f"expected a task that ends in the future, got ends={task.ends}")
    end = max(time.time(), task.begins or 0) + task.rounds * task.round_seconds
    end = end if task.ends is None else min(end, task.ends)
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
        If `fresh`, its time has come and is not up, and no key of signer, analyzer or shufflers has expired; services
        finish what was begun before.
    """
    if len(signed.body) > _LARGEST_TASK:
        raise ValueError(f"expected a task of at most {_LARGEST_TASK} bytes, got {len(signed.body)}")
    if signed.signer.key_id != signer:
        raise ValueError(f"expected a task signed by {signer.hex()}, got one by {signed.signer.key_id.hex()}")
    try:
        signed.signer.verifying_key().verify(signed.signature, _signed(signed.body))
    except InvalidSignature as error:
        raise ValueError("expected a task with its signer's signature, got one with a wrong signature") from error
    try:
        task = msgspec.json.decode(signed.body, type=ready(TrainingTask))
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a task, got invalid content ({error})") from error
    if task.body != signed.body:
        raise ValueError("expected a task in canonical JSON, got it in another form")
    if fresh and (task.is_over() or time.time() < (task.begins or 0)):
        raise ValueError(f"this task runs {_window(task)}; it is now {_moment(time.time())}")
    if fresh and (whose := _first_expired(task, signed.signer, now=time.time())):
        raise ValueError(f"expected a key of {whose} that has not expired, got one that has")
    return task


def _first_expired(task: TrainingTask, signer: PublicKey, *, now: float) -> str | None:
    """Whose key is of no use any more: users refuse the task, or the analyzer what a shuffler sends."""
    kind = "shuffler" if task.shufflers else "aggregator"
    if signer.is_expired(now):
        return "the signer"
    if any(key.is_expired(now) for key in (task.analyzer, task.analyzer_sign) if key is not None):
        return "the analyzer"
    return next((f"{kind} {index}" for index, keys in enumerate(task.intermediaries) if keys.is_expired(now)), None)


def _window(task: TrainingTask) -> str:
    bounds = (("from", task.begins), ("until", task.ends))
    return " ".join(f"{word} {_moment(second)}" for word, second in bounds if second is not None)


def _moment(second: float) -> str:
    return datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat(" ", "seconds")


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
        participation=Everyone(), size=max_clients, min_size=min_clients, colluders=colluders, aggregators=aggregators
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotAssignment:
    """Which shuffler holds which slots: `holder` and `place` (the slot's number there) by slot, `slots` by shuffler."""

    holder: np.ndarray
    place: np.ndarray
    slots: tuple[np.ndarray, ...]


def assign_slots(messages: Messages, shufflers: int) -> SlotAssignment:
    """Slots in turn to the shufflers that may hold them."""
    party = messages.shuffler_of(np.arange(messages.slots))
    parties, processes = int(party.max()) + 1, shufflers
    if processes % parties or processes < parties:
        raise ValueError(f"expected {parties} shufflers or a multiple of that, got {processes}")
    rank = np.empty_like(party)
    for one in range(parties):
        rank[party == one] = np.arange(np.sum(party == one))
    each = processes // parties
    if each > np.min(np.bincount(party)):
        raise ValueError(f"expected at most one shuffler per slot, got {processes} for {messages.slots} slots")
    return SlotAssignment(
        holder=party * each + rank % each,
        place=rank // each,
        slots=tuple(np.flatnonzero(party * each + rank % each == index) for index in range(processes)),
    )
