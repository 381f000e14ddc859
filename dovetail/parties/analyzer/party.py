"""The analyzer: it opens what shufflers or aggregators forward, adds it up, and releases models within the budget.

Before a round takes in anything its cost is certified, with the task's minimum of honest users, and reserved in the
ledger. Parts of batches are opened and added to the sums of the round (`incoming`). When every shuffler or aggregator
has closed the round, the estimate moves the model; the model is kept, then the ledger releases it, and only then does
anybody get it. Each step is durable before the next, and done again after a crash it gives the same.

A round with fewer users than the minimum is void. It is spoiled if shares do not open, if other numbers of messages
came than its users send, if aggregators added up different users, or if somebody began a second batch or drew a part
anew, as a party does whose store was restored from a copy: the model stays as it is, and what was reserved stays spent.

A round is unused if every shuffler or aggregator says that it counts nobody and sends nothing, as where all users fail
before they report: nothing of it has reached the analyzer or can reach it later, so that the next round takes its place
in what is certified and reserved. The statement for those who trust nobody takes nobody's word, and counts it.
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

from dovetail.parties.analyzer.incoming import incoming_of
from dovetail.parties.analyzer.learning import Learner, Learning
from dovetail.parties.analyzer.store import AnalyzerStore, Refusals, Stale, StoredModel
from dovetail.parties.common.database import locate_store, retry_until_available
from dovetail.parties.common.files import lock_folder
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
    encode_vector,
    sign_model,
    sign_status,
)
from dovetail.statements import Statement

__all__ = ["Analyzer"]

_ONE_BACKUP = "restore book.db and ledger.db from one backup"


class Analyzer:
    """The analyzer of one task, or one replica of it, without the network around it.

    Arguments:
        folder: where an analyzer without a database keeps book.db and ledger.db.
        signed: the task, whose signature is verified.
        signer: the id of the key that must have signed it.
        keys: the analyzer's keys; the task names one of them.
        learning: the first model, the server's step, and the evaluation.
        workers: processes that open messages; None: one per core.
        store: URL of a database that replicas share; None: files in the folder.

    Guarantees:
        A round is reserved in the ledger before it is open, and a model is released there before anybody gets it.
        Every part counts once.
        A ledger or a store that was restored from an older copy is refused.
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
        self._alone = lock_folder(folder)
        key = keys.find(self.task.analyzer.key_id).opening_key()
        self._round_signer = _RoundSigner(self.task, keys)
        self.incoming = incoming_of(self.task, key, self._learner, workers=workers)
        self._lock = threading.RLock()
        self._is_inside = False
        self._store = retry_until_available(lambda: AnalyzerStore(locate_store(store, folder, "book.db")))
        budget = {"eps": self.task.budget, "delta": self.task.delta}
        where = locate_store(store, folder, "ledger.db")
        self.ledger = retry_until_available(lambda: Ledger(where, task_id=self.task.task_id, **budget))
        retry_until_available(self._resume)

    @contextlib.contextmanager
    def _take_turn(self) -> Iterator[None]:
        """One thread of one replica at a time, after it has seen what the others did."""
        with self._lock:
            if self._is_inside:
                yield
                return
            with self._store.exclusive():
                self._is_inside = True
                try:
                    self._catch_up()
                    yield
                finally:
                    self._is_inside = False

    def _catch_up(self) -> None:
        """See what other replicas reserved and ended; open the next round if the one that should have died."""
        self.ledger.refresh()
        if (ended := self._store.last_ended_round()) >= self._round + self._over:
            self._open_round(ended + 1)

    def _refresh(self) -> None:
        """Catch up with other replicas if they have ended a round."""
        if self._store.last_ended_round() >= self._round + self._over:
            with self._take_turn():
                pass

    def status(self) -> RoundStatus:
        """Which round is open and until when, signed with the key that the task names."""
        with self._lock:
            self._refresh()
            status = RoundStatus(
                task_id=self.task.task_id, round=self._round, over=self._over, head=self._head, closes=self._closes
            )
            return self._round_signer.signed_status(status)

    def model(self, round: int) -> bytes:
        """The model after a round, if it was released; a round without a release has that of the round before.

        It is what users train on; after the last round it is the model to publish.
        """
        with self._lock:
            self._refresh()
            if round >= self._round + self._over:
                raise TooLate(f"the model after round {round} is not released")
            leaves = self._store.released_model(round).leaves
            last = self._over and round == self._round
            return encode_vector(self._learner.model_to_publish(leaves) if last else leaves[0])

    def model_signature(self, round: int, data: bytes) -> bytes:
        """The signature of the model after a round; empty if the task names no key for it."""
        return self._round_signer.model_signature(round, data)

    def count_part(
        self, sender: int, round: int, batch: bytes, number: int, data: bytes
    ) -> Literal["accepted", "known"]:
        """Count a part of a batch, once.

        Arguments:
            sender: the index of the shuffler or aggregator.
            round: the open round.
            batch: the id of the sender's batch.
            number: the number of the part.
            data: the part as it was sent.

        Returns: "known" if the part was counted before.
        """
        with self._lock:
            self._refresh()
            self._refuse_other_round(round)
        self._refuse_second_batch(sender, round, batch)
        marks = self.incoming.replay_marks(sender, data)
        if self._store.has_part(round, sender, number):
            self._refuse_redrawn_part(sender, round, marks)
            return "known"
        while True:
            repeated = self._store.repeated_marks(round, marks)
            part = self.incoming.read_part(sender, round, batch, data, repeated=repeated)
            with self._take_turn():
                self._refuse_other_round(round)
                self._refuse_second_batch(sender, round, batch)
                if sender in self._store.closures(round):
                    raise Malformed(f"sender {sender} has closed round {round}, and cannot add part {number}")
                with contextlib.suppress(Stale):
                    if self._store.count_part(round, sender, batch, number, marks=marks, **part._asdict()):
                        return "accepted"
                    self._refuse_redrawn_part(sender, round, marks)
                    return "known"

    def note_closed(self, sender: int, round: int, closed: Closed) -> None:
        """Note that a shuffler or aggregator has closed a round, and how; after the last one the round ends."""
        with self._take_turn():
            if round < self._round:
                return  # the answer to the first time was lost
            self._refuse_other_round(round)
            self._refuse_second_batch(sender, round, closed.batch)
            counted = self._store.num_parts(round, sender)
            if closed.state == "sent" and counted != closed.parts:
                raise Malformed(
                    f"sender {sender} closes round {round} with {closed.parts} parts, and {counted} have come"
                )
            self._store.note_closed(round, sender, closed)
            self._end_if_complete()

    def _refuse_second_batch(self, sender: int, round: int, batch: bytes) -> None:
        """End a round in which a sender begins another batch: its store was restored, or it is not honest."""
        with self._take_turn():
            if self._store.batch_of_sender(round, sender) in (None, batch):
                return
            self._end_spoiled_round(round, _why_restored(self.task, sender, "began a second batch"))
        raise TooLate(f"sender {sender} began another batch in round {round}, which is spoiled")

    def _refuse_redrawn_part(self, sender: int, round: int, marks: list[bytes]) -> None:
        """End a round in which a part that was counted comes again with other messages: it was drawn twice.

        Aggregators call a batch by its users, so that one whose store was set back comes with the same batch again.
        """
        with self._take_turn():
            if len(self._store.repeated_marks(round, marks)) == len(marks):
                return
            self._end_spoiled_round(round, _why_restored(self.task, sender, "drew a part anew"))
        raise TooLate(
            f"sender {sender} sent a part of round {round} with other messages than before; the round is spoiled"
        )

    def _end_spoiled_round(self, round: int, reason: str) -> None:
        self._refuse_other_round(round)
        self._store.end_round(round, "spoiled", uploads=0, accuracy=None, reason=reason)
        self._open_round(round + 1)

    def give_up_round(self, round: int, reason: str | None = None) -> None:
        """End a round that some shuffler or aggregator never closed: nothing of it is used."""
        with self._take_turn():
            if round == self._round and not self._over:
                why = reason or _why_silent(self.task, self._store.closures(round))
                self._store.end_round(round, "void", uploads=0, accuracy=None, reason=why)
                self._open_round(round + 1)

    def end_task(self, reason: str) -> None:
        """End the training before its time, for good: the open round is void, and none follows."""
        with self._take_turn():
            if not self._over:
                self._store.end_task(reason)
                self._open_round(self._store.last_ended_round() + 1)

    @property
    def round_and_messages(self) -> tuple[int, int]:
        """The open round, and how many of its messages have come: where these stand still, somebody may be down."""
        with self._lock:
            self._refresh()
            return self._round, self._store.num_messages(self._round)

    def privacy(self) -> dict[str, Any]:
        """The statement for the rounds that were reserved, what was spent of the budget, and how each round ended."""
        with self._lock:
            self._refresh()
            self.ledger.refresh()
            notes = self._learner.notes
            return _privacy_facts(self.task, self.ledger, self._store, round=self._round, notes=notes)

    def close(self) -> None:
        """Close files and database, and end the worker processes."""
        self.ledger.close()
        self._store.close()
        self.incoming.stop_workers()
        self._alone.close()

    def _resume(self) -> None:
        """Go on where the files say that it stopped; refuse files that do not belong together."""
        with self._lock, self._store.exclusive():
            self.ledger.refresh()
            self._resume_exclusively()

    def _resume_exclusively(self) -> None:
        """Do what `_resume` says, while no other replica does."""
        first = self._store.model(0)
        if first is None or first.head is None:  # never started, or killed before it had its first model
            if len(self.ledger.entries) > 1:
                raise ValueError(
                    f"book.db is empty but ledger.db has {len(self.ledger.entries)} entries: {_ONE_BACKUP}"
                )
            self._propose_model(0, self._learner.initial_leaves())
            self._store.confirm_release(0, self.ledger.head)
        _check_same_backup(self.ledger, self._store)
        self._open_round(self._store.last_ended_round() + 1)
        if not self._over:
            self._end_if_complete()

    def _open_round(self, round: int) -> None:
        """Reserve a round, then let it take reports; training is over if none is left or the budget is spent."""
        ended = self._store.why_ended()
        if ended is not None and round in self.ledger.reserved_rounds:
            self._store.end_round(round, "void", uploads=0, accuracy=None, reason=ended)
            round += 1
        self._over = round > self.task.rounds or self.task.is_over() or ended is not None
        if not self._over:
            try:
                charged = round - len(self._store.unused_rounds(before=round))
                certified, _ = certify_task(self.task, charged)
                spent, _ = self.ledger.total
                self._head = self.ledger.reserve(round, eps=max(certified.eps, spent), delta=self.task.delta)
            except Overspent:
                self._over = True
        if self._over:
            self._round = round - 1
            self._head = self.ledger.head
            self._closes = 0
        else:
            self._round = round
            self._closes = self._store.open_round(round, now=time.time(), seconds=self.task.round_seconds)

    def _refuse_other_round(self, round: int) -> None:
        if round > self._round:
            raise TooEarly(f"round {round} is not open yet: round {self._round} is")
        if round < self._round or self._over:
            raise TooLate(f"round {round} is over")

    def _end_if_complete(self) -> None:
        """End the open round once all senders have closed it: void, spoiled or released; then open the next one."""
        closures = self._store.closures(self._round)
        if len(closures) < len(self.task.intermediaries):
            return
        round = self._round
        uploads = min(closed.uploads for closed in closures.values())
        if (why := _why_void(self.task, closures)) is not None:
            unused = all(closed.state == "void" and closed.uploads == 0 for closed in closures.values())
            unused = unused and not any(self._store.num_parts(round, sender) for sender in closures)
            why = f"{why}; nothing came, so it costs nothing" if unused else why
            self._store.end_round(round, "void", uploads=uploads, accuracy=None, reason=why, unused=unused)
        elif not self.incoming.is_complete(round, closures, self._store):
            why = _why_spoiled(self.task, closures, self._store.refusals(round))
            self._store.end_round(round, "spoiled", uploads=uploads, accuracy=None, reason=why)
        else:
            self._release_model(round, uploads)
        self._open_round(round + 1)

    def _release_model(self, round: int, uploads: int) -> None:
        """Keep the model, enter its hash in the ledger, bind both: after a kill in between the same model follows."""
        sums = self._store.tally(round) or self._learner.zero_sums()
        leaves, measures = self._learner.step(self._store.released_model(round - 1).leaves, sums, users=uploads)
        proposed = self._propose_model(round, leaves)
        self._store.confirm_release(round, self.ledger.release(round, model=proposed.digest))
        accuracy = self._learner.score(proposed.leaves)
        self._store.end_round(round, "released", uploads=uploads, accuracy=accuracy, measured=measures)

    def _propose_model(self, round: int, leaves: list[np.ndarray]) -> StoredModel:
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves)).digest()
        self._store.propose_model(StoredModel(round, leaves, digest, None))
        return self._store.model(round) or StoredModel(round, leaves, digest, None)


def _check_same_backup(ledger: Ledger, store: AnalyzerStore) -> None:
    """Refuse a ledger and a store of different times; the model that the ledger released last is bound to it."""
    released = ledger.last_release
    if released is not None:
        kept = store.model(released.round)
        if kept is None or kept.digest != released.model:
            raise ValueError(
                f"book.db lacks the model that ledger.db released in round {released.round}, so book.db is older: "
                f"{_ONE_BACKUP}"
            )
        head = ledger.release(released.round, model=released.model)
        if kept.head is None:  # killed between the ledger and the store
            store.confirm_release(released.round, head)
        ledger.check(model=kept.digest, head=kept.head or head)
    last_released = 0 if released is None else released.round
    newest = store.model()
    if newest is not None and newest.head is not None and newest.round > last_released:
        raise ValueError(
            f"book.db has the released model of round {newest.round}, and ledger.db ends with that of round "
            f"{last_released}, so ledger.db is older: {_ONE_BACKUP}"
        )
    reserved = max(entry.round for entry in ledger.entries)
    ended = store.last_ended_round()
    if ended > reserved:
        raise ValueError(
            f"book.db ended round {ended}, and ledger.db reserved none after {reserved}, so ledger.db is older: "
            f"{_ONE_BACKUP}"
        )
    if reserved > ended + 1:
        raise ValueError(
            f"ledger.db reserved round {reserved}, and book.db ended none after {ended}, so book.db is older: "
            f"{_ONE_BACKUP}"
        )


def _name_of_sender(task: TrainingTask, sender: int) -> str:
    return f"{'aggregator' if task.aggregators else 'shuffler'} {sender}"


def _why_silent(task: TrainingTask, closures: Collection[int]) -> str:
    """Why a round was given up: some shufflers or aggregators did not close it."""
    missing = [_name_of_sender(task, sender) for sender in range(len(task.intermediaries)) if sender not in closures]
    return f"nothing was heard in time from {', '.join(missing)}"


def _why_restored(task: TrainingTask, sender: int, deed: str) -> str:
    """Why a round is spoiled in which a sender contradicts what it sent before."""
    return f"{_name_of_sender(task, sender)} {deed}: its store was set back, or it is not honest"


def _why_void(task: TrainingTask, closures: Mapping[int, Closed]) -> str | None:
    """Why a round is void that somebody closed as void; None if nobody did."""
    names = [_name_of_sender(task, sender) for sender, closed in sorted(closures.items()) if closed.state == "void"]
    uploads = min(closed.uploads for closed in closures.values())
    if names and uploads < task.min_clients:
        where = "" if len(task.intermediaries) == 1 else f" to all {'aggregators' if task.aggregators else 'shufflers'}"
        return f"{uploads} users reported{where}, and the task asks for {task.min_clients}"
    return f"{', '.join(names)} did not agree with the others on whom to count" if names else None


def _why_spoiled(task: TrainingTask, closures: Mapping[int, Closed], refused: Refusals) -> str:
    """Why a round is spoiled in which something else came than its users send."""
    uploads = [closed.uploads for _, closed in sorted(closures.items())]
    if len(set(uploads)) > 1 or not task.min_clients <= min(uploads) <= task.max_clients:
        return f"numbers of users differ, or are not what the task allows: {uploads}"
    if task.aggregators and len({closed.batch for closed in closures.values()}) > 1:
        return "aggregators added up different users"
    if any(refused):
        return f"messages do not count: {refused._asdict()}"
    return f"other numbers of messages came than {uploads[0]} users send"


def _privacy_facts(
    task: TrainingTask, ledger: Ledger, store: AnalyzerStore, *, round: int, notes: Sequence[str]
) -> dict[str, Any]:
    """What `Analyzer.privacy` returns; `round` is the open one, `notes` are the learner's assumptions."""

    def with_notes(statement: Statement) -> dict[str, Any]:
        return dataclasses.replace(statement, assumptions=(*statement.assumptions, *notes)).to_json()

    reserved = max((entry.round for entry in ledger.entries), default=0)
    unused = store.unused_rounds()
    charged = [entry for entry in ledger.entries if entry.kind == "reserve" and entry.round not in unused]
    certified, _ = certify_task(task, max(1, len(charged)))
    _, local = certify_task(task, max(1, reserved))  # whoever trusts nobody does not believe that a round was unused
    eps, delta = (charged[-1].bound, charged[-1].delta) if charged else (0.0, 0.0)
    return {
        "task": task.name,
        "task_id": task.task_id.hex(),
        "protocol": task.protocol,
        "rounds_reserved": reserved,
        "rounds_unused": len(unused),
        "rounds": task.rounds,
        "budget": {"eps": task.eps, "delta": task.delta},
        "spent": {"eps": None if math.isinf(eps) else eps, "delta": delta},
        "statement": with_notes(certified),
        "without_trust": with_notes(local),
        "ledger_head": ledger.head.hex(),
        "history": [
            {"round": number, "outcome": outcome, "uploads": uploads, "accuracy": accuracy, **measures}
            for number, outcome, uploads, accuracy, measures in store.outcomes()
        ],
        "refused_messages": store.refusals(round)._asdict(),
        "messages": store.num_messages(round),
    }


class _RoundSigner:
    """Signs a task's status and models, once each; they stay unsigned if the task names no key for it."""

    def __init__(self, task: TrainingTask, keys: KeyRing) -> None:
        self._task_id = task.task_id
        public = task.analyzer_sign
        self._pair = None if public is None else KeyRing(keys.folder, "sign").find(public.key_id)
        self._status: tuple[RoundStatus, RoundStatus] | None = None  # without and with its signature
        self._model: tuple[int, bytes, bytes] | None = None

    def signed_status(self, status: RoundStatus) -> RoundStatus:
        """The status with its signature."""
        if self._pair is None:
            return status
        last = self._status
        if last is None or last[0] != status:
            self._status = last = status, sign_status(status, self._pair)
        return last[1]

    def model_signature(self, round: int, data: bytes) -> bytes:
        """The signature of the model after a round; empty without a key."""
        if self._pair is None:
            return b""
        last = self._model
        if last is None or last[:2] != (round, data):
            signature = sign_model(data, task_id=self._task_id, round=round, pair=self._pair)
            self._model = last = round, data, signature
        return last[2]
