"""Many images through a compiled function that takes a fixed number of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import machine

__all__ = ["apply_in_batches", "on_one_core"]

# Programs that run side by side and split their own work among XLA's threads wait for each other: with JAX 0.11 on 16
# cores for ever.
on_one_core = functools.partial(jax.jit, compiler_options={"xla_cpu_multi_thread_eigen": False})


def apply_in_batches(
    function: Callable[[np.ndarray], jax.Array], images: np.ndarray, *, cpu_batch: int, accelerator_batch: int
) -> np.ndarray | jax.Array:
    """The function's rows for all images; the last batch is padded, so that there is one compilation.

    Arguments:
        function: from a batch of images to rows, one for each, which depends on its image alone.
        cpu_batch: how many images a batch has on a CPU.
        accelerator_batch: how many it has on an accelerator.

    On a CPU a batch should stay in its cache: batches run side by side, so the function is compiled `on_one_core`. Rows
    that an accelerator computed stay there.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = cpu_batch if on_cpu else accelerator_batch

    def rows_from(start: int) -> jax.Array:
        batch = images[start : start + size]
        padding = [(0, size - len(batch)), *([(0, 0)] * (batch.ndim - 1))]
        return function(np.pad(batch, padding))[: len(batch)]

    starts = range(0, len(images), size)
    if not on_cpu:
        return jnp.concatenate([rows_from(start) for start in starts])
    with ThreadPoolExecutor(machine.num_cores()) as pool:
        return np.concatenate(list(pool.map(lambda start: np.asarray(rows_from(start)), starts)))
