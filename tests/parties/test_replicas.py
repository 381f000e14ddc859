"""Replicas of every party: none holds the only copy of anything, whoever dies or is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from parties.sharing import Sharing, Straight, close, open_round
from starlette.routing import Route

from dovetail.parties.common import database
from dovetail.parties.common.database import Database, Unavailable, _Sqlite, locate_store
from dovetail.parties.http.requests import Counts, ServiceApp
from dovetail.parties.intermediary.store import Arrival
from dovetail.parties.shuffler import Shape, ShuffleStore

SETTINGS = {"clip_norm": 1.0, "noise_multiplier": 1e-12, "scale": 64.0, "noise": "aggregators"}


@pytest.fixture
def url(place):
    """One store for all replicas of the party with this name."""
    return lambda name: f"sqlite://{found}" if isinstance(found := place(name), Path) else found


@contextlib.contextmanager
def replicas(sharing, url, count=2, **where):
    """So many of every aggregator, by index, and of the analyzer."""
    aggregators = [
        [sharing.aggregator(i, home=f"home-{i}-{one}", store=url(f"aggregator-{i}"), **where) for one in range(count)]
        for i in range(2)
    ]
    analyzers = [sharing.analyzer(home=f"home-{one}", store=url("analyzer")) for one in range(count)]
    yield aggregators, analyzers
    for party in (*aggregators[0], *aggregators[1], *analyzers):
        party.close()


@pytest.mark.parametrize("small", [-1, 1024], ids=["segments", "database"])
def test_every_step_may_be_done_by_another_replica(tmp_path, url, monkeypatch, small):
    monkeypatch.setattr("dovetail.parties.aggregator.store._SMALL", small)
    sharing = Sharing(tmp_path, settings=SETTINGS, aggregators=2, rounds=2)
    updates = np.eye(4, sharing.task.dim, dtype=np.float32) / 2
    shared = tmp_path / "shared"
    with replicas(sharing, url, segments=shared) as (aggregators, analyzers):
        for round in (1, 2):
            first, second = ([replicas[one] for replicas in aggregators] for one in (0, 1))
            open_round(first, analyzers[round % 2], round)
            for user, update in enumerate(updates):
                envelope = sharing.accept(first if user % 2 else second, user, round=round, update=update)
                for party, upload in zip(second if user % 2 else first, envelope.uploads, strict=True):
                    assert party.accept(round, client=sharing.users[user].public.key_id, upload=upload) == "known"
            assert shared.is_dir() == (small < 0)
            assert close(second, round) == ["sent", "sent"] == close(first, round)
            assert not [path for path in shared.rglob("*") if path.is_file()]
            for index in range(2):
                one, other = (Straight(analyzer, index) for analyzer in analyzers)
                aggregators[index][0].forward(round, one)
                assert one.parts and aggregators[index][1].store.state(round) == "done"
                other.send_part(round, one.said[0].batch, 0, one.parts[0]) if index == 0 else None  # said twice
            assert {analyzer.status().round for analyzer in analyzers} == {2}
        statuses = [analyzer.status() for analyzer in analyzers]
        assert statuses[0] == statuses[1] and statuses[0].over
        models = [np.frombuffer(analyzer.model(2), "<f4") for analyzer in analyzers]
        assert np.array_equal(*models)
        np.testing.assert_allclose(models[0], 2 * updates.mean(axis=0), atol=1e-2)
        assert [entry.kind for entry in analyzers[0].ledger.entries] == ["open"] + ["reserve", "release"] * 2


def test_a_replica_that_slept_through_a_round_knows_what_the_others_did(tmp_path, url):
    sharing = Sharing(tmp_path, settings=SETTINGS, rounds=3)
    with replicas(sharing, url) as (_, (awake, asleep)):
        before = asleep.status()
        awake.give_up_round(1)
        awake.give_up_round(2)
        asleep.give_up_round(1)  # it has not looked yet, and must not end another round
        assert before.round == 1 and asleep.status() == awake.status() and awake.status().round == 3
        assert [one["outcome"] for one in asleep.privacy()["history"]] == ["void", "void"]


def test_a_replica_that_slept_counts_the_messages_of_the_round_that_is_open_now(tmp_path, url):
    sharing = Sharing(tmp_path, settings=SETTINGS, rounds=2)
    with replicas(sharing, url) as (aggregators, (awake, asleep)):
        parties = [replicas[0] for replicas in aggregators]
        open_round(parties, awake)
        for user in range(4):
            sharing.accept(parties, user, update=np.zeros(sharing.task.dim, np.float32))
        assert close(parties) == ["sent", "sent"]
        parties[0].forward(1, Straight(awake, 0))
        assert asleep.privacy()["messages"] > 0
        awake.give_up_round(1)
        assert asleep.privacy()["messages"] == 0


def test_one_replica_leads_until_it_is_gone(tmp_path, url):
    sharing = Sharing(tmp_path, settings=SETTINGS)
    one, other = (sharing.aggregator(0, home=f"home-{i}", store=url("aggregator")) for i in range(2))
    assert one.store.is_leader() and one.store.is_leader() and not other.store.is_leader()
    one.close()
    other.store._database._asked = 0.0  # it asks twice a second
    assert other.store.is_leader()
    other.close()


def test_partial_sums_add_up_whichever_replica_made_them(tmp_path, url, monkeypatch):
    sharing = Sharing(tmp_path, settings=SETTINGS)
    with replicas(sharing, url) as (aggregators, _):
        one, other = aggregators[1]
        monkeypatch.setattr("dovetail.parties.aggregator.store._AT_A_TIME", 2)
        one.store.open_round(1, head=b"head", closes=0.0)
        for user in range(4):
            one.accept(
                1,
                client=bytes([user]),
                upload=sharing.envelope(user).uploads[1],
                sender=sharing.users[user].public.key_id,
            )
        roster = one.store.freeze(1)
        one.store.make_partial_sums(1, roster[:2])
        finished, sums = [], one.store._sharing.empty_sum()
        for name in roster:
            one.store._sharing.merge(sums, one.store._sum_shares(1, [name]))
        added, other.store._finish = [], lambda round, total: finished.append(total) or b"sealed"
        compute = other.store._sum_shares
        monkeypatch.setattr(
            other.store, "_sum_shares", lambda round, names: added.append(names) or compute(round, names)
        )
        other.store.make_partial_sums(1, roster)
        assert added == [roster[2:]]  # the first two were there
        assert other.store.close_round(1, roster=roster) == "sent" and added == [roster[2:]]
        assert np.array_equal(finished[0], sums)
        assert one.store._fetch_rows("SELECT * FROM partials") == [] == one.store._fetch_rows("SELECT * FROM shares")


def test_many_replicas_start_at_once(tmp_path, url):
    tables = {"made": ("CREATE TABLE made (round INTEGER) STRICT", "CREATE INDEX by ON made (round)")}
    store, failures, replicas = url("new"), [], 8

    def start(where, together):
        try:
            together.wait()
            Database(where, tables).close()
        except Exception as error:
            failures.append(error)

    # A file is new only once, and only one start in some thirty meets another: many files.
    for attempt in range(100 if store.startswith("sqlite") else 1):
        where, together = locate_store(store, tmp_path, f"store{attempt}.db"), threading.Barrier(replicas)
        threads = [threading.Thread(target=start, args=(where, together)) for _ in range(replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    with pytest.raises(
        ValueError, match="made is of version 2, which a newer Dovetail has made; this one knows versions up to 1"
    ):
        Database(where, {"made": ("CREATE TABLE made (round INTEGER) STRICT",)})


@pytest.mark.parametrize("away", range(1, 24, 3))
def test_storage_that_goes_away_while_a_party_starts_is_waited_for(tmp_path, monkeypatch, away):
    """After so many questions it does not answer, twice; what it was asked last may have happened."""
    monkeypatch.setattr(database, "_RETRY", 0.0)
    ask, asked = _Sqlite.fetch_rows, []

    def rows(self, query, values=()):
        asked.append(query)
        found = ask(self, query, values)
        if len(asked) in (away, away + 5):
            raise Unavailable("the database does not answer")
        return found

    monkeypatch.setattr(_Sqlite, "fetch_rows", rows)
    sharing = Sharing(tmp_path, settings=SETTINGS, aggregators=2, rounds=2)
    aggregators, analyzer = [sharing.aggregator(index) for index in range(2)], sharing.analyzer()
    assert len(asked) > 30
    open_round(aggregators, analyzer, 1)
    for user, update in enumerate(np.eye(4, sharing.task.dim, dtype=np.float32)):
        sharing.accept(aggregators, user, round=1, update=update)
    close(aggregators)
    for index, party in enumerate(aggregators):
        party.forward(1, Straight(analyzer, index))
    assert [one["outcome"] for one in analyzer.privacy()["history"]][:1] == ["released"]
    for party in (*aggregators, analyzer):
        party.close()
    monkeypatch.setattr(database, "_PATIENCE", 0.0)
    monkeypatch.setattr(_Sqlite, "fetch_rows", lambda *_: (_ for _ in ()).throw(Unavailable("gone")))
    with pytest.raises(Unavailable, match="gone"):
        sharing.aggregator(0)


@pytest.mark.parametrize("wrong", ["mysql://host/database", "sqlite://host/folder", "folder"])
def test_another_store_is_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="write sqlite:///FOLDER or postgresql://"):
        locate_store(wrong, tmp_path, "store.db")


def test_who_asks_while_the_database_is_away_asks_again():
    async def stumble(request):
        raise Unavailable("the database does not answer")

    async def ask():
        transport = httpx.ASGITransport(app=ServiceApp([Route("/", stumble)], Counts()))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            return await http.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.text) == (503, "the database does not answer")


@pytest.mark.postgres
def test_a_connection_that_is_lost_leaves_nothing_half_done(postgres):
    url = postgres.database()
    database = Database(url, {"made": ("CREATE TABLE made (round INTEGER) STRICT",)})
    other = Database(url, {})

    def cut_off():
        other._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid != pg_backend_pid() AND datname = current_database()"
        )

    with pytest.raises(Unavailable), database._transaction():
        database._execute("INSERT INTO made VALUES (?)", 1)
        cut_off()
        database._execute("INSERT INTO made VALUES (?)", 2)
    assert database._fetch_rows("SELECT * FROM made") == []
    with pytest.raises(Unavailable), database._database.exclusive():
        cut_off()
        with contextlib.suppress(Unavailable):
            database._execute("INSERT INTO made VALUES (?)", 3)
        database._execute("INSERT INTO made VALUES (?)", 4)  # never on another connection, which holds no lock
    database._execute("INSERT INTO made VALUES (?)", 5)
    assert database._fetch_rows("SELECT * FROM made") == [(5,)]
    database.close()
    other.close()


@pytest.mark.postgres
def test_a_database_that_may_forget_is_refused(postgres):
    with pytest.raises(ValueError, match="the database has synchronous_commit"):
        Database(postgres.database() + "?options=-c%20synchronous_commit%3Doff", {})
    with pytest.raises(ValueError, match="no schema on the search path"):
        Database(postgres.database() + "?options=-c%20search_path%3Dnowhere", {})


@pytest.mark.postgres
def test_after_closing_no_table_says_who_sent_what_but_the_log_does_for_a_while(postgres):
    """What docs/operating.md says of PostgreSQL, beside what the same test says of a file in test_store.py."""
    store = ShuffleStore(postgres.database(), Shape(slots=1, reports=1, length=40, min_uploads=2, max_uploads=5))
    store.open_round(1, head=b"head", closes=0.0)
    names = [secrets.token_bytes(32) for _ in range(3)]
    reports = sorted(secrets.token_bytes(16) for _ in names)
    for name, report in zip(names, reversed(reports), strict=True):
        store.accept(Arrival(1, name, report, [(0, secrets.token_bytes(40))]))
    assert all(name in postgres.files("base") for name in names)
    store.freeze(1)
    store.close_round(1)
    left, (_, sent) = postgres.files("base"), next(iter(store.messages(1, size=4)))
    assert not any(name in left for name in names) and all(sealed in left for _, sealed in sent)
    places = [left.index(report) for report in reports]
    assert places == sorted(places) or places == sorted(places, reverse=True)  # in no order but their own
    store.delete_output(1)
    assert not any(sealed in postgres.files("base") for _, sealed in sent)
    assert all(name in postgres.files("pg_wal") for name in names)
    store.close()


@pytest.mark.postgres
def test_a_party_goes_on_from_a_dump(tmp_path, postgres):
    """As docs/operating.md says: of stopped parties, and the newest one."""
    sharing, url = Sharing(tmp_path, settings=SETTINGS, rounds=3), postgres.database()
    analyzer = sharing.analyzer(store=url)
    analyzer.give_up_round(1)
    before = analyzer.status()
    analyzer.close()
    restored = sharing.analyzer(store=postgres.copied(url))
    assert restored.status() == before and before.round == 2
    restored.give_up_round(2)
    assert restored.status().round == 3
    restored.close()


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("oracle", "kills", "crashes"), [("two aggregators", 60, 2), ("one shuffler", 20, 1), ("verified", 20, 1)]
)
def test_replicas_die_and_the_database_crashes_and_every_report_counts_once(
    tmp_path, postgres, capsys, oracle, kills, crashes
):
    from parties.replicas import ReplicaKilling

    options = {"users": 8, "round_seconds": 5.0, "seed": 3, "processes": 2}
    killing = ReplicaKilling(tmp_path / "fleet", oracle, cluster=postgres, crashes=crashes, **options)
    killing.run(killing.targets(kills), at_once=3)
    with capsys.disabled():
        sys.stdout.write(f"\n{killing.summary()}\n")
    killing.judge()
    assert sum(killing.aimed.values()) == kills and killing.crashed == crashes


@pytest.mark.postgres
def test_a_replica_that_is_cut_off_loses_nothing_and_counts_nothing_twice(tmp_path, capsys):
    """In network namespaces of their own, for the database and all services listen where the replica can reach them."""
    alone = ["unshare", "--net", "--mount", "--fork", "--kill-child"]
    if os.geteuid() != 0 or shutil.which("ip") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("needs root, `ip` and `unshare --net`, which this machine does not allow")
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [*alone, sys.executable, "-m", "parties.cutting_off", str(tmp_path / "fleet")],
        env={**os.environ, "PYTHONPATH": str(tests)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        sys.stdout.write(f"\n{said['summary']}\n")
    assert said["cuts"] >= 6 and said["kills"] == 60 and said["crashed"] == 2
