"""Clients of a small transformer, or of another model: Dovetail's round beside a plain loop over the same batches.

10 clients x 600 images of 28 x 28, one local epoch of SGD in batches of 10: 600 steps. The plain loop is what one would
write for a single model on all records: `lax.scan` over 600 batches of 10, compiled, on one device with JAX's own
threads. Dovetail also clips, adds noise and averages. They take turns; medians of rounds, by the wall clock and by the
processor time of all threads. With two cores, a ratio of .5 by the wall clock is what two devices can reach.
"""

import argparse
import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.losses import cross_entropy
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

CLIENTS, SAMPLES, BATCH, RATE, SIDE, CLASSES = 10, 600, 10, 0.1, 28, 10


def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    inputs = rng.random((CLIENTS * SAMPLES, SIDE, SIDE), dtype=np.float32)
    labels = rng.integers(0, CLASSES, len(inputs)).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=CLASSES)


def federated_training(data: Dataset, model: Model) -> Callable[[], object]:
    engine = Engine(
        model=model,
        dataset=data,
        clients=Clients.from_rows(np.arange(CLIENTS * SAMPLES).reshape(CLIENTS, SAMPLES)),
        update=ClientUpdate(update="fedavg", learning_rate=RATE, batch=BATCH),
        protocol=build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 1.0}),
        server=Server(),
        cohort_size=CLIENTS,
        randomness=Randomness.from_os(0),
    )
    everyone = np.arange(CLIENTS, dtype=np.int32)
    return lambda: engine.step(engine.start(), everyone, index=0, capacity=CLIENTS)


def plain(data: Dataset, model: Model) -> Callable[[], object]:
    x = jnp.asarray(data.inputs).reshape(-1, BATCH, SIDE, SIDE)
    y, first = jnp.asarray(data.labels).reshape(-1, BATCH), model.init(jax.random.key(0))

    def step(params: object, batch: tuple[jax.Array, jax.Array]) -> tuple[object, None]:
        slopes = jax.grad(lambda p: cross_entropy(model.apply(p, batch[0]), batch[1]).mean())(params)
        return jax.tree.map(lambda w, g: w - RATE * g, params, slopes), None

    epoch = jax.jit(lambda params, x, y: jax.lax.scan(step, params, (x, y))[0])
    return lambda: epoch(first, x, y)


def medians(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """By both clocks, after one round to compile; the ways take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            wall, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(way())
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    both = {name: np.median(taken[1:], axis=0) for name, taken in times.items()}
    return {name: {"wall": float(wall), "processor": float(processor)} for name, (wall, processor) in both.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=("transformer", "cnn", "mlp"), default=["transformer"])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    use_all_cores()
    rows = []
    data = dataset()
    for name in arguments.models:
        _, model = models.build(name, data)
        by_engine = medians(
            {"dovetail": federated_training(data, model), "plain": plain(data, model)}, arguments.rounds
        )
        rows.append({"model": name, **by_engine})
    if arguments.json:
        print(json.dumps({"benchmark": "transformer", "rows": rows}))
        return
    table = Table("model", "clock", "Dovetail, s/round", "plain loop, s", "Dovetail / plain")
    for row in rows:
        for clock in ("wall", "processor"):
            ours, theirs = row["dovetail"][clock], row["plain"][clock]
            table.add_row(row["model"], clock, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
