"""Copies of a module to train, arranged to run fast on a CPU; what they compute is the module's, bit by bit.

A module that is nothing but `nn.Sequential`, perhaps nested, is run as a chain of PyTorch's own functions: calling ten
layers as modules takes as long as a twentieth of a step on a small CNN. Where ReLU comes before max pooling they change
places: the largest of several numbers is the same before and after, and so is where a gradient goes, unless it is zero;
ReLU has a quarter of the work then.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import queue
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from dovetail.learners._torch_isolation import State, is_hooked

__all__ = ["Copies", "Copy", "trained"]

_Function = Callable[[Any], Any]


def trained(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters that are trained, in the order of the flat vector."""
    return sorted((name, value) for name, value in module.named_parameters() if value.requires_grad)


class Copy:
    """A copy of a module that nobody else uses: training puts other weights in.

    `isolated` is a module that runs nothing but PyTorch's own code.
    """

    def __init__(self, module: nn.Module, *, isolated: bool = False) -> None:
        self.module = _channels_last(copy.deepcopy(module))
        self.weights = [value for _, value in trained(self.module)]
        self.outputs: _Function = _chain(self.module) or self.module
        self._state = State(self.module, attributes=not isolated)

    def forget(self) -> None:
        """Put back everything but the weights, so that nothing is left of the records that it has seen."""
        self._state.restore()


class Copies:
    """So many copies of a module, each for one thread at a time; made when the first is wanted."""

    def __init__(self, module: nn.Module, count: int, *, isolated: bool = False) -> None:
        self._module, self._count, self._isolated = module, count, isolated

    @contextlib.contextmanager
    def one(self) -> Iterator[Copy]:
        """A copy that nobody else uses meanwhile."""
        found = self._free.get()
        try:
            yield found
        finally:
            self._free.put(found)

    @functools.cached_property
    def _free(self) -> queue.SimpleQueue[Copy]:
        free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for _ in range(self._count):
            free.put(Copy(self._module, isolated=self._isolated))
        return free


def _channels_last(module: nn.Module) -> nn.Module:
    """The module with images as its convolutions are fastest on a CPU."""
    if any(value.ndim > 4 for value in module.state_dict().values()):
        return module
    return module.to(memory_format=torch.channels_last)


def _chain(module: nn.Module) -> _Function | None:
    """The module as functions, one after the other; None if it may be something else."""
    if type(module) is not nn.Sequential or any(is_hooked(part) for part in module.modules()):
        return None
    layers = list(_layers(module))
    for i in range(1, len(layers)):
        pool = layers[i]
        if type(layers[i - 1]) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
            layers[i - 1 : i + 1] = pool, layers[i - 1]
    functions = [_function(layer) for layer in layers]

    def outputs(x: Any) -> Any:
        for function in functions:
            x = function(x)
        return x

    return outputs


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is not nn.Sequential:
        yield module
        return
    for part in module:  # one that occurs twice, twice
        yield from _layers(part)


def _function(layer: nn.Module) -> _Function:
    """What the layer calls in the end, or the layer itself."""
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        given = layer.weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups
        return lambda x: torch.conv2d(x, *given)
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
