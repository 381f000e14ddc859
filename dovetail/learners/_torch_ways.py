"""How the clipped gradients of a PyTorch module's clients are added up: the fastest way that is right for the module.

- *products*: `learners._torch_clipping`, with a gradient of each client only for parameters whose use has no rule;
- *vectorised*: a gradient of each client for every parameter, for a chunk of clients at a time, by `torch.func.vmap`;
- *alone*: one client after the other, for modules that `vmap` cannot run.

A way is taken only if it gives the gradients of the last one, client by client, on public records and at weights with
random numbers added to them. Which way that is depends on the module and on shapes alone, never on anybody's records.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from dovetail.learners import _torch
from dovetail.learners._torch import Copies, LocalSteps
from dovetail.learners._torch_clipping import FormedGradient, Gradient, add_clipped, client_gradients, whole_part
from dovetail.learners._torch_uses import Changed, ParameterPart, RecordedUses, find_uses, run_recorded

__all__ = ["ClippedSums"]

Way = Literal["products", "vectorised", "alone"]

_CHUNK_BYTES = 2**24  # of what a chunk of clients holds at a time
_CHUNK_BYTES_ACCELERATOR = 2**31
_TINY = 2**18  # numbers, up to which one thread is as fast as several
_SAME = {"cpu": 1e-3}  # how far apart gradients of two ways may be, relative to their length
_SAME_ACCELERATOR = 1e-2  # where convolutions are rounded coarsely
_ONE_STEP = LocalSteps(local=False, batch=1, epochs=1, learning_rate=0.0, mu=0.0)

_log = logging.getLogger("dovetail.learners")


class _Clients(NamedTuple):
    """Clients with as many records each: (clients, records, ...); `counts` of them are their own, the first ones."""

    x: torch.Tensor
    y: torch.Tensor
    counts: torch.Tensor

    def select(self, at: slice | torch.Tensor) -> _Clients:
        return _Clients(*(value[at] for value in self))


class _Chosen(NamedTuple):
    """A way, with how parameters are used; `floats` are how many numbers a client takes."""

    way: Way
    uses: RecordedUses | None
    floats: int


class ClippedSums:
    """Sums of clipped gradients of one module and loss.

    Arguments:
        name: of the module, for the log.
        loss: (outputs, labels) -> one loss per record.
        exact: whether clients have batches of their own sizes, so that none are filled up.
        public: inputs and labels of four public records, on which ways are compared; without, clients have their
            gradients formed.
    """

    def __init__(
        self,
        copies: Copies,
        loss: _torch.Loss,
        *,
        name: str,
        exact: bool,
        public: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self._copies = copies
        self._loss = loss
        self._name = name
        self._exact = exact
        self._public = public
        self._chosen: dict[tuple[int, ...], _Chosen] = {}
        self._lock = threading.Lock()

    def add_up(
        self, start: torch.Tensor, x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, clip_norm: float
    ) -> torch.Tensor:
        """The sum of the gradients of the clients' mean losses, each clipped; arguments as of `TorchLearner.updates`.

        Returns: the flat vector, float64 if several chunks were added up.

        Guarantees:
            No client adds more than the clip norm; one whose gradient, or its squared norm, is not finite adds zero.
        """
        groups = self._with_batches_of_one_size(_Clients(x, y, counts))
        if not groups:
            return torch.zeros_like(start)
        return functools.reduce(torch.add, (self._sum(start, clients, clip_norm) for clients in groups))

    def _with_batches_of_one_size(self, clients: _Clients) -> Sequence[_Clients]:
        """The clients that have records, in groups whose batches are computed together."""
        sizes = clients.counts.cpu()
        if clients.x.shape[1] == 1 or not self._exact:
            if bool((sizes > 0).all()):
                return [clients]
            kept = torch.nonzero(sizes > 0)[:, 0].to(clients.x.device)
            return [clients.select(kept)] if len(kept) else []
        groups = []
        for size in torch.unique(sizes[sizes > 0]).tolist():
            some = clients.select(torch.nonzero(sizes == size)[:, 0].to(clients.x.device))
            groups.append(_Clients(some.x[:, :size], some.y[:, :size], some.counts))
        return groups

    def _sum(self, start: torch.Tensor, clients: _Clients, clip_norm: float) -> torch.Tensor:
        """The clipped sum of clients with batches of one size."""
        chosen = self._choose(start, tuple(clients.x.shape[1:]))
        on_cpu = start.device.type == "cpu"
        size = max(1, (_CHUNK_BYTES if on_cpu else _CHUNK_BYTES_ACCELERATOR) // (4 * chosen.floats))
        count = len(clients.counts)

        def add_up(part: slice) -> torch.Tensor:
            total = start.new_zeros(start.shape, dtype=torch.float64)
            for low in range(part.start, part.stop, size):
                some = clients.select(slice(low, min(low + size, part.stop)))
                total += self._sum_chunk(chosen, start, some, clip_norm)
            return total

        with _full_precision():
            if count <= size and chosen.uses is not None:  # too little to share out
                alone = on_cpu and count * chosen.floats < _TINY
                with _torch.on_one_thread() if alone else contextlib.nullcontext():
                    return self._sum_chunk(chosen, start, clients, clip_norm)
            parts = _torch.cut_evenly(count, _torch.num_threads() if on_cpu else 1)
            return functools.reduce(torch.add, _torch.run_in_threads(add_up, parts))

    def _sum_chunk(self, chosen: _Chosen, start: torch.Tensor, clients: _Clients, clip_norm: float) -> torch.Tensor:
        """The clipped sum of a chunk of clients, by this way or, if the module does something else now, one by one."""
        try:
            return self._sum_by(chosen, start, clients, clip_norm)
        except Changed as error:
            _log.warning("the clients of %s train alone from now on: %s", self._name, error)
            chosen = _Chosen("alone", None, chosen.floats)
            self._chosen[tuple(clients.x.shape[1:])] = chosen
            return self._sum_by(chosen, start, clients, clip_norm)

    def _sum_by(self, chosen: _Chosen, start: torch.Tensor, clients: _Clients, clip_norm: float) -> torch.Tensor:
        total = torch.zeros_like(start)
        with self._copies.borrow() as own:
            shapes = [(name, value.shape) for name, value in _torch.trained_parameters(own.module)]
            weights = _split(start, shapes)
            totals = {name: part.reshape(-1) for name, part in _split(total, shapes).items()}
            if chosen.uses is None:
                for i in range(len(clients.counts)):
                    gradients = self._form_alone(own, start, weights, clients.select(slice(i, i + 1)))
                    add_clipped(totals, gradients, clip_norm, clients.counts.new_ones(1))
                return total
            own.forget()
            records = clients.y.shape[1]
            is_own = torch.arange(records, device=start.device) < clients.counts[:, None]
            record_weights = is_own / clients.counts[:, None]
            backward = run_recorded(own.module, self._loss, weights, chosen.uses, clients.x, clients.y, record_weights)
        gradients = client_gradients(chosen.uses, backward, weights)
        add_clipped(totals, gradients, clip_norm, clients.counts / records)
        return total

    def _form_alone(
        self, own: _torch.Copy, start: torch.Tensor, weights: dict[str, torch.Tensor], client: _Clients
    ) -> list[tuple[ParameterPart, Gradient]]:
        """The gradient of one client, of its own records and in a batch of their own."""
        rows = slice(int(client.counts[0]))
        update = _torch.train_client(own, self._total_loss, _ONE_STEP, start, client.x[0, rows], client.y[0, rows])
        parts = _split(-update.detach(), [(name, value.shape) for name, value in weights.items()])
        return [(whole_part(name, value), FormedGradient(value[None])) for name, value in parts.items()]

    @functools.cached_property
    def _total_loss(self) -> _torch.Loss:
        return _torch.loss_sum(self._loss)

    # which way

    def describe(self, start: torch.Tensor, records: int) -> str:
        """How the gradients of clients with so many records are computed, in words."""
        shape = () if self._public is None else tuple(self._public[0].shape[1:])
        return f"gradients of {self._name}: {_describe(self._choose(start, (records, *shape)))}"

    def _choose(self, start: torch.Tensor, shape: tuple[int, ...]) -> _Chosen:
        """The way for clients with records of this shape, (records, ...); found out for the first of them."""
        with self._lock:
            if shape not in self._chosen:
                with _torch.on_one_thread(), _full_precision():
                    self._chosen[shape] = self._try_ways(start, shape[0])
                _log.info("%s: gradients of %d records: %s", self._name, shape[0], _describe(self._chosen[shape]))
            return self._chosen[shape]

    def _try_ways(self, start: torch.Tensor, records: int) -> _Chosen:
        """The first way that gives the right gradients on public records."""
        dim = len(start)
        alone = _Chosen("alone", None, 4 * dim)
        if self._public is None:
            return alone
        draw = torch.Generator().manual_seed(0)
        weights_at = start + 0.1 * torch.randn(start.shape, generator=draw).to(start.device)
        rows = (torch.arange(4)[:, None] + torch.arange(records)) % 4
        x, y = (value[rows.to(start.device)] for value in self._public)
        some = _Clients(x, y, torch.full((4,), records, device=start.device))
        expected = torch.stack([self._sum_by(alone, weights_at, some.select(slice(i, i + 1)), _HUGE) for i in range(4)])
        for find in (self._find_products, self._find_vectorised):
            try:
                chosen = find(weights_at, some)
                if self._gives(expected, chosen, weights_at, some):
                    return chosen
                _log.info("%s: other gradients by the way %r", self._name, chosen.way)
            except Exception as error:  # of whatever kind: what `vmap` cannot run says so in many ways
                _log.info("%s: no gradients side by side: %s: %s", self._name, type(error).__name__, error)
        return alone

    def _find_products(self, start: torch.Tensor, clients: _Clients) -> _Chosen:
        with self._copies.borrow() as own:
            own.forget()
            weights = _split(start, [(name, value.shape) for name, value in _torch.trained_parameters(own.module)])
            uses = find_uses(own.module, self._loss, weights, clients.x[:2], clients.y[:2])
        return _Chosen("products", uses, _count_floats(uses, weights, clients))

    def _find_vectorised(self, start: torch.Tensor, clients: _Clients) -> _Chosen:
        with self._copies.borrow() as own:
            names = [name for name, _ in _torch.trained_parameters(own.module)]
        return _Chosen("vectorised", RecordedUses((), (), frozenset(names)), 3 * len(start))

    def _gives(self, expected: torch.Tensor, chosen: _Chosen, start: torch.Tensor, clients: _Clients) -> bool:
        """Whether a way gives these gradients, client by client, and their clipped sum."""
        near = _SAME.get(start.device.type, _SAME_ACCELERATOR)
        lengths = expected.norm(dim=1)
        if not bool(torch.isfinite(lengths).all()):
            return False
        for i in range(len(expected)):
            found = self._sum_by(chosen, start, clients.select(slice(i, i + 1)), _HUGE)
            if not bool((found - expected[i]).norm() <= near * lengths[i]):
                return False
        clip_norm = float(lengths.median())
        if not clip_norm:
            return True
        found = self._sum_by(chosen, start, clients, clip_norm)
        clipped = (expected * (clip_norm / lengths.clamp(min=clip_norm))[:, None]).sum(dim=0)
        return bool((found - clipped).norm() <= len(expected) * near * clip_norm)


_HUGE = 2.0**60  # a clip norm at which nothing is clipped


def _split(flat: torch.Tensor, shapes: Sequence[tuple[str, torch.Size]]) -> dict[str, torch.Tensor]:
    """The parameters in a flat vector, by name; views of it."""
    parts = flat.split([shape.numel() for _, shape in shapes])
    return {name: part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def _count_floats(uses: RecordedUses, weights: dict[str, torch.Tensor], clients: _Clients) -> int:
    """About how many numbers a client takes: outputs, slopes and inputs of uses, and gradients that are formed."""
    formed = sum(3 * weights[name].numel() for name in uses.mapped)
    outputs = sum(4 * shape.numel() for shape in uses.probes)
    for use in uses.uses:
        out = uses.probes[use.probe]
        match use.kind:
            case "product":
                positions = out.numel() // out[-1]
                rows, columns = use.part.shape
                formed += columns * positions + (2 * rows * columns if positions > 1 else 0)
            case "convolution":
                formed += 3 * use.part.shape.numel() + 2 * out.numel()
            case _:
                formed += out.numel()
    return outputs + formed + clients.x[0].numel()


def _describe(chosen: _Chosen) -> str:
    """A way, in words."""
    if chosen.way != "products" or chosen.uses is None:
        return {"vectorised": "each formed, side by side", "alone": "each formed, one client after the other"}[
            chosen.way
        ]
    mapped = sorted(chosen.uses.mapped)
    return "by products" + (f"; formed for {', '.join(mapped)}" if mapped else "")


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply float32 matrices as such: what is clipped may not be rounded coarsely as it is added up."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
