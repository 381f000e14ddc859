"""A small transformer for images: patches are tokens that attend to each other (Dosovitskiy et al. 2021).

Normalisation comes before attention and before the dense layers, over the numbers of a token, so that records of a
batch never meet. There is no dropout, and the mean over tokens is what is classified.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from dovetail.data._base import Dataset, Model

__all__ = ["transformer"]

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
    rows, columns, size = height // side, breadth // side, side * side * channels

    def init(key: jax.Array) -> dict[str, Any]:
        embed, place, *blocks = jax.random.split(key, 2 + depth)
        return {
            "embed": _dense(embed, size, width),
            "place": 0.02 * jax.random.normal(place, (rows * columns, width)),
            "blocks": [_block(key, width) for key in blocks],
            "norm": _norm(width),
            "classes": {"kernel": jnp.zeros((width, dataset.num_classes)), "bias": jnp.zeros(dataset.num_classes)},
        }

    def apply(params: dict[str, Any], inputs: jax.Array) -> jax.Array:
        cut = inputs.reshape(len(inputs), rows, side, columns, side, channels).transpose(0, 1, 3, 2, 4, 5)
        x = _linear(params["embed"], cut.reshape(len(inputs), rows * columns, size)) + params["place"]
        for block in params["blocks"]:
            x = x + _linear(block["mix"], _attended(_linear(block["attend"], _normed(block["first"], x)), heads))
            x = x + _linear(block["down"], jax.nn.gelu(_linear(block["up"], _normed(block["second"], x))))
        return _linear(params["classes"], _normed(params["norm"], x).mean(axis=1))

    return Model(name="transformer", init=init, apply=apply)


def _patch_side(height: int, breadth: int) -> int:
    common = math.gcd(height, breadth)
    fitting = [s for s in range(1, common + 1) if common % s == 0 and height * breadth // s**2 >= _LEAST_TOKENS]
    return max(fitting)


def _attended(queries_keys_values: jax.Array, heads: int) -> jax.Array:
    """What tokens of (records, tokens, 3 width) attend to, (records, tokens, width)."""
    records, tokens, thrice = queries_keys_values.shape
    parts = queries_keys_values.reshape(records, tokens, 3, heads, thrice // 3 // heads)
    query, key, value = (parts[:, :, i] for i in range(3))
    scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value).reshape(records, tokens, -1)


def _block(key: jax.Array, width: int) -> dict[str, Any]:
    attend, mix, up, down = jax.random.split(key, 4)
    return {
        "first": _norm(width),
        "attend": _dense(attend, width, 3 * width),
        "mix": _dense(mix, width, width),
        "second": _norm(width),
        "up": _dense(up, width, 2 * width),
        "down": _dense(down, 2 * width, width),
    }


def _dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"kernel": jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs), "bias": jnp.zeros(outputs)}


def _norm(width: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


def _linear(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def _normed(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * layer["scale"] + layer["shift"]
