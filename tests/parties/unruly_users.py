"""Users that do what users do: twice, at once, late, again; and that note what they were promised.

Each user has a habit besides reporting: it sends the same upload twice at once; hangs up before it hears the answer;
has second thoughts and sends another report; sends what it sent a round ago, for then and for now; or loses interest
when some of the shufflers have its report.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

import msgspec
from parties.household import give, opened, sealed
from parties.unique_buckets import Oracle

from dovetail.parties.common.http_clients import Gone, IntermediaryClient, Rejected, Unreachable
from dovetail.parties.common.keys import KeyPair, ServicePairs
from dovetail.parties.common.wire import Upload, sign_request
from dovetail.parties.fleet import Deployment, lenient_policy
from dovetail.parties.user.client import Client, Envelope

HABITS = ("twice at once", "hangs up", "second thoughts", "repeats itself", "loses interest")


class Promises:
    """What users sent and were told, by round and user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken: dict[tuple[int, int], set[int]] = collections.defaultdict(set)  # by these shufflers
        self.sent: set[tuple[int, int]] = set()
        self.refused: collections.Counter[str] = collections.Counter()
        self.broken: list[str] = []

    def send(self, round: int, user: int) -> None:
        """Note that a user sends its report to all shufflers, if they take it."""
        with self._lock:
            self.sent.add((round, user))

    def take(self, round: int, user: int, shuffler: int) -> None:
        """Note that a shuffler said that it has a report."""
        with self._lock:
            self.taken[round, user].add(shuffler)

    def refuse(self, what: str) -> None:
        """Note that something was turned away as it should be."""
        with self._lock:
            self.refused[what] += 1

    def complete(self, round: int, shufflers: int) -> set[int]:
        """The users whose reports all shufflers of a round said to have."""
        with self._lock:
            return {user for (number, user), by in self.taken.items() if number == round and len(by) == shufflers}


class User(threading.Thread):
    """One user, until it is told to stop."""

    def __init__(
        self,
        number: int,
        deployment: Deployment,
        oracle: Oracle,
        key: KeyPair,
        promises: Promises,
        stop: threading.Event,
    ) -> None:
        super().__init__(daemon=True)
        self._number, self._ground, self._oracle, self._promises, self._stopped = (
            number,
            deployment,
            oracle,
            promises,
            stop,
        )
        self._habit = HABITS[number % len(HABITS)]
        self._key = key
        self._last: Envelope | None = None  # what it sent a round ago
        policy, folder = lenient_policy(deployment.signed), deployment.folder / "users"
        self._self, self._other = (
            Client(folder / f"{number}-{name}", policy=policy, key=key, witness=False) for name in ("self", "other")
        )
        self._links = [
            IntermediaryClient(url, index=index, ca=deployment.authority)
            for index, url in enumerate(deployment.service_urls)
        ]

    def run(self) -> None:
        """Take part in whatever round is open."""
        try:
            self._take_part()
        except Exception as error:
            self._promises.broken.append(f"user {self._number}, {self._habit}: {error!r}")

    def _take_part(self) -> None:
        done = 0
        while not self._stopped.is_set():
            try:
                status = self._links[0].status()
            except Unreachable:
                status = None
            if status is not None and status.over:
                return
            if status is not None and status.round > done:
                self._report(status.round)
                done = status.round
            time.sleep(0.2)

    def _report(self, round: int) -> None:
        update = self._oracle.update(self._number, self._ground.clients)
        envelope = self._self.report(self._ground.signed, round, update)
        alone = self._oracle.services == 1  # where one bad message spoils no round
        repeats = alone and self._last is not None and self._habit == "repeats itself" and round % 3 == 0
        halfway = not alone and self._habit == "loses interest" and round % 4 == 0
        if repeats:
            uploads = (self._resealed(round, 0, self._last),)  # taken, but what is in it will not open
            envelope = msgspec.structs.replace(envelope, uploads=uploads)
        if not repeats and not halfway:
            self._promises.send(round, self._number)
        for shuffler, upload in enumerate(envelope.uploads[:1] if halfway else envelope.uploads):
            if not self._deliver(round, shuffler, upload):
                break
            if not repeats:
                self._promises.take(round, self._number, shuffler)
                self._misbehave(round, shuffler)
        self._last = envelope

    def _deliver(self, round: int, shuffler: int, upload: Upload) -> bool:
        """Until the shuffler has it or says that it is too late; whether it has it."""
        for _ in self._attempts():
            try:
                if self._habit == "hangs up":
                    self._hang_up(round, shuffler, upload)
                if self._habit == "twice at once":
                    with concurrent.futures.ThreadPoolExecutor(2) as threads:
                        list(threads.map(self._give, [round] * 2, [shuffler] * 2, [upload] * 2))
                else:
                    self._give(round, shuffler, upload)
                return True
            except Gone:
                return False
            except Unreachable:
                pass  # or it has not heard of the round yet
        return False

    def _misbehave(self, round: int, shuffler: int) -> None:
        """What must be turned away, for the shuffler has this user's report."""
        if self._habit == "second thoughts":
            update = self._oracle.update(self._number, self._ground.clients)
            other = self._other.report(self._ground.signed, round, update)
            self._must_not_count(round, shuffler, other.uploads[shuffler])
        if self._habit == "repeats itself" and self._last is not None:
            upload = self._last.uploads[shuffler]
            self._must_not_count(round, shuffler, upload)
            self._must_not_count(round, shuffler, self._resealed(round, shuffler, self._last))
            try:
                self._give(self._last.round, shuffler, upload)
                self._promises.refuse("known from the round before")
            except Rejected:
                self._promises.refuse("too late for the round before")
            except Unreachable:
                pass

    def _must_not_count(self, round: int, shuffler: int, upload: Upload) -> None:
        for _ in self._attempts():
            try:
                self._give(round, shuffler, upload)
                self._promises.broken.append(f"user {self._number} is twice in round {round} of shuffler {shuffler}")
            except Unreachable:
                continue
            except Rejected as reason:
                self._promises.refuse("too late" if isinstance(reason, Gone) else "another upload")
            return

    def _give(self, round: int, shuffler: int, upload: Upload) -> None:
        give(self._ground.task, self._links[shuffler], self._key, upload, round=round)

    def _resealed(self, round: int, shuffler: int, last: Envelope) -> Upload:
        """What was sent in an earlier round, sealed to the shuffler for this one."""
        task, home = self._ground.task, self._ground.folder / self._ground.services[shuffler] / "keys"
        keys, upload = ServicePairs.find(home, task.intermediaries[shuffler]), last.uploads[shuffler]
        content = opened(task, upload, keys, self._key, round=last.round, index=shuffler)
        return sealed(task, content, self._key, round=round, index=shuffler)

    def _attempts(self) -> Iterator[int]:
        for attempt in itertools.count():
            if self._stopped.is_set():
                return
            yield attempt
            time.sleep(0.2)

    def _hang_up(self, round: int, shuffler: int, upload: Upload) -> None:
        """Send an upload and close the connection before there is an answer."""
        address = urllib.parse.urlparse(self._ground.service_urls[shuffler])
        body = upload.encode()
        path = f"/v1/tasks/{self._ground.task.task_id.hex()}/rounds/{round}/uploads/{shuffler}"
        headers = {
            "host": address.netloc,
            "content-length": str(len(body)),
            **sign_request(self._key, "POST", path, body),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        context = ssl.create_default_context(cafile=str(self._ground.authority))
        try:
            with socket.create_connection((address.hostname, address.port), timeout=10) as plain:
                secure = context.wrap_socket(plain, server_hostname=address.hostname)
                secure.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
                secure.close()
        except OSError as error:
            raise Unreachable("hung up before anybody answered") from error


def crowd(
    deployment: Deployment, oracle: Oracle, keys: Sequence[KeyPair], promises: Promises
) -> tuple[list[User], threading.Event]:
    """All users, at work; they stop at the event."""
    stop = threading.Event()
    users = [User(number, deployment, oracle, key, promises, stop) for number, key in enumerate(keys)]
    for user in users:
        user.start()
    return users, stop
