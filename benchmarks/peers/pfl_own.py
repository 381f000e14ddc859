"""Seconds per round of pfl's simulation on the models of `dovetail bench own`; workers as in `pfl_clients`."""

import argparse
import os
import sys

import numpy as np
import own_modules
import own_workload
import pfl_clients
import torch
import torch.nn.functional as F  # noqa: N812
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.model.pytorch import PyTorchModel
from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism


class Network(torch.nn.Module):
    """A module with the `loss` and `metrics` that PyTorchModel asks for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = own_modules.network(name).to(memory_format=torch.channels_last)

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.inner(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict:
        return {}


def simulate(arguments: argparse.Namespace) -> None:
    """Run this worker's share of the simulation; rank 0 prints the result."""
    torch.set_num_threads(1)
    np.random.seed(workload.SEED)  # noqa: NPY002 - pfl draws from it
    group = pytorch_ops.distributed
    chosen = own_workload.chosen(arguments)
    if chosen.clients % group.world_size:
        raise ValueError("the number of clients must be a multiple of the number of workers")
    counts = own_workload.sizes(chosen)
    inputs, labels = own_workload.data(chosen, counts)
    ends = np.cumsum(counts)
    users = {
        user: PyTorchTensorDataset(
            (torch.from_numpy(inputs[end - count : end]), torch.from_numpy(labels[end - count : end])),
            user_id=str(user),
        )
        for user, (end, count) in enumerate(zip(ends, counts, strict=True))
    }
    # the sizes let pfl share out the users evenly
    data = FederatedDataset(
        users.__getitem__,
        get_user_sampler("minimize_reuse", range(chosen.clients)),
        user_id_to_weight=dict(enumerate(counts.tolist())),
    )
    network = Network(arguments.workload)
    laps = pfl_clients.Laps(chosen.clients)
    rounds = arguments.warmup + arguments.rounds
    mechanism = GaussianMechanism(clipping_bound=own_workload.CLIP, relative_noise_stddev=workload.NOISE)
    FederatedAveraging().run(
        backend=SimulatedBackend(data, data, postprocessors=[CentrallyAppliedPrivacyMechanism(mechanism)]),
        model=PyTorchModel(
            network,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        ),
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=chosen.clients,
            val_cohort_size=None,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.LEARNING_RATE, local_batch_size=chosen.batch
        ),
        callbacks=[laps],
        send_metrics_to_platform=False,
    )
    (peak,) = group.all_reduce([torch.tensor([workload.peak_rss_mb()])])
    if group.global_rank == 0:
        own_workload.report(
            arguments,
            engine=pfl_clients.ENGINE,
            seconds=laps.seconds[arguments.warmup :],
            records=int(counts.sum()),
            peak_mb=peak.item(),
        )


def main() -> int:
    arguments = own_workload.options(__doc__)
    if "PFL_WORKER_RANK" not in os.environ:
        return pfl_clients.launch(workers=arguments.workers)
    simulate(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
