"""What a run ended with, and where it is while it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import protocols
from dovetail.guarantee import Quote
from dovetail.statements import Bound, Statement, Unit

__all__ = ["Progress", "Result", "described", "headline"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ended with.

    `metrics` are all scores on the test records, `baseline` those of the best constant guess and, as "rule", what it
    is. Both look at the test records alone, which are held to be public (see `engine.scoring`).
    """

    accuracy: float | None  # None where labels are numbers
    auc: float | None  # of two classes
    metrics: Mapping[str, Any]
    baseline: Mapping[str, Any]
    rounds: int
    planned_rounds: int
    seconds_per_round: float
    uploads: int
    quote: Quote
    units: Mapping[Unit, Statement]
    parameters: Mapping[str, np.ndarray]
    noise: str
    out: Path | None

    @property
    def statement(self) -> Statement:
        """What is certified."""
        return self.quote.certified

    def state_dict(self) -> dict[str, Any]:
        """The parameters as PyTorch tensors by the module's own names, for `module.load_state_dict`.

        What was not trained is not in it: pass ``strict=False`` for a module with buffers or frozen parameters.
        """
        import torch

        return {name: torch.from_numpy(np.array(value)) for name, value in self.parameters.items()}

    def to_json(self) -> dict[str, Any]:
        """The machine-readable summary."""
        return {
            "accuracy": self.accuracy,
            "auc": self.auc,
            "metrics": _plain(self.metrics),
            "baseline": dict(self.baseline),
            "rounds": self.rounds,
            "planned_rounds": self.planned_rounds,
            "seconds_per_round": self.seconds_per_round,
            "uploads": self.uploads,
            **{key: value for key, value in self.quote.to_json().items() if key != "protocol"},
            "units": {unit.value: statement.to_json() for unit, statement in self.units.items()},
            "noise": self.noise,
            "out": None if self.out is None else str(self.out),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a run after a round; accuracy, metrics and spent budget are those of the last evaluation."""

    round: int
    rounds: int
    accuracy: float | None
    spent: Bound | None
    metrics: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`; an unbounded eps is null."""
        spent = self.spent if self.spent is not None and math.isfinite(self.spent.eps) else None
        return {
            "round": self.round,
            "accuracy": self.accuracy,
            "eps": None if spent is None else spent.eps,
            "delta": None if spent is None else spent.delta,
            "metrics": None if self.metrics is None else _plain(self.metrics),
        }


def _plain(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with null for what JSON has no number for, such as the loss of a training that diverged."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def headline(metrics: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """The scores that a report begins with, each with that of the best constant guess beside it."""
    shown = {"accuracy": "accuracy", "r2": "R2", "rmse": "RMSE"} if baseline else {}
    told = []
    for name, title in shown.items():
        if metrics.get(name) is not None:
            ours, guess = (
                f"{value:.2%}" if name == "accuracy" else f"{value:.4g}" for value in (metrics[name], baseline[name])
            )
            told.append(f"{title} {ours} ({baseline['rule']}: {guess})")
    told += [f"AUC {metrics['auc']:.4f}"] if metrics.get("auc") is not None else []
    return ", ".join(told) or f"loss {metrics['loss']:.4g}"


def described(protocol: protocols.Protocol) -> dict[str, Any]:
    """A protocol's name and settings, without those that are read off the data."""
    settings = dataclasses.asdict(protocol)  # type: ignore[call-overload]
    return {"name": protocol.name, **{key: settings[key] for key in settings if key not in protocol.read_off_data}}
