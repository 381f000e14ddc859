"""The workloads on Dovetail's own engine: the same command line and the same result line as the peers."""

import argparse
import time

import jax
import numpy as np
import workload

from dovetail.data import Clients, Dataset, Model
from dovetail.engine import Engine
from dovetail.engine.devices import use_all_cores
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness


def engine(name: str, *, count: int, samples: int, batch: int, model: Model | None = None) -> Engine:
    """The engine on a workload, with Dovetail's own model of this name or with another."""
    inputs = np.empty((count * samples, workload.FEATURES), np.float32)
    labels = np.empty(count * samples, np.int32)
    for i, (x, y) in enumerate(workload.clients(count=count, samples=samples)):
        inputs[i * samples : (i + 1) * samples], labels[i * samples : (i + 1) * samples] = x, y
    inputs = inputs.reshape(-1, 28, 28) if name == "cnn" else inputs
    dataset = Dataset(
        inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=workload.CLASSES
    )
    if model is None:
        dataset, model = models.build(name, dataset)
    built = Engine(
        model=model,
        dataset=dataset,
        clients=Clients.from_rows(np.arange(count * samples).reshape(count, samples)),
        update=ClientUpdate(update="fedavg", learning_rate=workload.LEARNING_RATE, epochs=1, batch=batch),
        protocol=build("dp_fl", {"clip_norm": workload.CLIP, "noise_multiplier": workload.NOISE}),
        server=Server(),
        cohort_size=count,
        randomness=Randomness.from_os(0),
    )
    if built.dim != workload.PARAMETERS[name]:
        raise ValueError(f"expected {workload.PARAMETERS[name]} parameters, got {built.dim}")
    return built


def measure(built: Engine, arguments: argparse.Namespace, *, name: str = "dovetail", workers: int = 0) -> None:
    """Print the result of the engine's rounds."""
    training, users, seconds = built.start(), np.arange(arguments.clients, dtype=np.int32), []
    for index in range(arguments.warmup + arguments.rounds):
        began = time.perf_counter()
        training = built.step(training, users, index=index, capacity=len(users))
        jax.block_until_ready(training)
        seconds.append(time.perf_counter() - began)
    workload.report(
        engine=name,
        workers=workers or built.mesh.size,
        workload=arguments.workload,
        seconds=seconds[arguments.warmup :],
        peak_mb=workload.peak_rss_mb() + workload.children_peak_rss_mb(),
    )


def main() -> None:
    arguments = workload.options(__doc__, workloads=workload.SIZES)
    use_all_cores()
    built = engine(arguments.workload, count=arguments.clients, samples=arguments.samples, batch=arguments.batch)
    measure(built, arguments)


if __name__ == "__main__":
    main()
