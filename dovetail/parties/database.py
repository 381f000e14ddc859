"""What the parties' SQLite files share: one writer at a time, and a transaction that is whole or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

__all__ = ["transaction"]


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Take the writer's place, also among processes; on disk when it ends, undone if it does not end well."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
