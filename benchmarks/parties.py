"""The parties at work: opening against raw `cryptography`, uploads per second, a round of 10,000, and memory.

1. Opening and tallying: parts of sealed reports through `Analyzer.count_part`, several at a time as they come from
   shufflers, over the rate at which `cryptography` alone opens such messages on one core, times the cores. With bits
   in 64 slots, and with PrivUnit's seeds, whose directions of 650 numbers have to be expanded.
2. Dummies: one worker process against as many as there are cores.
3. A round of 10,000 clients with one message each, against the services as processes over TLS: uploads per second into
   the shuffler, seconds from the last upload to the released model, peak memory of both services; and the peak memory
   of the same services after a round of 1,000.

4. The HTTP front end of an aggregator under load, with one process per core: uploads of 15 KB on 256 connections that
   stay and on fresh ones, questions for the status, with SQLite and, where it is installed, with PostgreSQL and
   segments in a folder; a round of 20,000 polite clients; with `--large`, a round of 50,000 end to end.

Clients run on the same cores as the services, so that uploads per second are what both ends make together. `--door`
runs 4 alone.
"""

import argparse
import asyncio
import concurrent.futures
import json
import os
import secrets
import ssl
import tempfile
import time
from pathlib import Path
from typing import Any

import _http_load
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.learners.server import Server
from dovetail.mechanisms import ExactSampler
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common import sealing
from dovetail.parties.common.keys import KeyPair, KeyRing
from dovetail.parties.common.wire import BATCH_ID, PART, REPORT_ID, Packed, Upload, sign_request, upload_path
from dovetail.parties.fleet import Deployment, Fleet, make_deployment

PARTS, RAW, DUMMIES = 24, 8192, 16_384
UPLOADS, FRESH, ASKED, POLITE = 16_000, 6_000, 40_000, 20_000
CLIENTS, FEWER, DIM, CONNECTIONS = 10_000, 1_000, 650, 32
KINDS: dict[str, dict[str, Any]] = {
    "bits": {"protocol": "ss_simple", "settings": {"clip_value": 1.0, "eps_local": 1.0}, "dim": 64},
    "seeds": {"protocol": "privunit", "settings": {"clip_norm": 1.0, "eps_local": 1.0}, "dim": DIM},
}


def fields(kind: str, clients: int) -> dict[str, Any]:
    return {
        **KINDS[kind],
        "name": kind,
        "rounds": 2,
        "min_clients": clients,
        "max_clients": clients,
        "round_seconds": 3600.0,
        "delta": 1e-6,
    }


def opening(kind: str, folder: Path, cores: int) -> dict[str, float]:
    """Messages per second through the analyzer, over the raw rate times cores."""
    deployment = make_deployment(folder, fields(kind, CLIENTS), shufflers=1, enrolled=[])
    task = deployment.task
    keys = KeyRing(folder / "analyzer" / "keys", "seal")
    messages = task.messages()
    public = task.analyzer.sealing_key()
    purpose = task.message_purpose(1)
    sent = messages.randomize(np.zeros(task.dim, np.float32), sampler=ExactSampler())
    count = min(PART, RAW)
    bodies = [sent.body[i % len(sent.body)].tobytes() for i in range(count)]
    slots = np.array([sent.slot[i % len(sent.slot)] for i in range(count)])
    pool = sealing.Workers(cores)
    sealed = pool.seal_all(bodies, public, purpose)
    parts = [Packed(slots, b"".join(pool.seal_all(bodies, public, purpose))).encode() for _ in range(2 + PARTS)]
    key = keys.find(task.analyzer.key_id).opening_key()
    begun = time.perf_counter()
    for message in sealed:
        sealing.open_sealed(message, key, purpose)
    raw = count / (time.perf_counter() - begun)
    learning = Learning(initial=np.zeros(task.dim, np.float32), server=Server())
    analyzer = Analyzer(
        folder / "analyzer", signed=deployment.signed, signer=deployment.signed.signer.key_id, keys=keys,
        learning=learning,
        workers=cores,
    )  # fmt: skip
    batch = secrets.token_bytes(BATCH_ID)

    def take(number: int) -> None:
        analyzer.count_part(0, 1, batch, number, parts[number])

    for number in range(2):  # processes start, programs are compiled
        take(number)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        begun = time.perf_counter()
        list(threads.map(take, range(2, 2 + PARTS)))
        rate = PARTS * count / (time.perf_counter() - begun)
    if any(analyzer.privacy()["refused_messages"].values()):
        raise RuntimeError(f"expected messages that count, got {analyzer.privacy()['refused_messages']}")
    analyzer.close()
    pool.stop()
    return {"raw_per_core": raw, "opened_and_tallied": rate, "ratio": rate / (raw * cores)}


def dummies(folder: Path, cores: int) -> dict[str, float]:
    """Dummies sealed a second by one worker and by all."""
    deployment = make_deployment(folder, fields("bits", CLIENTS), shufflers=1, enrolled=[])
    task = deployment.task
    bodies = [b"\1"] * DUMMIES
    rates = {}
    for workers in (1, cores):
        pool = sealing.Workers(workers)
        pool.seal_all(bodies[:1024], task.analyzer.sealing_key(), task.message_purpose(1))
        begun = time.perf_counter()
        pool.seal_all(bodies, task.analyzer.sealing_key(), task.message_purpose(1))
        rates[workers] = DUMMIES / (time.perf_counter() - begun)
        pool.stop()
    return {"one_worker": rates[1], "all_workers": rates[cores], "ratio": rates[cores] / rates[1]}


def whole_round(folder: Path, clients: int, cores: int) -> dict[str, float]:
    """A round of one-message clients against the services."""
    pairs = [KeyPair.generate("sign") for _ in range(clients)]
    deployment = make_deployment(
        folder, fields("seeds", clients), shufflers=1, enrolled=[pair.public for pair in pairs]
    )
    np.save(folder / "model.npy", np.zeros(DIM, np.float32))
    sampler, messages = ExactSampler(), deployment.task.messages()
    begun = time.perf_counter()
    seeds = [messages.randomize(np.zeros(DIM, np.float32), sampler=sampler).body[0].tobytes() for _ in range(64)]
    randomized = 64 / (time.perf_counter() - begun)
    pool = sealing.Workers(cores)
    sealed = pool.seal_all(
        [seeds[i % 64] for i in range(clients)],
        deployment.task.analyzer.sealing_key(),
        deployment.task.message_purpose(1),
    )
    pool.stop()
    path = upload_path(deployment.task.task_id, 1, 0)
    bodies = [sealed_upload(deployment, pair, bytes(4) + message) for pair, message in zip(pairs, sealed, strict=True)]
    headers = [sign_request(pair, "POST", path, body) for pair, body in zip(pairs, bodies, strict=True)]
    with Fleet(deployment, workers=cores) as fleet:
        fleet.start_analyzer()
        fleet.start_service(0)
        _http_load.wait_for(lambda: fleet.service().status().round == 1)
        begun = time.perf_counter()
        asyncio.run(upload(deployment, path, bodies, headers))
        uploaded = time.perf_counter()
        _http_load.wait_for(lambda: fleet.analyzer().status().round == 2, 300.0)
        done = time.perf_counter()
        uploads = fleet.privacy()["history"][0]["uploads"]
        peaks = {name: peak_mib(process.pid) for name, process in fleet.processes.items()}
    if uploads != clients:
        raise RuntimeError(f"expected {clients} uploads in the round, got {uploads}")
    return {
        "clients": clients,
        "randomized_a_second": randomized,
        "uploads_a_second": clients / (uploaded - begun),
        "release_seconds": done - uploaded,
        "round_seconds": done - begun,
        "shuffler_peak_mib": peaks["shuffler-0"],
        "analyzer_peak_mib": peaks["analyzer"],
    }


def sealed_upload(deployment: Deployment, pair: KeyPair, content: bytes) -> bytes:
    """What a user posts: its messages, sealed to the shuffler."""
    report = secrets.token_bytes(REPORT_ID)
    purpose = deployment.task.upload_purpose(1, 0, sender=pair.public.key_id, report=report)
    return Upload(report, sealing.seal(content, deployment.task.shufflers[0].seal.sealing_key(), purpose)).encode()


async def upload(deployment: Deployment, path: str, bodies: list[bytes], headers: list[dict[str, str]]) -> None:
    """Over a few connections that stay open; by hand, for an HTTP library would cost more than the service."""
    context = ssl.create_default_context(cafile=str(deployment.authority))
    host, port = "127.0.0.1", deployment.service_ports[0]
    todo = iter(zip(bodies, headers, strict=True))

    async def send() -> None:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        for body, header in todo:
            lines = [f"POST {path} HTTP/1.1", f"host: {host}", f"content-length: {len(body)}"]
            lines += [f"{name}: {value}" for name, value in header.items()]
            writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
            answer = await reader.readexactly(length)
            if b" 200 " not in head.split(b"\r\n")[0]:
                raise RuntimeError(answer.decode())
        writer.close()

    await asyncio.gather(*(send() for _ in range(CONNECTIONS)))


def peak_mib(pid: int) -> float:
    """The peak resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--door", action="store_true")
    stores = "SQLite,PostgreSQL" if _http_load.has_postgres() else "SQLite"
    parser.add_argument("--stores", default=stores, help="with which the front end is measured; empty: it is not")
    parser.add_argument("--polite", type=int, default=POLITE)
    parser.add_argument("--large", type=int, default=0, metavar="CLIENTS")
    arguments = parser.parse_args()
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as name:
        folder = Path(name)
        figures: dict[str, Any] = {"cores": cores}
        if not arguments.door:
            figures |= {
                "bits": opening("bits", folder / "bits", cores),
                "seeds": opening("seeds", folder / "seeds", cores),
                "dummies": dummies(folder / "dummies", cores),
                "fewer": whole_round(folder / "fewer", min(FEWER, arguments.clients), cores),
                "round": whole_round(folder / "round", arguments.clients, cores),
            }
        figures |= at_the_front_end(folder, cores, arguments)
    if arguments.json:
        print(json.dumps(figures))
        return
    table = Table(title=f"parties, {cores} cores")
    for heading in ("what", "figure", "aim"):
        table.add_column(heading)
    for row in (*([] if arguments.door else round_rows(figures)), *front_end_rows(figures)):
        table.add_row(*row)
    Console().print(table)


def at_the_front_end(folder: Path, cores: int, arguments: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"door": []}
    load = {"doors": cores, "clients": UPLOADS, "fresh": FRESH, "num_questions": ASKED, "connections": 256}
    for kind in arguments.stores.split(",") if arguments.stores else ():
        figures["door"].append(_http_load.throughput(folder / f"door-{kind}", kind=kind, **load))
    if arguments.polite:
        options = {"clients": arguments.polite, "connections": 256, "round_seconds": 600.0}
        figures["polite"] = _http_load.polite(folder / "polite", doors=cores, **options)
    if arguments.large:
        options = {"clients": arguments.large, "connections": 128}
        figures["large"] = _http_load.large_round(folder / "large", doors=cores, **options)
    return figures


def front_end_rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for door in figures["door"]:
        bytes_ = f"{door['upload_bytes']:,} bytes"
        fresh = f"{door['fresh_uploads_a_second']:,.0f}"
        rows += [
            (f"{door['store']}: uploads of {bytes_} a second", f"{door['uploads_a_second']:,.0f}", ">= 3,800"),
            ("  of which 99 of 100 within", f"{door['uploads_p99_ms']:.0f} ms", "< 150 ms"),
            ("  uploads a second, each on a fresh connection", fresh, ">= 900"),
            ("  status a second", f"{door['status_a_second']:,.0f}", ">= 8,000"),
        ]
    if (polite := figures.get("polite")) is not None:
        rows += [
            (f"visits of {polite['clients']:,} polite clients a second", f"{polite['visits_a_second']:,.0f}", ""),
            ("  refused", str(polite["refused"]), "0"),
            ("  processor time of the service per client", f"{polite['service_ms_a_client']:.2f} ms", ""),
            ("  memory of all processes", f"{polite['memory_mib']:.0f} MiB", "< 1 GB"),
        ]
    if (large := figures.get("large")) is not None:
        peaks = ", ".join(f"{name} {mib:.0f}" for name, mib in large["peaks_mib"].items())
        rows += [
            (f"a round of {large['clients']:,} by shares, uploads", f"{large['upload_seconds']:.1f} s", ""),
            ("  from the last upload to the model", f"{large['release_seconds']:.1f} s", "< 20 s"),
            ("  peak memory in MiB", peaks, "bounded"),
        ]
    return rows


def round_rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    bits, seeds, few, many = (figures[key] for key in ("bits", "seeds", "fewer", "round"))
    return [
        ("raw opens a second and core", f"{bits['raw_per_core']:,.0f}", ""),
        ("opened and tallied, bits: over raw x cores", f"{bits['ratio']:.2f}x", ">= 0.70x"),
        ("opened and tallied, seeds of 650: over raw x cores", f"{seeds['ratio']:.2f}x", ""),
        ("dummies sealed: all workers over one", f"{figures['dummies']['ratio']:.2f}x", ""),
        (f"uploads per second, {many['clients']:,} clients", f"{many['uploads_a_second']:,.0f}", ""),
        (f"a round of {many['clients']:,}, end to end", f"{many['round_seconds']:.1f} s", ""),
        ("  of which from the last upload to the model", f"{many['release_seconds']:.1f} s", ""),
        (f"analyzer's peak memory: {many['clients']:,} over {few['clients']:,} reports",
         f"{many['analyzer_peak_mib'] / few['analyzer_peak_mib']:.2f}x ({many['analyzer_peak_mib']:.0f} MiB)", "flat"),
        (f"shuffler's peak memory: {many['clients']:,} over {few['clients']:,} reports",
         f"{many['shuffler_peak_mib'] / few['shuffler_peak_mib']:.2f}x ({many['shuffler_peak_mib']:.0f} MiB)", "flat"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
