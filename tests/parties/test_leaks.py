"""Nothing leaks: what each party's files and logs hold, and the order in which messages reach the analyzer."""

from __future__ import annotations

import asyncio
import base64
import collections
import itertools
import secrets
import sqlite3
import time

import httpx
import numpy as np
import pytest
from parties.household import Direct, Household, files_under, give, in_processes, sealed
from scipy.stats import chisquare

from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient
from dovetail.parties.common.sealing import OVERHEAD, open_sealed, seal
from dovetail.parties.common.wire import Packed
from dovetail.parties.http.intermediary import IntermediaryService

ADDRESS = "127.77.203.91"  # of the users, who connect from another address of the loopback interface than they reach


def spellings(secret):
    """How bytes could stand in a file."""
    return {
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"=")[:-1],
        base64.urlsafe_b64encode(secret).rstrip(b"=")[:-1],
        repr(secret)[2:-1].encode(),
        ", ".join(map(str, secret)).encode(),
    }


def found(secrets_, files):
    """Which of these secrets stand in which of these files, in any spelling."""
    return {
        (file.name, secret)
        for secret in secrets_
        for file, data in files.items()
        if any(spelling in data for spelling in spellings(secret))
    }


def times_in(path, first, last):
    """Every number in a database's tables that is a time between two seconds, also in milli- to nanoseconds."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        rows = [row for name in tables for row in database.execute(f"SELECT * FROM {name}")]
    numbers = [value for row in rows for value in row if isinstance(value, (int, float))]
    return [value for value in numbers if any(first <= value / scale <= last for scale in (1, 1e3, 1e6, 1e9))]


def test_the_search_finds_what_is_planted(tmp_path):
    secret = secrets.token_bytes(16)
    for i, spelling in enumerate(sorted(spellings(secret))):
        database = sqlite3.connect(tmp_path / f"{i}.db")
        database.execute("CREATE TABLE kept (value BLOB, at REAL)")
        database.execute("INSERT INTO kept VALUES (?, ?)", (spelling, time.time()))
        database.commit()
        database.close()
        assert times_in(tmp_path / f"{i}.db", time.time() - 60, time.time())
    assert len(found([secret], files_under(tmp_path))) == len(spellings(secret))
    assert found([secrets.token_bytes(16)], files_under(tmp_path)) == set()


class Planted:
    """A user who reports a known token instead of a seed, from an address that can be recognised."""

    def __init__(self, household, key, url, authority):
        self._task, self.key = household.task, key
        self.token, self.report = secrets.token_bytes(16), secrets.token_bytes(16)
        self._link = IntermediaryClient(url, ca=authority)
        transport = httpx.HTTPTransport(verify=self._link._http._transport._pool._ssl_context, local_address=ADDRESS)
        self._link._http = httpx.Client(base_url=url, transport=transport, trust_env=False)

    def upload(self, round):
        """The message for the analyzer, and the seal around it."""
        message = seal(self.token, self._task.analyzer.sealing_key(), self._task.message_purpose(round))
        upload = sealed(self._task, Packed.of([(0, message)]).encode(), self.key, report=self.report, round=round)
        give(self._task, self._link, self.key, upload, round=round)
        return message, upload.sealed

    def close(self):
        self._link.close()


def until(true, what):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def test_no_file_of_a_party_holds_what_it_must_not_know(tmp_path):
    """Two rounds over real processes and TLS, with planted values, names and addresses."""
    began = time.time()
    household = Household(tmp_path, "privunit", clients=6, rounds=2)
    with in_processes(household) as (_, up):
        url = "https://{}:{}".format(*up.shuffler)
        users = [Planted(household, key, url, up.authority) for key in household.users]
        analyzer = AnalyzerClient("https://{}:{}".format(*up.analyzer), ca=up.authority)
        tokens, reports = [one.token for one in users], [one.report for one in users]
        names = [word for one in users for word in (one.key.public.key_id, one.key.public.public)]
        sent = []

        def shuffler_files():
            return files_under(tmp_path / "shuffler-0", tmp_path / "shuffler-0.log")

        def analyzer_files():
            return files_under(tmp_path / "analyzer", tmp_path / "analyzer.log")

        for round in (1, 2):
            until(lambda round=round: users[0]._link.status().round == round, f"round {round} did not open")
            messages, seals = zip(*(one.upload(round) for one in users[:-1]), strict=True)
            held = found([*messages, *reports[:-1], *names[:-2:2]], shuffler_files())
            assert len({secret for _, secret in held}) == 5 + 5 + 5  # it holds names and ciphertexts, and is searched
            assert found([*tokens, *seals], shuffler_files()) == set()
            sent += [*messages, *seals, *users[-1].upload(round)]
            until(lambda round=round: _ended(analyzer, round), f"round {round} did not end")
        until(lambda: found(sent, shuffler_files()) == set(), "ciphertexts stayed")
        facts = analyzer.privacy()
        for link in (*users, analyzer):
            link.close()
        private = [household.ring.all_pairs()[0].private, *(one.key.private for one in users)]
        sealing = household.shuffler_keys[0].seal.private
    assert [(one["outcome"], one["uploads"]) for one in facts["history"]] == [("released", 6)] * 2
    assert facts["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": 0}
    shuffler_left, analyzer_left = shuffler_files(), analyzer_files()
    assert {"store.db", "shuffler-0.log"} <= {file.name for file in shuffler_left}
    assert {"book.db", "ledger.db", "analyzer.log"} <= {file.name for file in analyzer_left}
    assert found([*tokens, *private, *names, *sent], shuffler_left) == set()
    address = bytes(map(int, ADDRESS.split(".")))
    unknown = [*names, *reports, *sent, *private[1:], sealing, address, ADDRESS.encode()]
    assert found(unknown, analyzer_left) == set()
    assert found([address, ADDRESS.encode()], shuffler_left) == set()
    logs = [data for file, data in {**shuffler_left, **analyzer_left}.items() if file.suffix == ".log"]
    assert len(logs) == 2 and not any(b"/v1/" in log for log in logs)  # nor what was asked for
    for database in ("book.db", "ledger.db"):
        assert times_in(tmp_path / "analyzer" / database, began - 1, time.time() + 1) == []
    hour = household.task.round_seconds + 60
    assert times_in(tmp_path / "shuffler-0" / "store.db", began, time.time() + hour)  # the round's end: found


def _ended(analyzer, round):
    status = analyzer.status()
    return status.over or status.round > round


class Listening:
    """An analyzer's ear: what it gets of a round, in its order."""

    def __init__(self):
        self.packed = []

    def send_part(self, round, batch, number, part):
        self.packed.append(part)

    def report_closed(self, round, closed):
        self.said = closed


def opened(household, data, round):
    """(slot, plaintext) of a part, as the analyzer sees it."""
    packed, key = Packed.decode(data, length=household.task.message_bytes), household.ring.all_pairs()[0].opening_key()
    bodies = [open_sealed(sealed, key, household.task.message_purpose(round)) for sealed in packed.ciphertexts()]
    return list(zip(packed.slots.tolist(), bodies, strict=True))


def orders_of(household, *, rounds):
    """In which orders three users' messages reached the analyzer; they uploaded one after the other."""
    shuffler, seen = household.shuffler(), collections.Counter()
    task = household.task
    for round in range(1, rounds + 1):
        shuffler.store.open_round(round, head=b"head", closes=0.0)
        for user, key in enumerate(household.users):
            message = seal(bytes([user] * 16), task.analyzer.sealing_key(), task.message_purpose(round))
            upload = household.sealed(user, Packed.of([(0, message)]).encode(), round=round)
            shuffler.accept(round, client=key.public.key_id, upload=upload)
        assert shuffler.close_round(round) == "sent"
        shuffler.forward(round, ear := Listening())
        seen[tuple(body[0] for data in ear.packed for _, body in opened(household, data, round))] += 1
    shuffler.close()
    return seen


def is_uniform(seen, *, alpha=1e-4):
    return chisquare([seen[order] for order in itertools.permutations(range(3))]).pvalue > alpha


def test_messages_reach_the_analyzer_in_uniform_order(tmp_path, monkeypatch):
    """90 rounds of three users: all six orders are equally frequent, at alpha 1e-4."""
    seen = orders_of(Household(tmp_path, "privunit", clients=3, rounds=90), rounds=90)
    assert sum(seen.values()) == 90
    assert is_uniform(seen)
    first, *_ = itertools.permutations(range(3))
    assert not is_uniform(collections.Counter({first: 90}))
    assert not is_uniform(collections.Counter({(0, 1, 2): 30, (1, 2, 0): 30, (2, 0, 1): 30}))  # rotated, not shuffled
    monkeypatch.setattr("dovetail.parties.shuffler._SYSTEM.shuffle", lambda messages: None)
    kept = orders_of(Household(tmp_path / "keeping", "privunit", clients=3, rounds=12), rounds=12)
    assert not is_uniform(kept)


@pytest.mark.parametrize("why", ["full", "late"])
def test_a_batch_leaves_only_after_its_round_has_closed(tmp_path, monkeypatch, why):
    """At its time, or as soon as it is full; before that the analyzer hears of nothing, though the minimum is there."""
    household = Household(tmp_path, "privunit", clients=4, min_clients=2)
    analyzer, shuffler = household.analyzer(), household.shuffler()
    service = IntermediaryService(shuffler, enrolled=household.enrolled, analyzer=(link := Direct(analyzer)), peers=[])
    asyncio.run(service._follow_analyzer())

    def give(user):
        upload = household.envelope(user).uploads[0]
        shuffler.accept(1, client=household.users[user].public.key_id, upload=upload)

    for user in range(3):
        give(user)
        asyncio.run(service._close_rounds())
    assert (link.parts, shuffler.store.state(1)) == ([], "open")
    if why == "full":
        give(3)
    else:
        now = time.time
        monkeypatch.setattr("dovetail.parties.http.intermediary.time.time", lambda: now() + 601)
    asyncio.run(service._close_rounds())
    assert len(link.parts) == 1 and shuffler.store.state(1) == "done"
    shuffler.close()
    analyzer.close()


def test_reports_and_dummies_have_one_length_and_one_look(tmp_path):
    household = Household(tmp_path, "ss_topk", clients=5, min_clients=2)
    task, shuffler, analyzer = household.task, household.shuffler(), household.analyzer()
    shuffler.store.open_round(1, head=analyzer.status().head, closes=0.0)
    uploads = [household.envelope(user).uploads[0] for user in range(3)]
    for upload, key in zip(uploads, household.users, strict=False):
        shuffler.accept(1, client=key.public.key_id, upload=upload)
    assert shuffler.close_round(1) == "sent"
    shuffler.forward(1, link := Direct(analyzer))
    (_, _, data) = link.parts[0]
    messages = opened(household, data, 1)
    assert collections.Counter(slot for slot, _ in messages) == dict.fromkeys(range(6), 5)  # three reports, two dummies
    assert {len(body) for _, body in messages} == {task.messages().size}
    packed = Packed.decode(data, length=task.message_bytes)
    contents = [household.content(user, upload) for user, upload in enumerate(uploads)]
    reports = {one for content in contents for one in Packed.decode(content, length=task.message_bytes).ciphertexts()}
    dummies = set(packed.ciphertexts()) - reports
    assert (len(reports), len(dummies)) == (18, 12)
    assert {len(one) for one in reports | dummies} == {task.messages().size + OVERHEAD}
    assert len({one[:32] for one in reports | dummies}) == 30  # an encapsulation of its own each
    assert analyzer.privacy()["refused_messages"] == {"unsealable": 0, "out_of_range": 0, "repeated": 0}
    shuffler.close()
    analyzer.close()


@pytest.mark.parametrize("protocol", ["privunit", "ss_topk", "ss_simple", "split_and_mix"])
def test_what_a_user_sends_has_one_length_whatever_it_says(tmp_path, protocol):
    household = Household(tmp_path, protocol, dim=6)
    updates = [np.zeros(6), np.full(6, 9.0), np.array([1.0, 0, 0, 0, 0, 0]), np.full(6, np.nan)]
    envelopes = [household.envelope(user, update=update) for user, update in enumerate(updates)]
    shapes = {tuple(len(upload.encode()) for upload in envelope.uploads) for envelope in envelopes}
    assert len(shapes) == 1
    contents = [
        [household.content(user, upload, index=index) for index, upload in enumerate(envelope.uploads)]
        for user, envelope in enumerate(envelopes)
    ]
    slots = {tuple(_slots(household, content) for content in one) for one in contents}
    assert len(slots) == 1  # nor do the slots tell
    assert all(len(content) % (4 + household.task.message_bytes) == 0 for one in contents for content in one)


def _slots(household, content):
    return tuple(Packed.decode(content, length=household.task.message_bytes).slots.tolist())
