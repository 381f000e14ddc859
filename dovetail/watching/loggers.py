"""TensorBoard, MLflow and W&B as callbacks: scores and spent budget by round, settings, and the statement at the end.

What they write, and may send to a service, is what the statement covers: diagnostics of raw updates are left out. A
spent eps is named with its delta, and the whole statement, with its assumptions, goes along as text.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.experiment import Callback, Progress, Result, RunStart

__all__ = ["MLflow", "TensorBoard", "WandB", "flatten_settings", "scores_by_name"]

_LONGEST = 500  # characters of a parameter that every version of MLflow accepts


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted path, as a config spells them; what is not set is left out."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{key}.")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def scores_by_name(progress: Progress) -> dict[str, float]:
    """The finite numbers of an evaluation by name, and the eps that was spent until then.

    Item i of a list, such as a score by class, is named "name/i"; eps is named with the delta that it is at.
    """
    numbers = _finite_numbers(progress.metrics or {})
    if progress.spent is not None and math.isfinite(progress.spent.eps):
        numbers[f"privacy/eps_at_delta_{progress.spent.delta:g}"] = progress.spent.eps
    return numbers


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among metrics and in their lists; item i of a list is named "name/i"."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        parts = value if isinstance(value, list | tuple) else [value]
        names = [f"{name}/{i}" for i in range(len(parts))] if parts is value else [name]
        pairs = zip(names, parts, strict=True)
        numbers |= {key: float(part) for key, part in pairs if isinstance(part, int | float) and math.isfinite(part)}
    return numbers


def _import_logger(name: str, *, title: str, extra: str) -> ModuleType:
    """The module of an optional dependency; if it is missing, the error says which extra installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(f"logging to {title} needs {name}: pip install 'dovetail-fl[{extra}]'") from error


class TensorBoard(Callback):
    """Writes event files into a folder for `tensorboard --logdir`."""

    def __init__(self, folder: str | Path) -> None:
        self._open = _import_logger("tensorboardX", title="TensorBoard", extra="tensorboard").SummaryWriter
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(self, start: RunStart) -> None:
        """Write the settings as text."""
        self._writer = self._open(str(self.folder))
        settings = flatten_settings({**start.config, "protocol": start.protocol})
        self._writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in settings.items()), 0)

    def on_round(self, progress: Progress) -> None:
        """Scores, where there are new ones."""
        if self._writer is not None and progress.fresh:
            for name, value in scores_by_name(progress).items():
                self._writer.add_scalar(name, value, progress.round)

    def on_end(self, result: Result) -> None:
        """The last model's scores, and the statement as text."""
        if self._writer is not None:
            for name, value in _finite_numbers(result.metrics).items():
                self._writer.add_scalar(f"final/{name}", value, result.rounds)
            indented = "".join(f"    {line}\n" for line in str(result.statement).splitlines())
            self._writer.add_text("privacy/statement", indented, result.rounds)
        self._close()

    def on_failure(self, error: BaseException) -> None:
        """Close the file: what was written stays."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Callback):
    """Logs to MLflow: to the run that is active, or to one of its own in `experiment`.

    Where MLflow writes is MLflow's own matter (`mlflow.set_tracking_uri`, MLFLOW_TRACKING_URI): a folder or a server.
    """

    def __init__(self, *, experiment: str | None = None, name: str | None = None) -> None:
        self._mlflow = _import_logger("mlflow", title="MLflow", extra="mlflow")
        self.experiment = experiment
        self.name = name
        self._own = False  # whether the run was started here, and so is ended here

    def on_start(self, start: RunStart) -> None:
        """Start a run, with the settings as its parameters."""
        self._own = self._mlflow.active_run() is None
        if self._own:
            if self.experiment is not None:
                self._mlflow.set_experiment(self.experiment)
            self._mlflow.start_run(run_name=self.name)
        settings = flatten_settings({**start.config, "protocol": start.protocol})
        self._mlflow.log_params({key: str(value)[:_LONGEST] for key, value in settings.items()})

    def on_round(self, progress: Progress) -> None:
        """Scores, where there are new ones."""
        if progress.fresh:
            self._mlflow.log_metrics(scores_by_name(progress), step=progress.round)

    def on_end(self, result: Result) -> None:
        """The last model's scores, and the statement as an artifact and, in its first line, as a tag."""
        self._mlflow.log_metrics({f"final/{name}": value for name, value in _finite_numbers(result.metrics).items()})
        self._mlflow.set_tag("privacy.statement", str(result.statement).splitlines()[0])
        self._mlflow.log_text(str(result.statement), "statement.txt")
        self._close("FINISHED")

    def on_failure(self, error: BaseException) -> None:
        """End the run as killed or failed."""
        self._close("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")

    def _close(self, status: str) -> None:
        if self._own:
            self._mlflow.end_run(status)
            self._own = False


class WandB(Callback):
    """Logs to Weights & Biases as one run of `project`.

    `mode` is "online", "offline" (files on this machine, for `wandb sync`) or "disabled"; `settings` are other
    arguments of `wandb.init`.
    """

    def __init__(
        self, project: str = "dovetail", *, name: str | None = None, mode: str | None = None, **settings: Any
    ) -> None:
        self._wandb = _import_logger("wandb", title="Weights & Biases", extra="wandb")
        self._settings: dict[str, Any] = {"project": project, "name": name, "mode": mode, **settings}
        self._run: Any = None

    def on_start(self, start: RunStart) -> None:
        """Settings as the run's config."""
        settings = {**start.config, "protocol": dict(start.protocol)}
        self._run = self._wandb.init(**self._settings, config=settings)

    def on_round(self, progress: Progress) -> None:
        """Scores, where there are new ones."""
        if self._run is not None and progress.fresh:
            self._run.log(scores_by_name(progress), step=progress.round)

    def on_end(self, result: Result) -> None:
        """The last model's scores and the statement, in the run's summary."""
        if self._run is not None:
            final = {f"final/{name}": value for name, value in _finite_numbers(result.metrics).items()}
            self._run.summary.update({**final, "privacy/statement": str(result.statement)})
        self._close(0)

    def on_failure(self, error: BaseException) -> None:
        """End the run as failed."""
        self._close(1)

    def _close(self, status: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=status)
            self._run = None
