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

from dovetail.parties.common.shares import add_share, check_share
from dovetail.parties.common.wire import Malformed
from dovetail.parties.intermediary.arrivals import Arrival, Turned
from dovetail.parties.intermediary.store import RoundStore

__all__ = ["SumStore"]

_TABLES = """
CREATE TABLE IF NOT EXISTS shares (round INTEGER, report BLOB, share BLOB, PRIMARY KEY (round, report)) STRICT;
CREATE TABLE IF NOT EXISTS sums (round INTEGER PRIMARY KEY, sealed BLOB NOT NULL) STRICT;
"""
Finish = Callable[[int, np.ndarray], bytes]  # from a round and its sum to what leaves


class SumStore(RoundStore):
    """The store of one aggregator; the content of an upload is a share of `length` integers modulo 2^bits.

    `last` says whether shares come packed, or as seeds; `finish` makes from a sum what leaves.
    """

    contents: ClassVar[tuple[str, ...]] = ("shares",)
    leaves: ClassVar[str] = "sums"

    def __init__(
        self,
        path: Path,
        *,
        length: int,
        bits: int,
        last: bool,
        finish: Finish,
        min_uploads: int,
        max_uploads: int,
        owner: bytes = b"",
    ) -> None:
        self._length, self._bits, self._last, self._finish = length, bits, last, finish
        super().__init__(path, _TABLES, min_uploads=min_uploads, max_uploads=max_uploads, owner=owner)

    def check(self, arrival: Arrival) -> None:
        """Turn away a share of another form."""
        try:
            check_share(arrival.content, self._length, self._bits, last=self._last)
        except Malformed as error:
            raise Turned(str(error)) from error

    def parts(self, round: int, *, size: int) -> Iterator[tuple[int, bytes]]:
        """One: the sealed sum."""
        found = self._one("SELECT sealed FROM sums WHERE round = ?", round)
        if found is not None:
            yield 0, found[0]

    def _keep(self, arrival: Arrival) -> None:
        row = arrival.round, arrival.report, arrival.content
        self._database.execute("INSERT INTO shares VALUES (?, ?, ?)", row)

    def _leave(self, round: int) -> None:
        total = np.zeros(self._length, np.uint32)
        for (share,) in self._database.execute("SELECT share FROM shares WHERE round = ?", (round,)):
            add_share(total, share, self._bits, last=self._last)
        total &= np.uint32(2**self._bits - 1)
        self._database.execute("INSERT INTO sums VALUES (?, ?)", (round, self._finish(round, total)))
