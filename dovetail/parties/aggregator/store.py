"""An aggregator's memory: one share per user until a round closes, then the sum, sealed to the analyzer.

Shares of more than a few bytes are in segments, where there is a place for them, and the database says where: beside a
SQLite file, or in a folder that all replicas reach. They are written before the transaction that takes them ends.

The shares of the agreed users are added up some at a time, in the order of their reports. Such a partial sum may be
made and kept before the round closes, by whichever replica comes to it; it goes with the shares. Noise, where
aggregators add it, is drawn in the transaction that closes the round, and the sealed sum is written down in it: what is
sent again after a crash is the same bytes. Another draw would let whoever has both take the noise out.

The store of a round that is verified also keeps keys, verifiers, and whom it refused. When a round is frozen, every
aggregator draws a part of the round's key; all parts make up the key that says at which points proofs are tested, so
that no user knew it when it reported. The first key that is formed stays, and there is one answer per report to it:
answers to two keys would tell more than a proof does. Verifiers are kept until the next round opens, for others may
still ask for them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from dovetail.files import write_atomically
from dovetail.parties.aggregator.segments import Place, Segments
from dovetail.parties.common.sharing import Sharing, VerifiedSharing
from dovetail.parties.common.wire import Malformed, Verifiers
from dovetail.parties.intermediary.store import Arrival, RoundStore, State, UploadRefused
from dovetail.vdaf.systems import ProofSystem, SharedReport
from dovetail.vdaf.xof import SEED

__all__ = ["KEPT_NONCE", "REFUSED", "Finish", "SumStore", "VerifiedStore", "round_key"]

REFUSED = "refused.json"  # whose proofs did not hold, for whoever enrols users
KEPT_NONCE = 16  # bytes that a kept content begins with

_SUM_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS shares (round INTEGER, report BLOB, share BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS sums (round INTEGER PRIMARY KEY, sealed BLOB NOT NULL) STRICT;
""",
    """
CREATE TABLE IF NOT EXISTS partials (round INTEGER, reports BLOB, total BLOB, PRIMARY KEY (round, reports)) STRICT;
""",
    """
CREATE TABLE IF NOT EXISTS places (round INTEGER, report BLOB, segment BLOB, at INTEGER, size INTEGER,
                                   PRIMARY KEY (round, report)) STRICT, WITHOUT ROWID;
""",
)
_PROOF_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS challenges (round INTEGER PRIMARY KEY, part BLOB NOT NULL, key BLOB) STRICT;
CREATE TABLE IF NOT EXISTS verifiers (round INTEGER, report BLOB, told BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS refused (round INTEGER, client BLOB, PRIMARY KEY (round, client)) STRICT;
""",
)
_AT_ONCE = 1 << 18  # elements that are verified at a time
_PAGE = 1 << 22  # bytes of verifiers in an answer, about
_DECIDED = 1024  # reports that are decided about at a time
_DIGEST = 32
_AT_A_TIME = 1024  # reports of a partial sum
_MOST_BYTES = 1 << 23  # bytes of the shares of a partial sum
_SMALL = 1024  # bytes of a share that is kept in the database itself
_SEGMENTS = "segments"  # the folder beside a file
Finish = Callable[[int, np.ndarray], bytes]  # from a round and its sum to the bytes for the analyzer


class SumStore(RoundStore):
    """The store of an aggregator; the content of an upload is its share.

    Arguments:
        where: the path of a SQLite file, or the URL of a PostgreSQL database.
        sharing: how shares are written, checked and added.
        index: the aggregator's place in the task.
        finish: makes the message for the analyzer from a round and its sum.
        min_uploads: a round with fewer uploads is void.
        max_uploads: a round takes no more than these.
        owner: names task and party; a store of another owner is refused.
        segments: folder for large shares; None: beside a SQLite file, or in the PostgreSQL database itself.
    """

    content_tables: ClassVar[tuple[str, ...]] = ("shares", "places")
    extra_tables: ClassVar[tuple[str, ...]] = ("partials",)
    output_table: ClassVar[str] = "sums"
    migrations: ClassVar[Mapping[str, tuple[str, ...]]] = {"sums": _SUM_MIGRATIONS}

    def __init__(
        self,
        where: Path | str,
        *,
        sharing: Sharing,
        index: int,
        finish: Finish,
        min_uploads: int,
        max_uploads: int,
        owner: bytes = b"",
        segments: Path | None = None,
    ) -> None:
        self._sharing = sharing
        self._index = index
        self._finish = finish
        if segments is None and isinstance(where, Path):
            segments = where.with_name(_SEGMENTS)
        name = hashlib.sha256(owner).hexdigest()[:32]  # several parties may share the folder; each sweeps its own part
        self._segments = None if segments is None else Segments(segments / name)
        super().__init__(where, self.migrations, min_uploads=min_uploads, max_uploads=max_uploads, owner=owner)
        self._drop_closed_segments()

    def check(self, arrival: Arrival) -> None:
        """Refuse a share of another form."""
        try:
            self._sharing.check(self._share_of_content(arrival.content), self._index)
        except Malformed as error:
            raise UploadRefused(str(error)) from error

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """The only part: the sealed sum."""
        row = self._fetch_row("SELECT sealed FROM sums WHERE round = ?", round)
        if row is not None:
            yield 0, row[0]

    def _share_of_content(self, content: bytes) -> bytes:
        """The share in the stored content of an upload."""
        return content

    def make_partial_sums(self, round: int, roster: Collection[bytes]) -> None:
        """Make the missing partial sums of the reports on a frozen round's roster."""
        for names in self._chunk_reports(roster):
            if self._stored_partial_sum(round, names) is None:
                partial = self._sum_shares(round, names).tobytes()
                with self._transaction():
                    if self.state(round) != "frozen":
                        return
                    query = "INSERT INTO partials VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
                    self._execute(query, round, _digest_of_names(names), partial)

    def close_round(self, round: int, *, roster: Collection[bytes] | None = None, batch: bytes | None = None) -> State:
        """Close a frozen round; its shares are gone for good when this ends."""
        state = super().close_round(round, roster=roster, batch=batch)
        self._drop_closed_segments()
        return state

    def end_task(self, reason: str) -> None:
        """Forget what the rounds hold, shares in segments included, and open none again."""
        super().end_task(reason)
        self._drop_closed_segments()

    def close(self) -> None:
        """Close the database and the segments."""
        super().close()
        if self._segments is not None:
            self._segments.close()

    def _drop_closed_segments(self) -> None:
        """Drop the segments of closed rounds, also of those whose process died before it could."""
        if self._segments is not None:
            for round in self._segments.rounds():
                if self.state(round) in ("void", "sent", "done"):
                    self._segments.drop(round)

    def _write_contents(self, arrivals: Sequence[Arrival]) -> None:
        """Store small shares in the database, large ones in segments, which are on disk before their places are."""
        if self._segments is None or all(len(arrival.content) <= _SMALL for arrival in arrivals):
            rows = [(arrival.round, arrival.report, arrival.content) for arrival in arrivals]
            self._database.insert_rows("shares", rows)
            return
        for round in {arrival.round for arrival in arrivals}:
            group = [arrival for arrival in arrivals if arrival.round == round]
            places = self._segments.append(round, [arrival.content for arrival in group])
            placed = [(round, arrival.report, *place) for arrival, place in zip(group, places, strict=True)]
            self._database.insert_rows("places", placed)

    def _stored_contents(self, round: int, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The named reports with their stored contents, in any order."""
        for low in range(0, len(names), _AT_A_TIME):
            group = names[low : low + _AT_A_TIME]
            where = f"WHERE round = ? AND report IN ({','.join('?' * len(group))})"
            yield from self._fetch_rows(f"SELECT report, share FROM shares {where}", round, *group)
            query = f"SELECT report, segment, at, size FROM places {where} ORDER BY segment, at"
            placed = self._fetch_rows(query, round, *group)
            if placed and self._segments is None:
                raise ValueError(
                    f"shares of round {round} are in segments, and this process has no folder for them: "
                    "start every replica with the same --segments"
                )
            if placed and self._segments is not None:
                contents = self._segments.read(round, (Place(*row[1:]) for row in placed))
                yield from zip((row[0] for row in placed), contents, strict=True)

    def _make_output(self, round: int) -> None:
        """Add up partial sums, missing ones made here, and store what `finish` makes of the total."""
        total = self._sharing.empty_sum()
        for names in self._chunk_reports(
            name for (name,) in self._fetch_rows("SELECT report FROM uploads WHERE round = ?", round)
        ):
            partial = self._stored_partial_sum(round, names)
            self._sharing.merge(total, self._sum_shares(round, names) if partial is None else partial)
        self._execute("INSERT INTO sums VALUES (?, ?)", round, self._finish(round, total))

    def _chunk_reports(self, reports: Iterable[bytes]) -> list[list[bytes]]:
        """Reports in order, some at a time: always the same for the same reports."""
        names = sorted(reports)
        step = max(1, min(_AT_A_TIME, _MOST_BYTES // self._sharing.size(self._index)))
        return [names[low : low + step] for low in range(0, len(names), step)]

    def _sum_shares(self, round: int, names: Sequence[bytes]) -> np.ndarray:
        """The sum of these reports' shares; refuses if one is missing, for then aggregators' sums would differ."""
        total = self._sharing.empty_sum()
        count = 0
        for _, content in self._stored_contents(round, names):
            self._sharing.add(total, self._share_of_content(content), self._index)
            count += 1
        if count != len(names):
            raise ValueError(
                f"{len(names) - count} of {len(names)} shares of round {round} are missing: restore database "
                "and segments from one backup, or wait until the analyzer gives up the round"
            )
        return total

    def _stored_partial_sum(self, round: int, names: Sequence[bytes]) -> np.ndarray | None:
        row = self._fetch_row(
            "SELECT total FROM partials WHERE round = ? AND reports = ?", round, _digest_of_names(names)
        )
        return None if row is None else np.frombuffer(row[0], self._sharing.empty_sum().dtype)


def round_key(task_id: bytes, round: int, parts: Collection[bytes]) -> bytes:
    """The key that a round's proofs are tested with, from every aggregator's part, in whatever order."""
    return hashlib.sha256(b"dovetail key\0" + task_id + round.to_bytes(4, "big") + b"".join(sorted(parts))).digest()


class VerifiedStore(SumStore):
    """The store of an aggregator of a verified task.

    Guarantees:
        A round has one key, and a report one answer to it, also after a crash.
        A refused user is written down with its round, and nowhere but here.
    """

    migrations: ClassVar[Mapping[str, tuple[str, ...]]] = {**SumStore.migrations, "proofs": _PROOF_MIGRATIONS}
    _sharing: VerifiedSharing

    def open_round(self, round: int, *, head: bytes, closes: float) -> None:
        """Begin to take uploads, and forget verifiers of closed rounds, for which nobody asks any more.

        Verifiers stay while the shares do, whoever announces which round: a second answer would tell more of them.
        """
        super().open_round(round, head=head, closes=closes)
        still = "SELECT round FROM rounds WHERE state IN ('open', 'frozen')"
        with self._transaction():
            for table in ("challenges", "verifiers"):
                self._execute(f"DELETE FROM {table} WHERE round < ? AND round NOT IN ({still})", round)

    def challenge(self, round: int) -> bytes | None:
        """This aggregator's part of the round's key, drawn while the round is frozen, and kept."""
        with self._transaction():
            if self.state(round) == "frozen":
                query = "INSERT INTO challenges (round, part) VALUES (?, ?) ON CONFLICT DO NOTHING"
                self._execute(query, round, secrets.token_bytes(SEED))
        row = self._fetch_row("SELECT part FROM challenges WHERE round = ?", round)
        return None if row is None else row[0]

    def compute_verifiers(self, round: int, roster: Collection[bytes], key: bytes) -> None:
        """Compute the verifier of every report on the roster, with the round's key; those computed before stay."""
        with self._transaction():
            if (state := self.state(round)) != "frozen":
                raise ValueError(f"round {round} is {state}; proofs are tested while it is frozen")
            self._execute("UPDATE challenges SET key = ? WHERE round = ? AND key IS NULL", key, round)
        if self._fetch_row("SELECT key FROM challenges WHERE round = ?", round) != (key,):
            raise ValueError(
                f"the aggregators form another key for round {round} than before: one of them has lost its part, "
                "or its store was restored from an older copy"
            )
        done = {row[0] for row in self._fetch_rows("SELECT report FROM verifiers WHERE round = ?", round)}
        missing = sorted(set(roster) - done)
        proof = self._sharing.proof
        step = max(1, _AT_ONCE // proof.num_elements)
        for low in range(0, len(missing), step):
            names = missing[low : low + step]
            reports = self._shared_reports(round, names)
            answers = proof.query(key, self._index, reports)
            rows = [
                (round, name, answer.verifier + hashlib.sha256(report.public).digest())
                for name, report, answer in zip(names, reports, answers, strict=True)
            ]
            with self._transaction():
                self._database.execute_many("INSERT INTO verifiers VALUES (?, ?, ?) ON CONFLICT DO NOTHING", rows)

    def verifiers(self, round: int, first: int = 0) -> Verifiers | None:
        """Verifiers in the order of reports, from the one with this number on; None while some are missing.

        As many as fit into an answer: whoever asks goes on with the number after the last.
        """
        agreed = self.agreed_digest(round)
        if agreed is None:
            return None
        names = self._fetch_rows("SELECT report FROM verifiers WHERE round = ? ORDER BY report", round)
        if hashlib.sha256(b"".join(name for (name,) in names)).digest() != agreed:
            return None
        size = max(1, _PAGE // (self._sharing.proof.verifier_size + _DIGEST))
        return Verifiers(index=self._index, total=len(names), results=self._kept_verifiers(round, first, size))

    def decide_valid(self, round: int, roster: Collection[bytes], others: Sequence[Verifiers]) -> set[bytes]:
        """The reports whose proofs hold; users whose proofs do not are written down.

        All aggregators decide by the same: the verifiers of all, and the public share, which must be the same at all
        of them and follow from the verifiers.
        """
        names = sorted(roster)
        proof = self._sharing.proof
        by_index = {other.index: other.results for other in others}
        by_index[self._index] = self._kept_verifiers(round, 0, len(names))
        if sorted(by_index) != list(range(proof.shares)) or any(
            len(verifiers) != len(names) for verifiers in by_index.values()
        ):
            raise ValueError(
                f"the {proof.shares} aggregators must each send verifiers of {len(names)} reports: another aggregator "
                "sends more, fewer, or those of a third one"
            )
        rows = list(zip(*(by_index[index] for index in range(proof.shares)), strict=True))
        valid: set[bytes] = set()
        for low in range(0, len(rows), _DECIDED):
            group = rows[low : low + _DECIDED]
            messages = proof.decide([[verifier[:-_DIGEST] for verifier in row] for row in group])
            valid |= {
                name
                for name, row, message in zip(names[low : low + _DECIDED], group, messages, strict=True)
                if message is not None and _has_one_public_share(proof, row)
            }
        self._note_refused(round, set(names) - valid)
        return valid

    def refused_users(self) -> list[dict[str, Any]]:
        """Whose proofs did not hold: a round and the id of a user each."""
        return [
            {"round": round, "user": client.hex()}
            for round, client in self._fetch_rows("SELECT round, client FROM refused ORDER BY round, client")
        ]

    def write_refused(self, path: Path) -> None:
        """Write `refused_users` to a file, for whoever enrols users."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.refused_users())) + b"\n")

    def _share_of_content(self, content: bytes) -> bytes:
        if len(content) < KEPT_NONCE:
            raise Malformed(
                f"a share has a nonce of {KEPT_NONCE} bytes before it; this content has {len(content)} bytes in all"
            )
        return content[KEPT_NONCE:]

    def _shared_reports(self, round: int, names: Sequence[bytes]) -> list[SharedReport]:
        contents = dict(self._stored_contents(round, names))
        if len(contents) != len(names):
            raise ValueError(
                f"{len(names) - len(contents)} of {len(names)} shares of round {round} are missing: restore database "
                "and segments from one backup, or wait until the analyzer gives up the round"
            )
        return [
            self._sharing.report_to_verify(contents[name][KEPT_NONCE:], contents[name][:KEPT_NONCE]) for name in names
        ]

    def _kept_verifiers(self, round: int, first: int, count: int) -> list[bytes]:
        query = "SELECT told FROM verifiers WHERE round = ? ORDER BY report LIMIT ? OFFSET ?"
        return [verifier for (verifier,) in self._fetch_rows(query, round, count, first)]

    def _note_refused(self, round: int, reports: set[bytes]) -> None:
        """Keep for good which users sent these reports, for `refused_users`."""
        query = (
            "INSERT INTO refused SELECT round, client FROM uploads WHERE round = ? AND report = ? "
            "ON CONFLICT DO NOTHING"
        )
        with self._transaction():
            self._database.execute_many(query, [(round, report) for report in sorted(reports)])


def _has_one_public_share(proof: ProofSystem, row: Sequence[bytes]) -> bool:
    """Whether all aggregators hold the same public share of a report, and it follows from their verifiers."""
    public = proof.public_share_of([verifier[:-_DIGEST] for verifier in row])
    return {verifier[-_DIGEST:] for verifier in row} == {hashlib.sha256(public).digest()}


def _digest_of_names(names: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(names)).digest()
