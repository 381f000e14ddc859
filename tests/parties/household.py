"""A small task with all its parties in one process: keys, signed task, users, shufflers, analyzer, in one folder."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
import threading
import time
import types

import msgspec
import numpy as np

from dovetail.learners.server import Server
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.sealing import open_sealed, seal
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.common.wire import REPORT_ID, Upload, decode_vector, signature_of, upload_path
from dovetail.parties.fleet import Fleet, free_ports
from dovetail.parties.http import server as door_module
from dovetail.parties.http.analyzer import AnalyzerService
from dovetail.parties.http.intermediary import IntermediaryService
from dovetail.parties.http.server import BoundedServer, serve
from dovetail.parties.shuffler import Shuffler
from dovetail.parties.user.client import Client
from dovetail.parties.user.policy import Policy

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
        self.shuffler_keys = [ServicePairs.add(folder / f"shuffler-{i}" / "keys") for i in range(shufflers)]
        self.users = [KeyPair.generate("sign") for _ in range(clients)]
        asked = {"rounds": 1, "min_clients": clients, "max_clients": clients, "round_seconds": 600.0, "delta": 1e-5}
        asked["analyzer_sign"] = KeyRing(self.ring.folder, "sign").add().public
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
            analyzer=self.task.analyzer_id,
            min_clients=1,
            eps_round=None,
            eps_task=None,
            eps_lifetime=None,
            delta_lifetime=0.5,
            shufflers=tuple(keys.public.key_id for keys in self.shuffler_keys),
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
            keys=self.shuffler_keys[index],
        )

    @property
    def keys(self):
        return self.shuffler_keys

    def party(self, index=0):
        return self.shuffler(index)

    def envelope(self, user, *, round=1, update=None):
        client = Client(self.folder / f"user-{user}", policy=self.policy, key=self.users[user])
        return client.report(self.signed, round, np.zeros(self.task.dim) if update is None else update)

    def content(self, user, upload, *, round=1, index=0):
        """What an upload of a user holds, as its shuffler sees it."""
        return opened(self.task, upload, self.shuffler_keys[index], self.users[user], round=round, index=index)

    def sealed(self, user, content, *, report=None, round=1, index=0):
        """An upload of a user that holds this, whatever it is."""
        return sealed(self.task, content, self.users[user], report=report, round=round, index=index)

    def give(self, link, user, upload, *, round=1):
        """Let a user sign an upload, and give it to the shuffler behind a link."""
        give(self.task, link, self.users[user], upload, round=round)


def opened(task, upload, keys, sender, *, round=1, index=0):
    """What an upload holds, as the shuffler or aggregator with these keys sees it."""
    purpose = task.upload_purpose(round, index, sender=sender.public.key_id, report=upload.report)
    return open_sealed(upload.sealed, keys.seal.opening_key(), purpose)


def sealed(task, content, sender, *, report=None, round=1, index=0):
    """An upload of this content, sealed by its sender as an honest one is."""
    report = secrets.token_bytes(REPORT_ID) if report is None else report
    purpose = task.upload_purpose(round, index, sender=sender.public.key_id, report=report)
    return Upload(report, seal(content, task.intermediaries[index].seal.sealing_key(), purpose))


def give(task, link, sender, upload, *, round=1):
    """Sign an upload as its sender, and give it to whom the link leads to."""
    signature = signature_of(sender, "POST", upload_path(task.task_id, round, link.index), upload.encode())
    link.upload(task.task_id, round, upload, sender=sender.public.key_id, signature=signature)


class Direct:
    """An analyzer as one of its shufflers sees it, without a network between them; remembers what passed."""

    def __init__(self, analyzer, index=0):
        self._analyzer, self._index = analyzer, index
        self.parts, self.said = [], []

    def status(self):
        return self._analyzer.status()

    def model(self, round, *, dim=None):
        return decode_vector(self._analyzer.model(round), self._analyzer.task.dim)

    def signed_model(self, round, *, dim=None):
        model = self._analyzer.model(round)
        return model, self._analyzer.model_signature(round, model)

    def send_part(self, round, batch, number, part):
        self.parts.append((round, number, part))
        self._analyzer.count_part(self._index, round, batch, number, part)

    def report_closed(self, round, closed):
        self.said.append((round, closed))
        self._analyzer.note_closed(self._index, round, closed)


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
    """Analyzer and shufflers or aggregators behind TLS on loopback, by the threads that serve them."""

    analyzer: tuple[str, int]
    services: list[tuple[str, int]]
    authority: object
    complaints: Complaints
    analyzer_counts: dict
    service_counts: dict  # of the first

    @property
    def shuffler(self):
        return self.services[0]

    @property
    def shuffler_counts(self):
        return self.service_counts


@contextlib.contextmanager
def running(household, monkeypatch):
    """All services of a task, until the block ends."""
    servers, complaints = [], Complaints()

    class Watched(BoundedServer):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            servers.append(self)

    monkeypatch.setattr(door_module, "BoundedServer", Watched)
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
    parties, services, links, urls = [], [], [], []
    for index in range(len(household.task.intermediaries)):
        parties.append(household.party(index))
        link = AnalyzerClient(analyzer_url, ca=authority.certificate, key=parties[-1].key)
        peers = []  # whose addresses are not known yet
        services.append(IntermediaryService(parties[-1], enrolled=household.enrolled, analyzer=link, peers=peers))
        links.append(peers)
        urls.append(start(services[-1].app))
    for index, peers in enumerate(links):
        options = {"ca": authority.certificate, "key": parties[index].key}
        peers += [IntermediaryClient(url, index=i, **options) for i, url in enumerate(urls) if i != index]
    watched = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio", None)]
    for logger in watched:
        logger.addHandler(complaints)
    try:
        end = time.monotonic() + 30
        while any(party.store.state(1) == "unknown" for party in parties) and time.monotonic() < end:
            time.sleep(0.02)
        yield Running(
            _address(analyzer_url),
            [_address(url) for url in urls],
            authority.certificate,
            complaints,
            analyzer_service.counts,
            services[0].counts,
        )
    finally:
        for logger in watched:
            logger.removeHandler(complaints)
        for server in reversed(servers):
            server.should_exit = True
        for thread in reversed(threads):
            thread.join(20)
        for party in parties:
            party.close()
        analyzer.close()


class Confined(Fleet):
    """A fleet whose processes are started within other words, such as those of `prlimit`."""

    def __init__(self, folder, within):
        super().__init__(types.SimpleNamespace(folder=folder))
        self._within = within

    def _service_command(self):
        return [*self._within, *super()._service_command()]


@contextlib.contextmanager
def in_processes(household, *within):
    """All services of a task as processes of their own; the fleet that holds them, and addresses."""
    folder, kind = household.folder, "aggregator" if household.task.aggregators else "shuffler"
    authority = make_authority(folder)
    certified = make_certificate(folder, authority, host="127.0.0.1")
    (folder / "task.json").write_bytes(msgspec.json.encode(household.signed))
    (folder / "clients.json").write_bytes(msgspec.json.encode(list(household.enrolled.values())))
    np.save(folder / "first.npy", np.zeros(household.task.dim, np.float32))
    ports = free_ports(1 + len(household.task.intermediaries))
    analyzer_url, *urls = [f"https://127.0.0.1:{port}" for port in ports]

    def service(name, port):
        return [
            *(folder / name, "--keys", folder / name / "keys", "--task", folder / "task.json"),
            *("--signer", household.signer.public.key_id.hex(), "--port", port),
            *("--certificate", certified.certificate, "--private-key", certified.private_key),
        ]

    with Confined(folder, within) as fleet:
        fleet._start_process(
            "analyzer", "analyzer", *service("analyzer", ports[0]), "--workers", 1, "--model", folder / "first.npy"
        )
        options = ("--analyzer", analyzer_url, "--clients", folder / "clients.json", "--ca", authority.certificate)
        for index, port in enumerate(ports[1:]):
            peers = [word for i, url in enumerate(urls) if i != index for word in ("--peer", url)]
            name = f"{kind}-{index}"
            fleet._start_process(name, kind, *service(name, port), *options, "--index", index, *peers)
        for url in urls:
            _await_answer(fleet, url, authority.certificate)
        addresses = [_address(url) for url in urls]
        yield fleet, Running(_address(analyzer_url), addresses, authority.certificate, Complaints(), {}, {})


def _await_answer(fleet, url, authority):
    link, end = IntermediaryClient(url, ca=authority), time.monotonic() + 300
    while True:
        fleet._check_processes()
        try:
            link.status()
            break
        except Unreachable:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    link.close()


def _address(url):
    host, _, port = url.removeprefix("https://").partition(":")
    return host, int(port)
