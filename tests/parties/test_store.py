"""The shuffler's store: once, whole, in no order, and gone when it is not needed."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import secrets
import shutil
import signal
import sqlite3
import threading
import time

import pytest
from scipy.stats import chisquare

from dovetail.parties.common.wire import BATCH_ID, Packed
from dovetail.parties.intermediary.store import Arrival, UploadRefused
from dovetail.parties.shuffler import Shape, ShuffleStore

SHAPE = Shape(slots=3, reports=3, length=8, min_uploads=2, max_uploads=5)


def upload(client, *, slots=3, round=1, report=None, mark=None):
    """Messages that say whose they are, as a sealed one would not."""
    mark = client if mark is None else mark
    messages = [(slot, bytes([mark, slot]) * 4) for slot in range(slots)]
    return Arrival(round, bytes([client]), report or secrets.token_bytes(16), messages)


def opened(path, shape=SHAPE, *, rounds=(1,)):
    store = ShuffleStore(path, shape)
    for number in rounds:
        store.open_round(number, head=b"head", closes=0.0)
    return store


def close(store, round=1, *, dummy=None, roster=None):
    store.freeze(round)
    if dummy:
        lacking = store.missing_dummies(round, roster=roster)
        store.add_dummies(round, [(slot, dummy(slot)) for slot, count in lacking.items() for _ in range(count)])
    return store.close_round(round, roster=roster)


def everything(store, round=1):
    return [message for _, part in store.messages(round, size=4) for message in part]


def test_what_was_accepted_leaves_once_and_whole(place):
    store = opened(place("store"))
    for client in range(4):
        assert store.accept(upload(client)) == "accepted"
    assert store.num_uploads(1) == 4
    assert close(store) == "sent"
    sent = everything(store)
    assert sorted(sent) == sorted(message for client in range(4) for message in upload(client).content)
    assert everything(store) == sent  # the same batch again, in the same order
    assert [number for number, _ in store.parts(1, size=5)] == [0, 1, 2]
    for (_, rows), (_, part) in zip(store.messages(1, size=5), store.parts(1, size=5), strict=True):
        packed = Packed.decode(part, length=8)
        assert list(zip(packed.slots.tolist(), packed.ciphertexts(), strict=True)) == rows
    store.delete_output(1)
    assert everything(store) == []
    assert store.state(1) == "done"


def test_the_same_report_again_is_known_also_after_closing(place):
    store, first = opened(place("store")), upload(0)
    assert store.accept(first) == "accepted"
    assert store.accept(first) == "known"
    store.accept(upload(1))
    close(store)
    assert store.accept(first) == "known"
    assert len(everything(store)) == 6


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (upload(0), "this client has another upload in round 1"),
        (upload(7)._replace(content=upload(7).content[:2]), "has 3 messages, and this one has 2"),
        (upload(7)._replace(content=[(3, bytes(8)), *upload(7).content[:2]]), "this shuffler has slots 0 to 2"),
        (upload(7)._replace(content=[(-1, bytes(8)), *upload(7).content[:2]]), "this shuffler has slots 0 to 2"),
        (upload(7)._replace(content=[(0, bytes(8))] * 3), "two messages of this upload are for the same slot"),
        (
            upload(7)._replace(content=[(0, bytes(9)), *upload(7).content[1:]]),
            "a sealed message of this task has 8 bytes",
        ),
        (upload(7)._replace(report=b"short"), "and the report id 16; got"),
        (upload(7)._replace(client=bytes(65)), "client id must have 1 to 64 bytes"),
    ],
)
def test_what_does_not_fit_is_turned_away_and_changes_nothing(place, wrong, sentence):
    store = opened(place("store"))
    store.accept(upload(0))
    with pytest.raises(UploadRefused, match=sentence):
        store.accept(wrong)
    assert store.num_uploads(1) == 1
    store.accept(upload(1))
    close(store)
    assert len(everything(store)) == 6


def test_a_round_takes_no_more_than_planned_and_nothing_once_closed(place):
    store = opened(place("store"))
    for client in range(5):
        store.accept(upload(client))
    with pytest.raises(UploadRefused, match="round 1 is full: it has 5 uploads"):
        store.accept(upload(5))
    close(store)
    with pytest.raises(UploadRefused, match="round 1 is closed and takes no more uploads"):
        store.accept(upload(6))
    with pytest.raises(UploadRefused, match="round 2 is not open here yet"):
        store.accept(upload(6, round=2))
    store.open_round(2, head=b"head", closes=0.0)
    assert store.accept(upload(6, round=2)) == "accepted"


def test_below_the_minimum_nothing_ever_leaves(place):
    store = opened(place("store"))
    store.accept(upload(0))
    assert close(store) == "void"
    assert everything(store) == []
    assert close(store) == "void"
    with pytest.raises(UploadRefused):
        store.accept(upload(1))
    store.delete_output(1)
    assert everything(store) == []


@pytest.mark.parametrize(("uploads", "pad_to"), [(2, 4), (4, 4), (5, 3)])
def test_slots_are_filled_up_or_cut_to_a_public_number(place, uploads, pad_to):
    store = opened(place("store"), SHAPE._replace(pad_to=pad_to, reports=None))
    for client in range(uploads):
        store.accept(upload(client, slots=2))  # nobody reports the third slot
    with pytest.raises(ValueError, match="messages with its dummies, and needs"):
        close(store)
    with pytest.raises(ValueError, match="dummies must have 8 bytes each"):
        close(store, dummy=lambda slot: b"dummy")
    assert close(store, dummy=lambda slot: bytes([255, slot]) * 4) == "sent"
    batch = everything(store)
    assert collections.Counter(slot for slot, _ in batch) == {0: pad_to, 1: pad_to, 2: pad_to}
    real = sum(sealed[0] != 255 for slot, sealed in batch if slot == 0)
    assert real == min(uploads, pad_to)
    assert sum(sealed[0] != 255 for slot, sealed in batch if slot == 2) == 0


def test_every_slot_leaves_in_an_order_of_its_own(place):
    """All orders of three uploads are equally frequent, and those of two slots independent, at alpha 1e-4 each."""
    store = opened(place("store"), SHAPE._replace(slots=2, reports=2, min_uploads=3), rounds=range(1, 181))
    seen = collections.Counter()
    for number in range(1, 181):
        store.accept_all([upload(client, slots=2, round=number) for client in range(3)])
        close(store, number)
        sent = everything(store, number)
        orders = tuple(tuple(sealed[0] for slot, sealed in sent if slot == which) for which in (0, 1))
        seen[orders] += 1
        store.delete_output(number)
    pairs = list(itertools.product(itertools.permutations(range(3)), repeat=2))
    assert chisquare([seen[pair] for pair in pairs]).pvalue > 1e-4
    kept = [180 if pair == (tuple(range(3)),) * 2 else 0 for pair in pairs]
    assert chisquare(kept).pvalue < 1e-4  # a store that keeps the order is found


def test_after_closing_the_file_does_not_say_who_sent_what(tmp_path):
    store = opened(tmp_path / "store", SHAPE._replace(length=40))
    names = [secrets.token_bytes(32) for _ in range(3)]
    for name in names:
        messages = [(slot, secrets.token_bytes(40)) for slot in range(3)]
        store.accept(Arrival(1, name, secrets.token_bytes(16), messages))
    planted = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert all(name in planted for name in names)  # the test can see what it looks for
    close(store)
    sent = everything(store)
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(name in left for name in names)
    assert all(sealed in left for _, sealed in sent)
    store.delete_output(1)
    left = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert not any(sealed in left for _, sealed in sent)


def test_many_at_once_and_many_times_count_once(place):
    shape = SHAPE._replace(max_uploads=40, min_uploads=1)
    known = [upload(client) for client in range(20)]

    def send(outcomes):
        store = opened(place("store"), shape)
        for one in known:
            outcomes.append(store.accept(one))
        store.close()

    outcomes: list[list[str]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=send, args=(outcome,)) for outcome in outcomes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert collections.Counter(itertools.chain(*outcomes)) == {"accepted": 20, "known": 60}
    store = opened(place("store"), shape)
    close(store)
    assert collections.Counter(sealed[0] for _, sealed in everything(store)) == dict.fromkeys(range(20), 3)


def _work(path, acknowledged, start):
    """Uploads, one after the other; each is told of only after it was accepted."""
    store = opened(path, SHAPE._replace(max_uploads=200))
    start.set()
    for client in range(200):
        store.accept(upload(client, report=bytes([client]) * 16))
        acknowledged.send(client)
    close(store)
    acknowledged.send(-1)


@pytest.mark.parametrize(
    "pause", [pytest.param(0.0, marks=pytest.mark.soak), 0.02, pytest.param(0.1, marks=pytest.mark.soak)]
)
def test_a_kill_at_any_moment_loses_no_acknowledged_upload_and_counts_none_twice(place, pause):
    context = multiprocessing.get_context("spawn")
    start, (reader, writer) = context.Event(), context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(place("store"), writer, start))
    worker.start()
    assert start.wait(60)
    time.sleep(pause)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    writer.close()
    told = set()
    while reader.poll():
        try:
            told.add(reader.recv())
        except EOFError:
            break
    store = opened(place("store"), SHAPE._replace(max_uploads=200, min_uploads=1))
    for client in range(200):  # every client that heard nothing tries again
        if client not in told and store.state(1) == "open":
            store.accept(upload(client, report=bytes([client]) * 16))
    close(store)
    marks = collections.Counter(sealed[0] for _, sealed in everything(store))
    assert set(marks.values()) == {3}
    assert {client for client in told if client >= 0} <= set(marks)


def test_only_users_on_every_roster_count_and_a_frozen_roster_is_final(place):
    store = opened(place("store"))
    reports = [bytes([client]) * 16 for client in range(4)]
    for client, report in enumerate(reports):
        store.accept(upload(client, report=report))
    assert store.roster(1) is None
    assert store.freeze(1) == reports == store.roster(1)
    with pytest.raises(UploadRefused, match="is closed and takes no more uploads"):
        store.accept(upload(4))
    assert close(store, roster={reports[0], reports[2], b"somebody else..."}) == "sent"
    assert {sealed[0] for _, sealed in everything(store)} == {0, 2}
    assert store.num_uploads(1) == 2
    assert store.roster(1) == reports
    other = opened(place("other"))
    other.accept(upload(0, report=reports[0]))
    other.accept(upload(1, report=reports[1]))
    assert close(other, roster={reports[1]}) == "void"  # two came, one is complete
    assert everything(other) == []


def test_after_the_end_of_a_task_nothing_is_left_of_its_rounds(place):
    """Neither of one that is open, nor of one that is frozen, nor of a batch that is on its way; for good."""
    store = opened(place("store"), SHAPE._replace(pad_to=4), rounds=(1, 2, 3))
    for number in (1, 2, 3):
        for client in range(2):
            store.accept(upload(client, round=number))
    close(store, dummy=lambda slot: bytes([255, slot]) * 4)
    store.freeze(2)
    store.add_dummies(2, [(0, b"\xff" * 8)])
    store.end_task("withdrawn")
    store.close()
    store = ShuffleStore(place("store"), SHAPE._replace(pad_to=4))
    for table in ("uploads", "messages", "dummies", "batch"):
        assert store._fetch_rows(f"SELECT * FROM {table}") == [], table
    assert store.pending_rounds() == [] and store.why_ended() == "withdrawn"
    for number in (1, 2, 3):
        assert list(store.parts(number, size=9)) == []
        with pytest.raises(UploadRefused, match="is closed and takes no more uploads"):
            store.accept(upload(3, round=number))
    with pytest.raises(ValueError, match="round 4 stays closed: withdrawn"):
        store.open_round(4, head=b"head", closes=0.0)


def test_dummies_count_reports_on_the_roster_alone(place):
    store = opened(place("store"), SHAPE._replace(pad_to=4))
    for client in range(3):
        store.accept(upload(client, report=bytes([client]) * 16))
    roster = {bytes(16), bytes([1]) * 16}
    close(store, roster=roster, dummy=lambda slot: bytes([255, slot]) * 4)
    marks = collections.Counter(sealed[0] for slot, sealed in everything(store) if slot == 0)
    assert marks == {0: 1, 1: 1, 255: 2}


def test_an_analyzer_that_was_set_back_is_refused(place):
    store = opened(place("store"), rounds=(1, 2))
    store.open_round(2, head=b"head", closes=9.0)  # said again
    with pytest.raises(ValueError, match="the analyzer opens round 2 again under another ledger"):
        store.open_round(2, head=b"another", closes=0.0)
    store = opened(place("store"), rounds=())
    with pytest.raises(ValueError, match="its ledger was restored from an older copy"):
        store.open_round(0, head=b"head", closes=0.0)


def test_one_bad_upload_does_not_spoil_those_written_with_it(place):
    store = opened(place("store"))
    good, bad, last = (upload(client) for client in (0, 1, 2))
    taken = store.accept_all([good, bad._replace(content=[]), good, last])
    assert [taken[0], taken[2], taken[3]] == ["accepted", "known", "accepted"]
    assert isinstance(taken[1], UploadRefused)
    assert store.num_uploads(1) == 2


def test_another_owner_is_refused(place):
    ShuffleStore(place("store"), SHAPE, owner=b"one task").close()
    ShuffleStore(place("store"), SHAPE, owner=b"one task").close()
    with pytest.raises(ValueError, match="is the store of another task or party"):
        ShuffleStore(place("store"), SHAPE._replace(min_uploads=1), owner=b"another")


def test_a_report_id_of_another_client_is_not_known(place):
    store = opened(place("store"))
    first = upload(0)
    store.accept(first)
    with pytest.raises(UploadRefused, match="another client has used this report id"):
        store.accept(upload(1, report=first.report))


def test_dummies_that_were_staged_before_a_kill_are_used(place):
    shape = SHAPE._replace(pad_to=4)
    store = opened(place("store"), shape)
    for client in range(2):
        store.accept(upload(client))
    store.freeze(1)
    store.add_dummies(1, [(0, b"\xff" * 8)])
    assert store.missing_dummies(1) == {0: 1, 1: 2, 2: 2}
    store.close()
    store = ShuffleStore(place("store"), shape)
    assert close(store, dummy=lambda slot: bytes([254, slot]) * 4) == "sent"
    marks = collections.Counter(sealed[0] for slot, sealed in everything(store) if slot == 0)
    assert marks == {0: 1, 1: 1, 255: 1, 254: 1}


def test_the_first_decision_stays(place):
    store = opened(place("store"))
    assert store.agreed_digest(1) is None
    assert store.keep_agreed_digest(1, b"first") == b"first"
    assert store.keep_agreed_digest(1, b"second") == b"first" == store.agreed_digest(1)


def test_a_batch_has_a_name_that_a_copy_of_the_store_does_not_know(tmp_path):
    """Drawn when the round closes, the same ever after; whoever closes a copy from before draws another one."""
    store = opened(tmp_path / "store")
    for client in range(3):
        store.accept(upload(client))
    with pytest.raises(ValueError, match="round 1 is open; it has a batch only after it is closed"):
        store.batch_id(1)
    store.close()
    shutil.copy(tmp_path / "store", tmp_path / "copy")
    names = []
    for path in (tmp_path / "store", tmp_path / "copy"):
        store = ShuffleStore(path, SHAPE)
        close(store)
        names.append(store.batch_id(1))
        assert close(store) == "sent"  # again
        store.close()
        assert ShuffleStore(path, SHAPE).batch_id(1) == names[-1]
    assert [len(name) for name in names] == [BATCH_ID] * 2
    assert names[0] != names[1]


def test_a_store_keeps_a_log_so_that_who_reads_waits_for_no_writer(tmp_path):
    store = opened(tmp_path / "store.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        with store._transaction():
            store._execute("UPDATE rounds SET uploads = 4 WHERE round = 1")
            assert reader.execute("SELECT uploads FROM rounds").fetchall() == [(0,)]
    store.close()
