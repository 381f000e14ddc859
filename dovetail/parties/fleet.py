"""The processes of a whole fleet on this machine, for demonstrations, benchmarks and tests.

`Fleet` starts the processes of a `Deployment`, looks after them and ends them. Users share a few processes, each with
its own key, policy, ledger and outbox.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from dovetail.parties.aggregator.party import REFUSED
from dovetail.parties.common.keys import KeyRing
from dovetail.parties.common.links import AnalyzerLink, IntermediaryLink, Unreachable
from dovetail.parties.deployment import CONFIG, MODEL, Deployment

__all__ = ["Fleet"]


class Fleet:
    """The processes of a fleet, by name; leaving the context ends those that run.

    The last `hostile` users do not clip what they share. Shufflers or aggregators answer the door by `doors` processes.
    """

    def __init__(self, deployment: Deployment, *, workers: int = 1, hostile: int = 0, doors: int = 1) -> None:
        self.deployment, self._workers, self._hostile, self._doors = deployment, workers, hostile, doors
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

    def service(self, index: int = 0) -> IntermediaryLink:
        """A shuffler or aggregator, to ask it as its owner."""
        deployment = self.deployment
        key = KeyRing(deployment.folder / deployment.services[index] / "keys", "sign").current()
        return IntermediaryLink(deployment.service_urls[index], index=index, ca=deployment.authority, key=key)

    def start_analyzer(self) -> None:
        """Start it, or start it again."""
        deployment = self.deployment
        config, model = deployment.folder / CONFIG, deployment.folder / MODEL
        learning = ["--config", config] if config.exists() else ["--model", model, "--learning-rate", 1]
        options = ["--keys", deployment.folder / "analyzer" / "keys", *learning, "--workers", self._workers]
        self._start(
            "analyzer", "analyzer", deployment.folder / "analyzer", *options, *self._service(deployment.analyzer_port)
        )

    def start_service(self, index: int) -> None:
        """Start a shuffler or aggregator, or start it again."""
        deployment, name = self.deployment, self.deployment.services[index]
        home = deployment.folder / name
        peers = [("--peer", url) for i, url in enumerate(deployment.service_urls) if i != index]
        options = [
            *("--keys", home / "keys", "--index", index, "--analyzer", deployment.analyzer_url),
            *("--clients", deployment.folder / "clients.json", "--ca", deployment.authority),
            *(word for pair in peers for word in pair),
            *("--doors", self._doors),
            *(("--workers", self._workers) if deployment.kind == "shuffler" else ()),
        ]
        self._start(name, deployment.kind, home, *options, *self._service(deployment.service_ports[index]))

    def start_clients(self, processes: int) -> None:
        """Start the users, dealt to so many processes."""
        deployment = self.deployment
        for index in range(min(processes, deployment.clients)):
            users = ",".join(str(user) for user in range(index, deployment.clients, processes))
            options = ["--config", deployment.folder / CONFIG, "--ca", deployment.authority, "--users", users]
            options += ["--witness", deployment.folder / "witness"]
            services = [word for url in deployment.service_urls for word in ("--service", url)]
            if self._hostile:
                unruly = range(deployment.clients - self._hostile, deployment.clients)
                options += ["--hostile", ",".join(map(str, unruly))]
            self._start(f"clients-{index}", "client", "run", deployment.folder / "clients", *services, *options)

    def start(self, *, processes: int = 2) -> None:
        """Start everybody."""
        self.start_analyzer()
        for index in range(len(self.deployment.services)):
            self.start_service(index)
        self.start_clients(processes)

    def follow(
        self, *, seconds: float, observe: Callable[[int, int], None] = lambda done, rounds: None
    ) -> dict[str, Any]:
        """Wait until the training is over; what the analyzer says then, and seconds a round and bytes a user took.

        The seconds of the first round begin here, with everybody's start.
        """
        link, end, done, since = self.analyzer(), time.monotonic() + seconds, 0, time.monotonic()
        took: list[float] = []
        while time.monotonic() < end:
            self._check()
            try:
                status = link.status()
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
        raise TimeoutError(f"expected the training to be over in {seconds:g} seconds, got no end to it")

    def privacy(self) -> dict[str, Any]:
        """What the analyzer says of the training."""
        with contextlib.closing(self.analyzer()) as link:
            return link.privacy()

    def refused(self) -> list[dict[str, Any]]:
        """Whose proofs aggregators refused, and in which round: what they tell who enrols users."""
        path = self.deployment.folder / self.deployment.services[0] / REFUSED
        return json.loads(path.read_text()) if path.exists() else []

    def counts(self, name: str) -> dict[str, int]:
        """What a service counted: "analyzer", "shuffler-0" or "aggregator-0"."""
        link = self.analyzer() if name == "analyzer" else self.service(int(name.rpartition("-")[2]))
        with contextlib.closing(link):
            return link.counts()

    def _service(self, port: int) -> list[object]:
        folder = self.deployment.folder
        host = self.deployment.host
        certificate = folder / f"tls-{host}.crt", folder / f"tls-{host}.key"
        return [
            *("--task", folder / "task.json", "--signer", self.deployment.signed.signer.key_id.hex()),
            *("--host", host, "--port", port, "--certificate", certificate[0], "--private-key", certificate[1]),
        ]

    def _start(self, name: str, *words: object) -> None:
        with (self.deployment.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*self._command(), *map(str, words)],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "dovetail.cli"]

    def _check(self) -> None:
        for name, process in self.processes.items():
            if process.poll() not in (None, 0):
                log = (self.deployment.folder / f"{name}.log").read_text().strip().splitlines()
                raise RuntimeError(f"{name} ended with status {process.returncode}: {log[-1] if log else ''}")
