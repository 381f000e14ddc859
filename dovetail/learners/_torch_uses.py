"""How a PyTorch module uses its parameters: what is needed for the gradients of many clients in one backward pass.

Clients are mapped over by `torch.func.vmap`, so that PyTorch itself keeps them apart, whatever the layout of a batch
inside the module. While the module runs for one of them, every call of a function of PyTorch's that takes a parameter
passes `_Recorder`, a `TorchFunctionMode`: it knows what gradient the call leaves in the parameter, keeps the inputs
that this gradient is made of, and adds zeros to the output, `probes`. The gradients of the probes are those of the
outputs, and one backward pass finds them all; no parameter has a gradient of its own.

- *products*, of `F.linear`, `x @ weight`, convolutions and recurrent layers: the sum over positions of slope input^T;
- *rows*, of embeddings: slopes at the rows that were looked up;
- *sums* and *scalings*, of biases, positions and scales of normalisation: sums of slopes, or of slopes times inputs.

It does not matter which layer makes the call: `F.linear(x, self.weight)` in a forward of one's own is seen as
`nn.Linear` is, a parameter that is used twice has two uses, and a transposed or sliced one is followed to the
parameter. Functions of PyTorch's that are written in Python, such as attention, run with the mode inside them;
recurrent layers are run step by step. What no rule is known for (`weight * mask`, `torch.einsum`, weight norm) gets a
parameter for each client: a view, not a copy, whose gradients `vmap` forms.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know
from torch.overrides import TorchFunctionMode

from dovetail.learners._torch import check_losses

__all__ = ["Backward", "Changed", "ParameterPart", "RecordedUse", "RecordedUses", "find_uses", "run_recorded"]


class Changed(Exception):  # noqa: N818 - no error: the module is then trained in another way
    """A module does not use its parameters as it did when it was traced."""


class ParameterPart(NamedTuple):
    """A parameter or what a view of it shows: `torch.as_strided` of its flat values, with nothing shown twice."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This part of a contiguous parameter, or of an array of them: (numbers,) or (clients, numbers)."""
        lead = flat.shape[:-1]
        strides = [flat.shape[-1]] * len(lead)
        return flat.as_strided((*lead, *self.shape), (*strides, *self.stride), flat.storage_offset() + self.offset)


@dataclasses.dataclass(frozen=True)
class RecordedUse:
    """One use of a parameter in the module.

    Arguments:
        kind: what its gradient is made of.
        part: of which parameter.
        probe: the number of the output.
        left: the number of the input, among those kept; None for sums.
        settings: of a convolution, what `torch.conv2d` takes after the bias; of a sum its sign; of rows what is
            padding.
    """

    kind: str
    part: ParameterPart
    probe: int
    left: int | None = None
    settings: tuple[Any, ...] = ()


class RecordedUses(NamedTuple):
    """All uses of a module's parameters by one client.

    `mapped` are the names of parameters that every client gets its own view of, `probes` the shapes of outputs.
    """

    uses: tuple[RecordedUse, ...]
    probes: tuple[torch.Size, ...]
    mapped: frozenset[str]


_VIEWS = frozenset(
    (
        *("t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "view", "reshape", "view_as"),
        *("reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze", "narrow", "select", "split", "chunk"),
        *("tensor_split", "unbind", "__getitem__", "contiguous", "ravel", "split_with_sizes", "as_strided"),
    )
)
_VIEW_PROPERTIES = frozenset((torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH))
_CONVOLUTIONS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_NORMALISATIONS = {  # whether scale and shift belong to the last axes, or to channels
    "layer_norm": True,
    "rms_norm": True,
    "group_norm": False,
    "instance_norm": False,
    "batch_norm": False,
}
_CELLS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class _Recorder(TorchFunctionMode):
    """Keeps what is needed of every call that takes a parameter, while a module runs for one client.

    Arguments:
        weights: the parameters by name, contiguous; without those that are mapped over.
        probes: zeros for each output, or None to find out their shapes.

    Inputs are kept as they are: a module may not write to them, as PyTorch's own gradients need them, too.
    """

    def __init__(self, weights: dict[str, torch.Tensor], probes: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._weights = weights
        self._tracked = {id(value): (value, _part(name, value, value)) for name, value in weights.items()}
        self._given = probes
        self.uses: list[RecordedUse] = []
        self.lefts: list[torch.Tensor] = []
        self.shapes: list[torch.Size] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return _attend(func, args, kwargs)
        parts = [part for value in _tensors((args, kwargs)) if (part := self._part_of(value)) is not None]
        if parts and (result := self._apply_rule(func, name, args, kwargs)) is not None:
            return result
        if name == "multi_head_attention_forward" or (parts and _is_composite(func)):
            with self:
                return _body(func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if len(parts) == 1 and (name in _VIEWS or getattr(func, "__self__", None) in _VIEW_PROPERTIES):
            self._track_views(parts[0].name, result)
        return result

    def _part_of(self, value: Any) -> ParameterPart | None:
        """The part of a parameter that a tensor is; None for any other."""
        found = self._tracked.get(id(value))
        return None if found is None else found[1]

    def _track_views(self, name: str, result: Any) -> None:
        """Note that tensors are views of a parameter, as far as they are."""
        for value in _tensors(result):
            part = _part(name, self._weights[name], value)
            if part is not None:
                self._tracked[id(value)] = value, part

    def _apply_rule(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a function returns, with the uses of its parameters noted; None if there is no rule for the call."""
        if name == "linear":
            return self._linear(*_arguments(args, kwargs, ("input", "weight", "bias")))
        if name in ("matmul", "mm", "__matmul__", "__rmatmul__") and not kwargs and len(args) == 2:
            return self._matmul(*(args[::-1] if name == "__rmatmul__" else args))
        if name in ("add", "__add__", "__radd__", "sub", "__sub__", "mul", "__mul__", "__rmul__"):
            return self._elementwise(name.strip("_"), args, kwargs)
        if name in _CONVOLUTIONS:
            return self._convolve(func, _CONVOLUTIONS[name], args, kwargs)
        if name in _NORMALISATIONS and isinstance(func, types.FunctionType):
            return self._normalise(func, _NORMALISATIONS[name], args, kwargs)
        if name == "embedding" and not isinstance(func, types.FunctionType):
            return self._embed(func, *args, **kwargs)
        if name in _CELLS and len(args) == 9 and not isinstance(args[3], torch.Tensor | list | tuple):
            return self._recur(name, *args)
        return None

    # rules: each returns what the function returns, or None where it does not apply

    def _linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        part = self._part_of(weight)
        if self._part_of(x) is not None or x.ndim < 2:
            return None
        if part is None:
            with self:
                return F.linear(x, weight) + bias
        out, probe = self._add_probe(F.linear(x, self._constant(weight), self._constant(bias)))
        self._note("product", part, probe, x)
        self._note("sum", self._part_of(bias), probe, settings=(1.0,))
        return out

    def _matmul(self, x: Any, weight: Any) -> torch.Tensor | None:
        part = self._part_of(weight)
        if part is None or self._part_of(x) is not None or weight.ndim != 2 or x.ndim < 2:
            return None
        out, probe = self._add_probe(torch.matmul(x, self._constant(weight)))
        turned = part._replace(shape=torch.Size(part.shape[::-1]), stride=part.stride[::-1])
        self._note("product", turned, probe, x)
        return out

    def _elementwise(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A parameter added to, or times, something that is none; either is broadcast to the shape of the other."""
        parts = [self._part_of(value) for value in args]
        if kwargs or len(args) != 2 or (parts[0] is None) == (parts[1] is None):
            return None
        at = 0 if parts[1] is None else 1
        x = args[1 - at]
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return None
        first, second = (self._constant(value) for value in args)
        is_scaling = name in ("mul", "rmul")
        result = first * second if is_scaling else first - second if name == "sub" else first + second
        out, probe = self._add_probe(result)
        if is_scaling:
            self._note("scaling", parts[at], probe, x.expand(result.shape))
        else:
            self._note("sum", parts[at], probe, settings=(-1.0 if name == "sub" and at else 1.0,))
        return out

    def _convolve(self, func: Any, dims: int, args: Any, kwargs: Any) -> torch.Tensor | None:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        x, weight, bias, stride, padding, dilation, groups = _arguments(args, kwargs, names)
        part = self._part_of(weight)
        if part is None or self._part_of(x) is not None or x.ndim != dims + 2:
            return None
        settings = (stride or 1, padding or 0, dilation or 1, groups or 1)
        out, probe = self._add_probe(func(x, self._constant(weight), self._constant(bias), *settings))
        self._note("convolution", part, probe, x, settings=settings)
        if (shift := self._part_of(bias)) is not None:
            self._note("sum", _unsqueezed(shift, [1] * dims), probe, settings=(1.0,))
        return out

    def _normalise(self, func: Any, is_last: bool, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Normalisation with its scale and shift, and once more without them, for the gradient of the scale."""
        bound = inspect.signature(func).bind(*args, **kwargs)
        given = {name: bound.arguments.pop(name, None) for name in ("weight", "bias")}
        if any(self._part_of(value) is not None for value in bound.arguments.values()):
            return None
        constants = {name: self._constant(value) for name, value in given.items() if value is not None}
        out, probe = self._add_probe(func(**bound.arguments, **constants))
        trailing = [1] * (0 if is_last else out.ndim - 2)
        if (scale := self._part_of(given["weight"])) is not None:
            with torch.no_grad():
                plain = func(**bound.arguments)
            self._note("scaling", _unsqueezed(scale, trailing), probe, plain)
        if (shift := self._part_of(given["bias"])) is not None:
            self._note("sum", _unsqueezed(shift, trailing), probe, settings=(1.0,))
        return out

    def _embed(
        self, func: Any, weight: Any, indices: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
    ) -> torch.Tensor | None:
        part = self._part_of(weight)
        if part is None or by_frequency or sparse:
            return None
        out, probe = self._add_probe(func(self._constant(weight), indices, padding))
        self._note("rows", part, probe, indices, settings=(padding,))
        return out

    def _recur(
        self,
        name: str,
        x: torch.Tensor,
        state: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        """A recurrent network, step by step: outputs and last states, as PyTorch returns them."""
        each = 4 if has_biases else 2
        cells = [weights[i : i + each] for i in range(0, len(weights), each)]
        directions = 1 + bidirectional
        if (
            any(self._part_of(value) is None for value in weights)
            or (train and dropout)
            or len(weights) != each * num_layers * directions
        ):
            return None  # some are mapped over, it draws numbers, or it projects its states
        first = state if name == "lstm" else (state,)
        x = x.transpose(0, 1) if batch_first else x
        last: list[list[torch.Tensor]] = []
        for layer in range(num_layers):
            outputs = []
            for at in range(layer * directions, (layer + 1) * directions):
                is_reversed = at % directions == 1
                states, end = self._run_cell(
                    name, x.flip(0) if is_reversed else x, [value[at] for value in first], cells[at]
                )
                outputs.append(states.flip(0) if is_reversed else states)
                last.append(end)
            x = torch.cat(outputs, dim=-1)
        x = x.transpose(0, 1) if batch_first else x
        return x, *(torch.stack(states) for states in zip(*last, strict=True))

    def _run_cell(
        self, name: str, x: torch.Tensor, start: list[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The states of a cell at all steps, (steps, batch, units), and the last ones.

        The slopes of the gates are those of what comes from the inputs and, but for a GRU, of what comes from the
        state: the latter's parameters have one use for all steps.
        """
        with self:
            gates = F.linear(x, *weights[::2])
        probe = len(self.shapes) - 1
        kernel, bias = weights[1], weights[3] if len(weights) == 4 else None
        kernel_now, bias_now = self._constant(kernel), self._constant(bias)
        shift = None
        if name == "gru":
            shift, probe = self._add_probe(torch.zeros_like(gates))
        hidden, cell = start[0], start[-1]
        before, states = [], []
        for step in range(len(x)):
            before.append(hidden)
            own, given = F.linear(hidden, kernel_now, bias_now), gates[step]
            if name == "lstm":
                i, f, g, o = (given + own).chunk(4, dim=-1)
                cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
                hidden = torch.sigmoid(o) * torch.tanh(cell)
            elif shift is not None:
                (r, z, n), (own_r, own_z, own_n) = given.chunk(3, dim=-1), (own + shift[step]).chunk(3, dim=-1)
                z = torch.sigmoid(z + own_z)
                hidden = (1 - z) * torch.tanh(n + torch.sigmoid(r + own_r) * own_n) + z * hidden
            else:
                hidden = (torch.tanh if name == "rnn_tanh" else torch.relu)(given + own)
            states.append(hidden)
        self._note("product", self._part_of(kernel), probe, torch.stack([h.expand(hidden.shape) for h in before]))
        self._note("sum", self._part_of(bias), probe, settings=(1.0,))
        return torch.stack(states), [hidden, cell] if name == "lstm" else [hidden]

    # what is kept

    def _constant(self, value: Any) -> Any:
        """A parameter as a number that no gradient is asked for; anything else as it is."""
        return value if self._part_of(value) is None else value.detach()

    def _add_probe(self, out: torch.Tensor) -> tuple[torch.Tensor, int]:
        """An output with its probe added to it, and the probe's number."""
        number = len(self.shapes)
        self.shapes.append(out.shape)
        if self._given is None:
            return out, number
        if number >= len(self._given) or self._given[number].shape != out.shape:
            raise Changed(f"output {number} has another shape: {tuple(out.shape)}")
        return out + self._given[number], number

    def _note(
        self,
        kind: str,
        part: ParameterPart | None,
        probe: int,
        left: torch.Tensor | None = None,
        settings: tuple[Any, ...] = (),
    ) -> None:
        """Note a use of a part, unless it is None: of a constant, or of what is mapped over."""
        if part is None:
            return
        at = None if left is None else len(self.lefts)
        if left is not None:
            self.lefts.append(left)
        self.uses.append(RecordedUse(kind, part, probe, at, settings))


def _part(name: str, whole: torch.Tensor, value: torch.Tensor) -> ParameterPart | None:
    """What a tensor shows of a parameter; None if it is no view of it, or shows a number twice."""
    try:
        is_view = value.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # it is mapped over
        return None
    if not is_view or value.dtype != whole.dtype:
        return None
    if any(step == 0 for step, size in zip(value.stride(), value.shape, strict=True) if size > 1):
        return None
    return ParameterPart(name, value.shape, value.stride(), value.storage_offset() - whole.storage_offset())


def _unsqueezed(part: ParameterPart, trailing: Sequence[int]) -> ParameterPart:
    """A part with axes of length one behind its own."""
    return part._replace(shape=torch.Size((*part.shape, *trailing)), stride=(*part.stride, *trailing))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _arguments(args: Any, kwargs: Any, names: Sequence[str]) -> list[Any]:
    """The arguments of a call by their places; None for those that are not given."""
    given = dict(zip(names, args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def _is_composite(func: Any) -> bool:
    """Whether a function of PyTorch's is written in Python, so that the calls in it can be seen."""
    return isinstance(func, types.FunctionType) and func.__module__ in ("torch.nn.functional", "torch.functional")


def _body(func: types.FunctionType) -> types.FunctionType:
    """A function of PyTorch's that does not ask modes like ours to run in its place."""
    names = {**func.__globals__, **dict.fromkeys(_CHECKS, lambda *_: False)}
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _attend(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Attention as the products that it is: `vmap` would run the fused function client by client."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, key, value, mask, dropout, causal, scale, shares = _arguments(args, kwargs, names)
    if dropout or shares:
        return func(*args, **kwargs)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.softmax(scores, dim=-1) @ value


class Backward(NamedTuple):
    """What one pass forward and back gives, first axis the client.

    `lefts` are the inputs of uses, `slopes` the gradients of outputs, and `mapped` those of parameters that are mapped
    over, by name.
    """

    lefts: list[torch.Tensor]
    slopes: list[torch.Tensor]
    mapped: dict[str, torch.Tensor]


def run_recorded(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    weights: dict[str, torch.Tensor],
    uses: RecordedUses,
    x: torch.Tensor,
    y: torch.Tensor,
    record_weights: torch.Tensor,
) -> Backward:
    """One pass forward and back for clients with as many records each.

    Arguments:
        loss: (outputs, labels) -> one loss per record.
        weights: all trained parameters by name, contiguous, without gradients.
        uses: as `find_uses` found them.
        x: (clients, records, ...); `y` in the same way.
        record_weights: (clients, records), by which losses are added up.

    Raises `Changed` if the module uses its parameters in another way than before.
    """
    count = len(x)
    kept = {name: value for name, value in weights.items() if name not in uses.mapped}
    mapped = {name: weights[name].expand(count, *weights[name].shape).detach().requires_grad_() for name in uses.mapped}
    zero = torch.zeros((), device=x.device)
    probes = [zero.expand(count, *shape).detach().requires_grad_() for shape in uses.probes]
    totals, lefts, recorder = _run(module, loss, kept, mapped, probes, (x, y, record_weights))
    if tuple(recorder.uses) != uses.uses:
        raise Changed("parameters are used in another way than on the records that it was traced with")
    names = list(mapped)
    given = [*probes, *(mapped[name] for name in names)]
    slopes = torch.autograd.grad(totals.sum(), given, allow_unused=True, materialize_grads=True)
    return Backward(
        [left.detach() for left in lefts],
        list(slopes[: len(probes)]),
        dict(zip(names, slopes[len(probes) :], strict=True)),
    )


def find_uses(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    weights: dict[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
) -> RecordedUses:
    """How a module uses its parameters, found by running it; arguments as of `run_recorded`.

    Guarantees:
        A parameter that is used anywhere else than in `uses` is mapped: PyTorch's own graph of the loss leads to it.
    """
    mapped: set[str] = set()
    ones = torch.ones(x.shape[:2], device=x.device)
    while True:
        kept = {name: value.detach().requires_grad_() for name, value in weights.items() if name not in mapped}
        own = {name: weights[name].expand(len(x), *weights[name].shape).detach() for name in mapped}
        totals, _, recorder = _run(module, loss, kept, own, None, (x, y, ones))
        leaves = _leaves(totals)
        left_over = {name for name, value in kept.items() if id(value) in leaves}
        if not left_over:
            return RecordedUses(tuple(recorder.uses), tuple(recorder.shapes), frozenset(mapped))
        mapped |= left_over


def _run(
    module: nn.Module,
    loss: Callable[..., torch.Tensor],
    kept: dict[str, torch.Tensor],
    mapped: dict[str, torch.Tensor],
    probes: list[torch.Tensor] | None,
    records: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], _Recorder]:
    """The loss of each client, (clients,), the inputs of uses, and who recorded them."""
    recorders = []

    def client(
        mapped: dict[str, torch.Tensor], probes: Any, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        recorder = _Recorder(kept, probes)
        recorders.append(recorder)
        with recorder:
            outputs = functional_call(module, {**kept, **mapped}, (x,))
        losses = loss(outputs, y)
        check_losses(losses, len(weights))
        return (losses * weights).sum(), recorder.lefts

    totals, lefts = vmap(client, in_dims=(0, None if probes is None else 0, 0, 0, 0))(mapped, probes, *records)
    return totals, lefts, recorders[-1]


def _leaves(output: torch.Tensor) -> set[int]:
    """The tensors, by identity, that PyTorch's graph of a result ends at."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(following for following, _ in node.next_functions)
    return found
