"""Models by name, sized by the data: logistic, mlp, cnn and transformer, on records or on features of them.

Clients train side by side under `jax.vmap`, each with weights of its own and with small batches. There a convolution
by `lax.conv` becomes a grouped convolution, which is slow everywhere, so the CNN gathers its patches and multiplies
matrices instead (im2col). In a batch the record is the last axis between convolutions: what is copied into patches
then lies together in memory, and so does what the backward pass adds up. For one record it is the channel.

The transformer is a small one for images: patches are tokens that attend to each other (Dosovitskiy et al. 2021). It
normalises before attention and before the dense layers, over the numbers of a token, so that records of a batch never
meet. There is no dropout, and the mean over tokens is what is classified.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dovetail import _validate
from dovetail import features as fixed
from dovetail.data._base import Dataset, Model
from dovetail.features import CONSTANT, Features

__all__ = [
    "MODELS",
    "Layers",
    "build",
    "cnn",
    "linear",
    "mlp",
    "model_for",
    "transformer",
]

Layers = list[dict[str, jax.Array]]  # one {"kernel", "bias"} a layer

MODELS = ("cnn", "logistic", "mlp", "scatter", "transformer")

_NONE = Features()


def build(name: str, dataset: Dataset, *, features: Features = _NONE) -> tuple[Dataset, Model]:
    """The named model for this dataset, and the dataset as the model reads it: as features.

    Arguments:
        name: one of `MODELS`.
        features: what the model reads in place of records.

    "scatter" is short for "logistic" on the features "scatter".
    """
    _validate.known_name("model", name, MODELS)
    if name == "scatter" and features.kind not in ("none", "scatter"):
        raise ValueError(f"model = 'scatter' has features of its own: with features={features.kind!r} use 'logistic'")
    if name == "scatter" and features.kind == "none":
        features = Features(kind="scatter")
    dataset = fixed.apply(dataset, features)
    return dataset, model_for(name, dataset, features=features)


def model_for(name: str, dataset: Dataset, *, features: Features = _NONE) -> Model:
    """The named model for a dataset whose inputs are these features already."""
    _validate.known_name("model", name, MODELS)
    if name in ("logistic", "scatter"):
        return linear(name, dataset, constant=1.0 if features.kind == "none" else CONSTANT)
    return {"cnn": cnn, "mlp": mlp, "transformer": transformer}[name](dataset)


def linear(name: str, dataset: Dataset, *, constant: float) -> Model:
    """Multinomial logistic regression from zero; the parameters are one array (features + 1, classes), the bias last.

    Arguments:
        constant: the value of the feature that the bias is multiplied by.
    """
    shape = (_num_features(dataset) + 1, dataset.num_classes)

    def init(key: jax.Array) -> jax.Array:
        del key  # zero: by convexity there is nothing to draw
        return jnp.zeros(shape, jnp.float32)

    def apply(params: jax.Array, inputs: jax.Array) -> jax.Array:
        return inputs.reshape(len(inputs), -1) @ params[:-1] + constant * params[-1]

    return Model(name=name, init=init, apply=apply, constant=constant)


def mlp(dataset: Dataset, *, hidden: tuple[int, ...] = (200, 200)) -> Model:
    """Dense layers with ReLU between them, `hidden` units each; He initialisation."""
    sizes = (_num_features(dataset), *hidden, dataset.num_classes)

    def apply(params: Layers, inputs: jax.Array) -> jax.Array:
        return _apply_dense(params, inputs.reshape(len(inputs), -1))

    return Model(name="mlp", init=_he_init(list(itertools.pairwise(sizes))), apply=apply)


def cnn(dataset: Dataset) -> Model:
    """Two convolutions, 16 and 32 channels, each followed by ReLU and 2 x 2 max-pooling, then two dense layers.

    Images of 16 x 16 and more: 5 x 5 kernels, 192 hidden units (113,674 parameters for 28 x 28 and ten classes).
    Smaller images, down to 6 x 6: 3 x 3 kernels, no pooling after the first convolution, 64 hidden units.
    """
    shape = dataset.test_inputs.shape[1:]
    if len(shape) not in (2, 3) or min(shape[:2]) < 6:
        raise ValueError(
            f"expected images (height, width[, channels]) of at least 6 x 6 for cnn, got records of {shape}"
        )
    height, width, channels = (*shape, 1)[:3]
    kernel, pools, hidden = (5, (2, 2), 192) if min(height, width) >= 16 else (3, (1, 2), 64)
    fans = [(kernel**2 * channels, 16), (kernel**2 * 16, 32)]  # inputs and outputs of each layer's matrix
    rows, columns = height, width
    for pool in pools:
        rows, columns = (rows - kernel + 1) // pool, (columns - kernel + 1) // pool
    fans += [(rows * columns * 32, hidden), (hidden, dataset.num_classes)]

    def apply(params: Layers, inputs: jax.Array) -> jax.Array:
        x = inputs.reshape(len(inputs), height, width, channels)
        single = len(inputs) == 1
        x = x if single else x.transpose(3, 1, 2, 0)
        for layer, pool in zip(params, pools, strict=False):
            x = _convolve_one(layer, x, kernel, pool) if single else _convolve(layer, x, kernel, pool)
            x = jax.nn.relu(x)  # the same as ReLU before pooling, on fewer values
        x = x if single else x.transpose(3, 1, 2, 0)
        return _apply_dense(params[len(pools) :], x.reshape(len(x), -1))

    return Model(name="cnn", init=_he_init(fans), apply=apply)


def _num_features(dataset: Dataset) -> int:
    """How many numbers a record has."""
    return math.prod(dataset.inputs.shape[1:])


def _he_init(fans: list[tuple[int, int]]) -> Callable[[jax.Array], Layers]:
    """The function from a key to first layers of these shapes, (inputs, outputs) each.

    Kernels are normal with variance 2 / inputs, biases zero (He et al. 2015).
    """

    def init(key: jax.Array) -> Layers:
        keys = jax.random.split(key, len(fans))
        return [
            {"kernel": math.sqrt(2 / fan[0]) * jax.random.normal(k, fan, jnp.float32), "bias": jnp.zeros(fan[1])}
            for k, fan in zip(keys, fans, strict=True)
        ]

    return init


def _apply_dense(layers: Layers, x: jax.Array) -> jax.Array:
    """Dense layers with ReLU between them."""
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ layers[-1]["kernel"] + layers[-1]["bias"]


def _convolve_one(layer: dict[str, jax.Array], x: jax.Array, size: int, pool: int) -> jax.Array:
    """`_convolve` of axes (record, row, column, channel), as `patches @ kernel + bias`.

    That is the form in which `engine.examples` adds up clipped gradients without forming each.
    """
    batch, height, width, _ = x.shape
    rows, columns = height - size + 1, width - size + 1
    shifts = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    patches = jnp.stack(shifts, axis=3).reshape(batch * rows * columns, -1)
    products = (patches @ layer["kernel"] + layer["bias"]).reshape(batch, rows, columns, -1)
    rows, columns = rows // pool, columns // pool
    blocks = products[:, : rows * pool, : columns * pool].reshape(batch, rows, pool, columns, pool, -1)
    return blocks.max(axis=(2, 4))


def _convolve(layer: dict[str, jax.Array], x: jax.Array, size: int, pool: int) -> jax.Array:
    """A valid convolution and the maximum over pool x pool blocks of it; what does not fill a block is dropped.

    Axes are (channel, row, column, record). The kernel is square, `size` pixels a side; its rows run over (row, column,
    channel) of the patch, its columns over output channels.
    """
    _, height, width, batch = x.shape
    rows, columns = (height - size + 1) // pool, (width - size + 1) // pool
    products = layer["kernel"].T @ _patches(x, size, pool, rows, columns)
    largest = products.reshape(-1, pool, rows, pool, columns * batch).max(axis=(1, 3))
    biased = largest + layer["bias"][:, None, None]  # the same as the bias first, on fewer values
    return biased.reshape(-1, rows, columns, batch)


def _patches(x: jax.Array, size: int, pool: int, rows: int, columns: int) -> jax.Array:
    """All patches as a matrix, with (row, column, channel) of the patch down its rows.

    Its columns run over (row in a block, row of blocks, column in a block, column of blocks, record), with `rows` x
    `columns` blocks of `pool` x `pool` patches.

    Columns are shifted before rows, in two copies rather than one of size^2 shifts, which compiles to slower code.
    """
    channels = len(x)

    def blocks(shifted: jax.Array, axis: int, count: int) -> jax.Array:
        cut = shifted.reshape(*shifted.shape[:axis], count, pool, *shifted.shape[axis + 1 :])
        return cut.swapaxes(axis, axis + 1)

    across = jnp.stack([blocks(x[:, :, j : j + columns * pool], 2, columns) for j in range(size)])
    across = jax.lax.optimization_barrier(across)
    down = jnp.stack([blocks(across[:, :, i : i + rows * pool], 2, rows) for i in range(size)])
    return jax.lax.optimization_barrier(down.reshape(size**2 * channels, -1))


_LEAST_TOKENS = 16


def transformer(dataset: Dataset, *, width: int = 64, depth: int = 2, heads: int = 4) -> Model:
    """`depth` blocks of attention and dense layers on tokens of `width` numbers; 71,946 parameters for 28 x 28.

    A token is a square patch, the largest that cuts images evenly into 16 tokens or more.
    """
    shape = dataset.test_inputs.shape[1:]
    if len(shape) not in (2, 3) or shape[0] * shape[1] < _LEAST_TOKENS:
        raise ValueError(
            f"expected images (height, width[, channels]) of at least {_LEAST_TOKENS} pixels for transformer, "
            f"got records of {shape}"
        )
    height, breadth, channels = (*shape, 1)[:3]
    side = _patch_side(height, breadth)
    rows = height // side
    columns = breadth // side
    size = side * side * channels

    def init(key: jax.Array) -> dict[str, Any]:
        embed, place, *blocks = jax.random.split(key, 2 + depth)
        return {
            "embed": _init_linear(embed, size, width),
            "place": 0.02 * jax.random.normal(place, (rows * columns, width)),
            "blocks": [_init_block(key, width) for key in blocks],
            "norm": _init_norm(width),
            "classes": {"kernel": jnp.zeros((width, dataset.num_classes)), "bias": jnp.zeros(dataset.num_classes)},
        }

    def apply(params: dict[str, Any], inputs: jax.Array) -> jax.Array:
        cut = inputs.reshape(len(inputs), rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
        x = _apply_linear(params["embed"], cut.reshape(len(inputs), rows * columns, size)) + params["place"]
        for block in params["blocks"]:
            x = x + _apply_linear(
                block["mix"], _attention(_apply_linear(block["attend"], _normalize(block["first"], x)), heads)
            )
            x = x + _apply_linear(
                block["down"], jax.nn.gelu(_apply_linear(block["up"], _normalize(block["second"], x)))
            )
        return _apply_linear(params["classes"], _normalize(params["norm"], x).mean(axis=1))

    return Model(name="transformer", init=init, apply=apply)


def _patch_side(height: int, breadth: int) -> int:
    """The side of the largest square patch that cuts images evenly into enough tokens."""
    common = math.gcd(height, breadth)
    fitting = [s for s in range(1, common + 1) if common % s == 0 and height * breadth // s**2 >= _LEAST_TOKENS]
    return max(fitting)


def _attention(queries_keys_values: jax.Array, heads: int) -> jax.Array:
    """Attention of tokens to each other, (records, tokens, width), from (records, tokens, 3 width).

    The last axis holds queries, keys and values, each cut into `heads` parts.
    """
    records, tokens, thrice = queries_keys_values.shape
    parts = queries_keys_values.reshape(records, tokens, 3, heads, thrice // 3 // heads)
    query, key, value = (parts[:, :, i] for i in range(3))
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value).reshape(records, tokens, -1)


def _init_block(key: jax.Array, width: int) -> dict[str, Any]:
    """The first parameters of a block of attention and dense layers."""
    attend, mix, up, down = jax.random.split(key, 4)
    return {
        "first": _init_norm(width),
        "attend": _init_linear(attend, width, 3 * width),
        "mix": _init_linear(mix, width, width),
        "second": _init_norm(width),
        "up": _init_linear(up, width, 2 * width),
        "down": _init_linear(down, 2 * width, width),
    }


def _init_linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    """A dense layer's first parameters: normal kernel of variance 1 / inputs, zero bias."""
    return {"kernel": jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs), "bias": jnp.zeros(outputs)}


def _init_norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def _apply_linear(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _normalize(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Layer normalisation over the last axis, then the layer's own scale and shift."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * layer["scale"] + layer["shift"]
