"""Parties that die at a chosen durable step, without processes.

A kill leaves files as they are at that moment: whatever was committed, and a log that nobody tidied. So a party that
dies here touches nothing any more, its files are copied as they are, and it starts again from the copy; the others hear
no answer, as from a process that is gone. Steps are commits (and statements outside of transactions that write), each
with the moment before and the moment after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from parties.unique_buckets import Auditor, Oracle, uploads_of

from dovetail.learners.server import Server
from dovetail.parties.aggregator.party import Aggregator
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.http_clients import Gone, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.wire import Closed, RoundStatus, TooEarly, TooLate, Verifiers, decode_vector
from dovetail.parties.fleet import Deployment, lenient_policy
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.intermediary.store import UploadRefused
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Client, Envelope

_WRITES = ("INSERT", "CREATE", "PRAGMA journal_mode", "PRAGMA wal_checkpoint")  # where no transaction is open


class Killed(BaseException):
    """The end of a process: nothing below catches it for good."""


class Life:
    """One life of one party: until the moment in which it is killed, if any; `buried` when its files may be let go."""

    def __init__(self, party: str, moment: Callable[[str, str], bool]) -> None:
        self.party, self.dead, self.buried, self._moment = party, False, False, moment

    def pass_moment(self, statement: str) -> None:
        """Die, if this is the moment."""
        if self.dead or self._moment(self.party, statement):
            self.dead = True
            raise Killed(self.party)


class Mortal(sqlite3.Connection):
    """A connection of a party that may die."""

    life: Life | None = None
    _began = 0

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        """Around whatever changes the file for good there is a moment before and one after."""
        if self.life is None:
            return super().execute(sql, *values)
        if self.life.dead:
            raise Killed(self.life.party)
        if sql == "PRAGMA synchronous = FULL":
            sql = "PRAGMA synchronous = OFF"  # nobody pulls the plug here
        if sql.startswith("BEGIN"):
            self._began = self.total_changes
        lasting = sql.startswith(_WRITES) and not self.in_transaction
        if lasting or (sql == "COMMIT" and self.total_changes > self._began):
            self.life.pass_moment(f"before {sql}")
            done = super().execute(sql, *values)
            self.life.pass_moment(f"after {sql}")
            return done
        return super().execute(sql, *values)

    def close(self) -> None:
        """The dead do not tidy up."""
        if self.life is None or not self.life.dead or self.life.buried:
            super().close()


class World:
    """A whole fleet in this process, in which one party dies once: in the moment with the number `fatal`.

    The user `halfway` reports to the first service alone; `slow` so slowly that the first looks at the time meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        oracle: Oracle,
        *,
        fatal: int | None,
        halfway: int | None = None,
        slow: int | None = None,
    ) -> None:
        self._folder, self._ground, self._oracle, self._fatal = folder, deployment, oracle, fatal
        self._halfway, self._slow = halfway, slow
        self.moments: list[tuple[str, str]] = []
        self._homes: dict[str, Path] = {}
        self._lives: dict[str, Life] = {}
        self._parties: dict[str, Any] = {}
        self._connections: list[sqlite3.Connection] = []  # held: one that is collected tidies its file
        self._auditor = Auditor(folder, finite=oracle.eps_round is not None)
        self._births = self.deaths = 0
        folder.mkdir()
        names = ["analyzer", *deployment.services]
        self._parties.update(dict.fromkeys(names))
        self.told: set[tuple[int, int, int]] = set()
        self.parts: dict[tuple[int, int, int], tuple[bytes, bytes]] = {}  # what left a service, by round and number

    def connect(self, path: Any, **options: Any) -> sqlite3.Connection:
        """In the place of `sqlite3.connect`."""
        connection = _connect(path, factory=Mortal, **options)
        connection.life = self._life_of(Path(str(path)))
        self._connections.append(connection)
        return connection

    def _life_of(self, path: Path) -> Life | None:
        """Whose file this is."""
        return next((life for name, life in self._lives.items() if self._homes[name] in path.parents), None)

    def run(self, envelope: Callable[[int, int, int], Envelope], users: int) -> np.ndarray:
        """Train until it is over; the marks of every round, (rounds, users)."""
        rounds = self._ground.task.rounds
        for _ in range(20 * rounds):
            self._revive()
            self.let_services(lambda service: service._close_rounds())  # whoever comes back finds that time went on
            self.let_services(lambda service: service._follow_analyzer())
            self._revive()
            status = self._parties["analyzer"].status()
            if status.over:
                break
            self._let_users(envelope, users, status)
            self.let_services(lambda service: service._close_rounds())
        else:
            raise AssertionError("expected a training that ends, got none")
        models = [self._model(number) for number in range(rounds + 1)]
        counted = uploads_of(self._parties["analyzer"].privacy()["history"])
        self._end(self._parties)
        pairs = enumerate(itertools.pairwise(models), start=1)
        return np.array([self._oracle.marks(*pair, uploads=counted[number]) for number, pair in pairs])

    def _revive(self) -> None:
        """Start whoever is dead, or was never alive, from the files that are there; look at the ledger."""
        while dead := [name for name in self._parties if name not in self._lives or self._lives[name].dead]:
            for name in dead:
                before, self._births = self._homes.get(name), self._births + 1
                self._homes[name] = self._folder / f"{self._births}-{name}"
                if before is None:
                    self._homes[name].mkdir()
                else:
                    self.deaths += 1
                    shutil.copytree(before, self._homes[name])
                    self._end([name])
                self._lives[name] = Life(name, self._moment)
                try:
                    self._parties[name] = self._born(name)
                except Killed:
                    self._parties[name] = None
        self._audit()

    def _audit(self) -> None:
        self._auditor.ledger = self._homes["analyzer"] / "ledger.db"
        self._auditor.look()
        status = self._parties["analyzer"].status()
        for number in range(status.round + status.over):
            self._auditor.see(number, self._model(number))

    def _model(self, number: int) -> np.ndarray:
        return decode_vector(self._parties["analyzer"].model(number), self._ground.task.dim)

    def _moment(self, party: str, statement: str) -> bool:
        self.moments.append((party, statement))
        return len(self.moments) - 1 == self._fatal

    def _born(self, name: str) -> Any:
        deployment, signer = self._ground, self._ground.signed.signer.key_id
        if name == "analyzer":
            return Analyzer(
                self._homes[name],
                signed=deployment.signed,
                signer=signer,
                keys=KeyRing(deployment.folder / name / "keys", "seal"),
                learning=Learning(initial=np.zeros(deployment.task.dim, np.float32), server=Server(learning_rate=1.0)),
                workers=1,
            )
        index = deployment.services.index(name)
        keys = ServicePairs.find(deployment.folder / name / "keys", deployment.task.intermediaries[index])
        kind = Aggregator if deployment.task.aggregators else Shuffler
        party = kind(self._homes[name], signed=deployment.signed, signer=signer, index=index, keys=keys)
        peers = [_Peer(self, other) for other in deployment.services if other != name]
        return IntermediaryService(party, enrolled={}, analyzer=_ToAnalyzer(self, index), peers=peers)

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            party = self._parties[name]
            if party is not None:
                self._lives[name].dead = self._lives[name].buried = True
                (party if name == "analyzer" else party._party).close()

    def _ask(self, name: str, question: Callable[[Any], Any]) -> Any:
        """The answer of a party, None if it is dead or dies over it."""
        if self._lives[name].dead:
            return None
        try:
            return question(self._parties[name])
        except Killed:
            return None

    def let_services(self, work: Callable[[Any], Any], *, only: int | None = None) -> None:
        """One after the other, or only one of them."""

        def do(service: Any) -> None:
            with contextlib.suppress(Unreachable):  # it tries again
                asyncio.run(work(service))

        for name in self._ground.services if only is None else [self._ground.services[only]]:
            self._ask(name, do)

    def _let_users(self, envelope: Callable[[int, int, int], Envelope], users: int, status: RoundStatus) -> None:
        for user in range(users):
            self._upload(envelope, user, status)

    def _upload(self, envelope: Callable[[int, int, int], Envelope], user: int, status: RoundStatus) -> None:
        """To every service, again and again; then something else, and what was sent in the round before."""
        round = status.round
        for index in range(1 if user == self._halfway else self._oracle.services):
            if user == self._slow and index == 1:
                self.let_services(lambda service: service._close_rounds(), only=0)

            def send(service: Any, number: int = round, version: int = 0, to: int = index) -> str:
                sent = envelope(number, user, version)
                try:
                    return str(service._party.accept(number, client=sent.sender, upload=sent.uploads[to]))
                except UploadRefused as reason:
                    return str(reason)

            party = self._ground.services[index]
            for _ in range(2):
                if self._ask(party, send) in ("accepted", "known"):
                    self.told.add((round, user, index))
            if (round, user, index) in self.told:
                other = self._ask(party, lambda service, send=send: send(service, version=1))
                assert other not in ("accepted", "known"), "a user is twice in a round"
            if (round - 1, user, index) in self.told:
                assert self._ask(party, lambda service, send=send: send(service, number=round - 1)) in ("known", None)


class Wire:
    """What is asked of a party that is dead, or dies over it, is not answered."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def _answer(self, question: Callable[[Any], Any]) -> Any:
        if self._world._lives[self._name].dead:
            raise Unreachable(self._name)
        try:
            return question(self._world._parties[self._name])
        except (Killed, TooEarly) as error:
            raise Unreachable(self._name) from error
        except TooLate as error:
            raise Gone(str(error)) from error


class _ToAnalyzer(Wire):
    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, "analyzer")
        self._index = index

    def status(self) -> RoundStatus:
        return self._answer(lambda analyzer: analyzer.status())

    def signed_model(self, round: int, *, dim: int) -> tuple[bytes, bytes]:
        return self._answer(lambda analyzer: (analyzer.model(round), b""))

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        first = self._world.parts.setdefault((self._index, round, number), (batch, part))
        assert first == (batch, part), "a batch was drawn twice"
        self._answer(lambda analyzer: analyzer.count_part(self._index, round, batch, number, part))

    def report_closed(self, round: int, closed: Closed) -> None:
        self._answer(lambda analyzer: analyzer.note_closed(self._index, round, closed))


class _Peer(Wire):
    def roster(self, round: int) -> set[bytes] | None:
        found = self._answer(lambda service: service._party.store.roster(round))
        return None if found is None else set(found)

    def agreed_digest(self, round: int) -> bytes | None:
        return self._answer(lambda service: service._party.store.agreed_digest(round))

    def challenge(self, round: int) -> bytes | None:
        return self._answer(lambda service: service._party.challenge(round))

    def verifiers(self, round: int, *, reports: int) -> Verifiers | None:
        return self._answer(lambda service: service._party.verifiers(round, 0))


def envelopes(
    deployment: Deployment, oracle: Oracle, folder: Path, keys: Sequence[KeyPair]
) -> Callable[[int, int, int], Envelope]:
    """(round, user, version) -> what that user sends; version 1 is what nobody may count."""
    made: dict[tuple[int, int, int], Envelope] = {}
    policy, users = lenient_policy(deployment.signed), len(keys)
    clients = {
        (user, version): Client(folder / f"{user}-{version}", policy=policy, key=keys[user], witness=False)
        for user in range(users)
        for version in range(2)
    }

    def envelope(round: int, user: int, version: int) -> Envelope:
        if (round, user, version) not in made:
            update = oracle.update(user, users)
            made[round, user, version] = clients[user, version].report(deployment.signed, round, update)
        return made[round, user, version]

    return envelope


_connect = sqlite3.connect
