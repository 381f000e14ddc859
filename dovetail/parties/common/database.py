"""What the parties' SQLite files share: one writer at a time, and a transaction that is whole, or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Database", "connect", "transaction"]


def connect(path: Path, *pragmas: str, timeout: float = 5.0) -> sqlite3.Connection:
    """A file that threads may share, in which what was committed is on disk."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=timeout)
    for pragma in ("journal_mode = WAL", "synchronous = FULL", *pragmas):
        database.execute(f"PRAGMA {pragma}")
    return database


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


class Database:
    """A party's file with these tables, for all threads of the party; what is deleted is overwritten."""

    def __init__(self, path: Path, tables: str, *pragmas: str) -> None:
        self._lock = threading.RLock()
        self._database = connect(path, "secure_delete = ON", *pragmas, timeout=60)
        self._database.executescript(tables)

    def shut(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._database.close()

    def _one(self, query: str, *values: object) -> tuple | None:
        with self._lock:
            return self._database.execute(query, values).fetchone()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, transaction(self._database):
            yield
