"""Clipped sums by jax-privacy's `clipped_grad`: on the whole batch at once, and in microbatches of 32 and of one.

Convolutions multiply matrices of patches, as Dovetail's do: with `lax.conv_general_dilated` the whole batch takes as
long, and microbatches take twice to five times as long.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import batch_examples
import jax
import jax.numpy as jnp
import jax_privacy

METHODS = {"default": None, "microbatches of 32": 32, "microbatches of 1": 1}

Layers = list[tuple[jax.Array, jax.Array]]


def logits(layers: Layers, images: jax.Array) -> jax.Array:
    x = images[..., None]
    for kernel, bias in layers[:2]:
        x = convolve(x, kernel, bias)
        batch, height, width, channels = x.shape
        x = jax.nn.relu(x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4)))
    (hidden, hidden_bias), (last, last_bias) = layers[2:]
    return jax.nn.relu(x.reshape(len(x), -1) @ hidden + hidden_bias) @ last + last_bias


def convolve(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    size, _, _, channels = kernel.shape
    batch, height, width, _ = x.shape
    rows, columns = height - size + 1, width - size + 1
    shifts = [x[:, i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    patches = jnp.stack(shifts, axis=3).reshape(batch * rows * columns, -1)
    return (patches @ kernel.reshape(-1, channels) + bias).reshape(batch, rows, columns, channels)


def loss(layers: Layers, images: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(layers, images)), labels[:, None], axis=1))


def main() -> None:
    arguments = batch_examples.options(__doc__, methods=METHODS)
    size = METHODS[arguments.method]
    images, labels = (jnp.asarray(array) for array in batch_examples.batch())
    layers = [(jnp.asarray(kernel), jnp.asarray(bias)) for kernel, bias in batch_examples.layers()]
    gradient = jax.jit(
        jax_privacy.clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=batch_examples.CLIP, microbatch_size=size)
    )

    def step() -> Layers:
        return jax.block_until_ready(gradient(layers, images, labels))

    batch_examples.measure(f"jax-privacy {jax_privacy.__version__}", step, jax.tree.leaves, arguments)


if __name__ == "__main__":
    main()
