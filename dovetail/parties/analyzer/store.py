"""The analyzer's store: whose batches it began, which parts it counted, the sums so far, and the models.

A part is counted in the transaction that notes its number, so that it counts once, whenever the process dies. Memory
and file grow with the model, not with the number of reports: only sums are kept. A model is on disk before the ledger
releases it, and carries the ledger's hash afterwards.
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

from dovetail._structs import resolve_fields
from dovetail.parties.common.database import Database
from dovetail.parties.common.wire import Closed, Malformed

__all__ = [
    "AnalyzerStore",
    "Refusals",
    "Stale",
    "StoredModel",
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


class Stale(ValueError):  # noqa: N818 - the caller reads the part again
    """A part with messages that were counted, from another part, after it was read."""


class Refusals(NamedTuple):
    """How many messages of a round were not counted, by reason."""

    unsealable: int
    out_of_range: int
    repeated: int


class StoredModel(NamedTuple):
    """The leaves after a round; `head` is None until the ledger has released the model."""

    round: int
    leaves: list[np.ndarray]
    digest: bytes
    head: bytes | None


class AnalyzerStore(Database):
    """The analyzer's SQLite file for one task, or its tables in the database that replicas share.

    Guarantees:
        A part counts once, and what it adds is on disk before `count` returns.
        Outcomes are never changed.
    """

    def __init__(self, where: Path | str) -> None:
        super().__init__(where, {"book": _MIGRATIONS})

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep out other replicas and threads for several steps."""
        return self._database.exclusive()

    def open_round(self, round: int, *, now: float, seconds: float) -> int:
        """Open a round, once, and return the second at which it closes: so many after it was first opened.

        A round whose time was up before anybody sent anything was opened while no service was there to hear of it: it
        is opened again.
        """
        with self._transaction():
            (closes,) = self._fetch_row("SELECT closes FROM openings WHERE round = ?", round) or (None,)
            begun = self._fetch_row("SELECT 1 FROM batches WHERE round = ?", round) is not None
            if closes is None or (closes < now and not begun):
                closes = math.ceil(now + seconds)
                query = "INSERT INTO openings VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET closes = excluded.closes"
                self._execute(query, round, closes)
        return int(closes)

    def batch_of_sender(self, round: int, sender: int) -> bytes | None:
        """The batch of a sender in a round: the first of which anything was counted, or that the sender closed with."""
        row = self._fetch_row("SELECT batch FROM batches WHERE round = ? AND sender = ?", round, sender)
        return None if row is None else row[0]

    def has_part(self, round: int, sender: int, number: int) -> bool:
        """Whether a part of a sender's batch was counted."""
        query = "SELECT 1 FROM parts WHERE round = ? AND sender = ? AND number = ?"
        return self._fetch_row(query, round, sender, number) is not None

    def repeated_marks(self, round: int, marks: Sequence[bytes]) -> set[int]:
        """The places of marks that the round has already, in parts that were counted or earlier in this list."""
        repeated = set()
        query = f"SELECT mark FROM marks WHERE round = ? AND mark IN ({','.join('?' * len(marks))})"
        seen = {mark for (mark,) in self._fetch_rows(query, round, *marks)}
        for place, mark in enumerate(marks):
            if mark in seen:
                repeated.add(place)
            seen.add(mark)
        return repeated

    def count_part(
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
        """Count a part of a sender's batch.

        Raises `Stale` if some of its marks were counted, with another part, after it was read: it must be read again.

        Arguments:
            round: the open round.
            sender: the index of the shuffler or aggregator.
            batch: the id of its batch.
            number: the number of the part.
            messages: how many messages the part has.
            refused: how many of them do not count.
            tally: the sums of the others.
            marks: marks of the messages, by which repetitions are recognised.

        Returns: False, and nothing changes, if the part was counted before.
        """
        with self._transaction():
            if self.has_part(round, sender, number):
                return False
            if len(self.repeated_marks(round, marks)) != refused.repeated:
                raise Stale(
                    f"part {number} of sender {sender} was read before another part with its messages was counted"
                )
            self._pin_batch(round, sender, batch)
            self._execute("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", round, sender, number, messages, *refused)
            query = "INSERT INTO marks VALUES (?, ?) ON CONFLICT DO NOTHING"
            self._database.execute_many(query, [(round, mark) for mark in marks])
            so_far = self.tally(round)
            total = list(tally) if so_far is None else [a + b for a, b in zip(so_far, tally, strict=True)]
            query = "INSERT INTO tallies VALUES (?, ?) ON CONFLICT (round) DO UPDATE SET leaves = excluded.leaves"
            self._execute(query, round, _pack_leaves(total))
            return True

    def tally(self, round: int) -> list[np.ndarray] | None:
        """The sums of a round so far; None before anything was counted."""
        row = self._fetch_row("SELECT leaves FROM tallies WHERE round = ?", round)
        return None if row is None else _unpack_leaves(row[0])

    def refusals(self, round: int) -> Refusals:
        """How many messages of a round were not counted, by reason."""
        query = (
            "SELECT COALESCE(SUM(unsealable), 0), COALESCE(SUM(out_of_range), 0), COALESCE(SUM(repeated), 0) "
            "FROM parts WHERE round = ?"
        )
        return Refusals(*map(int, self._fetch_row(query, round) or (0, 0, 0)))

    def num_messages(self, round: int, sender: int | None = None) -> int:
        """How many messages of a round have come, from one sender or from all."""
        query = "SELECT COALESCE(SUM(messages), 0) FROM parts WHERE round = ?"
        row = (
            self._fetch_row(query, round)
            if sender is None
            else self._fetch_row(f"{query} AND sender = ?", round, sender)
        )
        return int((row or (0,))[0])

    def note_closed(self, round: int, sender: int, closed: Closed) -> None:
        """Note how a sender closed a round; refuses to change it later.

        The batch that it names becomes the sender's if it has none; the caller has refused another one before.
        """
        with self._transaction():
            row = self._fetch_row("SELECT said FROM closed WHERE round = ? AND sender = ?", round, sender)
            body = msgspec.json.encode(closed)
            if row is not None and row[0] != body:
                raise Malformed(f"sender {sender} has closed round {round} with other numbers before")
            self._pin_batch(round, sender, closed.batch)
            self._execute("INSERT INTO closed VALUES (?, ?, ?) ON CONFLICT DO NOTHING", round, sender, body)

    def closures(self, round: int) -> dict[int, Closed]:
        """How each sender closed a round, by its index."""
        rows = self._fetch_rows("SELECT sender, said FROM closed WHERE round = ?", round)
        return {sender: msgspec.json.decode(body, type=resolve_fields(Closed)) for sender, body in rows}

    def num_parts(self, round: int, sender: int) -> int:
        """How many parts of a sender's batch were counted."""
        row = self._fetch_row("SELECT COUNT(*) FROM parts WHERE round = ? AND sender = ?", round, sender)
        return int((row or (0,))[0])

    def propose_model(self, stored: StoredModel) -> None:
        """Keep a model that the ledger has not released yet; the first one of a round stays."""
        values = (stored.round, _pack_leaves(stored.leaves), stored.digest)
        with self._transaction():
            self._execute("INSERT INTO models VALUES (?, ?, ?, NULL) ON CONFLICT DO NOTHING", *values)

    def confirm_release(self, round: int, head: bytes) -> None:
        """Bind a model to the ledger entry that released it."""
        with self._transaction():
            self._execute("UPDATE models SET head = ? WHERE round = ?", head, round)

    def model(self, round: int | None = None) -> StoredModel | None:
        """The model after a round (None: the last one), whether or not it was released; None if there is none."""
        where = "ORDER BY round DESC LIMIT 1" if round is None else "WHERE round = ?"
        query = f"SELECT round, leaves, digest, head FROM models {where}"
        row = self._fetch_row(query, *([] if round is None else [round]))
        return None if row is None else StoredModel(row[0], _unpack_leaves(row[1]), row[2], row[3])

    def released_model(self, round: int) -> StoredModel:
        """The last model that was released up to a round."""
        query = "SELECT MAX(round) FROM models WHERE round <= ? AND head IS NOT NULL"
        (number,) = self._fetch_row(query, round) or (None,)
        stored = None if number is None else self.model(number)
        if stored is None:
            raise ValueError("book.db has no released model: restore book.db and ledger.db from one backup")
        return stored

    def end_round(
        self,
        round: int,
        outcome: Outcome,
        *,
        uploads: int,
        accuracy: float | None,
        measured: Mapping[str, Any] | None = None,
        reason: str | None = None,
        unused: bool = False,
    ) -> None:
        """End a round, and delete its sums; an outcome that is there stays.

        Arguments:
            round: the round.
            outcome: how it ended.
            uploads: how many users counted.
            accuracy: the score of the model after it, if there is one.
            measured: the task's measures of the round.
            reason: why nothing was released, for the operator.
            unused: whether nothing of the round came or can come, so that it costs nothing.
        """
        notes = {"measured": measured, "reason": reason, "unused": unused}
        body = msgspec.json.encode({name: value for name, value in notes.items() if value}).decode()
        with self._transaction():
            query = "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
            self._execute(query, round, outcome, uploads, accuracy, body)
            for table in ("tallies", "marks"):
                self._database.delete_round(table, round)

    def _pin_batch(self, round: int, sender: int, batch: bytes) -> None:
        """Note the batch of a sender in a round; the first one stays."""
        self._execute("INSERT INTO batches VALUES (?, ?, ?) ON CONFLICT DO NOTHING", round, sender, batch)

    def end_task(self, reason: str) -> None:
        """Note that the task ended before its time, and why; the first reason stays."""
        with self._transaction():
            self._execute("INSERT INTO ended SELECT ? WHERE NOT EXISTS (SELECT 1 FROM ended)", reason)

    def why_ended(self) -> str | None:
        """Why the task ended before its time; None if it goes on."""
        row = self._fetch_row("SELECT reason FROM ended")
        return None if row is None else str(row[0])

    def last_ended_round(self) -> int:
        """The number of the last round that ended; 0 before the first has."""
        (last,) = self._fetch_row("SELECT MAX(round) FROM outcomes") or (None,)
        return 0 if last is None else int(last)

    def unused_rounds(self, *, before: float = math.inf) -> set[int]:
        """The rounds of which nothing came or can come, of those before a round."""
        return {number for number, *_, notes in self.outcomes() if number < before and notes.get("unused")}

    def outcomes(self) -> list[tuple[int, Outcome, int, float | None, dict[str, Any]]]:
        """Every round that ended: number, outcome, users who counted, accuracy after it, measures and reason."""
        rows = self._fetch_rows("SELECT * FROM outcomes ORDER BY round")
        return [(*row[:-1], msgspec.json.decode(row[-1])) for row in rows]


def _pack_leaves(leaves: Sequence[np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, *leaves)
    return buffer.getvalue()


def _unpack_leaves(data: bytes) -> list[np.ndarray]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return [arrays[f"arr_{i}"] for i in range(len(arrays.files))]
