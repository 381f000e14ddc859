"""Dovetail trains models on data that stays with its owners, and proves a bound on what can leak."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dovetail._version import __version__

if TYPE_CHECKING:
    from dovetail import events
    from dovetail.data import Dataset, Model, Task
    from dovetail.experiment import Callback, Result, load, train, tune
    from dovetail.experiment.verify import verify
    from dovetail.guarantee.quotes import Terms, quote
    from dovetail.protocols import Protocol
    from dovetail.statements import Statement

# [public]
__all__ = [
    "Callback",
    "Dataset",
    "Model",
    "Protocol",
    "Result",
    "Statement",
    "Task",
    "Terms",
    "__version__",
    "events",
    "load",
    "quote",
    "train",
    "tune",
    "verify",
]
# [end]

_HOMES = {
    "Callback": "dovetail.experiment",
    "Dataset": "dovetail.data",
    "Model": "dovetail.data",
    "Protocol": "dovetail.protocols",
    "Result": "dovetail.experiment",
    "Statement": "dovetail.statements",
    "Task": "dovetail.data",
    "Terms": "dovetail.guarantee.quotes",
    "load": "dovetail.experiment",
    "quote": "dovetail.guarantee.quotes",
    "train": "dovetail.experiment",
    "tune": "dovetail.experiment",
    "verify": "dovetail.experiment.verify",
}


def __getattr__(name: str) -> Any:
    """Public names on first use, so that importing a submodule does not load the whole library."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "events":
        return importlib.import_module("dovetail.events")
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
