"""The database behind a store: nobody listens on the way to it, and who hangs does not hold the others up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest
from parties.cluster import cluster
from parties.test_cli_parties import new_task

from dovetail.parties.common import postgresql
from dovetail.parties.common.database import Database, Unavailable, locate_store, retry_until_available
from dovetail.parties.common.postgresql import Postgres, _parse_secure_url

SECRET = "hunter2"
BEYOND = {
    "a name": "postgresql://u:hunter2@db.example/d",
    "an address": "postgresql://u:hunter2@192.0.2.7:5432/d",
    "IPv6": "postgresql://u:hunter2@[2001:db8::7]/d",
    "the other spelling": "postgres://u:hunter2@db.example/d",
    "no port": "postgresql://u:hunter2@db.example",
    "in the query": "postgresql:///d?host=db.example&user=u&password=hunter2",
    "the query counts": "postgresql://u:hunter2@127.0.0.1/d?host=db.example",
    "encoded": "postgresql://u:hunter2@%64b.example/d",
    "the second of two": "postgresql://u:hunter2@127.0.0.1:5432,db.example:5432/d",
    "an address for localhost": "postgresql://u:hunter2@localhost/d?hostaddr=192.0.2.7",
    "the second address": "postgresql://u:hunter2@localhost,localhost/d?hostaddr=127.0.0.1,192.0.2.7",
    "words": "host=db.example user=u password=hunter2",
    "words with an address": "host=/run/postgresql hostaddr=192.0.2.7 password=hunter2",
    "almost here": "postgresql://u:hunter2@localhost.example/d",
    "a short spelling": "postgresql://u:hunter2@127.1/d",
    "any address": "postgresql://u:hunter2@0.0.0.0/d",
    "a name in the user": "postgresql://localhost:hunter2@db.example/d",
    **{
        mode: f"postgresql://u:hunter2@db.example/d?sslmode={mode}"
        for mode in ("disable", "allow", "prefer", "require", "verify-ca")
    },
}
HERE = {
    "IPv4": "postgresql://u:hunter2@127.0.0.1:5432/d",
    "the whole net": "postgresql://u@127.9.9.9/d",
    "IPv6": "postgresql://u@[::1]/d",
    "localhost": "postgresql://u@localhost/d?sslmode=disable",
    "a socket": "postgresql://u@/d?host=/run/postgresql",
    "an encoded socket": "postgresql://u@%2Frun%2Fpostgresql/d",
    "an abstract socket": "postgresql://u@/d?host=@postgres",
    "the default socket": "postgresql:///d",
    "two": "postgresql://u@127.0.0.1,localhost/d",
    "words": "host=127.0.0.1 password=hunter2",
}


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("PG"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("url", BEYOND.values(), ids=BEYOND)
def test_a_database_on_another_machine_needs_tls_that_proves_whose_it_is(url):
    with pytest.raises(ValueError, match=r"is on another machine and sslmode is .*sslmode=verify-full") as refused:
        Postgres(url)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("url", HERE.values(), ids=HERE)
def test_this_machine_needs_none(url):
    assert "gssencmode" not in _parse_secure_url(url)


@pytest.mark.parametrize("url", ["postgresql://u@db.example/d?sslmode=verify-full", "host=db sslmode=verify-full"])
def test_tls_that_proves_whose_it_is_suffices_and_nothing_else_takes_its_place(url):
    """GSSAPI would be taken first, whatever `sslmode` says."""
    said = _parse_secure_url(url)
    assert said["sslmode"] == "verify-full" and said["gssencmode"] == "disable"


@pytest.mark.parametrize(
    ("name", "value", "url"),
    [
        ("PGHOST", "db.example", "postgresql://u:hunter2@/d"),
        ("PGHOSTADDR", "192.0.2.7", "postgresql://u:hunter2@localhost/d"),
        ("PGHOST", "127.0.0.1,db.example", "postgresql:///d?password=hunter2"),
        ("PGSSLMODE", "require", "postgresql://u:hunter2@db.example/d"),
    ],
)
def test_the_environment_brings_no_other_machine_in(monkeypatch, name, value, url):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="is on another machine and sslmode is") as refused:
        Postgres(url)
    assert SECRET not in str(refused.value)


def test_the_environment_may_ask_for_tls(monkeypatch):
    monkeypatch.setenv("PGSSLMODE", "verify-full")
    assert _parse_secure_url("postgresql://u@db.example/d")["sslmode"] == "verify-full"


@pytest.mark.parametrize("named", ["by the URL", "by the environment"])
def test_a_service_file_brings_no_other_machine_in(monkeypatch, tmp_path, named):
    (tmp_path / "services").write_text("[far]\nhost=192.0.2.7\n")
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    url = "postgresql://u:hunter2@localhost/d"
    if named == "by the environment":
        monkeypatch.setenv("PGSERVICE", "far")
    else:
        url += "?service=far"
    with pytest.raises(ValueError, match="must name its host itself, not a service file"):
        Postgres(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2%zz@127.0.0.1/d",
        "postgresql://u:hunter2%@127.0.0.1/d",
        "postgresql://u:%00hunter2@127.0.0.1/d",
        "postgresql://u:hunter2@127.0.0.1/d?unknown=hunter2",
        "postgresql://u:hunter2@[127.0.0.1/d",
    ],
)
def test_a_url_that_cannot_be_read_shows_no_password(tmp_path, command, url):
    """libpq quotes what it could not read."""
    with pytest.raises(ValueError, match="the URL of the store cannot be read") as refused:
        Database(locate_store(url, tmp_path, "store.db"), {})
    shown = "".join(traceback.format_exception(refused.value, chain=True))
    assert SECRET not in shown and refused.value.__suppress_context__


@pytest.mark.parametrize("url", ["sqlite://u:hunter2@h℀st/folder", "sqlite://u:hunter2@[h/x", "my://u:hunter2@h/d"])
def test_another_store_shows_no_password(tmp_path, url):
    with pytest.raises(ValueError, match="write sqlite:///FOLDER or postgresql://") as refused:
        locate_store(url, tmp_path, "store.db")
    assert SECRET not in "".join(traceback.format_exception(refused.value))


def test_a_service_says_in_one_sentence_what_is_wrong_with_its_store(tmp_path, command):
    made = {}
    for name, use in (("owner", "sign"), ("analyzer", "service"), ("shuffler", "service")):
        made[name] = json.loads(command("keys", str(tmp_path / name), "--use", use, "--json")[1])
    assert new_task(command, tmp_path, made)[0] == 0
    (tmp_path / "clients.json").write_text("[]")
    words = ["--task", str(tmp_path / "task.json"), "--signer", made["owner"]["id"], "--plain"]
    words += ["--clients", str(tmp_path / "clients.json"), "--keys", str(tmp_path / "shuffler")]
    words += ["--analyzer", "https://analyzer.example", "--store", "postgresql://u:hunter2@db.example/d"]
    status, out, err = command("shuffler", str(tmp_path / "home"), *words)
    assert status == 2 and out == "" and "sslmode=verify-full" in err and SECRET not in err


def test_an_operator_hears_why_the_database_does_not_answer(monkeypatch):
    monkeypatch.setattr("dovetail.parties.common.database._PATIENCE", 0.0)

    def fail():
        try:
            raise OSError("root certificate file\ndoes not exist")
        except OSError as error:
            raise Unavailable("the database does not answer") from error

    with pytest.raises(Unavailable, match="does not answer: root certificate file does not exist"):
        retry_until_available(fail)


@pytest.mark.postgres
def test_tls_is_verified_and_a_localhost_that_is_elsewhere_is_refused(monkeypatch):
    with cluster(tls=True) as running:
        url = running.database()
        plain = url.partition("?")[0]
        monkeypatch.setattr(postgresql, "_is_on_this_machine", lambda address: False)
        made = Postgres(url)
        assert made.fetch_rows("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()") == [(True,)]
        made.close()
        with pytest.raises(ValueError, match="is on another machine"):
            Postgres(plain)
        other = url.replace("authority.crt", "tls-127.0.0.1.crt")  # not the authority's
        with pytest.raises(Unavailable) as refused:
            Postgres(other)
        assert "certificate verify failed" in str(refused.value.__cause__)
        monkeypatch.setattr(postgresql, "_parse_secure_url", lambda url: {"conninfo": f"{plain}?sslmode=disable"})
        with pytest.raises(ValueError, match="is on another machine, and the connection has no TLS"):
            Postgres(plain)


@pytest.mark.postgres
def test_a_unix_socket_needs_no_tls(postgres, tmp_path, monkeypatch):
    """With its password in a file, as deploy/compose.yaml says."""
    url = postgres.at_socket(postgres.database())
    password = url.partition("@")[0].rpartition(":")[2]
    (tmp_path / "pgpass").write_text(f"*:*:{url.partition('@/')[2].partition('?')[0]}:dovetail:{password}\n")
    (tmp_path / "pgpass").chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    made = Postgres(url.replace(f":{password}", ""))
    assert made.fetch_rows("SELECT inet_client_addr() IS NULL") == [(True,)]
    made.close()


HOLDS = r"""
import sys, threading, time
from dovetail.parties.common import postgresql
url, how, silence, pulse = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
postgresql._SERVER = postgresql._SERVER.replace("30000", str(1000 * silence))
postgresql._LEADER = postgresql._LEADER.replace("30000", str(1000 * silence))
postgresql._PULSE = pulse
made = postgresql.Postgres(url)

def hold():
    sys.stdout.write("holds\n")
    sys.stdout.flush()
    time.sleep(600)

if how == "leader":
    assert made.is_leader()
    hold()
elif how == "transaction":
    with made.transaction():
        hold()
elif how == "exclusive":
    with made.exclusive():
        hold()
elif how == "rows":
    made.fetch_rows("CREATE TABLE IF NOT EXISTS sent (round BIGINT)")
    with made.transaction(), made._main_connection().cursor() as cursor, cursor.copy("COPY sent FROM STDIN") as copy:
        copy.write("1\n")
        hold()
"""


@contextlib.contextmanager
def holding(url, how, *, silence, pulse=0.5, stop=True):
    """A process that holds a lock, stopped in the middle of it; afterwards it is let go on and ended."""
    words = [sys.executable, "-c", HOLDS, url, how, str(silence), str(pulse)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "holds\n"
        if stop:
            process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def took(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def in_turn(made, how):
    """The lock that the stopped process holds, taken by another replica."""
    if how == "leader":
        end = time.monotonic() + 60
        while not made.is_leader():
            assert time.monotonic() < end
            time.sleep(0.05)
        return
    with made.exclusive() if how == "exclusive" else made.transaction():
        pass


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["leader", "transaction", "exclusive"])
def test_who_is_stopped_loses_its_locks(postgres, capsys, how):
    """SIGSTOP: its kernel goes on answering, so TCP notices nothing. Once this lasted until somebody noticed."""
    url = postgres.database()
    with holding(url, how, silence=2):
        made = Postgres(url)
        seconds = took(lambda: in_turn(made, how))
        made.close()
    with capsys.disabled():
        sys.stdout.write(f"\n{how} of a stopped process: taken over after {seconds:.1f} s (limit 2 s)\n")
    assert seconds < 6


@pytest.mark.postgres
def test_who_is_stopped_while_it_sends_rows_is_ended_by_who_waits(postgres, monkeypatch):
    """The server's own timeouts do not apply while it reads rows."""
    url = postgres.database()
    monkeypatch.setattr(postgresql, "_SERVER", postgresql._SERVER.replace("60000", "3000"))
    end_stuck = postgresql._END_STUCK.replace("'30 seconds'", "'2 seconds'")
    with holding(url, "rows", silence=1):
        made = Postgres(url)
        for query in ("SELECT 1", "SELECT 1", end_stuck):
            monkeypatch.setattr(postgresql, "_END_STUCK", query)
            with pytest.raises(Unavailable):
                in_turn(made, "rows")
        assert took(lambda: in_turn(made, "rows")) < 3
        assert made.fetch_rows("SELECT COUNT(*) FROM sent") == [(0,)]
        made.close()


@pytest.mark.postgres
@pytest.mark.parametrize("how", ["leader", "transaction", "exclusive"])
def test_who_lives_keeps_its_locks_however_long_a_step_takes(postgres, monkeypatch, how):
    """A step that computes for long says so; the same step without a sign of life loses its place."""
    url = postgres.database()
    monkeypatch.setattr(postgresql, "_SERVER", postgresql._SERVER.replace("60000", "4000"))
    made = Postgres(url)
    with holding(url, how, silence=2, pulse=0.5, stop=False):
        if how == "leader":
            end = time.monotonic() + 4
            while time.monotonic() < end:
                assert not made.is_leader()
                time.sleep(0.1)
        else:
            with pytest.raises(Unavailable):
                in_turn(made, how)
    with holding(url, how, silence=2, pulse=60.0, stop=False):
        in_turn(made, how)
    made.close()


@pytest.mark.postgres
def test_who_was_ended_says_so_and_goes_on(postgres, monkeypatch):
    """A replica that wakes up finds its transaction undone, and works on with a new connection."""
    monkeypatch.setattr(postgresql, "_SERVER", postgresql._SERVER.replace("30000", "500"))
    monkeypatch.setattr(postgresql, "_PULSE", 60.0)
    made = Postgres(postgres.database())
    made.fetch_rows("CREATE TABLE kept (round BIGINT)")
    with pytest.raises(Unavailable), made.transaction():
        made.fetch_rows("INSERT INTO kept VALUES (1)")
        time.sleep(1.0)
        made.fetch_rows("INSERT INTO kept VALUES (2)")
    with made.transaction():
        made.fetch_rows("INSERT INTO kept VALUES (3)")
    assert made.fetch_rows("SELECT round FROM kept") == [(3,)]
    made.close()


@pytest.mark.postgres
def test_signs_of_life_spoil_nothing(postgres, monkeypatch):
    """They go through the same connection as rows that are sent, and questions that are asked."""
    monkeypatch.setattr(postgresql, "_PULSE", 0.001)
    made, failures = Postgres(postgres.database()), []
    made.fetch_rows("CREATE TABLE kept (round BIGINT, user_id BIGINT)")

    def work(user):
        try:
            for round in range(20):
                with made.exclusive(), made.transaction():
                    made.insert_rows("kept", [(round, user)] * 50)
                    assert made.fetch_rows("SELECT ?::bigint", (round,)) == [(round,)]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(user,)) for user in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and made.fetch_rows("SELECT COUNT(*) FROM kept") == [(4 * 20 * 50,)]
    made.close()


@pytest.mark.postgres
def test_every_connection_has_its_limits(postgres):
    made = Postgres(postgres.database())
    found = {
        name: made.fetch_rows(f"SHOW {name}")[0][0]
        for name in ("idle_in_transaction_session_timeout", "lock_timeout", "statement_timeout", "tcp_user_timeout")
    }
    assert found == {
        "idle_in_transaction_session_timeout": "30s",
        "lock_timeout": "1min",
        "statement_timeout": "5min",
        "tcp_user_timeout": "15000",
    }
    assert made.is_leader()
    assert made._leader.execute("SHOW idle_session_timeout").fetchone() == ("30s",)
    assert made.fetch_rows("SHOW idle_session_timeout") == [("0",)]
    with made.exclusive():
        assert made.fetch_rows("SHOW idle_session_timeout") == [("30s",)]
    assert made.fetch_rows("SHOW idle_session_timeout") == [("0",)]
    made.close()
