"""A whole fleet on this machine: every party a process of its own, over TLS on the loopback interface.

`set_up` writes what every party would have on its own machine, each in a folder of its own: keys, policy, the signed
task (`lay_out`: without users and their config, for a fleet that starts from `model.npy`). `Fleet` starts the
processes, looks after them and ends them. Users share a few processes, each with its own key, policy, ledger and
outbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail.experiment.config import Config, to_toml
from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.keys import KeyPair, KeyRing, PublicKey
from dovetail.parties.common.links import AnalyzerLink, ShufflerLink, Unreachable
from dovetail.parties.common.policy import Policy
from dovetail.parties.common.task import SignedTask, TrainingTask, calibrated, sign, verify
from dovetail.parties.federation import federation

__all__ = ["Deployment", "Fleet", "lay_out", "lenient_policy", "set_up"]

_HOST = "127.0.0.1"
_CONFIG, _MODEL = "config.toml", "model.npy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Where a fleet lives: its folder, its task, and the address of every service."""

    folder: Path
    signed: SignedTask
    task: TrainingTask
    analyzer_port: int
    shuffler_ports: tuple[int, ...]
    clients: int

    @property
    def authority(self) -> Path:
        """The certificate that everybody trusts."""
        return self.folder / "authority.crt"

    @property
    def analyzer_url(self) -> str:
        """The analyzer's address."""
        return f"https://{_HOST}:{self.analyzer_port}"

    @property
    def shuffler_urls(self) -> tuple[str, ...]:
        """The shufflers' addresses."""
        return tuple(f"https://{_HOST}:{port}" for port in self.shuffler_ports)


def set_up(
    folder: Path,
    config: Config,
    *,
    rounds: int,
    clients: int,
    shufflers: int | None = None,
    round_seconds: float = 120.0,
) -> Deployment:
    """The fleet of a config, in a new folder: every user with its key and policy; a round needs all of them."""
    _refuse_full(folder)
    if config.cohort.kind == "secret":
        raise ValueError("expected another cohort.kind than 'secret' (deployed users' data enter every round), got it")
    terms = {
        "protocol": config.protocol["name"],
        "dim": federation(config).dim,
        "rounds": rounds,
        "min_clients": clients,
        "max_clients": clients,
        "colluders": config.cohort.colluders,
        "eps": config.privacy.eps,
        "delta": config.privacy.delta,
    }
    settings = calibrated(settings=config.protocol_settings, **terms)
    fields = {"name": config.task.name, "settings": settings, "round_seconds": round_seconds, **terms}
    pairs = [KeyPair.generate("sign") for _ in range(clients)]
    count = shufflers or int(settings.get("shufflers", 1))
    deployment = lay_out(folder, fields, shufflers=count, enrolled=[pair.public for pair in pairs])
    (folder / _CONFIG).write_text(to_toml(config))
    policy = lenient_policy(deployment.signed)
    for user, pair in enumerate(pairs):
        home = folder / "clients" / f"user-{user}"
        home.mkdir(parents=True, mode=0o700)
        pair.save(home / "key.json")
        (home / "policy.json").write_bytes(msgspec.json.encode(policy))
    return deployment


def lay_out(folder: Path, fields: Mapping[str, Any], *, shufflers: int, enrolled: Sequence[PublicKey]) -> Deployment:
    """Keys of the services, certificates and the signed task with these fields, in a new folder."""
    _refuse_full(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    signer = KeyRing(folder / "signer", "sign").add()
    analyzer = KeyRing(folder / "analyzer" / "keys", "seal").add()
    keys = tuple(KeyRing(folder / f"shuffler-{i}" / "keys", "sign").add().public for i in range(shufflers))
    task = TrainingTask(analyzer=analyzer.public, shufflers=keys, **fields)
    signed = sign(task, signer)
    (folder / "task.json").write_bytes(msgspec.json.encode(signed))
    (folder / "clients.json").write_bytes(msgspec.json.encode(list(enrolled)))
    make_certificate(folder, make_authority(folder), host=_HOST)
    ports = _free_ports(1 + shufflers)
    return Deployment(
        folder=folder,
        signed=signed,
        task=task,
        analyzer_port=ports[0],
        shuffler_ports=tuple(ports[1:]),
        clients=len(enrolled),
    )


def lenient_policy(signed: SignedTask) -> Policy:
    """A policy that pins this task's signer and analyzer, and asks for nothing else: for demonstrations."""
    task = verify(signed, signer=signed.signer.key_id)
    return Policy(
        signer=signed.signer.key_id,
        analyzer=task.analyzer.key_id,
        min_clients=task.min_clients - task.colluders,
        eps_round=None,
        eps_task=None,
        eps_lifetime=None,
        delta_lifetime=0.5,
    )


def _refuse_full(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"expected a new or empty folder, got {str(folder)!r}, which holds something")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_HOST, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Fleet:
    """The processes of a fleet, by name; leaving the context ends those that run."""

    def __init__(self, deployment: Deployment, *, workers: int = 1) -> None:
        self.deployment, self._workers = deployment, workers
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def analyzer(self) -> AnalyzerLink:
        """The analyzer, to ask it."""
        return AnalyzerLink(self.deployment.analyzer_url, ca=self.deployment.authority)

    def shuffler(self, index: int = 0) -> ShufflerLink:
        """A shuffler, to ask it as its owner."""
        key = KeyRing(self.deployment.folder / f"shuffler-{index}" / "keys", "sign").current()
        return ShufflerLink(self.deployment.shuffler_urls[index], index=index, ca=self.deployment.authority, key=key)

    def start_analyzer(self) -> None:
        """Start it, or start it again."""
        deployment = self.deployment
        config, model = deployment.folder / _CONFIG, deployment.folder / _MODEL
        learning = ["--config", config] if config.exists() else ["--model", model, "--learning-rate", 1]
        options = ["--keys", deployment.folder / "analyzer" / "keys", *learning]
        self._start(
            "analyzer", "analyzer", deployment.folder / "analyzer", *options, *self._service(deployment.analyzer_port)
        )

    def start_shuffler(self, index: int) -> None:
        """Start it, or start it again."""
        deployment, home = self.deployment, self.deployment.folder / f"shuffler-{index}"
        peers = [("--peer", url) for i, url in enumerate(deployment.shuffler_urls) if i != index]
        options = [
            *("--keys", home / "keys", "--index", index, "--analyzer", deployment.analyzer_url),
            *("--clients", deployment.folder / "clients.json", "--ca", deployment.authority),
            *(word for pair in peers for word in pair),
        ]
        self._start(f"shuffler-{index}", "shuffler", home, *options, *self._service(deployment.shuffler_ports[index]))

    def start_clients(self, processes: int) -> None:
        """Start the users, dealt to so many processes."""
        deployment = self.deployment
        for index in range(min(processes, deployment.clients)):
            users = ",".join(str(user) for user in range(index, deployment.clients, processes))
            options = ["--config", deployment.folder / _CONFIG, "--ca", deployment.authority, "--users", users]
            shufflers = [word for url in deployment.shuffler_urls for word in ("--shuffler", url)]
            self._start(f"clients-{index}", "client", "run", deployment.folder / "clients", *shufflers, *options)

    def start(self, *, processes: int = 2) -> None:
        """Start everybody."""
        self.start_analyzer()
        for index in range(len(self.deployment.shuffler_ports)):
            self.start_shuffler(index)
        self.start_clients(processes)

    def follow(
        self, *, seconds: float, observe: Callable[[int, int], None] = lambda done, rounds: None
    ) -> dict[str, Any]:
        """Wait until the training is over; what the analyzer says then."""
        link, end = self.analyzer(), time.monotonic() + seconds
        while time.monotonic() < end:
            self._check()
            try:
                status = link.status()
                observe(status.round if status.over else status.round - 1, self.deployment.task.rounds)
                if status.over:
                    return self.privacy()
            except Unreachable:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"expected the training to be over in {seconds:g} seconds, got no end to it")

    def privacy(self) -> dict[str, Any]:
        """What the analyzer says of the training."""
        with contextlib.closing(self.analyzer()) as link:
            return link.privacy()

    def counts(self, name: str) -> dict[str, int]:
        """What a service counted: "analyzer" or "shuffler-0"."""
        link = self.analyzer() if name == "analyzer" else self.shuffler(int(name.rpartition("-")[2]))
        with contextlib.closing(link):
            return link.counts()

    def _service(self, port: int) -> list[object]:
        folder = self.deployment.folder
        certificate = folder / f"tls-{_HOST}.crt", folder / f"tls-{_HOST}.key"
        return [
            *("--task", folder / "task.json", "--signer", self.deployment.signed.signer.key_id.hex()),
            *("--host", _HOST, "--port", port, "--certificate", certificate[0], "--private-key", certificate[1]),
            *("--workers", self._workers),
        ]

    def _start(self, name: str, *words: object) -> None:
        with (self.deployment.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "dovetail.cli", *map(str, words)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                log = (self.deployment.folder / f"{name}.log").read_text().strip().splitlines()
                raise RuntimeError(f"{name} ended with status {process.returncode}: {log[-1] if log else ''}")
