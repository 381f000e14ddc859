"""PyTorch modules in simulation, on every core or on a GPU.

Updates are those of `learners.client`, computed by PyTorch: the same batches in the same order, gradients of the mean
loss. Small models, and any on a GPU, train side by side by `torch.func.vmap`. On a CPU larger ones train one after the
other, each with a copy of the module as PyTorch would run it: batches of matrices and grouped convolutions are slower
than single ones there. Either way the clients of a chunk are shared among threads, one per core, and each thread
computes alone. PyTorch leaves Python's lock while it computes, yet threads wait for it between two computations: where
training takes long, processes take their place (`learners._torch_team`).

Parameters are one flat vector, by sorted name. A module starts from its own weights and is not changed; parameters
without `requires_grad` and all buffers stay as they are. What would change beside parameters, such as the statistics of
batch normalisation, is refused, and so is what draws random numbers, such as dropout; and it is put back before every
batch (`learners._torch_isolation`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from dovetail import _validate
from dovetail.data._base import Loss, Model
from dovetail.learners import _torch
from dovetail.learners import _torch_isolation as isolation
from dovetail.learners._torch import Copies, trained_parameters
from dovetail.learners._torch_team import Team
from dovetail.learners._torch_ways import ClippedSums
from dovetail.learners.client import ClientUpdate

__all__ = ["TorchLearner", "model"]

_SMALL_MODEL = 2**13  # parameters below which clients train side by side on a CPU
_SMALL_DENSE_MODEL = 2**15  # the same, where every layer with parameters is dense


def model(
    module: torch.nn.Module,
    *,
    loss: str | Loss | None = None,
    vectorized: bool | None = None,
    processes: bool | None = None,
    device: str | None = None,
    name: str | None = None,
) -> Model:
    """The model of a module, which starts from the module's current weights.

    Arguments:
        loss: a name of `learners.losses.LOSSES`, or `loss(outputs, labels)` in PyTorch, one loss per record.
        vectorized: whether clients train side by side; by default what is faster. Modules that `torch.func.vmap`
            cannot handle need False: one client after the other.
        processes: clients that train one after the other on a CPU move from threads to processes when training has
            taken longer than processes take to start. True starts processes at once, False never.
        device: where to train; by default a GPU, if PyTorch has one.
        name: what the model is called; by default its class's name.
    """
    _check_module(module)
    try:
        module = copy.deepcopy(module)
    except Exception as error:
        raise ValueError(
            f"expected a module that can be copied, got {type(module).__name__} ({type(error).__name__}: {error}): "
            "torch.nn.utils.parametrizations has weight_norm and spectral_norm that can"
        ) from error
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    learner = TorchLearner(module=module.to(device), vectorized=vectorized, processes=processes, device=device)
    first = {key: value.detach().cpu().numpy().copy() for key, value in learner.trained_parameters}
    return Model(
        name=name or type(module).__name__,
        init=lambda key: {key: jnp.asarray(value) for key, value in first.items()},
        apply=learner.outputs,
        loss=loss,
        learner=learner,
    )


def _check_module(module: torch.nn.Module) -> None:
    """Refuse what would train differently from what it seems."""
    for name, part in module.named_modules():
        where = isolation.describe_part(name, part)
        if getattr(part, "has_uninitialized_params", bool)():
            raise ValueError(f"expected parameters with values, got {where}: run the module on a batch first")
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
        raise ValueError(
            f"expected a module with parameters to train, got {type(module).__name__}: set requires_grad on some"
        )
    for name, value in trained:
        if value.dtype != torch.float32:
            raise ValueError(f"expected float32 parameters, got {value.dtype} in {name!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TorchLearner:
    """Clients that train a module.

    If `isolated`, which `inspect` finds out, the module runs nothing but PyTorch's own code. `original` is then the
    class of the module that was given, and `own_loss` a loss that was given and what is run in its place. If `exact`,
    clients train one after the other, on batches of their own sizes: side by side they are filled up to the largest.
    `public` are the records that it was inspected with.

    Guarantees:
        An update is that of `learners.client.local_update` for the same weights, records and order, up to rounding.
        A client's update depends on its own records alone, if the learner is `isolated`. Otherwise buffers, attributes
        and what else the module itself holds are the same for every batch.
    """

    module: torch.nn.Module
    vectorized: bool | None = None
    processes: bool | None = None
    device: str = "cpu"
    isolated: bool = False
    exact: bool = False
    original: type | None = None
    own_loss: tuple[Any, _torch.Loss] | None = None
    public: tuple[torch.Tensor, torch.Tensor] | None = None
    gradients = True
    ignores_settings = False
    notes = ()

    @property
    def platform(self) -> str:
        """Where clients train: "host" for a CPU, else "gpu"."""
        return "host" if self.device == "cpu" else "gpu"

    @property
    def code(self) -> tuple[Any, ...]:
        """The module's class as the user wrote it: a resumed run must have the same source."""
        return (self.original or type(self.module),)

    @property
    def trained_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are trained, with their names, in the order of the flat vector."""
        return trained_parameters(self.module)

    def inspect(
        self, loss: str | Loss, inputs: np.ndarray, labels: np.ndarray, *, records: bool = False
    ) -> tuple[TorchLearner, tuple[str, ...]]:
        """Try the learner on at least four public records.

        Arguments:
            records: whether single records are protected, and not users.

        Returns: the learner as it is to train, and what its author has to vouch for.

        Guarantees:
            Refuses by name what draws random numbers, keeps anything of the records it has seen, or makes one client's
            update depend on another's records; with `records` also what mixes the records of a batch.
            Nothing is left to vouch for if the learner is `isolated`.
        """
        with _torch.on_one_thread():
            return self._inspect(loss, inputs, labels, records=records)

    def _inspect(
        self, loss: str | Loss, inputs: np.ndarray, labels: np.ndarray, *, records: bool
    ) -> tuple[TorchLearner, tuple[str, ...]]:
        """`inspect`, while PyTorch computes on one thread."""
        x, y = _to_tensor(inputs).to(self.device), _to_tensor(labels).to(self.device)
        y = y.long() if loss == "cross_entropy" else y
        total = _torch.loss_sum(loss)
        isolation.refuse_state(self.module, total, x, y)
        if records:
            isolation.refuse_mixing(self.module, x)
        module = isolation.pytorch_only(self.module, x, y, total)
        own = None if isinstance(loss, str) else isolation.pytorch_only_loss(loss, self.module(x).detach(), y)
        declared = []
        if module is None:
            declared.append(_declaration("module", type(self.module).__name__))
        if own is None and not isinstance(loss, str):
            declared.append(_declaration("loss", getattr(loss, "__qualname__", type(loss).__name__)))
        inspected = dataclasses.replace(
            self,
            module=module or self.module,
            isolated=module is not None,
            exact=bool(declared)
            or isolation.mixes_records(module or self.module, own or self._loss_function(loss), x, y),
            original=type(self.module),
            own_loss=None if own is None else (loss, own),
            public=(x, y),
        )
        dataclasses.replace(inspected, processes=False)._refuse_dependence(loss, inputs, labels)
        return inspected, tuple(declared)

    def _refuse_dependence(self, loss: str | Loss, inputs: np.ndarray, labels: np.ndarray) -> None:
        """Refuse a client's update that changes with the records of a client before or after it."""
        start = np.concatenate([value.detach().cpu().numpy().ravel() for _, value in self.trained_parameters])
        settings = ClientUpdate(update="fedavg", batch=1, learning_rate=0.01)

        def updates(*rows: int) -> np.ndarray:
            x, y = (np.stack([array[[row, row]] for row in rows]) for array in (inputs, labels))
            return np.asarray(self.updates(settings, loss, start, x, y, np.full(len(rows), 2, np.int32)))

        among = updates(0, 1, 2)
        if self.device != "cpu" and not _is_same(among, updates(0, 1, 2)):
            return  # sums on this device depend on chance, so that a comparison bit by bit says nothing
        for other, kept in ((updates(3, 1, 2), slice(1, 3)), (updates(0, 1, 3), slice(0, 2))):
            if not _is_same(among[kept], other[kept]):
                raise ValueError(
                    "expected updates that depend on one user's records alone, got the module "
                    f"{(self.original or type(self.module)).__name__}, whose update for one user changes with the "
                    "records of another: it must keep nothing of one batch for the next"
                )

    def updates(
        self,
        settings: ClientUpdate,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray | jax.Array,
        labels: np.ndarray | jax.Array,
        counts: np.ndarray | jax.Array,
    ) -> np.ndarray | jax.Array:
        """Updates (clients, dim) of some clients, which are shared among the cores.

        Arguments:
            settings: how a client trains.
            parameters: the flat vector that all clients start from.
            inputs: (clients, records, ...), of which the first `counts` of each client are real.
            labels: in the same way.

        Returns: an array of the kind of `inputs`: of JAX's on a GPU, one that never leaves it.
        """
        start, x, y = (_to_tensor(array).to(self.device) for array in (parameters, inputs, labels))
        y = y.long() if loss == "cross_entropy" else y
        side_by_side = self._is_small if self.vectorized is None else self.vectorized
        if side_by_side and not self.exact:
            train = functools.partial(self._train_side_by_side, settings, self._loss_function(loss), start)
            parts = _share_out(np.asarray(counts), _torch.num_threads() if self.device == "cpu" else 1)
            some = _torch.run_in_threads(lambda part: train(x[part.at], y[part.at], part.counts), parts)
            updates = _put_back(some, parts)
        else:
            steps = _torch.LocalSteps(
                settings.local, settings.batch, settings.epochs, settings.learning_rate, settings.mu
            )
            updates = self._make_team(loss).updates(steps, start, x, y, np.asarray(counts))
        return _to_jax(updates) if isinstance(inputs, jax.Array) else updates.detach().cpu().numpy()

    def clipped_sum(
        self,
        loss: str | Loss,
        parameters: np.ndarray,
        inputs: np.ndarray | jax.Array,
        labels: np.ndarray | jax.Array,
        counts: np.ndarray | jax.Array,
        *,
        clip_norm: float,
    ) -> np.ndarray | jax.Array:
        """The sum (dim,) of minus the updates of clients that take one gradient step, each clipped; none is formed.

        Arguments otherwise as of `updates`, which these are the ones of with `update = "fedsgd"`.

        Guarantees:
            No client adds more than `clip_norm`; one whose update, or its squared norm, is not finite adds zero.
        """
        start, x, y, sizes = (_to_tensor(array).to(self.device) for array in (parameters, inputs, labels, counts))
        y = y.long() if loss == "cross_entropy" else y
        total = self._clipped_sums(loss).add_up(start, x, y, sizes, float(clip_norm)).to(torch.float32)
        return _to_jax(total) if isinstance(inputs, jax.Array) else total.cpu().numpy()

    def describe_clipping(self, loss: str | Loss, parameters: np.ndarray, records: int) -> list[str]:
        """How `clipped_sum` is computed for clients with so many records, in lines."""
        return [self._clipped_sums(loss).describe(_to_tensor(parameters).to(self.device), records)]

    def _clipped_sums(self, loss: str | Loss) -> ClippedSums:
        """Who adds up clipped gradients of this loss."""
        if loss not in self._sums:
            self._sums[loss] = ClippedSums(
                self._copies,
                self._loss_function(loss),
                name=(self.original or type(self.module)).__name__,
                exact=self.exact,
                public=self.public,
            )
        return self._sums[loss]

    @functools.cached_property
    def _sums(self) -> dict[str | Loss, ClippedSums]:
        """By loss, who adds up clipped gradients; made by `_clipped_sums`."""
        return {}

    def _train_side_by_side(
        self,
        settings: ClientUpdate,
        loss: _torch.Loss,
        start: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        counts: np.ndarray,
    ) -> torch.Tensor:
        """The updates (clients, dim) of clients that train side by side, the largest first.

        Arguments as of `updates`. A client takes part in as many steps as it has batches, and costs no more.
        """
        records = x.shape[1]
        real = torch.arange(records, device=x.device) < torch.from_numpy(counts).to(x.device)[:, None]
        real = real.to(torch.float32)
        with self._copies.borrow() as own:
            slopes = vmap(grad(_mean_loss(own.module, loss)), in_dims=(0 if settings.local else None, 0, 0, 0))
            own.forget()
            if not settings.local:
                return -slopes(start, x, y, real)
            every = start.repeat(len(counts), 1)
            size = settings.batch_size(records)
            for number in range(settings.epochs * math.ceil(records / size)):
                low = number % math.ceil(records / size) * size
                holding = int(np.count_nonzero(counts > low))
                if not holding:
                    continue
                batch = slice(holding), slice(low, low + size)
                current = every[:holding]
                own.forget()
                slope = slopes(current, x[batch], y[batch], real[batch])
                if settings.mu:
                    slope = slope + settings.mu * (current - start)
                current.sub_(slope, alpha=settings.learning_rate)
            return every.sub_(start)

    @functools.cached_property
    def _is_small(self) -> bool:
        """Whether clients train faster side by side than one after the other."""
        dim = sum(value.numel() for _, value in self.trained_parameters)
        holders = (part for part in self.module.modules() if next(part.parameters(recurse=False), None) is not None)
        is_dense = all(type(part) is torch.nn.Linear for part in holders)
        return self.device != "cpu" or dim < (_SMALL_DENSE_MODEL if is_dense else _SMALL_MODEL)

    @functools.cached_property
    def _copies(self) -> Copies:
        """A copy of the module for each thread, for training side by side and for outputs."""
        return Copies(self.module, _torch.num_threads(), isolated=self.isolated)

    @functools.cached_property
    def _teams(self) -> dict[str | Loss, Team]:
        """By loss, who trains clients one by one; made by `_make_team`."""
        return {}

    def _make_team(self, loss: str | Loss) -> Team:
        """The threads or processes that train clients with this loss."""
        if loss not in self._teams:
            run = self._loss_function(loss)  # refuses a name that nobody knows
            self._teams[loss] = Team(
                self.module, loss if isinstance(loss, str) else run, self.processes, isolated=self.isolated
            )
        return self._teams[loss]

    def outputs(self, parameters: Any, inputs: np.ndarray) -> np.ndarray:
        """The module's outputs for some records, at these parameters by name; computed where the module is."""
        weights = {name: _to_tensor(np.asarray(value)).to(self.device) for name, value in parameters.items()}
        with torch.no_grad(), self._copies.borrow() as own:
            own.forget()
            return functional_call(own.module, weights, (_to_tensor(inputs).to(self.device),)).cpu().numpy()

    def losses(self, loss: str | Loss, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of each record, (records,), from what `outputs` returned; on the CPU.

        Labels need no cast here, as in `updates`: the losses of `_torch.LOSSES` cast classes themselves, and only the
        short cut of `_torch.loss_sum` does not.
        """
        return self._loss_function(loss)(_to_tensor(outputs), _to_tensor(labels)).numpy()

    def _loss_function(self, loss: str | Loss) -> _torch.Loss:
        """The function of a loss, by name or as it is; its form of PyTorch's code alone, where `inspect` found one."""
        if not isinstance(loss, str):
            return self.own_loss[1] if self.own_loss is not None and self.own_loss[0] is loss else loss
        _validate.known_name("loss", loss, _torch.LOSSES)
        return _torch.LOSSES[loss]


class _Share(NamedTuple):
    """Which clients a thread trains, and how many records each of them has."""

    at: Any
    counts: np.ndarray


def _share_out(counts: np.ndarray, threads: int) -> list[_Share]:
    """Clients in shares of about as many records each, in every share the largest first."""
    if (counts == counts[0]).all():
        return [_Share(part, counts[part]) for part in _torch.cut_evenly(len(counts), threads)]
    order = np.argsort(-counts, kind="stable")
    shares = [order[thread::threads] for thread in range(min(threads, len(order)))]
    return [_Share(torch.from_numpy(share), counts[share]) for share in shares]


def _put_back(updates: list[torch.Tensor], shares: list[_Share]) -> torch.Tensor:
    """The updates of all shares, in the order of the clients."""
    if len(updates) == 1 and isinstance(shares[0].at, slice):
        return updates[0]
    if isinstance(shares[0].at, slice):
        return torch.cat(updates)
    every = torch.empty_like(updates[0]).resize_(sum(map(len, updates)), updates[0].shape[1])
    for share, rows in zip(shares, updates, strict=True):
        every[share.at] = rows
    return every


def _declaration(what: str, name: str) -> str:
    """What the author of this module or loss has to vouch for."""
    return f"the {what} {name} computes each user's update from that user's records alone"


def _is_same(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two arrays are the same, bit by bit."""
    return left.tobytes() == right.tobytes()


def _mean_loss(module: torch.nn.Module, loss: _torch.Loss) -> Callable[..., torch.Tensor]:
    """The mean loss of a client's real records: (flat parameters, inputs, labels, is real: 0 or 1) -> number."""
    shapes = [(name, value.shape, value.numel()) for name, value in trained_parameters(module)]

    def mean_loss(flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        parts = torch.split(flat, [size for *_, size in shapes])
        weights = {name: part.reshape(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        losses = loss(functional_call(module, weights, (x,)), y)
        _torch.check_losses(losses, len(real))
        return (losses * real).sum() / real.sum().clamp(min=1.0)

    return mean_loss


def _to_jax(updates: torch.Tensor) -> jax.Array:
    """Updates as an array of JAX on the same device; nothing is copied if they lie in one piece."""
    return jnp.from_dlpack(updates.detach().contiguous())


def _to_tensor(array: np.ndarray | jax.Array) -> torch.Tensor:
    """An array as a tensor on the same device, which shares its memory.

    A read-only array of NumPy is copied: PyTorch, which cannot protect it, would warn.
    """
    if isinstance(array, jax.Array):
        return torch.from_dlpack(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
