"""Seconds per round against users, parameters and records per user, and the memory that takes: is any line bent?

- *users*: logistic regression (d = 7850), 60 records each, one local epoch in batches of 10, clip, Gaussian noise.
  Records are a pool of 60,000 that users index into, as in Geyer et al.'s larger federations, so that the data of a
  million users is a table of indices. From 1,000 to 100,000 users; `--clients` gives others.
- *records*: the same with 100 users of 10 to 10,000 records each.
- *parameters*: the MLP of `large.py` with 100 users of two records, 1e4 to 1e7 parameters, for several protocols.
  Beside them "plain sum": NumPy adds 100 vectors of that length to another, on every core. Where that line bends,
  vectors have outgrown the cache.

Everyone takes part in every round; medians after one round to compile. "Against a straight line" is by how much more
the time grew than the size did, since the row above: above 1, the line bends upwards. With `--store` points are kept in
a file as they are measured, and those that are there already are not measured again. On a machine that others use,
`--clock processor` compares the processor time of all threads in place of the wall clock's.
"""

import argparse
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from large import engine_for
from rich.console import Console
from rich.table import Table

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.figures import Figure, Line, save
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

POOL, SAMPLES, FEATURES, CLASSES = 60_000, 60, 784, 10
CLIENTS, RECORDS, DIMS = [1_000, 10_000, 100_000], [10, 100, 1_000, 10_000], [10**4, 10**5, 10**6, 10**7]
PLAIN, PROTOCOLS = "plain sum", ("dp_fl", "ss_topk", "secagg", "privunit")
SECONDS = 5.0  # no more rounds than so long


def logistic() -> Model:
    return Model(
        name="logistic",
        init=lambda key: jax.numpy.zeros((FEATURES + 1, CLASSES)),
        apply=lambda params, inputs: inputs.reshape(len(inputs), -1) @ params[:-1] + params[-1],
        constant=1.0,
    )


def pool() -> Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (POOL, FEATURES), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, POOL).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=CLASSES)


def federation(dataset: Dataset, users: int, records: int) -> Engine:
    rng = np.random.default_rng(1)
    return Engine(
        model=logistic(),
        dataset=dataset,
        clients=Clients.from_rows(rng.integers(0, POOL, (users, records), dtype=np.int32)),
        update=ClientUpdate(update="fedavg", batch=10),
        protocol=build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 1.0}),
        server=Server(),
        cohort_size=users,
        randomness=Randomness.from_os(0),
    )


class PlainSum:
    """Adds a vector of this length to another, as often as there are users, on every core."""

    def __init__(self, dim: int) -> None:
        self._pairs = [(np.zeros(dim, np.float32), np.ones(dim, np.float32)) for _ in range(os.cpu_count() or 1)]
        self._threads = ThreadPoolExecutor(len(self._pairs))

    def start(self) -> None:
        return None

    def step(self, training: None, users: np.ndarray, *, index: int, capacity: int) -> None:
        def add_in_place(total: np.ndarray, vector: np.ndarray) -> None:
            for _ in range(math.ceil(capacity / len(self._pairs))):
                np.add(total, vector, out=total)  # without Python's lock

        list(self._threads.map(add_in_place, *zip(*self._pairs, strict=True)))


def seconds_a_round(engine: Engine | PlainSum, count: int) -> dict[str, float]:
    """Medians of up to five rounds, by both clocks."""
    users, training, taken, worked = np.arange(count, dtype=np.int32), engine.start(), [], []
    while len(taken) < 6 and (len(taken) < 2 or sum(taken[1:]) < SECONDS):
        began, worked_before = time.perf_counter(), time.process_time()
        training = jax.block_until_ready(engine.step(training, users, index=len(taken), capacity=count))
        taken.append(time.perf_counter() - began)
        worked.append(time.process_time() - worked_before)
    return {"wall": float(np.median(taken[1:])), "processor": float(np.median(worked[1:]))}


def peak_mb() -> float:
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**20


def sweeps(
    clients: list[int], dims: list[int]
) -> Iterator[tuple[str, str, list[int], Callable[[int], Engine | PlainSum], int | None]]:
    """What grows, the line's name, its sizes, the engine at a size, and how many users take part if not so many."""
    dataset = pool()
    yield "users", "dp_fl", clients, lambda count: federation(dataset, count, SAMPLES), None
    yield "records", "dp_fl", RECORDS, lambda count: federation(dataset, 100, count), 100
    yield "parameters", PLAIN, dims, PlainSum, 100
    for protocol in PROTOCOLS:
        yield "parameters", protocol, dims, lambda dim, name=protocol: engine_for(name, dim, 100), 100


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    stored = json.loads(arguments.store.read_text()) if arguments.store and arguments.store.exists() else []
    rows: list[dict[str, object]] = []
    for axis, protocol, sizes, engine, users in sweeps(arguments.clients, [int(dim) for dim in arguments.dims]):
        before = None
        for size in sizes if axis in arguments.against and protocol in arguments.protocols else []:
            point = {"axis": axis, "protocol": protocol, "size": size}
            row = next((row for row in stored if point.items() <= row.items()), None)
            if row is None:
                row = {**point, **seconds_a_round(engine(size), users or size), "peak_mb": peak_mb()}
                stored.append(row)
                if arguments.store:
                    arguments.store.write_text(json.dumps(stored))
            seconds = row[arguments.clock]
            bend = None if before is None else seconds / before[1] / (size / before[0])
            before = size, seconds
            rows.append({**row, "seconds": seconds, "bend": bend})
            if not arguments.json:
                print({**rows[-1], "seconds": round(seconds, 5)}, flush=True)
    return rows


def figure(rows: list[dict[str, object]], clock: str) -> Figure:
    """All lines in one, each from its own smallest size; a dashed one is straight."""
    lines = []
    for name in dict.fromkeys((row["axis"], row["protocol"]) for row in rows):
        line = [row for row in rows if (row["axis"], row["protocol"]) == name]
        first = line[0]["size"]
        label = f"{name[0]} from {first:,} ({name[1]})"
        lines.append(Line(name=label, x=[row["size"] / first for row in line], y=[row["seconds"] for row in line]))
    most = max(max(line.x) for line in lines)
    least = min(min(line.y) for line in lines)
    lines.append(Line(name="in proportion", x=[1, most], y=[least, least * most], style="dashed"))
    return Figure(
        title="Seconds per round, as a federation grows",
        x_label="times the smallest",
        y_label=f"{clock} seconds per round",
        lines=lines,
        log_x=True,
        log_y=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--against", nargs="+", choices=("users", "records", "parameters"), default=["users", "records", "parameters"]
    )
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--dims", type=float, nargs="+", default=DIMS)
    parser.add_argument("--protocols", nargs="+", choices=(PLAIN, *PROTOCOLS), default=[PLAIN, *PROTOCOLS])
    parser.add_argument("--store", type=Path, help="keep points in this file, and go on from those in it")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--plot", type=Path, help="also draw the lines into this file")
    arguments = parser.parse_args()
    use_all_cores()
    rows = measure(arguments)
    if arguments.plot:
        save(figure(rows, arguments.clock), arguments.plot)
    if arguments.json:
        print(json.dumps({"benchmark": "scale", "device": jax.devices()[0].device_kind, "rows": rows}))
        return
    table = Table("against", "protocol", "size", "s/round", "against a straight line", "peak so far, MB")
    for row in rows:
        bend = "-" if row["bend"] is None else f"{row['bend']:.2f}"
        cells = (f"{row['size']:,}", f"{row['seconds']:.4f}", bend, f"{row['peak_mb']:,.0f}")
        table.add_row(str(row["axis"]), str(row["protocol"]), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
