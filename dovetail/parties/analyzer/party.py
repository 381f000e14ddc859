"""The analyzer: it opens what shufflers or aggregators forward, adds it up, and releases models within the budget.

Before a round takes in anything its cost is certified, with the task's minimum of honest users, and reserved in the
ledger. Parts of batches are opened and added to the sums of the round (`incoming`). When every shuffler or aggregator
has said that it is done, the estimate moves the model; the model is kept, then the ledger releases it, and only then
does anybody get it. Each step is durable before the next, and done again after a crash it gives the same.

A round with fewer users than the minimum is void. One is spoiled in which shares do not open, other numbers of messages
came than its users send, aggregators added up different users, or somebody began a second batch or drew a part anew, as
one whose store was restored from a copy does: the model stays as it is, and what was reserved stays spent.

Whether an analyzer's ledger and book belong together, or one of them was restored from an older copy.

Why a round released nothing, in a sentence for its owner.

What an analyzer tells machines and people about its training: the statement, what was spent, how rounds ended.

What the analyzer says to everybody, signed once for every round, with the key that the task names for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dovetail.files import hold
from dovetail.parties.analyzer.incoming import incoming_of
from dovetail.parties.analyzer.learning import Learner, Learning
from dovetail.parties.analyzer.store import AnalyzerStore, Checkpoint, Refusals, Stale
from dovetail.parties.common.database import locate_store, retry_until_available
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.keys import KeyRing
from dovetail.parties.common.ledger import Ledger, Overspent
from dovetail.parties.common.task import SignedTask, TrainingTask, verify
from dovetail.parties.common.wire import (
    Closed,
    Malformed,
    RoundStatus,
    TooEarly,
    TooLate,
    sign_model,
    sign_status,
    vector_to,
)
from dovetail.statements import Statement

__all__ = [
    "Analyzer",
    "RoundSigner",
    "check_same_backup",
    "incomplete",
    "privacy_facts",
    "set_back",
    "silent",
    "void",
]


class Analyzer:
    """The analyzer of one task, or one replica of it, without the network around it; replicas share a `store`, a URL.

    Guarantees:
        A round is reserved in the ledger before it is open, and a model is released there before anybody gets it.
        Every part counts once.
        A ledger or a book that was restored from an older copy is refused.
        Memory does not grow with the number of reports.
    """

    def __init__(
        self,
        folder: Path,
        *,
        signed: SignedTask,
        signer: bytes,
        keys: KeyRing,
        learning: Learning,
        workers: int | None = None,
        store: str | None = None,
    ) -> None:
        self.signed = signed
        self.task: TrainingTask = verify(signed, signer=signer, fresh=False)
        self._learner = Learner(self.task, learning)
        self._alone = hold(folder)
        key = keys.find(self.task.analyzer.key_id).opening_key()
        self.announcer = RoundSigner(self.task, keys)
        self.incoming = incoming_of(self.task, key, self._learner, workers=workers)
        self._lock, self._inside = threading.RLock(), False
        self._store = retry_until_available(lambda: AnalyzerStore(locate_store(store, folder, "book.db")))
        budget = {"eps": self.task.budget, "delta": self.task.delta}
        where = locate_store(store, folder, "ledger.db")
        self.ledger = retry_until_available(lambda: Ledger(where, task_id=self.task.task_id, **budget))
        retry_until_available(self._resume)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread of one replica at a time, who knows what the others did."""
        with self._lock:
            if self._inside:
                yield
                return
            with self._store.exclusive():
                self._inside = True
                try:
                    self._catch_up()
                    yield
                finally:
                    self._inside = False

    def _catch_up(self) -> None:
        """See what other replicas reserved and ended; open what one that died did not get to."""
        self.ledger.refresh()
        if (settled := self._store.last_ended()) >= self._round + self._over:
            self._open(settled + 1)

    def _look(self) -> None:
        """Catch up if there is something to catch up with."""
        if self._store.last_ended() >= self._round + self._over:
            with self._turn():
                pass

    def status(self) -> RoundStatus:
        """Which round is open, and until when, signed."""
        with self._lock:
            self._look()
            where = RoundStatus(
                task_id=self.task.task_id, round=self._round, over=self._over, head=self._head, closes=self._closes
            )
            return self.announcer.status(where)

    def model(self, round: int) -> bytes:
        """The model after a round, if it was released; a round without a release has that of the round before.

        Users train on what it is; when training is over, that of the last round is the one to publish.
        """
        with self._lock:
            self._look()
            if round >= self._round + self._over:
                raise TooLate(f"expected a round whose model was released, got round {round}")
            leaves = self._store.released_model(round).leaves
            last = self._over and round == self._round
            return vector_to(self._learner.model_to_publish(leaves) if last else leaves[0])

    def take(self, sender: int, round: int, batch: bytes, number: int, data: bytes) -> Literal["accepted", "known"]:
        """Count a part of the batch of a shuffler or aggregator, once."""
        with self._lock:
            self._look()
            self._refuse_other(round)
        self._refuse_second(sender, round, batch)
        marks = self.incoming.marks(sender, data)
        if self._store.has_part(round, sender, number):
            self._refuse_redrawn(sender, round, marks)
            return "known"
        while True:
            repeated = self._store.repeated_marks(round, marks)
            part = self.incoming.read(sender, round, batch, data, repeated=repeated)
            with self._turn():
                self._refuse_other(round)
                self._refuse_second(sender, round, batch)
                if sender in self._store.closures(round):
                    raise Malformed(f"expected no more parts of sender {sender}, which has closed round {round}")
                with contextlib.suppress(Stale):
                    if self._store.count(round, sender, batch, number, marks=marks, **part._asdict()):
                        return "accepted"
                    self._refuse_redrawn(sender, round, marks)
                    return "known"

    def note_closed(self, sender: int, round: int, said: Closed) -> None:
        """Note that a shuffler or aggregator is done; after the last one the round ends."""
        with self._turn():
            if round < self._round:
                return  # it did not hear the answer
            self._refuse_other(round)
            self._refuse_second(sender, round, said.batch)
            if said.state == "sent" and self._store.parts(round, sender) != said.parts:
                counted = self._store.parts(round, sender)
                raise Malformed(f"expected the {said.parts} parts that sender {sender} sent, got {counted}")
            self._store.note_closed(round, sender, said)
            self._end_if_complete()

    def _refuse_second(self, sender: int, round: int, batch: bytes) -> None:
        """End a round in which somebody begins another batch: its store was set back, or it is not honest."""
        with self._turn():
            if self._store.batch(round, sender) in (None, batch):
                return
            self._spoil(round, set_back(self.task, sender, "began a second batch"))
        raise TooLate(f"expected the batch that sender {sender} has begun in round {round}, got another one")

    def _refuse_redrawn(self, sender: int, round: int, marks: list[bytes]) -> None:
        """End a round in which a part that was counted comes again with other messages: it was drawn twice.

        Aggregators call a batch by its users, so that one whose store was set back comes with the same batch again.
        """
        with self._turn():
            if len(self._store.repeated_marks(round, marks)) == len(marks):
                return
            self._spoil(round, set_back(self.task, sender, "drew a part anew"))
        raise TooLate(f"expected the part that sender {sender} has sent in round {round}, got another one")

    def _spoil(self, round: int, reason: str) -> None:
        self._refuse_other(round)
        self._store.end_round(round, "spoiled", uploads=0, accuracy=None, reason=reason)
        self._open(round + 1)

    def give_up(self, round: int, reason: str | None = None) -> None:
        """End a round that somebody never closed: nothing of it is used."""
        with self._turn():
            if round == self._round and not self._over:
                why = reason or silent(self.task, self._store.closures(round))
                self._store.end_round(round, "void", uploads=0, accuracy=None, reason=why)
                self._open(round + 1)

    def end_task(self, reason: str) -> None:
        """End the training before its time, for good: the open round is void, and none follows."""
        with self._turn():
            if not self._over:
                self._store.end_task(reason)
                self._open(self._store.last_ended() + 1)

    @property
    def progress(self) -> tuple[int, int]:
        """The round, and how many of its messages have come: what stands still may have been given up by others."""
        with self._lock:
            self._look()
            return self._round, self._store.messages(self._round)

    def privacy(self) -> dict[str, Any]:
        """What is promised for the rounds that were reserved, what was spent of which budget, and how it went."""
        with self._lock:
            self._look()
            self.ledger.refresh()
            notes = self._learner.notes
            return privacy_facts(self.task, self.ledger, self._store, round=self._round, notes=notes)

    def shut(self) -> None:
        """Let go of files and processes."""
        self.ledger.close()
        self._store.shut()
        self.incoming.shut()
        self._alone.close()

    def _resume(self) -> None:
        """Take up where the files say that it stopped; refuse files that do not belong together."""
        with self._lock, self._store.exclusive():
            self.ledger.refresh()
            self._resume_alone()

    def _resume_alone(self) -> None:
        first = self._store.model(0)
        if first is None or first.head is None:  # never started, or killed before it had its first model
            if len(self.ledger.entries) > 1:
                raise ValueError("expected the book that belongs to the ledger, got an empty one")
            self._propose(0, self._learner.initial_leaves())
            self._store.confirm(0, self.ledger.head)
        check_same_backup(self.ledger, self._store)
        self._open(self._store.last_ended() + 1)
        if not self._over:
            self._end_if_complete()

    def _open(self, round: int) -> None:
        """Reserve a round, then let it take reports; the training is over if none is left or it cannot be paid."""
        ended = self._store.why_ended()
        if ended is not None and round in self.ledger.reserved_rounds:
            self._store.end_round(round, "void", uploads=0, accuracy=None, reason=ended)
            round += 1
        self._over = round > self.task.rounds or self.task.is_over() or ended is not None
        if not self._over:
            try:
                certified, _ = certify_task(self.task, round)
                spent, _ = self.ledger.total
                self._head = self.ledger.reserve(round, eps=max(certified.eps, spent), delta=self.task.delta)
            except Overspent:
                self._over = True
        self._round, self._head = (round - 1, self.ledger.head) if self._over else (round, self._head)
        ends = {"now": time.time(), "seconds": self.task.round_seconds}
        self._closes = 0 if self._over else self._store.open_round(round, **ends)

    def _refuse_other(self, round: int) -> None:
        if round > self._round:
            raise TooEarly(f"expected something about the open round, got round {round}, which is not open")
        if round < self._round or self._over:
            raise TooLate(f"expected something about the open round, got round {round}, which is over")

    def _end_if_complete(self) -> None:
        said = self._store.closures(self._round)
        if len(said) < len(self.task.intermediaries):
            return
        round, uploads = self._round, min(one.uploads for one in said.values())
        if (why := void(self.task, said)) is not None:
            self._store.end_round(round, "void", uploads=uploads, accuracy=None, reason=why)
        elif not self.incoming.is_complete(round, said, self._store):
            why = incomplete(self.task, said, self._store.refusals(round))
            self._store.end_round(round, "spoiled", uploads=uploads, accuracy=None, reason=why)
        else:
            self._release(round, uploads)
        self._open(round + 1)

    def _release(self, round: int, uploads: int) -> None:
        sums = self._store.tally(round) or self._learner.zero_sums()
        leaves, found = self._learner.step(self._store.released_model(round - 1).leaves, sums, users=uploads)
        proposed = self._propose(round, leaves)
        self._store.confirm(round, self.ledger.release(round, model=proposed.digest))
        accuracy = self._learner.score(proposed.leaves)
        self._store.end_round(round, "released", uploads=uploads, accuracy=accuracy, measured=found)

    def _propose(self, round: int, leaves: list[np.ndarray]) -> Checkpoint:
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).digest()
        self._store.propose(Checkpoint(round, leaves, digest, None))
        return self._store.model(round) or Checkpoint(round, leaves, digest, None)


def check_same_backup(ledger: Ledger, store: AnalyzerStore) -> None:
    """Refuse a ledger and a book of different times; a model that the ledger released last is bound to it."""
    released = ledger.last_release
    if released is not None:
        kept = store.model(released.round)
        if kept is None or kept.digest != released.model:
            raise ValueError("expected the models that the ledger released, got a book without the last of them")
        head = ledger.release(released.round, model=released.model)
        if kept.head is None:  # killed between the ledger and the book
            store.confirm(released.round, head)
        ledger.check(model=kept.digest, head=kept.head or head)
    newest = store.model()
    if newest is not None and newest.head is not None and newest.round > (released.round if released else 0):
        raise ValueError("expected the ledger that released the last model, got an older one")
    reserved = max(entry.round for entry in ledger.entries)
    settled = store.last_ended()
    if settled > reserved:
        raise ValueError("expected the ledger that reserved the last round, got an older one")
    if reserved > settled + 1:
        raise ValueError("expected the book of the rounds that were reserved, got an older one")


def _name(task: TrainingTask, sender: int) -> str:
    return f"{'aggregator' if task.aggregators else 'shuffler'} {sender}"


def silent(task: TrainingTask, closed: Collection[int]) -> str:
    """Some did not close it."""
    missing = [_name(task, sender) for sender in range(len(task.intermediaries)) if sender not in closed]
    return f"nothing was heard in time from {', '.join(missing)}"


def set_back(task: TrainingTask, sender: int, what: str) -> str:
    """Somebody says something else than before."""
    return f"{_name(task, sender)} {what}: its store was set back, or it is not honest"


def void(task: TrainingTask, said: Mapping[int, Closed]) -> str | None:
    """Somebody closed it as void; None if nobody did."""
    names = [_name(task, sender) for sender, one in sorted(said.items()) if one.state == "void"]
    uploads = min(one.uploads for one in said.values())
    if names and uploads < task.min_clients:
        where = "" if len(task.intermediaries) == 1 else f" to all {'aggregators' if task.aggregators else 'shufflers'}"
        return f"{uploads} users reported{where}, and the task asks for {task.min_clients}"
    return f"{', '.join(names)} did not agree with the others on whom to count" if names else None


def incomplete(task: TrainingTask, said: Mapping[int, Closed], refused: Refusals) -> str:
    """Something else came than its users send."""
    uploads = [one.uploads for _, one in sorted(said.items())]
    if len(set(uploads)) > 1 or not task.min_clients <= min(uploads) <= task.max_clients:
        return f"numbers of users differ, or are not what the task allows: {uploads}"
    if task.aggregators and len({one.batch for one in said.values()}) > 1:
        return "aggregators added up different users"
    if any(refused):
        return f"messages do not count: {refused._asdict()}"
    return f"other numbers of messages came than {uploads[0]} users send"


def privacy_facts(
    task: TrainingTask, ledger: Ledger, store: AnalyzerStore, *, round: int, notes: Sequence[str]
) -> dict[str, Any]:
    """What is promised for the rounds that were reserved, what was spent of which budget, and how it went.

    `round` is the open one; `notes` are what the statement assumes of the learner.
    """

    def noted(statement: Statement) -> dict[str, Any]:
        return dataclasses.replace(statement, assumptions=(*statement.assumptions, *notes)).to_json()

    reserved = max((entry.round for entry in ledger.entries), default=0)
    certified, local = certify_task(task, max(1, reserved))
    eps, delta = ledger.total
    return {
        "task": task.name,
        "task_id": task.task_id.hex(),
        "protocol": task.protocol,
        "rounds_reserved": reserved,
        "rounds": task.rounds,
        "budget": {"eps": task.eps, "delta": task.delta},
        "spent": {"eps": None if math.isinf(eps) else eps, "delta": delta},
        "statement": noted(certified),
        "without_trust": noted(local),
        "ledger_head": ledger.head.hex(),
        "history": [
            {"round": number, "outcome": outcome, "uploads": uploads, "accuracy": accuracy, **found}
            for number, outcome, uploads, accuracy, found in store.outcomes()
        ],
        "refused_messages": store.refusals(round)._asdict(),
        "messages": store.messages(round),
    }


class RoundSigner:
    """Signs a task's status and models; they stay as they are if the task names no key for it."""

    def __init__(self, task: TrainingTask, keys: KeyRing) -> None:
        self._task_id, named = task.task_id, task.analyzer_sign
        self._pair = None if named is None else KeyRing(keys.folder, "sign").find(named.key_id)
        self._said: tuple[RoundStatus, RoundStatus] | None = None
        self._model: tuple[int, bytes, bytes] | None = None

    def status(self, status: RoundStatus) -> RoundStatus:
        """The status with its signature."""
        if self._pair is None:
            return status
        known = self._said
        if known is None or known[0] != status:
            self._said = known = status, sign_status(status, self._pair)
        return known[1]

    def model(self, round: int, data: bytes) -> bytes:
        """The signature of the model after a round; empty if there is none."""
        if self._pair is None:
            return b""
        known = self._model
        if known is None or known[:2] != (round, data):
            signature = sign_model(data, task_id=self._task_id, round=round, pair=self._pair)
            self._model = known = round, data, signature
        return known[2]
