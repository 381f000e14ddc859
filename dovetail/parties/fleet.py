"""A whole fleet on this machine, for demonstrations, benchmarks and tests: its folder, and its processes.

The folder holds what every party would have on its own, each in a folder of its own: keys, policy, the signed task.
`set_up_fleet` makes it from a config, with users; `make_deployment` without users and their config, for a fleet that
starts from `model.npy`. `Fleet` starts the processes of such a `Deployment`, watches them and ends them. Users share a
few processes, each with its own key, policy, ledger and outbox.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail import protocols
from dovetail.events import Everyone
from dovetail.experiment.config import Config, to_toml
from dovetail.parties.aggregator.store import REFUSED
from dovetail.parties.common.certificates import make_authority, make_certificate
from dovetail.parties.common.guarantees import calibrate_noise
from dovetail.parties.common.http_clients import AnalyzerClient, IntermediaryClient, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, PublicKey, ServicePairs
from dovetail.parties.common.measures import measures_by_name, total_size_of_measures
from dovetail.parties.common.task import SignedTask, TrainingTask, sign, verify
from dovetail.parties.federation import load_federation
from dovetail.parties.user.policy import Policy
from dovetail.statements import NotApplicable

__all__ = [
    "CONFIG",
    "HOST",
    "MODEL",
    "Deployment",
    "Fleet",
    "free_ports",
    "lenient_policy",
    "make_deployment",
    "set_up_fleet",
]

HOST = "127.0.0.1"
CONFIG, MODEL = "config.toml", "model.npy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """The folder of a fleet, its task, and where its services listen.

    Arguments:
        folder: what all parties have, each in a folder of its own.
        signed: the task with its signature.
        task: the task.
        analyzer_port: where the analyzer listens.
        service_ports: where the shufflers or aggregators listen.
        clients: number of users.
        host: where all of them listen.
    """

    folder: Path
    signed: SignedTask
    task: TrainingTask
    analyzer_port: int
    service_ports: tuple[int, ...]
    clients: int
    host: str = HOST

    @property
    def kind(self) -> str:
        """Whether "shuffler"s or "aggregator"s stand between users and analyzer."""
        return "aggregator" if self.task.aggregators else "shuffler"

    @property
    def services(self) -> tuple[str, ...]:
        """The names of the shufflers or aggregators, which are those of their folders."""
        return tuple(f"{self.kind}-{index}" for index in range(len(self.service_ports)))

    @property
    def authority(self) -> Path:
        """The certificate that all parties trust."""
        return self.folder / "authority.crt"

    @property
    def analyzer_url(self) -> str:
        """The URL of the analyzer."""
        return f"https://{self.host}:{self.analyzer_port}"

    @property
    def service_urls(self) -> tuple[str, ...]:
        """The URLs of the shufflers or aggregators."""
        return tuple(f"https://{self.host}:{port}" for port in self.service_ports)


def set_up_fleet(
    folder: Path,
    config: Config,
    *,
    rounds: int,
    clients: int,
    shufflers: int | None = None,
    aggregators: int | None = None,
    min_clients: int | None = None,
    measures: Sequence[str] = (),
    held_out: float = 0.0,
    round_seconds: float = 120.0,
) -> Deployment:
    """Make the folder of a fleet from a config, with a key and a policy for every user.

    Arguments:
        folder: new, or empty.
        config: the experiment: task, protocol, model and privacy.
        rounds: rounds of the task.
        clients: number of users.
        shufflers: how many; None: as many as the protocol needs, if it can be shuffled.
        aggregators: how many; None: two, if there are no shufflers.
        min_clients: users that a round needs; None: all.
        measures: names of what users report beside updates.
        held_out: share of users that only measure.
        round_seconds: how long a round takes in reports.
    """
    _refuse_used_folder(folder)
    _refuse_undeployed_cohort(config)
    trained = load_federation(config)
    beside = measures_by_name(measures, classes=trained.dataset.num_classes)
    dim = trained.dim + total_size_of_measures(beside)
    between = _num_services(config, clients, dim, shufflers=shufflers, aggregators=aggregators)
    terms = {
        "protocol": config.protocol["name"],
        "dim": dim,
        "rounds": rounds,
        "min_clients": clients if min_clients is None else min_clients,
        "max_clients": clients,
        "colluders": config.cohort.colluders,
        "eps": config.privacy.eps,
        "delta": config.privacy.delta,
    }
    settings = calibrate_noise(settings=config.protocol_settings, aggregators=between.get("aggregators"), **terms)
    fields = {
        "name": config.task.name,
        "settings": settings,
        "round_seconds": round_seconds,
        **terms,
        "measures": beside,
        "held_out": held_out,
    }
    pairs = [KeyPair.generate("sign") for _ in range(clients)]
    enrolled = [pair.public for pair in pairs]
    deployment = make_deployment(
        folder,
        fields,
        enrolled=enrolled,
        shufflers=between.get("shufflers", 0),
        aggregators=between.get("aggregators", 0),
    )
    (folder / CONFIG).write_text(to_toml(config), encoding="utf-8")
    policy = lenient_policy(deployment.signed)
    is_personal = deployment.task.build()[0].budgets is not None
    for user, pair in enumerate(pairs):
        home = folder / "clients" / f"user-{user}"
        home.mkdir(parents=True, mode=0o700)
        pair.save(home / "key.json")
        (home / "policy.json").write_bytes(msgspec.json.encode(policy.with_number(user) if is_personal else policy))
    return deployment


def _num_services(
    config: Config, clients: int, dim: int, *, shufflers: int | None, aggregators: int | None
) -> dict[str, int]:
    """How many shufflers or aggregators there are, by kind."""
    if shufflers is not None and aggregators is not None:
        raise ValueError("a fleet has either shufflers or aggregators: leave out one of the two numbers")
    if aggregators is not None:
        return {"aggregators": aggregators}
    built = protocols.build(config.protocol["name"], config.protocol_settings)
    if (own := getattr(built, "aggregators", None)) is not None:
        return {"aggregators": own}
    if shufflers is None and not built.shuffled:
        return {"aggregators": 2}
    cohort = protocols.Cohort(participation=Everyone(), size=clients, min_size=clients)
    if shufflers is None and built.is_calibrated:
        try:
            built.settle(cohort, dim).messages(dim)
        except NotApplicable:
            return {"aggregators": 2}
    return {"shufflers": shufflers or int(config.protocol_settings.get("shufflers", 1))}


def make_deployment(
    folder: Path,
    fields: Mapping[str, Any],
    *,
    enrolled: Sequence[PublicKey],
    shufflers: int = 0,
    aggregators: int = 0,
    host: str = HOST,
) -> Deployment:
    """Make a folder with keys of the services, certificates and a signed task, but without users.

    Arguments:
        folder: new, or empty.
        fields: fields of the task, without its keys.
        enrolled: the public keys of the users.
        shufflers: how many.
        aggregators: how many.
        host: where services listen.
    """
    _refuse_used_folder(folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    signer = KeyRing(folder / "signer", "sign").add()
    analyzer = ServicePairs.add(folder / "analyzer" / "keys").public
    keys = {
        kind: tuple(ServicePairs.add(folder / f"{kind}-{i}" / "keys").public for i in range(count))
        for kind, count in (("shuffler", shufflers), ("aggregator", aggregators))
    }
    public: dict[str, Any] = {"analyzer": analyzer.seal, "analyzer_sign": analyzer.sign}
    task = TrainingTask(**public, shufflers=keys["shuffler"], aggregators=keys["aggregator"], **fields)
    signed = sign(task, signer)
    (folder / "task.json").write_bytes(msgspec.json.encode(signed))
    (folder / "clients.json").write_bytes(msgspec.json.encode(list(enrolled)))
    make_certificate(folder, make_authority(folder), host=host)
    ports = free_ports(1 + shufflers + aggregators)
    return Deployment(
        folder=folder,
        signed=signed,
        task=task,
        analyzer_port=ports[0],
        service_ports=tuple(ports[1:]),
        clients=len(enrolled),
        host=host,
    )


def lenient_policy(signed: SignedTask) -> Policy:
    """A policy that pins the services that this task names and limits nothing: for demonstrations."""
    task = verify(signed, signer=signed.signer.key_id)
    return Policy(
        signer=signed.signer.key_id,
        analyzer=task.analyzer_id,
        min_clients=task.min_clients - task.colluders,
        eps_round=None,
        eps_task=None,
        eps_lifetime=None,
        delta_lifetime=0.5,
        shufflers=tuple(keys.key_id for keys in task.shufflers),
        aggregators=tuple(keys.key_id for keys in task.aggregators),
    )


def _refuse_undeployed_cohort(config: Config) -> None:
    """Raise ValueError for cohorts of a simulation that deployed parties do not have."""
    if config.cohort.kind == "secret":
        raise ValueError("cohort.kind = 'secret' cannot be deployed: users' data enter every round; choose another")
    if config.cohort.kind == "separated":
        raise ValueError(
            "cohort.kind = 'separated' cannot be deployed yet: deployed users upload in every round, and noise is "
            "independent between rounds; choose another kind, or a preset such as 'mnist-untrusted'"
        )


def _refuse_used_folder(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{str(folder)!r} is not empty: name a new folder for the fleet")


def free_ports(count: int) -> list[int]:
    """So many ports on which nobody listens now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class Fleet:
    """The processes of a fleet, by name; leaving the context ends those that run.

    Arguments:
        deployment: the fleet's folder and addresses.
        workers: processes of every service that seal and open messages.
        hostile: so many users, the last ones, do not clip what they share.
        http_workers: processes of every shuffler or aggregator that answer requests.
    """

    def __init__(self, deployment: Deployment, *, workers: int = 1, hostile: int = 0, http_workers: int = 1) -> None:
        self.deployment = deployment
        self._workers = workers
        self._hostile = hostile
        self._http_workers = http_workers
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

    def analyzer(self) -> AnalyzerClient:
        """A client of the analyzer."""
        return AnalyzerClient(self.deployment.analyzer_url, ca=self.deployment.authority)

    def service(self, index: int = 0) -> IntermediaryClient:
        """A client of a shuffler or aggregator, with its owner's key."""
        deployment = self.deployment
        key = KeyRing(deployment.folder / deployment.services[index] / "keys", "sign").current()
        return IntermediaryClient(deployment.service_urls[index], index=index, ca=deployment.authority, key=key)

    def start_analyzer(self) -> None:
        """Start the analyzer, or start it again."""
        deployment = self.deployment
        config = deployment.folder / CONFIG
        model = deployment.folder / MODEL
        learning = ["--config", config] if config.exists() else ["--model", model, "--learning-rate", 1]
        options = ["--keys", deployment.folder / "analyzer" / "keys", *learning, "--workers", self._workers]
        self._start_process(
            "analyzer",
            "analyzer",
            deployment.folder / "analyzer",
            *options,
            *self._service_arguments(deployment.analyzer_port),
        )

    def start_service(self, index: int) -> None:
        """Start a shuffler or aggregator, or start it again."""
        deployment = self.deployment
        name = deployment.services[index]
        home = deployment.folder / name
        peers = [("--peer", url) for i, url in enumerate(deployment.service_urls) if i != index]
        options = [
            *("--keys", home / "keys", "--index", index, "--analyzer", deployment.analyzer_url),
            *("--clients", deployment.folder / "clients.json", "--ca", deployment.authority),
            *(word for pair in peers for word in pair),
            *("--doors", self._http_workers),
            *(("--workers", self._workers) if deployment.kind == "shuffler" else ()),
        ]
        self._start_process(
            name, deployment.kind, home, *options, *self._service_arguments(deployment.service_ports[index])
        )

    def start_clients(self, processes: int) -> None:
        """Start the users, spread over so many processes."""
        deployment = self.deployment
        for index in range(min(processes, deployment.clients)):
            users = ",".join(str(user) for user in range(index, deployment.clients, processes))
            options = ["--config", deployment.folder / CONFIG, "--ca", deployment.authority, "--users", users]
            options += ["--witness", deployment.folder / "witness"]
            services = [word for url in deployment.service_urls for word in ("--service", url)]
            if self._hostile:
                unruly = range(deployment.clients - self._hostile, deployment.clients)
                options += ["--hostile", ",".join(map(str, unruly))]
            self._start_process(f"clients-{index}", "client", "run", deployment.folder / "clients", *services, *options)

    def start(self, *, processes: int = 2) -> None:
        """Start the services, and the users in so many processes."""
        self.start_analyzer()
        for index in range(len(self.deployment.services)):
            self.start_service(index)
        self.start_clients(processes)

    def wait_until_over(
        self, *, seconds: float, observe: Callable[[int, int], None] = lambda done, rounds: None
    ) -> dict[str, Any]:
        """Wait until the training is over.

        Arguments:
            seconds: how long to wait at most.
            observe: called with the rounds that are done and those that there are.

        Returns: what the analyzer says of the training, the seconds of each round (of the first from this call on), and
            the bytes of a user's upload.
        """
        client = self.analyzer()
        since = time.monotonic()
        end = since + seconds
        done = 0
        took: list[float] = []
        while time.monotonic() < end:
            self._check_processes()
            try:
                status = client.status()
                done = status.round if status.over else status.round - 1
                observe(done, self.deployment.task.rounds)
                if len(took) < done:
                    now = time.monotonic()
                    took += [(now - since) / (done - len(took))] * (done - len(took))
                    since = now
                if status.over:
                    return {**self.privacy(), "seconds": took, "bytes_per_upload": self.deployment.task.upload_bytes}
            except Unreachable:
                pass
            time.sleep(0.2)
        raise TimeoutError(
            f"the training is not over after {seconds:g} seconds, {done} of {self.deployment.task.rounds} rounds are: "
            f"the logs are in {str(self.deployment.folder)!r}"
        )

    def privacy(self) -> dict[str, Any]:
        """What the analyzer says of the training: `Analyzer.privacy`."""
        with contextlib.closing(self.analyzer()) as client:
            return client.privacy()

    def refused_users(self) -> list[dict[str, Any]]:
        """The users whose proofs aggregators refused, and the rounds, from the file for whoever enrols users."""
        path = self.deployment.folder / self.deployment.services[0] / REFUSED
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def counts(self, name: str) -> dict[str, int]:
        """The counts of a service, by its name: "analyzer", "shuffler-0" or "aggregator-0"."""
        client = self.analyzer() if name == "analyzer" else self.service(int(name.rpartition("-")[2]))
        with contextlib.closing(client):
            return client.counts()

    def _service_arguments(self, port: int) -> list[object]:
        folder = self.deployment.folder
        host = self.deployment.host
        return [
            *("--task", folder / "task.json", "--signer", self.deployment.signed.signer.key_id.hex()),
            *("--host", host, "--port", port, "--certificate", folder / f"tls-{host}.crt"),
            *("--private-key", folder / f"tls-{host}.key"),
        ]

    def _start_process(self, name: str, *words: object) -> None:
        with (self.deployment.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self._service_command(), *map(str, words)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _service_command(self) -> list[str]:
        return [sys.executable, "-m", "dovetail.cli"]

    def _check_processes(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                log = (self.deployment.folder / f"{name}.log").read_text(encoding="utf-8").strip().splitlines()
                raise RuntimeError(f"{name} ended with status {process.returncode}: {log[-1] if log else ''}")
