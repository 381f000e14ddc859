"""A small task with all its parties in one process: keys, signed task, users, shufflers, analyzer, in one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import types

import msgspec
import numpy as np
import uvicorn

from dovetail.learners.server import Server
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.rounds import Analyzer
from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.keys import KeyPair, KeyRing
from dovetail.parties.common.links import AnalyzerLink, ShufflerLink, Unreachable
from dovetail.parties.common.policy import Policy
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.common.wire import vector_from
from dovetail.parties.fleet import Fleet, _free_ports
from dovetail.parties.http._http import serve
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.shuffler import ShufflerService
from dovetail.parties.shuffler.rounds import Shuffler
from dovetail.parties.user.client import Client

SETTINGS = {
    "privunit": {"clip_norm": 1.0, "eps_local": 2.0},
    "ss_topk": {"clip_value": 1.0, "k": 2, "eps_local": 4.0},
    "ss_simple": {"clip_value": 1.0, "eps_local": 4.0, "levels": 3, "randomizer": "rr"},
    "split_and_mix": {"clip_norm": 1.0, "noise_multiplier": 0.3, "shufflers": 2, "mixing_error": 1e-4},
}


class Household:
    """Everybody of one task."""

    def __init__(self, folder, protocol, *, dim=6, clients=4, more_keys=(), **task):
        self.folder = folder
        self.signer = KeyPair.generate("sign")
        self.ring = KeyRing(folder / "analyzer" / "keys", "seal")
        shufflers = SETTINGS[protocol].get("shufflers", 1)
        self.shuffler_keys = [KeyRing(folder / f"shuffler-{i}" / "keys", "sign").add() for i in range(shufflers)]
        self.users = [KeyPair.generate("sign") for _ in range(clients)]
        asked = {"rounds": 1, "min_clients": clients, "max_clients": clients, "round_seconds": 600.0, "delta": 1e-5}
        self.task = TrainingTask(
            name="small",
            protocol=protocol,
            settings=SETTINGS[protocol],
            dim=dim,
            analyzer=self.ring.add().public,
            shufflers=tuple(key.public for key in self.shuffler_keys),
            **{**asked, **task},
        )
        self.signed = sign(self.task, self.signer)
        self.enrolled = {pair.public.key_id: pair.public for pair in (*self.users, *more_keys)}
        self.policy = Policy(
            signer=self.signer.public.key_id,
            analyzer=self.task.analyzer.key_id,
            min_clients=1,
            eps_round=None,
            eps_task=None,
            eps_lifetime=None,
            delta_lifetime=0.5,
        )

    def analyzer(self):
        return Analyzer(
            self.folder / "analyzer",
            signed=self.signed,
            signer=self.signer.public.key_id,
            keys=self.ring,
            learning=Learning(initial=np.zeros(self.task.dim, np.float32), server=Server(learning_rate=1.0)),
            workers=1,
        )

    def shuffler(self, index=0):
        return Shuffler(
            self.folder / f"shuffler-{index}",
            signed=self.signed,
            signer=self.signer.public.key_id,
            index=index,
            key=self.shuffler_keys[index],
        )

    def envelope(self, user, *, round=1, update=None):
        client = Client(self.folder / f"user-{user}", policy=self.policy, key=self.users[user])
        return client.report(self.signed, round, np.zeros(self.task.dim) if update is None else update)


class Direct:
    """An analyzer as one of its shufflers sees it, without a network between them; remembers what passed."""

    def __init__(self, analyzer, index=0):
        self._analyzer, self._index = analyzer, index
        self.parts, self.said = [], []

    def status(self):
        return self._analyzer.status()

    def model(self, round, *, dim=None):
        return vector_from(self._analyzer.model(round), self._analyzer.task.dim)

    def part(self, round, number, packed):
        self.parts.append((round, number, packed))
        self._analyzer.take(self._index, round, number, packed)

    def closed(self, round, closed):
        self.said.append((round, closed))
        self._analyzer.closed(self._index, round, closed)


def files_under(*places):
    """The bytes of every file in these folders, and of these files, by path."""
    found = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*")))]
    return {file: file.read_bytes() for file in found if file.is_file()}


class Complaints(logging.Handler):
    """What was logged as an error, by whomever."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        text = self.format(record)
        if "timeout graceful shutdown exceeded" not in text:  # of services that were stopped meanwhile
            self.texts.append(text)


@dataclasses.dataclass
class Running:
    """Analyzer and shuffler behind TLS on loopback, by the threads that serve them."""

    analyzer: tuple[str, int]
    shuffler: tuple[str, int]
    authority: object
    complaints: Complaints
    analyzer_counts: dict
    shuffler_counts: dict


@contextlib.contextmanager
def running(household, monkeypatch):
    """Both services of a task with one shuffler, until the block ends."""
    servers, complaints = [], Complaints()

    class Watched(uvicorn.Server):
        def __init__(self, config):
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Watched)
    authority = make_authority(household.folder)
    certified = make_certificate(household.folder, authority, host="127.0.0.1")
    threads, addresses = [], []

    def start(app):
        options = {"host": "127.0.0.1", "port": 0, "certificate": certified[0], "private_key": certified[1]}
        thread = threading.Thread(target=lambda: serve(app, ready=addresses.append, **options), daemon=True)
        thread.start()
        threads.append(thread)
        end = time.monotonic() + 30
        while len(addresses) < len(threads) and time.monotonic() < end:
            time.sleep(0.01)
        return addresses[-1]

    analyzer = household.analyzer()
    analyzer_service = AnalyzerService(analyzer)
    analyzer_url = start(analyzer_service.app)
    shuffler = household.shuffler()
    link = AnalyzerLink(analyzer_url, ca=authority.certificate, key=shuffler.key)
    shuffler_service = ShufflerService(shuffler, enrolled=household.enrolled, analyzer=link)
    shuffler_url = start(shuffler_service.app)
    watched = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", None)]
    for logger in watched:
        logger.addHandler(complaints)
    try:
        end = time.monotonic() + 30
        while shuffler.store.state(1) == "unknown" and time.monotonic() < end:
            time.sleep(0.02)
        yield Running(
            _address(analyzer_url),
            _address(shuffler_url),
            authority.certificate,
            complaints,
            analyzer_service.counts,
            shuffler_service.counts,
        )
    finally:
        for logger in watched:
            logger.removeHandler(complaints)
        for server in reversed(servers):
            server.should_exit = True
        for thread in reversed(threads):
            thread.join(20)
        shuffler.shut()
        analyzer.shut()


@contextlib.contextmanager
def in_processes(household):
    """Both services of a task with one shuffler as processes of their own; the fleet that holds them, and addresses."""
    folder = household.folder
    authority = make_authority(folder)
    certified = make_certificate(folder, authority, host="127.0.0.1")
    (folder / "task.json").write_bytes(msgspec.json.encode(household.signed))
    (folder / "clients.json").write_bytes(msgspec.json.encode(list(household.enrolled.values())))
    np.save(folder / "first.npy", np.zeros(household.task.dim, np.float32))
    ports = _free_ports(2)
    urls = [f"https://127.0.0.1:{port}" for port in ports]

    def service(name, port):
        return [
            *(folder / name, "--keys", folder / name / "keys", "--task", folder / "task.json"),
            *("--signer", household.signer.public.key_id.hex(), "--port", port, "--workers", 1),
            *("--certificate", certified.certificate, "--private-key", certified.private_key),
        ]

    with Fleet(types.SimpleNamespace(folder=folder)) as fleet:
        fleet._start("analyzer", "analyzer", *service("analyzer", ports[0]), "--model", folder / "first.npy")
        options = ("--analyzer", urls[0], "--clients", folder / "clients.json", "--ca", authority.certificate)
        fleet._start("shuffler-0", "shuffler", *service("shuffler-0", ports[1]), *options)
        link, end = ShufflerLink(urls[1], ca=authority.certificate), time.monotonic() + 90
        while True:
            fleet._check()
            try:
                link.status()
                break
            except Unreachable:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        link.close()
        yield fleet, Running(_address(urls[0]), _address(urls[1]), authority.certificate, Complaints(), {}, {})


def _address(url):
    host, _, port = url.removeprefix("https://").partition(":")
    return host, int(port)
