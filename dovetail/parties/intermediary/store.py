"""The memory of a shuffler or an aggregator: uploads until a round closes, then what leaves until the analyzer has it.

A round is *opened*, once, with the head of the analyzer's ledger; a head that contradicts what was seen before is
refused. It is *frozen* when its time is up: nothing more is taken, and the set of its report ids is final. With too few
of them it is *void*: everything is deleted and nothing ever leaves. Else, in the one transaction that closes it, what
leaves is made from the uploads, with whatever is drawn for it, and the uploads are deleted with all that says who sent
them. What leaves is that batch and no other, however often it is sent: another draw would reveal what it hides. Its id
is drawn with it. It is *sent* in numbered parts, so that the analyzer can ignore what it has, and deleted when
acknowledged (*done*). A task that ends before its time leaves nothing behind: its rounds are done, whatever they held.

Uploads on their way into a store, and why some are turned away.
"""

from __future__ import annotations

import abc
import dataclasses
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from dovetail import _validate
from dovetail.parties.common.database import Database
from dovetail.parties.common.wire import BATCH_ID, REPORT_ID

__all__ = [
    "Accepted",
    "Arrival",
    "RoundClosed",
    "RoundNotOpen",
    "RoundStore",
    "State",
    "UploadRefused",
]

State = Literal["unknown", "open", "frozen", "void", "sent", "done"]
_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS owner (name BLOB PRIMARY KEY) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, state TEXT NOT NULL, head BLOB NOT NULL,
                                   closes REAL NOT NULL, uploads INTEGER NOT NULL, agreed BLOB, batch BLOB) STRICT;
CREATE TABLE IF NOT EXISTS uploads (round INTEGER, client BLOB, report BLOB, PRIMARY KEY (round, client)) STRICT,
                                   WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS known (round INTEGER, report BLOB, PRIMARY KEY (round, report)) STRICT, WITHOUT ROWID;
""",
    "CREATE UNIQUE INDEX IF NOT EXISTS uploads_by_report ON uploads (round, report)",
    "CREATE TABLE IF NOT EXISTS ended (reason TEXT PRIMARY KEY) STRICT",
)
_REMEMBER = (  # in no order but their own
    "INSERT INTO known SELECT round, report FROM uploads WHERE round = ? ORDER BY report ON CONFLICT DO NOTHING"
)


class RoundStore(Database, abc.ABC):
    """The store of one shuffler or aggregator for one task, and of all its replicas; `owner` says of which.

    Guarantees:
        An upload is taken whole or not at all, once, and is on disk before `accept` returns.
        A client has one upload in a round, whatever it sends.
        A round closes once; below the minimum nothing of it ever leaves.
        After closing, nothing in the file says who sent what, or in which order it came.
        `parts` gives the same batch every time, until it is acknowledged.
        Rounds only go forward, and a round is opened under one head.
        After `end_task` nothing is taken, nothing leaves and no round opens, also in a process that starts later.
        A store belongs to one owner: another task's minimum does not apply to it.
    """

    contents: ClassVar[tuple[str, ...]]  # tables of what uploads hold, by round and report
    additions: ClassVar[tuple[str, ...]] = ()  # tables of what is put beside them, by round
    leaves: ClassVar[str]  # the table of what leaves, by round

    def __init__(
        self,
        where: Path | str,
        migrations: Mapping[str, Sequence[str]],
        *,
        min_uploads: int,
        max_uploads: int,
        owner: bytes = b"",
    ) -> None:
        _validate.at_least(1, max_uploads=max_uploads)
        _validate.in_interval(1, max_uploads, min_uploads=min_uploads)
        self._min_uploads, self._max_uploads = min_uploads, max_uploads
        super().__init__(where, {"rounds": _MIGRATIONS, **migrations})
        with self._transaction():
            self._do("INSERT INTO owner SELECT ? WHERE NOT EXISTS (SELECT 1 FROM owner)", owner)
        if self._one("SELECT name FROM owner") != (owner,):
            shown = repr(str(where)) if isinstance(where, Path) else "this database"
            raise ValueError(f"expected the store of this task and party in {shown}, got another one's")
        self._database.tidy()

    @abc.abstractmethod
    def check(self, arrival: Arrival) -> None:
        """Turn away an upload with the wrong content."""

    @abc.abstractmethod
    def _keep(self, arrivals: Sequence[Arrival]) -> None:
        """Write down what is in uploads."""

    @abc.abstractmethod
    def _leave(self, round: int) -> None:
        """Make what leaves from the contents of a round, once."""

    @abc.abstractmethod
    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """What leaves of a closed round, in numbered parts of at most `size` messages."""

    def open_round(self, round: int, *, head: bytes, closes: float) -> None:
        """Begin to take uploads until the second `closes`; the same again changes nothing."""
        with self._transaction():
            if (reason := self.why_ended()) is not None:
                raise ValueError(f"round {round} stays closed: {reason}")
            (last,) = self._one("SELECT MAX(round) FROM rounds") or (None,)
            if last is not None and round < last:
                raise ValueError(f"expected round {last} or a later one, got round {round}: the analyzer was set back")
            found = self._one("SELECT head FROM rounds WHERE round = ?", round)
            if found:
                if found[0] != head:
                    raise ValueError(f"expected round {round} under the ledger that opened it, got another ledger")
                return
            self._do("INSERT INTO rounds VALUES (?, 'open', ?, ?, 0, NULL, NULL)", round, head, closes)

    def state(self, round: int) -> State:
        """Where a round stands."""
        found = self._one("SELECT state FROM rounds WHERE round = ?", round)
        return found[0] if found else "unknown"

    def pending_rounds(self) -> list[tuple[int, State, float]]:
        """Rounds that have something left to do: number, state, and the second in which it closes."""
        return self._rows("SELECT round, state, closes FROM rounds WHERE state != 'done' ORDER BY round")

    def uploads(self, round: int) -> int:
        """How many uploads a round has; of a closed one, how many counted."""
        found = self._one("SELECT uploads FROM rounds WHERE round = ?", round)
        return int(found[0]) if found else 0

    def accept(self, arrival: Arrival) -> Accepted:
        """Take the upload of a client; the same report again is known, another one is turned away."""
        (taken,) = self.accept_all([arrival])
        if isinstance(taken, UploadRefused):
            raise taken
        return taken

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Accepted | UploadRefused]:
        """Take several uploads in one transaction, each whole or not at all."""
        answers: list[Accepted | UploadRefused | None] = [self._misfit(arrival) for arrival in arrivals]
        with self._transaction():
            intakes: dict[int, _Intake] = {}
            for place, arrival in enumerate(arrivals):
                if answers[place] is None:
                    if arrival.round not in intakes:
                        intakes[arrival.round] = self._intake([one for one in arrivals if one.round == arrival.round])
                    answers[place] = intakes[arrival.round].take(arrival)
            taken = [one for one, answer in zip(arrivals, answers, strict=True) if answer == "accepted"]
            if taken:
                self._database.insert("uploads", [(one.round, one.client, one.report) for one in taken])
                self._keep(taken)
                for round, intake in intakes.items():
                    self._do("UPDATE rounds SET uploads = ? WHERE round = ?", intake.uploads, round)
        return [answer for answer in answers if answer is not None]

    def freeze(self, round: int) -> list[bytes]:
        """Take nothing more; the report ids of the round, from now on always the same."""
        with self._transaction():
            if self.state(round) == "unknown":
                raise ValueError(f"expected a round that was opened, got round {round}")
            self._do("UPDATE rounds SET state = 'frozen' WHERE round = ? AND state = 'open'", round)
        return self.roster(round) or []

    def roster(self, round: int) -> list[bytes] | None:
        """The report ids of a round, once they are final."""
        if self.state(round) in ("unknown", "open"):
            return None
        query = "SELECT report FROM known WHERE round = ? UNION SELECT report FROM uploads WHERE round = ?"
        return sorted(report for (report,) in self._rows(query, round, round))

    def agree(self, round: int, digest: bytes) -> bytes:
        """Decide whom to count in a frozen round, by a digest; the first decision stays."""
        with self._transaction():
            self._do("UPDATE rounds SET agreed = ? WHERE round = ? AND agreed IS NULL", digest, round)
        return self.agreed_digest(round) or digest

    def agreed_digest(self, round: int) -> bytes | None:
        """What was decided."""
        found = self._one("SELECT agreed FROM rounds WHERE round = ?", round)
        return found[0] if found else None

    def close(self, round: int, *, roster: Collection[bytes] | None = None, batch: bytes | None = None) -> State:
        """Close a frozen round for good with the reports on the roster (None: all); a closed round stays as it is.

        `batch` is what the batch is called; it is drawn unless given.
        """
        with self._transaction():
            if (state := self.state(round)) not in ("unknown", "open", "frozen"):
                return state
            if state != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {state}")
            self._do(_REMEMBER, round)
            self._keep_only(round, roster)
            count = int((self._one("SELECT COUNT(*) FROM uploads WHERE round = ?", round) or (0,))[0])
            name = secrets.token_bytes(BATCH_ID) if batch is None else batch
            self._do("UPDATE rounds SET uploads = ?, batch = ? WHERE round = ?", count, name, round)
            if count >= self._min_uploads:
                self._leave(round)
            for table in ("uploads", *self.contents, *self.additions):
                self._database.clear(table, round)
            state = "sent" if count >= self._min_uploads else "void"
            self._do("UPDATE rounds SET state = ? WHERE round = ?", state, round)
        self._database.tidy()
        return state

    def batch(self, round: int) -> bytes:
        """What the batch of a closed round is called."""
        found = self._one("SELECT batch FROM rounds WHERE round = ?", round)
        if found is None or found[0] is None:
            raise ValueError(f"expected a round that is closed, got round {round}, {self.state(round)}")
        return found[0]

    def acknowledge(self, round: int) -> None:
        """Delete a batch that the analyzer has; of a void round, remember that it was told."""
        with self._transaction():
            if self.state(round) not in ("void", "sent", "done"):
                raise ValueError(f"expected a round that is closed, got round {round}, {self.state(round)}")
            self._database.clear(self.leaves, round)
            self._do("UPDATE rounds SET state = 'done' WHERE round = ?", round)
        self._database.tidy()

    def end_task(self, reason: str) -> None:
        """Forget what the rounds hold, and open none again; the first reason stays."""
        with self._transaction():
            self._do("INSERT INTO ended SELECT ? WHERE NOT EXISTS (SELECT 1 FROM ended)", reason)
            for round, _, _ in self.pending_rounds():
                for table in ("uploads", *self.contents, *self.additions, self.leaves):
                    self._database.clear(table, round)
                self._do("UPDATE rounds SET state = 'done', uploads = 0 WHERE round = ?", round)
        self._database.tidy()

    def why_ended(self) -> str | None:
        """Why the task ended before its time; None if it goes on."""
        found = self._one("SELECT reason FROM ended")
        return None if found is None else str(found[0])

    def _misfit(self, arrival: Arrival) -> UploadRefused | None:
        """Why an upload is turned away whatever the store holds."""
        try:
            if len(arrival.report) != REPORT_ID or not 1 <= len(arrival.client) <= 64:
                raise UploadRefused(
                    f"the client id must have 1 to 64 bytes and the report id {REPORT_ID}; got {len(arrival.client)} "
                    f"and {len(arrival.report)}"
                )
            self.check(arrival)
        except UploadRefused as reason:
            return reason
        return None

    def _intake(self, arrivals: Sequence[Arrival]) -> _Intake:
        """What a round holds that bears on these uploads to it."""
        round, reports = arrivals[0].round, [one.report for one in arrivals]
        asked = ",".join("?" * len(arrivals))
        query = f"SELECT report, client FROM uploads WHERE round = ? AND {{}} IN ({asked})"  # one index at a time
        held = self._rows(query.format("report"), round, *reports)
        held += self._rows(query.format("client"), round, *(one.client for one in arrivals))
        closed = self._rows(f"SELECT report FROM known WHERE round = ? AND report IN ({asked})", round, *reports)
        return _Intake(
            state=self.state(round),
            uploads=self.uploads(round),
            most=self._max_uploads,
            reports={**{report: None for (report,) in closed}, **dict(held)},
            clients={client for _, client in held},
        )

    def _keep_only(self, round: int, roster: Collection[bytes] | None) -> None:
        if roster is None:
            return
        self._database.script("CREATE TEMP TABLE IF NOT EXISTS roster (report BLOB PRIMARY KEY) WITHOUT ROWID")
        self._do("DELETE FROM roster")
        self._database.insert("roster", [(report,) for report in set(roster)])
        for table in ("uploads", *self.contents):
            self._do(f"DELETE FROM {table} WHERE round = ? AND report NOT IN (SELECT report FROM roster)", round)


@dataclasses.dataclass(kw_only=True)
class _Intake:
    """A round that is about to take uploads: its state, and of reports and clients those that are asked about.

    Everything is looked at before anything is written, so that one upload never spoils another's transaction.
    """

    state: State
    uploads: int
    most: int
    reports: dict[bytes, bytes | None]
    clients: set[bytes]

    def take(self, arrival: Arrival) -> Accepted | UploadRefused:
        """Whether this upload is taken after those before it."""
        round, client, report, _ = arrival
        if report in self.reports:
            if self.state == "open" and self.reports[report] != client:
                return UploadRefused("expected a report id of the client's own, got another client's")
            return "known"
        if self.state == "unknown":
            return RoundNotOpen(f"expected an upload to an open round, got one to round {round}, which is not open")
        if self.state != "open":
            return RoundClosed(f"expected an upload to an open round, got one to round {round}, which is closed")
        if client in self.clients:
            return UploadRefused("expected one upload per client and round, got another one")
        if self.uploads >= self.most:
            return RoundClosed(f"expected at most {self.most} uploads in a round, got one more")
        self.uploads += 1
        self.reports[report] = client
        self.clients.add(client)
        return "accepted"


Accepted = Literal["accepted", "known"]


class UploadRefused(ValueError):  # noqa: N818 - an upload that is turned away
    """An upload that is not taken, and why."""


class RoundNotOpen(UploadRefused):
    """An upload to a round that has not been heard of here."""


class RoundClosed(UploadRefused):
    """An upload to a round that is closed, or has as many as it takes."""


class Arrival(NamedTuple):
    """An upload on its way into the store: who sent it, its random id, and what was in it.

    For a shuffler that is pairs of slot and ciphertext, for an aggregator a share.
    """

    round: int
    client: bytes
    report: bytes
    content: Any
