"""The machine that this runs on: its cores, and in words what to put beside whatever was measured on it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from dovetail._jax import jax

__all__ = ["describe", "has_accelerator", "num_cores", "processor_flags"]


def num_cores() -> int:
    """How many cores this process may use: of a container or a batch job, fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_accelerator() -> bool:
    """Whether JAX computes on something faster than processor cores."""
    return jax.default_backend() != "cpu"


def describe() -> str:
    """This machine in a line: accelerators, cores, processor, and the versions of Python and JAX."""
    cores = num_cores()
    devices = jax.devices()
    on = f"{len(devices)} x {devices[0].device_kind}, " if has_accelerator() else ""
    count = f"{cores} core{'s' * (cores > 1)}"
    return f"{on}{count} ({_processor_name()}), Python {platform.python_version()}, jax {metadata.version('jax')}"


def processor_flags() -> str:
    """What the processor can do, where the system tells it: programs compiled for one may not run on another."""
    return _processor_line("flags") or _processor_line("Features") or platform.processor()


def _processor_line(name: str) -> str:
    """What the system says of its first processor under this name; nothing where it does not."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


def _processor_name() -> str:
    """The processor's own name, where the system tells it."""
    if name := _processor_line("model name"):
        return name
    return platform.processor() or platform.machine()
