"""Settings chosen by training with several of them, under one statement that covers everything that was tried.

Every setting has its own plan. All trials get the noise at which what they show *together* meets the target:

- by `composition`, all rounds of a fixed number of trials, where whoever receives reports sees every trial;
- by `selection`, the best of a random number of trials, where a trusted curator publishes that one alone
  (docs/proofs/private-selection.md). Nothing about the others leaves this module: not even how many there were.

Trials are scored on the task's test records, which must be declared public: a score on private records would be a
release that nobody has accounted for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import secrets
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dovetail import _validate, accounting
from dovetail.accounting.releases import selection
from dovetail.data import Task
from dovetail.experiment.config import Config, parse, to_toml
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import Plan, prepare, protocol_of
from dovetail.experiment.result import Result
from dovetail.experiment.space import Space
from dovetail.experiment.training import run
from dovetail.guarantee import Guarantee, Quote, Record, trials
from dovetail.statements import NotApplicable, Trust

__all__ = ["TuningResult", "tune"]

_BITS, _CLOSE = 256, 1e-4  # of a uniform number; how close the noise comes to the smallest


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The chosen model, whose statement covers all trials, and what may be told of them."""

    result: Result
    record: Record
    facts: Mapping[str, Any]

    @property
    def best_setting(self) -> Mapping[str, Any]:
        """The setting of the chosen model."""
        return self.facts["chosen"]

    def to_json(self) -> dict[str, Any]:
        """The machine-readable summary: that of a run, and `tuning`."""
        return {**self.result.to_json(), "tuning": dict(self.facts)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tried:
    """A trial that has ended."""

    plan: Plan
    setting: Mapping[str, Any]
    result: Result
    score: float
    record: Record


class _Composition:
    """A fixed number of settings, each tried once, and all rounds of all of them counted."""

    name = "composition"

    def __init__(self, config: Config, space: Space, number: float | None) -> None:
        count = len(space.settings) if number is None else number
        if count != int(count) or not 1 <= count <= len(space.settings):
            raise ValueError(
                f"expected 1 to {len(space.settings)} trials, for each of the space's settings at most one, got {count}"
            )
        drawn = np.random.default_rng(config.seed).permutation(len(space.settings))[: int(count)]
        self.settings = tuple(space.settings[index] for index in sorted(drawn.tolist()))
        self.tuning = f"{_said(config, space)}; all {len(self.settings)} trials are counted"

    def combined(self, records: Sequence[Record]) -> Record:
        """What a record of every setting says of all trials."""
        return trials.compose(records, tuning=self.tuning)

    def drawn(self) -> tuple[int, ...]:
        """The settings to train with, by number."""
        return tuple(range(len(self.settings)))

    def stated(self, records: Sequence[Record], tried: Sequence[_Tried]) -> Record:
        """The rounds that the engine noted, of every trial."""
        return self.combined([one.record for one in tried])

    def facts(self, tried: Sequence[_Tried]) -> dict[str, Any]:
        """Everything was counted, so all of it may be told."""
        told = [{"setting": dict(one.setting), "accuracy": one.result.accuracy, "auc": one.result.auc} for one in tried]
        return {"trials": told, "mean_trials": None, "uploads": sum(one.result.uploads for one in tried)}


class _Selection:
    """The best of a random number of trials, each with a setting drawn at random; the others are forgotten."""

    name = "selection"

    def __init__(self, config: Config, space: Space, number: float | None, eta: float) -> None:
        self.settings = space.settings
        self.eta = eta
        self.gamma = selection.gamma_for(float(len(self.settings) if number is None else number), eta=eta)
        self.tuning = (
            f"{_said(config, space)}; each trial draws its setting at random, and the choice among them is counted"
        )

    def combined(self, records: Sequence[Record]) -> Record:
        """What a record of every setting says of the best of them."""
        return trials.best_of(records, eta=self.eta, gamma=self.gamma, tuning=self.tuning)

    def drawn(self) -> tuple[int, ...]:
        """The settings to train with, by number: as many and as secret as the theorem asks for."""
        count = selection.number_of_trials(Fraction(secrets.randbits(_BITS), 2**_BITS), eta=self.eta, gamma=self.gamma)
        return tuple(secrets.randbelow(len(self.settings)) for _ in range(count))

    def stated(self, records: Sequence[Record], tried: Sequence[_Tried]) -> Record:
        """All settings that might have been tried: which ones were is secret."""
        return self.combined(records)

    def facts(self, tried: Sequence[_Tried]) -> dict[str, Any]:
        """Nothing of the trials but how many there are on average; a time would tell which of them compiled."""
        mean = selection.expected_trials(eta=self.eta, gamma=self.gamma)
        return {"trials": None, "mean_trials": mean, "eta": self.eta, "gamma": self.gamma, "seconds_per_round": 0.0}


def tune(
    config: Config,
    space: Space,
    *,
    eps: float,
    public_test: bool,
    number: float | None = None,
    by: Literal["auto", "selection", "composition"] = "auto",
    eta: float = 0.0,
    score: Literal["accuracy", "auc"] = "accuracy",
    task: Task | None = None,
    out: Path | None = None,
) -> TuningResult:
    """Train with settings of a space, choose the best by its score on public records, and state what all of it costs.

    `number` is how many settings are tried: exactly, by composition (drawn by the config's seed; all unless given), and
    on average, by selection (as many as there are unless given), where `eta` shapes the law of that number.

    Guarantees:
        The statement is at most `eps`, and covers every trial; trials without a guarantee are refused before any runs.
        Refuses to score trials unless the test records are declared public.
        By selection, the result says nothing of trials that were not chosen.
        The run's ledger gives the statement again (`dovetail verify`).
    """
    _check(config, eps=eps, public_test=public_test, by=by, score=score)
    if out is not None:
        RunFolder.refuse_taken(out)
    config = _with(config, {"privacy.eps": eps})
    first = prepare(_with(config, space.settings[0]), task=task)
    if first.dataset.target != "classes" or (score == "auc" and first.dataset.num_classes != 2):
        raise ValueError(f"expected score='accuracy' of more than two classes, and classes, got score={score!r}")
    selects = by == "selection" or (by == "auto" and first.scope.trust is Trust.CURATOR)
    way = _Selection(config, space, number, eta) if selects else _Composition(config, space, number)
    configs = _calibrated([_with(config, one) for one in way.settings], way, eps=eps, task=task)
    prepared = functools.cache(lambda index: prepare(configs[index], task=task))
    planned = [plan.record(range(len(plan.rounds))) for plan in map(prepared, range(len(configs)))]
    tried = [_trained(prepared(index), way.settings[index], score) for index in way.drawn()]
    record = way.stated(planned, tried)
    return _concluded(record, tried, way, space, score=score, eps=eps, out=out)


def _trained(plan: Plan, setting: Mapping[str, Any], score: str) -> _Tried:
    result = run(plan)
    noted = plan.record_of(plan.engine.round_logs)
    return _Tried(plan=plan, setting=setting, result=result, score=_score(result, score), record=noted)


def _score(result: Result, name: str) -> float:
    """A number that orders all trials; what is not a number is the worst."""
    found = float(getattr(result, name))
    return -math.inf if math.isnan(found) else found


def _concluded(
    record: Record,
    tried: Sequence[_Tried],
    way: _Composition | _Selection,
    space: Space,
    *,
    score: str,
    eps: float,
    out: Path | None,
) -> TuningResult:
    """The best trial under the statement of all, written if there is a folder."""
    best = max(tried, key=lambda one: one.score)  # the first of equals, as if at random: settings are, too
    quote = Quote.of(best.plan.protocol.name, record, None)
    if not quote.certified.eps <= eps:
        raise RuntimeError(f"the trials together are not within eps={eps}, so nothing is certified and nothing written")
    told = way.facts(tried)
    result = dataclasses.replace(
        best.result,
        quote=quote,
        units=record.statements_by_unit(),
        uploads=told.pop("uploads", best.result.uploads),
        seconds_per_round=told.pop("seconds_per_round", best.result.seconds_per_round),
        out=out,
        provenance=None,  # its ledger is that of all trials
    )
    facts = {
        "by": way.name,
        "space": {key: list(values) for key, values in space.axes.items()},
        "chosen": dict(best.setting),
        "score": score,
        "public": f"the test records of {best.plan.config.task.name}",
        "rounds": result.rounds,
        **told,
    }
    tuned = TuningResult(result=result, record=record, facts=facts)
    if out is not None:
        stated = {**tuned.to_json(), **best.result.comes_from.told(out)}
        if way.name == "selection":
            del stated["seconds_per_round"]  # nothing is told of time
        RunFolder.create(out, to_toml(best.plan.config)).finish(stated, record, result.parameters, result.recipe)
    return tuned


def _calibrated(
    configs: Sequence[Config], way: _Composition | _Selection, *, eps: float, task: Task | None
) -> tuple[Config, ...]:
    """The same configs, each with its own noise times one factor, at which all trials together meet eps."""
    known = [_uncalibrated(one, task) for one in configs]
    refusals: list[NotApplicable] = []

    def noisy(factor: float) -> list[Guarantee]:
        return [dataclasses.replace(one, protocol=one.protocol.with_noise(noise * factor)) for one, noise in known]

    def eps_at(factor: float) -> float:
        try:
            return trials.bound(way.combined([one.record() for one in noisy(factor)])).eps
        except NotApplicable as refusal:
            refusals.append(refusal)
            return math.inf

    try:
        factor = accounting.smallest_noise(eps_at, eps=eps, tolerance=_CLOSE)
    except ValueError as error:
        if not refusals:
            raise
        hint = "; by composition, all trials are counted instead" if way.name == "selection" else ""
        raise NotApplicable(f"{refusals[-1]}{hint}") from error
    fixed = []
    for config, one in zip(configs, noisy(factor), strict=True):
        field = str(one.protocol.noise_field)
        noise = {f"protocol.{field}": getattr(one.protocol, field)}
        fixed.append(_with(config, {**noise, "privacy.eps": None}))
    return tuple(fixed)


def _uncalibrated(config: Config, task: Task | None) -> tuple[Guarantee, float]:
    """A setting's training before its noise is set, and the noise at which one trial alone would meet the target."""
    plan, protocol = prepare(config, task=task), protocol_of(config)
    if protocol.is_calibrated or plan.sampler.by_recipe:
        raise ValueError(
            f"expected a protocol whose noise can be calibrated and is not given, got protocol.name={protocol.name!r}"
        )
    value = float(getattr(plan.protocol, str(protocol.noise_field)))
    noise = value if protocol.noise_field == "noise_multiplier" else 1 / value
    return dataclasses.replace(plan.guarantee, protocol=protocol), noise


def _check(config: Config, *, eps: float, public_test: bool, by: str, score: str) -> None:
    _validate.positive(eps=eps)
    _validate.one_of(("auto", "selection", "composition"), by=by)
    _validate.one_of(("accuracy", "auc"), score=score)
    if not public_test:
        raise ValueError(
            "expected the test records, on which trials are scored, to be declared public (--public-test), got no "
            "declaration: a choice by private records that nobody accounts for gets no statement"
        )
    if config.noise != "os":
        raise ValueError(f"expected noise = 'os', for trials of one seed would share their noise, got {config.noise!r}")
    if config.privacy.stop != "eps" or config.diagnostics:
        raise ValueError("expected privacy.stop = 'eps' and no diagnostics of trials, got one of them")


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    return parse(msgspec.to_builtins(config), changes.items())


def _said(config: Config, space: Space) -> str:
    """What is left to assume of how settings were chosen."""
    return (
        f"everything but the choice among {len(space.settings)} settings of {', '.join(space.axes)} was fixed without "
        f"the private data, and trials were scored on the test records of {config.task.name}, which are public"
    )
