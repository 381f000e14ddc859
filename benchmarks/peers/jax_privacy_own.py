"""Clipped sums for `dovetail bench own` by jax-privacy's `clipped_grad`, and by a vmap written by hand.

Convolutions multiply matrices of patches, as in `jax_privacy_examples`: with `lax.conv` both take far longer.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import time
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import own_workload
import workload


def dense(layer: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer[0].T + layer[1]


def mlp(layers: Any, x: jax.Array) -> jax.Array:
    return dense(layers[1], jax.nn.relu(dense(layers[0], x)))


def convolve(layer: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
    kernel, bias = layer
    size, rows, columns = kernel.shape[2], x.shape[2] - kernel.shape[2] + 1, x.shape[3] - kernel.shape[3] + 1
    shifts = [x[:, :, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    patches = jnp.stack(shifts, axis=2).reshape(len(x), -1, rows * columns)
    return (kernel.reshape(len(kernel), -1) @ patches + bias[:, None]).reshape(len(x), -1, rows, columns)


def cnn(layers: Any, x: jax.Array) -> jax.Array:
    for layer in layers[:2]:
        x = convolve(layer, x)
        records, channels, rows, columns = x.shape
        x = jax.nn.relu(x.reshape(records, channels, rows // 2, 2, columns // 2, 2).max(axis=(3, 5)))
    return dense(layers[3], jax.nn.relu(dense(layers[2], x.reshape(len(x), -1))))


def main() -> None:
    arguments = own_workload.options(__doc__, variants=("clipped_grad", "microbatches of 32", "vmap by hand"))
    inputs, labels = map(jnp.asarray, own_workload.data(chosen := own_workload.chosen(arguments), [1] * chosen.clients))
    layers = [tuple(map(jnp.asarray, layer)) for layer in own_workload.layers(arguments.workload)]
    apply = mlp if arguments.workload == "record-mlp" else cnn

    def loss(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(apply(layers, x)), y[:, None], axis=1))

    def by_hand(layers: Any, x: jax.Array, y: jax.Array) -> Any:
        gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(layers, x[:, None], y[:, None])
        norms = jnp.sqrt(sum(jnp.sum(leaf.reshape(len(x), -1) ** 2, axis=1) for leaf in jax.tree.leaves(gradients)))
        factor = jnp.minimum(1, own_workload.CLIP / norms)
        return jax.tree.map(lambda leaf: jnp.tensordot(factor, leaf, 1), gradients)

    if arguments.method == "vmap by hand":
        step = jax.jit(by_hand)
    else:
        size = 32 if "32" in arguments.method else None
        step = jax.jit(
            jax_privacy.clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=own_workload.CLIP, microbatch_size=size)
        )
    seconds = []
    for _ in range(arguments.warmup + arguments.rounds):
        began = time.perf_counter()
        sums = jax.block_until_ready(step(layers, inputs, labels))
        seconds.append(time.perf_counter() - began)
    own_workload.report(
        arguments,
        engine="jax by hand" if arguments.method == "vmap by hand" else f"jax-privacy {jax_privacy.__version__}",
        seconds=seconds[arguments.warmup :],
        records=len(labels),
        peak_mb=workload.peak_rss_mb(),
        sums=[float(jnp.linalg.norm(leaf.ravel())) for leaf in jax.tree.leaves(sums)],
    )


if __name__ == "__main__":
    main()
