"""The store of a shuffler or an aggregator: uploads until a round closes, then its output until the analyzer has it.

A round is *opened*, once, with the head of the analyzer's ledger; a head that contradicts what was seen before is
refused. It is *frozen* when its time is up: nothing more is taken, and the set of its report ids is final. With too few
of them it is *void*: everything is deleted and nothing ever leaves. Otherwise one transaction makes the round's output
from the uploads, with whatever randomness that takes, and deletes the uploads with all that says who sent them. The
output is that batch and no other, however often it is sent: another draw would reveal what it hides. Its id is drawn
with it. It is *sent* in numbered parts, so that the analyzer can ignore what it has, and deleted when acknowledged
(*done*). A task that ends before its time leaves nothing behind: its rounds are done, whatever they held.
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
_KEEP_IDS = (  # sorted, so that their order of arrival is lost
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

    content_tables: ClassVar[tuple[str, ...]]  # contents of uploads, by round and report
    extra_tables: ClassVar[tuple[str, ...]] = ()  # what else a round holds until it closes, by round
    output_table: ClassVar[str]  # the output of closed rounds, by round

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
        self._min_uploads = min_uploads
        self._max_uploads = max_uploads
        super().__init__(where, {"rounds": _MIGRATIONS, **migrations})
        with self._transaction():
            self._execute("INSERT INTO owner SELECT ? WHERE NOT EXISTS (SELECT 1 FROM owner)", owner)
        if self._fetch_row("SELECT name FROM owner") != (owner,):
            shown = repr(str(where)) if isinstance(where, Path) else "this database"
            raise ValueError(
                f"{shown} is the store of another task or party: give this one a folder or database of its own"
            )
        self._database.purge_log()

    @abc.abstractmethod
    def check(self, arrival: Arrival) -> None:
        """Refuse an upload whose content does not have the task's form."""

    @abc.abstractmethod
    def _write_contents(self, arrivals: Sequence[Arrival]) -> None:
        """Write the contents of uploads."""

    @abc.abstractmethod
    def _make_output(self, round: int) -> None:
        """Make the output of a round from its contents, once."""

    @abc.abstractmethod
    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """The output of a closed round, in numbered parts of at most `size` messages."""

    def open_round(self, round: int, *, head: bytes, closes: float) -> None:
        """Begin to take uploads until the second `closes`; the same again changes nothing."""
        with self._transaction():
            if (reason := self.why_ended()) is not None:
                raise ValueError(f"round {round} stays closed: {reason}")
            (last,) = self._fetch_row("SELECT MAX(round) FROM rounds") or (None,)
            if last is not None and round < last:
                raise ValueError(
                    f"the analyzer opens round {round} after round {last}: its ledger was restored from an older copy"
                )
            row = self._fetch_row("SELECT head FROM rounds WHERE round = ?", round)
            if row:
                if row[0] != head:
                    raise ValueError(
                        f"the analyzer opens round {round} again under another ledger: its ledger was restored from an "
                        "older copy"
                    )
                return
            self._execute("INSERT INTO rounds VALUES (?, 'open', ?, ?, 0, NULL, NULL)", round, head, closes)

    def state(self, round: int) -> State:
        """Where a round stands."""
        row = self._fetch_row("SELECT state FROM rounds WHERE round = ?", round)
        return row[0] if row else "unknown"

    def pending_rounds(self) -> list[tuple[int, State, float]]:
        """Rounds that are not done: number, state, and the second in which each closes."""
        return self._fetch_rows("SELECT round, state, closes FROM rounds WHERE state != 'done' ORDER BY round")

    def num_uploads(self, round: int) -> int:
        """How many uploads a round has; of a closed one, how many counted."""
        row = self._fetch_row("SELECT uploads FROM rounds WHERE round = ?", round)
        return int(row[0]) if row else 0

    def accept(self, arrival: Arrival) -> Accepted:
        """Take the upload of a client; the same report again is "known", another one is refused."""
        (outcome,) = self.accept_all([arrival])
        if isinstance(outcome, UploadRefused):
            raise outcome
        return outcome

    def accept_all(self, arrivals: Sequence[Arrival]) -> list[Accepted | UploadRefused]:
        """Take several uploads in one transaction, each whole or not at all; the outcome of each."""
        answers: list[Accepted | UploadRefused | None] = [self._refusal_of_form(arrival) for arrival in arrivals]
        with self._transaction():
            intakes: dict[int, _Intake] = {}
            for place, arrival in enumerate(arrivals):
                if answers[place] is None:
                    if arrival.round not in intakes:
                        group = [other for other in arrivals if other.round == arrival.round]
                        intakes[arrival.round] = self._read_intake(group)
                    answers[place] = intakes[arrival.round].decide(arrival)
            taken = [arrival for arrival, answer in zip(arrivals, answers, strict=True) if answer == "accepted"]
            if taken:
                rows = [(arrival.round, arrival.client, arrival.report) for arrival in taken]
                self._database.insert_rows("uploads", rows)
                self._write_contents(taken)
                for round, intake in intakes.items():
                    self._execute("UPDATE rounds SET uploads = ? WHERE round = ?", intake.uploads, round)
        return [answer for answer in answers if answer is not None]

    def freeze(self, round: int) -> list[bytes]:
        """Take nothing more, and return the report ids of the round, which are final from now on."""
        with self._transaction():
            if self.state(round) == "unknown":
                raise ValueError(f"round {round} was never opened here, and cannot be frozen")
            self._execute("UPDATE rounds SET state = 'frozen' WHERE round = ? AND state = 'open'", round)
        return self.roster(round) or []

    def roster(self, round: int) -> list[bytes] | None:
        """The report ids of a round, sorted; None until they are final."""
        if self.state(round) in ("unknown", "open"):
            return None
        query = "SELECT report FROM known WHERE round = ? UNION SELECT report FROM uploads WHERE round = ?"
        return sorted(report for (report,) in self._fetch_rows(query, round, round))

    def keep_agreed_digest(self, round: int, digest: bytes) -> bytes:
        """Note the digest of whom to count in a frozen round, and return it; the first decision stays."""
        with self._transaction():
            self._execute("UPDATE rounds SET agreed = ? WHERE round = ? AND agreed IS NULL", digest, round)
        return self.agreed_digest(round) or digest

    def agreed_digest(self, round: int) -> bytes | None:
        """The digest of whom to count in a round; None until that is decided."""
        row = self._fetch_row("SELECT agreed FROM rounds WHERE round = ?", round)
        return row[0] if row else None

    def close_round(self, round: int, *, roster: Collection[bytes] | None = None, batch: bytes | None = None) -> State:
        """Close a frozen round for good with the reports on the roster (None: all); a closed round stays as it is.

        Arguments:
            round: a round that was frozen.
            roster: the ids of the reports that count; those of others are deleted uncounted.
            batch: the id of the batch; None: it is drawn.

        Returns: the state of the round: "sent" if enough users count, else "void".
        """
        with self._transaction():
            if (state := self.state(round)) not in ("unknown", "open", "frozen"):
                return state
            if state != "frozen":
                raise ValueError(f"round {round} is {state}; only a frozen round can be closed")
            self._execute(_KEEP_IDS, round)
            self._delete_uploads_off_roster(round, roster)
            count = int((self._fetch_row("SELECT COUNT(*) FROM uploads WHERE round = ?", round) or (0,))[0])
            name = secrets.token_bytes(BATCH_ID) if batch is None else batch
            self._execute("UPDATE rounds SET uploads = ?, batch = ? WHERE round = ?", count, name, round)
            if count >= self._min_uploads:
                self._make_output(round)
            for table in ("uploads", *self.content_tables, *self.extra_tables):
                self._database.delete_round(table, round)
            state = "sent" if count >= self._min_uploads else "void"
            self._execute("UPDATE rounds SET state = ? WHERE round = ?", state, round)
        self._database.purge_log()
        return state

    def batch_id(self, round: int) -> bytes:
        """The id of the batch of a closed round."""
        row = self._fetch_row("SELECT batch FROM rounds WHERE round = ?", round)
        if row is None or row[0] is None:
            raise ValueError(f"round {round} is {self.state(round)}; it has a batch only after it is closed")
        return row[0]

    def delete_output(self, round: int) -> None:
        """Delete the output of a closed round, which the analyzer has, or which it gave up."""
        with self._transaction():
            if self.state(round) not in ("void", "sent", "done"):
                raise ValueError(f"round {round} is {self.state(round)}; only a closed round can be acknowledged")
            self._database.delete_round(self.output_table, round)
            self._execute("UPDATE rounds SET state = 'done' WHERE round = ?", round)
        self._database.purge_log()

    def end_task(self, reason: str) -> None:
        """Delete what the rounds hold, and never open one again; the first reason stays."""
        with self._transaction():
            self._execute("INSERT INTO ended SELECT ? WHERE NOT EXISTS (SELECT 1 FROM ended)", reason)
            for round, _, _ in self.pending_rounds():
                for table in ("uploads", *self.content_tables, *self.extra_tables, self.output_table):
                    self._database.delete_round(table, round)
                self._execute("UPDATE rounds SET state = 'done', uploads = 0 WHERE round = ?", round)
        self._database.purge_log()

    def why_ended(self) -> str | None:
        """Why the task ended before its time; None if it goes on."""
        row = self._fetch_row("SELECT reason FROM ended")
        return None if row is None else str(row[0])

    def _refusal_of_form(self, arrival: Arrival) -> UploadRefused | None:
        """Why an upload is refused whatever the store holds, if it is."""
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

    def _read_intake(self, arrivals: Sequence[Arrival]) -> _Intake:
        """What a round holds that bears on these uploads to it."""
        round = arrivals[0].round
        reports = [arrival.report for arrival in arrivals]
        places = ",".join("?" * len(arrivals))
        query = f"SELECT report, client FROM uploads WHERE round = ? AND {{}} IN ({places})"  # one index at a time
        held = self._fetch_rows(query.format("report"), round, *reports)
        held += self._fetch_rows(query.format("client"), round, *(arrival.client for arrival in arrivals))
        closed = self._fetch_rows(f"SELECT report FROM known WHERE round = ? AND report IN ({places})", round, *reports)
        return _Intake(
            state=self.state(round),
            uploads=self.num_uploads(round),
            max_uploads=self._max_uploads,
            reports={**{report: None for (report,) in closed}, **dict(held)},
            clients={client for _, client in held},
        )

    def _delete_uploads_off_roster(self, round: int, roster: Collection[bytes] | None) -> None:
        """Delete the uploads of a round whose report id is not on the roster, with their contents; None: all stay.

        What `extra_tables` hold is kept by round alone, and goes when the round closes.
        """
        if roster is None:
            return
        self._database.execute_script("CREATE TEMP TABLE IF NOT EXISTS roster (report BLOB PRIMARY KEY) WITHOUT ROWID")
        self._execute("DELETE FROM roster")
        self._database.insert_rows("roster", [(report,) for report in set(roster)])
        for table in ("uploads", *self.content_tables):
            self._execute(f"DELETE FROM {table} WHERE round = ? AND report NOT IN (SELECT report FROM roster)", round)


@dataclasses.dataclass(kw_only=True)
class _Intake:
    """A round that is about to take uploads: its state, and of reports and clients those that are asked about.

    Everything is looked at before anything is written, so that one upload never spoils another's transaction.
    """

    state: State
    uploads: int
    max_uploads: int
    reports: dict[bytes, bytes | None]
    clients: set[bytes]

    def decide(self, arrival: Arrival) -> Accepted | UploadRefused:
        """Decide about an upload, after those before it."""
        round, client, report, _ = arrival
        if report in self.reports:
            if self.state == "open" and self.reports[report] != client:
                return UploadRefused(
                    "another client has used this report id in this round: seal the report again under a fresh one"
                )
            return "known"
        if self.state == "unknown":
            return RoundNotOpen(f"round {round} is not open here yet: try again in a moment")
        if self.state != "open":
            return RoundClosed(f"round {round} is closed and takes no more uploads")
        if client in self.clients:
            return UploadRefused(f"this client has another upload in round {round}: one counts per client and round")
        if self.uploads >= self.max_uploads:
            return RoundClosed(
                f"round {round} is full: it has {self.max_uploads} uploads, the most that the task allows"
            )
        self.uploads += 1
        self.reports[report] = client
        self.clients.add(client)
        return "accepted"


Accepted = Literal["accepted", "known"]


class UploadRefused(ValueError):  # noqa: N818 - an outcome, not a fault
    """An upload that is not taken, and why."""


class RoundNotOpen(UploadRefused):
    """An upload to a round that is not open here yet."""


class RoundClosed(UploadRefused):
    """An upload to a round that is closed, or full."""


class Arrival(NamedTuple):
    """An opened upload on its way into the store: who sent it, its random id, and its content.

    The content is, for a shuffler, pairs of slot and ciphertext; for an aggregator, a share.
    """

    round: int
    client: bytes
    report: bytes
    content: Any
