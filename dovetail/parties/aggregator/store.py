"""An aggregator's memory: one share per user until a round closes, then the sum, sealed to the analyzer.

Shares of more than a few bytes are in segments, where there is a place for them, and the database says where: beside a
SQLite file, or in a folder that all replicas reach. They are written before the transaction that takes them ends.

The shares of the agreed users are added up some at a time, in the order of their reports. Such a partial sum may be
made and kept before the round closes, by whichever replica comes to it; it goes with the shares. Noise, where
aggregators add it, is drawn in the transaction that closes the round, and the sealed sum is written down in it: what is
sent again after a crash is the same bytes. Another draw would let whoever has both take the noise out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from dovetail.parties.aggregator.segments import Place, Segments
from dovetail.parties.common.sharing import Sharing
from dovetail.parties.common.wire import Malformed
from dovetail.parties.intermediary.store import Arrival, RoundStore, State, Turned

__all__ = ["Finish", "SumStore"]

_MIGRATIONS = (
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
    migrations: ClassVar[Mapping[str, tuple[str, ...]]] = {"sums": _MIGRATIONS}

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
            raise Turned(str(error)) from error

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
        total = self._sharing.nothing()
        for names in self._chunks(name for (name,) in self._rows("SELECT report FROM uploads WHERE round = ?", round)):
            kept = self._kept(round, names)
            self._sharing.merge(total, self._added(round, names) if kept is None else kept)
        self._do("INSERT INTO sums VALUES (?, ?)", round, self._finish(round, total))

    def _chunks(self, reports: Iterable[bytes]) -> list[list[bytes]]:
        """Reports in order, some at a time: always the same for the same reports."""
        names, step = sorted(reports), max(1, min(_AT_A_TIME, _MOST_BYTES // self._sharing.size(self._index)))
        return [names[low : low + step] for low in range(0, len(names), step)]

    def _added(self, round: int, names: Sequence[bytes]) -> np.ndarray:
        total, count = self._sharing.nothing(), 0
        for _, content in self._contents(round, names):
            self._sharing.add(total, self._share(content), self._index)
            count += 1
        if count != len(names):
            raise ValueError(f"expected the shares of {len(names)} reports of round {round}, got {count}")
        return total

    def _kept(self, round: int, names: Sequence[bytes]) -> np.ndarray | None:
        found = self._one("SELECT total FROM partials WHERE round = ? AND reports = ?", round, _digest(names))
        return None if found is None else np.frombuffer(found[0], self._sharing.nothing().dtype)


def _digest(names: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(names)).digest()
