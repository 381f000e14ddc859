"""Seconds per round of Flower's simulation (ServerApp and ClientApp under run_simulation, Ray actors of one CPU each).

Clients of logistic regression train in NumPy, which is faster here than PyTorch, and send their model as one array;
those of the CNN train the module of `modules` in PyTorch. Both clip with Flower's client-side clipping, which is faster
than its server-side one; the server averages and adds the noise with Flower's
DifferentialPrivacyClientSideFixedClipping around FedAvg. Every actor loads the data of all clients once, in the warm-up
round. A round is timed from the moment the strategy starts to configure it until the new global model is there. Peak
memory is that of the actors and of the process that runs the server, without Ray's own daemons.
"""

import argparse
import functools
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable

import workload

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
os.environ.update(QUIET)

import numpy as np  # noqa: E402
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg  # noqa: E402
from flwr.simulation import run_simulation  # noqa: E402

ENGINE = "flower 1.41.0"

logging.getLogger("flwr").setLevel(logging.WARNING)
client_app = ClientApp(mods=[fixedclipping_mod])


@functools.cache
def population(count: int, samples: int, data: str) -> list[workload.Client]:
    path = pathlib.Path(data) if data else None
    return list(workload.clients(count=count, samples=samples, data=path))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    everyone = population(config["clients"], config["samples"], config["data"])
    features, labels = everyone[context.node_config["partition-id"]]
    arrays = message.content["arrays"].to_numpy_ndarrays()
    if config["workload"] == "logistic":
        arrays = [arrays[0].copy()]
        steps = sgd_epoch(arrays[0], features, labels, batch=config["batch"])
    else:
        arrays, steps = torch_epoch(config["workload"], arrays, features, labels, batch=config["batch"])
    metrics = {"num-examples": len(labels), "steps": steps, "pid": os.getpid(), "peak-mb": workload.peak_rss_mb()}
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


def sgd_epoch(parameters: np.ndarray, features: np.ndarray, labels: np.ndarray, *, batch: int) -> int:
    """Train the multinomial logistic regression in place for one epoch; return the number of steps."""
    weights = parameters[: -workload.CLASSES].reshape(workload.FEATURES, workload.CLASSES)
    bias = parameters[-workload.CLASSES :]
    starts = range(0, len(labels), batch)
    for start in starts:
        x, y = features[start : start + batch], labels[start : start + batch]
        scores = x @ weights + bias
        gradient = np.exp(scores - scores.max(axis=1, keepdims=True))
        gradient /= gradient.sum(axis=1, keepdims=True)
        gradient[np.arange(len(y)), y] -= 1.0
        gradient *= np.float32(workload.LEARNING_RATE / len(y))
        weights -= x.T @ gradient
        bias -= gradient.sum(axis=0)
    return len(starts)


@functools.cache
def network(name: str):
    import modules
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(workload.SEED)
    layers = torch.nn.Sequential(*modules.layers(name)).to(memory_format=torch.channels_last)
    return modules.check_parameters(name, layers)


def torch_epoch(
    name: str, arrays: list[np.ndarray], features: np.ndarray, labels: np.ndarray, *, batch: int
) -> tuple[list[np.ndarray], int]:
    """One epoch of the module in PyTorch; return its parameters and the number of steps."""
    import modules
    import torch

    module, x = network(name), torch.from_numpy(features).reshape(-1, *modules.shape(name))
    with torch.no_grad():
        for parameter, array in zip(module.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array.copy()))
    optimiser = torch.optim.SGD(module.parameters(), lr=workload.LEARNING_RATE)
    starts = range(0, len(labels), batch)
    for start in starts:
        optimiser.zero_grad()
        outputs = module(x[start : start + batch])
        torch.nn.functional.cross_entropy(outputs, torch.from_numpy(labels[start : start + batch])).backward()
        optimiser.step()
    return [parameter.detach().numpy().copy() for parameter in module.parameters()], len(starts)


class TimedStrategy(DifferentialPrivacyClientSideFixedClipping):
    """Flower's central DP with the seconds of every round, the peak memory of the actors and a check of the replies."""

    def __init__(self, *, clients: int, steps: int) -> None:
        average = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        super().__init__(average, workload.NOISE, workload.CLIP, clients)
        self.seconds: list[float] = []
        self.actors: dict[int, float] = {}
        self._clients = clients
        self._steps = steps

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self._start = time.perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        self.seconds.append(time.perf_counter() - self._start)
        self._check(replies)
        return result

    def _check(self, replies: list[Message]) -> None:
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
        done = [reply.content["metrics"] for reply in replies]
        if len(done) != self._clients or any(metrics["steps"] != self._steps for metrics in done):
            raise RuntimeError(f"{len(done)} of {self._clients} clients took part, not all with {self._steps} steps")
        for metrics in done:
            self.actors[metrics["pid"]] = max(metrics["peak-mb"], self.actors.get(metrics["pid"], 0.0))


def simulate(arguments: argparse.Namespace) -> None:
    """Run the simulation and print the result."""
    strategy = TimedStrategy(clients=arguments.clients, steps=-(-arguments.samples // arguments.batch))
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        if arguments.workload == "logistic":
            first = [np.zeros(workload.PARAMETERS["logistic"], np.float32)]
        else:
            first = [parameter.detach().numpy() for parameter in network(arguments.workload).parameters()]
        config = {
            "workload": arguments.workload,
            "clients": arguments.clients,
            "samples": arguments.samples,
            "batch": arguments.batch,
            "data": str(arguments.data.resolve()) if arguments.data else "",
        }
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(first),
            num_rounds=arguments.warmup + arguments.rounds,
            train_config=ConfigRecord(config),
            timeout=None,
        )

    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as scratch:
        os.environ["FLWR_HOME"] = scratch
        run_simulation(
            server_app,
            client_app,
            num_supernodes=arguments.clients,
            backend_config={
                "client_resources": {"num_cpus": 1},
                "init_args": {"num_cpus": arguments.workers, "log_to_driver": False, "_temp_dir": scratch},
            },
        )
    workload.report(
        engine=ENGINE,
        workers=len(strategy.actors),
        workload=arguments.workload,
        seconds=strategy.seconds[arguments.warmup :],
        peak_mb=workload.peak_rss_mb() + sum(strategy.actors.values()),
    )


if __name__ == "__main__":
    import flower_clients  # Ray pickles the ClientApp by reference only when it lives in an importable module

    flower_clients.simulate(workload.options(__doc__, workloads=workload.SIZES))
