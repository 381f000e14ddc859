"""One large user among many small ones: seconds per round against the round without it plus that user alone.

2,000 users with 10 records each, and one with 5,000; all take part in every round, under dp_fl. The three federations
of a row take turns in one process, and the median of each counts. Without classes by size (`size_classes = 1`), every
user would be computed as wide as the largest: the last column, measured for the cheapest row only.
"""

import argparse
import json
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.data._base import Clients, Dataset
from dovetail.engine import Engine, Performance
from dovetail.engine.devices import use_all_cores
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

USERS, RECORDS, LARGE = 2_000, 10, 5_000
UPDATES = {"fedsgd": ClientUpdate(), "fedavg": ClientUpdate(update="fedavg", batch=10, learning_rate=0.05)}
MODELS = {"logistic": 9, "mlp": 7, "cnn": 3}  # rounds that are timed


def data() -> Dataset:
    rng = np.random.default_rng(0)
    total = USERS * RECORDS + LARGE
    inputs = rng.integers(0, 256, (total, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, total).astype(np.int32)
    return Dataset(inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=10)


def federations() -> dict[str, Clients]:
    records = np.arange(USERS * RECORDS + LARGE, dtype=np.int32)
    small = np.full(USERS, RECORDS, np.int32)
    return {
        "small": Clients(records=records[: USERS * RECORDS], counts=small),
        "large": Clients(records=records[USERS * RECORDS :], counts=np.array([LARGE], np.int32)),
        "both": Clients(records=records, counts=np.append(small, np.int32(LARGE))),
    }


def seconds(dataset: Dataset, model: str, update: ClientUpdate, rounds: int, *, padded: bool) -> dict[str, float]:
    federation_clients = federations()
    if padded:
        federation_clients["padded"] = federation_clients["both"]
    dataset, built = models.build(model, dataset)
    engines = {
        name: Engine(
            model=built,
            dataset=dataset,
            clients=clients,
            update=update,
            protocol=build("dp_fl", {"clip_norm": 1.0, "noise_multiplier": 1.0}),
            server=Server(),
            cohort_size=clients.num_clients,
            randomness=Randomness.from_os(0),
            performance=Performance(size_classes=1 if name == "padded" else None),
        )
        for name, clients in federation_clients.items()
    }
    states = {name: engine.start() for name, engine in engines.items()}
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(rounds + 1):
        for name, engine in engines.items():
            users = np.arange(federation_clients[name].num_clients, dtype=np.int32)
            began = time.perf_counter()
            states[name] = jax.block_until_ready(engine.step(states[name], users, index=index, capacity=len(users)))
            taken[name].append(time.perf_counter() - began)
    return {name: float(np.median(times[1:])) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    use_all_cores()
    dataset, rows = data(), []
    for model in arguments.models:
        for update, settings in UPDATES.items():
            took = seconds(dataset, model, settings, MODELS[model], padded=(model, update) == ("logistic", "fedsgd"))
            ratio = took["both"] / (took["small"] + took["large"])
            rows.append({"model": model, "update": update, **took, "over_small_plus_large": round(ratio, 3)})
    if arguments.json:
        print(json.dumps({"benchmark": "unequal", "device": jax.devices()[0].device_kind, "rows": rows}))
        return
    table = Table("model", "update", "small, s", "large, s", "both, s", "both / (small + large)", "padded, s")
    for row in rows:
        times = [f"{row[name]:.4f}" for name in ("small", "large", "both")]
        padded = f"{row['padded']:.3f}" if "padded" in row else "-"
        table.add_row(row["model"], row["update"], *times, f"{row['over_small_plus_large']:.2f}", padded)
    Console().print(table)


if __name__ == "__main__":
    main()
