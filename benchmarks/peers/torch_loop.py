"""Seconds per round of a plain PyTorch loop on the models of `dovetail bench own`, on a GPU where there is one.

What everybody can write in an hour: per client local SGD, one client after the other with one module, clipped updates
added up; per record one backward pass for each record.
"""

import time

import numpy as np
import own_modules
import own_workload
import torch
import torch.nn.functional as F  # noqa: N812
import workload


def clipped(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of one vector, scaled to the clip norm at most."""
    norm = torch.sqrt(sum((part**2).sum() for part in parts))
    factor = torch.clamp(own_workload.CLIP / (norm + 1e-12), max=1.0)
    return [part * factor for part in parts]


def main() -> None:
    arguments = own_workload.options(__doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = own_workload.chosen(arguments)
    counts = own_workload.sizes(chosen)
    inputs, labels = own_workload.data(chosen, counts)
    inputs, labels = torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device)
    ends = np.cumsum(counts)
    network = own_modules.network(arguments.workload).to(device)
    weights = list(network.parameters())
    start = [weight.detach().clone() for weight in weights]

    def gradients(first: int, last: int) -> list[torch.Tensor]:
        loss = F.cross_entropy(network(inputs[first:last]), labels[first:last])
        return list(torch.autograd.grad(loss, weights))

    def train(first: int, last: int) -> list[torch.Tensor]:
        with torch.no_grad():
            for weight, value in zip(weights, start, strict=True):
                weight.copy_(value)
        for low in range(first, last, chosen.batch):
            moves = gradients(low, min(low + chosen.batch, last))
            with torch.no_grad():
                for weight, move in zip(weights, moves, strict=True):
                    weight -= workload.LEARNING_RATE * move
        return [weight.detach() - value for weight, value in zip(weights, start, strict=True)]

    def step() -> None:
        total = [torch.zeros_like(weight) for weight in weights]
        for end, count in zip(ends, counts, strict=True):
            update = gradients(end - count, end) if chosen.kind == "record" else train(end - count, end)
            for whole, part in zip(total, clipped(update), strict=True):
                whole += part
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(arguments.warmup + arguments.rounds):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    own_workload.report(
        arguments,
        engine=f"PyTorch loop ({device})",
        seconds=seconds[arguments.warmup :],
        records=int(counts.sum()),
        peak_mb=workload.peak_rss_mb(),
    )


if __name__ == "__main__":
    main()
