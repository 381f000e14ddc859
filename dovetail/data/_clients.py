"""Who owns which records."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

__all__ = ["Clients"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Clients:
    """Who owns which records: `records` lists those of client 0, then those of client 1, and so on; `counts` how many.

    A client may own nothing at all. Memory grows with the records, however unequal the clients are.
    """

    records: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        if self.records.ndim != 1 or self.counts.ndim != 1 or len(self.counts) == 0:
            raise ValueError(
                "expected a list of records and the counts of at least one client, "
                f"got shapes {self.records.shape} and {self.counts.shape}"
            )
        if self.counts.min() < 0 or self.counts.sum() != len(self.records):
            raise ValueError(
                f"expected counts >= 0 that add up to the {len(self.records)} records, "
                f"got counts from {self.counts.min()} that add up to {self.counts.sum()}"
            )

    @classmethod
    def from_owners(cls, records: np.ndarray, owners: np.ndarray, *, num_clients: int) -> Clients:
        """The clients of which `owners[i]` owns `records[i]`; a client's records stay in the order given."""
        counts = np.bincount(owners, minlength=num_clients)
        return cls(records=records[np.argsort(owners, kind="stable")].astype(np.int32), counts=counts.astype(np.int32))

    @classmethod
    def from_rows(cls, rows: np.ndarray, counts: np.ndarray | None = None) -> Clients:
        """The clients of which each owns a row of records, or the first `counts` of that row."""
        width = rows.shape[1]
        held = np.full(len(rows), width, np.int32) if counts is None else np.asarray(counts, np.int32)
        if held.shape != rows.shape[:1] or held.max(initial=0) > width:
            raise ValueError(f"expected a count of at most {width} for each of the {len(rows)} rows, got {counts}")
        return cls(records=rows[np.arange(width) < held[:, None]].astype(np.int32), counts=held)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where the records of each client begin."""
        return (np.cumsum(self.counts) - self.counts).astype(np.int32)

    def of(self, client: int) -> np.ndarray:
        """The records of one client."""
        return self.records[self.starts[client] : self.starts[client] + self.counts[client]]

    def only(self, clients: np.ndarray) -> Clients:
        """These clients and no others."""
        return Clients.from_rows(self.rows(clients), self.counts[clients])

    def rows(self, clients: np.ndarray, *, width: int | None = None) -> np.ndarray:
        """The records of some clients, one row each, `width` wide or as wide as the largest of them.

        Rows are padded with the client's own first record, never with someone else's, except that there is no choice
        for a client without any: its row holds record 0.
        """
        counts = self.counts[clients][:, None]
        column = np.arange(width or max(1, counts.max(initial=0)))
        starts = np.where(counts > 0, self.starts[clients][:, None], len(self.records))
        return np.append(self.records, 0)[starts + np.where(column < counts, column, 0)].astype(np.int32)

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """The client of every record, and the record."""
        return np.repeat(np.arange(self.num_clients), self.counts), self.records

    def with_views(self, views: int) -> Clients:
        """The clients' rows of inputs, of which each record has so many: more records, as far as training goes."""
        rows = self.records[:, None] * np.int32(views) + np.arange(views, dtype=np.int32)
        return Clients(records=rows.reshape(-1), counts=self.counts * np.int32(views))

    @property
    def num_clients(self) -> int:
        """How many clients there are."""
        return len(self.counts)

    @property
    def most(self) -> int:
        """Records of the largest client; 1 where nobody has any."""
        return max(1, int(self.counts.max()))
