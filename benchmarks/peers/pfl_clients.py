"""Seconds per round of pfl's simulation (SimulatedBackend, FederatedAveraging, PyTorchModel, GaussianMechanism).

Started once, it starts `--workers` copies of itself, one torch thread each, which pfl joins into one simulation over
torch.distributed (gloo on loopback) because PFL_WORKER_ADDRESSES is set. User data sits in memory as tensors before
the first round; a round is timed from the end of the one before it to the update of the global model.
"""

import argparse
import os
import socket
import subprocess
import sys
import time

import modules
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import workload
from pfl.aggregate.base import get_num_devices_weight_name
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism

ENGINE = "pfl 0.6.0"


class Network(torch.nn.Sequential):
    """A classifier with the `loss` and `metrics` that PyTorchModel asks for; there is nothing to evaluate here."""

    def loss(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(features), labels)

    def metrics(self, features: torch.Tensor, labels: torch.Tensor) -> dict:
        return {}


class Laps(TrainingProcessCallback):
    """Collect the wall-clock seconds of every round and check that every client took part in it."""

    def __init__(self, clients: int) -> None:
        self.seconds: list[float] = []
        self._clients = clients

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._start = time.perf_counter()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        now = time.perf_counter()
        self.seconds.append(now - self._start)
        self._start = now
        devices = aggregate_metrics[get_num_devices_weight_name(Population.TRAIN)]
        if devices != self._clients:
            raise RuntimeError(f"{devices} of {self._clients} clients took part in round {central_iteration}")
        return False, Metrics()


def launch(*, workers: int) -> int:
    """Run one copy of this script per worker; when one fails, end the others and return its exit status."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PFL_PYTORCH_DEVICE": "cpu",
        "PFL_WORKER_ADDRESSES": ",".join(f"127.0.0.1:{free_port()}" for _ in range(workers)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    command = [sys.executable, *sys.argv]
    processes = [
        subprocess.Popen(command, env={**environment, "PFL_WORKER_RANK": str(rank)}) for rank in range(workers)
    ]
    try:
        return first_failure(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_failure(processes: list[subprocess.Popen]) -> int:
    """Wait until one process fails or all are done; return the exit status of the failed one, or 0."""
    while True:
        states = [process.poll() for process in processes]
        failed = [state for state in states if state]
        if failed or None not in states:
            return failed[0] if failed else 0
        time.sleep(0.1)


def simulate(arguments: argparse.Namespace) -> None:
    """Run this worker's share of the simulation; rank 0 prints the result."""
    torch.set_num_threads(1)
    np.random.seed(workload.SEED)  # noqa: NPY002 - pfl draws from it
    torch.manual_seed(workload.SEED)
    group = pytorch_ops.distributed
    if arguments.clients % group.world_size:
        raise ValueError("the number of clients must be a multiple of the number of workers")

    data = dataset(arguments, rank=group.global_rank, world_size=group.world_size)
    mechanism = GaussianMechanism(clipping_bound=workload.CLIP, relative_noise_stddev=workload.NOISE)
    laps = Laps(arguments.clients)
    rounds = arguments.warmup + arguments.rounds
    FederatedAveraging().run(
        backend=SimulatedBackend(data, data, postprocessors=[CentrallyAppliedPrivacyMechanism(mechanism)]),
        model=model(arguments.workload),
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=arguments.clients,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.LEARNING_RATE, local_batch_size=arguments.batch
        ),
        callbacks=[laps],
        send_metrics_to_platform=False,
    )
    (peak,) = group.all_reduce([torch.tensor([workload.peak_rss_mb()])])
    if group.global_rank == 0:
        workload.report(
            engine=ENGINE,
            workers=group.world_size,
            workload=arguments.workload,
            seconds=laps.seconds[arguments.warmup :],
            peak_mb=peak.item(),
        )


def dataset(arguments: argparse.Namespace, *, rank: int, world_size: int) -> FederatedDataset:
    """Hold the users that pfl's sampler gives to this rank: it deals them out in order, one to each rank in turn."""
    shape = (-1, *modules.shape(arguments.workload))
    users = {}
    everyone = workload.clients(count=arguments.clients, samples=arguments.samples, data=arguments.data)
    for user, (features, labels) in enumerate(everyone):
        if user % world_size == rank:
            tensors = (torch.from_numpy(features).reshape(shape), torch.from_numpy(labels))
            users[user] = PyTorchTensorDataset(tensors, user_id=str(user))
    return FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(arguments.clients)))


def model(name: str) -> PyTorchModel:
    network = modules.check_parameters(name, Network(*modules.layers(name)).to(memory_format=torch.channels_last))
    return PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )


def main() -> int:
    arguments = workload.options(__doc__, workloads=workload.SIZES)
    if "PFL_WORKER_RANK" not in os.environ:
        return launch(workers=arguments.workers)
    simulate(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
