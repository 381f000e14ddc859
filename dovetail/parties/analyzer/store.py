"""The analyzer's working memory: whose batches, which parts of them it counted, the sums so far, and the models.

A part is counted in the transaction that notes its number, so that it counts once, whenever the process dies. Memory
and file grow with the model, not with the reports: only sums are kept. A model is on disk before the ledger releases
it, and carries the ledger's hash afterwards.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from dovetail._structs import ready
from dovetail.parties.common.database import Database
from dovetail.parties.common.wire import Closed

__all__ = [
    "AnalyzerStore",
    "Checkpoint",
    "Refusals",
    "Stale",
]

Outcome = Literal["released", "void", "spoiled"]
_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS batches (round INTEGER, sender INTEGER, batch BLOB NOT NULL,
                                    PRIMARY KEY (round, sender)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (round INTEGER, sender INTEGER, number INTEGER, messages INTEGER, unsealable INTEGER,
                                  out_of_range INTEGER, repeated INTEGER,
                                  PRIMARY KEY (round, sender, number)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS marks (round INTEGER, mark BLOB, PRIMARY KEY (round, mark)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tallies (round INTEGER PRIMARY KEY, leaves BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS closed (round INTEGER, sender INTEGER, said BLOB NOT NULL,
                                   PRIMARY KEY (round, sender)) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outcomes (round INTEGER PRIMARY KEY, outcome TEXT NOT NULL, uploads INTEGER NOT NULL,
                                     accuracy REAL, measured TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS models (round INTEGER PRIMARY KEY, leaves BLOB NOT NULL, digest BLOB NOT NULL,
                                   head BLOB) STRICT;
""",
    "CREATE TABLE IF NOT EXISTS openings (round INTEGER PRIMARY KEY, closes INTEGER NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS ended (reason TEXT PRIMARY KEY) STRICT",
)


class Stale(ValueError):  # noqa: N818 - it says why a part is read again
    """A part that was read before others that bear on it were counted."""


class Refusals(NamedTuple):
    """Messages of a round that were not counted."""

    unsealable: int
    out_of_range: int
    repeated: int


class Checkpoint(NamedTuple):
    """A model with all that training needs to go on; `head` is None until the ledger has released it."""

    round: int
    leaves: list[np.ndarray]
    digest: bytes
    head: bytes | None


class AnalyzerStore(Database):
    """The analyzer's file for one task, or its tables in the database of its replicas.

    Guarantees:
        A part counts once, and what it adds is on disk before `count` returns.
        Outcomes are never changed.
    """

    def __init__(self, where: Path | str) -> None:
        super().__init__(where, {"book": _MIGRATIONS})

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep out other replicas, and other threads, for several steps."""
        return self._database.exclusive()

    def open_round(self, round: int, *, now: float, seconds: float) -> int:
        """The second at which a round closes: so many seconds after it was first opened, whoever asks.

        One that was due before anybody sent anything began while nobody was there to hear of it: it begins again.
        """
        with self._transaction():
            (closes,) = self._one("SELECT closes FROM openings WHERE round = ?", round) or (None,)
            begun = self._one("SELECT 1 FROM batches WHERE round = ?", round) is not None
            if closes is None or (closes < now and not begun):
                closes = math.ceil(now + seconds)
                query = "INSERT INTO openings VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET closes = excluded.closes"
                self._do(query, round, closes)
        return int(closes)

    def batch(self, round: int, sender: int) -> bytes | None:
        """The batch that a sender has begun to send in a round: the first of which anything counted."""
        found = self._one("SELECT batch FROM batches WHERE round = ? AND sender = ?", round, sender)
        return None if found is None else found[0]

    def has_part(self, round: int, sender: int, number: int) -> bool:
        """Whether a part was counted."""
        query = "SELECT 1 FROM parts WHERE round = ? AND sender = ? AND number = ?"
        return self._one(query, round, sender, number) is not None

    def repeated_marks(self, round: int, marks: Sequence[bytes]) -> set[int]:
        """Which of these marks a round has already, in parts that were counted or earlier in this list."""
        asked, found = ",".join("?" * len(marks)), set()
        query = f"SELECT mark FROM marks WHERE round = ? AND mark IN ({asked})"
        seen = {mark for (mark,) in self._rows(query, round, *marks)}
        for place, mark in enumerate(marks):
            if mark in seen:
                found.add(place)
            seen.add(mark)
        return found

    def count(
        self,
        round: int,
        sender: int,
        batch: bytes,
        number: int,
        *,
        messages: int,
        refused: Refusals,
        tally: Sequence[np.ndarray],
        marks: Sequence[bytes] = (),
    ) -> bool:
        """Add what a part of the sender's batch tallies to; False, and nothing changes, if it was counted before.

        Refuses a part with marks that came in after it was read: read it again.
        """
        with self._transaction():
            if self.has_part(round, sender, number):
                return False
            if len(self.repeated_marks(round, marks)) != refused.repeated:
                raise Stale("expected a part that was read after all others that were counted, got one read before")
            self._pin(round, sender, batch)
            self._do("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", round, sender, number, messages, *refused)
            query = "INSERT INTO marks VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._database.many(query, [(round, mark) for mark in marks])
            so_far = self.tally(round)
            total = list(tally) if so_far is None else [a + b for a, b in zip(so_far, tally, strict=True)]
            query = "INSERT INTO tallies VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET leaves = excluded.leaves"
            self._do(query, round, _pack(total))
            return True

    def tally(self, round: int) -> list[np.ndarray] | None:
        """The sums of a round so far."""
        found = self._one("SELECT leaves FROM tallies WHERE round = ?", round)
        return None if found is None else _unpack(found[0])

    def refusals(self, round: int) -> Refusals:
        """What a round did not count."""
        query = (
            "SELECT COALESCE(SUM(unsealable), 0), COALESCE(SUM(out_of_range), 0), COALESCE(SUM(repeated), 0) "
            "FROM parts WHERE round = ?"
        )
        return Refusals(*map(int, self._one(query, round) or (0, 0, 0)))

    def messages(self, round: int, sender: int | None = None) -> int:
        """How many messages a round had, of one sender or of all."""
        query, values = "SELECT COALESCE(SUM(messages), 0) FROM parts WHERE round = ?", [round]
        if sender is not None:
            query, values = f"{query} AND sender = ?", [round, sender]
        return int((self._one(query, *values) or (0,))[0])

    def note_closed(self, round: int, sender: int, said: Closed) -> None:
        """Remember what a sender said; refuses another word later."""
        with self._transaction():
            found = self._one("SELECT said FROM closed WHERE round = ? AND sender = ?", round, sender)
            body = msgspec.json.encode(said)
            if found is not None and found[0] != body:
                raise ValueError(f"expected what sender {sender} said of round {round} before, got another word")
            self._pin(round, sender, said.batch)
            self._do("INSERT INTO closed VALUES (?, ?, ?) ON CONFLICT DO NOTHING", round, sender, body)

    def closures(self, round: int) -> dict[int, Closed]:
        """What each sender said of a round."""
        rows = self._rows("SELECT sender, said FROM closed WHERE round = ?", round)
        return {sender: msgspec.json.decode(said, type=ready(Closed)) for sender, said in rows}

    def parts(self, round: int, sender: int) -> int:
        """How many parts of a sender's batch were counted."""
        found = self._one("SELECT COUNT(*) FROM parts WHERE round = ? AND sender = ?", round, sender)
        return int((found or (0,))[0])

    def propose(self, checkpoint: Checkpoint) -> None:
        """Keep a model that the ledger has not released yet."""
        values = (checkpoint.round, _pack(checkpoint.leaves), checkpoint.digest)
        with self._transaction():
            self._do("INSERT INTO models VALUES (?, ?, ?, NULL) ON CONFLICT DO NOTHING", *values)

    def confirm(self, round: int, head: bytes) -> None:
        """Bind a model to the ledger entry that released it."""
        with self._transaction():
            self._do("UPDATE models SET head = ? WHERE round = ?", head, round)

    def model(self, round: int | None = None) -> Checkpoint | None:
        """The model after a round, or the last one."""
        where = "ORDER BY round DESC LIMIT 1" if round is None else "WHERE round = ?"
        found = self._one(
            f"SELECT round, leaves, digest, head FROM models {where}", *([] if round is None else [round])
        )
        return None if found is None else Checkpoint(found[0], _unpack(found[1]), found[2], found[3])

    def released_model(self, round: int) -> Checkpoint:
        """The last model that was released up to a round."""
        query = "SELECT MAX(round) FROM models WHERE round <= ? AND head IS NOT NULL"
        (number,) = self._one(query, round) or (None,)
        if number is None or (found := self.model(number)) is None:
            raise ValueError("expected the first model in the book, got none")
        return found

    def end_round(
        self,
        round: int,
        outcome: Outcome,
        *,
        uploads: int,
        accuracy: float | None,
        measured: Mapping[str, Any] | None = None,
        reason: str | None = None,
    ) -> None:
        """End a round; its sums are no longer needed. `reason` says why nothing was released, to its owner."""
        told = {"measured": measured, "reason": reason}
        said = msgspec.json.encode({name: value for name, value in told.items() if value}).decode()
        with self._transaction():
            query = "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            self._do(query, round, outcome, uploads, accuracy, said)
            for table in ("tallies", "marks"):
                self._database.clear(table, round)

    def _pin(self, round: int, sender: int, batch: bytes) -> None:
        self._do("INSERT INTO batches VALUES (?, ?, ?) ON CONFLICT DO NOTHING", round, sender, batch)

    def end_task(self, reason: str) -> None:
        """Remember that the task ended before its time; the first reason stays."""
        with self._transaction():
            self._do("INSERT INTO ended SELECT ? WHERE NOT EXISTS (SELECT 1 FROM ended)", reason)

    def why_ended(self) -> str | None:
        """Why the task ended before its time; None if it goes on."""
        found = self._one("SELECT reason FROM ended")
        return None if found is None else str(found[0])

    def last_ended(self) -> int:
        """The last round that ended."""
        (found,) = self._one("SELECT MAX(round) FROM outcomes") or (None,)
        return 0 if found is None else int(found)

    def outcomes(self) -> list[tuple[int, Outcome, int, float | None, dict[str, Any]]]:
        """Every round that ended: its number, how, how many uploads were in it, the accuracy after it, measures."""
        rows = self._rows("SELECT * FROM outcomes ORDER BY round")
        return [(*row[:-1], msgspec.json.decode(row[-1])) for row in rows]


def _pack(leaves: Sequence[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, *leaves)
    return buffer.getvalue()


def _unpack(data: bytes) -> list[np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
