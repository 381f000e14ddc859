"""What the limits of `parties.http.server` cost: uploads to an aggregator behind them, and under uvicorn as it comes.

Both serve the same application on uvloop and httptools. Uvicorn as it comes has no limits on connections, heads, slow
senders or unread answers. Each repetition takes both in turn, over the same prepared uploads of 15 KB: on connections
that stay, and on fresh ones. Compared are uploads a second, processor time of the service for each, latency, and the
memory of a connection that asked once and stays.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _http_load import LAST, Prepared, only, poll_counts, processor_of, request_of, wait_for
from _load import Load

from dovetail.parties.fleet import HOST, Deployment, Fleet

SERVERS = ("uvicorn", "dovetail")
SILENT = 300  # connections whose memory is measured


class ServedFleet(Fleet):
    """A fleet whose services run on this server."""

    def __init__(self, deployment: Deployment, server: str) -> None:
        super().__init__(deployment)
        self._server = server

    def _service_command(self) -> list[str]:
        return [sys.executable, str(Path(__file__).resolve()), "--serve", self._server]


def serve(kind: str, words: list[str]) -> None:
    """The command line of Dovetail, with its services on this server."""
    from uvicorn import Server
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from dovetail import cli
    from dovetail.parties.http import server

    if kind == "uvicorn":
        server.BoundedServer = lambda config, max_connections: Server(config)  # type: ignore[assignment,misc]
        server.Connection = HttpToolsProtocol  # type: ignore[assignment,misc]
    sys.argv = ["dovetail", *words]
    cli.main()


def resident(fleet: Fleet) -> float:
    """KiB that the aggregator has in memory."""
    lines = Path(f"/proc/{fleet.processes[f'aggregator-{LAST}'].pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmRSS")))


def silent_memory(fleet: Fleet, load: Load) -> float:
    """KiB for each of so many connections that asked once and stay."""
    question = request_of("GET", "/v1/status")
    only(load.run(([question] for _ in range(SILENT)), connections=SILENT, fresh=True))
    time.sleep(1)
    before = resident(fleet)
    load._todo, load._fresh, load._lines, load._poll = iter(()), False, {}, select.epoll()
    lines = [load._connect() for _ in range(SILENT)]
    while not all(line.tls.shaken for line in lines):
        load._step()
    for line in lines:
        line.sock.send(line.tls.send(question))
    time.sleep(1)
    each = (resident(fleet) - before) / SILENT
    for line in lines:
        line.sock.close()
    return each


def measure(prepared: Prepared, server: str, *, kept: int, fresh: int) -> dict[str, float]:
    """One server, from a store that is empty."""
    deployment = prepared.deployment
    name = f"aggregator-{LAST}"
    for path in (deployment.folder / name).iterdir():
        if path.name.startswith("store.db"):
            path.unlink()
        elif path.name == "segments":
            shutil.rmtree(path)
    with ServedFleet(deployment, server) as fleet:
        fleet.start_analyzer()
        fleet.start_service(LAST)
        wait_for(lambda: fleet.service(LAST).status().round == 1)
        time.sleep(0.5)
        load = Load((HOST, deployment.service_ports[LAST]))
        memory = silent_memory(fleet, load)
        os.sync()
        start = processor_of(fleet, name)
        stay = only(load.run(([upload] for upload in prepared.uploads(0, kept)), connections=64))
        middle = processor_of(fleet, name)
        new = only(load.run(([upload] for upload in prepared.uploads(kept, kept + fresh)), connections=64, fresh=True))
        end = processor_of(fleet, name)
        if (taken := poll_counts(fleet, kept + fresh)["accepted"]) != kept + fresh:
            raise RuntimeError(f"{kept + fresh} uploads were sent and {taken} accepted")
    return {
        "kept_rate": stay.rate,
        "kept_p50_ms": 1000 * stay.quantile(0.5),
        "kept_p99_ms": 1000 * stay.quantile(0.99),
        "kept_processor_ms": 1000 * (middle - start) / kept,
        "fresh_rate": new.rate,
        "fresh_p99_ms": 1000 * new.quantile(0.99),
        "fresh_processor_ms": 1000 * (end - middle) / fresh,
        "silent_kib": memory,
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--kept", type=int, default=6000, help="uploads on connections that stay")
    parser.add_argument("--fresh", type=int, default=1500, help="uploads on connections of their own")
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {server: [] for server in SERVERS}
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        prepared = Prepared(Path(folder) / "fleet", arguments.kept + arguments.fresh)
        for number in range(arguments.repetitions):
            for server in SERVERS if number % 2 == 0 else reversed(SERVERS):
                figures = measure(prepared, server, kept=arguments.kept, fresh=arguments.fresh)
                runs[server].append(figures)
                print(number, server, json.dumps({key: round(value, 2) for key, value in figures.items()}), flush=True)
    for name in runs["uvicorn"][0]:
        plain, bounded = (np.array([run[name] for run in runs[server]]) for server in SERVERS)
        low, median, high = np.quantile(bounded / plain, [0, 0.5, 1])
        print(
            f"{name}: uvicorn {np.median(plain):.2f}, dovetail {np.median(bounded):.2f}, "
            f"ratio {median:.2f} ({low:.2f} to {high:.2f})"
        )


if __name__ == "__main__":
    main()
