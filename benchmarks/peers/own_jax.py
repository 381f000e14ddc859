"""The models of `dovetail bench own` in plain JAX, as people write them; logistic and CNN are those of `task.model`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_workload
import workload
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from dovetail.data import Dataset, Model
from dovetail.engine.devices import AXIS, make_mesh, on_every_device, split_over_devices
from dovetail.engine.examples import clipped_sum as sum_clipped
from dovetail.learners import models
from dovetail.learners.isolation import inspect_model


def model(name: str, dataset: Dataset) -> Model:
    """The model of a workload, inspected as before a training."""
    if name == "logistic":
        return models.linear(name, dataset, constant=1.0)
    if name == "cnn":
        return models.cnn(
            dataclasses.replace(dataset, inputs=dataset.inputs[:, 0], test_inputs=dataset.test_inputs[:, 0])
        )
    init, apply = {"resnet": RESNET, "lstm": LSTM, "transformer": TRANSFORMER, "tabular": TABULAR}[name]
    return inspect_model(Model(name=name, init=init, apply=apply), dataset)[0]


def clipped_sum(name: str, dataset: Dataset) -> Callable[[], list[jax.Array]]:
    """The function that returns the sum of the clipped gradients of all records, one array for each parameter."""
    apply = mlp if name == "record-mlp" else cnn
    return compile_sum(apply, first_layers(name), dataset)


def first_layers(name: str, *, transposed: bool = True) -> list[dict[str, np.ndarray]]:
    """The first parameters, a weight and a bias for each layer; convolutions have (height, width, in, out)."""
    found = []
    for weight, bias in own_workload.layers(name):
        turned = weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T if transposed else weight
        found.append({"weight": np.ascontiguousarray(turned), "bias": bias})
    return found


def compile_sum(apply: Callable[..., Any], params: Any, dataset: Dataset) -> Callable[[], list[jax.Array]]:
    """The clipped sum of a batch that is shared out to one device a core, one compiled program, as the engine's is."""
    made = Model(name="own", init=lambda key: jax.tree.map(jnp.asarray, params), apply=apply)
    made = inspect_model(made, dataset, records=True)[0]
    mesh = make_mesh()
    flat, unravel = ravel_pytree(params)

    def of_device(params: jax.Array, *batch: jax.Array) -> jax.Array:
        return jax.lax.psum(sum_clipped(made, unravel, params, *batch, clip_norm=own_workload.CLIP), AXIS)

    split, same = PartitionSpec(AXIS), PartitionSpec()
    compiled = jax.jit(
        jax.shard_map(of_device, mesh=mesh, in_specs=(same, split, split, split), out_specs=same, check_vma=False)
    )
    start = on_every_device(flat, mesh)
    present = np.ones(len(dataset.labels), np.int32)
    batch = [split_over_devices(array, mesh, axis=0) for array in (dataset.inputs, dataset.labels, present)]

    def step() -> list[jax.Array]:
        return jax.tree.leaves(unravel(jax.block_until_ready(compiled(start, *batch))))

    return step


def dense(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    return x @ layer["weight"] + layer["bias"]


def convolve(kernel: Any, x: jax.Array, *, stride: int = 1, padding: Any = "VALID") -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NCHW", "HWIO", "NCHW")
    )


def max_pool(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    return dense(layers[1], jax.nn.relu(dense(layers[0], x)))


def cnn(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers[:2]:
        x = max_pool(jax.nn.relu(convolve(layer["weight"], x) + layer["bias"][:, None, None]))
    return dense(layers[3], jax.nn.relu(dense(layers[2], x.reshape(len(x), -1))))


def _init_dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"weight": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "bias": jnp.zeros(outputs)}


def _init_kernel(key: jax.Array, size: int, inputs: int, outputs: int) -> jax.Array:
    return jax.random.normal(key, (size, size, inputs, outputs)) * (2 / (size * size * inputs)) ** 0.5


def _init_norm(channels: int) -> dict[str, jax.Array]:
    return {"scale": jnp.ones(channels), "shift": jnp.zeros(channels)}


def _init_tabular(key: jax.Array) -> list[dict[str, jax.Array]]:
    first, last = jax.random.split(key)
    return [_init_dense(first, 75, 100), _init_dense(last, 100, 10)]


TABULAR = _init_tabular, mlp

BLOCKS = ((16, 16, 1), (16, 32, 2), (32, 64, 2))  # channels, channels out, stride


def _init_resnet(key: jax.Array) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 16))
    blocks = []
    for channels, out, _ in BLOCKS:
        block = {
            "first": _init_kernel(next(keys), 3, channels, out),
            "norm": _init_norm(out),
            "second": _init_kernel(next(keys), 3, out, out),
            "renorm": _init_norm(out),
        }
        if channels != out:
            block["short"] = _init_kernel(next(keys), 1, channels, out)
        blocks.append(block)
    stem = {"kernel": _init_kernel(next(keys), 3, 3, 16), "norm": _init_norm(16)}
    return {"stem": stem, "blocks": blocks, "head": _init_dense(next(keys), 64, workload.CLASSES)}


def _group_norm(layer: dict[str, Any], x: jax.Array, *, groups: int = 8) -> jax.Array:
    cut = x.reshape(len(x), groups, -1)
    cut = cut - cut.mean(axis=-1, keepdims=True)
    cut = cut * jax.lax.rsqrt((cut**2).mean(axis=-1, keepdims=True) + 1e-5)
    return cut.reshape(x.shape) * layer["scale"][:, None, None] + layer["shift"][:, None, None]


def _resnet(params: dict[str, Any], x: jax.Array) -> jax.Array:
    around = ((1, 1), (1, 1))
    x = jax.nn.relu(_group_norm(params["stem"]["norm"], convolve(params["stem"]["kernel"], x, padding=around)))
    for block, (_, _, stride) in zip(params["blocks"], BLOCKS, strict=True):
        short = convolve(block["short"], x, stride=stride) if "short" in block else x
        y = convolve(block["first"], x, stride=stride, padding=around)
        y = convolve(block["second"], jax.nn.relu(_group_norm(block["norm"], y)), padding=around)
        x = jax.nn.relu(_group_norm(block["renorm"], y) + short)
    return dense(params["head"], x.mean(axis=(2, 3)))


RESNET = _init_resnet, _resnet

VOCABULARY = own_workload.VOCABULARY


def _init_lstm(key: jax.Array) -> dict[str, Any]:
    embed, inputs, hidden, between, head = jax.random.split(key, 5)
    return {
        "embedding": jax.random.normal(embed, (VOCABULARY, 16)),
        "inputs": _init_dense(inputs, 16, 256),
        "hidden": _init_dense(hidden, 64, 256),
        "between": _init_dense(between, 64, 128),
        "head": _init_dense(head, 128, VOCABULARY),
    }


def _lstm(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens.astype(jnp.int32)]

    def cell(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        h, c = carry
        i, f, g, o = jnp.split(dense(params["inputs"], x) + dense(params["hidden"], h), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros((len(x), 64))
    (h, _), _ = jax.lax.scan(cell, (zero, zero), x.swapaxes(0, 1))
    return dense(params["head"], jax.nn.relu(dense(params["between"], h)))


LSTM = _init_lstm, _lstm


def _init_transformer(key: jax.Array) -> dict[str, Any]:
    embed, head, *blocks = jax.random.split(key, 4)
    return {
        "embedding": jax.random.normal(embed, (VOCABULARY, 64)),
        "position": jnp.zeros((own_workload.SEQUENCE, 64)),
        "blocks": [
            {
                name: _init_dense(k, *shape)
                for k, (name, shape) in zip(
                    jax.random.split(block, 4),
                    {"attend": (64, 192), "mix": (64, 64), "up": (64, 128), "down": (128, 64)}.items(),
                    strict=True,
                )
            }
            | {"first": _init_norm(64), "second": _init_norm(64)}
            for block in blocks
        ],
        "head": _init_dense(head, 64, VOCABULARY),
    }


def _layer_norm(layer: dict[str, Any], x: jax.Array) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * layer["scale"] + layer["shift"]


def _attend(block: dict[str, Any], x: jax.Array, *, heads: int = 4) -> jax.Array:
    query, key, value = (
        part.reshape(*x.shape[:2], heads, -1) for part in jnp.split(dense(block["attend"], x), 3, axis=-1)
    )
    scores = jax.nn.softmax(jnp.einsum("nqhd,nkhd->nhqk", query, key) / query.shape[-1] ** 0.5)
    return dense(block["mix"], jnp.einsum("nhqk,nkhd->nqhd", scores, value).reshape(x.shape))


def _transformer(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embedding"][tokens.astype(jnp.int32)] + params["position"]
    for block in params["blocks"]:
        x = _layer_norm(block["first"], x + _attend(block, x))
        x = _layer_norm(block["second"], x + dense(block["down"], jax.nn.relu(dense(block["up"], x))))
    return dense(params["head"], x.mean(axis=1))


TRANSFORMER = _init_transformer, _transformer
