"""Clipped sums by Dovetail, as its engine runs them: the batch dealt to one device a core, one compiled program."""

import batch_examples
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec

from dovetail.data import Dataset
from dovetail.engine.devices import AXIS, make_mesh, on_every_device, split_over_devices, use_all_cores
from dovetail.engine.examples import clipped_sum
from dovetail.learners import models


def main() -> None:
    arguments = batch_examples.options(__doc__, methods=("factored",))
    use_all_cores()
    mesh = make_mesh(min(batch_examples.THREADS, jax.device_count()))
    images, labels = batch_examples.batch()
    labels = labels.astype(np.int32)
    dataset = Dataset(inputs=images, labels=labels, test_inputs=images, test_labels=labels, num_classes=10)
    _, model = models.build("cnn", dataset)
    layers = [
        {"kernel": jnp.asarray(kernel.reshape(-1, kernel.shape[-1])), "bias": jnp.asarray(bias)}
        for kernel, bias in batch_examples.layers()
    ]
    params, unravel = ravel_pytree(layers)

    def of_device(params: jax.Array, *batch: jax.Array) -> jax.Array:
        total = clipped_sum(model, unravel, params, *batch, clip_norm=batch_examples.CLIP)
        return jax.lax.psum(total, AXIS)

    split, same = PartitionSpec(AXIS), PartitionSpec()
    compiled = jax.jit(
        jax.shard_map(of_device, mesh=mesh, in_specs=(same, split, split, split), out_specs=same, check_vma=False)
    )
    params = on_every_device(params, mesh)
    batch = [split_over_devices(array, mesh, axis=0) for array in (images, labels, np.ones(len(labels), np.int32))]

    def parts(total: jax.Array) -> list[jax.Array]:
        return [layer[name] for layer in unravel(total) for name in ("kernel", "bias")]

    def step() -> jax.Array:
        return jax.block_until_ready(compiled(params, *batch))

    batch_examples.measure("dovetail", step, parts, arguments)


if __name__ == "__main__":
    main()
