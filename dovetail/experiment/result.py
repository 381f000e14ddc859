"""The result of a run, its progress while it runs, and how both are shown in few words.

`Result` is what `run` and `train` return and `Progress` what callbacks get after each round; `Provenance` is what a
result needs to be saved. Below are the summaries for a terminal, a notebook and `privacy.json`.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import protocols
from dovetail.data.readers.recipes import Recipe
from dovetail.experiment.config import Config, to_toml
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.ledgers import Together
from dovetail.experiment.summary import explain
from dovetail.guarantee import Quote, Record
from dovetail.learners.prediction import Predictor
from dovetail.numbers import at_most
from dovetail.protocols._claimed import FROM_DATA
from dovetail.statements import Bound, Statement, Unit

__all__ = [
    "Progress",
    "Provenance",
    "Result",
    "beats_baseline",
    "describe_protocol",
    "headline",
    "headline_facts",
    "html_table",
    "separates_classes",
    "spell_interval",
    "spell_score",
]

_TELLING_AUC = 0.55  # a constant guess has 1/2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a result comes from, for the folder that it is saved in: config, settled protocol, what was released.

    `origin` says where the run comes from, given the folder; only then are the data read, and their key is made.
    """

    config: Config
    protocol: Mapping[str, Any]
    record: Record
    origin: Callable[[Path], Mapping[str, Any]]

    def facts(self, folder: Path) -> dict[str, Any]:
        """What `privacy.json` says besides the result: the protocol's settings, and where the run comes from."""
        return {"protocol": self.protocol, "origin": self.origin(folder)}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Result:
    """What a run ended with, the trained model among it: `predict`, `predict_proba`, `save`.

    `metrics` are all scores on the test records, `baseline` those of the best constant guess and, as "rule", what it
    is. Both look at the test records alone, which are held to be public (see `engine.scoring`); with
    `evaluate="private"` they are noisy, and `intervals` says how far off they may be.
    """

    accuracy: float | None  # None where labels are numbers
    auc: float | None  # of two classes
    metrics: Mapping[str, Any]
    baseline: Mapping[str, Any]
    rounds: int
    planned_rounds: int
    charged_rounds: int  # more than `rounds` where a callback ended the training
    seconds_per_round: float
    uploads: int
    quote: Quote
    units: Mapping[Unit, Statement]
    parameters: Mapping[str, np.ndarray]
    noise: str
    out: Path | None
    evaluation: Mapping[str, Any] | None = None  # how private scores were made; None: test records are public
    predictor: Predictor | None = dataclasses.field(default=None, compare=False)
    provenance: Provenance | None = dataclasses.field(default=None, compare=False)
    across_runs: Together | None = dataclasses.field(default=None, compare=False)  # what runs on these people spent
    tuning: Mapping[str, Any] | None = None  # of `tune`: what was chosen, and what may be told of the trials

    def predict(self, rows: Any) -> np.ndarray:
        """One answer per row: a class, a number, or zeros and ones for labels.

        `rows` is an array like `Dataset.inputs`; or, where the dataset came from a table, a data frame or a file with
        the same columns, whose bounds and categories are applied.
        """
        return self._predictor.predict(rows)

    def predict_proba(self, rows: Any) -> np.ndarray:
        """The probability of every class, (rows, classes), or of every label, by the model."""
        return self._predictor.predict_proba(rows)

    @property
    def recipe(self) -> Recipe:
        """How rows become the model's inputs, and its outputs answers."""
        return self._predictor.recipe

    @property
    def _predictor(self) -> Predictor:
        if self.predictor is None:
            raise ValueError("this result has no model")
        return self.predictor

    def save(self, folder: str | Path) -> Path:
        """Write config, model, statement, ledger and recipe into a new folder, for `dovetail.load` and `verify`."""
        path = Path(folder)
        provenance = self.required_provenance.facts(path)
        saved = RunFolder.create(path, to_toml(self.required_provenance.config))
        dataclasses.replace(self, out=path)._write(saved, provenance)
        return path

    def write(self, folder: RunFolder) -> None:
        """End a run in its folder; a claim that was computed from raw data is written under the diagnostics' banner."""
        self._write(folder, self.required_provenance.facts(folder.path))

    def _write(self, folder: RunFolder, provenance: Mapping[str, Any]) -> None:
        """Write all files of the finished run but the config, which is there.

        A claim that was computed from raw data is not released: it goes to the diagnostics, and is null in the summary.
        """
        stated = {**self.to_json(), **provenance}
        if self.quote.claimed is not None and FROM_DATA in self.quote.claimed.assumptions:
            folder.append_diagnostics({"claimed": stated["claimed"]})
            stated["claimed"] = None
        folder.finish(stated, self.required_provenance.record, self.parameters, self.recipe)

    @property
    def required_provenance(self) -> Provenance:
        """The provenance, without which nothing can be saved; raises ValueError for the result of tuning."""
        if self.provenance is None:
            raise ValueError("the result of tuning cannot be saved afterwards: it is written where out= says")
        return self.provenance

    def explain(self) -> str:
        """Every statement of the run in full: theorems, assumptions, other units, and what remains without trust."""
        return explain(self.quote, self.units)

    def __repr__(self) -> str:
        return f"Result({', '.join(f'{key}: {value}' for key, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        return html_table("Result", self._facts())

    def _facts(self) -> dict[str, str]:
        """What `repr` and a notebook show, as text by name."""
        facts = headline_facts(self.to_json(), self.statement, out=self.out)
        if self.tuning is not None:
            facts["chosen"] = ", ".join(f"{key}={value}" for key, value in self.tuning["chosen"].items())
        return facts

    @property
    def statement(self) -> Statement:
        """What is certified."""
        return self.quote.certified

    @property
    def beats_baseline(self) -> bool | None:
        """Whether the model beats the best constant guess on the test records; None where there is none."""
        return beats_baseline(self.metrics, self.baseline, self.intervals)

    @property
    def intervals(self) -> Mapping[str, Any]:
        """Of private scores, by name: (low, high), which cover the score of new people with 95 %.

        An end is None where nothing is known. Public test records give none.
        """
        return {} if self.evaluation is None else self.evaluation["intervals"]

    def state_dict(self) -> Any:
        """The trained parameters in the form that the model's own library loads.

        - Of a PyTorch module: tensors by the module's own names, for `module.load_state_dict`. What was not trained is
          not in it: pass ``strict=False`` for a module with buffers or frozen parameters.
        - Of other models: NumPy arrays, nested as the model's `init` nests them. With Flax that is
          ``module.apply({"params": state}, x)``, with Flax NNX ``nnx.update(module, state)``; of an Equinox module the
          list of its arrays of floating-point numbers, in the order of `jax.tree.leaves`.
        """
        return self._predictor.state_dict()

    def to_json(self) -> dict[str, Any]:
        """The summary that `dovetail run --json` prints and `privacy.json` holds."""
        return {
            "accuracy": self.accuracy,
            "auc": self.auc,
            "metrics": _null_if_not_finite(self.metrics),
            "baseline": dict(self.baseline),
            "rounds": self.rounds,
            "planned_rounds": self.planned_rounds,
            **({} if self.evaluation is None else {"evaluation": dict(self.evaluation)}),
            **({"charged_rounds": self.charged_rounds} if self.charged_rounds != self.rounds else {}),
            "seconds_per_round": self.seconds_per_round,
            "uploads": self.uploads,
            **{key: value for key, value in self.quote.to_json().items() if key != "protocol"},
            "units": {unit.value: statement.to_json() for unit, statement in self.units.items()},
            "noise": self.noise,
            **({} if self.across_runs is None else {"across_runs": self.across_runs.to_json()}),
            "out": None if self.out is None else str(self.out),
            **({} if self.tuning is None else {"tuning": dict(self.tuning)}),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a run after a round; accuracy, metrics and spent budget are those of the last evaluation.

    `fresh` says whether that was in this round.
    """

    round: int
    rounds: int
    accuracy: float | None
    spent: Bound | None
    metrics: Mapping[str, Any] | None = None
    fresh: bool = False

    def to_json(self) -> dict[str, Any]:
        """A line of `metrics.jsonl`; an unbounded eps is null."""
        spent = self.spent if self.spent is not None and math.isfinite(self.spent.eps) else None
        return {
            "round": self.round,
            "accuracy": self.accuracy,
            "eps": None if spent is None else spent.eps,
            "delta": None if spent is None else spent.delta,
            "metrics": None if self.metrics is None else _null_if_not_finite(self.metrics),
        }


def _null_if_not_finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics with null for what JSON has no number for, such as the loss of a training that diverged."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def beats_baseline(
    metrics: Mapping[str, Any], baseline: Mapping[str, Any], intervals: Mapping[str, Any] | None = None
) -> bool | None:
    """Whether the scores beat those of the best constant guess, by accuracy or R2; None where it has neither.

    None, too, where the interval of a private score does not say.

    Arguments:
        metrics: the model's scores by name.
        baseline: the guess's scores by name (see `engine.scoring.baseline`).
        intervals: of private scores, (low, high) by name.
    """
    name = next((name for name in ("accuracy", "r2") if name in baseline), None)
    if name is None:
        return None
    if intervals and name in intervals and metrics[name] <= baseline[name] < intervals[name][1]:
        return None
    return metrics.get(name) is not None and metrics[name] > baseline[name]


def separates_classes(metrics: Mapping[str, Any]) -> bool:
    """Whether the scores say that a model ranks two classes, whatever it is worth when cut at one half.

    Where one class is rare, a good model may be right no more often than one that always names the other.
    """
    auc = metrics.get("auc")
    return auc is not None and auc > _TELLING_AUC


_TITLES = {"accuracy": "accuracy", "auc": "AUC", "r2": "R2", "rmse": "RMSE"}


def spell_interval(name: str, evaluation: Mapping[str, Any]) -> str:
    """The interval of a private score in words: "95% interval 81.0% to 87.0%, with noise, on 2,507 held-out people".

    Arguments:
        name: of the score.
        evaluation: what `privacy.json` has under this name.
    """
    low, high = (spell_score(name, end) for end in evaluation["intervals"][name])
    return (
        f"{evaluation['level']:.0%} interval {low} to {high}, with noise, on {evaluation['people']:,} held-out people"
    )


def spell_score(name: str, value: float | None) -> str:
    """A private score as text, with as many digits as mean something."""
    return "unknown" if value is None else f"{value:.1%}" if name == "accuracy" else f"{value:.3f}"


def _private_headline(metrics: Mapping[str, Any], baseline: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """All private scores with their intervals, and beside the first that of the best constant guess."""
    parts: list[str] = []
    for name, title in _TITLES.items():
        if metrics.get(name) is None:
            continue
        low, high = (spell_score(name, end) for end in evaluation["intervals"][name])
        beside = f"{low} to {high}"
        if not parts:
            beside = f"{spell_interval(name, evaluation)}; {baseline['rule']}: {spell_score(name, baseline[name])}"
        parts.append(f"{title} {spell_score(name, metrics[name])} ({beside})")
    return ", ".join(parts)


def headline(
    metrics: Mapping[str, Any], baseline: Mapping[str, Any], evaluation: Mapping[str, Any] | None = None
) -> str:
    """The scores that a report begins with, each with that of the best constant guess, or its interval, beside it."""
    if evaluation is not None:
        return _private_headline(metrics, baseline, evaluation)
    shown = {"accuracy": "accuracy", "r2": "R2", "rmse": "RMSE"} if baseline else {}
    parts = []
    for name, title in shown.items():
        if metrics.get(name) is not None:
            ours, guess = (
                f"{value:.2%}" if name == "accuracy" else f"{value:.4g}" for value in (metrics[name], baseline[name])
            )
            parts.append(f"{title} {ours} ({baseline['rule']}: {guess})")
    parts += [f"AUC {metrics['auc']:.4f}"] if metrics.get("auc") is not None else []
    return ", ".join(parts) or f"loss {metrics['loss']:.4g}"


def headline_facts(summary: Mapping[str, Any], statement: Statement, *, out: Path | None) -> dict[str, str]:
    """A run in a few facts, as text by name: its best score, its statement, its rounds, and its folder if it has one.

    Arguments:
        summary: the content of `privacy.json`.
        statement: the certified one.
        out: the run's folder.
    """
    planned = "" if summary["rounds"] == summary["planned_rounds"] else f" of {summary['planned_rounds']}"
    scores = summary.get("metrics") or {"accuracy": summary["accuracy"]}
    best = next((name for name in ("accuracy", "r2", "loss") if scores.get(name) is not None), None)
    facts = {} if best is None else {best: f"{scores[best]:.2%}" if best == "accuracy" else f"{scores[best]:.4g}"}
    evaluation = summary.get("evaluation")
    if best is not None and evaluation is not None:
        facts = {
            name: f"{spell_score(name, scores[name])} ({spell_interval(name, evaluation)})"
            for name in _TITLES
            if scores.get(name) is not None
        }
    if (
        best is not None
        and beats_baseline(scores, summary.get("baseline") or {}, (evaluation or {}).get("intervals")) is False
    ):
        if separates_classes(scores):
            facts.setdefault("auc", f"{scores['auc']:.4g} (the accuracy, cut at one half, is that of a constant guess)")
        else:
            facts[best] += f", no better than a constant guess ({summary['baseline']['rule']})"
    facts |= {"privacy": _statement_in_short(statement), "rounds": f"{summary['rounds']}{planned}"}
    if (together := summary.get("across_runs")) is not None and together["runs"] > 1:
        facts["all runs"] = together["sentence"]
    return facts if out is None else {**facts, "folder": str(out)}


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """Facts as an HTML table with a caption, for a notebook; text is escaped."""
    left = "style='text-align: left'"
    rows = "".join(
        f"<tr><th {left}>{html.escape(key)}</th><td {left}>{html.escape(value)}</td></tr>"
        for key, value in facts.items()
    )
    return f"<table><caption>{html.escape(title)}</caption>{rows}</table>"


def _statement_in_short(statement: Statement) -> str:
    """A statement in one phrase: "(0.9, 1e-05)-DP per user, shuffle, certified"."""
    if statement.is_unbounded:
        return "no guarantee"
    numbers = f"({at_most(statement.eps)}, {at_most(statement.delta)})-DP"
    return f"{numbers} per {statement.unit.value}, {statement.trust.value}, {statement.verdict.value}"


def describe_protocol(protocol: protocols.Protocol) -> dict[str, Any]:
    """A protocol's name and settings as plain data, without the settings that are read off the data.

    Those may depend on private records, and what this function returns is published.
    """
    settings = dataclasses.asdict(protocol)  # type: ignore[call-overload]
    return {"name": protocol.name, **{key: settings[key] for key in settings if key not in protocol.read_off_data}}
