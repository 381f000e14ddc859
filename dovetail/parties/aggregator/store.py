"""An aggregator's memory: one share per user until a round closes, then the sum, sealed to the analyzer.

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

from dovetail.parties.common.sharing import Sharing
from dovetail.parties.common.wire import Malformed
from dovetail.parties.intermediary.arrivals import Arrival, Turned
from dovetail.parties.intermediary.store import RoundStore

__all__ = ["Finish", "SumStore"]

_MIGRATIONS = (
    """
CREATE TABLE IF NOT EXISTS shares (round INTEGER, report BLOB, share BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS sums (round INTEGER PRIMARY KEY, sealed BLOB NOT NULL) STRICT;
""",
    """
CREATE TABLE IF NOT EXISTS partials (round INTEGER, reports BLOB, total BLOB, PRIMARY KEY (round, reports)) STRICT;
""",
)
_AT_A_TIME, _MOST_BYTES = 1024, 1 << 23  # reports of a partial sum, and bytes of their shares
Finish = Callable[[int, np.ndarray], bytes]  # from a round and its sum to what leaves


class SumStore(RoundStore):
    """The store of the aggregator with this index; the content of an upload is its share.

    `finish` makes from a sum what leaves.
    """

    contents: ClassVar[tuple[str, ...]] = ("shares",)
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
    ) -> None:
        self._sharing, self._index, self._finish = sharing, index, finish
        super().__init__(where, self.migrations, min_uploads=min_uploads, max_uploads=max_uploads, owner=owner)

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

    def _keep(self, arrivals: Sequence[Arrival]) -> None:
        self._database.insert("shares", [(one.round, one.report, one.content) for one in arrivals])

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
        total, asked = self._sharing.nothing(), ",".join("?" * len(names))
        contents = self._rows(f"SELECT share FROM shares WHERE round = ? AND report IN ({asked})", round, *names)
        if len(contents) != len(names):
            raise ValueError(f"expected the shares of {len(names)} reports of round {round}, got {len(contents)}")
        for (content,) in contents:
            self._sharing.add(total, self._share(content), self._index)
        return total

    def _kept(self, round: int, names: Sequence[bytes]) -> np.ndarray | None:
        found = self._one("SELECT total FROM partials WHERE round = ? AND reports = ?", round, _digest(names))
        return None if found is None else np.frombuffer(found[0], self._sharing.nothing().dtype)


def _digest(names: Sequence[bytes]) -> bytes:
    return hashlib.sha256(b"".join(names)).digest()
