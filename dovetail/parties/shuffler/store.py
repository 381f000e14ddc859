"""A shuffler's memory: uploads until a round closes, then the shuffled batch until the analyzer has it.

A round is *opened*, once, with the head of the analyzer's ledger; a head that contradicts what was seen before is
refused. It is *frozen* when its time is up: nothing more is taken, and the set of its report ids is final. With too few
of them it is *void*: everything is deleted and nothing ever leaves. Else, in the one transaction that closes it, every
slot is filled up with sealed dummies (or loses a random surplus) and permuted by the operating system's randomness, and
the uploads are deleted with all that says who sent them. What leaves is that batch and no other, however often it is
sent: a second draw of dummies would tell them from reports. It is *sent* in numbered parts, so that the analyzer can
ignore what it has, and deleted when acknowledged (*done*).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from dovetail import _validate
from dovetail.parties.common.database import Database
from dovetail.parties.common.wire import REPORT_ID
from dovetail.parties.shuffler.arrivals import Accepted, Arrival, Over, Shape, Turned, Unopened

__all__ = ["State", "Store"]

State = Literal["unknown", "open", "frozen", "void", "sent", "done"]
_TABLES = """
CREATE TABLE IF NOT EXISTS owner (name BLOB PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, state TEXT NOT NULL, head BLOB NOT NULL,
                                   closes REAL NOT NULL, uploads INTEGER NOT NULL, agreed BLOB) STRICT;
CREATE TABLE IF NOT EXISTS uploads (round INTEGER, client BLOB, report BLOB, PRIMARY KEY (round, client)) STRICT,
                                   WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS messages (round INTEGER, report BLOB, slot INTEGER, sealed BLOB) STRICT;
CREATE INDEX IF NOT EXISTS messages_by_slot ON messages (round, slot);
CREATE TABLE IF NOT EXISTS known (round INTEGER, report BLOB, PRIMARY KEY (round, report)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS dummies (round INTEGER, slot INTEGER, sealed BLOB) STRICT;
CREATE INDEX IF NOT EXISTS dummies_by_slot ON dummies (round, slot);
CREATE TABLE IF NOT EXISTS batch (round INTEGER, place INTEGER, slot INTEGER, sealed BLOB,
                                  PRIMARY KEY (round, place)) STRICT, WITHOUT ROWID;
"""
_SYSTEM = random.SystemRandom()


class Store(Database):
    """The store of one shuffler for one task, in one file; `owner` says of which.

    Guarantees:
        An upload is taken whole or not at all, once, and is on disk before `accept` returns.
        A client has one upload in a round, whatever it sends.
        A round closes once; below the minimum nothing of it ever leaves.
        After closing, nothing in the file says who sent what, or in which order it came.
        `parts` gives the same batch every time, until it is acknowledged.
        Rounds only go forward, and a round is opened under one head.
        A store belongs to one owner: another task's minimum does not apply to it.
    """

    def __init__(self, path: Path, shape: Shape, *, owner: bytes = b"") -> None:
        _validate.at_least(1, slots=shape.slots, length=shape.length, max_uploads=shape.max_uploads)
        _validate.in_interval(1, shape.max_uploads, min_uploads=shape.min_uploads)
        self._shape = shape
        super().__init__(path, _TABLES, "temp_store = MEMORY")
        with self._transaction():
            self._database.execute("INSERT INTO owner SELECT ? WHERE NOT EXISTS (SELECT 1 FROM owner)", (owner,))
        if self._one("SELECT name FROM owner") != (owner,):
            raise ValueError(f"expected the store of this task and shuffler in {str(path)!r}, got another one's")
        self._tidy()

    def open_round(self, round: int, *, head: bytes, closes: float) -> None:
        """Begin to take uploads until the second `closes`; the same again changes nothing."""
        with self._transaction():
            (last,) = self._one("SELECT MAX(round) FROM rounds") or (None,)
            if last is not None and round < last:
                raise ValueError(f"expected round {last} or a later one, got round {round}: the analyzer was set back")
            found = self._one("SELECT head FROM rounds WHERE round = ?", round)
            if found:
                if found[0] != head:
                    raise ValueError(f"expected round {round} under the ledger that opened it, got another ledger")
                return
            self._database.execute("INSERT INTO rounds VALUES (?, 'open', ?, ?, 0, NULL)", (round, head, closes))

    def state(self, round: int) -> State:
        """Where a round stands."""
        found = self._one("SELECT state FROM rounds WHERE round = ?", round)
        return found[0] if found else "unknown"

    def unfinished(self) -> list[tuple[int, State, float]]:
        """Rounds that have something left to do: number, state, and the second in which it closes."""
        with self._lock:
            query = "SELECT round, state, closes FROM rounds WHERE state != 'done' ORDER BY round"
            return self._database.execute(query).fetchall()

    def uploads(self, round: int) -> int:
        """How many uploads a round has; of a closed one, how many were shuffled."""
        found = self._one("SELECT uploads FROM rounds WHERE round = ?", round)
        return int(found[0]) if found else 0

    def accept(self, round: int, *, client: bytes, report: bytes, messages: Sequence[tuple[int, bytes]]) -> Accepted:
        """Take the upload of a client; the same report again is known, another one is turned away."""
        (taken,) = self.accept_all([Arrival(round, client, report, messages)])
        if isinstance(taken, Turned):
            raise taken
        return taken

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Accepted | Turned]:
        """Take several uploads in one transaction, each whole or not at all."""
        with self._transaction():
            return [self._take(arrival) for arrival in arrivals]

    def freeze(self, round: int) -> list[bytes]:
        """Take nothing more; the report ids of the round, from now on always the same."""
        with self._transaction():
            if self.state(round) == "unknown":
                raise ValueError(f"expected a round that was opened, got round {round}")
            self._database.execute("UPDATE rounds SET state = 'frozen' WHERE round = ? AND state = 'open'", (round,))
        return self.roster(round) or []

    def roster(self, round: int) -> list[bytes] | None:
        """The report ids of a round, once they are final."""
        with self._lock:
            if self.state(round) in ("unknown", "open"):
                return None
            found = self._database.execute("SELECT report FROM known WHERE round = ? ORDER BY report", (round,))
            return [row[0] for row in found]

    def agree(self, round: int, digest: bytes) -> bytes:
        """Decide whom to count in a frozen round, by a digest; the first decision stays."""
        with self._transaction():
            self._database.execute("UPDATE rounds SET agreed = ? WHERE round = ? AND agreed IS NULL", (digest, round))
        return self.agreed(round) or digest

    def agreed(self, round: int) -> bytes | None:
        """What was decided."""
        found = self._one("SELECT agreed FROM rounds WHERE round = ?", round)
        return found[0] if found else None

    def lacking(self, round: int, *, roster: Collection[bytes] | None = None) -> dict[int, int]:
        """How many dummies every slot of a frozen round still needs, counting the reports on the roster alone."""
        if self._shape.pad_to is None:
            return {}
        counts = dict.fromkeys(range(self._shape.slots), 0)
        with self._lock:
            for report, slot in self._database.execute("SELECT report, slot FROM messages WHERE round = ?", (round,)):
                counts[slot] += roster is None or report in roster
            for (slot,) in self._database.execute("SELECT slot FROM dummies WHERE round = ?", (round,)):
                counts[slot] += 1
        return {slot: self._shape.pad_to - count for slot, count in counts.items() if count < self._shape.pad_to}

    def stage(self, round: int, dummies: Sequence[tuple[int, bytes]]) -> None:
        """Keep sealed dummies, (slot, ciphertext) each, until the round is closed with them."""
        if any(len(sealed) != self._shape.length for _, sealed in dummies):
            raise ValueError(f"expected dummies of {self._shape.length} bytes like reports, got others")
        with self._transaction():
            if self.state(round) != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {self.state(round)}")
            self._database.executemany(
                "INSERT INTO dummies VALUES (?, ?, ?)", [(round, slot, sealed) for slot, sealed in dummies]
            )

    def close(self, round: int, *, roster: Collection[bytes] | None = None) -> State:
        """Close a frozen round for good with the reports on the roster (None: all); a closed round stays as it is."""
        with self._transaction():
            if (state := self.state(round)) not in ("unknown", "open", "frozen"):
                return state
            if state != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {state}")
            self._keep_only(round, roster)
            enough = self._count(round) >= self._shape.min_uploads
            self._database.execute("UPDATE rounds SET uploads = ? WHERE round = ?", (self._count(round), round))
            if enough:
                self._shuffle(round)
            for table in ("uploads", "messages", "dummies"):
                self._database.execute(f"DELETE FROM {table} WHERE round = ?", (round,))
            state = "sent" if enough else "void"
            self._database.execute("UPDATE rounds SET state = ? WHERE round = ?", (state, round))
        self._tidy()
        return state

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """The batch of a closed round in numbered parts of `size` messages: (slot, sealed) each."""
        _validate.at_least(1, size=size)
        number = 0
        while True:
            with self._lock:
                rows = self._database.execute(
                    "SELECT slot, sealed FROM batch WHERE round = ? AND place >= ? AND place < ? ORDER BY place",
                    (round, number * size, (number + 1) * size),
                ).fetchall()
            if not rows:
                return
            yield number, rows
            number += 1

    def acknowledge(self, round: int) -> None:
        """Delete a batch that the analyzer has; of a void round, remember that it was told."""
        with self._transaction():
            if self.state(round) not in ("void", "sent", "done"):
                raise ValueError(f"expected a round that is closed, got round {round}, {self.state(round)}")
            self._database.execute("DELETE FROM batch WHERE round = ?", (round,))
            self._database.execute("UPDATE rounds SET state = 'done' WHERE round = ?", (round,))
        self._tidy()

    def _take(self, arrival: Arrival) -> Accepted | Turned:
        """Everything is looked at before anything is written, so that one upload never spoils another's transaction."""
        round, client, report, messages = arrival
        try:
            self._check(arrival)
            if self._one("SELECT 1 FROM known WHERE round = ? AND report = ?", round, report):
                mine = "SELECT 1 FROM uploads WHERE round = ? AND client = ? AND report = ?"
                if self.state(round) == "open" and not self._one(mine, round, client, report):
                    raise Turned("expected a report id of the client's own, got another client's")
                return "known"
            if (state := self.state(round)) == "unknown":
                raise Unopened(f"expected an upload to an open round, got one to round {round}, which is not open")
            if state != "open":
                raise Over(f"expected an upload to an open round, got one to round {round}, which is closed")
            if self._one("SELECT 1 FROM uploads WHERE round = ? AND client = ?", round, client):
                raise Turned("expected one upload per client and round, got another one")
            if self.uploads(round) >= self._shape.max_uploads:
                raise Over(f"expected at most {self._shape.max_uploads} uploads in a round, got one more")
        except Turned as reason:
            return reason
        self._database.execute("INSERT INTO uploads VALUES (?, ?, ?)", (round, client, report))
        self._database.execute("INSERT INTO known VALUES (?, ?)", (round, report))
        self._database.execute("UPDATE rounds SET uploads = uploads + 1 WHERE round = ?", (round,))
        self._database.executemany(
            "INSERT INTO messages VALUES (?, ?, ?, ?)", [(round, report, slot, sealed) for slot, sealed in messages]
        )
        return "accepted"

    def _keep_only(self, round: int, roster: Collection[bytes] | None) -> None:
        if roster is None:
            return
        self._database.execute("CREATE TEMP TABLE IF NOT EXISTS roster (report BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("DELETE FROM temp.roster")
        self._database.executemany("INSERT OR IGNORE INTO temp.roster VALUES (?)", [(report,) for report in roster])
        for table in ("uploads", "messages"):
            self._database.execute(
                f"DELETE FROM {table} WHERE round = ? AND report NOT IN (SELECT report FROM temp.roster)", (round,)
            )

    def _count(self, round: int) -> int:
        return int((self._one("SELECT COUNT(*) FROM uploads WHERE round = ?", round) or (0,))[0])

    def _shuffle(self, round: int) -> None:
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
            self._database.executemany(
                "INSERT INTO batch VALUES (?, ?, ?, ?)",
                [(round, place + i, slot, message) for i, message in enumerate(sealed)],
            )
            place += len(sealed)

    def _shuffled(self, table: str, round: int, slot: int) -> list[bytes]:
        rows = self._database.execute(f"SELECT sealed FROM {table} WHERE round = ? AND slot = ?", (round, slot))
        sealed = [row[0] for row in rows.fetchall()]
        _SYSTEM.shuffle(sealed)
        return sealed

    def _check(self, arrival: Arrival) -> None:
        if len(arrival.report) != REPORT_ID or not 1 <= len(arrival.client) <= 64:
            raise Turned(f"expected a client id of up to 64 bytes and a random report id of {REPORT_ID}, got others")
        shape, messages = self._shape, arrival.messages
        slots = [slot for slot, _ in messages]
        if len(messages) != shape.reports if shape.reports is not None else len(messages) > shape.slots:
            raise Turned(f"expected {shape.reports or f'up to {shape.slots}'} messages, got {len(messages)}")
        if any(not isinstance(slot, int) or not 0 <= slot < shape.slots for slot in slots):
            raise Turned(f"expected slots from 0 to {shape.slots - 1}, got others")
        if len(set(slots)) != len(slots):
            raise Turned("expected one message per slot, got more")
        if any(len(sealed) != shape.length for _, sealed in messages):
            raise Turned(f"expected messages of {shape.length} bytes, got others")

    def _tidy(self) -> None:
        """What was deleted shall not linger in the log."""
        with self._lock:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
