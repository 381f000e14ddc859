"""Every layer of `torch.nn` in a module of one layer: does one user's record change what another user uploads?

`python docs/_ext/torch_layers.py` writes the table of docs/concepts/torch-layers.md; a test runs every layer again.
Needs PyTorch.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

from dovetail.learners import torch as ours
from dovetail.learners.client import ClientUpdate

PAGE = Path(__file__).parents[1] / "concepts" / "torch-layers.md"
NUMBERS, CLASSES = 64, 3
LOSSES = "loss: a function of outputs and labels, not a layer"
CONTAINER = "container: holds other layers, or parameters"
BASE = "base class: computes nothing"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, the shape that a record of 64 numbers gets before it, and how the layer is called."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (NUMBERS,)
    call: Callable[[nn.Module, Any], Any] = lambda layer, x: layer(x)


class OneLayer(nn.Module):
    """A dense layer before, the layer itself, and a dense layer behind it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer = nn.Linear(NUMBERS, NUMBERS), case.build()
        self._case, self.last = case.call, nn.Identity()
        self._shape = case.shape
        if not any(getattr(part, "has_uninitialized_params", bool)() for part in self.layer.modules()):
            was = self.layer.training
            with torch.no_grad():
                width = self.eval()(torch.rand(2, NUMBERS)).shape[1]
            self.layer.train(was)
            self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs, one row a record."""
        x = self.first(x)
        return self.last(self._case(self.layer, x.reshape(x.shape[0], *self._shape)).reshape(x.shape[0], -1))


def _tokens(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer((x * 4).long().clamp(0, 9))


def _attention(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, x, x)[0]


def _recurrent(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)[0]


def _pair(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x, x * x + 1)


def _unpool(pool: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    def call(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        pooled = pool(x, 2, return_indices=True)
        return layer(pooled[0], pooled[1])

    return call


LINE, IMAGE, BLOCK, SERIES = (4, 16), (4, 4, 4), (1, 4, 4, 4), (8, 8)
F = nn.functional


def _no_dropout(build: Callable[..., nn.Module], *given: Any, **named: Any) -> Callable[[], nn.Module]:
    return lambda: build(*given, **named, dropout=0.0, batch_first=True)


CASES: dict[str, Case] = {
    **{
        kind.__name__: Case(kind)
        for kind in (
            *(nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity),
            *(nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.RReLU, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU),
            *(nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink),
            *(nn.Dropout, nn.AlphaDropout, nn.Flatten),
        )
    },
    "FeatureAlphaDropout": Case(nn.FeatureAlphaDropout, IMAGE),
    "GLU": Case(nn.GLU),
    "Threshold": Case(lambda: nn.Threshold(0.1, 0.0)),
    **{name: Case(lambda name=name: getattr(nn, name)(dim=1)) for name in ("Softmax", "Softmin", "LogSoftmax")},
    "Softmax2d": Case(nn.Softmax2d, IMAGE),
    "Linear": Case(lambda: nn.Linear(NUMBERS, 5)),
    "Bilinear": Case(lambda: nn.Bilinear(NUMBERS, NUMBERS, 5), call=_pair),
    "Embedding": Case(lambda: nn.Embedding(10, 4), call=_tokens),
    "EmbeddingBag": Case(lambda: nn.EmbeddingBag(10, 4), call=_tokens),
    "CosineSimilarity": Case(nn.CosineSimilarity, SERIES, _pair),
    "PairwiseDistance": Case(nn.PairwiseDistance, SERIES, _pair),
    "Unflatten": Case(lambda: nn.Unflatten(1, (8, 8))),
    "Fold": Case(lambda: nn.Fold((4, 4), 2, stride=2), (16, 4)),
    "Unfold": Case(lambda: nn.Unfold(2), IMAGE),
    "ChannelShuffle": Case(lambda: nn.ChannelShuffle(2), IMAGE),
    "PixelShuffle": Case(lambda: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": Case(lambda: nn.PixelUnshuffle(2), IMAGE),
    "Upsample": Case(lambda: nn.Upsample(scale_factor=2), IMAGE),
    "UpsamplingBilinear2d": Case(lambda: nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    "UpsamplingNearest2d": Case(lambda: nn.UpsamplingNearest2d(scale_factor=2), IMAGE),
    "LayerNorm": Case(lambda: nn.LayerNorm(NUMBERS)),
    "RMSNorm": Case(lambda: nn.RMSNorm(NUMBERS)),
    "GroupNorm": Case(lambda: nn.GroupNorm(2, 4), IMAGE),
    "LocalResponseNorm": Case(lambda: nn.LocalResponseNorm(2), IMAGE),
    "CrossMapLRN2d": Case(lambda: nn.CrossMapLRN2d(2), IMAGE),
    "SyncBatchNorm": Case(lambda: nn.SyncBatchNorm(4), IMAGE),
    "FractionalMaxPool2d": Case(lambda: nn.FractionalMaxPool2d(2, output_size=2), IMAGE),
    "FractionalMaxPool3d": Case(lambda: nn.FractionalMaxPool3d(2, output_size=2), BLOCK),
    "MaxUnpool1d": Case(lambda: nn.MaxUnpool1d(2), LINE, _unpool(F.max_pool1d)),
    "MaxUnpool2d": Case(lambda: nn.MaxUnpool2d(2), IMAGE, _unpool(F.max_pool2d)),
    "MaxUnpool3d": Case(lambda: nn.MaxUnpool3d(2), BLOCK, _unpool(F.max_pool3d)),
    **{
        name: Case(lambda name=name: getattr(nn, name)(8, 6, batch_first=True), SERIES, _recurrent)
        for name in ("RNN", "GRU", "LSTM")
    },
    "RNNCell": Case(lambda: nn.RNNCell(NUMBERS, 6)),
    "GRUCell": Case(lambda: nn.GRUCell(NUMBERS, 6)),
    "LSTMCell": Case(lambda: nn.LSTMCell(NUMBERS, 6), call=_recurrent),
    "MultiheadAttention": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), SERIES, _attention),
    "TransformerEncoderLayer": Case(_no_dropout(nn.TransformerEncoderLayer, 8, 2, 16), SERIES),
    "TransformerDecoderLayer": Case(_no_dropout(nn.TransformerDecoderLayer, 8, 2, 16), SERIES, _pair),
    "TransformerEncoder": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ),
        SERIES,
    ),
    "TransformerDecoder": Case(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2),
        SERIES,
        _pair,
    ),
    "Transformer": Case(_no_dropout(nn.Transformer, 8, 2, 1, 1, 16), SERIES, _pair),
}
for _axes, _shape in ((1, LINE), (2, IMAGE), (3, BLOCK)):
    _channels = _shape[0]
    CASES |= {
        **{
            f"{name}{_axes}d": Case(lambda name=f"{name}{_axes}d": getattr(nn, name)(2), _shape)
            for name in ("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "MaxPool")
        },
        **{
            f"{name}{_axes}d": Case(lambda name=f"{name}{_axes}d": getattr(nn, name)(1), _shape)
            for name in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad")
        },
        f"ConstantPad{_axes}d": Case(lambda n=_axes: getattr(nn, f"ConstantPad{n}d")(1, 0.5), _shape),
        f"LPPool{_axes}d": Case(lambda n=_axes: getattr(nn, f"LPPool{n}d")(2, 2), _shape),
        f"Dropout{_axes}d": Case(lambda n=_axes: getattr(nn, f"Dropout{n}d")(), _shape),
        **{
            f"{name}{_axes}d": Case(lambda name=f"{name}{_axes}d", c=_channels: getattr(nn, name)(c), _shape)
            for name in ("BatchNorm", "InstanceNorm")
        },
        **{
            f"{name}{_axes}d": Case(lambda name=f"{name}{_axes}d", c=_channels: getattr(nn, name)(c, 2, 3), _shape)
            for name in ("Conv", "ConvTranspose")
        },
        **{
            f"Lazy{name}{_axes}d": Case(lambda name=f"Lazy{name}{_axes}d": getattr(nn, name)(), _shape)
            for name in ("BatchNorm", "InstanceNorm")
        },
        **{
            f"Lazy{name}{_axes}d": Case(lambda name=f"Lazy{name}{_axes}d": getattr(nn, name)(2, 3), _shape)
            for name in ("Conv", "ConvTranspose")
        },
    }
CASES["LazyLinear"] = Case(lambda: nn.LazyLinear(5))

MISUSED: dict[str, Case] = {
    "BatchNorm1d, eval": Case(lambda: nn.BatchNorm1d(NUMBERS).eval()),
    "BatchNorm1d(track_running_stats=False)": Case(lambda: nn.BatchNorm1d(NUMBERS, track_running_stats=False)),
    "InstanceNorm2d(track_running_stats=True)": Case(lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "Softmax(dim=0)": Case(lambda: nn.Softmax(dim=0)),
    "LSTM, batch_first=False": Case(lambda: nn.LSTM(8, 6), SERIES, _recurrent),
    "LSTM(num_layers=2, dropout=0.5)": Case(
        lambda: nn.LSTM(8, 6, num_layers=2, dropout=0.5, batch_first=True), SERIES, _recurrent
    ),
    "MultiheadAttention, batch_first=False": Case(lambda: nn.MultiheadAttention(8, 2), SERIES, _attention),
    "MultiheadAttention(dropout=0.1)": Case(
        lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), SERIES, _attention
    ),
    "TransformerEncoderLayer, dropout=0.1": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), SERIES
    ),
    "Linear with weight_norm": Case(lambda: parametrizations.weight_norm(nn.Linear(NUMBERS, 5))),
    "Linear with orthogonal": Case(lambda: parametrizations.orthogonal(nn.Linear(NUMBERS, 5))),
    "Linear with spectral_norm": Case(lambda: parametrizations.spectral_norm(nn.Linear(NUMBERS, 5))),
    "Linear with spectral_norm, eval": Case(lambda: parametrizations.spectral_norm(nn.Linear(NUMBERS, 5)).eval()),
}

_CONTAINERS = ("Container", "DataParallel", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential")
OTHERS = {**dict.fromkeys(_CONTAINERS, CONTAINER), **dict.fromkeys(("Module", "RNNBase", "RNNCellBase"), BASE)}


def layers() -> list[str]:
    """Every class of `torch.nn` that is a module."""
    return sorted(name for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, nn.Module))


def kind_of(name: str) -> str | None:
    """What a class is that is no layer."""
    return LOSSES if "Loss" in name else OTHERS.get(name)


class LeakError(Exception):
    """One user's records changed what another uploads."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happens to a layer where users are protected, and where single records are."""

    users: str
    records: str


def outcome(case: Case) -> Outcome:
    """Train three users, then the same with another record of the first or last; no other update may change."""
    return Outcome(*(_outcome(case, records=records) for records in (False, True)))


def _outcome(case: Case, *, records: bool) -> str:
    rng = np.random.default_rng(0)
    inputs, labels = rng.random((4, NUMBERS)).astype(np.float32), np.array([0, 1, 2, 1])
    said = []
    for vectorized in (False,) if records else (False, True):
        try:
            module = OneLayer(case)
            learner = ours.model(module, vectorized=vectorized).learner
            learner, declared = learner.inspect("cross_entropy", inputs, labels, records=records)
            if not records:
                check(learner, np.random.default_rng(1))
        except ValueError as refusal:
            return f"refused: {_short(str(refusal))}"
        except (RuntimeError, NotImplementedError) as error:
            if vectorized:
                break  # torch.func.vmap cannot run it, and says so
            return f"refused by PyTorch: {str(error).splitlines()[0][:90]}"
        said.append("as declared" if declared else "isolated")
    return said[0]


def check(learner: Any, rng: np.random.Generator) -> None:
    """One user's records leave all other users' updates as they are, bit by bit."""
    start = np.concatenate([value.detach().numpy().ravel() for _, value in learner.trained_parameters])
    x, y = rng.random((3, 3, NUMBERS)).astype(np.float32), rng.integers(0, CLASSES, (3, 3))
    counts = np.array([3, 2, 3], np.int32)
    for settings in (ClientUpdate(), ClientUpdate(update="fedavg", batch=2, learning_rate=0.5)):
        before = learner.updates(settings, "cross_entropy", start, x, y, counts)
        for user in (0, 2):
            other = x.copy()
            other[user] = 10 * rng.random((3, NUMBERS))
            after = learner.updates(settings, "cross_entropy", start, other, y, counts)
            changed = [row for row in range(3) if before[row].tobytes() != after[row].tobytes()]
            if changed and changed != [user]:
                raise LeakError(f"expected user {user}'s records to change its own update alone, got {changed}")


def _short(refusal: str) -> str:
    """What a refusal says of the layer."""
    return refusal.partition(", got ")[2].partition(": ")[0].replace(" 'layer'", "")


def table() -> str:
    """All layers, as the page has them."""
    rows = ["| layer | users are protected | single records are protected |", "|---|---|---|"]
    rows += [f"| `{name}` | {kind_of(name)} | |" for name in layers() if kind_of(name) is not None]
    body = [(name, CASES[name]) for name in layers() if kind_of(name) is None] + list(MISUSED.items())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in body:
            found = outcome(case)
            rows.append(f"| `{name}` | {found.users} | {found.records} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text()
    head, _, _ = text.partition("| layer |")
    PAGE.write_text(head + table())
    sys.stdout.write(f"wrote {PAGE}\n")
