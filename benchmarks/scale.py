"""Seconds per round for 1,000 to 1,000,000 clients, and the memory that takes: the same engine on CPU and GPU.

Clients of logistic regression (d = 7850) with 60 samples each, one local epoch in batches of 10, clip, Gaussian noise.
All clients take part in every round. Records are a pool of 60,000 that clients index into, as in Geyer et al.'s larger
federations, so that the data of a million clients is a table of indices.
"""

import argparse
import json
import resource
import time

import jax
import numpy as np

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

POOL, SAMPLES, FEATURES, CLASSES = 60_000, 60, 784, 10


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


def seconds_a_round(dataset: Dataset, count: int, *, rounds: int) -> float:
    rng = np.random.default_rng(1)
    engine = Engine(
        model=logistic(),
        dataset=dataset,
        clients=Clients.from_rows(rng.integers(0, POOL, (count, SAMPLES), dtype=np.int32)),
        update=ClientUpdate(update="fedavg", batch=10),
        protocol=build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 1.0}),
        server=Server(),
        cohort_size=count,
        randomness=Randomness.from_os(0),
    )
    users, training, taken = np.arange(count, dtype=np.int32), engine.start(), []
    for index in range(rounds + 1):
        began = time.perf_counter()
        training = jax.block_until_ready(engine.step(training, users, index=index, capacity=count))
        taken.append(time.perf_counter() - began)
    return float(np.median(taken[1:]))


def peak_mb() -> float:
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("peak_bytes_in_use", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000])
    arguments = parser.parse_args()
    use_all_cores()
    dataset, first, rows = pool(), None, []
    for count in arguments.clients:
        seconds = seconds_a_round(dataset, count, rounds=5 if count <= 100_000 else 2)
        first = first or seconds / count
        row = {
            "clients": count,
            "seconds": round(seconds, 5),
            "clients_per_second": round(count / seconds),
            "cost_per_client_relative_to_first": round(seconds / count / first, 3),
            "peak_mb": round(peak_mb()),
        }
        rows.append(row)
        if not arguments.json:
            print(row, flush=True)
    if arguments.json:
        print(json.dumps({"benchmark": "scale", "device": jax.devices()[0].device_kind, "rows": rows}))


if __name__ == "__main__":
    main()
