"""What `learners.torch` computes with: losses, the update of one client as PyTorch runs its module, threads.

Nothing here needs JAX: processes that train clients (`learners._torch_team`) start without it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know

from dovetail.learners._torch_copies import Copy

__all__ = [
    "LOSSES",
    "LocalSteps",
    "Loss",
    "alone",
    "check_losses",
    "on_one_thread",
    "shared",
    "slices",
    "threads",
    "total",
]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_AT_ONCE = 512  # records whose gradient is computed at once
_SWITCH = 2e-5  # seconds that a thread may keep Python's lock while another one waits for it, back from PyTorch

LOSSES: dict[str, Loss] = {
    "binary_cross_entropy": lambda z, y: _sigmoid(z.reshape(y.shape), y),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y.long(), reduction="none"),
    "huber": lambda z, y: F.huber_loss(z.reshape(y.shape), y, reduction="none"),
    "sigmoid_cross_entropy": lambda z, y: _sigmoid(z, y).sum(dim=1),
    "squared_error": lambda z, y: (z.reshape(y.shape) - y) ** 2,
}


class LocalSteps(NamedTuple):
    """What a client does with its records: one gradient, or steps of its own."""

    local: bool
    batch: int
    epochs: int
    learning_rate: float
    mu: float


def alone(
    own: Copy, total_loss: Loss, steps: LocalSteps, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """The update of a client that holds these records; it leaves other weights in the copy."""
    weights = own.weights
    parts = start.split([value.numel() for value in weights])
    first = [part.reshape(value.shape) for part, value in zip(parts, weights, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(weights, first)
    if not steps.local:
        return -_flat(_mean_slopes(own, total_loss, x, y))
    batches = list(zip(x.split(steps.batch), y.split(steps.batch), strict=True)) if len(y) else []
    for xs, ys in batches * steps.epochs:
        slopes = _mean_slopes(own, total_loss, xs, ys)
        with torch.no_grad():
            if steps.mu:
                torch._foreach_add_(slopes, torch._foreach_sub(weights, first), alpha=steps.mu)
            torch._foreach_add_(weights, slopes, alpha=-steps.learning_rate)
    with torch.no_grad():
        return _flat(torch._foreach_sub(weights, first))


def _mean_slopes(own: Copy, total_loss: Loss, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the mean loss over these records; zero of none."""
    if not len(y):
        return [torch.zeros_like(value) for value in own.weights]
    share, total = _share(len(y), x.device), ()
    own.forget()
    for xs, ys in [(x, y)] if len(y) <= _AT_ONCE else zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
        loss = total_loss(own.outputs(xs), ys)
        slopes = torch.autograd.grad(loss, own.weights, grad_outputs=share, allow_unused=True, materialize_grads=True)
        total = torch._foreach_add(total, slopes) if total else slopes
    return list(total)


@functools.lru_cache(64)
def _share(records: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(1 / records, device=device)


def _flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def total(loss: str | Loss) -> Loss:
    """The sum of this loss over records."""
    if loss == "cross_entropy":
        return _total_cross_entropy
    own = LOSSES[loss] if isinstance(loss, str) else loss

    def total_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = own(outputs, labels)
        check_losses(losses, len(labels))
        return losses.sum()

    return total_loss


def _total_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _sigmoid(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits) - logits * labels


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
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        with on_one_thread():
            return list(_pool().map(work, parts))
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Let every computation be that of one thread: small ones wait longer for others than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads() -> int:
    """How many compute at a time: one for each core."""
    return len(os.sched_getaffinity(0))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), "torch", initializer=torch.set_num_threads, initargs=(1,))
