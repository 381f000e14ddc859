"""Exactly once: every report counts once or not at all, whoever is killed when, and what is released was paid for."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import signal
import sqlite3
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from parties.every_step import World, envelopes
from parties.unique_buckets import COUNTERS, ONE_SHUFFLER, THREE_SHUFFLERS, Auditor, counter, kind_of, landed
from parties.unruly_users import Promises, crowd

from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.links import Rejected, Unreachable
from dovetail.parties.common.policy import Refused
from dovetail.parties.common.wire import RoundStatus
from dovetail.parties.fleet import Fleet, lenient_policy
from dovetail.parties.user.client import Client, take_part


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
        assert len(world.told) >= rounds * users * oracle.shufflers - 1  # an answer died with who owed it
        assert world.deaths == (fatal is not None)
        return world.moments

    chosen = [number for number, moment in enumerate(moments(None)) if among(*moment)]
    for fatal in chosen:
        moments(fatal)
    return len(chosen)


def test_whoever_dies_at_whichever_step_every_report_counts_once(tmp_path, monkeypatch):
    assert dying_once(tmp_path, monkeypatch, ONE_SHUFFLER, users=2, rounds=2) > 60


@pytest.mark.soak
@pytest.mark.parametrize("oracle", [ONE_SHUFFLER, THREE_SHUFFLERS], ids=["one shuffler", "three shufflers"])
def test_whoever_dies_at_whichever_step_in_a_longer_training(tmp_path, monkeypatch, oracle):
    assert dying_once(tmp_path, monkeypatch, oracle, users=4, rounds=3) > 100


def in_a_hurry(tmp_path, monkeypatch, *, rounds, among=lambda party, statement: True):
    """As `dying_once`, but rounds close as soon as somebody reported: who dies makes users miss them."""
    users, halfway = 4, 0
    keys = [KeyPair.generate("sign") for _ in range(users)]
    deployment = THREE_SHUFFLERS.deployment(tmp_path / "deployment", keys, rounds=rounds, round_seconds=1e-3)
    made = envelopes(deployment, THREE_SHUFFLERS, tmp_path / "users", keys)
    missed = 0

    def moments(fatal):
        nonlocal missed
        world = World(tmp_path / f"world-{fatal}", deployment, THREE_SHUFFLERS, fatal=fatal, halfway=halfway, slow=3)
        with monkeypatch.context() as patch:
            patch.setattr(sqlite3, "connect", world.connect)
            marks = world.run(made, users)
        for number, found in enumerate(marks, start=1):
            complete = [user for user in range(users) if all((number, user, one) in world.told for one in range(3))]
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


def test_shares_count_together_or_not_at_all_whoever_dies(tmp_path, monkeypatch):
    def among(party, statement):  # before a commit files are as after the one before it
        return party in ("analyzer", "shuffler-1") and statement == "after COMMIT"

    assert in_a_hurry(tmp_path, monkeypatch, rounds=1, among=among) > 15


@pytest.mark.soak
def test_shares_count_together_or_not_at_all_whoever_dies_when(tmp_path, monkeypatch):
    assert in_a_hurry(tmp_path, monkeypatch, rounds=2) > 100


class Killing:
    """A fleet whose services are killed, users that misbehave, and an auditor who looks all the time."""

    def __init__(self, folder, oracle, *, users, round_seconds, seed):
        self.oracle, self._random = oracle, random.Random(seed)
        keys = [KeyPair.generate("sign") for _ in range(users)]
        self.deployment = oracle.deployment(folder, keys, rounds=10_000, round_seconds=round_seconds)
        self.fleet = Fleet(self.deployment)
        self.promises = Promises()
        self.auditor = Auditor(folder / "analyzer" / "ledger.db", finite=oracle.eps_round is not None)
        self.aimed, self.hit = collections.Counter(), collections.Counter()
        self._keys, self._ended, self._broken = keys, threading.Event(), []
        self.parties = ["analyzer", *(f"shuffler-{i}" for i in range(oracle.shufflers))]

    def run(self, targets):
        """Kill a party after each of these transitions; then let the fleet go on for a round."""
        with self.fleet:
            for party in self.parties:
                self.start(party)
            users, stop = crowd(self.deployment, self.oracle, self._keys, self.promises)
            auditing = threading.Thread(target=self.audit)
            auditing.start()
            try:
                for party, transition in targets:
                    self.kill(party, transition)
                enough = max(2, len(self.auditor.released) + 1)
                self.wait(lambda: len(self.auditor.released) >= enough, "another model")
            finally:
                stop.set()
                self._ended.set()
                auditing.join()
                for user in users:
                    user.join(60)
        assert self._broken + self.promises.broken == []

    def targets(self, count):
        """So many transitions: every one of every party, again and again, in an order without pattern."""
        every = [(party, one) for party in self.parties for one in COUNTERS[kind_of(party)]]
        while count > 0:
            yield from self._random.sample(every, min(count, len(every)))
            count -= len(every)

    def start(self, party):
        if party == "analyzer":
            self.fleet.start_analyzer()
        else:
            self.fleet.start_shuffler(int(party.rpartition("-")[2]))

    def kill(self, party, transition):
        """After the next transition of its kind, at once or a little later."""
        count = counter(self.deployment, party, transition)
        so_far = self.wait(lambda: count() + 1, f"files of {party}") - 1
        goal = so_far + (self._random.randint(1, self.deployment.clients) if transition == "upload accepted" else 1)
        self.wait(lambda: count() >= goal, f"{party}: {transition}", pause=0.005)
        time.sleep(self._random.choice([0.0, self._random.uniform(0, 0.03), self._random.uniform(0, 0.3)]))
        process = self.fleet.processes[party]
        assert process.poll() is None, f"{party} ended by itself with {process.returncode}"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.aimed[party, transition] += 1
        self.hit[party, landed(self.deployment, party)] += 1
        self.start(party)

    def wait(self, reached, what, *, pause=0.05, seconds=180.0):
        end = time.monotonic() + seconds
        while not (found := reached()):
            assert self._broken + self.promises.broken == []
            assert time.monotonic() < end, f"expected {what} in {seconds} seconds, got nothing"
            time.sleep(pause)
        return found

    def audit(self):
        """Every model as soon as it can be had, and the ledger beside it."""
        link, number = self.fleet.analyzer(), 0
        try:
            while not self._ended.is_set():
                try:
                    self.auditor.look()
                    self.auditor.see(number, link.model(number))
                    number += 1
                except (Unreachable, Rejected, sqlite3.OperationalError):
                    time.sleep(0.1)
        except Exception as error:
            self._broken.append(repr(error))

    def check(self):
        """Bucket by bucket; rounds that were released, and reports in them."""
        models, released, reports = self.auditor.models, self.auditor.released, 0
        for number in sorted(models)[1:]:
            marks = self.oracle.marks(models[number - 1], models[number])
            assert set(marks) <= {0, 1}, (number, marks)
            if number in released:
                found = set(np.flatnonzero(marks).tolist())
                assert self.promises.complete(number, self.oracle.shufflers) <= found, number
                assert all((number, user) in self.promises.sent for user in found), number
                assert len(found) >= 2
            reports += int(marks.sum())
        return len(released), reports


def test_kills_replays_and_hang_ups_count_nothing_twice_and_lose_nothing(tmp_path):
    killing = Killing(tmp_path / "fleet", ONE_SHUFFLER, users=4, round_seconds=20.0, seed=1)
    targets = [
        ("shuffler-0", "upload accepted"),
        ("analyzer", "part counted"),
        ("shuffler-0", "batch shuffled"),
    ]
    killing.run(targets)
    released, reports = killing.check()
    assert released >= 2 and reports >= 2 * released
    assert sum(killing.promises.refused.values()) > 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("oracle", "kills"), [(ONE_SHUFFLER, 40), (THREE_SHUFFLERS, 60)], ids=["one shuffler", "three shufflers"]
)
def test_a_hundred_kills(tmp_path, oracle, kills, capsys):
    killing = Killing(tmp_path / "fleet", oracle, users=16, round_seconds=15.0, seed=2)
    began = time.monotonic()
    killing.run(killing.targets(kills))
    released, reports = killing.check()
    lines = [f"{kills} kills, {released} rounds with {reports} reports, {time.monotonic() - began:.0f} s"]
    for what, counts in (("aimed at", killing.aimed), ("hit in", killing.hit)):
        lines += [f"  {count} {what}: {party}, {step}" for (party, step), count in sorted(counts.items())]
    lines += [f"  turned away {count} times: {what}" for what, count in killing.promises.refused.items()]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert set(killing.aimed) == {(party, one) for party in killing.parties for one in COUNTERS[kind_of(party)]}
    assert released >= 2


class Runner:
    """A shuffler as a user sees it, by a script: the round that it tells of, None for silence, negative when over."""

    url, ends_after = "runner", None

    def __init__(self, deployment, rounds):
        self._ground, self._script, self._round, self.got = deployment, list(rounds), 0, []

    def task(self):
        return self._ground.signed

    def status(self):
        said = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if said is None:
            raise Unreachable("silence")
        self._round = abs(said)
        return RoundStatus(task_id=self._ground.task.task_id, round=self._round, over=said < 0, head=bytes(32))

    def model(self, round, *, dim):
        return np.zeros(dim, np.float32)

    def upload(self, round, upload):
        if round > self._round:
            self.status()
            raise Unreachable("too early")
        self.got.append((round, upload.report))
        if len(self.got) == self.ends_after:
            self._script = [-self._round]


@pytest.mark.parametrize(
    ("scripts", "interrupted", "reported"),
    [
        ([[None, 1, -1], [0, 0, 1], [1]], False, {1}),  # some are silent, one hears of the round late
        ([[1, 1, 2, -2], [2], [2]], True, {2}),  # a user that comes back to a round that it has spent
    ],
    ids=["late", "interrupted"],
)
def test_a_user_waits_for_shufflers_and_for_the_next_round(tmp_path, scripts, interrupted, reported):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = THREE_SHUFFLERS.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0])
    update = THREE_SHUFFLERS.update(0, 2)
    if interrupted:
        client.sent(client.report(deployment.signed, 1, update))
    desks = [Runner(deployment, script) for script in scripts]
    assert take_part(client, desks, lambda model: update, patience=5.0) == len(reported)
    assert [{round for round, _ in runner.got} for runner in desks] == [reported] * 3
    assert len({one for runner in desks for one in runner.got}) == len(reported)


def test_a_user_whose_epoch_is_not_over_trains_once_and_sends_again_what_it_has(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    policy = msgspec.structs.replace(lenient_policy(deployment.signed), epoch_seconds=1.0)
    client = Client(tmp_path / "user", policy=policy, key=keys[0])
    update, trained = ONE_SHUFFLER.update(0, 2), []
    first = client.report(deployment.signed, 1, update)  # and then it was interrupted
    runner = Runner(deployment, [1, *[2] * 20, -2])
    runner.ends_after = 2
    assert take_part(client, [runner], lambda model: trained.append(model) or update, patience=5.0) == 2
    assert runner.got[0] == (1, first.uploads[0].report)
    assert len(trained) == 2  # once per round, however often it was told to wait


def test_a_user_whose_key_has_expired_spends_nothing(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = ONE_SHUFFLER.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    expired = dataclasses.replace(keys[0], public=msgspec.structs.replace(keys[0].public, expires=1))
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=expired)
    with pytest.raises(Refused, match="expected a key of this user that has not expired"):
        take_part(client, [Runner(deployment, [1])], lambda model: ONE_SHUFFLER.update(0, 2), patience=0.3)
    assert not list((tmp_path / "user" / "spending").glob("task-*"))


def test_a_user_loses_patience_with_a_shuffler_that_never_hears_of_the_round(tmp_path):
    keys = [KeyPair.generate("sign") for _ in range(2)]
    deployment = THREE_SHUFFLERS.deployment(tmp_path / "deployment", keys, rounds=2, round_seconds=60.0)
    client = Client(tmp_path / "user", policy=lenient_policy(deployment.signed), key=keys[0])
    desks = [Runner(deployment, [1]), Runner(deployment, [0]), Runner(deployment, [1])]
    with pytest.raises(Unreachable, match="too early"):
        take_part(client, desks, lambda model: THREE_SHUFFLERS.update(0, 2), patience=0.3)
