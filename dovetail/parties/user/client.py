"""A user's side: what leaves a user is randomized, sealed, and charged to its own ledger.

For every round: the policy admits the task, the round is spent, the update is randomized from the operating system's
randomness and sealed message by message; the envelope is on disk before anything is sent, so that a user who is
interrupted sends the same envelope again and never randomizes twice. `take_part` is the loop around it: fetch the
model, train, report, upload to every shuffler until each has it.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol as Interface

import msgspec
import numpy as np

from dovetail.files import write_atomically
from dovetail.mechanisms import ExactSampler
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.links import Gone, ShufflerLink, Unreachable
from dovetail.parties.common.policy import BudgetSpent, Later, Policy, Refused, Spending
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.task import SignedTask, TrainingTask
from dovetail.parties.common.wire import REPORT_ID, Packed, Upload

__all__ = ["Client", "Envelope", "Reporter", "Train", "take_part"]

_SHORTEST, _LONGEST = 0.05, 2.0  # seconds between questions
Train = Callable[[np.ndarray], np.ndarray]  # from the model to the update, both flat float32 vectors


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a user sends in a round: an upload for every shuffler."""

    task_id: bytes
    round: int
    uploads: tuple[Upload, ...]

    def encode(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Envelope:
        """From bytes."""
        return msgspec.msgpack.decode(data, type=cls)


class Reporter(Interface):
    """Who turns an update into an envelope: a `Client`, or the agent that runs one on this machine."""

    def report(self, signed: SignedTask, round: int, update: np.ndarray) -> Envelope:
        """The envelope of a round."""
        ...


class Client:
    """One user: its folder, its conditions, the key that its uploads are signed with.

    Guarantees:
        Nothing is randomized that the policy does not admit, or that was not spent first.
        A round has one envelope, however often it is asked for.
        An update whose squared norm is not finite is reported as zero, to whatever protocol.
    """

    def __init__(self, folder: Path, *, policy: Policy, key: KeyPair) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._outbox = folder / "outbox"
        self._outbox.mkdir(exist_ok=True, mode=0o700)
        self._policy, self.key = policy, key
        self._spending = Spending(folder / "spending", policy)
        self._sampler = ExactSampler()

    def admit(self, signed: SignedTask) -> TrainingTask:
        """The task, if this user agrees to it."""
        return self._policy.admit(signed)

    def refuse_early(self, task: TrainingTask, round: int) -> None:
        """Refuse a round that comes too soon or that no shuffler would accept, before training and spending budget."""
        if self.key.public.expired():
            raise Refused("expected a key of this user that has not expired, got one that has")
        if not self._kept(task.task_id, round).exists():
            self._spending.refuse_early()

    def report(self, signed: SignedTask, round: int, update: np.ndarray) -> Envelope:
        """Randomize and seal the update of a round; the same round again gives the same envelope."""
        task = self._policy.admit(signed)
        path = self._kept(task.task_id, round)
        if path.exists():
            return Envelope.decode(path.read_bytes())
        for old in self._outbox.glob(f"{task.task_id.hex()}-*"):
            old.unlink()  # of rounds that are over
        update = np.asarray(update, np.float32)
        if update.shape != (task.dim,):
            raise ValueError(f"expected an update of {task.dim} numbers, got shape={update.shape}")
        self._spending.spend(task, round)
        sent = task.messages().randomize(finite_or_zero(update), sampler=self._sampler)
        key, purpose = task.analyzer.sealing(), task.purpose(round)
        sealed = [seal(body.tobytes(), key, purpose) for body in sent.body]
        deal, report = task.deal(), secrets.token_bytes(REPORT_ID)
        uploads = []
        for shuffler in range(len(task.shufflers)):
            mine = np.flatnonzero(deal.holder[sent.slot] == shuffler)
            packed = Packed(deal.place[sent.slot[mine]], b"".join(sealed[i] for i in mine))
            uploads.append(Upload(report, packed.encode()))
        envelope = Envelope(task_id=task.task_id, round=round, uploads=tuple(uploads))
        write_atomically(path, envelope.encode())
        return envelope

    def sent(self, envelope: Envelope) -> None:
        """Forget an envelope that everybody has; the round stays spent."""
        self._kept(envelope.task_id, envelope.round).unlink(missing_ok=True)

    def _kept(self, task_id: bytes, round: int) -> Path:
        return self._outbox / f"{task_id.hex()}-{round}"


def take_part(
    client: Client,
    shufflers: Sequence[ShufflerLink],
    train: Train,
    *,
    patience: float = 60.0,
) -> int:
    """Take part in a training until it is over; the number of rounds that this user reported to.

    `patience` is how many seconds in a row nobody may answer. A round that this user came too late for is skipped; what
    it spent on it stays spent.
    """
    reported, last, heard, pause = 0, 0, time.monotonic(), _SHORTEST
    while True:
        try:
            status = shufflers[0].status()
            heard = time.monotonic()
            if status.over:
                return reported
            if status.round > last:
                signed = shufflers[0].task()
                task = client.admit(signed)
                if len(shufflers) != len(task.shufflers):
                    raise Refused(f"expected the task's {len(task.shufflers)} shufflers, got {len(shufflers)}")
                client.refuse_early(task, status.round)
                model = shufflers[0].model(status.round - 1, dim=task.dim)
                envelope = client.report(signed, status.round, train(model))
                if _upload(envelope, shufflers, patience):
                    reported += 1
                client.sent(envelope)
                last, pause = status.round, _SHORTEST
        except Gone:
            pass  # the round went on meanwhile
        except Later:
            pass  # perhaps the round is still open then
        except BudgetSpent:
            last = status.round  # it was here before, and was interrupted
        except Unreachable:
            if time.monotonic() - heard > patience:
                raise
        time.sleep(pause * (0.5 + random.random()))  # not all users at once
        pause = min(_LONGEST, 1.2 * pause)


def _upload(envelope: Envelope, shufflers: Sequence[ShufflerLink], patience: float) -> bool:
    """To every shuffler, again and again until it answers; whether all of them took it."""
    heard = time.monotonic()
    left = list(range(len(shufflers)))
    while left:
        try:
            shufflers[left[0]].upload(envelope.round, envelope.uploads[left[0]])
            left.pop(0)
            heard = time.monotonic()
        except Gone:
            return False
        except Unreachable:
            if time.monotonic() - heard > patience:
                raise
            time.sleep(0.1)
    return True
