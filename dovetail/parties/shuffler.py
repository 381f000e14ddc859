"""A shuffler: it knows who reports but not what; it forwards reports without saying who sent them.

Its store keeps sealed messages until a round closes, then the shuffled batch. When a round closes, every slot is filled
up with sealed dummies (or loses a random surplus) and permuted by the operating system's randomness. What leaves is
kept and sent again as it is: a second draw of dummies would tell them from reports.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from dovetail import _validate
from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.keys import ServiceKeys
from dovetail.parties.common.sealing import Purpose, Workers
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import PART, Packed
from dovetail.parties.intermediary.party import Intermediary
from dovetail.parties.intermediary.store import Arrival, RoundStore, UploadRefused

__all__ = ["Shape", "ShuffleStore", "Shuffler"]

_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS messages (round INTEGER, report BLOB, slot INTEGER, sealed BLOB) STRICT;
CREATE INDEX IF NOT EXISTS messages_by_slot ON messages (round, slot);
CREATE TABLE IF NOT EXISTS dummies (round INTEGER, slot INTEGER, sealed BLOB) STRICT;
CREATE INDEX IF NOT EXISTS dummies_by_slot ON dummies (round, slot);
CREATE TABLE IF NOT EXISTS batch (round INTEGER, place INTEGER, slot INTEGER, sealed BLOB,
                                  PRIMARY KEY (round, place)) STRICT, WITHOUT ROWID;
""",
)
_SYSTEM = random.SystemRandom()


class Shape(NamedTuple):
    """What is public about the uploads of a task: the same for all of them.

    Arguments:
        slots: slots that this shuffler has; an upload has at most one message in each.
        reports: messages of every upload; None: any number up to one per slot.
        length: bytes of a sealed message.
        min_uploads: a round with fewer uploads is void.
        max_uploads: a round takes no more than these.
        pad_to: messages that leave per slot, whatever came; None: as many as came.
    """

    slots: int
    reports: int | None
    length: int
    min_uploads: int
    max_uploads: int
    pad_to: int | None = None


class ShuffleStore(RoundStore):
    """The store of one shuffler; the content of an upload is a list of pairs of slot and ciphertext."""

    content_tables: ClassVar[tuple[str, ...]] = ("messages",)
    extra_tables: ClassVar[tuple[str, ...]] = ("dummies",)
    output_table: ClassVar[str] = "batch"

    def __init__(self, where: Path | str, shape: Shape, *, owner: bytes = b"") -> None:
        _validate.at_least(1, slots=shape.slots, length=shape.length)
        self._shape = shape
        limits = {"min_uploads": shape.min_uploads, "max_uploads": shape.max_uploads}
        super().__init__(where, {"batches": _MIGRATIONS}, owner=owner, **limits)

    def missing_dummies(self, round: int, *, roster: Collection[bytes] | None = None) -> dict[int, int]:
        """How many dummies the slots of a frozen round still need, beside the reports on the roster (None: all)."""
        if self._shape.pad_to is None:
            return {}
        counts = dict.fromkeys(range(self._shape.slots), 0)
        for report, slot in self._fetch_rows("SELECT report, slot FROM messages WHERE round = ?", round):
            counts[slot] += roster is None or report in roster
        for (slot,) in self._fetch_rows("SELECT slot FROM dummies WHERE round = ?", round):
            counts[slot] += 1
        return {slot: self._shape.pad_to - count for slot, count in counts.items() if count < self._shape.pad_to}

    def add_dummies(self, round: int, dummies: Sequence[tuple[int, bytes]]) -> None:
        """Keep sealed dummies, (slot, ciphertext) each, until the round is closed with them."""
        if any(len(sealed) != self._shape.length for _, sealed in dummies):
            raise ValueError(f"dummies must have {self._shape.length} bytes each, as reports do")
        with self._transaction():
            if self.state(round) != "frozen":
                raise ValueError(f"round {round} is {self.state(round)}; dummies are added while it is frozen")
            self._database.insert_rows("dummies", [(round, slot, sealed) for slot, sealed in dummies])

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """The batch of a closed round in numbered parts of `size` messages, each as the bytes of a `Packed`."""
        for number, rows in self.messages(round, size=size):
            yield number, Packed.of(rows).encode()

    def messages(self, round: int, *, size: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """The batch of a closed round in numbered parts of `size` messages: (slot, sealed) each."""
        _validate.at_least(1, size=size)
        number = 0
        while True:
            query = "SELECT slot, sealed FROM batch WHERE round = ? AND place >= ? AND place < ? ORDER BY place"
            rows = self._fetch_rows(query, round, number * size, (number + 1) * size)
            if not rows:
                return
            yield number, rows
            number += 1

    def check(self, arrival: Arrival) -> None:
        """Refuse messages of another number or length, and slots that do not exist or come twice."""
        shape = self._shape
        messages = arrival.content
        slots = [slot for slot, _ in messages]
        if len(messages) != shape.reports if shape.reports is not None else len(messages) > shape.slots:
            number = f"up to {shape.slots}" if shape.reports is None else str(shape.reports)
            raise UploadRefused(f"an upload of this task has {number} messages, and this one has {len(messages)}")
        if any(not isinstance(slot, int) or not 0 <= slot < shape.slots for slot in slots):
            raise UploadRefused(f"this shuffler has slots 0 to {shape.slots - 1}, and a message is for another one")
        if len(set(slots)) != len(slots):
            raise UploadRefused("two messages of this upload are for the same slot")
        if any(len(sealed) != shape.length for _, sealed in messages):
            raise UploadRefused(f"a sealed message of this task has {shape.length} bytes, and one of these has not")

    def _write_contents(self, arrivals: Sequence[Arrival]) -> None:
        rows = [
            (arrival.round, arrival.report, slot, sealed) for arrival in arrivals for slot, sealed in arrival.content
        ]
        self._database.insert_rows("messages", rows)

    def _make_output(self, round: int) -> None:
        """Permute slot by slot: only one slot is in memory at a time."""
        place = 0
        pad_to = self._shape.pad_to
        for slot in range(self._shape.slots):
            sealed = self._shuffle_slot("messages", round, slot)
            if pad_to is not None:
                sealed = sealed[:pad_to]
                sealed += self._shuffle_slot("dummies", round, slot)[: pad_to - len(sealed)]
                if len(sealed) != pad_to:
                    raise ValueError(
                        f"slot {slot} of round {round} has {len(sealed)} messages with its dummies, and needs {pad_to}"
                    )
                _SYSTEM.shuffle(sealed)
            self._database.insert_rows("batch", [(round, place + i, slot, message) for i, message in enumerate(sealed)])
            place += len(sealed)

    def _shuffle_slot(self, table: str, round: int, slot: int) -> list[bytes]:
        rows = self._fetch_rows(f"SELECT sealed FROM {table} WHERE round = ? AND slot = ?", round, slot)
        sealed = [row[0] for row in rows]
        _SYSTEM.shuffle(sealed)
        return sealed


class Shuffler(Intermediary[ShuffleStore]):
    """One of the shufflers of a task, without the network around it.

    Guarantees:
        What leaves are ciphertexts of one length, permuted slot by slot, with nothing that says whose they are.
    """

    kind: ClassVar[str] = "shuffler"

    def __init__(self, folder: Path, *, workers: int = 1, **options: Any) -> None:
        super().__init__(folder, **options)
        self._messages = self.task.messages()
        self._workers = Workers(workers)
        self._sampler = ExactSampler()

    @classmethod
    def service_keys(cls, task: TrainingTask) -> Sequence[ServiceKeys]:
        """The public keys of the task's shufflers."""
        return task.shufflers

    def _open_store(self, where: Path | str, owner: bytes) -> ShuffleStore:
        self.shape = _upload_shape(self.task, self.index)
        return ShuffleStore(where, self.shape, owner=owner)

    @property
    def max_content_bytes(self) -> int:
        """Bytes of a message in every slot, or of as many as a client sends."""
        return Packed.size(self.shape.reports or self.shape.slots, length=self.shape.length)

    def _content_of_upload(self, opened: bytes, purpose: Purpose) -> Any:
        packed = Packed.decode(opened, length=self.shape.length)
        return list(zip(packed.slots.tolist(), packed.ciphertexts(), strict=True))

    def _prepare_close(self, round: int, roster: Collection[bytes] | None) -> None:
        """Seal the dummies that slots lack, some at a time, before the round is closed."""
        missing = self.store.missing_dummies(round, roster=roster)
        slots = iter([slot for slot, count in missing.items() for _ in range(count)])
        while chunk := list(itertools.islice(slots, PART)):
            bodies = [body.tobytes() for body in self._messages.dummies(len(chunk), sampler=self._sampler)]
            sealed = self._workers.seal_all(bodies, self.task.analyzer.sealing_key(), self.task.message_purpose(round))
            self.store.add_dummies(round, list(zip(chunk, sealed, strict=True)))

    def close(self) -> None:
        """Close the store, and end the worker processes."""
        super().close()
        self._workers.stop()


def _upload_shape(task: TrainingTask, index: int) -> Shape:
    """The shape of uploads to the shuffler with this index; `reports` is None where their number is open."""
    messages = task.messages()
    protocol, _ = task.build()
    padding = protocol.layout(task.dim).padding
    slots = len(task.assign_slots().slots[index])
    reports: int | None
    if messages.per_client == messages.slots:
        reports = slots
    else:
        reports = messages.per_client if len(task.shufflers) == 1 else None
    return Shape(
        slots=slots,
        reports=reports,
        length=task.message_bytes,
        min_uploads=task.min_clients,
        max_uploads=task.max_clients,
        pad_to=None if padding is None else padding.pad_to,
    )
