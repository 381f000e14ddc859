"""What two runs must have in common for one to go on where the other stopped."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from dovetail import protocols
from dovetail._version import __version__
from dovetail.data import Clients, Dataset, Task, views
from dovetail.experiment.config import Config

__all__ = ["difference", "fingerprint", "own_code"]

_BLOCK = 1 << 26
_HINTS = {"first model": " (a module of your own must start from the same weights: set a seed before it is made)"}


def fingerprint(
    config: Config,
    task: Task,
    protocol: protocols.Protocol,
    dataset: Dataset,
    clients: Clients,
    parameters: np.ndarray,
) -> dict[str, Any]:
    """Config (but for what may change speed alone), protocol, data, roster, first model and code, as plain data.

    Of code from outside the package, that of the task, its model, views and the protocol, the files it is in count.
    """
    asked = msgspec.to_builtins(config)
    del asked["performance"]
    settled = {
        name: value for name, value in msgspec.to_builtins(protocol).items() if name not in protocol.read_off_data
    }
    data = (dataset.inputs, dataset.labels, dataset.test_inputs, dataset.test_labels)
    subjects = () if dataset.subjects is None else (dataset.subjects,)
    return {
        "config": asked,
        "protocol": {"class": f"{type(protocol).__module__}:{type(protocol).__qualname__}", **settled},
        "data": _digest(*data, *subjects),
        "roster": _digest(clients.records, clients.counts),
        "first model": _digest(parameters),
        "own code": own_code(config, task, protocol),
        "library": f"dovetail {__version__}, jax {jax.__version__}, numpy {np.__version__}",
    }


def own_code(config: Config, task: Task, protocol: protocols.Protocol) -> dict[str, str]:
    """Fingerprints of the files outside the package that task, model, views, features and protocol are written in."""
    own: list[Any] = [task.loss, *task.metrics.values()]
    if task.model is not None:
        own += [task.model.init, task.model.apply, task.model.loss]
        own += task.model.learner.code if task.model.learner is not None else ()
    own = [one for one in own if one is not None and not isinstance(one, str)]
    found = _code(type(protocol), task.load, *own, *views.parse(config.client.views))
    return found | _code_at(config.task.features)


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference of two fingerprints, in words; None if there is none."""
    return next(_differences("", before, now), None)


def _differences(where: str, before: Any, now: Any) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*before, *now)):
            yield from _differences(f"{where}.{name}" if where else name, before.get(name), now.get(name))
    elif _plain(before) != _plain(now):
        name = where.removeprefix("config.")
        yield f"{name} was {_short(before)} and is {_short(now)}{_HINTS.get(name, '')}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}..."


def _code_at(name: str) -> dict[str, str]:
    """The file of features that are named "module:object"."""
    return _code(sys.modules.get(name.partition(":")[0])) if ":" in name else {}


def _code(*objects: Any) -> dict[str, str]:
    """The files outside the package that these are written in, by module."""
    found = {}
    for one in objects:
        module = inspect.getmodule(one)
        if module is None or module.__name__.split(".")[0] == "dovetail":
            continue
        file = getattr(module, "__file__", None)
        content = Path(file).read_bytes() if file and Path(file).is_file() else b""
        found[module.__name__] = hashlib.blake2b(content, digest_size=16).hexdigest()
    return found


def _digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for low in range(0, len(flat), _BLOCK):
            found.update(flat[low : low + _BLOCK].data)
    return found.hexdigest()
