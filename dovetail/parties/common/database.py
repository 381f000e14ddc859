"""Where a party keeps its state: under one URL, in a SQLite file or a PostgreSQL database, behind one interface.

Stores use the SQL that both understand, with `?` for a value and SQLite's names of types. A transaction takes the
writer's lock, also among processes and replicas: whatever is read in it holds until it ends. What was committed is on
disk. Tables are made and changed by numbered migrations, which a table of versions remembers.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sqlite3
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, TypeVar
from typing import Protocol as Interface

__all__ = ["Backend", "Database", "Unavailable", "connect", "locate_store", "retry_until_available", "transaction"]

_Made = TypeVar("_Made")
_POSTGRES = ("postgresql://", "postgres://")
_PATIENCE = 60.0  # seconds in which a database may come up
_RETRY = 0.5  # seconds between two attempts
_ROWS = 128  # added to a file by one statement
_VERSIONS = "CREATE TABLE IF NOT EXISTS versions (store TEXT PRIMARY KEY, version INTEGER NOT NULL) STRICT"


class Unavailable(ConnectionError):  # noqa: N818 - it says what happened; one tries again
    """Storage that does not answer now: what was asked of it may or may not have happened."""


def retry_until_available(work: Callable[[], _Made]) -> _Made:
    """Do what a party does to start, again and again for a minute while its storage is `Unavailable`.

    Not for what a service does later: that has its own ways to try again.
    """
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return work()
        except Unavailable as error:
            if time.monotonic() > end:
                reason = "" if error.__cause__ is None else f": {' '.join(str(error.__cause__).split())}"
                raise Unavailable(f"{error}{reason}") from error.__cause__  # to its operator; strangers hear less
            time.sleep(_RETRY)


def locate_store(store: str | None, folder: Path, name: str) -> Path | str:
    """Where a store is kept.

    Arguments:
        store: `sqlite:///FOLDER` for another folder, `postgresql://...` for one database for everything; None: the
            party's folder.
        folder: the party's folder.
        name: name of the file.

    Returns: the path of a file, or the URL of a database.
    """
    if store is None:
        return folder / name
    if store.startswith(_POSTGRES):
        return store
    try:
        parsed = urllib.parse.urlsplit(store)
    except ValueError:  # it quotes what may be a password
        raise ValueError("the store is not a URL: write sqlite:///FOLDER or postgresql://...") from None
    if parsed.scheme != "sqlite" or parsed.netloc or not parsed.path:
        raise ValueError(f"a store of kind {parsed.scheme!r} is not known: write sqlite:///FOLDER or postgresql://...")
    path = Path(urllib.parse.unquote(parsed.path))
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path / name


def connect(path: Path, *pragmas: str, timeout: float = 5.0) -> sqlite3.Connection:
    """Open a SQLite file that threads may share, and in which what was committed is on disk.

    Arguments:
        path: the file.
        pragmas: settings of the connection besides, such as "secure_delete = ON".
        timeout: seconds to wait for a lock.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=timeout)
    _enable_wal(database, timeout)
    for pragma in ("synchronous = FULL", *pragmas):
        database.execute(f"PRAGMA {pragma}")
    return database


def _enable_wal(database: sqlite3.Connection, timeout: float) -> None:
    """Turn on the write-ahead log. SQLite does not wait here where several open a new file at once."""
    end = time.monotonic() + timeout
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.005)


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Take the writer's lock, also among processes; what was done is on disk at the end, or undone if it fails."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


class Backend(Interface):
    """What a store needs of a database. All threads of a process may use it, one after the other."""

    def fetch_rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Execute a statement; the rows that it returns, if any."""

    def execute_many(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        """Execute a statement with the values of each of these rows."""

    def insert_rows(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Add rows to a table, with a value for each of its columns."""

    def delete_round(self, table: str, round: int) -> None:
        """Delete what a table has of a round, so that as little of it lingers as the database can help."""

    def execute_script(self, statements: str) -> None:
        """Execute several statements, without values."""

    def transaction(self) -> AbstractContextManager[None]:
        """Take the writer's lock; what was done is on disk at the end, or undone if it fails."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Keep out all others who ask for the same, for several transactions; ends when its holder dies, too."""

    def is_leader(self) -> bool:
        """Whether this is the leader among replicas, which it stays until it dies or is cut off."""

    def purge_log(self) -> None:
        """Remove what was deleted from the log, where the database can."""

    def close(self) -> None:
        """Close it."""


class _Sqlite:
    """A file; what is deleted is overwritten."""

    def __init__(self, path: Path, *pragmas: str) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._database = connect(path, "secure_delete = ON", "temp_store = MEMORY", *pragmas, timeout=60)
        self._files: dict[str, IO[bytes]] = {}

    def fetch_rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._lock:
            return self._database.execute(query, tuple(values)).fetchall()

    def execute_many(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        self._database.executemany(query, rows)

    def insert_rows(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Many with one statement: Python's lock is let go of and waited for once per statement, not once per row."""
        for low in range(0, len(rows), _ROWS):
            chunk = rows[low : low + _ROWS]
            places = ",".join([f"({','.join('?' * len(chunk[0]))})"] * len(chunk))
            self._database.execute(f"INSERT INTO {table} VALUES {places}", [value for row in chunk for value in row])

    def delete_round(self, table: str, round: int) -> None:
        self._database.execute(f"DELETE FROM {table} WHERE round = ?", (round,))

    def execute_script(self, statements: str) -> None:
        for statement in filter(str.strip, statements.split(";")):
            self._database.execute(statement.strip())

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Processes queue for a file lock: SQLite would have them look again after ever longer pauses."""
        with self._lock, self._file_lock("writer"), transaction(self._database):
            yield

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock, self._file_lock("exclusive"):
            yield

    def is_leader(self) -> bool:
        with self._lock:
            try:
                fcntl.flock(self._lock_file("leader"), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def purge_log(self) -> None:
        with self._lock:
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._lock:
            self._database.close()
            for file in self._files.values():
                file.close()
            self._files.clear()

    @contextlib.contextmanager
    def _file_lock(self, name: str) -> Iterator[None]:
        file = self._lock_file(name)
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)

    def _lock_file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            descriptor = os.open(self._path.with_name(f"{self._path.name}-{name}"), os.O_WRONLY | os.O_CREAT, 0o600)
            self._files[name] = os.fdopen(descriptor, "wb")
        return self._files[name]


def _open_backend(where: Path | str) -> Backend:
    if isinstance(where, Path):
        return _Sqlite(where)
    try:
        from dovetail.parties.common.postgresql import Postgres
    except ImportError as error:
        raise ValueError("a postgresql:// store needs psycopg: pip install 'dovetail-fl[postgres]'") from error
    return Postgres(where)


class Database:
    """A party's state, for all threads, processes and replicas of it.

    Arguments:
        where: a file, or the URL of a database.
        migrations: the statements that make and change tables, step by step, by the name of what they make; steps are
            only ever appended.
    """

    def __init__(self, where: Path | str, migrations: Mapping[str, Sequence[str]]) -> None:
        self._database = retry_until_available(functools.partial(_open_backend, where))
        retry_until_available(functools.partial(self._migrate_all, migrations))

    def _migrate_all(self, migrations: Mapping[str, Sequence[str]]) -> None:
        with self._transaction():
            self._database.execute_script(_VERSIONS)
            for name, steps in migrations.items():
                self._migrate(name, steps)

    def _migrate(self, name: str, steps: Sequence[str]) -> None:
        """Bring the tables of one store to the newest version; refuses those of a newer Dovetail."""
        (version,) = self._fetch_row("SELECT version FROM versions WHERE store = ?", name) or (0,)
        if version > len(steps):
            raise ValueError(
                f"{name} is of version {version}, which a newer Dovetail has made; this one knows versions up to "
                f"{len(steps)}: install the newer one"
            )
        for statements in steps[version:]:
            self._database.execute_script(statements)
        if version < len(steps):
            query = "INSERT INTO versions VALUES (?, ?) ON CONFLICT (store) DO UPDATE SET version = excluded.version"
            self._execute(query, name, len(steps))

    def is_leader(self) -> bool:
        """Whether this replica is the leader, which does what one of them must do."""
        return self._database.is_leader()

    def close(self) -> None:
        """Close the file, or the connection."""
        self._database.close()

    def _fetch_row(self, query: str, *values: object) -> Any | None:
        """The first row of a query; None without any."""
        rows = self._database.fetch_rows(query, values)
        return rows[0] if rows else None

    def _fetch_rows(self, query: str, *values: object) -> list[Any]:
        return self._database.fetch_rows(query, values)

    def _execute(self, query: str, *values: object) -> None:
        """Execute a statement whose rows nobody needs."""
        self._database.fetch_rows(query, values)

    def _transaction(self) -> AbstractContextManager[None]:
        return self._database.transaction()
