"""A PostgreSQL database behind the interface of `database`, for any number of replicas.

Every writing transaction takes one advisory lock first, so that writers follow one another as they do in a SQLite file.
A connection that is lost is made anew for whatever comes next, never within a transaction. Both ends notice in half a
minute if the other one is cut off, and the server then lets go of its locks.

A process that is stopped answers TCP all the same, for its kernel does. So whoever holds a lock sends a sign of life
every few seconds, and the server ends the session of one that was silent for half a minute. It cannot do so in the
middle of a stream of rows (COPY): whoever waits for a lock in vain ends such a session.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import re
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

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
_OLDEST = 140_000  # it ends idle sessions
_SILENCE = 30  # seconds of silence after which the server ends the session of a holder of a lock
_SERVER = f"""
SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 3; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 15000; SET lock_timeout = 60000; SET statement_timeout = 300000;
SET idle_in_transaction_session_timeout = {1000 * _SILENCE}; SET client_min_messages = error;
SET jit = off; SET plan_cache_mode = force_custom_plan
"""  # the last: a plan that was made for an empty table is of no use seconds later
_LEADER = f"SET idle_session_timeout = {1000 * _SILENCE}"
_PULSE = 5.0  # seconds between two signs of life
_LONGEST = 600.0  # seconds that a step may take; after that no signs of life are sent for it
_END_STUCK = f"""
SELECT pg_terminate_backend(lock.pid) FROM pg_locks lock JOIN pg_stat_activity activity ON activity.pid = lock.pid
WHERE lock.locktype = 'advisory' AND lock.granted AND lock.pid != pg_backend_pid()
AND lock.database = (SELECT oid FROM pg_database WHERE datname = current_database())
AND (lock.classid::bigint << 32 | lock.objid::bigint) = {{key}}
AND activity.state = 'active' AND activity.wait_event_type = 'Client'
AND activity.query_start < now() - interval '{_SILENCE} seconds'
"""  # stopped while it sent rows or was sent some: timeouts do not apply
_RETRY = 0.5  # seconds until a replica that does not lead asks again
_TYPES = {"BLOB": "BYTEA", "INTEGER": "BIGINT", "REAL": "DOUBLE PRECISION"}


@functools.lru_cache(maxsize=256)
def _to_postgres_sql(query: str) -> str:
    """Translate a query to PostgreSQL's dialect."""
    if query.lstrip().startswith("CREATE"):
        query = re.sub(r"\)\s*STRICT(,\s*WITHOUT ROWID)?|\)\s*WITHOUT ROWID", ")", query)
        query = re.sub(r"\b(BLOB|INTEGER|REAL)\b", lambda word: _TYPES[word[0]], query)
    return query.replace("?", "%s")


def _lock_key_sql(name: str) -> str:
    """SQL for the number of the lock of this name, the same for all who have the same tables in view."""
    return f"hashtextextended(current_schema() || ' dovetail {name}', 0)"


def _advisory_lock_sql(kind: str, name: str) -> str:
    return f"SELECT {kind}({_lock_key_sql(name)})"


def _parse_secure_url(url: str) -> dict[str, Any]:
    """Parse the URL of a store; refuses one that leads to another machine without TLS that proves which one it is.

    The environment counts as libpq counts it (PGHOST, PGHOSTADDR, PGSSLMODE); a service file could name any host.
    """
    try:
        options = conninfo_to_dict(url)
    except psycopg.ProgrammingError:  # it quotes what it could not read, which may be the password
        raise ValueError(
            "the URL of the store cannot be read: write postgresql://USER@HOST/DATABASE, with special characters "
            "in percent-encoding (% as %25, @ as %40)"
        ) from None
    defaults = psycopg.pq.Conninfo.get_defaults()
    effective = {option.keyword.decode(): option.val.decode(errors="replace") for option in defaults if option.val}
    effective |= {name: str(value) for name, value in options.items() if value is not None}
    if effective.get("service"):
        raise ValueError("a store's URL must name its host itself, not a service file (service=, PGSERVICE)")
    remote = next((address for address in _server_addresses(effective) if not _is_on_this_machine(address)), None)
    if remote is None:
        return options
    if (mode := effective.get("sslmode")) != "verify-full":
        raise ValueError(
            f"the database at {remote!r} is on another machine and sslmode is {mode or 'prefer'}: add "
            "?sslmode=verify-full&sslrootcert=FILE to the URL of the store, or use a Unix socket"
        )
    return {**options, "sslmode": mode, "gssencmode": "disable"}  # GSSAPI would be taken instead of TLS


def _server_addresses(options: dict[str, str]) -> list[str]:
    """Where libpq would connect to: addresses count before the names that belong to them."""
    hosts = options.get("host", "").split(",")
    addresses = options.get("hostaddr", "").split(",")
    pairs = itertools.zip_longest(hosts, addresses, fillvalue="")
    return [address.strip() or host.strip() for host, address in pairs]


def _is_on_this_machine(address: str) -> bool:
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
        self._options = _parse_secure_url(url)
        self._lock = threading.RLock()
        self._main = self._connect()
        self._main_lock = threading.Lock()  # whatever goes through the main connection, one after the other
        self._busy = False  # in a transaction
        self._pinned = False  # in a section that must not change its connection
        self._since = 0.0  # when the transaction or section began
        self._leader: psycopg.Connection[Any] | None = None  # the connection that holds the leader's lock
        self._asked = 0.0  # when the leader's lock was last asked for
        self._columns: dict[str, list[str]] = {}  # types of the columns, by table
        self._shut = threading.Event()
        threading.Thread(target=self._send_signs_of_life, daemon=True).start()

    def fetch_rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        """Execute a statement; the rows that it returns, if any."""
        with self._lock, self._use_main_connection():
            cursor = self._main_connection().execute(_to_postgres_sql(query), values, binary=True)
            return cursor.fetchall() if cursor.description else []

    def execute_many(self, query: str, rows: Sequence[Sequence[object]]) -> None:
        """Execute a statement with the values of each of these rows, without waiting for each."""
        with self._lock, self._use_main_connection(), self._main_connection().cursor() as cursor:
            cursor.executemany(_to_postgres_sql(query), rows)

    def insert_rows(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        """Add rows to a table as a stream of bytes, which is several times faster than statements."""
        if table not in self._columns:
            query = (
                "SELECT atttypid::regtype::text FROM pg_attribute WHERE attrelid = ?::regclass AND attnum > 0 "
                "AND NOT attisdropped ORDER BY attnum"
            )
            self._columns[table] = [kind for (kind,) in self.fetch_rows(query, (table,))]
        statement = f"COPY {table} FROM STDIN (FORMAT BINARY)"
        with (
            self._lock,
            self._use_main_connection(),
            self._main_connection().cursor() as cursor,
            cursor.copy(statement) as copy,
        ):
            copy.set_types(self._columns[table])
            for row in rows:
                copy.write_row(row)

    def delete_round(self, table: str, round: int) -> None:
        """Give the table's files back where it holds nothing else; else delete rows."""
        if self.fetch_rows(f"SELECT 1 FROM {table} WHERE round != ? LIMIT 1", (round,)):
            self.fetch_rows(f"DELETE FROM {table} WHERE round = ?", (round,))
        else:
            self.fetch_rows(f"TRUNCATE {table}")

    def execute_script(self, statements: str) -> None:
        """Execute several statements, without values."""
        for statement in filter(str.strip, statements.split(";")):
            self.fetch_rows(statement.strip())
            if match := re.match(r"CREATE TABLE IF NOT EXISTS (\w+)", statement.strip()):
                self._keep_uncompressed(match[1])

    def _keep_uncompressed(self, table: str) -> None:
        """What parties keep as bytes is random or sealed: PostgreSQL would try in vain to compress it."""
        query = "SELECT attname FROM pg_attribute WHERE attrelid = ?::regclass AND atttypid = 'bytea'::regtype"
        for (column,) in self.fetch_rows(query, (table,)):
            self.fetch_rows(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Take the writer's lock among all replicas; what was done is on disk at the end, or undone if it fails."""
        with self._lock:
            self.fetch_rows("BEGIN")
            self._since = time.monotonic()
            self._busy = True
            try:
                self._wait_for("pg_advisory_xact_lock", "writer")
                yield
                self.fetch_rows("COMMIT")
            except BaseException:
                self._roll_back()
                raise
            finally:
                self._busy = False

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep out other replicas for several transactions; whoever loses its connection has lost the lock."""
        with self._lock:
            self._wait_for("pg_advisory_lock", "exclusive")
            self._since = time.monotonic()
            self._pinned = True
            try:
                self.fetch_rows(_LEADER)
                yield
            finally:
                self._pinned = False
                with contextlib.suppress(Unavailable):
                    if not self._main.closed:
                        self.fetch_rows(_advisory_lock_sql("pg_advisory_unlock", "exclusive"))
                        self.fetch_rows("SET idle_session_timeout = 0")

    def is_leader(self) -> bool:
        """Whether this replica holds the leader's lock, on a connection of its own."""
        try:
            if self._leader is not None:
                self._leader.execute("SELECT 1")
                self._asked = time.monotonic()
                return True
            if time.monotonic() < self._asked + _RETRY:
                return False
            self._asked = time.monotonic()
            candidate = self._connect()
            row = candidate.execute(_advisory_lock_sql("pg_try_advisory_lock", "leader")).fetchone()
            if row is not None and row[0]:
                candidate.execute(_LEADER)
                self._leader = candidate
                return True
            candidate.close()
        except (psycopg.OperationalError, psycopg.InterfaceError, Unavailable):
            self._close_leader()
        return False

    def purge_log(self) -> None:
        """Nothing: what was deleted lingers in PostgreSQL's log until that is recycled."""

    def close(self) -> None:
        """Close the connections; the server lets go of their locks."""
        self._shut.set()
        with self._lock:
            self._main.close()
            self._close_leader()

    def _wait_for(self, kind: str, name: str) -> None:
        """Take a lock; if that takes too long, end the session of a holder that is stuck, and raise `Unavailable`."""
        try:
            self.fetch_rows(_advisory_lock_sql(kind, name))
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                with contextlib.suppress(psycopg.Error, Unavailable), self._connect() as other:
                    other.execute(_END_STUCK.format(key=_lock_key_sql(name)))
            raise

    def _send_signs_of_life(self) -> None:
        """Every few seconds, while this process holds a lock and no step takes longer than it may."""
        while not self._shut.wait(_PULSE):
            now = time.monotonic()
            if (leader := self._leader) is not None and now < self._asked + _LONGEST:
                with contextlib.suppress(psycopg.Error):
                    leader.execute("SELECT 1")
            if (
                (self._busy or self._pinned)
                and now < self._since + _LONGEST
                and self._main_lock.acquire(blocking=False)
            ):
                try:
                    if not self._main.closed:
                        self._main.execute("SELECT 1")
                except psycopg.Error:
                    pass  # whoever uses the connection notices
                finally:
                    self._main_lock.release()

    def _close_leader(self) -> None:
        leader, self._leader = self._leader, None
        if leader is not None:
            leader.close()

    def _main_connection(self) -> psycopg.Connection[Any]:
        if self._main.closed:
            if self._busy or self._pinned:
                raise Unavailable("the connection to the database was lost within a transaction")
            self._main = self._connect()
        return self._main

    def _roll_back(self) -> None:
        """Roll back; a connection that cannot is given up, and the server does it."""
        with contextlib.suppress(psycopg.Error):
            self._main.rollback()
        if self._main.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self._main.close()

    def _connect(self) -> psycopg.Connection[Any]:
        """A connection to a database that keeps what it has committed."""
        try:
            connection = psycopg.connect(autocommit=True, **{**self._options, **_CLIENT})
            try:
                self._check_server(connection)
            except BaseException:
                connection.close()
                raise
        except psycopg.OperationalError as error:
            raise Unavailable("the database does not answer") from error
        return connection

    @staticmethod
    def _check_server(connection: psycopg.Connection[Any]) -> None:
        """Refuse a server that others can listen to, that is too old, or that forgets."""
        if not (
            _is_on_this_machine(connection.info.hostaddr) or connection.pgconn.ssl_in_use
        ):  # a localhost that is elsewhere
            raise ValueError(
                f"the database at {connection.info.hostaddr} is on another machine, and the connection has no TLS: add "
                "?sslmode=verify-full&sslrootcert=FILE to the URL of the store"
            )
        if connection.info.server_version < _OLDEST:
            raise ValueError(
                f"the database runs PostgreSQL {connection.info.server_version // 10_000}: 14 or newer is needed"
            )
        connection.execute(_SERVER)
        if connection.execute("SELECT current_schema()").fetchone() == (None,):
            raise ValueError(
                "no schema on the search path of the store's URL exists: create it, or correct search_path"
            )
        for name in ("fsync", "synchronous_commit"):
            if connection.execute(f"SHOW {name}").fetchone() == ("off",):
                raise ValueError(f"the database has {name} = off and may lose what it commits: turn it on")

    @contextlib.contextmanager
    def _use_main_connection(self) -> Iterator[None]:
        try:
            with self._main_lock:
                yield
        except psycopg.Error as error:
            if isinstance(error, psycopg.InterfaceError):
                self._main.close()
            elif not (self._main.closed or isinstance(error, psycopg.OperationalError)):
                raise
            elif self._main.broken:  # also by the server, if this process was silent for too long
                self._main.close()
            raise Unavailable("the database does not answer") from error
