"""Sums of clipped gradients of a PyTorch module, one gradient of each client, most of which are never formed.

One pass forward and one back give the inputs l_p and the slopes r_p of every kernel (`learners._torch_uses`), and a
client's gradient of a kernel is the sum of r_p l_p^T over its records and positions p. The norm of one such product is
|r| |l|; of several, it follows from the products of all pairs, or from the gradient, formed for a chunk of clients and
forgotten, where that is less work. The clipped sum over clients is one matrix product then, and needs no second pass.

*Rounding* (docs/proofs/recorded-gradients.md). What is formed is measured as it is added up. Norms are computed in
float64, where products of two float32 numbers are exact: of pairs of positions, up to a bound that is added. Where
positions cancel, the sum in float32 of what they add may be longer than the exact one: `_spread` is added to the norm,
and a client whose positions cancel to less than a sixteenth has its gradient formed. What a client adds is at most the
clip norm long, without a tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - the name that PyTorch's users know
from torch.nn import grad as nn_grad

from dovetail.learners._torch_uses import Backward, ParameterPart, RecordedUse, RecordedUses

__all__ = [
    "FormedGradient",
    "Gradient",
    "KernelGradient",
    "TableGradient",
    "add_clipped",
    "client_gradients",
    "whole_part",
]

_UNIT = 2.0**-24  # half the distance of neighbouring float32 numbers, relative
_UNIT64 = 2.0**-53
_CANCELLED = 16.0  # how many times its own length a client's gradient may be the sum of
_LONGEST = 2.0**80  # of an l_p: beside a longer one, what is flushed to zero of its r_p would count
_LARGEST_SQUARE = float(torch.finfo(torch.float32).max)  # an update with a larger squared norm counts as zero
_OUTWARD = 1 + 2.0**-21  # covers the roundings of a factor, of what it is multiplied by, and of a norm in float64
_CHANNELS = 4  # of each group, above which PyTorch's own gradients of kernels are faster than patches
_FORM = 12  # numbers of a formed gradient cost as much as so many products of pairs


class FormedGradient(NamedTuple):
    """The gradients of one part as they are, first axis the client."""

    values: torch.Tensor

    def squares(self) -> torch.Tensor:
        """For each client the squared norm, float64."""
        return torch.linalg.vector_norm(self.values.flatten(1), dim=1, dtype=torch.float64).square()

    def scaled_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """The sum over clients, each times its factor; whoever has the factor 0 is left out, whatever its values."""
        flat = _unless_zero(factors, self.values.flatten(1))
        return (factors @ flat).reshape(self.values.shape[1:])


class KernelGradient(NamedTuple):
    """The gradients sum_p right_p left_p^T of one kernel.

    `left` is (clients, positions, columns of the kernel), `right` (clients, positions, its rows).
    """

    left: torch.Tensor
    right: torch.Tensor

    @property
    def positions(self) -> int:
        return self.left.shape[1]

    def squares(self) -> torch.Tensor:
        """For each client the squared norm, float64, at least the exact one but for 2^-50 of itself."""
        if self.positions == 1:
            return (_row_norms(self.left) * _row_norms(self.right)).squeeze(1).square()
        left, right = (side.double() for side in self)
        pairs = (left @ left.mT) * (right @ right.mT)
        terms = self.positions**2 + self.left.shape[2] + self.right.shape[2] + 16
        longest = self.sums_of_norms()
        return pairs.sum(dim=(1, 2)).clamp(min=0) + 2 * terms * _UNIT64 * longest.square()

    def sums_of_norms(self) -> torch.Tensor:
        """For each client sum_p |left_p| |right_p|, float64; infinite where products may be flushed to zero."""
        lengths = _row_norms(self.left)
        total = (lengths * _row_norms(self.right)).sum(dim=1)
        return torch.where(lengths.amax(dim=1) <= _LONGEST, total, torch.inf)

    def scaled_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """The sum over clients, each times its factor, in one matrix product."""
        left, right = (_unless_zero(factors, side).flatten(0, 1) for side in self)
        scaled = (right.unflatten(0, (len(factors), -1)) * factors[:, None, None]).flatten(0, 1)
        return scaled.T @ left

    def form(self, clients: torch.Tensor | None = None) -> FormedGradient:
        """The gradients of all clients, or of some, as they are."""
        left, right = self if clients is None else (side[clients] for side in self)
        return FormedGradient(right.mT @ left)

    @property
    def is_shorter(self) -> bool:
        """Whether products of all pairs are less work than gradients that are formed."""
        return _is_shorter(self.positions, self.right.shape[2], self.left.shape[2])


class TableGradient(NamedTuple):
    """The gradients of a table of which clients use some rows: `values` (used, columns), each row of one client once.

    `owners` (used,) are the clients, `places` (used,) the rows of the table, of which there are `shape[0]`.
    """

    values: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    clients: int
    shape: torch.Size

    def squares(self) -> torch.Tensor:
        """For each client the squared norm, float64."""
        each = torch.linalg.vector_norm(self.values, dim=1, dtype=torch.float64).square()
        return each.new_zeros(self.clients).index_add_(0, self.owners, each)

    def scaled_sum(self, factors: torch.Tensor) -> torch.Tensor:
        """The sum over clients, each times its factor."""
        own = factors[self.owners]
        scaled = _unless_zero(own, self.values) * own[:, None]
        return scaled.new_zeros(self.shape).index_add_(0, self.places, scaled)

    def form(self) -> FormedGradient:
        """The gradients of all clients as they are, with the rows that they do not use."""
        dense = self.values.new_zeros((self.clients, *self.shape))
        dense[self.owners, self.places] = self.values
        return FormedGradient(dense)


Gradient = FormedGradient | KernelGradient | TableGradient


def client_gradients(
    uses: RecordedUses, backward: Backward, weights: dict[str, torch.Tensor]
) -> list[tuple[ParameterPart, Gradient]]:
    """The gradients of clients, one for each part of a parameter that is used; parts have no number in common.

    Arguments:
        uses: how parameters are used.
        backward: a pass over these clients.
        weights: the parameters by name, contiguous.
    """
    found: list[tuple[ParameterPart, Gradient]] = [
        (whole_part(name, weights[name]), FormedGradient(slope)) for name, slope in backward.mapped.items()
    ]
    for name, own in itertools.groupby(sorted(uses.uses, key=lambda use: use.part.name), lambda use: use.part.name):
        whole = whole_part(name, weights[name])
        for together in _overlapping(list(own), weights[name].numel()):
            gradients = [_shorter(_gradient(use, backward)) for use in together]
            parts = {use.part for use in together}
            if len(together) == 1:
                found.append((together[0].part, gradients[0]))
            elif len(parts) == 1 and all(isinstance(gradient, KernelGradient) for gradient in gradients):
                sides = (torch.cat(side, dim=1) for side in zip(*gradients, strict=True))
                found.append((together[0].part, _shorter(KernelGradient(*sides))))
            else:
                found.append((whole, _formed_together(together, gradients, whole)))
    return found


def whole_part(name: str, value: torch.Tensor) -> ParameterPart:
    """All of a parameter."""
    return ParameterPart(name, value.shape, torch.empty(value.shape, device="meta").stride(), 0)


def _overlapping(uses: list[RecordedUse], count: int) -> list[list[RecordedUse]]:
    """RecordedUses of one parameter in groups: those of different groups have no number in common."""
    if len(uses) == 1:
        return [uses]
    groups: list[tuple[torch.Tensor, list[RecordedUse]]] = []
    for use in uses:
        own = torch.zeros(count, dtype=torch.bool)
        use.part.of(own).fill_(True)
        members = [use]
        apart = []
        for seen, others in groups:
            if (seen & own).any():
                own, members = seen | own, [*others, *members]
            else:
                apart.append((seen, others))
        groups = [*apart, (own, members)]
    return [members for _, members in groups]


def _formed_together(uses: list[RecordedUse], gradients: list[Gradient], whole: ParameterPart) -> FormedGradient:
    """The gradients of a parameter that is used in several ways, each use added where it belongs."""
    count = math.prod(whole.shape)
    total = None
    for use, gradient in zip(uses, gradients, strict=True):
        values = gradient.values if isinstance(gradient, FormedGradient) else gradient.form().values
        if total is None:
            total = values.new_zeros(len(values), count)
        use.part.of(total).add_(values.reshape(len(values), *use.part.shape))
    if total is None:
        raise ValueError("expected at least one use")
    return FormedGradient(total)


def _shorter(gradient: Gradient) -> Gradient:
    """The gradient, formed where that is less work than products."""
    return gradient.form() if isinstance(gradient, KernelGradient) and not gradient.is_shorter else gradient


def _is_shorter(positions: int, rows: int, columns: int) -> bool:
    """Whether products of all pairs are less work than a gradient that is formed."""
    return positions == 1 or positions**2 * (rows + columns) < _FORM * rows * columns


def _gradient(use: RecordedUse, backward: Backward) -> Gradient:
    """What one use adds to the gradient of its part."""
    slope = backward.slopes[use.probe]
    if use.left is None:
        return FormedGradient(_add_up_to(slope * use.settings[0] if use.settings[0] != 1 else slope, use.part.shape))
    left = backward.lefts[use.left]
    match use.kind:
        case "product":
            return KernelGradient(left.flatten(1, -2), slope.flatten(1, -2))
        case "convolution":
            return _of_convolution(left, slope, use)
        case "rows":
            return _of_rows(left, slope, use)
    return FormedGradient(_add_up_to(left * slope, use.part.shape))


def _add_up_to(values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Each client's values (clients, ...), added up along the axes that a part of this shape was broadcast to."""
    extra = values.ndim - 1 - len(shape)
    axes = [*range(1, 1 + extra), *(1 + extra + i for i, size in enumerate(shape) if size == 1)]
    axes = [axis for axis in axes if axis <= extra or values.shape[axis] != 1]
    return (values.sum(dim=axes) if axes else values).reshape(len(values), *shape)


def _of_convolution(x: torch.Tensor, slope: torch.Tensor, use: RecordedUse) -> Gradient:
    """The gradient of the kernel of a convolution: products of patches of x and slopes, at all places of all records.

    Arguments:
        x: (clients, records, channels, ...); `slope` in the same way.
    """
    kernel, (stride, padding, dilation, groups) = use.part.shape, use.settings
    dims = len(kernel) - 2
    clients, records = x.shape[:2]
    edges = _edges(kernel[2:], padding, dilation)
    if any(edges):
        x = F.pad(x.flatten(0, 1), edges).unflatten(0, (clients, records))
    positions = records * math.prod(slope.shape[3:])
    if not _is_shorter(positions, kernel[0], math.prod(kernel[1:])) and kernel[1] >= _CHANNELS:
        x, slope = (side.transpose(0, 1).flatten(1, 2) for side in (x, slope))  # clients are groups, records a batch
        shape = (clients * kernel[0], *kernel[1:])
        return FormedGradient(
            _of_kernel(dims, x, slope, shape, stride, dilation, clients * groups).view(clients, *kernel)
        )
    axes = range(4, 4 + dims)
    patches = _patches(x.flatten(0, 1), kernel[2:], stride, dilation)
    patches = patches.unflatten(1, (groups, -1)).unflatten(0, (clients, records))
    left = patches.permute(0, 2, 3, *(axis + dims for axis in axes), 1, *axes)
    left = left.reshape(clients, groups, math.prod(kernel[1:]), -1)
    right = slope.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, *axes)
    right = right.reshape(clients, groups, kernel[0] // groups, -1)
    if groups == 1:
        return _shorter(KernelGradient(left[:, 0].mT, right[:, 0].mT))
    return FormedGradient((right @ left.mT).reshape(clients, *kernel))


def _of_kernel(
    dims: int, x: torch.Tensor, slope: torch.Tensor, shape: Sequence[int], stride: Any, dilation: Any, groups: int
) -> torch.Tensor:
    """PyTorch's own gradient of a kernel of this shape, for one batch."""
    function = {1: nn_grad.conv1d_weight, 2: nn_grad.conv2d_weight, 3: nn_grad.conv3d_weight}[dims]
    return function(x, shape, slope, stride=stride, dilation=dilation, groups=groups)


def _edges(window: Sequence[int], padding: Any, dilation: Any) -> list[int]:
    """How much a convolution pads each side, as `F.pad` takes it: the last axis first."""
    dims = len(window)
    if padding == "same":
        dilations = [dilation] * dims if isinstance(dilation, int) else dilation
        spans = [step * (size - 1) for step, size in zip(dilations, window, strict=True)]
        sides = [(span // 2, span - span // 2) for span in spans]
    else:
        sizes = 0 if padding == "valid" else padding
        sides = [(size, size) for size in ([sizes] * dims if isinstance(sizes, int) else sizes)]
    return list(itertools.chain(*reversed(sides)))


def _patches(x: torch.Tensor, window: Sequence[int], stride: Any, dilation: Any) -> torch.Tensor:
    """What a convolution multiplies its kernel by: (records, channels, *places, *window), a view."""
    dims = len(window)
    strides, dilations = ([value] * dims if isinstance(value, int) else value for value in (stride, dilation))
    for axis in range(dims):
        span = dilations[axis] * (window[axis] - 1) + 1
        x = x.unfold(2 + axis, span, strides[axis])[..., :: dilations[axis]]
    return x


def _of_rows(places: torch.Tensor, slope: torch.Tensor, use: RecordedUse) -> TableGradient:
    """The gradient of a table: for each client and each row that it looks up, the sum of the slopes."""
    rows, columns = use.part.shape
    clients = len(places)
    owners = torch.arange(clients, device=places.device).repeat_interleave(places[0].numel())
    places, slope = places.reshape(-1), slope.reshape(-1, columns)
    if use.settings[0] >= 0:
        kept = places != use.settings[0]
        owners, places, slope = owners[kept], places[kept], slope[kept]
    used, number = torch.unique(owners * rows + places, return_inverse=True)
    values = slope.new_zeros(len(used), columns).index_add_(0, number, slope)
    return TableGradient(values, used // rows, used % rows, clients, use.part.shape)


def add_clipped(
    totals: dict[str, torch.Tensor],
    gradients: Sequence[tuple[ParameterPart, Gradient]],
    clip_norm: float,
    own: torch.Tensor,
) -> None:
    """Add every client's gradient, scaled down to `clip_norm` where it is longer, to `totals`.

    Arguments:
        totals: flat parameters by name.
        gradients: as `client_gradients` returns them.
        own: which part of its positions is a client's own, (clients,), 0 for who does not count.

    Guarantees:
        No client adds a vector longer than the clip norm (see the module); one whose gradient, or its squared norm in
        float32, is not finite adds zero.
    """
    square = torch.stack([gradient.squares() for _, gradient in gradients]).sum(dim=0)
    finite = (square <= _LARGEST_SQUARE) & (own > 0)
    norm, longest = square.sqrt(), torch.zeros_like(square)
    products = [gradient for _, gradient in gradients if isinstance(gradient, KernelGradient)]
    for product in products:
        sums = product.sums_of_norms()
        longest += sums.square()
        if product.positions > 1:
            norm = norm + (2 * product.positions * own + 6) * _UNIT * sums
    cancels = finite & ~(longest.sqrt() <= _CANCELLED * norm)
    factors = torch.where(finite & ~cancels, _clip_factors(norm, clip_norm), 0.0).to(torch.float32)
    for part, gradient in gradients:
        part.of(totals[part.name]).add_(gradient.scaled_sum(factors).reshape(part.shape))
    if products and bool(cancels.any()):
        formed = [(part, _form_some(gradient, cancels)) for part, gradient in gradients]
        add_clipped(totals, formed, clip_norm, own[cancels])


def _form_some(gradient: Gradient, clients: torch.Tensor) -> FormedGradient:
    """The gradients of some clients as they are."""
    if isinstance(gradient, KernelGradient):
        return gradient.form(clients)
    values = gradient.form().values if isinstance(gradient, TableGradient) else gradient.values
    return FormedGradient(values[clients])


def _clip_factors(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """The factor of a vector of this norm, float64: what leaves it no longer than `clip_norm` once all is rounded."""
    largest = norm * _OUTWARD
    return torch.where(largest > clip_norm, clip_norm / largest, 1.0)


def _row_norms(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)


def _unless_zero(factors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values (clients, ...), or zeros where a client's factor is 0: what is not finite may not meet the others."""
    kept = factors > 0
    if bool(kept.all()):
        return values
    return torch.where(kept.reshape(-1, *[1] * (values.ndim - 1)), values, 0.0)
