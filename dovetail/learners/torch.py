"""PyTorch modules in simulation, on every core or on a GPU.

Updates are those of `learners.client`, computed by PyTorch: the same batches in the same order, gradients of the mean
loss. Small models, and any on a GPU, train side by side by `torch.func.vmap`. On a CPU larger ones train one after the
other, each with a copy of the module as PyTorch would run it: batches of matrices and grouped convolutions are slower
than single ones there. Either way the clients of a chunk are shared among threads, one per core, and each thread
computes alone; PyTorch leaves Python's lock while it computes.

Parameters are one flat vector, by sorted name. A module starts from its own weights and is not changed; parameters
without `requires_grad` and all buffers stay as they are. What a client's steps would change beside parameters, the
statistics of batch normalisation, is refused, and so is dropout, whose masks no seed covers: `module.eval()` trains
without both.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import queue
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know

from dovetail import _validate
from dovetail.data._base import Loss, Model
from dovetail.learners import _torch
from dovetail.learners.client import ClientUpdate

__all__ = ["TorchLearner", "model"]

_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_SMALL_MODEL = 2**13  # parameters below which clients train side by side on a CPU

_LOSSES: dict[str, _Loss] = {
    "binary_cross_entropy": lambda z, y: _sigmoid(z.reshape(y.shape), y),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y.long(), reduction="none"),
    "huber": lambda z, y: F.huber_loss(z.reshape(y.shape), y, reduction="none"),
    "sigmoid_cross_entropy": lambda z, y: _sigmoid(z, y).sum(dim=1),
    "squared_error": lambda z, y: (z.reshape(y.shape) - y) ** 2,
}


def model(
    module: torch.nn.Module,
    *,
    loss: str | Loss | None = None,
    vectorized: bool | None = None,
    device: str | None = None,
    name: str | None = None,
) -> Model:
    """The model of a module, which starts from the module's current weights.

    `loss` is a name of `learners.losses.LOSSES` or `loss(outputs, labels)` in PyTorch, one loss per record. Whether
    clients train side by side is chosen by what is faster; modules that `torch.func.vmap` cannot handle train one
    client after the other with `vectorized=False`. Without `device` it is a GPU, if PyTorch has one.
    """
    _check(module)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    learner = TorchLearner(module=copy.deepcopy(module).to(device), vectorized=vectorized, device=device)
    first = {key: value.detach().cpu().numpy().copy() for key, value in learner.trained}
    return Model(
        name=name or type(module).__name__,
        init=lambda key: {key: jnp.asarray(value) for key, value in first.items()},
        apply=learner.outputs,
        loss=loss,
        learner=learner,
    )


def _check(module: torch.nn.Module) -> None:
    """Refuse what would train differently from what it seems."""
    for name, part in module.named_modules():
        where = f"{type(part).__name__} {name!r}"
        batch = isinstance(part, torch.nn.modules.batchnorm._BatchNorm)
        tracked = getattr(part, "running_mean", None) is not None
        if (batch and not tracked) or (
            isinstance(part, torch.nn.modules.batchnorm._NormBase) and tracked and part.training
        ):
            raise ValueError(
                "expected no statistics that training changes beside the parameters, as a client has no place for "
                f"them, got {where}: use GroupNorm, or module.eval() to keep running statistics as they are"
            )
        if isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.training and part.p > 0:
            raise ValueError(f"expected no dropout, got {where} with p={part.p}: module.eval() trains without it")
    trained = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
    if not trained:
        raise ValueError("expected a module with parameters to train, got none with requires_grad")
    for name, value in trained:
        if value.dtype != torch.float32:
            raise ValueError(f"expected float32 parameters, got {value.dtype} in {name!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TorchLearner:
    """Clients that train a module.

    Guarantees:
        An update is that of `learners.client.local_update` for the same weights, records and order, up to rounding.
        A client's update depends on its own records alone.
    """

    module: torch.nn.Module
    vectorized: bool | None = None
    device: str = "cpu"
    gradients = True
    settled = False
    notes = ()

    @property
    def platform(self) -> str:
        """Where clients train."""
        return "host" if self.device == "cpu" else "gpu"

    @property
    def code(self) -> tuple[Any, ...]:
        """What a resumed run must have in common with its start."""
        return (type(self.module),)

    @property
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are trained, in the order of the flat vector."""
        return _torch.trained(self.module)

    def updates(
        self,
        settings: ClientUpdate,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray | jax.Array,
        labels: np.ndarray | jax.Array,
        counts: np.ndarray | jax.Array,
    ) -> np.ndarray | jax.Array:
        """Updates of some clients, shared among threads; of JAX's arrays on a GPU, one that never leaves it."""
        start, x, y, held = (_tensor(array).to(self.device) for array in (parameters, inputs, labels, counts))
        own, on_cpu = self._loss(loss), self.device == "cpu"
        finished = _torch.handed_to_jax if isinstance(inputs, jax.Array) else _torch.on_host
        y = y.long() if loss == "cross_entropy" else y
        side_by_side = len(start) < _SMALL_MODEL or not on_cpu if self.vectorized is None else self.vectorized
        if side_by_side:
            parts = _torch.slices(len(counts), _torch.threads() if on_cpu else 1)
            found = _torch.shared(lambda at: self._together(settings, own, start, x[at], y[at], held[at]), parts)
            return finished(found[0] if len(found) == 1 else torch.cat(found))
        total = _total_cross_entropy if loss == "cross_entropy" else _torch.summed(own)
        alone, held = functools.partial(self._alone, settings, total, start), np.asarray(counts)
        return finished(torch.stack(_torch.shared(lambda i: alone(x[i, : held[i]], y[i, : held[i]]), range(len(held)))))

    def _together(
        self,
        settings: ClientUpdate,
        loss: _Loss,
        start: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """The updates of clients that train side by side."""
        records = x.shape[1]
        real = (torch.arange(records, device=x.device) < counts[:, None]).to(torch.float32)
        with self._module() as module:
            slopes = vmap(grad(_mean_loss(module, loss)), in_dims=(0 if settings.local else None, 0, 0, 0))
            if not settings.local:
                return -slopes(start, x, y, real)
            current, size = start.expand(len(counts), -1), settings.batch_size(records)
            for number in range(settings.epochs * math.ceil(records / size)):
                low = number % math.ceil(records / size) * size
                batch = slice(low, low + size)
                slope = slopes(current, x[:, batch], y[:, batch], real[:, batch])
                if settings.mu:
                    slope = slope + settings.mu * (current - start)
                holds = real[:, batch].sum(dim=1, keepdim=True) > 0
                current = torch.where(holds, current - settings.learning_rate * slope, current)
            return current - start

    def _alone(
        self, settings: ClientUpdate, total_loss: _Loss, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        """The update of a client that holds these records."""
        with self._module() as module:
            weights = [value for _, value in _torch.trained(module)]
            first = [part.reshape(w.shape) for part, w in zip(_torch.split(start, weights), weights, strict=True)]
            with torch.no_grad():
                torch._foreach_copy_(weights, first)
            if not settings.local:
                return -_torch.flat(_torch.mean_slopes(module, total_loss, weights, x, y))
            batches = list(zip(x.split(settings.batch), y.split(settings.batch), strict=True)) if len(y) else []
            for xs, ys in batches * settings.epochs:
                slopes = _torch.mean_slopes(module, total_loss, weights, xs, ys)
                with torch.no_grad():
                    if settings.mu:
                        torch._foreach_add_(slopes, torch._foreach_sub(weights, first), alpha=settings.mu)
                    torch._foreach_add_(weights, slopes, alpha=-settings.learning_rate)
            with torch.no_grad():
                return _torch.flat(torch._foreach_sub(weights, first))

    @contextlib.contextmanager
    def _module(self) -> Iterator[torch.nn.Module]:
        """A copy of the module that nobody else uses meanwhile: training puts other weights in."""
        module = self._copies.get()
        try:
            yield module
        finally:
            self._copies.put(module)

    @functools.cached_property
    def _copies(self) -> queue.SimpleQueue[torch.nn.Module]:
        copies: queue.SimpleQueue[torch.nn.Module] = queue.SimpleQueue()
        for _ in range(_torch.threads()):
            copies.put(_torch.laid_out(copy.deepcopy(self.module)))
        return copies

    def outputs(self, parameters: Any, inputs: np.ndarray) -> np.ndarray:
        """The module's outputs."""
        weights = {name: _tensor(np.asarray(value)).to(self.device) for name, value in parameters.items()}
        with torch.no_grad():
            return functional_call(self.module, weights, (_tensor(inputs).to(self.device),)).cpu().numpy()

    def losses(self, loss: str | Loss, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each record."""
        return self._loss(loss)(_tensor(outputs), _tensor(labels)).numpy()

    @staticmethod
    def _loss(loss: str | Loss) -> _Loss:
        if not isinstance(loss, str):
            return loss
        _validate.known("loss", loss, _LOSSES)
        return _LOSSES[loss]


def _mean_loss(module: torch.nn.Module, loss: _Loss) -> Callable[..., torch.Tensor]:
    shapes = [(name, value.shape, value.numel()) for name, value in _torch.trained(module)]

    def mean_loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, [size for *_, size in shapes])
        weights = {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        losses = loss(functional_call(module, weights, (x,)), y)
        _torch.check_losses(losses, len(real))
        return (losses * real).sum() / real.sum().clamp(min=1.0)

    return mean_loss


def _total_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def _sigmoid(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits) - logits * labels


def _tensor(array: np.ndarray | jax.Array) -> torch.Tensor:
    """An array as a tensor, one of JAX where it is; NumPy's views of those are read-only, of which PyTorch warns."""
    if isinstance(array, jax.Array):
        return torch.from_dlpack(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
