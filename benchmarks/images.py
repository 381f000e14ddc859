"""Many clients of a CNN on one device: seconds per round for Dovetail and for loops in PyTorch, in one run.

One round: 1,000 clients x 60 images of 32 x 32 x 3, one local epoch of SGD in batches of 10 on the CNN (169,770
parameters), clip to L2 norm 1, sum, Gaussian noise, average. PyTorch runs the same round as one would write it: client
by client with a module and `torch.optim.SGD`; and, as "torch.func", many clients at once by `vmap`. "dovetail, torch
learner" is Dovetail's engine with that module; pfl's simulation trains it too, on images that are floats on the device
before the first round. All run on the same device, which is a GPU where JAX and PyTorch have one. Of two turns the
faster counts (the median of its rounds). PyTorch and pfl are left out where they are not installed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch wants a part of the GPU's memory

import jax
import numpy as np

from dovetail.data._base import Clients, Dataset, Model
from dovetail.engine import Engine, Performance
from dovetail.engine.devices import use_all_cores
from dovetail.learners import models
from dovetail.learners.client import ClientUpdate
from dovetail.learners.server import Server
from dovetail.protocols import build
from dovetail.randomness import Randomness

SIDE, CHANNELS, CLASSES = 32, 3, 10
LEARNING_RATE, CLIP, NOISE, BATCH = 0.1, 1.0, 1.0, 10
PARAMETERS = 169_770
TURNS = 2


def records(clients: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (clients * samples, SIDE, SIDE, CHANNELS), dtype=np.uint8)
    return inputs, rng.integers(0, CLASSES, clients * samples).astype(np.int32)


def torch_module() -> Any:
    """The CNN as a module of PyTorch, on images with the channel first."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(CHANNELS, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 192),
        nn.ReLU(),
        nn.Linear(192, CLASSES),
    )


def with_module(inputs: np.ndarray, labels: np.ndarray, clients: int, chunk: int | None) -> Callable[[], None]:
    """One round of the engine with a module of PyTorch."""
    from dovetail.learners import torch

    first = np.ascontiguousarray(inputs.transpose(0, 3, 1, 2))
    return dovetail(first, labels, clients, chunk, model=torch.model(torch_module()))


def dovetail(
    inputs: np.ndarray, labels: np.ndarray, clients: int, chunk: int | None, *, model: Model | None = None
) -> Callable[[], None]:
    """One round of the engine."""
    dataset = Dataset(
        inputs=inputs, labels=labels, test_inputs=inputs[:10], test_labels=labels[:10], num_classes=CLASSES
    )
    engine = Engine(
        model=model or models.cnn(dataset),
        dataset=dataset,
        clients=Clients.from_rows(np.arange(len(labels)).reshape(clients, -1)),
        update=ClientUpdate(update="fedavg", learning_rate=LEARNING_RATE, batch=BATCH),
        protocol=build("dp_fl", {"clip_norm": CLIP, "noise_multiplier": NOISE}),
        server=Server(),
        cohort_size=clients,
        randomness=Randomness.from_os(0),
        performance=Performance(chunk=chunk),
    )
    if engine.dim != PARAMETERS:
        raise ValueError(f"expected {PARAMETERS} parameters, got {engine.dim}")
    training, users, index = engine.start(), np.arange(clients, dtype=np.int32), 0

    def one_round() -> None:
        nonlocal training, index
        training, index = engine.step(training, users, index=index, capacity=clients), index + 1
        jax.block_until_ready(training)

    return one_round


def on_device(inputs: np.ndarray, labels: np.ndarray, clients: int) -> tuple[str, Any, Any]:
    """PyTorch's device, and images and labels there, by client."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.from_numpy(inputs).to(device).permute(0, 3, 1, 2).reshape(clients, -1, CHANNELS, SIDE, SIDE)
    return device, x, torch.from_numpy(labels).long().to(device).reshape(clients, -1)


def in_torch(inputs: np.ndarray, labels: np.ndarray, clients: int, chunk: int | None) -> Callable[[], None]:
    """One round in PyTorch: client by client, or `chunk` clients at a time by `vmap`."""
    import torch
    from torch.func import functional_call, grad, vmap
    from torch.nn.functional import cross_entropy

    device, x, y = on_device(inputs, labels, clients)
    module = torch_module().to(device)
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    if sum(value.numel() for value in weights.values()) != PARAMETERS:
        raise ValueError(f"expected {PARAMETERS} parameters")

    def delta_of(client: int) -> torch.Tensor:
        module.load_state_dict(weights)
        optimiser = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
        order = torch.randperm(y.shape[1], device=device)
        for rows in order.split(BATCH):
            optimiser.zero_grad()
            cross_entropy(module(x[client, rows].float() / 255), y[client, rows]).backward()
            optimiser.step()
        return torch.cat([(value.detach() - weights[name]).ravel() for name, value in module.named_parameters()])

    def loss(own: dict[str, torch.Tensor], images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(module, own, (images,)), targets)

    def deltas_of(some: slice) -> torch.Tensor:
        images, targets = x[some], y[some]
        own = {name: value.expand(len(targets), *value.shape) for name, value in weights.items()}
        for rows in torch.randperm(y.shape[1], device=device).split(BATCH):
            slopes = vmap(grad(loss))(own, images[:, rows].float() / 255, targets[:, rows])
            own = {name: value - LEARNING_RATE * slopes[name] for name, value in own.items()}
        return torch.cat([(value - weights[name]).flatten(1) for name, value in own.items()], dim=1)

    def one_round() -> None:
        total = torch.zeros(PARAMETERS, device=device)
        if chunk is None:
            for client in range(clients):
                delta = delta_of(client)
                total += delta * (CLIP / delta.norm()).clamp(max=1.0)
        else:
            for low in range(0, clients, chunk):
                deltas = deltas_of(slice(low, low + chunk))
                total += (deltas * (CLIP / deltas.norm(dim=1, keepdim=True)).clamp(max=1.0)).sum(dim=0)
        total += NOISE * CLIP * torch.randn_like(total)
        for (name, value), part in zip(
            weights.items(), total.split([value.numel() for value in weights.values()]), strict=True
        ):
            weights[name] = value + part.reshape(value.shape) / clients
        if device == "cuda":
            torch.cuda.synchronize()

    return one_round


def in_pfl(inputs: np.ndarray, labels: np.ndarray, clients: int, chunk: int | None) -> Callable[[], None]:
    """One round of pfl's simulation in this process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy import CentrallyAppliedPrivacyMechanism, GaussianMechanism
    from torch.nn.functional import cross_entropy

    device, x, y = on_device(inputs, labels, clients)
    users = {user: PyTorchTensorDataset((x[user] / 255, y[user]), user_id=str(user)) for user in range(clients)}
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", range(clients)))
    module = torch_module().to(device)
    module.loss = lambda images, targets: cross_entropy(module(images), targets)
    module.metrics = lambda images, targets: {}
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(clipping_bound=CLIP, relative_noise_stddev=NOISE))
    backend = SimulatedBackend(data, data, postprocessors=[mechanism])

    def one_round() -> None:
        FederatedAveraging().run(
            backend=backend,
            model=model,
            algorithm_params=NNAlgorithmParams(
                central_num_iterations=1, evaluation_frequency=2, train_cohort_size=clients, val_cohort_size=None
            ),
            model_train_params=NNTrainHyperParams(
                local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
            ),
            callbacks=[],
            send_metrics_to_platform=False,
        )
        if device == "cuda":
            torch.cuda.synchronize()

    return one_round


def seconds(one_round: Callable[[], None], *, rounds: int) -> list[float]:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        one_round()
        taken.append(time.perf_counter() - began)
    return taken


def rows(clients: int, samples: int, chunk: int | None, torch_chunk: int) -> list[dict]:
    inputs, labels = records(clients, samples)
    engines = {"dovetail": (dovetail, chunk, 5)}
    try:
        import torch

        name = f"torch {torch.__version__.split('+')[0]}"
        engines |= {"dovetail, torch learner": (with_module, None, 2)}
        engines |= {f"{name}, loop": (in_torch, None, 1), f"{name}, torch.func": (in_torch, torch_chunk, 2)}
    except ImportError:
        pass
    if importlib.util.find_spec("pfl"):
        engines |= {"pfl": (in_pfl, None, 1)}
    best: dict[str, tuple[float, float]] = {}
    for name, (make, size, rounds) in engines.items():
        one_round = make(inputs, labels, clients, size)
        (first,) = seconds(one_round, rounds=1)
        turns = [statistics.median(seconds(one_round, rounds=rounds)) for _ in range(TURNS)]
        best[name] = (first, min(turns))
    ours = best["dovetail"][1]
    return [
        {"engine": name, "first_round": round(first, 3), "seconds": round(least, 4), "relative": round(least / ours, 2)}
        for name, (first, least) in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--clients", type=int, default=None, help="default: 1000 on an accelerator, 40 on a CPU")
    parser.add_argument("--samples", type=int, default=60)
    parser.add_argument("--chunk", type=int, default=None, help="clients that Dovetail trains at a time")
    parser.add_argument("--torch-chunk", type=int, default=250, help="clients that torch.func trains at a time")
    arguments = parser.parse_args()
    use_all_cores()
    device = jax.devices()[0]
    clients = arguments.clients or (40 if device.platform == "cpu" else 1000)
    results = rows(clients, arguments.samples, arguments.chunk, arguments.torch_chunk)
    result = {"benchmark": "images", "device": device.device_kind, "clients": clients, "samples": arguments.samples}
    if arguments.json:
        print(json.dumps({**result, "rows": results}))
        return
    print(result)
    for row in results:
        print(row, flush=True)


if __name__ == "__main__":
    main()
