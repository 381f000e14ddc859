"""The models of `dovetail bench own` in PyTorch, as people write them: the same modules for every engine."""

import own_workload
import torch
import workload
from torch import nn


class Block(nn.Module):
    """A residual block of two convolutions with GroupNorm."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(8, out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.renorm = nn.GroupNorm(8, out)
        self.short = nn.Conv2d(channels, out, 1, stride, bias=False) if channels != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.renorm(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    """A ResNet with GroupNorm and three blocks of 16, 32 and 64 channels."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(8, 16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(torch.relu(self.norm(self.stem(x))))
        return self.head(x.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """The next token after a sequence, by an LSTM."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.between = nn.Linear(64, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.lstm(self.embedding(tokens.long()))
        return self.head(torch.relu(self.between(outputs[:, -1])))


class Transformer(nn.Module):
    """The next token after a sequence, by two layers of attention."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 64)
        self.position = nn.Parameter(torch.zeros(own_workload.SEQUENCE, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens.long()) + self.position).mean(dim=1))


def network(name: str) -> nn.Module:
    """The module of a workload, from a fixed seed or its `layers`, checked for its number of parameters."""
    chosen = own_workload.WORKLOADS[name]
    torch.manual_seed(workload.SEED)
    made = _make(name, chosen)
    if name in own_workload.LAYERS:
        first = [array for layer in own_workload.layers(name) for array in layer]
        for parameter, array in zip(made.parameters(), first, strict=True):
            parameter.data.copy_(torch.from_numpy(array))
    count = sum(parameter.numel() for parameter in made.parameters())
    if count != chosen.parameters:
        raise RuntimeError(f"the {name} model has {count} parameters, not {chosen.parameters}")
    return made


def _make(name: str, chosen: own_workload.Workload) -> nn.Module:
    match name:
        case "record-mlp":
            return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, chosen.classes))
        case "record-cnn" | "cnn":
            return nn.Sequential(
                *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Flatten(), nn.Linear(512, 192), nn.ReLU(), nn.Linear(192, chosen.classes)),
            )
        case "resnet":
            return ResNet(chosen.classes)
        case "lstm":
            return Recurrent(chosen.vocabulary, chosen.classes)
        case "transformer":
            return Transformer(chosen.vocabulary, chosen.classes)
        case "tabular":
            return nn.Sequential(nn.Linear(75, 100), nn.ReLU(), nn.Linear(100, chosen.classes))
    return nn.Sequential(nn.Linear(784, chosen.classes))
