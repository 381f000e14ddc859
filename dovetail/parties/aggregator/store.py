"""An aggregator's memory: one share per user until a round closes, then the sum, sealed to the analyzer.

The shares of the agreed users are added up one by one, so that memory holds one of them and the sum. Noise, where
aggregators add it, is drawn in the transaction that closes the round, and the sealed sum is written down in it: what is
sent again after a crash is the same bytes. Another draw would let whoever has both take the noise out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from dovetail.parties.common.sharing import Sharing
from dovetail.parties.common.wire import Malformed
from dovetail.parties.intermediary.arrivals import Arrival, Turned
from dovetail.parties.intermediary.store import RoundStore

__all__ = ["Finish", "SumStore"]

_TABLES = """
CREATE TABLE IF NOT EXISTS shares (round INTEGER, report BLOB, share BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS sums (round INTEGER PRIMARY KEY, sealed BLOB NOT NULL) STRICT;
"""
Finish = Callable[[int, np.ndarray], bytes]  # from a round and its sum to what leaves


class SumStore(RoundStore):
    """The store of the aggregator with this index; the content of an upload is its share.

    `finish` makes from a sum what leaves.
    """

    contents: ClassVar[tuple[str, ...]] = ("shares",)
    leaves: ClassVar[str] = "sums"
    tables: ClassVar[str] = _TABLES

    def __init__(
        self,
        path: Path,
        *,
        sharing: Sharing,
        index: int,
        finish: Finish,
        min_uploads: int,
        max_uploads: int,
        owner: bytes = b"",
    ) -> None:
        self._sharing, self._index, self._finish = sharing, index, finish
        super().__init__(path, self.tables, min_uploads=min_uploads, max_uploads=max_uploads, owner=owner)

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

    def _keep(self, arrival: Arrival) -> None:
        row = arrival.round, arrival.report, arrival.content
        self._database.execute("INSERT INTO shares VALUES (?, ?, ?)", row)

    def _leave(self, round: int) -> None:
        total = self._sharing.nothing()
        for (content,) in self._database.execute("SELECT share FROM shares WHERE round = ?", (round,)):
            self._sharing.add(total, self._share(content), self._index)
        self._database.execute("INSERT INTO sums VALUES (?, ?)", (round, self._finish(round, total)))
