"""Devices: which ones a run uses, and how arrays get onto them.

On a CPU the library asks for as many host devices as there are cores, before JAX is first used. A mesh may span
processes (`jax.distributed`); every process then holds the records, and each works on its share of the cohort.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dovetail import _validate, machine
from dovetail._fields import with_fields_in_help
from dovetail.randomness import Randomness

__all__ = [
    "AXIS",
    "Performance",
    "chunk_bytes",
    "join_processes",
    "make_mesh",
    "on_every_device",
    "shared_randomness",
    "split_over_devices",
    "to_host",
    "use_all_cores",
]

AXIS = "clients"  # the name of a mesh's only axis
_CHUNK_BYTES = {"cpu": 2**21, "host": 2**26}  # by platform
_CHUNK_BYTES_ACCELERATOR = 2**31


@with_fields_in_help
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)  # slots: or msgspec leaves out the defaults
class Performance:
    """What may change speed but never a statement, nor the law of a result: the section [performance] of a config."""

    devices: int | None = None
    """Number of devices to use; default: all."""
    chunk: int | None = None
    """Number of clients trained at a time on one device."""
    fast: bool = True
    """Compute sums without forming messages, where the result has the same distribution."""
    size_classes: int | None = None
    """Most classes of users by number of records, each computed apart; default: as many as pay, at most 8."""
    one_by_one: bool | None = None
    """Whether the users of a chunk train one after the other, and not side by side; default: what is faster, measured
    where that is not plain."""

    def __post_init__(self) -> None:
        counts = _validate.not_none(chunk=self.chunk, size_classes=self.size_classes)
        _validate.integer(**counts)
        _validate.at_least(1, **counts)


def use_all_cores() -> None:
    """Make every CPU core a JAX device; no effect once JAX is in use, or where the user has chosen."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "") or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", machine.num_cores())


def chunk_bytes(platform: str) -> int:
    """How much a device should work on at a time: what fits the cache of a core, or fills an accelerator.

    "host" is a learner outside JAX, which shares its clients among the cores by itself.
    """
    return _CHUNK_BYTES.get(platform, _CHUNK_BYTES_ACCELERATOR)


def make_mesh(count: int | None = None) -> Mesh:
    """A one-dimensional mesh, with the axis `AXIS`, over the first `count` devices, or over all."""
    devices = jax.devices()
    if count is not None and not 1 <= count <= len(devices):
        raise ValueError(f"expected devices in 1..{len(devices)}, got devices={count}")
    return Mesh(np.array(devices[:count]), (AXIS,))


def on_every_device(array: Any, mesh: Mesh) -> jax.Array:
    """The same array on each device of the mesh."""
    return _put_on_devices(array, NamedSharding(mesh, PartitionSpec()))


def split_over_devices(array: np.ndarray, mesh: Mesh, *, axis: int) -> jax.Array:
    """The array cut into equal parts along an axis, one for each device."""
    return _put_on_devices(array, NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS)))


def _put_on_devices(array: Any, sharding: NamedSharding) -> jax.Array:
    """The array on the devices of a sharding; of several processes, each puts its own part."""
    if jax.process_count() == 1:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


def to_host(array: jax.Array) -> np.ndarray:
    """A replicated array as NumPy, also when other processes hold copies of it."""
    return np.asarray(array.addressable_data(0))


def shared_randomness(seed: int) -> Randomness:
    """Noise of the operating system, the same for all processes that train together."""
    own = Randomness.from_os(seed)
    if jax.process_count() == 1:
        return own
    words = np.asarray(multihost_utils.broadcast_one_to_all(own.key_data))
    return Randomness(seed, words.astype("<u4").tobytes())


def join_processes(coordinator: str, *, processes: int, process_id: int) -> None:
    """Train together with other processes, on this or other machines (`jax.distributed`); call it before using JAX.

    Arguments:
        coordinator: the address "host:port" of the process with id 0.
        processes: how many processes there are.
        process_id: the number of this one, from 0.
    """
    if process_id >= processes:
        raise ValueError(f"expected process_id < processes={processes}, got process_id={process_id}")
    jax.distributed.initialize(coordinator, num_processes=processes, process_id=process_id)
