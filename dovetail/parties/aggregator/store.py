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
_JUDGED = 1024  # reports that are judged at a time
_DIGEST = 32
_AT_A_TIME, _MOST_BYTES = 1024, 1 << 23  # reports of a partial sum, and bytes of their shares
_SMALL = 1024  # bytes of a share that is kept in the database itself
_SEGMENTS = "segments"  # the folder beside a file
Finish = Callable[[int, np.ndarray], bytes]  # from a round and its sum to what leaves


class SumStore(RoundStore):
    """The store of the aggregator with this index; the content of an upload is its share.

    `finish` makes from a sum what leaves. `segments` is where large shares are; a SQLite file has its own place.
    """

    contents: ClassVar[tuple[str, ...]] = ("shares", "places")
    additions: ClassVar[tuple[str, ...]] = ("partials",)
    leaves: ClassVar[str] = "sums"
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
        self._sharing, self._index, self._finish = sharing, index, finish
        if segments is None and isinstance(where, Path):
            segments = where.with_name(_SEGMENTS)
        name = hashlib.sha256(owner).hexdigest()[:32]  # whoever shares the folder does not sweep it for others
        self._segments = None if segments is None else Segments(segments / name)
        super().__init__(where, self.migrations, min_uploads=min_uploads, max_uploads=max_uploads, owner=owner)
        self._sweep()

    def check(self, arrival: Arrival) -> None:
        """Turn away a share of another form."""
        try:
            self._sharing.check(self._share(arrival.content), self._index)
        except Malformed as error:
            raise UploadRefused(str(error)) from error

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """One: the sealed sum."""
        found = self._one("SELECT sealed FROM sums WHERE round = ?", round)
        if found is not None:
            yield 0, found[0]

    def _share(self, content: bytes) -> bytes:
        """The share in what is kept of an upload."""
        return content

    def add_up(self, round: int, roster: Collection[bytes]) -> None:
        """Make the partial sums of the reports on a frozen round's roster that nobody has made yet."""
        for names in self._chunks(roster):
            if self._kept(round, names) is None:
                made = round, _digest(names), self._added(round, names).tobytes()
                with self._transaction():
                    if self.state(round) != "frozen":
                        return
                    self._do("INSERT INTO partials VALUES (?, ?, ?) ON CONFLICT DO NOTHING", *made)

    def close(self, round: int, *, roster: Collection[bytes] | None = None, batch: bytes | None = None) -> State:
        """Close a frozen round; its shares are gone for good when this ends."""
        state = super().close(round, roster=roster, batch=batch)
        self._sweep()
        return state

    def end_task(self, reason: str) -> None:
        """Forget what the rounds hold, shares in segments included, and open none again."""
        super().end_task(reason)
        self._sweep()

    def shut(self) -> None:
        """Let go of it."""
        super().shut()
        if self._segments is not None:
            self._segments.shut()

    def _sweep(self) -> None:
        """Drop the segments of rounds that are closed, also if who closed them did not come to it."""
        if self._segments is not None:
            for round in self._segments.rounds():
                if self.state(round) in ("void", "sent", "done"):
                    self._segments.drop(round)

    def _keep(self, arrivals: Sequence[Arrival]) -> None:
        if self._segments is None or all(len(one.content) <= _SMALL for one in arrivals):
            self._database.insert("shares", [(one.round, one.report, one.content) for one in arrivals])
            return
        for round in {one.round for one in arrivals}:
            some = [one for one in arrivals if one.round == round]
            places = self._segments.append(round, [one.content for one in some])
            rows = [(round, one.report, *place) for one, place in zip(some, places, strict=True)]
            self._database.insert("places", rows)

    def _contents(self, round: int, names: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The reports of these names with what is kept of them, in any order."""
        for low in range(0, len(names), _AT_A_TIME):
            some = names[low : low + _AT_A_TIME]
            asked = f"WHERE round = ? AND report IN ({','.join('?' * len(some))})"
            yield from self._rows(f"SELECT report, share FROM shares {asked}", round, *some)
            query = f"SELECT report, segment, at, size FROM places {asked} ORDER BY segment, at"
            placed = self._rows(query, round, *some)
            if placed and self._segments is None:
                raise ValueError("expected the folder of this store's segments, got none")
            if placed and self._segments is not None:
                found = self._segments.read(round, (Place(*row[1:]) for row in placed))
                yield from zip((row[0] for row in placed), found, strict=True)

    def _leave(self, round: int) -> None:
        total = self._sharing.empty_sum()
        for names in self._chunks(name for (name,) in self._rows("SELECT report FROM uploads WHERE round = ?", round)):
            kept = self._kept(round, names)
            self._sharing.merge(total, self._added(round, names) if kept is None else kept)
        self._do("INSERT INTO sums VALUES (?, ?)", round, self._finish(round, total))

    def _chunks(self, reports: Iterable[bytes]) -> list[list[bytes]]:
        """Reports in order, some at a time: always the same for the same reports."""
        names, step = sorted(reports), max(1, min(_AT_A_TIME, _MOST_BYTES // self._sharing.size(self._index)))
        return [names[low : low + step] for low in range(0, len(names), step)]

    def _added(self, round: int, names: Sequence[bytes]) -> np.ndarray:
        total, count = self._sharing.empty_sum(), 0
        for _, content in self._contents(round, names):
            self._sharing.add(total, self._share(content), self._index)
            count += 1
        if count != len(names):
            raise ValueError(f"expected the shares of {len(names)} reports of round {round}, got {count}")
        return total

    def _kept(self, round: int, names: Sequence[bytes]) -> np.ndarray | None:
        found = self._one("SELECT total FROM partials WHERE round = ? AND reports = ?", round, _digest(names))
        return None if found is None else np.frombuffer(found[0], self._sharing.empty_sum().dtype)


def round_key(task_id: bytes, round: int, parts: Collection[bytes]) -> bytes:
    """The key of a round, from every aggregator's part, in whatever order."""
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
        """Begin to take uploads; nobody asks about rounds any more that were closed before.

        What was answered stays while the shares do, whoever announces which round: a second answer would tell of them.
        """
        super().open_round(round, head=head, closes=closes)
        still = "SELECT round FROM rounds WHERE state IN ('open', 'frozen')"
        with self._transaction():
            for table in ("challenges", "verifiers"):
                self._do(f"DELETE FROM {table} WHERE round < ? AND round NOT IN ({still})", round)

    def challenge(self, round: int) -> bytes | None:
        """This aggregator's part of the round's key, drawn while the round is frozen, and kept."""
        with self._transaction():
            if self.state(round) == "frozen":
                drawn = round, secrets.token_bytes(SEED)
                self._do("INSERT INTO challenges (round, part) VALUES (?, ?) ON CONFLICT DO NOTHING", *drawn)
        found = self._one("SELECT part FROM challenges WHERE round = ?", round)
        return None if found is None else found[0]

    def answer(self, round: int, roster: Collection[bytes], key: bytes) -> None:
        """Find out about the reports on the roster, with the round's key; what was found before stays."""
        with self._transaction():
            if (state := self.state(round)) != "frozen":
                raise ValueError(f"expected a round that is frozen, got round {round}, {state}")
            self._do("UPDATE challenges SET key = ? WHERE round = ? AND key IS NULL", key, round)
        if self._one("SELECT key FROM challenges WHERE round = ?", round) != (key,):
            raise ValueError(f"expected the key of round {round} that was formed before, got another one")
        done = {row[0] for row in self._rows("SELECT report FROM verifiers WHERE round = ?", round)}
        missing, proof = sorted(set(roster) - done), self._sharing.proof
        step = max(1, _AT_ONCE // proof.elements)
        for low in range(0, len(missing), step):
            names = missing[low : low + step]
            reports = self._reports(round, names)
            found = proof.query(key, self._index, reports)
            told = [
                (round, name, one.verifier + hashlib.sha256(report.public).digest())
                for name, report, one in zip(names, reports, found, strict=True)
            ]
            with self._transaction():
                self._database.many("INSERT INTO verifiers VALUES (?, ?, ?) ON CONFLICT DO NOTHING", told)

    def verifiers(self, round: int, first: int = 0) -> Verifiers | None:
        """What was found, in the order of reports, from the one with this number on; None if something is missing.

        As much as fits into an answer.
        """
        agreed = self.agreed_digest(round)
        if agreed is None:
            return None
        names = self._rows("SELECT report FROM verifiers WHERE round = ? ORDER BY report", round)
        if hashlib.sha256(b"".join(name for (name,) in names)).digest() != agreed:
            return None
        size = max(1, _PAGE // (self._sharing.proof.verifier_size + _DIGEST))
        return Verifiers(index=self._index, total=len(names), results=self._kept_verifiers(round, first, size))

    def judge(self, round: int, roster: Collection[bytes], others: Sequence[Verifiers]) -> set[bytes]:
        """The reports that everybody accepts, given what the others found; users of the others are written down.

        All aggregators judge by the same: what all found, and the public share, which must be the same everywhere and
        be what was found.
        """
        names, proof = sorted(roster), self._sharing.proof
        by_index = {one.index: one.results for one in others}
        by_index[self._index] = self._kept_verifiers(round, 0, len(names))
        if sorted(by_index) != list(range(proof.shares)) or any(len(told) != len(names) for told in by_index.values()):
            raise ValueError(f"expected what every aggregator found of {len(names)} reports, got something else")
        rows = list(zip(*(by_index[index] for index in range(proof.shares)), strict=True))
        fine: set[bytes] = set()
        for low in range(0, len(rows), _JUDGED):
            some = rows[low : low + _JUDGED]
            decided = proof.decide([[told[:-_DIGEST] for told in row] for row in some])
            fine |= {
                name
                for name, row, message in zip(names[low : low + _JUDGED], some, decided, strict=True)
                if message is not None and _same_public(proof, row)
            }
        self._write_down(round, set(names) - fine)
        return fine

    def refused_users(self) -> list[dict[str, Any]]:
        """Whose proofs were refused, by round."""
        return [
            {"round": round, "user": client.hex()}
            for round, client in self._rows("SELECT round, client FROM refused ORDER BY round, client")
        ]

    def write_refused(self, path: Path) -> None:
        """For who enrols users."""
        write_atomically(path, msgspec.json.format(msgspec.json.encode(self.refused_users())) + b"\n")

    def _share(self, content: bytes) -> bytes:
        if len(content) < KEPT_NONCE:
            raise Malformed("expected a share after its nonce, got less")
        return content[KEPT_NONCE:]

    def _reports(self, round: int, names: Sequence[bytes]) -> list[SharedReport]:
        found = dict(self._contents(round, names))
        if len(found) != len(names):
            raise ValueError(f"expected the share of every report on the roster of round {round}, got none of one")
        return [self._sharing.report(found[name][KEPT_NONCE:], found[name][:KEPT_NONCE]) for name in names]

    def _kept_verifiers(self, round: int, first: int, count: int) -> list[bytes]:
        query = "SELECT told FROM verifiers WHERE round = ? ORDER BY report LIMIT ? OFFSET ?"
        return [told for (told,) in self._rows(query, round, count, first)]

    def _write_down(self, round: int, reports: set[bytes]) -> None:
        query = (
            "INSERT INTO refused SELECT round, client FROM uploads WHERE round = ? AND report = ? "
            "ON CONFLICT DO NOTHING"
        )
        with self._transaction():
            self._database.many(query, [(round, report) for report in sorted(reports)])


def _same_public(proof: ProofSystem, row: Sequence[bytes]) -> bool:
    """Whether the public share is the same everywhere, and is what aggregators found."""
    found = proof.public_of([told[:-_DIGEST] for told in row])
    return {told[-_DIGEST:] for told in row} == {hashlib.sha256(found).digest()}


def _digest(names: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(names)).digest()
