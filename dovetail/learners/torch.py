"""PyTorch modules in simulation: every client of a chunk trains at once, by `torch.func`.

Updates are those of `learners.client`, computed by PyTorch: the same batches in the same order, gradients of the mean
loss by `functional_call`, vectorised over clients by `vmap`. Parameters are one flat vector, by sorted name. A module
starts from its own weights and is not changed; parameters without `requires_grad` and all buffers stay as they are.
What a client's steps would change beside parameters, the statistics of batch normalisation, is refused, and so is
dropout, whose masks no seed covers: `module.eval()` trains without both. PyTorch runs on the CPU, on one thread.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know

from dovetail import _validate
from dovetail.data._base import Loss, Model
from dovetail.learners.client import ClientUpdate

__all__ = ["TorchLearner", "model"]

_Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_LOSSES: dict[str, _Loss] = {
    "binary_cross_entropy": lambda z, y: _sigmoid(z.reshape(y.shape), y),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y.long(), reduction="none"),
    "huber": lambda z, y: F.huber_loss(z.reshape(y.shape), y, reduction="none"),
    "sigmoid_cross_entropy": lambda z, y: _sigmoid(z, y).sum(dim=1),
    "squared_error": lambda z, y: (z.reshape(y.shape) - y) ** 2,
}


def model(
    module: torch.nn.Module, *, loss: str | Loss | None = None, vectorized: bool = True, name: str | None = None
) -> Model:
    """The model of a module, which starts from the module's current weights.

    `loss` is a name of `learners.losses.LOSSES` or `loss(outputs, labels)` in PyTorch, one loss per record. Modules
    that `torch.func.vmap` cannot handle train one client after the other with `vectorized=False`.
    """
    _check(module)
    learner = TorchLearner(module=copy.deepcopy(module).cpu(), vectorized=vectorized)
    first = {key: value.detach().numpy().copy() for key, value in learner.trained}
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
    vectorized: bool = True
    gradients = True
    settled = False
    notes = ()

    @property
    def code(self) -> tuple[Any, ...]:
        """What a resumed run must have in common with its start."""
        return (type(self.module),)

    @property
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are trained, in the order of the flat vector."""
        return sorted((name, value) for name, value in self.module.named_parameters() if value.requires_grad)

    def updates(
        self,
        settings: ClientUpdate,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray,
        labels: np.ndarray,
        counts: np.ndarray,
    ) -> np.ndarray:
        """Updates of some clients, all at once, on one thread: threads cost more than they save on small chunks."""
        with _one_thread():
            return self._moved(settings, loss, parameters, inputs, labels, counts)

    def _moved(
        self,
        settings: ClientUpdate,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray,
        labels: np.ndarray,
        counts: np.ndarray,
    ) -> np.ndarray:
        start, x, y = _tensor(parameters), _tensor(inputs), _tensor(labels)
        records = x.shape[1]
        real = (torch.arange(records) < _tensor(counts)[:, None]).to(torch.float32)
        if not settings.local:
            return -self._slopes(loss, start, x, y, real, shared=True).numpy()
        current, size = start.expand(len(counts), -1), settings.batch_size(records)
        for number in range(settings.epochs * math.ceil(records / size)):
            low = number % math.ceil(records / size) * size
            batch = slice(low, low + size)
            slope = self._slopes(loss, current, x[:, batch], y[:, batch], real[:, batch], shared=False)
            if settings.mu:
                slope = slope + settings.mu * (current - start)
            held = real[:, batch].sum(dim=1, keepdim=True) > 0
            current = torch.where(held, current - settings.learning_rate * slope, current)
        return (current - start).numpy()

    def outputs(self, parameters: Any, inputs: np.ndarray) -> np.ndarray:
        """The module's outputs."""
        weights = {name: _tensor(np.asarray(value)) for name, value in parameters.items()}
        with torch.no_grad():
            return functional_call(self.module, weights, (_tensor(inputs),)).numpy()

    def losses(self, loss: str | Loss, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each record."""
        return self._loss(loss)(_tensor(outputs), _tensor(labels)).numpy()

    def _slopes(
        self,
        loss: str | Loss,
        weights: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        real: torch.Tensor,
        *,
        shared: bool,
    ) -> torch.Tensor:
        """The gradient of every client's mean loss, at one vector of weights or at one for each client."""
        one = grad(self._mean_loss(self._loss(loss)))
        if self.vectorized:
            return vmap(one, in_dims=(None if shared else 0, 0, 0, 0))(weights, x, y, real)
        rows = [one(weights if shared else weights[i], x[i], y[i], real[i]) for i in range(len(x))]
        return torch.stack(rows)

    def _mean_loss(self, loss: _Loss) -> Callable[..., torch.Tensor]:
        shapes = [(name, value.shape, value.numel()) for name, value in self.trained]

        def mean_loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            parts = torch.split(flat, [size for *_, size in shapes])
            weights = {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
            losses = loss(functional_call(self.module, weights, (x,)), y)
            if losses.shape != real.shape:
                raise ValueError(
                    "expected loss(outputs, labels) to return one number per record, "
                    f"got shape {tuple(losses.shape)} for {len(real)}"
                )
            return (losses * real).sum() / real.sum().clamp(min=1.0)

        return mean_loss

    @staticmethod
    def _loss(loss: str | Loss) -> _Loss:
        if not isinstance(loss, str):
            return loss
        _validate.known("loss", loss, _LOSSES)
        return _LOSSES[loss]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sigmoid(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.softplus(logits) - logits * labels


def _tensor(array: np.ndarray) -> torch.Tensor:
    """An array as a tensor; JAX's are read-only, and PyTorch warns of those unless they are copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
