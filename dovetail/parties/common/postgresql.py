"""A PostgreSQL database behind the seam of `database`, for any number of replicas.

Every writing transaction takes one advisory lock first, so that writers follow one another as they do in a SQLite file.
A connection that is lost is made anew for whatever comes next, never within a transaction. Both ends notice in half a
minute if the other one is cut off, and the server then lets go of its locks.

A process that is stopped answers TCP all the same, for its kernel does. So whoever holds a lock says every few seconds
that it lives, and the server ends the session of one that has said nothing for half a minute. It cannot do so in the
middle of a stream of rows (COPY): whoever waits for a lock in vain ends such a session.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dovetail.parties.common.database import Unavailable

__all__ = [
    "Postgres",
]

_CLIENT = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    "application_name": "dovetail",
}
_OLDEST = 140_000  # it ends idle sessions
_SILENCE = 30  # seconds after which the server ends the session of who holds a lock and says nothing
_SERVER = f"""
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 3; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 15000; SET lock_timeout = 60000; SET statement_timeout = 300000;
SET idle_in_transaction_session_timeout = {1000 * _SILENCE}; SET client_min_messages = error;
SET jit = off; SET plan_cache_mode = force_custom_plan
"""  # the last: a plan that was made for an empty table is of no use seconds later
_LEADER = f"SET idle_session_timeout = {1000 * _SILENCE}"
_PULSE = 5.0  # seconds between two signs of life
_LONGEST = 600.0  # seconds that a step may take; after that nobody says for it that it lives
_END_STUCK = f"""
SELECT pg_terminate_backend(lock.pid) FROM pg_locks lock JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.granted AND lock.pid != pg_backend_pid()
AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (lock.classid::bigint << 32 | lock.objid::bigint) = {{key}}
AND activity.state = 'active' AND activity.wait_event_type = 'Client'
AND activity.query_start < now() - interval '{_SILENCE} seconds'
"""  # stopped while it sent rows or was sent some: timeouts do not apply
_AGAIN = 0.5  # seconds until a replica that does not lead asks again
_TYPES = {"BLOB": "BYTEA", "INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION"}


@functools.lru_cache(maxsize=256)
def _spelled(query: str) -> str:
    """A query in PostgreSQL's words."""
    if query.lstrip().startswith("CREATE"):
        query = re.sub(r"\)\s*STRICT(,\s*WITHOUT ROWID)?|\)\s*WITHOUT ROWID", ")", query)
        query = re.sub(r"\b(BLOB|INTEGER|REAL)\b", lambda word: _TYPES[word[0]], query)
    return query.replace("?", "%s")


def _key(name: str) -> str:
    """The number of the lock of this name, of all who have the same tables in view."""
    return f"hashtextextended(current_schema() || ' dovetail {name}', 0)"


def _advisory(kind: str, name: str) -> str:
    return f"SELECT {kind}({_key(name)})"


def _require_safe(url: str) -> dict[str, Any]:
    """The words of a URL; refuses one that leads to another machine without TLS that proves whose it is.

    The environment counts as libpq counts it (PGHOST, PGHOSTADDR, PGSSLMODE); a service file could name any host.
    """
    try:
        said = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # it quotes what it could not read, which may be the password
        raise ValueError(
            "the URL of the store cannot be read: write postgresql://USER@HOST/DATABASE, with special characters "
            "in percent-encoding (% as %25, @ as %40)"
        ) from None
    found = {
        one.keyword.decode(): one.val.decode(errors="replace") for one in psycopg.pq.Conninfo.get_defaults() if one.val
    }
    found |= {name: str(value) for name, value in said.items() if value is not None}
    if found.get("service"):
        raise ValueError("a store's URL must name its host itself, not a service file (service=, PGSERVICE)")
    beyond = next((address for address in _addresses(found) if not _is_here(address)), None)
    if beyond is None:
        return said
    if (mode := found.get("sslmode")) != "verify-full":
        raise ValueError(
            f"the database at {beyond!r} is on another machine and sslmode is {mode or 'prefer'}: add "
            "?sslmode=verify-full&sslrootcert=FILE to the URL of the store, or use a Unix socket"
        )
    return {**said, "sslmode": mode, "gssencmode": "disable"}  # GSSAPI would be taken instead of TLS


def _addresses(found: dict[str, str]) -> list[str]:
    """Where libpq would connect to: addresses count before the names that belong to them."""
    hosts, addresses = found.get("host", "").split(","), found.get("hostaddr", "").split(",")
    count = max(len(hosts), len(addresses))
    hosts, addresses = (some + [""] * (count - len(some)) for some in (hosts, addresses))
    return [address.strip() or host.strip() for host, address in zip(hosts, addresses, strict=True)]


def _is_here(address: str) -> bool:
    """Whether an address is a Unix socket (also an unnamed one, the default) or on this machine alone."""
    if not address or address[0] in "/@" or address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class Postgres:
    """One database, or one schema of it if the URL sets a search path."""

    def __init__(self, url: str) -> None:
        self._url, self._lock = _require_safe(url), threading.RLock()
        self._main = self._connected()
        self._said = threading.Lock()  # whatever goes through the main connection, one after the other
        self._busy = self._pinned = False  # in a transaction; in a section that must not change its connection
        self._since = 0.0  # when it began
        self._leading: psycopg.Connection[Any] | None = None
        self._asked = 0.0
        self._columns: dict[str, list[str]] = {}
        self._shut = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

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
            self._since, self._busy = time.monotonic(), True
            try:
                self._wait_for("pg_advisory_xact_lock", "writer")
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
            self._wait_for("pg_advisory_lock", "exclusive")
            self._since, self._pinned = time.monotonic(), True
            try:
                self.rows(_LEADER)
                yield
            finally:
                self._pinned = False
                with contextlib.suppress(Unavailable):
                    if not self._main.closed:
                        self.rows(_advisory("pg_advisory_unlock", "exclusive"))
                        self.rows("SET idle_session_timeout = 0")

    def leads(self) -> bool:
        """Whether this replica holds the leader's lock, on a connection of its own."""
        try:
            if self._leading is not None:
                self._leading.execute("SELECT 1")
                self._asked = time.monotonic()
                return True
            if time.monotonic() < self._asked + _AGAIN:
                return False
            self._asked = time.monotonic()
            asking = self._connected()
            found = asking.execute(_advisory("pg_try_advisory_lock", "leader")).fetchone()
            if found is not None and found[0]:
                asking.execute(_LEADER)
                self._leading = asking
                return True
            asking.close()
        except (psycopg.OperationalError, psycopg.InterfaceError, Unavailable):
            self._let_go()
        return False

    def tidy(self) -> None:
        """Nothing: what was deleted lingers in PostgreSQL's log until that is recycled."""

    def close(self) -> None:
        """Let go of it."""
        self._shut.set()
        with self._lock:
            self._main.close()
            self._let_go()

    def _wait_for(self, kind: str, name: str) -> None:
        """Take a lock; if that takes too long, end the session of a holder that is stuck, and say that it is away."""
        try:
            self.rows(_advisory(kind, name))
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                with contextlib.suppress(psycopg.Error, Unavailable), self._connected() as other:
                    other.execute(_END_STUCK.format(key=_key(name)))
            raise

    def _beat(self) -> None:
        """Say now and then that this process lives, while it holds a lock and is at it for no longer than it may be."""
        while not self._shut.wait(_PULSE):
            now = time.monotonic()
            if (leading := self._leading) is not None and now < self._asked + _LONGEST:
                with contextlib.suppress(psycopg.Error):
                    leading.execute("SELECT 1")
            if (self._busy or self._pinned) and now < self._since + _LONGEST and self._said.acquire(blocking=False):
                try:
                    if not self._main.closed:
                        self._main.execute("SELECT 1")
                except psycopg.Error:
                    pass  # whoever is at it notices
                finally:
                    self._said.release()

    def _let_go(self) -> None:
        leading, self._leading = self._leading, None
        if leading is not None:
            leading.close()

    def _connection(self) -> psycopg.Connection[Any]:
        if self._main.closed:
            if self._busy or self._pinned:
                raise Unavailable("the connection to the database was lost within a transaction")
            self._main = self._connected()
        return self._main

    def _undo(self) -> None:
        """Roll back; a connection that cannot is given up, and the server does it."""
        with contextlib.suppress(psycopg.Error):
            self._main.rollback()
        if self._main.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._main.close()

    def _connected(self) -> psycopg.Connection[Any]:
        """A connection to a database that keeps what it has committed."""
        try:
            made = psycopg.connect(autocommit=True, **{**self._url, **_CLIENT})
            try:
                self._check(made)
            except BaseException:
                made.close()
                raise
        except psycopg.OperationalError as error:
            raise Unavailable("the database does not answer") from error
        return made

    @staticmethod
    def _check(made: psycopg.Connection[Any]) -> None:
        """Refuse a server that others can listen to, that is too old, or that forgets."""
        if not (_is_here(made.info.hostaddr) or made.pgconn.ssl_in_use):  # a localhost that is elsewhere
            raise ValueError("expected TLS to a database on another machine, got none")
        if made.info.server_version < _OLDEST:
            raise ValueError(f"expected PostgreSQL 14 or newer, got {made.info.server_version // 10_000}")
        made.execute(_SERVER)
        if made.execute("SELECT current_schema()").fetchone() == (None,):
            raise ValueError("expected a search path with a schema that exists in the URL of a store, got none")
        for name in ("fsync", "synchronous_commit"):
            if made.execute(f"SHOW {name}").fetchone() == ("off",):
                raise ValueError(f"expected a PostgreSQL database that keeps what it commits, got {name} = off")

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            with self._said:
                yield
        except psycopg.Error as error:
            if isinstance(error, psycopg.InterfaceError):
                self._main.close()
            elif not (self._main.closed or isinstance(error, psycopg.OperationalError)):
                raise
            elif self._main.broken:  # also by the server, if nothing was heard of us for too long
                self._main.close()
            raise Unavailable("the database does not answer") from error
