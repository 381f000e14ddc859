"""Exactly once: every report counts once or not at all, whoever is killed when, and what is released was paid for."""

from __future__ import annotations

import sqlite3
import sys
import time

import numpy as np
import pytest
from parties.every_step import World, envelopes
from parties.killing import Killing
from parties.mortal_users import Populated
from parties.unique_buckets import ONE_SHUFFLER, ORACLES, THREE_AGGREGATORS, THREE_SHUFFLERS, TWO_AGGREGATORS, VERIFIED

from dovetail.parties.common.keys import KeyPair


def dying_once(tmp_path, monkeypatch, oracle, *, users, rounds, among=lambda party, statement: True):
    """Train again and again; every time a party dies in another moment. How many moments that were."""
    keys = [KeyPair.generate("sign") for _ in range(users)]
    deployment = oracle.deployment(tmp_path / "deployment", keys, rounds=rounds, round_seconds=600.0)
    made = envelopes(deployment, oracle, tmp_path / "users", keys)

    def moments(fatal):
        world = World(tmp_path / f"world-{fatal}", deployment, oracle, fatal=fatal)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", world.connect)
            marks = world.run(made, users)
        assert np.array_equal(marks, np.ones((rounds, users))), (fatal, world.moments[fatal or 0])
        assert len(world.told) >= rounds * users * oracle.services - 1  # an answer died with who owed it
        assert world.deaths == (fatal is not None)
        return world.moments

    chosen = [number for number, moment in enumerate(moments(None)) if among(*moment)]
    for fatal in chosen:
        moments(fatal)
    return len(chosen)


def test_whoever_dies_at_whichever_step_every_report_counts_once(tmp_path, monkeypatch):
    assert dying_once(tmp_path, monkeypatch, ONE_SHUFFLER, users=2, rounds=1) > 30


def test_whichever_aggregator_dies_at_whichever_step_every_share_counts_once(tmp_path, monkeypatch):
    """Open, accept, freeze, agree, close, send, acknowledge; and the analyzer that takes it. Shares are in segments."""
    monkeypatch.setattr("dovetail.parties.aggregator.store._SMALL", -1)
    among = after_commits_of("analyzer", "aggregator-0", "aggregator-1")
    assert dying_once(tmp_path, monkeypatch, TWO_AGGREGATORS, users=2, rounds=1, among=among) > 25


def test_whichever_verifier_dies_at_whichever_step_every_proof_is_answered_once(tmp_path, monkeypatch):
    """Beside the above: draw a part of the key, pin the key, answer, judge."""
    among = after_commits_of("aggregator-1")
    assert dying_once(tmp_path, monkeypatch, VERIFIED, users=2, rounds=1, among=among) > 10


@pytest.mark.soak
@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_whoever_dies_at_whichever_step_in_a_longer_training(tmp_path, monkeypatch, oracle):
    assert dying_once(tmp_path, monkeypatch, oracle, users=4, rounds=3) > 100


def in_a_hurry(tmp_path, monkeypatch, oracle, *, rounds, among=lambda party, statement: True):
    """As `dying_once`, but rounds close as soon as somebody reported: who dies makes users miss them."""
    users, halfway = 4, 0
    keys = [KeyPair.generate("sign") for _ in range(users)]
    deployment = oracle.deployment(tmp_path / "deployment", keys, rounds=rounds, round_seconds=1e-3)
    made = envelopes(deployment, oracle, tmp_path / "users", keys)
    missed, services = 0, range(oracle.services)

    def moments(fatal):
        nonlocal missed
        world = World(tmp_path / f"world-{fatal}", deployment, oracle, fatal=fatal, halfway=halfway, slow=3)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", world.connect)
            marks = world.run(made, users)
        for number, found in enumerate(marks, start=1):
            complete = [user for user in range(users) if all((number, user, one) in world.told for one in services)]
            assert set(found) <= {0, 1} and not found[halfway]
            assert not found.any() or found[complete].all(), (fatal, found, complete)
            assert found.any() or len(complete) < 2, (fatal, complete)
            missed += found.sum() < users - 1
        return world.moments

    chosen = [number for number, moment in enumerate(moments(None)) if among(*moment)]
    assert missed == 0
    for fatal in chosen:
        moments(fatal)
    assert missed > 0  # or it was no hurry
    return len(chosen)


def after_commits_of(*parties):
    """Before a commit files are as after the one before it."""
    return lambda party, statement: party in parties and statement == "after COMMIT"


def test_shares_count_together_or_not_at_all_whoever_dies(tmp_path, monkeypatch):
    among = after_commits_of("analyzer", "shuffler-1")
    assert in_a_hurry(tmp_path, monkeypatch, THREE_SHUFFLERS, rounds=1, among=among) > 15


def test_sums_are_of_users_that_count_at_all_aggregators_whoever_dies(tmp_path, monkeypatch):
    among = after_commits_of("aggregator-1")
    assert in_a_hurry(tmp_path, monkeypatch, THREE_AGGREGATORS, rounds=1, among=among) > 7


@pytest.mark.soak
@pytest.mark.parametrize("oracle", [THREE_SHUFFLERS, THREE_AGGREGATORS], ids=["shufflers", "aggregators"])
def test_shares_count_together_or_not_at_all_whoever_dies_when(tmp_path, monkeypatch, oracle):
    assert in_a_hurry(tmp_path, monkeypatch, oracle, rounds=2) > 100


def users_dying_once(tmp_path, monkeypatch, oracle, *, rounds, among):
    """As `dying_once`, but those who die are users; the moments in which a death made a user miss a round."""
    keys = [KeyPair.generate("sign") for _ in range(4)]
    deployment = oracle.deployment(tmp_path / "deployment", keys, rounds=rounds, round_seconds=1e-3)
    missed = []

    def moments(fatal):
        world = Populated(tmp_path / f"world-{fatal}", deployment, oracle, fatal=fatal, keys=keys)
        with monkeypatch.context() as patch, world.at_work(patch):
            patch.setattr(sqlite3, "connect", world.connect)
            marks = world.run(None, len(keys))
        died = world.moments[fatal] if fatal is not None else None
        assert world.deaths == (died is not None)
        told = {(number, user) for number, user, _ in world.told}
        assert marks.max() == 1 and {(number + 1, user) for number, user in np.argwhere(marks).tolist()} == told, died
        for user in range(len(keys)):
            assert world.spent(user) == list(range(1, rounds + 1)), died  # once each, whoever died over it
        assert all(len(ids) == 1 for ids in world.reports.values()), died  # never randomized twice
        if marks.sum() < marks.size:
            assert marks.sum() == marks.size - 1
            missed.append(died[1])
        return world.moments

    chosen = [number for number, moment in enumerate(moments(None)) if among(*moment)]
    assert not missed
    for fatal in chosen:
        moments(fatal)
    return len(chosen), missed


def test_a_user_that_dies_at_whichever_step_counts_once_or_has_spent_the_round_in_vain(tmp_path, monkeypatch):
    """Between the ledger and the envelope there is nothing to send again, and nothing is randomized again."""

    def among(party, statement):
        return party == "user-1" and (statement == "after COMMIT" or not statement.endswith(("COMMIT", "INSERT")))

    count, missed = users_dying_once(tmp_path, monkeypatch, TWO_AGGREGATORS, rounds=1, among=among)
    assert count > 12
    assert missed == [
        "after COMMIT",
        "before writing witness",
        "after writing witness",
        "before writing last-report",
        "after writing last-report",
        "before writing envelope",
    ]


@pytest.mark.soak
@pytest.mark.parametrize("oracle", ORACLES.values(), ids=ORACLES)
def test_whichever_user_dies_at_whichever_step_in_a_longer_training(tmp_path, monkeypatch, oracle):
    def among(party, statement):
        return party in ("user-0", "user-2")

    count, missed = users_dying_once(tmp_path, monkeypatch, oracle, rounds=2, among=among)
    assert count >= 60 and len(missed) >= 4 * 4  # sixty with one shuffler, more with others


@pytest.mark.soak  # above, everyone dies at every step within one process, and test_store.py kills a real one
def test_kills_replays_and_hang_ups_count_nothing_twice_and_lose_nothing(tmp_path):
    killing = Killing(tmp_path / "fleet", "one shuffler", users=4, round_seconds=20.0, seed=1)
    targets = [
        ("shuffler-0", "upload accepted"),
        ("analyzer", "part counted"),
        ("shuffler-0", "batch shuffled"),
    ]
    killing.run(targets)
    assert killing.found().released >= 2
    assert sum(killing.promises.refused.values()) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("oracle", "kills", "processes"),
    [("one shuffler", 40, 0), ("three shufflers", 60, 0), ("two aggregators", 100, 2), ("three aggregators", 60, 2)],
)
def test_a_hundred_kills(tmp_path, oracle, kills, processes, capsys):
    """Of services at every step, and of half of the users where these have processes."""
    killing = Killing(tmp_path / "fleet", oracle, users=16, processes=processes, round_seconds=15.0, seed=2)
    began = time.monotonic()
    killing.run(killing.targets(kills), at_once=3)
    found = killing.found()
    lines = [
        f"{oracle}: {kills} kills, {found.released} rounds with {found.reports} reports in "
        f"{time.monotonic() - began:.0f} s: {found.lost} lost, {found.doubled} doubled, {found.overspent} overspent; "
        f"{found.in_vain} rounds paid for and not reported in"
    ]
    for what, counts in (("aimed at", killing.aimed), ("hit in", killing.hit)):
        lines += [f"  {count} {what}: {party}, {step}" for (party, step), count in sorted(counts.items())]
    lines += [f"  turned away {count} times: {what}" for what, count in killing.promises.refused.items()]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert (found.lost, found.doubled, found.overspent, found.unaccounted) == (0, 0, 0, 0)
    assert set(killing.aimed) == set(killing.every) and sum(killing.aimed.values()) == kills
    assert found.released >= 2
