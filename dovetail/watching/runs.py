"""Runs side by side: what is in a folder, what differs between runs, and how their scores grew.

Only the files of runs are read: config, statement and scores. Nothing is recomputed (`dovetail verify` does that).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.experiment.folder import RunFolder
from dovetail.figures import Figure, Line
from dovetail.numbers import at_most
from dovetail.statements import Statement
from dovetail.watching.loggers import flatten_settings

__all__ = ["RunFacts", "differences", "figure", "find_runs", "read"]

_DEEPEST = 4  # folders below the one that is searched
_SCORES = ("accuracy", "r2", "loss")  # the first that a run has is shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What one run's folder says.

    `metrics` are the lines of `metrics.jsonl`; `summary` is `privacy.json`, and `seconds` the median time of a round:
    both are None until the run has ended. `when` is when it ended, or was started if it has not.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    seconds: float | None
    resumable: bool
    when: datetime.datetime

    @property
    def state(self) -> str:
        """One of "finished", "can be resumed" and "unfinished"."""
        return "finished" if self.summary is not None else "can be resumed" if self.resumable else "unfinished"

    @property
    def statement(self) -> Statement | None:
        """What is certified; None until it has ended."""
        return None if self.summary is None else Statement.from_json(self.summary["certified"])

    @property
    def scores(self) -> Mapping[str, Any]:
        """The scores by name of the final model; of the last one that was evaluated until the run has ended."""
        if self.summary is not None:
            return self.summary.get("metrics") or {"accuracy": self.summary["accuracy"]}
        last = self.metrics[-1] if self.metrics else {}
        return {**(last.get("metrics") or {}), "accuracy": last.get("accuracy")}

    def row(self) -> dict[str, Any]:
        """The run as plain data, for a line of `dovetail runs`."""
        summary = self.summary or {}
        statement = self.statement
        score = next((name for name in _SCORES if self.scores.get(name) is not None), None)
        rounds = summary.get("rounds", self.metrics[-1]["round"] if self.metrics else 0)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            "task": self.config["task"]["name"],
            "protocol": self.config["protocol"]["name"],
            "statement": None if statement is None else statement.to_json(),
            "score": score,
            "value": None if score is None else self.scores[score],
            "baseline": None if score is None else (summary.get("baseline") or {}).get(score),
            "rounds": rounds,
            "seconds_per_round": self.seconds,
            "when": self.when.isoformat(timespec="seconds"),
        }


def find_runs(folder: Path) -> list[RunFacts]:
    """The runs in a folder and below it, the latest first."""
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder")
    runs = [
        read(path, name=str(path.relative_to(folder)) if path != folder else path.name) for path in _run_folders(folder)
    ]
    return sorted(runs, key=lambda run: run.when, reverse=True)


def _run_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """The folders of runs in a folder and at most `_DEEPEST` levels below it; hidden folders are left out."""
    if _holds_run(folder):
        yield folder
    elif depth < _DEEPEST:
        for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _run_folders(child, depth + 1)


def _holds_run(folder: Path) -> bool:
    """Whether this is a run's folder; a config alone does not make one."""
    run = RunFolder(folder)
    return (folder / "config.toml").is_file() and (
        run.is_finished or run.is_resumable or (folder / "metrics.jsonl").exists()
    )


def read(folder: Path, *, name: str | None = None) -> RunFacts:
    """The facts of the run in a folder; refuses a folder that holds none, and files that cannot be read.

    Arguments:
        name: what the run is called beside others; the folder unless given.
    """
    if not _holds_run(folder):
        raise ValueError(f"{str(folder)!r} is not the folder of a run")
    run = RunFolder(folder)
    try:
        config = tomllib.loads(run.config.read_text(encoding="utf-8"))
        config["task"]["name"], config["protocol"]["name"]
        summary = run.read_privacy() if run.is_finished else None
        if summary is not None:
            Statement.from_json(summary["certified"])
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the files of the run in {str(folder)!r} cannot be read ({type(error).__name__}: {error})"
        ) from error
    last = folder / ("privacy.json" if run.is_finished else "config.toml")
    when = datetime.datetime.fromtimestamp(last.stat().st_mtime, datetime.UTC)
    return RunFacts(
        name=name or str(folder),
        folder=folder,
        config=config,
        metrics=run.read_metrics(),
        summary=summary,
        seconds=run.read_seconds_per_round(),
        resumable=run.is_resumable,
        when=when,
    )


def differences(runs: Sequence[RunFacts]) -> dict[str, list[Any]]:
    """What is not the same in all of these runs, by name: settings first, then what came out; one value per run."""
    settings = [_settings(run) for run in runs]
    results = [_results(run) for run in runs]
    listed: dict[str, list[Any]] = {}
    for part in (settings, results):
        for key in dict.fromkeys(key for facts in part for key in facts):
            values = [facts.get(key) for facts in part]
            if any(value != values[0] for value in values):
                listed[key] = values
    return listed


def _settings(run: RunFacts) -> dict[str, Any]:
    """The config by dotted keys, with the protocol's settings as they were after calibration."""
    protocol = (run.summary or {}).get("protocol") or {}
    return flatten_settings({**run.config, "protocol": {**run.config["protocol"], **protocol}})


def _results(run: RunFacts) -> dict[str, Any]:
    """What came out of a run, under the names that a comparison shows: state, scores, statement, rounds."""
    summary = run.summary or {}
    statement = run.statement
    shown = {name: value for name, value in run.scores.items() if isinstance(value, int | float)}
    outcome: dict[str, Any] = {"state": run.state, **{f"test {name}": value for name, value in shown.items()}}
    if statement is not None:
        outcome |= {
            "certified eps": None if statement.is_unbounded else statement.eps,
            "delta": statement.delta,
            "neighbours": statement.neighbors.value,
            "unit": statement.unit.value,
            "trust": statement.trust.value,
            "against": statement.adversary,
            "assumptions": json.dumps(list(statement.assumptions)),
        }
    return outcome | {name: summary.get(name) for name in ("rounds", "uploads")} | {"seconds_per_round": run.seconds}


def figure(runs: Sequence[RunFacts], *, over: str = "rounds") -> Figure:
    """A score of all these runs against the rounds, or against the eps that was spent until then."""
    if over not in ("rounds", "eps"):
        raise ValueError(f"scores are plotted over rounds or eps, got over={over!r}")
    score = next((name for name in _SCORES if all(_has_curve(run, name) for run in runs)), None)
    if not runs or score is None:
        raise ValueError(
            "expected runs with the same kind of score in metrics.jsonl, at two rounds or more, got "
            + (", ".join(f"{run.name} ({len(run.metrics)} evaluations)" for run in runs) or "no run")
        )
    lines = []
    for run in runs:
        x_key = "eps" if over == "eps" else "round"
        points = [(line[x_key], _score_of_line(line, score)) for line in run.metrics]
        points = [(x, y) for x, y in points if x is not None and y is not None]
        name = f"{run.name} {_delta_and_neighbors(run)}" if over == "eps" else run.name
        lines.append(Line(name=name, x=[x for x, _ in points], y=[y for _, y in points]))
    return Figure(
        title=f"Test {score} of {len(runs)} run{'s' * (len(runs) != 1)}",
        x_label="round" if over == "rounds" else "eps spent, at the delta and for the neighbours of each run",
        y_label=f"test {score}",
        lines=lines,
        percent_y=score == "accuracy",
    )


def _has_curve(run: RunFacts, score: str) -> bool:
    """Whether the run has this score in at least two evaluations."""
    return sum(_score_of_line(line, score) is not None for line in run.metrics) > 1


def _score_of_line(line: Mapping[str, Any], score: str) -> float | None:
    """The score in a line of `metrics.jsonl`; None if it is not there or not finite."""
    value = (line.get("metrics") or {}).get(score, line.get(score))
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _delta_and_neighbors(run: RunFacts) -> str:
    """The scope of the run's eps, in brackets: "(delta 1e-05, replace-one)"."""
    privacy = run.config.get("privacy", {})
    neighbors = privacy.get("neighbors", "replace-one") if run.statement is None else run.statement.neighbors.value
    delta = next((line["delta"] for line in run.metrics if line.get("delta") is not None), privacy.get("delta"))
    return f"({'' if delta is None else f'delta {at_most(delta)}, '}{neighbors})"
