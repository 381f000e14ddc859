"""Large models: seconds per round and peak memory, for protocols that draw or select per coordinate.

An MLP 784-h-10 of about so many parameters, users with two images each, one gradient step; everyone in every round,
with noise from the operating system. Every row is a process of its own, so that the peak is that of the row; what the
process holds before the first round (data, the compiler, the first model) is in the peak, and also shown by itself.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.events import Everyone
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import Cohort, build
from dovetail.randomness import Randomness

FEATURES, CLASSES, RECORDS = 784, 10, 2
SETTINGS = {
    "privunit": {"eps_local": 8.0},
    "ss_topk": {"eps_local": 4.0},
    "secagg": {"noise_multiplier": 1.0},
    "ldp_fl": {},
    "dp_fl": {"clip_norm": 1.0, "noise_multiplier": 1.0},
}
ROWS = [
    ("privunit", 10**6, 1000),
    ("ss_topk", 10**6, 1000),
    ("secagg", 10**6, 1000),
    ("dp_fl", 10**6, 1000),
    ("privunit", 10**7, 100),
    ("ss_topk", 10**7, 1000),
    ("secagg", 10**7, 1000),
    ("dp_fl", 10**7, 1000),
]


def mlp(dim: int) -> Model:
    """One hidden layer, as wide as makes about so many parameters."""
    hidden = round((dim - CLASSES) / (FEATURES + 1 + CLASSES))

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {
            "first": jax.random.normal(first, (FEATURES, hidden)) / FEATURES**0.5,
            "shift": jax.numpy.zeros(hidden),
            "second": jax.random.normal(second, (hidden, CLASSES)) / hidden**0.5,
            "bias": jax.numpy.zeros(CLASSES),
        }

    def apply(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:
        rows = inputs.reshape(len(inputs), -1)
        return jax.nn.relu(rows @ params["first"] + params["shift"]) @ params["second"] + params["bias"]

    return Model(name="mlp", init=init, apply=apply)


def engine_for(protocol: str, dim: int, users: int, *, records: int = RECORDS) -> Engine:
    """The round that is timed."""
    rng, total = np.random.default_rng(0), users * records
    inputs = rng.integers(0, 256, (total, FEATURES), dtype=np.uint8)
    labels = rng.integers(0, CLASSES, total).astype(np.int32)
    model = mlp(dim)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
    cohort = Cohort(participation=Everyone(), size=users, min_size=users)
    return Engine(
        model=model,
        dataset=Dataset(
            inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=CLASSES
        ),
        clients=Clients.from_rows(np.arange(total, dtype=np.int32).reshape(users, records)),
        update=ClientUpdate(),
        protocol=build(protocol, SETTINGS[protocol]).settle(cohort, size),
        server=Server(),
        cohort_size=users,
        randomness=Randomness.from_os(0),
    )


def resident_mb() -> float:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(protocol: str, dim: int, users: int, rounds: int) -> dict[str, object]:
    """One row, in this process."""
    use_all_cores()
    engine = engine_for(protocol, dim, users)
    training, everyone = engine.start(), np.arange(users, dtype=np.int32)
    before, taken, worked = resident_mb(), [], []
    for index in range(rounds + 1):
        began, worked_before = time.perf_counter(), time.process_time()
        training = jax.block_until_ready(engine.step(training, everyone, index=index, capacity=users))
        taken.append(time.perf_counter() - began)
        worked.append(time.process_time() - worked_before)
    return {
        "protocol": protocol,
        "dim": engine.dim,
        "users": users,
        "seconds": float(np.median(taken[1:] or taken)),
        "processor_seconds": float(np.median(worked[1:] or worked)),
        "first": taken[0],
        "before_mb": round(before),
        "peak_mb": round(resident_mb()),
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="these protocols")
    parser.add_argument("--dims", type=float, nargs="+", help="these dimensions")
    parser.add_argument("--rounds", type=int, default=2, help="after the first; with 0 that, compiling, is the figure")
    parser.add_argument("--row", nargs=3, help="PROTOCOL DIM USERS: this row alone, in this process")
    arguments = parser.parse_args()
    if arguments.row:
        protocol, dim, users = arguments.row
        print(json.dumps(measure(protocol, int(float(dim)), int(users), arguments.rounds)))
        return
    rows = []
    for protocol, dim, users in ROWS:
        if protocol in (arguments.only or SETTINGS) and dim in (arguments.dims or [dim]):
            command = [
                sys.executable,
                __file__,
                "--rounds",
                str(arguments.rounds),
                "--row",
                protocol,
                str(dim),
                str(users),
            ]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    if arguments.json:
        print(json.dumps({"benchmark": "large", "rows": rows}))
        return
    table = Table("protocol", "parameters", "users", "s/round", "first round, s", "peak, MB", "of that before, MB")
    for row in rows:
        cells = (row["seconds"], row["first"])
        table.add_row(
            row["protocol"],
            f"{row['dim']:,}",
            f"{row['users']:,}",
            *(f"{cell:.2f}" for cell in cells),
            f"{row['peak_mb']:,}",
            f"{row['before_mb']:,}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
