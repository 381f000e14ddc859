"""A user's side of a training: what leaves a user is randomized, sealed, and charged to its own ledger.

For every round: the policy admits the task, the round is spent, the update is randomized from the operating system's
randomness. Messages are sealed one by one to the analyzer, and all that is for one shuffler to that shuffler; shares
are sealed to their aggregators. The envelope is on disk before anything is sent, so that a user who is interrupted
sends the same envelope again and never randomizes twice. `participation` is the loop around it.

`rotate_user` puts a new key in the place of a user's old one; everything else in its folder stays, its ledgers above
all.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from typing import Protocol as Interface

import msgspec
import numpy as np

from dovetail._structs import resolve_fields
from dovetail.files import write_atomically
from dovetail.mechanisms import ExactSampler
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.parties.common.http_clients import IntermediaryClient
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.measures import append_measures, is_held_out
from dovetail.parties.common.notices import Notices, SignedNotice, read_notices, rotate_key, write_notices
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.sharing import proof_nonce
from dovetail.parties.common.task import SignedTask, TrainingTask
from dovetail.parties.common.wire import (
    CLOCK_SKEW,
    REPORT_ID,
    Forged,
    Packed,
    RoundStatus,
    Upload,
    check_status,
    signature_of,
    upload_path,
)
from dovetail.parties.user.consent import Consent
from dovetail.parties.user.policy import Policy, Refused
from dovetail.parties.user.spending import RollbackGuard, Spending, default_guard_folder

__all__ = [
    "USER",
    "Client",
    "Envelope",
    "Reporter",
    "RoundCall",
    "rollback_guard_of",
    "rotate_user",
]

USER = "user"  # the file with the id of a user's first key, once it has rotated it

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def rollback_guard_of(folder: Path, key: KeyPair, guards: Path) -> RollbackGuard:
    """What remembers the spending of the user with this folder, whichever key it has by now.

    Arguments:
        folder: the user's own.
        key: its key pair.
        guards: the folder of rollback guards, elsewhere, with a file for every user.
    """
    first = (folder / USER).read_text(encoding="utf-8").strip() if (folder / USER).exists() else key.public.key_id.hex()
    return RollbackGuard(guards / f"{first}.json")


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a user sends in a round: an upload for every shuffler or aggregator.

    `sender` is the id of the user's key, which has signed every upload: who carries an envelope cannot change it, or
    take it for its own.
    """

    task_id: bytes
    round: int
    sender: bytes
    uploads: tuple[Upload, ...]
    signatures: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The envelope as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """What `encode` wrote."""
        return msgspec.msgpack.decode(data, type=resolve_fields(cls))

    def send_upload(self, index: int, service: IntermediaryClient) -> None:
        """Send the upload for the shuffler or aggregator with this index to it."""
        upload, signature = self.uploads[index], self.signatures[index]
        service.upload(self.task_id, self.round, upload, sender=self.sender, signature=signature)


class RoundCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What calls a user to a round, passed on by somebody that it need not trust, such as a relay.

    Arguments:
        signed: the task, with its signer's signature.
        status: which round is open and until when, with the analyzer's signature.
        notices: what the signer has announced.
    """

    signed: SignedTask
    status: RoundStatus
    notices: tuple[SignedNotice, ...] = ()


class Reporter(Interface):
    """What turns an update into an envelope: a `Client`, or the agent that runs one on this machine."""

    def answer(self, call: RoundCall, update: np.ndarray, facts: Mapping[str, Any] = ...) -> Envelope:
        """The envelope of the round that the call is for."""
        ...


class Client:
    """One user.

    Arguments:
        folder: its own, with its ledgers, its consent, and envelopes that wait to be sent.
        policy: its conditions.
        key: the key pair that its uploads are signed with.
        witness: folder elsewhere, in which a rollback guard notices if the ledgers are set back; True: where the
            platform keeps the state of programs; False: there is none.

    Guarantees:
        Nothing is randomized that the policy does not admit, that the user has left, or that was not spent first.
        A round has one envelope, however often it is asked for.
        An update whose squared norm is not finite is reported as zero, to whatever protocol.
    """

    def __init__(self, folder: Path, *, policy: Policy, key: KeyPair, witness: Path | bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._outbox = folder / "outbox"
        self._outbox.mkdir(exist_ok=True, mode=0o700)
        self._policy = policy
        self.key = key
        guards = default_guard_folder() if witness is True else witness
        guard = None if guards is False else rollback_guard_of(folder, key, guards)
        self._spending = Spending(folder / "spending", policy, guard)
        self._notices_path = folder / "notices.json"
        self.notices = self._read_notices()
        self._sampler = ExactSampler()

    def admit(self, signed: SignedTask) -> TrainingTask:
        """The task, if this user agrees to it and has not left it; else `Refused`."""
        task = self._policy.admit(signed, self.notices)
        Consent.read(self._folder).check(task)
        return task

    def verify_signer(self, signed: SignedTask) -> TrainingTask:
        """The task, if the pinned signer has signed it, also one that is over or that this user does not agree to."""
        return self._policy.verify_signer(signed, self.notices, fresh=False)

    def receive_notices(self, signed: Iterable[SignedNotice]) -> None:
        """Remember what the signer announces, for good, beside what other processes of this user have received."""
        self.notices = self._read_notices()
        if self.notices.receive(signed):
            write_notices(self._notices_path, self.notices.signed)

    def _read_notices(self) -> Notices:
        policy = self._policy
        return read_notices(self._notices_path, policy.signer, recovery=policy.recovery, in_order=True)

    def refuse_ended(self, signed: SignedTask) -> None:
        """Refuse to send anything more to a task that this user has left, or that its signer ended."""
        if reason := self.notices.why_ended(signed):
            raise Refused(reason)
        Consent.read(self._folder).check(self.verify_signer(signed))

    def refuse_early(self, task: TrainingTask, round: int) -> None:
        """Refuse a round that comes too soon or that no service would accept, before training and spending budget."""
        if self.key.public.is_expired():
            raise Refused(
                f"this user's key {self.key.public.key_id.hex()} has expired: make a new one (dovetail client rotate) "
                "and have it enrolled"
            )
        self._spending.refuse_set_back(task.task_id)
        if not self._envelope_path(task.task_id, round).exists():
            self._spending.refuse_early()

    def answer(self, call: RoundCall, update: np.ndarray, facts: Mapping[str, Any] = _NOTHING) -> Envelope:
        """Report to the round of a call; refuses before anything is spent if the analyzer has not opened that round.

        Arguments:
            call: what calls to the round.
            update: the user's update of the model.
            facts: what the task's measures ask for, by name.
        """
        self.receive_notices(call.notices)
        task = self.admit(call.signed)
        status = call.status
        if task.analyzer_sign is None:
            raise Refused("the task names no key that its analyzer signs with, so nobody can tell which round is open")
        try:
            check_status(status, task_id=task.task_id, key=task.analyzer_sign)
        except Forged as error:
            raise Refused(str(error)) from error
        if status.over:
            raise Refused(f"the training is over: round {status.round} was the last")
        if status.seconds_late > CLOCK_SKEW:
            raise Refused(f"round {status.round} closed {status.seconds_late:.0f} seconds ago by this machine's clock")
        return self.report(call.signed, status.round, update, facts)

    def report(
        self, signed: SignedTask, round: int, update: np.ndarray, facts: Mapping[str, Any] = _NOTHING
    ) -> Envelope:
        """Spend a round, and randomize and seal its update; the same round again gives the same envelope.

        Arguments:
            signed: the task, with its signer's signature.
            round: the round.
            update: the user's update of the model.
            facts: what the task's measures ask for, by name.
        """
        task = self.admit(signed)
        path = self._envelope_path(task.task_id, round)
        if path.exists():
            return Envelope.decode(path.read_bytes())
        for old in self._outbox.glob(f"{task.task_id.hex()}-*"):
            old.unlink()  # of rounds that are over
        update = np.asarray(update, np.float32)
        if update.shape != (task.model_dim,):
            raise ValueError(f"the task takes updates of shape ({task.model_dim},), got shape={update.shape}")
        if task.measures:
            update = self._append_measures(task, finite_or_zero(update), facts)
        Consent.read(self._folder).remember_task(task, self._folder)
        self._spending.spend(task, round)
        randomize = self._randomize_to_shares if task.aggregators else self._randomize_to_messages
        report = secrets.token_bytes(REPORT_ID)
        envelope = self._seal_envelope(task, round, report, randomize(task, round, report, finite_or_zero(update)))
        write_atomically(path, envelope.encode())
        return envelope

    def _append_measures(self, task: TrainingTask, update: np.ndarray, facts: Mapping[str, Any]) -> np.ndarray:
        protocol, _ = task.build()
        held_out = is_held_out(task.task_id, self.key.public.key_id, task.held_out)
        return append_measures(
            task.measures, update, facts, clip_norm=getattr(protocol, "clip_norm", 0.0), held_out=held_out
        )

    def _randomize_to_messages(self, task: TrainingTask, round: int, report: bytes, update: np.ndarray) -> list[bytes]:
        """What every shuffler gets: messages for the analyzer, and their slots."""
        sent = task.messages().randomize(update, sampler=self._sampler)
        key = task.analyzer.sealing_key()
        purpose = task.message_purpose(round)
        sealed = [seal(body.tobytes(), key, purpose) for body in sent.body]
        assignment = task.assign_slots()
        contents = []
        for shuffler in range(len(task.shufflers)):
            mine = np.flatnonzero(assignment.holder[sent.slot] == shuffler)
            contents.append(Packed(assignment.place[sent.slot[mine]], b"".join(sealed[i] for i in mine)).encode())
        return contents

    def _randomize_to_shares(self, task: TrainingTask, round: int, report: bytes, update: np.ndarray) -> list[bytes]:
        """What every aggregator gets: its share of this user's contribution, with its share of a proof if it asks."""
        budget = self._policy.budget(task)
        integers = task.contribution().draw(update, sampler=self._sampler, budget=budget)
        nonce = proof_nonce(task.task_id, round, self.key.public.key_id, report)
        return task.sharing().shard(integers, nonce=nonce)

    def _seal_envelope(self, task: TrainingTask, round: int, report: bytes, contents: Sequence[bytes]) -> Envelope:
        """Seal the contents to whom they are for, and sign them."""
        task_id = task.task_id
        sender = self.key.public.key_id
        uploads = []
        signatures = []
        for index, (keys, content) in enumerate(zip(task.intermediaries, contents, strict=True)):
            purpose = task.upload_purpose(round, index, sender=sender, report=report)
            uploads.append(Upload(report, seal(content, keys.seal.sealing_key(), purpose)))
            path = upload_path(task_id, round, index)
            signatures.append(signature_of(self.key, "POST", path, uploads[-1].encode()))
        return Envelope(
            task_id=task_id, round=round, sender=sender, uploads=tuple(uploads), signatures=tuple(signatures)
        )

    def forget_envelope(self, envelope: Envelope) -> None:
        """Delete an envelope that every service has, or that comes too late; the round stays spent."""
        self._envelope_path(envelope.task_id, envelope.round).unlink(missing_ok=True)

    def _envelope_path(self, task_id: bytes, round: int) -> Path:
        return self._outbox / f"{task_id.hex()}-{round}"


def rotate_user(folder: Path, *, days: int = 365) -> bytes:
    """Make a successor to the key of a user's folder.

    The old key endorses the new one in `rotation-ID.json`, which is for whoever enrolled the user, and is kept as
    `key-ID.json`. The new key takes its place last: who is interrupted has the old one, and begins again.

    Arguments:
        folder: the user's folder, with `key.json`.
        days: days until the new key expires.

    Returns: the id of the new key.
    """
    old = KeyPair.load(folder / "key.json")
    new = KeyPair.generate("sign", days=days)
    name = old.public.key_id.hex()
    if not (folder / USER).exists():
        write_atomically(folder / USER, f"{name}\n".encode(), mode=0o600)
    if not (folder / f"key-{name}.json").exists():
        old.save(folder / f"key-{name}.json")
    rotation = rotate_key(old.public, new.public, by=old)
    write_atomically(folder / f"rotation-{name}.json", msgspec.json.encode(rotation))
    write_atomically(folder / "public.json", msgspec.json.encode(new.public))
    (folder / "key-new.json").unlink(missing_ok=True)
    new.save(folder / "key-new.json")
    (folder / "key-new.json").replace(folder / "key.json")
    return new.public.key_id
