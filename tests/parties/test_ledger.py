"""The ledger: nothing is released that was not reserved, nothing is forgotten, nothing is changed unnoticed."""

from __future__ import annotations

import hashlib
import math
import multiprocessing
import os
import shutil
import signal
import sqlite3
import time

import pytest

from dovetail.parties.common.ledger import Ledger, Overspent

TASK = hashlib.sha256(b"task").digest()
MODEL = [hashlib.sha256(bytes([i])).digest() for i in range(50)]


def opened(path, **changed):
    return Ledger(path, **{"task_id": TASK, "eps": 1.0, "delta": 1e-5, **changed})


def test_what_is_reserved_is_spent_and_stays_so(place):
    ledger = opened(place("ledger"))
    assert ledger.total == (0.0, 0.0)
    ledger.reserve(1, eps=0.4, delta=1e-6)
    assert ledger.total == (0.4, 1e-6)
    assert ledger.last_release is None
    ledger.release(1, model=MODEL[1])
    ledger.reserve(3, eps=0.9, delta=1e-5)
    ledger.close()
    again = opened(place("ledger"))
    assert again.total == (0.9, 1e-5)
    assert again.last_release.round == 1
    assert [entry.kind for entry in again.entries] == ["open", "reserve", "release", "reserve"]


def test_a_round_that_does_not_fit_is_not_reserved(place):
    ledger = opened(place("ledger"))
    ledger.reserve(1, eps=0.9, delta=1e-6)
    before = ledger.head
    for wrong in ({"eps": 1.01, "delta": 1e-6}, {"eps": 0.95, "delta": 2e-5}):
        with pytest.raises(Overspent, match="above its budget of"):
            ledger.reserve(2, **wrong)
    assert ledger.head == before
    assert ledger.total == (0.9, 1e-6)


def test_saying_the_same_again_changes_nothing(place):
    ledger = opened(place("ledger"))
    ledger.reserve(1, eps=0.5, delta=1e-6)
    ledger.reserve(1, eps=0.5, delta=1e-6)
    first = ledger.release(1, model=MODEL[1])
    ledger.reserve(2, eps=0.6, delta=1e-6)
    assert ledger.release(1, model=MODEL[1]) == first
    assert len(ledger.entries) == 4


@pytest.mark.parametrize(
    ("do", "sentence"),
    [
        (
            lambda ledger: ledger.reserve(1, eps=0.6, delta=1e-6),
            "round 1 was reserved at .0.5, 1e-06., and is now said to cost .0.6, 1e-06.",
        ),
        (lambda ledger: ledger.reserve(2, eps=0.4, delta=1e-6), "expected at least what is spent"),
        (lambda ledger: ledger.reserve(0, eps=0.9, delta=1e-6), "expected round >= 1"),
        (lambda ledger: ledger.release(2, model=MODEL[2]), "round 2 was not reserved"),
        (lambda ledger: ledger.release(1, model=MODEL[2]), "round 1 has released another model"),
        (lambda ledger: ledger.release(1, model=b"short"), "expected a model's SHA-256 of 32 bytes"),
        (lambda ledger: ledger.reserve(2, eps=float("nan"), delta=0.0), "expected eps"),
    ],
)
def test_what_does_not_follow_is_refused(place, do, sentence):
    ledger = opened(place("ledger"))
    ledger.reserve(1, eps=0.5, delta=1e-6)
    ledger.release(1, model=MODEL[1])
    before = ledger.entries
    with pytest.raises(ValueError, match=sentence):
        do(ledger)
    assert ledger.entries == before


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"eps": -0.1}, "expected eps >= 0"),
        ({"eps": math.nan}, "expected eps >= 0"),
        ({"delta": -1e-7}, "expected delta >= 0"),
        ({"delta": math.nan}, "delta"),
        ({"round": 0}, "expected round >= 1"),
        ({"round": 1.5}, "expected round to be a whole number"),
    ],
)
def test_what_is_no_cost_is_refused(place, changed, sentence):
    """No comparison with what was spent would tell that a number is none."""
    ledger = opened(place("ledger"))
    asked = {"round": 1, "eps": 0.1, "delta": 1e-7, **changed}
    with pytest.raises(ValueError, match=sentence):
        ledger.reserve(asked["round"], eps=asked["eps"], delta=asked["delta"])
    assert ledger.total == (0.0, 0.0)
    ledger.reserve(1, eps=0.0, delta=0.0)  # a round may cost nothing
    assert ledger.reserved_rounds == [1]


@pytest.mark.parametrize("changed", [{"task_id": bytes(32)}, {"eps": 2.0}, {"delta": 1e-4}])
def test_another_task_or_budget_is_refused(place, changed):
    opened(place("ledger")).close()
    with pytest.raises(ValueError, match=r"is that of task .* with a budget of"):
        opened(place("ledger"), **changed)


@pytest.mark.parametrize(
    "tampering",
    [
        "UPDATE entries SET body = CAST(replace(CAST(body AS TEXT), '0.5', '0.1') AS BLOB) WHERE number = 1",
        "UPDATE entries SET body = replace(CAST(body AS TEXT), '0.5', '0.1') WHERE number = 1",  # no longer bytes
        "DELETE FROM entries WHERE number = 1",
        "UPDATE entries SET number = number + 10 WHERE number = 3",
        "INSERT INTO entries SELECT 9, body, hash FROM entries WHERE number = 1",
    ],
)
def test_a_changed_entry_is_found(tmp_path, tampering):
    ledger = opened(tmp_path / "ledger")
    ledger.reserve(1, eps=0.5, delta=1e-6)
    ledger.release(1, model=MODEL[1])
    ledger.reserve(2, eps=0.7, delta=1e-6)
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger") as database:
        assert database.execute(tampering).rowcount > 0
    with pytest.raises(ValueError, match="was changed at entry"):
        opened(tmp_path / "ledger")


def test_a_changed_entry_with_a_hash_that_fits_breaks_the_chain_after_it(tmp_path):
    ledger = opened(tmp_path / "ledger")
    ledger.reserve(1, eps=0.5, delta=1e-6)
    ledger.release(1, model=MODEL[1])
    ledger.close()
    with sqlite3.connect(tmp_path / "ledger") as database:
        (before,), (body,) = (
            database.execute(f"SELECT {what} FROM entries WHERE number = {number}").fetchone()
            for what, number in (("hash", 0), ("body", 1))
        )
        changed = body.replace(b"0.5", b"0.1")
        assert changed != body
        fits = hashlib.sha256(before + changed).digest()
        database.execute("UPDATE entries SET body = ?, hash = ? WHERE number = 1", (changed, fits))
    with pytest.raises(ValueError, match=r"the ledger in .* was changed at entry 2"):
        opened(tmp_path / "ledger")


def test_an_older_copy_of_ledger_or_checkpoint_does_not_fit(tmp_path):
    ledger = opened(tmp_path / "ledger")
    ledger.reserve(1, eps=0.5, delta=1e-6)
    old = {"model": MODEL[1], "head": ledger.release(1, model=MODEL[1])}
    ledger.check(**old)
    ledger.close()
    shutil.copy(tmp_path / "ledger", tmp_path / "copy")
    ledger = opened(tmp_path / "ledger")
    ledger.reserve(2, eps=0.6, delta=1e-6)
    new = {"model": MODEL[2], "head": ledger.release(2, model=MODEL[2])}
    ledger.check(**new)
    with pytest.raises(ValueError, match="the checkpoint is not of the last model"):
        ledger.check(**old)
    with pytest.raises(ValueError, match="the checkpoint is not of the last model"):
        opened(tmp_path / "copy").check(**new)


def test_a_kill_at_any_moment_leaves_a_ledger_that_goes_on(place):
    context, path = multiprocessing.get_context("spawn"), place("ledger")
    for pause in (0.0, 0.002, 0.01):
        started = context.Event()
        worker = context.Process(target=_resume, args=(path, started))
        worker.start()
        assert started.wait(60)
        time.sleep(pause)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        ledger = opened(path)
        rounds = [entry.round for entry in ledger.entries if entry.kind == "reserve"]
        assert rounds == sorted(set(rounds))
        assert all(
            any(item.kind == "reserve" and item.round == entry.round for item in ledger.entries)
            for entry in ledger.entries
            if entry.kind == "release"
        )
        ledger.close()


def _resume(path, started):
    ledger = opened(path)
    started.set()
    first = max(entry.round for entry in ledger.entries) + 1
    for number in range(first, 50):
        ledger.reserve(number, eps=number / 50, delta=1e-6)
        ledger.release(number, model=MODEL[number])


def test_a_bound_that_another_machine_rounds_otherwise_is_the_one_that_was_reserved(place):
    """One unit in the last place stopped an analyzer that was restarted elsewhere."""
    ledger = opened(place("ledger"))
    first = ledger.reserve(1, eps=0.5, delta=1e-6)
    before = ledger.entries
    for eps in (math.nextafter(0.5, 1), math.nextafter(0.5, 0)):
        assert ledger.reserve(1, eps=eps, delta=1e-6) == first
    assert ledger.entries == before
    assert ledger.total == (0.5, 1e-6)
