"""A shuffler's memory: sealed messages until a round closes, then the shuffled batch.

When a round closes, every slot is filled up with sealed dummies (or loses a random surplus) and permuted by the
operating system's randomness. A second draw of dummies would tell them from reports.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from dovetail import _validate
from dovetail.parties.common.wire import Packed
from dovetail.parties.intermediary.store import Arrival, RoundStore, Turned

__all__ = ["Shape", "ShuffleStore"]

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

    `reports` messages per upload (None: any number up to one per slot), each `length` bytes, in `slots` slots. `pad_to`
    messages per slot leave, whatever came; None: as many as came.
    """

    slots: int
    reports: int | None
    length: int
    min_uploads: int
    max_uploads: int
    pad_to: int | None = None


class ShuffleStore(RoundStore):
    """The store of one shuffler; the content of an upload are pairs of slot and ciphertext."""

    contents: ClassVar[tuple[str, ...]] = ("messages",)
    additions: ClassVar[tuple[str, ...]] = ("dummies",)
    leaves: ClassVar[str] = "batch"

    def __init__(self, where: Path | str, shape: Shape, *, owner: bytes = b"") -> None:
        _validate.at_least(1, slots=shape.slots, length=shape.length)
        self._shape = shape
        limits = {"min_uploads": shape.min_uploads, "max_uploads": shape.max_uploads}
        super().__init__(where, {"batches": _MIGRATIONS}, owner=owner, **limits)

    def lacking(self, round: int, *, roster: Collection[bytes] | None = None) -> dict[int, int]:
        """How many dummies every slot of a frozen round still needs, counting the reports on the roster alone."""
        if self._shape.pad_to is None:
            return {}
        counts = dict.fromkeys(range(self._shape.slots), 0)
        for report, slot in self._rows("SELECT report, slot FROM messages WHERE round = ?", round):
            counts[slot] += roster is None or report in roster
        for (slot,) in self._rows("SELECT slot FROM dummies WHERE round = ?", round):
            counts[slot] += 1
        return {slot: self._shape.pad_to - count for slot, count in counts.items() if count < self._shape.pad_to}

    def stage(self, round: int, dummies: Sequence[tuple[int, bytes]]) -> None:
        """Keep sealed dummies, (slot, ciphertext) each, until the round is closed with them."""
        if any(len(sealed) != self._shape.length for _, sealed in dummies):
            raise ValueError(f"expected dummies of {self._shape.length} bytes like reports, got others")
        with self._transaction():
            if self.state(round) != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {self.state(round)}")
            self._database.insert("dummies", [(round, slot, sealed) for slot, sealed in dummies])

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
            rows = self._rows(query, round, number * size, (number + 1) * size)
            if not rows:
                return
            yield number, rows
            number += 1

    def check(self, arrival: Arrival) -> None:
        """Turn away messages of another number or length, and slots that do not exist or are there twice."""
        shape, messages = self._shape, arrival.content
        slots = [slot for slot, _ in messages]
        if len(messages) != shape.reports if shape.reports is not None else len(messages) > shape.slots:
            raise Turned(f"expected {shape.reports or f'up to {shape.slots}'} messages, got {len(messages)}")
        if any(not isinstance(slot, int) or not 0 <= slot < shape.slots for slot in slots):
            raise Turned(f"expected slots from 0 to {shape.slots - 1}, got others")
        if len(set(slots)) != len(slots):
            raise Turned("expected one message per slot, got more")
        if any(len(sealed) != shape.length for _, sealed in messages):
            raise Turned(f"expected messages of {shape.length} bytes, got others")

    def _keep(self, arrivals: Sequence[Arrival]) -> None:
        rows = [(one.round, one.report, slot, sealed) for one in arrivals for slot, sealed in one.content]
        self._database.insert("messages", rows)

    def _leave(self, round: int) -> None:
        """Slot by slot: what is held at a time is one slot."""
        place, pad_to = 0, self._shape.pad_to
        for slot in range(self._shape.slots):
            sealed = self._shuffled("messages", round, slot)
            if pad_to is not None:
                sealed = sealed[:pad_to]
                sealed += self._shuffled("dummies", round, slot)[: pad_to - len(sealed)]
                if len(sealed) != pad_to:
                    raise ValueError(f"expected dummies up to {pad_to} messages in slot {slot}, got {len(sealed)}")
                _SYSTEM.shuffle(sealed)
            self._database.insert("batch", [(round, place + i, slot, message) for i, message in enumerate(sealed)])
            place += len(sealed)

    def _shuffled(self, table: str, round: int, slot: int) -> list[bytes]:
        rows = self._rows(f"SELECT sealed FROM {table} WHERE round = ? AND slot = ?", round, slot)
        sealed = [row[0] for row in rows]
        _SYSTEM.shuffle(sealed)
        return sealed
