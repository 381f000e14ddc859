"""A PostgreSQL database behind the seam of `database`, for any number of replicas.

Every writing transaction takes one advisory lock first, so that writers follow one another as they do in a SQLite file.
A connection that is lost is made anew for whatever comes next, never within a transaction. Both ends notice in half a
minute if the other one is cut off, and the server then lets go of its locks.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from dovetail.parties.common.database import Unavailable

__all__ = ["Postgres"]

_CLIENT = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "dovetail",
}
_SERVER = """
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 3; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 15000; SET lock_timeout = 60000; SET client_min_messages = error;
SET jit = off; SET plan_cache_mode = force_custom_plan
"""  # the last: a plan that was made for an empty table is of no use seconds later
_AGAIN = 0.5  # seconds until a replica that does not lead asks again
_TYPES = {"BLOB": "BYTEA", "INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION"}


@functools.lru_cache(maxsize=256)
def _spelled(query: str) -> str:
    """A query in PostgreSQL's words."""
    if query.lstrip().startswith("CREATE"):
        query = re.sub(r"\)\s*STRICT(,\s*WITHOUT ROWID)?|\)\s*WITHOUT ROWID", ")", query)
        query = re.sub(r"\b(BLOB|INTEGER|REAL)\b", lambda word: _TYPES[word[0]], query)
    return query.replace("?", "%s")


def _advisory(kind: str, name: str) -> str:
    """A lock of this name, of all who have the same tables in view."""
    return f"SELECT {kind}(hashtextextended(current_schema() || ' dovetail {name}', 0))"


class Postgres:
    """One database, or one schema of it if the URL sets a search path."""

    def __init__(self, url: str) -> None:
        self._url, self._lock, self._main = url, threading.RLock(), self._connected(url)
        self._busy = self._pinned = False  # in a transaction; in a section that must not change its connection
        self._leading: psycopg.Connection[Any] | None = None
        self._asked = 0.0
        self._columns: dict[str, list[str]] = {}

    def rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Do something; the rows that it gives, if any."""
        with self._lock, self._heard():
            cursor = self._connection().execute(_spelled(query), values, binary=True)
            return cursor.fetchall() if cursor.description else []

    def many(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        """Do something with each of these rows, without waiting for each."""
        with self._lock, self._heard(), self._connection().cursor() as cursor:
            cursor.executemany(_spelled(query), rows)

    def insert(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Add rows to a table as a stream of bytes, which is several times faster than statements."""
        if table not in self._columns:
            query = (
                "SELECT atttypid::regtype::text FROM pg_attribute WHERE attrelid = ?::regclass AND attnum > 0 "
                "AND NOT attisdropped ORDER BY attnum"
            )
            self._columns[table] = [kind for (kind,) in self.rows(query, (table,))]
        words = f"COPY {table} FROM STDIN (FORMAT BINARY)"
        with self._lock, self._heard(), self._connection().cursor() as cursor, cursor.copy(words) as copy:
            copy.set_types(self._columns[table])
            for row in rows:
                copy.write_row(row)

    def clear(self, table: str, round: int) -> None:
        """Give the table's files back where it holds nothing else; else delete rows."""
        if self.rows(f"SELECT 1 FROM {table} WHERE round != ? LIMIT 1", (round,)):
            self.rows(f"DELETE FROM {table} WHERE round = ?", (round,))
        else:
            self.rows(f"TRUNCATE {table}")

    def script(self, statements: str) -> None:
        """Do several things, without values."""
        for statement in filter(str.strip, statements.split(";")):
            self.rows(statement.strip())
            if made := re.match(r"CREATE TABLE IF NOT EXISTS (\w+)", statement.strip()):
                self._keep_as_they_are(made[1])

    def _keep_as_they_are(self, table: str) -> None:
        """What parties keep as bytes is random or sealed: PostgreSQL would try in vain to compress it."""
        query = "SELECT attname FROM pg_attribute WHERE attrelid = ?::regclass AND atttypid = 'bytea'::regtype"
        for (column,) in self.rows(query, (table,)):
            self.rows(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Take the writer's place among all replicas; on disk when it ends, undone if it does not end well."""
        with self._lock:
            self.rows("BEGIN")
            self._busy = True
            try:
                self.rows(_advisory("pg_advisory_xact_lock", "writer"))
                yield
                self.rows("COMMIT")
            except BaseException:
                self._undo()
                raise
            finally:
                self._busy = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep out other replicas for several transactions; whoever loses its connection has lost its place."""
        with self._lock:
            self.rows(_advisory("pg_advisory_lock", "exclusive"))
            self._pinned = True
            try:
                yield
            finally:
                self._pinned = False
                with contextlib.suppress(Unavailable):
                    if not self._main.closed:
                        self.rows(_advisory("pg_advisory_unlock", "exclusive"))

    def leads(self) -> bool:
        """Whether this replica holds the leader's lock, on a connection of its own."""
        try:
            if self._leading is not None:
                self._leading.execute("SELECT 1")
                return True
            if time.monotonic() < self._asked + _AGAIN:
                return False
            self._asked = time.monotonic()
            asking = self._connected(self._url)
            found = asking.execute(_advisory("pg_try_advisory_lock", "leader")).fetchone()
            if found is not None and found[0]:
                self._leading = asking
                return True
            asking.close()
        except (psycopg.OperationalError, Unavailable):
            self._let_go()
        return False

    def tidy(self) -> None:
        """Nothing: what was deleted lingers in PostgreSQL's log until that is recycled."""

    def close(self) -> None:
        """Let go of it."""
        with self._lock:
            self._main.close()
            self._let_go()

    def _let_go(self) -> None:
        leading, self._leading = self._leading, None
        if leading is not None:
            leading.close()

    def _connection(self) -> psycopg.Connection[Any]:
        if self._main.closed:
            if self._busy or self._pinned:
                raise Unavailable("expected the database until the end of a transaction, got cut off")
            self._main = self._connected(self._url)
        return self._main

    def _undo(self) -> None:
        """Roll back; a connection that cannot is given up, and the server does it."""
        with contextlib.suppress(psycopg.Error):
            self._main.rollback()
        if self._main.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._main.close()

    @staticmethod
    def _connected(url: str) -> psycopg.Connection[Any]:
        """A connection to a database that keeps what it has committed."""
        try:
            made = psycopg.connect(url, autocommit=True, **_CLIENT)  # type: ignore[arg-type]
            made.execute(_SERVER)
            if made.execute("SELECT current_schema()").fetchone() == (None,):
                made.close()
                raise ValueError("expected a search path with a schema that exists in the URL of a store, got none")
            for name in ("fsync", "synchronous_commit"):
                found = made.execute(f"SHOW {name}").fetchone()
                if found == ("off",):
                    made.close()
                    raise ValueError(f"expected a PostgreSQL database that keeps what it commits, got {name} = off")
        except psycopg.OperationalError as error:
            raise Unavailable("expected an answer from the database, got none") from error
        return made

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            yield
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            if self._main.broken or isinstance(error, psycopg.InterfaceError):
                self._main.close()
            raise Unavailable("expected an answer from the database, got none") from error
