"""An aggregator's HTTP under load: uploads of 15 KB, fresh connections, status, polite clients, a large round."""

import contextlib
import importlib.util
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _load import Load, Measured

from dovetail.parties.common import sealing
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.wire import REPORT_ID, Upload, sign_request, upload_path
from dovetail.parties.fleet import HOST, Deployment, Fleet, make_deployment

DIM = 4_650  # so that the last aggregator's upload has 15 KB
LAST = 1  # the aggregator whose share is packed numbers
FIELDS: dict[str, Any] = {
    "protocol": "secagg",
    "settings": {"clip_norm": 1.0, "noise_multiplier": 1.0},
    "dim": DIM,
    "name": "http",
    "rounds": 2,
    "round_seconds": 3600.0,
    "delta": 1e-6,
}


class Prepared:
    """Uploads of so many users to every aggregator in round 1, as requests, in a file that is mapped."""

    def __init__(self, folder: Path, clients: int, *, aggregators: tuple[int, ...] = (LAST,), **fields: Any) -> None:
        pairs = [KeyPair.generate("sign") for _ in range(clients)]
        limits = {"min_clients": clients, "max_clients": clients}
        enrolled = [pair.public for pair in pairs]
        self.deployment = make_deployment(folder, {**FIELDS, **limits, **fields}, aggregators=2, enrolled=enrolled)
        np.save(folder / "model.npy", np.zeros(DIM, np.float32))
        task = self.deployment.task
        shares = task.sharing().shard(np.zeros(DIM, np.int64), nonce=bytes(16))
        self._places: list[list[tuple[int, int]]] = []
        with (folder / "requests").open("wb") as file:
            for pair in pairs:
                report, places = secrets.token_bytes(REPORT_ID), []
                for index in aggregators:
                    request = self._request(pair, report, index, shares[index])
                    places.append((file.tell(), file.tell() + len(request)))
                    file.write(request)
                self._places.append(places)
        with (folder / "requests").open("rb") as file:
            self._data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        self.upload_bytes = self._places[0][-1][1] - self._places[0][-1][0]

    def _request(self, pair: KeyPair, report: bytes, index: int, share: bytes) -> bytes:
        task = self.deployment.task
        path = upload_path(task.task_id, 1, index)
        purpose = task.upload_purpose(1, index, sender=pair.public.key_id, report=report)
        body = Upload(report, sealing.seal(share, task.aggregators[index].seal.sealing_key(), purpose)).encode()
        return request_of("POST", path, body, **sign_request(pair, "POST", path, body))

    def uploads(self, low: int, high: int, *, at: int = 0) -> Iterator[bytes]:
        """Of these users, to the aggregator at this place of those that were prepared for."""
        for user in range(low, high):
            begin, end = self._places[user][at]
            yield self._data[begin:end]  # type: ignore[misc]


def request_of(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {HOST}", *(f"{name}: {value}" for name, value in headers.items())]
    if body:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class StoredFleet(Fleet):
    """A fleet whose aggregators keep their state where these words say."""

    def __init__(self, deployment: Deployment, *, words: Sequence[object], doors: int) -> None:
        super().__init__(deployment, http_workers=doors)
        self._words = words

    def _start_process(self, name: str, *words: object) -> None:
        super()._start_process(name, *words, *(self._words if name.startswith("aggregator") else ()))


@contextlib.contextmanager
def storage(kind: str, folder: Path) -> Iterator[list[object]]:
    """Words for an aggregator that keeps its state in SQLite, or in a PostgreSQL database with segments beside it."""
    if kind == "SQLite":
        yield []
        return
    made = importlib.util.spec_from_file_location("cluster", Path(__file__).parents[1] / "tests/parties/cluster.py")
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    with module.cluster() as server:
        yield ["--store", server.database(), "--segments", folder / "shared"]


def has_postgres() -> bool:
    return any(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def fleet_of(
    deployment: Deployment, doors: int, aggregators: tuple[int, ...] = (LAST,), words: Sequence[object] = ()
) -> Fleet:
    """The analyzer and these aggregators, with a round that is open."""
    fleet = StoredFleet(deployment, words=words, doors=doors)
    fleet.start_analyzer()
    for index in aggregators:
        fleet.start_service(index)
        wait_for(lambda index=index: fleet.service(index).status().round == 1)  # type: ignore[misc]
    time.sleep(0.5)  # every process of it has heard of the round
    return fleet


def wait_for(condition: Any, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if condition():
                return
        except (ConnectionError, ValueError):
            pass
        time.sleep(0.05)
    raise TimeoutError(f"expected the services to get on in {seconds} seconds, got no progress")


def memory_of(fleet: Fleet, name: str) -> float:
    """The peak resident memory of all processes of a service, in MiB, each with what it shares."""
    first = fleet.processes[name].pid
    return sum(_peak(pid) for pid in (first, *_children(first)))


def processor_of(fleet: Fleet, name: str) -> float:
    """Seconds that the processes of a service have computed."""
    first = fleet.processes[name].pid
    return sum(_processor_seconds(pid) for pid in (first, *_children(first)))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [descendant for child in map(int, children) for descendant in (child, *_children(child))]


def _peak(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def poll_counts(fleet: Fleet, accepted: int) -> dict[str, int]:
    """What a service counted; its processes tell each other twice a second."""
    for _ in range(20):
        counts = fleet.service(LAST).counts()
        if counts.get("accepted") == accepted:
            break
        time.sleep(0.1)
    return counts


def only(measured: Measured, status: int = 200) -> Measured:
    """The same, if there was no other answer."""
    if set(measured.statuses) != {status}:
        raise RuntimeError(f"expected answers with status {status} alone, got {measured.statuses}")
    return measured


def throughput(
    folder: Path, *, kind: str, doors: int, clients: int, fresh: int, num_questions: int, connections: int
) -> dict[str, Any]:
    """Uploads on connections that stay, uploads on fresh ones, and questions for the status, in one run."""
    prepared = Prepared(folder, clients + fresh)
    with storage(kind, folder) as words, fleet_of(prepared.deployment, doors, words=words) as fleet:
        load = Load((HOST, prepared.deployment.service_ports[LAST]))
        os.sync()  # what was prepared, and what ran before, is on disk: the service waits for its own writes alone
        kept = only(load.run(([upload] for upload in prepared.uploads(0, clients)), connections=connections))
        new = only(
            load.run(([upload] for upload in prepared.uploads(clients, clients + fresh)), connections=64, fresh=True)
        )
        question = request_of("GET", "/v1/status")
        status = only(load.run(([question] for _ in range(num_questions)), connections=64))
        taken = poll_counts(fleet, clients + fresh)["accepted"]
        memory = memory_of(fleet, f"aggregator-{LAST}")
    if taken != clients + fresh:
        raise RuntimeError(f"expected {clients + fresh} uploads that were taken, got {taken}")
    return {
        "store": kind,
        "upload_bytes": prepared.upload_bytes,
        "uploads_a_second": kept.rate,
        "uploads_p50_ms": 1000 * kept.quantile(0.5),
        "uploads_p99_ms": 1000 * kept.quantile(0.99),
        "fresh_uploads_a_second": new.rate,
        "fresh_p99_ms": 1000 * new.quantile(0.99),
        "status_a_second": status.rate,
        "memory_mib": memory,
        "cores": os.cpu_count(),
    }


def polite(folder: Path, *, doors: int, clients: int, connections: int, round_seconds: float) -> dict[str, Any]:
    """A round of clients that connect, fetch task, status and model, upload, leave, and come back when they were told.

    Each visit is a connection of its own. What they are told is in the answer to the upload; they come back after it.
    """
    limits = {"min_clients": clients // 2, "max_clients": 2 * clients, "round_seconds": round_seconds}
    prepared = Prepared(folder, clients, **limits)
    task = prepared.deployment.task.task_id.hex()
    requests = [request_of("GET", path) for path in ("/v1/task", "/v1/status", f"/v1/tasks/{task}/models/0")]
    with fleet_of(prepared.deployment, doors) as fleet:
        load = Load((HOST, prepared.deployment.service_ports[LAST]))
        scripts = ([*requests, upload] for upload in prepared.uploads(0, clients))
        before = processor_of(fleet, f"aggregator-{LAST}")
        visits = only(load.run(scripts, connections=connections, fresh=True))
        back = only(load.run(([requests[1]] for _ in range(clients)), connections=connections, fresh=True))
        computed = processor_of(fleet, f"aggregator-{LAST}") - before
        taken = poll_counts(fleet, clients)
        memory = memory_of(fleet, f"aggregator-{LAST}")
    if taken.get("accepted") != clients or any(name.startswith("refused") for name in taken):
        raise RuntimeError(f"expected {clients} uploads that were taken and no refusal, got {taken}")
    return {
        "clients": clients,
        "visits_a_second": visits.rate,
        "visits_p99_ms": 1000 * visits.quantile(0.99),
        "returns_a_second": back.rate,
        "refused": 0,
        "service_ms_a_client": 1000 * computed / clients,
        "memory_mib": memory,
    }


def large_round(folder: Path, *, doors: int, clients: int, connections: int) -> dict[str, Any]:
    """A round by shares, end to end: every client uploads to both aggregators."""
    prepared = Prepared(folder, clients, aggregators=(0, LAST))
    ports = prepared.deployment.service_ports
    with fleet_of(prepared.deployment, doors, (0, LAST)) as fleet:
        begun = time.perf_counter()
        for at in (0, LAST):
            only(
                Load((HOST, ports[at])).run(
                    ([upload] for upload in prepared.uploads(0, clients, at=at)), connections=connections
                )
            )
        uploaded = time.perf_counter()
        wait_for(lambda: fleet.analyzer().status().round == 2, 300.0)
        done = time.perf_counter()
        (ended,) = fleet.privacy()["history"]
        peaks = {name: memory_of(fleet, name) for name in fleet.processes}
    if (ended["outcome"], ended["uploads"]) != ("released", clients):
        raise RuntimeError(f"expected a round of {clients} that was released, got {ended}")
    return {
        "clients": clients,
        "upload_seconds": uploaded - begun,
        "release_seconds": done - uploaded,
        "peaks_mib": peaks,
    }
