"""What is to be learned, by which protocol, from how many, for how much: signed, and named by its hash.

A `TrainingTask` says everything that clients, shufflers and analyzer must agree on. Its id is the SHA-256 of its
canonical JSON, and every sealed message is bound to that id: parties that were told different things do not understand
each other. What a task costs a user follows from it alone (`cost`): the `Guarantee` that `dovetail account protocol`
asks too, less what exact sampling falls short of.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from cryptography.exceptions import InvalidSignature

from dovetail import _validate, protocols
from dovetail.events import Everyone
from dovetail.guarantee import Guarantee, Spread
from dovetail.parties.common.keys import KeyPair, PublicKey
from dovetail.parties.common.sealing import OVERHEAD, Purpose
from dovetail.statements import Spent, Statement, unbounded

__all__ = ["Deal", "SignedTask", "TrainingTask", "calibrated", "cost", "sign", "task_id_of", "verify"]

_VERSION = 1
_LARGEST_TASK = 1 << 20  # bytes
_ONE_AT_A_TIME = threading.Lock()
_CHARGED = 1e-6  # of delta: for what sampling on a computer is off by


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
    promised. `analyzer` is the key that reports are sealed to, `shufflers` the keys that its shufflers sign with: one,
    or more that slots are dealt to, in as many groups of equal size as the protocol has parties that shuffle.
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
    shufflers: tuple[PublicKey, ...]
    eps: float | None = None
    colluders: int = 0
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
        if self.analyzer.use != "seal" or any(key.use != "sign" for key in self.shufflers):
            raise ValueError("expected a key to seal with for the analyzer and keys to sign with for the shufflers")
        if len({key.public for key in self.shufflers}) < len(self.shufflers):
            raise ValueError("expected a different key for every shuffler, got one key twice")
        self.deal()
        padding = self.build()[0].layout(self.dim).padding
        if padding is not None and padding.overflow != "drop" and padding.pad_to < self.max_clients:
            raise ValueError(f"expected overflow = 'drop' where slots may overflow, got {padding.overflow!r}")

    def build(self) -> tuple[protocols.Protocol, protocols.Cohort]:
        """The protocol object that every party runs, and the cohort it is settled on."""
        cohort = _cohort(self.min_clients, self.max_clients, self.colluders)
        return protocols.build(self.protocol, self.settings).settle(cohort, self.dim), cohort

    @property
    def budget(self) -> float:
        """The eps of all rounds; infinite if there is no guarantee."""
        return math.inf if self.eps is None else self.eps

    def messages(self) -> protocols.Messages:
        """What clients send."""
        return self.build()[0].messages(self.dim)

    @property
    def length(self) -> int:
        """Bytes of a sealed message, the same for all."""
        return self.messages().size + OVERHEAD

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
        task = msgspec.json.decode(signed.body, type=TrainingTask)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a task, got invalid content ({error})") from error
    if task.body != signed.body:
        raise ValueError("expected a task in canonical JSON, got it in another form")
    if fresh and (whose := _first_expired(task, signed.signer, now=time.time())):
        raise ValueError(f"expected a key of {whose} that has not expired, got one that has")
    return task


def _first_expired(task: TrainingTask, signer: PublicKey, *, now: float) -> str | None:
    """Whose key is of no use any more: users refuse the task, or the analyzer what a shuffler sends."""
    shufflers = {f"shuffler {index}": key for index, key in enumerate(task.shufflers)}
    keys = {"the signer": signer, "the analyzer": task.analyzer, **shufflers}
    return next((whose for whose, key in keys.items() if key.expired(now)), None)


def _signed(body: bytes) -> bytes:
    return b"dovetail task\0" + body


def _cohort(min_clients: int, max_clients: int, colluders: int) -> protocols.Cohort:
    return protocols.Cohort(participation=Everyone(), size=max_clients, min_size=min_clients, colluders=colluders)


def calibrated(
    *,
    protocol: str,
    settings: Mapping[str, Any],
    dim: int,
    rounds: int,
    min_clients: int,
    max_clients: int,
    colluders: int,
    eps: float | None,
    delta: float,
) -> dict[str, Any]:
    """The settings with their noise set: as given, or such that all rounds together cost at most `eps`."""
    built = protocols.build(protocol, settings)
    if built.calibrated:
        return dict(settings)
    if eps is None or built.noise_field is None:
        raise ValueError(f"expected privacy.eps or protocol.{built.noise_field}, got neither")
    training = _guarantee(
        built, _cohort(min_clients, max_clients, colluders), rounds, dim=dim, delta=delta * (1 - _CHARGED)
    )
    return {**settings, built.noise_field: getattr(training.calibrated(eps).protocol, built.noise_field)}


def _guarantee(
    protocol: protocols.Protocol,
    cohort: protocols.Cohort,
    rounds: int,
    *,
    dim: int,
    delta: float,
    assumptions: tuple[str, ...] = (),
) -> Guarantee:
    """So many rounds of a task, each with the fewest users that it may have."""
    return Guarantee(
        protocol=protocol,
        cohorts=(cohort,) * rounds,
        dim=dim,
        relation=protocol.relation,
        delta=delta,
        spread=Spread(users=cohort.size),
        assumptions=assumptions,
    )


@functools.lru_cache(maxsize=256)
def _cost(body: bytes, rounds: int) -> tuple[Statement, Statement]:
    task = msgspec.json.decode(body, type=TrainingTask)
    protocol, cohort = task.build()
    messages = protocol.messages(task.dim)
    delta = task.delta * (1 - _CHARGED) if messages.distance else task.delta
    training = _guarantee(protocol, cohort, rounds, dim=task.dim, delta=delta, assumptions=tuple(messages.assumptions))
    record = training.record()
    certified = dataclasses.replace(record.certified(), delta=task.delta)
    if messages.distance and not certified.unbounded:
        charged = Spent(task.delta * _CHARGED, "samples whose law is not exact")
        certified = dataclasses.replace(certified, proof=certified.proof.spending(charged))
    if messages.distance and not certified.unbounded:
        off = messages.distance * task.max_clients * rounds
        if not math.log1p(math.exp(min(certified.eps, 700))) + math.log(off) <= math.log(task.delta * _CHARGED):
            reason = "not certified: sampling is too coarse for so large an eps"
            certified = unbounded(training.scope, reason=reason, delta=task.delta).judged(record.verdict)
    local = record.local()
    said = dict.fromkeys((*local.assumptions, *messages.assumptions))
    local = dataclasses.replace(local, assumptions=tuple(said))
    return certified, local


def cost(task: TrainingTask, rounds: int) -> tuple[Statement, Statement]:
    """What so many rounds of a task cost a user: against the analyzer, and if nobody is trusted.

    Rounds are counted with the fewest users that one may have; how many really come is nobody's promise.
    """
    _validate.integer(rounds=rounds)
    _validate.in_interval(1, task.rounds, rounds=rounds)
    with _ONE_AT_A_TIME:  # users that share a process would all compute the same
        return _cost(task.body, rounds)
