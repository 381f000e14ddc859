"""Dovetail trains models on data that stays with its owners, and proves a bound on what can leak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail._version import __version__

if TYPE_CHECKING:
    from dovetail.experiment.training import Result, train

__all__ = ["Result", "__version__", "train"]


def __getattr__(name: str) -> Any:
    """`train` and `Result` on first use, so that importing a submodule does not load the whole library."""
    if name in ("train", "Result"):
        from dovetail import experiment

        return getattr(experiment, name)
    raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
