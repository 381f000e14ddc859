"""A shuffler's memory: uploads until a round closes, then the shuffled batch until the analyzer has it.

A round is *open*, then closed once. With too few uploads it is *void*: everything is deleted and nothing ever leaves.
Else, in the one transaction that closes it, every slot is filled up with sealed dummies (or loses a random surplus) and
permuted by the operating system's randomness, and the uploads are deleted with all that says who sent them. What leaves
is that batch and no other, however often it is sent: a second draw of dummies would tell them from reports. It is
*sent* in numbered parts, so that the analyzer can ignore what it has, and deleted when acknowledged (*done*).
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from dovetail import _validate

__all__ = ["Accepted", "Shape", "Store", "Turned"]

State = Literal["open", "void", "sent", "done"]
Accepted = Literal["accepted", "known"]
_TABLES = """
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, state TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS uploads (round INTEGER, client BLOB, report BLOB, UNIQUE (round, client)) STRICT;
CREATE TABLE IF NOT EXISTS messages (round INTEGER, report BLOB, slot INTEGER, sealed BLOB) STRICT;
CREATE INDEX IF NOT EXISTS messages_by_slot ON messages (round, slot);
CREATE TABLE IF NOT EXISTS known (round INTEGER, report BLOB, PRIMARY KEY (round, report)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batch (round INTEGER, place INTEGER, slot INTEGER, sealed BLOB,
                                  PRIMARY KEY (round, place)) STRICT, WITHOUT ROWID;
"""
_SYSTEM = random.SystemRandom()


class Turned(ValueError):  # noqa: N818 - an upload that is turned away
    """An upload that is not taken, and why."""


class Shape(NamedTuple):
    """What is public about the uploads of a task: the same for all of them.

    `reports` messages an upload (None: any number up to one a slot), each `length` bytes, in `slots` slots. `pad_to`
    messages a slot leave, whatever came; None: as many as came.
    """

    slots: int
    reports: int | None
    length: int
    min_uploads: int
    max_uploads: int
    pad_to: int | None = None


class Store:
    """The store of one shuffler for one task, in one file.

    Guarantees:
        An upload is taken whole or not at all, once, and is on disk before `accept` returns.
        A client has one upload in a round, whatever it sends.
        A round closes once; below the minimum nothing of it ever leaves.
        After closing, nothing in the file says who sent what, or in which order it came.
        `parts` gives the same batch every time, until it is acknowledged.
    """

    def __init__(self, path: Path, shape: Shape) -> None:
        _validate.at_least(1, slots=shape.slots, length=shape.length, max_uploads=shape.max_uploads)
        _validate.in_interval(1, shape.max_uploads, min_uploads=shape.min_uploads)
        self._shape = shape
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=60)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "secure_delete = ON"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.executescript(_TABLES)

    def state(self, round: int) -> State:
        """Where a round stands; a round that nobody has heard of is open."""
        found = self._database.execute("SELECT state FROM rounds WHERE round = ?", (round,)).fetchone()
        return found[0] if found else "open"

    def uploads(self, round: int) -> int:
        """How many uploads a round has."""
        (count,) = self._database.execute("SELECT COUNT(*) FROM uploads WHERE round = ?", (round,)).fetchone()
        return int(count)

    def accept(self, round: int, *, client: bytes, report: bytes, messages: Sequence[tuple[int, bytes]]) -> Accepted:
        """Take the upload of a client; the same report again is known, another one is turned away."""
        self._check(round, client, report, messages)
        with self._transaction():
            if self._database.execute("SELECT 1 FROM known WHERE round = ? AND report = ?", (round, report)).fetchone():
                return "known"
            if self.state(round) != "open":
                raise Turned(f"expected an upload to an open round, got one to round {round}, which is closed")
            if self.uploads(round) >= self._shape.max_uploads:
                raise Turned(f"expected at most {self._shape.max_uploads} uploads in a round, got one more")
            try:
                self._database.execute("INSERT INTO uploads VALUES (?, ?, ?)", (round, client, report))
            except sqlite3.IntegrityError as error:
                raise Turned("expected one upload a client in a round, got another one") from error
            self._database.execute("INSERT INTO known VALUES (?, ?)", (round, report))
            self._database.executemany(
                "INSERT INTO messages VALUES (?, ?, ?, ?)", [(round, report, slot, sealed) for slot, sealed in messages]
            )
        return "accepted"

    def close(self, round: int, *, dummy: Callable[[int], bytes] | None = None) -> State:
        """Close a round for good; `dummy` seals one dummy for a slot. A closed round stays as it is."""
        if self._shape.pad_to is not None and dummy is None:
            raise ValueError("expected a way to make dummies where slots are filled up, got none")
        with self._transaction():
            if self.state(round) != "open":
                return self.state(round)
            enough = self.uploads(round) >= self._shape.min_uploads
            if enough:
                self._shuffle(round, dummy)
            for table in ("uploads", "messages"):
                self._database.execute(f"DELETE FROM {table} WHERE round = ?", (round,))
            state: State = "sent" if enough else "void"
            self._database.execute("INSERT INTO rounds VALUES (?, ?)", (round, state))
        self._tidy()
        return state

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """The batch of a closed round in numbered parts of `size` messages: (slot, sealed) each."""
        _validate.at_least(1, size=size)
        number = 0
        while True:
            rows = self._database.execute(
                "SELECT slot, sealed FROM batch WHERE round = ? AND place >= ? AND place < ? ORDER BY place",
                (round, number * size, (number + 1) * size),
            ).fetchall()
            if not rows:
                return
            yield number, rows
            number += 1

    def acknowledge(self, round: int) -> None:
        """Delete a batch that the analyzer has."""
        with self._transaction():
            if self.state(round) not in ("sent", "done"):
                raise ValueError(f"expected a round whose batch was sent, got round {round}, {self.state(round)}")
            self._database.execute("DELETE FROM batch WHERE round = ?", (round,))
            self._database.execute("UPDATE rounds SET state = 'done' WHERE round = ?", (round,))
        self._tidy()

    def shut(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _shuffle(self, round: int, dummy: Callable[[int], bytes] | None) -> None:
        """Slot by slot: what is held at a time is one slot."""
        place = 0
        for slot in range(self._shape.slots):
            found = self._database.execute(
                "SELECT sealed FROM messages WHERE round = ? AND slot = ?", (round, slot)
            ).fetchall()
            sealed = [row[0] for row in found]
            _SYSTEM.shuffle(sealed)
            if self._shape.pad_to is not None and dummy is not None:
                sealed = sealed[: self._shape.pad_to]
                sealed += [self._sized(dummy(slot)) for _ in range(self._shape.pad_to - len(sealed))]
                _SYSTEM.shuffle(sealed)
            self._database.executemany(
                "INSERT INTO batch VALUES (?, ?, ?, ?)",
                [(round, place + i, slot, message) for i, message in enumerate(sealed)],
            )
            place += len(sealed)

    def _sized(self, sealed: bytes) -> bytes:
        if len(sealed) != self._shape.length:
            raise ValueError(f"expected dummies of {self._shape.length} bytes like reports, got {len(sealed)}")
        return sealed

    def _check(self, round: int, client: bytes, report: bytes, messages: Sequence[tuple[int, bytes]]) -> None:
        _validate.integer(round=round)
        _validate.at_least(0, round=round)
        if len(report) != 16 or not 1 <= len(client) <= 64:
            raise Turned("expected a client id of up to 64 bytes and a random report id of 16, got others")
        shape, slots = self._shape, [slot for slot, _ in messages]
        if len(messages) != shape.reports if shape.reports is not None else len(messages) > shape.slots:
            raise Turned(f"expected {shape.reports or f'up to {shape.slots}'} messages, got {len(messages)}")
        if any(not isinstance(slot, int) or not 0 <= slot < shape.slots for slot in slots):
            raise Turned(f"expected slots from 0 to {shape.slots - 1}, got others")
        if len(set(slots)) != len(slots):
            raise Turned("expected one message a slot, got more")
        if any(len(sealed) != shape.length for _, sealed in messages):
            raise Turned(f"expected messages of {shape.length} bytes, got others")

    def _tidy(self) -> None:
        """What was deleted shall not linger in the log."""
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
