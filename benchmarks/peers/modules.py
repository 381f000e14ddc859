"""The workloads' models in PyTorch, the same modules for every engine that trains them."""

import torch
import workload


def layers(name: str) -> list[torch.nn.Module]:
    """The layers, from inputs as `shape` has them."""
    if name == "logistic":
        return [torch.nn.Linear(workload.FEATURES, workload.CLASSES)]
    return [
        torch.nn.Conv2d(1, 16, 5),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 5),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 192),
        torch.nn.ReLU(),
        torch.nn.Linear(192, workload.CLASSES),
    ]


def shape(name: str) -> tuple[int, ...]:
    """The shape of a record."""
    return (workload.FEATURES,) if name == "logistic" else (1, 28, 28)


def check_parameters(name: str, network: torch.nn.Module) -> torch.nn.Module:
    """The network, if it has as many parameters as the workload says."""
    count = sum(parameter.numel() for parameter in network.parameters())
    if count != workload.PARAMETERS[name]:
        raise RuntimeError(f"the {name} model has {count} parameters, not {workload.PARAMETERS[name]}")
    return network
