"""Shares in segments: on disk before they are taken, read by all, overwritten when their round closes."""

import os

import numpy as np
import pytest
from parties.sharing import Sharing

from dovetail.parties.aggregator import store as store_module
from dovetail.parties.aggregator.segments import Segments
from dovetail.parties.common.wire import REPORT_ID
from dovetail.parties.intermediary.store import Arrival


@pytest.fixture(autouse=True)
def all_in_segments(monkeypatch):
    monkeypatch.setattr(store_module, "_SMALL", -1)


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def arrivals(sharing, count, round=1):
    """Shares for the second aggregator."""
    values = np.zeros(sharing.task.dim, np.int64)
    shares = [sharing.task.sharing().shard(values, nonce=bytes(16))[1] for _ in range(count)]
    return [Arrival(round, bytes([user + 1]), os.urandom(REPORT_ID), share) for user, share in enumerate(shares)]


def test_what_is_appended_is_found_again_by_others_and_overwritten_when_it_goes(tmp_path):
    one, other = Segments(tmp_path / "a"), Segments(tmp_path / "a")
    contents = [os.urandom(size) for size in (1, 0, 30_000)] + [bytes([i % 256]) * 7 for i in range(600)]
    places = one.append(3, contents) + other.append(3, [b"others"])
    assert list(other.read(3, places)) == [*contents, b"others"]
    assert one.append(3, [b"more"])[0].at == sum(map(len, contents))
    assert one.append(4, [b"next"])[0].at == 0
    assert one.rounds() == [3, 4] == other.rounds()
    held = [path.open("rb") for path in files(tmp_path / "a" / "3")]
    one.drop(3)
    other.drop(3)
    assert [set(file.read()) for file in held] == [{0}, {0}]
    assert other.rounds() == [4] and len(files(tmp_path)) == 1
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files(tmp_path))


def test_a_write_that_fails_half_way_spoils_nothing(tmp_path, monkeypatch):
    segments = Segments(tmp_path)
    first = segments.append(1, [b"first"])
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda file: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            segments.append(1, [b"lost"])
    second = segments.append(1, [b"second"])
    assert second[0].segment != first[0].segment
    assert list(segments.read(1, first + second)) == [b"first", b"second"]
    with pytest.raises(ValueError, match="of the 99 bytes of an upload at 0"):
        list(segments.read(1, [first[0]._replace(size=99)]))


def test_contents_are_on_disk_before_their_places_are(tmp_path, monkeypatch):
    sharing = Sharing(tmp_path)
    store, steps = sharing.aggregator(1).store, []
    store.open_round(1, head=b"", closes=0.0)
    sync, insert = os.fdatasync, store._database.insert_rows
    monkeypatch.setattr(os, "fdatasync", lambda file: (steps.append("on disk"), sync(file)))
    monkeypatch.setattr(store._database, "insert_rows", lambda name, rows: (steps.append(name), insert(name, rows)))
    assert store.accept_all(arrivals(sharing, 3)) == ["accepted"] * 3
    assert steps == ["uploads", "on disk", "places"]
    assert store._fetch_rows("SELECT * FROM shares") == []


def test_an_upload_whose_transaction_fails_is_taken_when_it_comes_again(tmp_path, monkeypatch):
    sharing = Sharing(tmp_path)
    store, sent = sharing.aggregator(1).store, arrivals(sharing, 2)
    store.open_round(1, head=b"", closes=0.0)
    with monkeypatch.context() as broken:
        broken.setattr(store._database, "insert_rows", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.accept_all(sent)
    assert store.accept_all(sent) == ["accepted"] * 2 and store.accept_all(sent) == ["known"] * 2
    assert dict(store._stored_contents(1, [one.report for one in sent])) == {one.report: one.content for one in sent}


def test_segments_of_a_closed_round_are_swept_by_whoever_comes_next(tmp_path, monkeypatch):
    """Who closed the round died before it came to it; another round stays."""
    sharing = Sharing(tmp_path)
    party = sharing.aggregator(1)
    sent = {round: arrivals(sharing, 4, round) for round in (1, 2)}
    for round, uploads in sent.items():
        party.store.open_round(round, head=b"", closes=0.0)
        party.store.accept_all(uploads)
    roster = party.store.freeze(1)
    with monkeypatch.context() as killed:
        killed.setattr(party.store, "_drop_closed_segments", lambda: None)
        assert party.store.close_round(1, roster=roster) == "sent"
    segments = tmp_path / "aggregator-1" / "segments"
    assert len(files(segments)) == 2
    party.close()
    reborn = sharing.aggregator(1).store
    assert [path.parent.name for path in files(segments)] == ["2"]
    assert len(dict(reborn._stored_contents(2, [one.report for one in sent[2]]))) == 4


def test_a_replica_without_the_folder_says_so(tmp_path):
    sharing = Sharing(tmp_path)
    store = sharing.aggregator(1).store
    store.open_round(1, head=b"", closes=0.0)
    store.accept_all(arrivals(sharing, 4))
    store._segments = None
    with pytest.raises(ValueError, match="start every replica with the same --segments"):
        store.close_round(1, roster=store.freeze(1))


def test_zeros_are_on_disk_before_the_file_goes(tmp_path, monkeypatch):
    segments, done = Segments(tmp_path), []
    segments.append(1, [b"a share"])
    segments.close()
    sync, unlink = os.fdatasync, os.unlink

    def synced(file):
        done.append(("sync", os.pread(file, 99, 0)))
        sync(file)

    def removed(path, **how):
        done.append(("unlink", None))
        unlink(path, **how)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "unlink", removed)
    segments.drop(1)
    assert done == [("sync", bytes(7)), ("unlink", None)]


def test_what_a_symbolic_link_leads_to_is_neither_erased_nor_read_nor_written(tmp_path, caplog):
    """A link among the segments once had the file behind it overwritten with zeros."""
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"precious")
    segments = Segments(tmp_path / "segments")
    (place,) = segments.append(1, [b"a share"])
    (tmp_path / "segments" / "1" / "link").symlink_to(tmp_path / "precious")
    (tmp_path / "segments" / "1" / "folder").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "segments" / "1" / "pipe")  # opening it would wait for ever
    (tmp_path / "segments" / "2").symlink_to(tmp_path / "elsewhere")
    for round in (1, 2):
        segments.drop(round)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (tmp_path / "elsewhere" / "precious").read_bytes() == b"precious"
    assert list((tmp_path / "segments").iterdir()) == [] and "what it points to was left alone" in caplog.text
    (tmp_path / "segments" / "3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"is a file or a symbolic link; segments need a folder there"):
        segments.append(3, [b"a share"])
    (tmp_path / "segments" / "4").mkdir()
    (tmp_path / "segments" / "4" / place.segment.hex()).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        list(segments.read(4, [place]))
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


def test_a_link_that_takes_the_place_of_a_segment_while_it_is_erased_is_not_followed(tmp_path, monkeypatch):
    (tmp_path / "precious").write_bytes(b"precious")
    segments, look = Segments(tmp_path / "segments"), os.stat
    segments.append(1, [b"a share"])
    (file,) = files(tmp_path / "segments")

    def swapped(name, **how):
        found = look(name, **how)
        if name == file.name and not file.is_symlink():
            file.unlink()
            file.symlink_to(tmp_path / "precious")
        return found

    monkeypatch.setattr(os, "stat", swapped)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        segments.drop(1)
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_what_is_no_number_is_no_round(tmp_path):
    for name in ("1", "²", "٣", "x"):
        (tmp_path / name).mkdir()
    assert Segments(tmp_path).rounds() == [1]
