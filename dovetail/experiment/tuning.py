"""Settings chosen by training with several of them, under one statement that covers everything that was tried.

Every setting has its own plan. All trials get the noise at which what they show *together* meets the target:

- by `composition`, all rounds of a fixed number of trials, where whoever receives reports sees every trial;
- by `selection`, the best of a random number of trials, where a trusted curator publishes that one alone
  (docs/proofs/private-selection.md). Nothing about the others leaves this module: not even how many there were.

Trials are scored on the task's test records, which must be declared public. Any score will do then, for it is computed
from a model that is released and from public records. A score on private records would be a release of its own: it has
no noise here, and one person could move it by any amount.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from dovetail import _validate, accounting
from dovetail.accounting.releases import selection
from dovetail.data import Dataset, Loss, Metric, Task
from dovetail.engine.scoring import score_names
from dovetail.experiment.config import Config, parse, to_toml
from dovetail.experiment.declared import UNNAMED
from dovetail.experiment.folder import RunFolder
from dovetail.experiment.preparation import Plan, prepare, protocol_of
from dovetail.experiment.result import Result
from dovetail.experiment.spending import Account, open_account_of_plan
from dovetail.experiment.training import run, start_of
from dovetail.guarantee import Guarantee, Quote, Record, trials
from dovetail.statements import NotApplicable, Trust

__all__ = ["Space", "TuningResult", "parse_space", "run_trials", "tune"]

_BITS = 256  # of the uniform number from which the number of trials is drawn
_TOLERANCE = 1e-4  # by how much, relatively, the noise may exceed the smallest that meets the target

_TUNABLE = ("client", "cohort", "protocol", "server", "task.features", "task.model", "task.symmetric", "task.whiten")
_FIXED = ("protocol.name", "cohort.kind", "cohort.colluders")  # keys of tunable sections that say what is promised
_MOST_SETTINGS = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """The settings to choose from: all combinations of the values of some config keys.

    Arguments:
        axes: for each key, by its dotted path, the values to try.

    Guarantees:
        Refuses keys that say whose data are protected, or how well, rather than how to train.
    """

    axes: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        if not self.axes or not all(self.axes.values()):
            raise ValueError(f"expected a space with keys and values, got axes={dict(self.axes)!r}")
        for key in self.axes:
            if key in _FIXED or not any(key == name or key.startswith(f"{name}.") for name in _TUNABLE):
                raise ValueError(f"expected a key that says how to train (of {', '.join(_TUNABLE)}), got {key!r}")
        if (count := math.prod(len(values) for values in self.axes.values())) > _MOST_SETTINGS:
            raise ValueError(f"expected a space of at most {_MOST_SETTINGS} settings, got {count}")

    @property
    def settings(self) -> tuple[Mapping[str, Any], ...]:
        """All combinations, each as config keys with their values."""
        return tuple(dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values()))


def parse_space(texts: Iterable[str]) -> Space:
    """The space of ``key.path=value,value,...``, one text for each key; values are read as TOML, or else as text."""
    axes: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, separator, values = text.partition("=")
        key = key.strip()
        if not separator or not key or not values.strip() or key in axes:
            raise ValueError(f"expected --space key.path=value,value,... once for each key, got {text!r}")
        try:
            axes[key] = tuple(tomllib.loads(f"values = [{values}]")["values"])
        except tomllib.TOMLDecodeError:
            axes[key] = tuple(value.strip() for value in values.split(","))
    return Space(axes=axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The chosen model, whose statement covers all trials, and the rounds of all trials in privacy terms (`record`)."""

    result: Result
    record: Record

    @property
    def facts(self) -> Mapping[str, Any]:
        """What may be told of the trials: the value of "tuning" in `privacy.json`."""
        return self.result.tuning or {}

    @property
    def best_setting(self) -> Mapping[str, Any]:
        """The setting of the chosen model."""
        return self.facts["chosen"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Trial:
    """A trial that has ended: its plan, result and score, and the record of its rounds by the engine's own notes."""

    plan: Plan
    setting: Mapping[str, Any]
    result: Result
    score: float
    record: Record


class _Composition:
    """The strategy that tries a fixed number of settings once each, and counts all rounds of all of them.

    It has the same methods as `_Selection`. `tuning` is what its statement assumes of the choice.
    """

    name = "composition"

    def __init__(self, config: Config, space: Space, number: float | None) -> None:
        count = len(space.settings) if number is None else number
        if count != int(count) or not 1 <= count <= len(space.settings):
            raise ValueError(
                f"expected 1 to {len(space.settings)} trials, for each of the space's settings at most one, got {count}"
            )
        sample = np.random.default_rng(config.seed).permutation(len(space.settings))[: int(count)]
        self.settings = tuple(space.settings[index] for index in sorted(sample.tolist()))
        self.tuning = f"{_tuning_assumption(config, space)}; all {len(self.settings)} trials are counted"

    def combine(self, records: Sequence[Record]) -> Record:
        """One record for all trials together.

        Arguments:
            records: the rounds of each setting, in the order of `settings`.
        """
        return trials.record_of_all(records, tuning=self.tuning)

    def draw_settings(self) -> tuple[int, ...]:
        """The indices in `settings` of the trials to train: each setting once."""
        return tuple(range(len(self.settings)))

    def record(self, records: Sequence[Record], trials: Sequence[_Trial]) -> Record:
        """The record to state: of every trial, the rounds as the engine ran them; `records`, as planned, do not count.

        Arguments:
            records: the planned rounds of each setting.
            trials: the trials that were trained.
        """
        return self.combine([trial.record for trial in trials])

    def facts(self, trials: Sequence[_Trial]) -> dict[str, Any]:
        """What may be told of the trials: everything, for everything was counted."""
        listed = [
            {
                "setting": dict(trial.setting),
                "accuracy": trial.result.accuracy,
                "auc": trial.result.auc,
                "score": trial.score if math.isfinite(trial.score) else None,
            }
            for trial in trials
        ]
        return {"trials": listed, "mean_trials": None, "uploads": sum(trial.result.uploads for trial in trials)}


class _Selection:
    """The strategy that publishes the best of a random number of trials, each with a setting drawn at random.

    `eta` and `gamma` are the parameters of the law of the number of trials (docs/proofs/private-selection.md).
    """

    name = "selection"

    def __init__(self, config: Config, space: Space, number: float | None, eta: float) -> None:
        self.settings = space.settings
        self.eta = eta
        self.gamma = selection.gamma_for(float(len(self.settings) if number is None else number), eta=eta)
        self.tuning = (
            f"{_tuning_assumption(config, space)}; each trial draws its setting at random, and the choice among them "
            "is counted"
        )

    def combine(self, records: Sequence[Record]) -> Record:
        """One record for the best of the trials; covers every setting, for which of them were tried is secret.

        Arguments:
            records: the rounds of each setting, in the order of `settings`.
        """
        return trials.record_of_best(records, eta=self.eta, gamma=self.gamma, tuning=self.tuning)

    def draw_settings(self) -> tuple[int, ...]:
        """The indices in `settings` of the trials to train: a random number of them, each uniform, from secret bits."""
        count = selection.trials_at_quantile(
            Fraction(secrets.randbits(_BITS), 2**_BITS), eta=self.eta, gamma=self.gamma
        )
        return tuple(secrets.randbelow(len(self.settings)) for _ in range(count))

    def record(self, records: Sequence[Record], trials: Sequence[_Trial]) -> Record:
        """The record to state: of all settings that might have been tried, as planned, whatever `trials` were."""
        return self.combine(records)

    def facts(self, trials: Sequence[_Trial]) -> dict[str, Any]:
        """What may be told of the trials: how many there are on average, and no more.

        Seconds are set to 0: a time would tell whether the chosen trial compiled, and so was the first.
        """
        mean = selection.expected_trials(eta=self.eta, gamma=self.gamma)
        return {"trials": None, "mean_trials": mean, "eta": self.eta, "gamma": self.gamma, "seconds_per_round": 0.0}


def tune(
    task: str | Task | Dataset,
    *,
    space: Mapping[str, Sequence[Any]],
    eps: float,
    score: str | Metric | None = None,
    public_test: bool = False,
    trials: float | None = None,
    by: Literal["auto", "selection", "composition"] = "auto",
    eta: float = 0.0,
    model: Any = None,
    loss: str | Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    protocol: str = "dp_fl",
    delta: float | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    ledger: str | Path | bool | None = None,
    ceiling: float | tuple[float, float] | None = None,
) -> Result:
    """Train with several settings and return the best model, under one statement that covers all that was tried.

    Arguments:
        task: what to train on, as `train` takes it.
        space: the settings to choose from, all combinations of these: by config key the values to try, for example
            ``{"server.learning_rate": [0.1, 0.3]}``. Keys say how to train (of client, cohort, protocol, server, task).
        eps: the target for all trials together.
        score: what trials are compared by: "accuracy", "auc", "macro_f1", "r2", "rmse", "mae" or "loss", as far as the
            data have it (the last three: the smaller the better), the name of one of your `metrics`, or a function like
            these, ``(outputs, labels) -> number``, the larger the better. By default "r2" for numbers, else "accuracy".
        public_test: declares that the test records, on which trials are scored, are public. Without it tuning is
            refused: a score of private people would be a release without noise.
        trials: how many settings are tried: exactly so many by composition, on average by selection; as many as there
            are unless given.
        by: "selection" of the best of a secret random number of trials, for a trusted curator; "composition" of all;
            "auto" takes selection where there is a curator.
        eta: by selection, the shape of the law of the number of trials.
        model, loss, metrics, protocol, delta, settings: as of `train`; settings are what all trials have in common.
        ledger, ceiling: as of `train`; all trials together are one entry of the ledger.
        out: the folder to write the chosen run to; without one nothing is written.

    Guarantees:
        The statement is at most `eps`, and covers every trial and the choice (docs/tutorials/tuning.md).
        By selection, the result says nothing of trials that were not chosen.

    `Result.tuning` says which setting was chosen and, by composition, what each of the trials scored.
    """
    for key, values in space.items():
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            raise ValueError(f"expected a list of values to try in space={{{key!r}: [...]}}, got {values!r}")
    axes = Space(axes={key: tuple(values) for key, values in space.items()})
    if both := sorted(axes.axes.keys() & (settings or {}).keys()):
        raise ValueError(f"expected {both[0]!r} in settings or in space, got it in both")
    name = score if isinstance(score, str | None) else getattr(score, "__name__", "score")
    if callable(score):
        metrics = {**(metrics or {}), str(name): score}
    start = start_of(
        task,
        model=model,
        loss=loss,
        metrics=metrics,
        protocol=protocol,
        eps=eps,
        delta=delta,
        settings={**(settings or {}), **axes.settings[0]},
    )
    config = start.config
    if start.open_keys:
        chosen = prepare(config, task=start.task, open_keys=start.open_keys).config
        config = msgspec.structs.replace(config, server=chosen.server, protocol=chosen.protocol)
    found = run_trials(
        config,
        axes,
        eps=eps,
        public_test=public_test,
        number=trials,
        by=by,
        eta=eta,
        score=name,
        task=start.task,
        out=None if out is None else Path(out),
        ledger=ledger,
        ceiling=ceiling,
    )
    return found.result


def run_trials(
    config: Config,
    space: Space,
    *,
    eps: float,
    public_test: bool,
    number: float | None = None,
    by: Literal["auto", "selection", "composition"] = "auto",
    eta: float = 0.0,
    score: str | None = None,
    task: Task | None = None,
    out: Path | None = None,
    ledger: str | Path | bool | None = None,
    ceiling: float | str | Sequence[float] | None = None,
) -> TuningResult:
    """Train with settings of a space, choose the best by its score on public records, and state what all of it costs.

    Arguments:
        config: what all trials have in common; its noise is left open.
        space: the settings to choose from.
        eps: the target for all trials together, at the config's delta.
        public_test: declares that the test records, on which trials are scored, are public.
        number: how many settings are tried: by composition exactly so many (drawn by the config's seed; all unless
            given), by selection so many on average (as many as there are unless given).
        by: "composition", "selection", or "auto": selection where a trusted curator alone sees the trials.
        eta: by selection, the shape of the law of the number of trials.
        score: the name of what trials are compared by, of which more is better but of losses and errors; by default R2
            of numbers, else accuracy.
        task: the task, where it is not found by the config's name of it.
        out: the folder to write the chosen run to, if any.
        ledger: the ledger of all runs on the same people, as `spending.open_account` reads it; all trials together are
            one entry.
        ceiling: what all runs in it may spend together; by default the config's `privacy.ceiling`.

    Guarantees:
        The statement is at most `eps`, and covers every trial; trials without a guarantee are refused before any runs.
        Refuses to score trials unless the test records are declared public.
        By selection, the result says nothing of trials that were not chosen.
        The run's ledger gives the statement again (`dovetail verify`).
    """
    _check_arguments(config, eps=eps, public_test=public_test, by=by)
    if out is not None:
        RunFolder.refuse_taken(out)
    ceiling = config.privacy.ceiling if ceiling is None else ceiling
    config = _with_changes(config, {"privacy.eps": eps, "privacy.ceiling": None})  # for all trials, not for each
    first = prepare(_with_changes(config, space.settings[0]), task=task)
    score = score or ("r2" if first.dataset.target == "number" else "accuracy")
    names = (*score_names(first.dataset), *first.task.metrics)
    if score not in names:
        raise ValueError(
            f"expected a score that these data have, one of {', '.join(names)}, or a function of yours, got "
            f"score={score!r}"
        )
    selects = by == "selection" or (by == "auto" and first.guarantee.scope.trust is Trust.CURATOR)
    strategy = _Selection(config, space, number, eta) if selects else _Composition(config, space, number)
    settings = [_with_changes(config, setting) for setting in strategy.settings]
    configs = _calibrate_trials(settings, strategy, eps=eps, task=task)
    prepared = functools.cache(lambda index: prepare(configs[index], task=task))
    planned = [plan.record(range(plan.num_rounds)) for plan in map(prepared, range(len(configs)))]
    account = open_account_of_plan(first, ledger=ledger, ceiling=ceiling, what="tuning", out=out)
    account.reserve(strategy.combine(planned))
    finished = [_run_trial(prepared(index), strategy.settings[index], score) for index in strategy.draw_settings()]
    record = strategy.record(planned, finished)
    tuning = _publish_best(record, finished, strategy, space, score=score, eps=eps, out=out, account=account)
    account.settle(record)
    return tuning


def _run_trial(plan: Plan, setting: Mapping[str, Any], score: str) -> _Trial:
    """Run one trial; its record holds the rounds as the engine ran them."""
    result = run(plan, ledger=False)  # all trials are one entry
    record = plan.guarantee.record([log.cohort for log in plan.engine.round_logs])
    return _Trial(plan=plan, setting=setting, result=result, score=_score_of_result(result, score), record=record)


_LESS_IS_BETTER = ("loss", "rmse", "mae")


def _score_of_result(result: Result, name: str) -> float:
    """The result's score under this name; NaN where it has none."""
    score = result.metrics.get(name)
    return math.nan if score is None else float(score)


def _as_larger_is_better(score: float, name: str) -> float:
    """A number that is larger the better a score of this name is; -inf for a score that is not a number."""
    if math.isnan(score):
        return -math.inf
    return -score if name in _LESS_IS_BETTER else score


def _publish_best(
    record: Record,
    trials: Sequence[_Trial],
    strategy: _Composition | _Selection,
    space: Space,
    *,
    score: str,
    eps: float,
    out: Path | None,
    account: Account,
) -> TuningResult:
    """The best trial under the statement of all trials, written to `out` if that is given.

    Arguments:
        record: what is stated of all trials together.
        trials: the trials that were trained, at least one.
        account: their place in the ledger of all runs on the same people.
    """
    # the first of equals, as if at random: settings are, too
    best = max(trials, key=lambda trial: _as_larger_is_better(trial.score, score))
    quote = Quote.from_record(best.plan.sampler.protocol.name, record, None)
    if not quote.certified.eps <= eps:
        raise RuntimeError(f"the trials together are not within eps={eps}, so nothing is certified and nothing written")
    facts = strategy.facts(trials)
    replaced = {key: facts.pop(key) for key in ("uploads", "seconds_per_round") if key in facts}
    result = dataclasses.replace(
        best.result,
        quote=quote,
        units=record.statements_by_unit(),
        **replaced,
        out=out,
        across_runs=account.total_with(record),
        provenance=None,  # its ledger is that of all trials
        tuning={
            "by": strategy.name,
            "space": {key: list(values) for key, values in space.axes.items()},
            "chosen": dict(best.setting),
            "score": score,
            "public": f"the test records of {_data_name(best.plan.config)}",
            "rounds": best.result.rounds,
            **facts,
        },
    )
    if out is not None:
        stated = {**result.to_json(), **best.result.required_provenance.facts(out)}
        if strategy.name == "selection":
            del stated["seconds_per_round"]  # nothing is told of time
        RunFolder.create(out, to_toml(best.plan.config)).finish(stated, record, result.parameters, result.recipe)
    return TuningResult(result=result, record=record)


def _data_name(config: Config) -> str:
    """What a sentence calls the data of a config."""
    return "the data" if config.task.name == UNNAMED else config.task.name


def _calibrate_trials(
    configs: Sequence[Config], strategy: _Composition | _Selection, *, eps: float, task: Task | None
) -> tuple[Config, ...]:
    """The same configs with noise, at which all trials together meet eps.

    Each trial gets the noise with which it would meet eps alone, times a factor that is the same for all trials.
    """
    before = [_guarantee_and_noise(config, task) for config in configs]
    refusals: list[NotApplicable] = []

    def guarantees_at(factor: float) -> list[Guarantee]:
        return [
            dataclasses.replace(guarantee, protocol=guarantee.protocol.with_noise(noise * factor))
            for guarantee, noise in before
        ]

    def eps_at(factor: float) -> float:
        try:
            return trials.bound(strategy.combine([guarantee.record() for guarantee in guarantees_at(factor)])).eps
        except NotApplicable as refusal:
            refusals.append(refusal)
            return math.inf

    try:
        factor = accounting.smallest_noise(eps_at, eps=eps, tolerance=_TOLERANCE)
    except ValueError as error:
        if not refusals:
            raise
        hint = "; by composition, all trials are counted instead" if strategy.name == "selection" else ""
        raise NotApplicable(f"{refusals[-1]}{hint}") from error
    fixed = []
    for config, guarantee in zip(configs, guarantees_at(factor), strict=True):
        field = str(guarantee.protocol.noise_field)
        noise = {f"protocol.{field}": getattr(guarantee.protocol, field)}
        fixed.append(_with_changes(config, {**noise, "privacy.eps": None}))
    return tuple(fixed)


def _guarantee_and_noise(config: Config, task: Task | None) -> tuple[Guarantee, float]:
    """A setting's guarantee without its noise, and the noise at which this trial alone would meet the target.

    Noise is a number that grows with the noise: the noise multiplier, or 1 / eps_local. ValueError where the noise is
    given, or is none to calibrate.
    """
    plan = prepare(config, task=task)
    protocol = protocol_of(config)
    if protocol.is_calibrated or plan.sampler.is_noise_set_by_data:
        raise ValueError(
            f"tuning sets the noise of every trial itself: leave out the noise of {protocol.name!r}, or choose a "
            "protocol that has noise to calibrate"
        )
    value = float(getattr(plan.sampler.protocol, str(protocol.noise_field)))
    noise = value if protocol.noise_field == "noise_multiplier" else 1 / value
    return dataclasses.replace(plan.guarantee, protocol=protocol), noise


def _check_arguments(config: Config, *, eps: float, public_test: bool, by: str) -> None:
    """Refuse arguments of `tune` under which no statement could be made."""
    _validate.positive(eps=eps)
    _validate.one_of(("auto", "selection", "composition"), by=by)
    if not public_test:
        raise ValueError(
            "trials are scored on the test records, which must be declared public: pass public_test=True "
            "(--public-test) if they are. Scores have no noise, so that a choice by private records gets no statement"
        )
    if config.task.evaluate != "public":
        raise ValueError(
            "tuning scores every trial on public test records, got task.evaluate = 'private': leave that out, and "
            "train with the chosen settings on other people"
        )
    if config.noise != "os":
        raise ValueError(f"tuning needs noise = 'os', got {config.noise!r}: trials of one seed would share their noise")
    if config.privacy.stop != "eps":
        raise ValueError(f"tuning needs privacy.stop = 'eps', got {config.privacy.stop!r}")
    if config.diagnostics:
        raise ValueError("tuning needs diagnostics = false: nothing may be seen of trials but what is accounted for")


def _with_changes(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with other values for some keys, by their dotted paths."""
    return parse(msgspec.to_builtins(config), changes.items())


def _tuning_assumption(config: Config, space: Space) -> str:
    """What a tuned statement still assumes of how settings were chosen, as a sentence."""
    return (
        f"everything but the choice among {len(space.settings)} settings of {', '.join(space.axes)} was fixed without "
        f"the private data, and trials were scored on the test records of {_data_name(config)}, which are public"
    )
