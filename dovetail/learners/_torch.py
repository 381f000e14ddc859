"""What `learners.torch` computes with: gradients of a module as PyTorch runs it, and threads to share clients among."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

__all__ = [
    "check_losses",
    "flat",
    "handed_to_jax",
    "laid_out",
    "mean_slopes",
    "on_host",
    "shared",
    "slices",
    "split",
    "summed",
    "threads",
    "trained",
]

_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_AT_ONCE = 512  # records whose gradient is computed at once
_SWITCH = 2e-5  # seconds that a thread may keep Python's lock while another one waits for it, back from PyTorch


def trained(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters that are trained, in the order of the flat vector."""
    return sorted((name, value) for name, value in module.named_parameters() if value.requires_grad)


def split(vector: torch.Tensor, weights: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The parts of a flat vector that are as long as these weights."""
    return vector.split([value.numel() for value in weights])


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts as one vector."""
    return torch.cat([part.reshape(-1) for part in parts])


def on_host(updates: torch.Tensor) -> np.ndarray:
    """Updates as an array in the host's memory."""
    return updates.detach().cpu().numpy()


def handed_to_jax(updates: torch.Tensor) -> jax.Array:
    """Updates as an array of JAX where they are."""
    return jnp.from_dlpack(updates.detach().contiguous())


def laid_out(module: torch.nn.Module) -> torch.nn.Module:
    """The module with images as its convolutions are fastest on a CPU: the channel last in memory."""
    if any(value.ndim > 4 for value in module.state_dict().values()):
        return module
    return module.to(memory_format=torch.channels_last)


def mean_slopes(
    module: torch.nn.Module, total_loss: _Loss, weights: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """The gradient of the mean loss over these records; zero of none. `total_loss` is a sum over records."""
    share = torch.tensor(1 / max(1, len(y)), device=x.device)
    total: list[torch.Tensor] = []
    for xs, ys in zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True) if len(y) else ():
        loss = total_loss(module(xs), ys)
        slopes = torch.autograd.grad(loss, weights, grad_outputs=share, allow_unused=True, materialize_grads=True)
        total = torch._foreach_add(total, slopes) if total else list(slopes)
    return total or [torch.zeros_like(value) for value in weights]


def summed(loss: _Loss) -> _Loss:
    """The sum of these losses of records."""

    def total_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = loss(outputs, labels)
        check_losses(losses, len(labels))
        return losses.sum()

    return total_loss


def check_losses(losses: torch.Tensor, records: int) -> None:
    """Refuse what is not one loss per record."""
    if losses.shape != (records,):
        raise ValueError(
            "expected loss(outputs, labels) to return one number per record, "
            f"got shape {tuple(losses.shape)} for {records}"
        )


def slices(count: int, parts: int) -> list[slice]:
    """So many things in at most so many parts of about equal size."""
    edges = np.linspace(0, count, min(count, parts) + 1).round().astype(int)
    return [slice(low, high) for low, high in itertools.pairwise(edges.tolist())]


def shared(work: Callable[[Any], torch.Tensor], parts: Sequence[Any]) -> list[torch.Tensor]:
    """What work makes of the parts, in their order, each on one thread."""
    before = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH)
    try:
        return list(_pool().map(work, parts))
    finally:
        torch.set_num_threads(before[0])
        sys.setswitchinterval(before[1])


def threads() -> int:
    """How many compute at a time: one for each core."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "torch", initializer=torch.set_num_threads, initargs=(1,))
