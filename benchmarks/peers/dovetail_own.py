"""The models of `dovetail bench own` on Dovetail's engine; `--method` says in which library they are written."""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import own_workload
import workload

from dovetail.data import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

# method: the module in this folder with `model(workload name, dataset)` for rounds of clients, as an engine is given it
# after an inspection, and `clipped_sum(workload name, dataset)` per record: a function that returns the sum's parts
VARIANTS = {"torch": "own_torch", "jax": "own_jax", "jax-transposed": "own_jax_transposed"}


def engine(chosen: own_workload.Workload, dataset: Dataset, counts: np.ndarray, model: Model) -> Engine:
    """The engine on a workload of clients."""
    built = Engine(
        model=model,
        dataset=dataset,
        clients=Clients(records=np.arange(len(dataset.labels), dtype=np.int32), counts=counts.astype(np.int32)),
        update=ClientUpdate(update="fedavg", learning_rate=workload.LEARNING_RATE, epochs=1, batch=chosen.batch),
        protocol=build("dp_fl", {"clip_norm": own_workload.CLIP, "noise_multiplier": workload.NOISE}),
        server=Server(),
        cohort_size=chosen.clients,
        randomness=Randomness.from_os(0),
    )
    if built.dim != chosen.parameters:
        raise ValueError(f"expected {chosen.parameters} parameters, got {built.dim}")
    return built


def rounds_of(built: Engine, num_clients: int) -> Callable[[], Any]:
    """A function that runs the engine's next round."""
    users = np.arange(num_clients, dtype=np.int32)
    state = [built.start(), 0]

    def step() -> None:
        state[0] = jax.block_until_ready(built.step(state[0], users, index=state[1], capacity=num_clients))
        state[1] += 1

    return step


def time_steps(step: Callable[[], Any], arguments: argparse.Namespace) -> tuple[list[float], Any]:
    """Seconds of each step that counts, and what the last one returned."""
    seconds = []
    for _ in range(arguments.warmup + arguments.rounds):
        began = time.perf_counter()
        result = step()
        seconds.append(time.perf_counter() - began)
    return seconds[arguments.warmup :], result


def main() -> None:
    arguments = own_workload.options(__doc__, variants=tuple(VARIANTS))
    use_all_cores()
    chosen = own_workload.chosen(arguments)
    counts = own_workload.sizes(chosen)
    inputs, labels = own_workload.data(chosen, counts)
    dataset = Dataset(
        inputs=inputs,
        labels=labels.astype(np.int32),
        test_inputs=inputs[:10],
        test_labels=labels[:10].astype(np.int32),
        num_classes=chosen.classes,
    )
    own = importlib.import_module(VARIANTS[arguments.method])
    if chosen.kind == "record":
        step = own.clipped_sum(arguments.workload, dataset)
    else:
        step = rounds_of(engine(chosen, dataset, counts, own.model(arguments.workload, dataset)), chosen.clients)
    seconds, sums = time_steps(step, arguments)
    own_workload.report(
        arguments,
        engine="dovetail",
        seconds=seconds,
        records=int(counts.sum()),
        peak_mb=workload.peak_rss_mb() + workload.children_peak_rss_mb(),
        sums=[np.linalg.norm(np.asarray(part, np.float64)) for part in sums or ()],
    )


if __name__ == "__main__":
    main()
