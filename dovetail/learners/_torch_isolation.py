"""Whether a PyTorch module computes a user's update from that user's records alone, and what makes it so.

Users never share a batch, so a module can only carry something from one user to the next: in a buffer, in a Python
attribute, in the state of a random generator, or in anything else that Python code can reach.

- `refuse_state` runs a module on public records and refuses, by name, whatever changes beside its gradients;
- `Snapshot` puts buffers, frozen parameters and attributes back before every batch;
- `mixes_records` finds out whether what it makes of a record depends on the batch that the record is in: such a module
  gets batches of a user's own size, and none that are filled up to another's;
- `pytorch_only` finds out whether any Python code but PyTorch's own is left when the module runs. Modules of `torch.nn`
  have none. Code of one's own is traced (`torch.fx`): what is run is then the recorded graph of PyTorch's functions, in
  which there is no place for anything else. What cannot be traced runs as it is, and its author has to vouch for it.

Nothing here needs JAX: processes that train clients (`learners._torch_team`) start without it.
"""

from __future__ import annotations

import builtins
import copy
import functools
import math
import operator
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

__all__ = [
    "Snapshot",
    "describe_part",
    "is_hooked",
    "mixes_records",
    "pytorch_only",
    "pytorch_only_loss",
    "refuse_mixing",
    "refuse_state",
]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type)
_PROPERTIES = frozenset({"H", "T", "device", "dtype", "imag", "mH", "mT", "ndim", "real", "shape"})
_METHODS_REFUSED = frozenset(
    {
        *("apply_", "map_", "map2_", "register_hook", "register_post_accumulate_grad_hook"),  # call Python
        *("backward", "module_load", "requires_grad_", "resize_", "resize_as_", "retain_grad", "set_", "share_memory_"),
        *("data_ptr", "numpy", "storage", "tolist", "untyped_storage"),  # give away what lies in memory
    }
)
_SIZES = frozenset({"numel", "nelement", "size", "stride", "__len__"})
_SHAPED_LIKE = frozenset({"broadcast_to", "expand", "flatten", "reshape", "unflatten", "view"})  # sizes move no number
_DISPATCH = (torch.overrides.handle_torch_function, torch._jit_internal.boolean_dispatch)  # call what they are given
_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._Orthogonal, parametrizations._SpectralNorm)


def describe_part(name: str, part: nn.Module) -> str:
    """A part of a module for a message."""
    return f"{type(part).__name__} {name!r}" if name else type(part).__name__


# what a module keeps


class Snapshot:
    """Everything that a module holds beside the parameters that are trained, as it was when the snapshot was taken.

    `restore` puts it back. With `attributes` that is all of it, wherever Python code may have put something; without,
    buffers and frozen parameters that were changed in place, which is all that PyTorch's own functions can do.
    """

    def __init__(self, module: nn.Module, *, attributes: bool = True) -> None:
        parts = dict(module.named_modules())
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._tensors = [
            (name, value, value.detach().clone())
            for name, value in tensors.items()
            if not (isinstance(value, nn.Parameter) and value.requires_grad)
        ]
        self._versions = [value._version for _, value, _ in self._tensors]
        self._same = {id(value): value for value in (*tensors.values(), *parts.values())}
        self._parts = [(name, part, _copy_tables(part), self._copy_attributes(part)) for name, part in parts.items()]
        self._with_attributes = attributes

    def restore(self) -> None:
        """Put everything back into the module that the snapshot was taken of."""
        if self._with_attributes:
            for _, part, tables, attributes in self._parts:
                for name, table in tables.items():
                    if list(map(id, vars(part)[name].values())) != list(map(id, table.values())):
                        vars(part)[name].clear()
                        vars(part)[name].update(table)
                self._put_back(part, attributes)
        with torch.no_grad():
            for at, (_, value, kept) in enumerate(self._tensors):
                if self._with_attributes or value._version != self._versions[at]:
                    value.copy_(kept)
                    self._versions[at] = value._version

    def _put_back(self, part: nn.Module, attributes: dict[str, tuple[Any, Any]]) -> None:
        """Remove attributes that are new, and restore the others from what `_copy_attributes` returned of this part."""
        current = vars(part)
        for name in [name for name in _attribute_names(part) if name not in attributes]:
            del current[name]
        for name, (value, kept) in attributes.items():
            if kept is not value:
                current[name] = copy.deepcopy(kept, dict(self._same))
            elif current.get(name) is not value:
                current[name] = value

    def first_change(self) -> tuple[str, nn.Module, str] | None:
        """The first part that is no longer as it was: its name, the part, and what of it changed, in words."""
        for name, part, tables, attributes in self._parts:
            for table, first in tables.items():
                if list(vars(part)[table]) != list(first):
                    return name, part, f"table {table!r}"
            current = vars(part)
            for attribute in dict.fromkeys((*_attribute_names(part), *attributes)):
                in_both = attribute in current and attribute in attributes
                if not in_both or not _is_same(current[attribute], attributes[attribute][1]):
                    return name, part, f"attribute {attribute!r}"
            for table, what in (("_buffers", "buffer"), ("_parameters", "frozen parameter")):
                for tensor, value in vars(part)[table].items():
                    if (kept := self._original_value(tables[table][tensor])) is not None and not _is_same(
                        value.detach(), kept
                    ):
                        return name, part, f"{what} {tensor!r}"
        return None

    def _original_value(self, first: torch.Tensor | None) -> torch.Tensor | None:
        """The copy of a buffer or frozen parameter that the snapshot holds; None for what it holds none of."""
        return next((kept for _, value, kept in self._tensors if value is first), None)

    def _copy_attributes(self, part: nn.Module) -> dict[str, tuple[Any, Any]]:
        """For each attribute of a part its value and a copy, which is the value itself where that cannot change.

        Inside copies, the module's own tensors and parts stay the same objects.
        """
        attributes = {}
        for name in _attribute_names(part):
            value = vars(part)[name]
            try:
                kept = value if isinstance(value, _ATOMS) else copy.deepcopy(value, dict(self._same))
            except Exception:  # whatever its own code raises: it stays, and its author vouches for it
                kept = value
            attributes[name] = (value, kept)
        return attributes


_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


def _copy_tables(part: nn.Module) -> dict[str, dict[str, Any]]:
    """Copies of PyTorch's own dictionaries in a part: parameters, buffers, parts, hooks."""
    return {name: value.copy() for name, value in vars(part).items() if name in _INTERNAL and isinstance(value, dict)}


def _attribute_names(part: nn.Module) -> list[str]:
    """The attributes that a part's author gave it, and `training`."""
    return [name for name in vars(part) if name not in _INTERNAL]


def _is_same(left: Any, right: Any) -> bool:
    """Whether two values hold the same numbers, NaN being the same as NaN; of objects, whether their attributes do.

    Modules inside are taken for the same, as they are compared as parts of their own.
    """
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.shape == right.shape and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    if isinstance(left, np.ndarray):
        return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, dict):
        return list(left) == list(right) and all(_is_same(value, right[key]) for key, value in left.items())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, _ATOMS) or not hasattr(left, "__dict__"):
        return bool(left == right)
    return isinstance(left, nn.Module) or _is_same(vars(left), vars(right))


# what changes when it runs


def refuse_state(module: nn.Module, total_loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> None:
    """Refuse a module that draws random numbers or keeps anything when it is run and trained on these records."""
    own = copy.deepcopy(module)
    state = Snapshot(own)
    before = _random_states()
    for rows in (slice(None), slice(0, 1), slice(1, None)):
        total_loss(own(x[rows]), y[rows]).backward()
        for value in own.parameters():
            value.grad = None
    if not _is_same(before, _random_states()):
        where = _first_part_changing(module, x, lambda first, second: not _is_same(first, second), _random_states)
        raise ValueError(
            f"expected a module that computes the same from the same records, got {where}, which draws random numbers: "
            "leave it out, or call module.eval() first if it draws none then"
        )
    if (changed := state.first_change()) is not None:
        name, part, what = changed
        raise ValueError(
            f"expected a module that keeps nothing of the records that it has seen, got {describe_part(name, part)}, "
            f"whose {what} changes when it runs: use GroupNorm or LayerNorm for statistics, or call module.eval() "
            "first if it stays as it is then"
        )


def refuse_mixing(module: nn.Module, x: torch.Tensor) -> None:
    """Refuse a module whose output for a record changes with another of these four records; bit by bit, for one shape.

    This is for protocols that protect single records.
    """
    three = x[:3]
    for other, kept in ((x[[3, 1, 2]], slice(1, 3)), (x[[0, 1, 3]], slice(0, 2))):
        seen = [_outputs_of_parts(module, rows, kept) for rows in (three, other)]
        if not _is_same(seen[0][""], seen[1][""]):
            name = next(name for name, rows in seen[0].items() if not _is_same(rows, seen[1].get(name)))
            raise ValueError(
                "expected a module whose output for a record depends on that record alone where single records are "
                f"protected, got {describe_part(name, module.get_submodule(name))}, which mixes the records of a "
                "batch: use GroupNorm for statistics, batch_first=True for sequences, and no operation along the first "
                "axis"
            )


def mixes_records(module: nn.Module, loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether outputs for a record, or its loss, go by other records of a batch, or by how many it has.

    Tried on batches of these four records, one to 68 of them, up to how sums are rounded; what a graph of PyTorch's
    functions computes from sizes, but for shapes, counts as going by them.
    """
    if _depends_on_size(module) or _depends_on_size(loss):
        return True
    own = _perturbed_copy(module)
    everyone = torch.arange(4, device=x.device)
    batches = [everyone[:2], everyone, everyone[[0, 0, 0, 3]], everyone.repeat(17), everyone.repeat_interleave(17)]

    def evaluate(rows: torch.Tensor) -> list[torch.Tensor]:
        outputs = own(x[rows])
        return [outputs, loss(outputs, y[rows])]

    try:
        with torch.no_grad():
            alone = [torch.cat(parts) for parts in zip(*(evaluate(row[None]) for row in everyone), strict=True)]
            return any(
                not _is_close(result, expected[rows])
                for rows in batches
                for result, expected in zip(evaluate(rows), alone, strict=True)
            )
    except (RuntimeError, IndexError, ValueError, TypeError):  # it takes no batch of one, or of another size
        return True


def _perturbed_copy(module: nn.Module) -> nn.Module:
    """A copy of the module with random numbers added to its weights, the same ones always.

    With weights of zero no mixing of records would be seen.
    """
    own = copy.deepcopy(module)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, value in _trained_parameters(own):
            value += 0.1 * torch.randn(value.shape, generator=draw).to(value.device, value.dtype)
    return own


def _is_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are the same up to how sums are rounded."""
    if left.shape != right.shape:
        return False
    scale = right[torch.isfinite(right)].abs().max().item() if torch.isfinite(right).any() else 0.0
    return torch.allclose(left, right, rtol=1e-3, atol=1e-3 * scale, equal_nan=True)


def _depends_on_size(part: Any) -> bool:
    """Whether a graph computes anything but shapes from the sizes of its tensors."""
    if not isinstance(part, fx.GraphModule):
        return False
    sizes = [node for node in part.graph.nodes if _reads_size(node)]
    for node in sizes:
        for user in node.users:
            if user.target is operator.getitem:
                sizes.append(user)
            elif getattr(user.target, "__name__", user.target) not in _SHAPED_LIKE:
                return True
    return False


def _reads_size(node: fx.Node) -> bool:
    """Whether a node of a graph reads the size of a tensor."""
    if node.op == "call_method":
        return node.target in _SIZES
    is_shape = node.target is builtins.getattr and node.args[1] == "shape"
    return is_shape or node.target in (torch.numel, torch._shape_as_tensor)


def _outputs_of_parts(module: nn.Module, x: torch.Tensor, kept: slice) -> dict[str, Any]:
    """The outputs of each part, by name, for the records `kept` of a batch; the whole module's, last, is named "".

    Only parts whose output has a row for each record are among them.
    """
    outputs: dict[str, Any] = {}
    own = copy.deepcopy(module)

    def note(name: str, part: nn.Module, inputs: Any, result: Any) -> None:
        rows = (
            result
            if isinstance(result, torch.Tensor)
            else next((value for value in result if torch.is_tensor(value)), None)
        )
        if name and rows is not None and rows.ndim and len(rows) == len(x):
            outputs.setdefault(name, rows[kept].clone())

    for name, part in own.named_modules():
        part.register_forward_hook(functools.partial(note, name))
    with torch.no_grad():
        whole = own(x)[kept]
    return {**outputs, "": whole}


def _first_part_changing(
    module: nn.Module, x: torch.Tensor, differ: Callable[[Any, Any], bool], observe: Callable[[], Any]
) -> str:
    """The innermost part, in words, during whose run what `observe` returns changes; the whole module if it is none.

    Arguments:
        differ: whether two observations differ.
    """
    own = copy.deepcopy(module)
    before: list[Any] = []
    changing: list[str] = []

    def after(name: str, part: nn.Module, *_: Any) -> None:
        if differ(before.pop(), observe()) and not changing:
            changing.append(describe_part(name, part))

    for name, part in own.named_modules():
        part.register_forward_pre_hook(lambda *_: before.append(observe()))
        part.register_forward_hook(functools.partial(after, name))
    with torch.no_grad():
        own(x)
    return changing[0] if changing else type(module).__name__


def _random_states() -> Any:
    """The state of every random generator that a module may use: PyTorch's, Python's and NumPy's."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return [torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()]  # noqa: NPY002 - other people's code


# what is left of it


def pytorch_only(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, total_loss: Callable[..., Any]
) -> nn.Module | None:
    """The module in a form that runs no Python code but PyTorch's own: itself, or a graph of it; None if there is none.

    Arguments:
        x: inputs of some public records, on which the two are compared.
        y: their labels.
        total_loss: (outputs, labels) -> the sum of the loss.

    Guarantees:
        Its parameters have the same names and values, and its outputs and gradients on these records are the same, bit
        by bit.
    """
    if _is_all_known(module) and not _has_global_hooks():
        return module
    graph = _trace(module)
    if graph is None or not isinstance(graph, nn.Module):
        return None
    for name, value in module.named_parameters():
        _add_unused(graph, name, value)
    if [name for name, _ in _trained_parameters(graph)] != [name for name, _ in _trained_parameters(module)]:
        return None
    results = [_gradients(copy.deepcopy(version), x, y, total_loss) for version in (module, graph)]
    return graph if _is_same(*results) else None


def pytorch_only_loss(loss: Any, outputs: torch.Tensor, labels: torch.Tensor) -> Any | None:
    """The loss as a graph that runs no Python code but PyTorch's own; None if there is none.

    All users share it, and nothing is put back in it: one that writes to a tensor of its own is refused. A graph has
    no branches, so that what it writes to at all, it writes to here.

    Guarantees:
        Its values and slopes at these outputs and labels are the same, bit by bit.
        Nothing that it holds changes when it is run.
    """
    graph = _trace(loss)
    if graph is None:
        return None
    tensors = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    versions = {name: value._version for name, value in tensors.items()}
    results = []
    for version in (loss, graph):
        at = outputs.clone().requires_grad_()
        values = version(at, labels)
        results.append([values.detach(), torch.autograd.grad(values.sum(), at, materialize_grads=True)])
    if changed := [name for name, value in tensors.items() if value._version != versions[name]]:
        raise ValueError(
            f"expected a loss that keeps nothing of the records that it has seen, got {type(loss).__name__}, whose "
            f"tensor {changed[0]!r} changes when it runs"
        )
    return graph if _is_same(*results) else None


def _trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by sorted name."""
    return sorted((name, value) for name, value in module.named_parameters() if value.requires_grad)


def _gradients(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, total_loss: Callable[..., Any]
) -> list[torch.Tensor]:
    """The module's outputs for these records, and the gradients of its parameters."""
    outputs = module(x)
    weights = [value for _, value in _trained_parameters(module)]
    slopes = torch.autograd.grad(total_loss(outputs, y), weights, allow_unused=True, materialize_grads=True)
    return [outputs.detach(), *slopes]


def _add_unused(graph: nn.Module, name: str, value: nn.Parameter) -> None:
    """Give the graph a parameter that it does not use, by its dotted name, unless it has one of that name."""
    *path, last = name.split(".")
    owner = graph
    for part in path:
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    if not hasattr(owner, last):
        owner.register_parameter(last, value)


class _Tracer(fx.Tracer):
    """Records PyTorch's functions; refuses code that a graph would not repeat."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return _is_all_known(m) and not isinstance(m, nn.Sequential)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            raise NotImplementedError("expected a forward without no_grad and autocast")
        return super().create_node(*args, **kwargs)


def _trace(function: Any) -> Any | None:
    """A graph of what this module or function computes; None if it is more than PyTorch's functions."""
    if _has_global_hooks():
        return None  # the graph's own parts would call them
    before = torch.autograd.Function.__dict__["apply"]

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("expected no autograd.Function, whose gradient a graph would not have")

    torch.autograd.Function.apply = classmethod(refuse)
    try:
        with torch.enable_grad():
            tracer = _Tracer()
            graph = tracer.trace(function)
    except Exception:  # whatever its own code raises when it is given no tensors
        return None
    finally:
        torch.autograd.Function.apply = before
    module = fx.GraphModule(tracer.root, graph)
    return module if all(_is_known_node(module, node) for node in graph.nodes) else None


def _is_known_node(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node of a graph runs nothing but PyTorch's own code."""
    match node.op:
        case "placeholder" | "output":
            return True
        case "get_attr":
            value = functools.reduce(getattr, str(node.target).split("."), graph)
            return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer)
        case "call_module":
            return _is_all_known(graph.get_submodule(str(node.target)))
        case "call_method":
            return hasattr(torch.Tensor, str(node.target)) and node.target not in _METHODS_REFUSED
    if node.target is builtins.getattr:
        return node.args[1] in _PROPERTIES
    return node.target in _known_functions()


@functools.cache
def _known_functions() -> frozenset[Any]:
    """PyTorch's functions of tensors, and Python's of numbers: what a graph may call. Cached.

    What is in the set runs unchecked on users' records: nothing may be added that calls what a graph can give it.
    """
    overridable = torch.overrides.get_overridable_functions()
    # torch.nn.init overwrites weights, and methods of tensors are known by name alone: see `_METHODS_REFUSED`
    spaces = [space for space in overridable if space not in (torch.nn.init, torch.Tensor)]
    functions = {function for space in spaces for function in overridable[space]}
    theirs = {function for function in _callables_of(nn.functional) if function not in _DISPATCH}
    return frozenset((*functions, *theirs, *_callables_of(operator), *_callables_of(math)))


def _callables_of(module: Any) -> Iterator[Any]:
    """What may be called of a Python module."""
    return (value for value in vars(module).values() if callable(value))


def _is_all_known(module: nn.Module) -> bool:
    """Whether nothing but PyTorch's own code runs in a module and in all that is in it."""
    return all(_is_known(part) for part in module.modules())


def _is_known(part: nn.Module) -> bool:
    """Whether a part runs nothing but PyTorch's own code, whatever is in it aside."""
    kind = type(part)
    if parametrize.is_parametrized(part):
        kind = kind.__mro__[1]
        lists = part.parametrizations.values()
        if not all(type(function) in _PARAMETRIZATIONS for parametrized in lists for function in parametrized):
            return False
    home = sys.modules.get(kind.__module__)
    theirs = kind.__module__.startswith("torch.nn.") or kind in _PARAMETRIZATIONS
    if not theirs or getattr(home, kind.__name__, None) is not kind or "forward" in vars(part) or is_hooked(part):
        return False
    if any(type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) for value in _own_tensors(part)):
        return False
    return all(
        not callable(value) or isinstance(value, nn.Module | type) or value in _known_functions()
        for name, value in vars(part).items()
        if name not in _INTERNAL
    )


def _own_tensors(part: nn.Module) -> list[Any]:
    """A part's own parameters and buffers, without those of parts inside it."""
    return [value for table in (part._parameters, part._buffers) for value in table.values() if value is not None]


def is_hooked(part: nn.Module) -> bool:
    """Whether somebody's hooks are called with the part."""
    return any(value for name, value in vars(part).items() if name.endswith("_hooks") and "state_dict" not in name)


def _has_global_hooks() -> bool:
    """Whether somebody's hooks are called with every module of this process."""
    theirs = vars(nn.modules.module)
    return any(theirs[name] for name in theirs if name.startswith("_global_") and name.endswith("_hooks"))
