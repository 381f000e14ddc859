"""A fleet of real processes that are killed with kill -9, users that misbehave, and an auditor who looks all the time.

The services of an oracle's deployment are processes; half of its users may be, too, and the others are unruly threads.
Whoever is killed is started again at once. At the end everything is counted.
"""

from __future__ import annotations

import collections
import concurrent.futures
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from parties.marking_users import TRANSITIONS, counter_of_users, home_of, landed_with, notes, spent
from parties.unique_buckets import COUNTERS, ORACLES, Auditor, counter, kind_of, landed, uploads_of
from parties.unruly_users import Promises, crowd

from dovetail.parties.common.http_clients import Rejected, Unreachable
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.fleet import HOST, Fleet

_PATIENCE = 900.0  # seconds for what takes one on an idle machine
_MINIMUM = 2  # users in a round


class Found(NamedTuple):
    """What was counted: rounds, reports in them, and what must not be."""

    released: int
    reports: int
    lost: int  # reports that all services said to have, and that are not in their round's model
    doubled: int  # reports that are in a model more than once, or that a user made twice
    overspent: int  # rounds that anybody paid for twice or not at all
    unaccounted: int  # reports in a model that nobody sent
    in_vain: int  # rounds that a user paid for before it was killed, and has sent nothing in


class _Broken(Exception):  # noqa: N818 - what it was is on a list
    """Something went wrong elsewhere."""


class Killing:
    """A training of endless rounds; `processes` of users, with half of the users between them."""

    def __init__(
        self,
        folder: Path,
        oracle: str,
        *,
        users: int,
        round_seconds: float,
        seed: int,
        processes: int = 0,
        host: str = HOST,
    ) -> None:
        self.oracle, self._name, self._random = ORACLES[oracle], oracle, random.Random(seed)
        keys = [KeyPair.generate("sign") for _ in range(users)]
        self.deployment = self.oracle.deployment(folder, keys, rounds=10_000, round_seconds=round_seconds, host=host)
        self.fleet = Fleet(self.deployment)
        self.promises = Promises()
        self.auditor = Auditor(folder / "analyzer" / "ledger.db", finite=self.oracle.eps_round is not None)
        self.aimed: collections.Counter[tuple[str, str]] = collections.Counter()
        self.hit: collections.Counter[tuple[str, str]] = collections.Counter()
        self._ended, self._broken, self._history = threading.Event(), [], []
        self._threads = range(users // 2 if processes else users)
        self._keys, rest = keys, range(len(self._threads), users)
        self._groups = {f"users-{i}": list(rest)[i::processes] for i in range(processes)}
        for user in rest:
            home_of(folder, user).mkdir(parents=True, mode=0o700)
            keys[user].save(home_of(folder, user) / "key.json")
        self.parties = ["analyzer", *self.deployment.services, *self._groups]
        self._locks = {party: threading.Lock() for party in self.parties}
        steps = {**COUNTERS, "users": TRANSITIONS}
        self.every = [(party, one) for party in self.parties for one in steps[kind_of(party)]]

    def run(self, targets: Iterable[tuple[str, str]], *, at_once: int = 1) -> None:
        """Kill a party after each of these transitions, `at_once` of them at a time; then let the fleet go on."""
        with self.fleet:
            for party in self.parties:
                self._start(party)
            users, stop = crowd(self.deployment, self.oracle, self._keys[: len(self._threads)], self.promises)
            auditing = threading.Thread(target=self._audit)
            auditing.start()
            try:
                with concurrent.futures.ThreadPoolExecutor(at_once) as killers:
                    for done in [killers.submit(self._kill, party, transition) for party, transition in targets]:
                        done.result()
                enough = max(2, len(self.auditor.released) + 1)
                self._wait(lambda: len(self.auditor.released) >= enough, "another model")
            except _Broken as error:
                raise AssertionError("; ".join(self._broken + self.promises.broken)) from error
            finally:
                stop.set()
                self._ended.set()
                auditing.join()
                for user in users:
                    user.join(60)
            self._history = self._wait(self._asked, "what the analyzer says")
        assert self._broken + self.promises.broken == []

    def targets(self, count: int) -> Iterator[tuple[str, str]]:
        """So many transitions: every one of every party, again and again, in an order without pattern."""
        while count > 0:
            yield from self._random.sample(self.every, min(count, len(self.every)))
            count -= len(self.every)

    def found(self) -> Found:
        """Bucket by bucket, and ledger by ledger."""
        folder, services, models = self.deployment.folder, self.oracle.services, self.auditor.models
        noted, made = notes(folder), collections.defaultdict(set)
        for note in noted:
            made[note.round, note.user].add(note.report)
            self.promises.send(note.round, note.user)
            if note.what == "taken":
                self.promises.take(note.round, note.user, note.service)
        lost = doubled = unaccounted = reports = 0
        uploads = uploads_of(self._history)
        for number in sorted(models)[1:]:
            marks = self.oracle.marks(models[number - 1], models[number], uploads=uploads[number])
            counted, complete = set(np.flatnonzero(marks).tolist()), self.promises.complete(number, services)
            doubled += int((marks[marks > 1] - 1).sum())
            reports += int(marks.sum())
            if number in self.auditor.released:
                assert len(counted) >= _MINIMUM, number
                lost += len(complete - counted)
            unaccounted += sum((number, user) not in self.promises.sent for user in counted)
        self._check_history()
        doubled += sum(len(ids) - 1 for ids in made.values())
        overspent, in_vain = self._paid({(note.round, note.user) for note in noted})
        released = len(self.auditor.released)
        return Found(released, reports, lost, doubled, overspent, unaccounted, in_vain)

    def _check_history(self) -> None:
        """No round is spoiled, and none is void in which all services had the reports of enough users."""
        outcomes = {one["round"]: one["outcome"] for one in self._history}
        assert set(outcomes.values()) <= {"released", "void"}, outcomes
        for number, outcome in outcomes.items():
            assert outcome == "released" or len(self.promises.complete(number, self.oracle.services)) < _MINIMUM, number

    def _paid(self, sent: set[tuple[int, int]]) -> tuple[int, int]:
        """Rounds that users paid for twice, or not at all although they sent a report; and those paid for in vain."""
        folder, over, in_vain = self.deployment.folder / "users", 0, 0
        for user in self._threads:
            rounds = collections.Counter(spent(folder / f"{user}-self"))
            mine = {number for number, one in self.promises.sent if one == user}
            over += sum(rounds.values()) - len(rounds) + len(mine - set(rounds))
        for user in (one for group in self._groups.values() for one in group):
            rounds = collections.Counter(spent(home_of(self.deployment.folder, user)))
            mine = {number for number, one in sent if one == user}
            over += sum(rounds.values()) - len(rounds) + len(mine - set(rounds))
            in_vain += len(set(rounds) - mine)
        return over, in_vain

    def _start(self, party: str) -> None:
        if party == "analyzer":
            self.fleet.start_analyzer()
        elif party in self._groups:
            self._start_users(party)
        else:
            self.fleet.start_service(int(party.rpartition("-")[2]))

    def _start_users(self, party: str) -> None:
        deployment, tests = self.deployment, str(Path(__file__).parents[1])
        before = os.environ.get("PYTHONPATH")
        environment = {**os.environ, "PYTHONPATH": tests if before is None else f"{tests}{os.pathsep}{before}"}
        words = [deployment.folder, self._name, party, ",".join(map(str, self._groups[party])), deployment.authority]
        with (deployment.folder / f"{party}.log").open("ab") as log:
            self.fleet.processes[party] = subprocess.Popen(
                [sys.executable, "-m", "parties.marking_users", *map(str, words), *deployment.service_urls],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    def _counter(self, party: str, transition: str) -> Callable[[], int]:
        if party in self._groups:
            return counter_of_users(self.deployment.folder, self._groups[party], transition)
        return counter(self.deployment, party, transition)

    def _kill(self, party: str, transition: str) -> None:
        """One death of a party at a time; what goes wrong ends the others, too."""
        try:
            with self._locks[party]:
                self._kill_after(party, transition)
        except _Broken:
            raise
        except BaseException as error:
            self._broken.append(repr(error))
            raise _Broken from error

    def _kill_after(self, party: str, transition: str) -> None:
        """After the next transition of its kind, at once or a little later."""
        count = self._counter(party, transition)
        so_far = self._wait(lambda: count() + 1, f"files of {party}") - 1
        several = transition.startswith("upload ")
        goal = so_far + (self._random.randint(1, self.deployment.clients) if several else 1)
        process = self.fleet.processes[party]

        def reached() -> bool:
            assert process.poll() is None, f"{party} ended by itself with {process.returncode}"
            return count() >= goal

        self._wait(reached, f"{party}: {transition}", pause=0.005)
        time.sleep(self._random.choice([0.0, self._random.uniform(0, 0.03), self._random.uniform(0, 0.3)]))
        assert process.poll() is None, f"{party} ended by itself with {process.returncode}"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        self.aimed[party, transition] += 1
        self.hit[party, self._landed(party)] += 1
        self._start(party)

    def _landed(self, party: str) -> str:
        if party in self._groups:
            return landed_with(self.deployment.folder, self._groups[party], self.oracle.services)
        return landed(self.deployment, party)

    def _wait(self, reached: Callable[[], Any], what: str, *, pause: float = 0.05, seconds: float = _PATIENCE) -> Any:
        """Until it is so; a machine that stands still, or is slow to look, is not held against anybody."""
        for _ in range(int(seconds / pause)):
            if found := reached():
                return found
            if self._broken + self.promises.broken:
                raise _Broken
            time.sleep(pause)
        raise AssertionError(f"expected {what} in {seconds} seconds, got nothing")

    def _asked(self) -> list[dict[str, Any]] | None:
        try:
            return self.fleet.privacy()["history"]
        except Unreachable:
            return None

    def _audit(self) -> None:
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
