"""Two replicas of every party around one PostgreSQL database each, behind a proxy, for `killing`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
from parties.cluster import Cluster
from parties.killing import Killing
from parties.unique_buckets import COUNTERS, Auditor, kind_of

from dovetail.parties.common.http_clients import Unreachable
from dovetail.parties.fleet import HOST, Deployment, Fleet, free_ports

REPLICAS = 2
_SILENCE = 6.0  # seconds after which a connection is given up
Address = tuple[str, int]


class Proxy(threading.Thread):
    """What stands in front of replicas: every connection goes to one that takes it, and bytes pass as they are."""

    def __init__(self, host: str, ways: Mapping[int, Sequence[Address]]) -> None:
        super().__init__(daemon=True)
        self._host, self._ways, self._up = host, ways, threading.Event()
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Proxy:
        self.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join(10)

    def run(self) -> None:
        """Until told to stop."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._up.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        for port, ways in self._ways.items():
            await asyncio.start_server(lambda r, w, ways=ways: self._pass(r, w, ways), self._host, port)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ways: Sequence[Address]) -> None:
        for host, port in random.sample(ways, len(ways)):
            try:
                onward = await asyncio.wait_for(asyncio.open_connection(host, port), 1.0)
            except (OSError, TimeoutError):
                continue
            await asyncio.gather(_pump(reader, onward[1]), _pump(onward[0], writer))
            return
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, TimeoutError):
        while data := await asyncio.wait_for(reader.read(1 << 16), _SILENCE):
            writer.write(data)
            await writer.drain()
    writer.close()


class ReplicatedFleet(Fleet):
    """Replicas by name: that of the party with a number behind it. `within` are words that put one elsewhere."""

    def __init__(self, deployment: Deployment, urls: Mapping[str, str]) -> None:
        super().__init__(deployment)
        self._urls = urls
        self.names = {
            f"{party}-{number}": party for party in ("analyzer", *deployment.services) for number in range(REPLICAS)
        }
        self.addresses = dict(
            zip(self.names, [(deployment.host, port) for port in free_ports(len(self.names))], strict=True)
        )
        self.within: dict[str, list[str]] = {}
        self._replica = ""

    def proxy(self) -> Proxy:
        """In front of all of them."""
        deployment = self.deployment
        ports = dict(
            zip(("analyzer", *deployment.services), (deployment.analyzer_port, *deployment.service_ports), strict=True)
        )
        ways = {
            port: [self.addresses[name] for name, of in self.names.items() if of == party]
            for party, port in ports.items()
        }
        return Proxy(deployment.host, ways)

    def start_replica(self, name: str) -> None:
        """Start one, or start it again."""
        self._replica = name
        if self.names[name] == "analyzer":
            self.start_analyzer()
        else:
            self.start_service(self.deployment.services.index(self.names[name]))

    def _service_arguments(self, port: int) -> list[object]:
        host, own = self.addresses[self._replica]
        words = super()._service_arguments(own)
        words[words.index("--host") + 1] = host
        return [*words, "--store", self._urls[self.names[self._replica]]]

    def _start_process(self, name: str, kind: object, folder: object, *words: object) -> None:
        home = Path(str(folder)).parent / f"home-{self._replica}"
        super()._start_process(self._replica, kind, home, *words)

    def _service_command(self) -> list[str]:
        return [*self.within.get(self._replica, []), *super()._service_command()]


class _DatabaseAuditor(Auditor):
    """One who watches a ledger in a database."""

    def __init__(self, url: str, *, finite: bool) -> None:
        super().__init__(Path(), finite=finite)
        self._url = url

    def _read(self) -> list[tuple[int, bytes, bytes]]:
        try:
            with psycopg.connect(self._url, connect_timeout=5) as connection:
                return connection.execute("SELECT number, body, hash FROM entries ORDER BY number").fetchall()
        except psycopg.Error as error:
            raise Unreachable("no ledger to look at") from error


class ReplicaKilling(Killing):
    """As `Killing`, of replicas; a party's transitions are those of all of its replicas."""

    fleet: ReplicatedFleet

    def __init__(
        self, folder: Path, oracle: str, *, cluster: Cluster, crashes: int = 0, host: str = HOST, **options: Any
    ) -> None:
        super().__init__(folder, oracle, host=host, **options)
        self.cluster, self._crashes, self.crashed, self._began = cluster, crashes, 0, time.monotonic()
        self.urls = {party: cluster.database() for party in ("analyzer", *self.deployment.services)}
        self.fleet = ReplicatedFleet(self.deployment, self.urls)
        self.auditor = _DatabaseAuditor(self.urls["analyzer"], finite=self.oracle.eps_round is not None)
        self.parties = [*self.fleet.names, *self._groups]
        self._locks = {party: threading.Lock() for party in self.parties}
        self.every = [(party, one) for party in self.fleet.names for one in COUNTERS[kind_of(party)]]

    def run(self, targets: Iterable[tuple[str, str]], *, at_once: int = 1) -> None:
        """Behind the proxy; the database crashes between kills, in the middle of a round."""
        aims = list(targets)
        when = [len(aims) * (one + 1) // (self._crashes + 1) for one in range(self._crashes)]
        crashing = threading.Thread(target=self._crash, args=(when,))
        with self.fleet.proxy():
            crashing.start()
            super().run(aims, at_once=at_once)
            crashing.join()

    def judge(self) -> None:
        """Nothing lost, doubled or overspent."""
        found = self.found()
        assert (found.lost, found.doubled, found.overspent, found.unaccounted) == (0, 0, 0, 0)
        assert found.released >= 2

    def summary(self) -> str:
        """What was done and found."""
        found, kills = self.found(), sum(self.aimed.values())
        return (
            f"{self._name}, {REPLICAS} replicas of each party: {kills} kills, {self.crashed} crashes of PostgreSQL, "
            f"{found.released} rounds with {found.reports} reports in {time.monotonic() - self._began:.0f} s: "
            f"{found.lost} lost, {found.doubled} doubled, {found.overspent} overspent"
        )

    def _crash(self, when: Sequence[int]) -> None:
        try:
            for kills in when:
                self._wait(lambda kills=kills: sum(self.aimed.values()) >= kills, f"{kills} kills")
                self._wait(self._in_mid_round, "uploads")
                self.cluster.crash()
                self.crashed += 1
        except BaseException as error:
            self._broken.append(repr(error))

    def _in_mid_round(self) -> bool:
        try:
            with psycopg.connect(self.urls[self.deployment.services[0]], connect_timeout=5) as connection:
                return (
                    connection.execute("SELECT 1 FROM rounds WHERE state = 'open' AND uploads > 0").fetchone()
                    is not None
                )
        except psycopg.Error:
            return False

    def _start(self, party: str) -> None:
        if party in self._groups:
            self._start_users(party)
        else:
            self.fleet.start_replica(party)

    def _counter(self, party: str, transition: str) -> Callable[[], int]:
        if party in self._groups:
            return super()._counter(party, transition)
        url = self.urls[self.fleet.names[party]]
        query = COUNTERS[kind_of(party)][transition][1].replace("CAST(body AS TEXT)", "convert_from(body, 'UTF8')")

        def count() -> int:
            try:
                with psycopg.connect(url, connect_timeout=5) as connection:
                    return int(connection.execute(query).fetchone()[0])
            except psycopg.Error:
                return -1

        return count

    def _landed(self, party: str) -> str:
        return super()._landed(party) if party in self._groups else "somewhere"
