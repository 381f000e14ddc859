"""How PyTorch trains one client: losses, local steps, and copies of a module that are arranged to run fast on a CPU.

What a copy computes is what the module computes, bit by bit. A module that is nothing but `nn.Sequential`, perhaps
nested, is run as a chain of PyTorch's own functions: calling ten layers as modules takes as long as a twentieth of a
step on a small CNN. Where ReLU comes before max pooling they change places: the largest of several numbers is the same
before and after, and so is where a gradient goes, unless it is zero; ReLU has a quarter of the work then.

Nothing here needs JAX: processes that train clients (`learners._torch_team`) start without it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know

from dovetail import machine
from dovetail.learners._torch_isolation import Snapshot, is_hooked

__all__ = [
    "LOSSES",
    "Copies",
    "Copy",
    "LocalSteps",
    "Loss",
    "check_losses",
    "cut_evenly",
    "loss_sum",
    "num_threads",
    "on_one_thread",
    "run_in_threads",
    "train_client",
    "trained_parameters",
]

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_Function = Callable[[Any], Any]
_AT_ONCE = 512  # records whose gradient is computed at once
_SWITCH = 2e-5  # seconds that a thread may keep Python's lock while another one waits for it, back from PyTorch

LOSSES: dict[str, Loss] = {
    "binary_cross_entropy": lambda z, y: _sigmoid_cross_entropy(z.reshape(y.shape), y),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y.long(), reduction="none"),
    "huber": lambda z, y: F.huber_loss(z.reshape(y.shape), y, reduction="none"),
    "sigmoid_cross_entropy": lambda z, y: _sigmoid_cross_entropy(z, y).sum(dim=1),
    "squared_error": lambda z, y: (z.reshape(y.shape) - y) ** 2,
}


class LocalSteps(NamedTuple):
    """What a client does with its records: one gradient or, if `local`, steps of its own (`client.ClientUpdate`)."""

    local: bool
    batch: int
    epochs: int
    learning_rate: float
    mu: float


def train_client(
    own: Copy, total_loss: Loss, steps: LocalSteps, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """The update of a client that holds these records.

    Arguments:
        own: a copy of the module; it is left with other weights.
        total_loss: the sum of the loss over records.
        start: the flat vector of parameters.
        x: the client's inputs, (records, ...), all of them real.
        y: their labels; classes as int64.

    Returns: a vector like `start`: minus the gradient of the mean loss, or where local steps lead.
    """
    weights = own.weights
    parts = start.split([value.numel() for value in weights])
    first = [part.reshape(value.shape) for part, value in zip(parts, weights, strict=True)]
    with torch.no_grad():
        torch._foreach_copy_(weights, first)
    if not steps.local:
        return -_flatten(_gradient_of_mean_loss(own, total_loss, x, y))
    batches = list(zip(x.split(steps.batch), y.split(steps.batch), strict=True)) if len(y) else []
    for xs, ys in batches * steps.epochs:
        slopes = _gradient_of_mean_loss(own, total_loss, xs, ys)
        with torch.no_grad():
            if steps.mu:
                torch._foreach_add_(slopes, torch._foreach_sub(weights, first), alpha=steps.mu)
            torch._foreach_add_(weights, slopes, alpha=-steps.learning_rate)
    with torch.no_grad():
        return _flatten(torch._foreach_sub(weights, first))


def _gradient_of_mean_loss(own: Copy, total_loss: Loss, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """The gradient of the mean loss over these records, a tensor for each parameter; zero of no records."""
    if not len(y):
        return [torch.zeros_like(value) for value in own.weights]
    record_weight = _inverse_of_count(len(y), x.device)
    total = ()
    own.forget()
    for xs, ys in [(x, y)] if len(y) <= _AT_ONCE else zip(x.split(_AT_ONCE), y.split(_AT_ONCE), strict=True):
        loss = total_loss(own.outputs(xs), ys)
        slopes = torch.autograd.grad(
            loss, own.weights, grad_outputs=record_weight, allow_unused=True, materialize_grads=True
        )
        total = torch._foreach_add(total, slopes) if total else slopes
    return list(total)


@functools.lru_cache(64)
def _inverse_of_count(records: int, device: torch.device) -> torch.Tensor:
    """1 / records as a tensor; cached: do not write to it."""
    return torch.tensor(1 / records, device=device)


def _flatten(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def loss_sum(loss: str | Loss) -> Loss:
    """The function that adds up this loss over records: (outputs, labels) -> number; classes must be int64."""
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


def _sigmoid_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits) - logits * labels


def check_losses(losses: torch.Tensor, records: int) -> None:
    """Refuse what is not one loss per record."""
    if losses.shape != (records,):
        raise ValueError(
            "expected loss(outputs, labels) to return one number per record, "
            f"got shape {tuple(losses.shape)} for {records}"
        )


def trained_parameters(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters that are trained, by sorted name: the order of the flat vector."""
    return sorted((name, value) for name, value in module.named_parameters() if value.requires_grad)


class Copy:
    """A copy of a module that nobody else uses: training puts other weights in.

    `outputs` maps inputs to the module's outputs at the copy's current `weights`.

    Arguments:
        isolated: whether the module runs nothing but PyTorch's own code.
    """

    def __init__(self, module: nn.Module, *, isolated: bool = False) -> None:
        self.module = _channels_last(copy.deepcopy(module))
        self.weights = [value for _, value in trained_parameters(self.module)]
        self.outputs: _Function = _chain_functions(self.module) or self.module
        self._state = Snapshot(self.module, attributes=not isolated)

    def forget(self) -> None:
        """Put back everything but the weights, so that nothing is left of the records that it has seen."""
        self._state.restore()


class Copies:
    """`count` copies of a module, each for one thread at a time; made when the first is wanted."""

    def __init__(self, module: nn.Module, count: int, *, isolated: bool = False) -> None:
        self._module = module
        self._count = count
        self._isolated = isolated

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Copy]:
        """Lend out a copy that nobody else uses meanwhile; waits until one is free."""
        replica = self._free_copies.get()
        try:
            yield replica
        finally:
            self._free_copies.put(replica)

    @functools.cached_property
    def _free_copies(self) -> queue.SimpleQueue[Copy]:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for _ in range(self._count):
            free.put(Copy(self._module, isolated=self._isolated))
        return free


def _channels_last(module: nn.Module) -> nn.Module:
    """The module, in place, with images in the order (height, width, channels), in which convolutions are fastest."""
    if any(value.ndim > 4 for value in module.state_dict().values()):
        return module
    return module.to(memory_format=torch.channels_last)


def _chain_functions(module: nn.Module) -> _Function | None:
    """A nested `nn.Sequential` without hooks as one function of PyTorch's functions; None for other modules."""
    if type(module) is not nn.Sequential or any(is_hooked(part) for part in module.modules()):
        return None
    layers = list(_nested_layers(module))
    for i in range(1, len(layers)):
        pool = layers[i]
        if type(layers[i - 1]) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
            layers[i - 1 : i + 1] = pool, layers[i - 1]  # see the module: the same outputs, with less work
    functions = [_layer_function(layer) for layer in layers]

    def outputs(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return outputs


def _nested_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of nested `nn.Sequential`, in the order in which they run."""
    if type(module) is not nn.Sequential:
        yield module
        return
    for part in module:  # one that occurs twice, twice
        yield from _nested_layers(part)


def _layer_function(layer: nn.Module) -> _Function:
    """The function of PyTorch that the layer calls in the end, or the layer itself where none is known."""
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        settings = layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
        return lambda x: torch.conv2d(x, *settings)
    if type(layer) is nn.Linear:
        weight, bias = layer.weight, layer.bias
        return lambda x: nn.functional.linear(x, weight, bias)
    if type(layer) is nn.ReLU:
        return torch.relu_ if layer.inplace else torch.relu
    if type(layer) is nn.MaxPool2d and not layer.return_indices:
        stride = layer.kernel_size if layer.stride is None else layer.stride
        window = layer.kernel_size, stride, layer.padding, layer.dilation, layer.ceil_mode
        return lambda x: torch.max_pool2d(x, *window)
    if type(layer) is nn.Unflatten and isinstance(layer.unflattened_size, tuple) and isinstance(layer.dim, int):
        dim, sizes = layer.dim, layer.unflattened_size
        return lambda x: torch.unflatten(x, dim, sizes)
    if type(layer) is nn.Flatten:
        first, last = layer.start_dim, layer.end_dim
        return lambda x: x.flatten(first, last)
    return layer


def cut_evenly(count: int, parts: int) -> list[slice]:
    """Cut range(count) into at most `parts` slices of about equal size."""
    edges = np.linspace(0, count, min(count, parts) + 1).round().astype(int)
    return [slice(low, high) for low, high in itertools.pairwise(edges.tolist())]


def run_in_threads(work: Callable[[Any], torch.Tensor], parts: Sequence[Any]) -> list[torch.Tensor]:
    """Do the work on every part, each part on one thread; returns the results in the order of the parts.

    While it runs, threads hand over Python's lock sooner (`_SWITCH`), for all threads of this process.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        with on_one_thread():
            return list(_thread_pool().map(work, parts))
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def on_one_thread() -> Iterator[None]:
    """Run every computation of PyTorch on one thread: small ones wait longer for others than they take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads() -> int:
    """How many threads compute at a time: one for each core."""
    return machine.num_cores()


@functools.cache
def _thread_pool() -> ThreadPoolExecutor:
    """The threads of this process on which clients train, one per core."""
    return ThreadPoolExecutor(num_threads(), "torch", initializer=torch.set_num_threads, initargs=(1,))
