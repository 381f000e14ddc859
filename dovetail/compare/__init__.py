"""Every protocol at the same certified privacy: which learns most, who must be trusted for it, and what it costs.

A line-up (`dovetail/comparisons`) names for a model how each protocol is run: cohort, settings, clip and server step.
Noise is calibrated so that the same accountant certifies the same (eps, delta), for replacing one user, over the whole
training; then every protocol is trained for every seed. Costs are those of the deployed messages: each sealed on its
own, opened and added up by one core of the analyzer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dovetail import __version__, _validate, experiment, machine
from dovetail.compare._contenders import Contender, line_up, max_colluders, models_with_line_up, trust_in_words
from dovetail.compare._costs import Costs, bytes_in_words, costs, packed_size, sealed_size
from dovetail.compare._ranking import Comparison, Outcome, Run
from dovetail.data import Task
from dovetail.experiment.config import Config
from dovetail.files import make_folder
from dovetail.protocols import Protocol
from dovetail.statements import Neighbors, Statement, Trust, Unit

__all__ = [
    "Comparison",
    "Contender",
    "Costs",
    "Outcome",
    "Run",
    "bytes_in_words",
    "compare",
    "costs",
    "line_up",
    "models_with_line_up",
    "noise_settings",
    "packed_size",
    "sealed_size",
]


def compare(
    contenders: Sequence[Contender],
    *,
    task: str | Task,
    model: str,
    eps: float,
    delta: float,
    seeds: int,
    out: Path | None = None,
    observe: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train every contender for every seed.

    Arguments:
        contenders: the protocols with their configs (see `line_up`).
        task: the task, or its name.
        model: the name of the line-up's model.
        eps: what every private protocol keeps to, with `delta`.
        delta: see `eps`.
        seeds: trainings of each protocol.
        out: the folder to write to after each protocol, beside the others that lie there.
        observe: called with a text before each training.

    Guarantees:
        What is promised is at most (eps, delta) for replacing one user, or the comparison ends.
        A stopped comparison leaves what it found; more protocols can be added to it on the same terms.
    """
    _validate.at_least(1, seeds=seeds)
    own_task = None if isinstance(task, str) else task
    name = task if isinstance(task, str) else task.name
    comparison = Comparison(task=name, model=model, eps=eps, delta=delta, seeds=seeds)
    if out is not None:
        comparison = comparison.resume_from(out)
        make_folder(out)
        comparison.write(out)
    for contender in contenders:
        outcome = _train_and_measure(contender, own_task, seeds, observe)
        if outcome.run is not None and outcome.run.is_private:
            _refuse_unequal(outcome.protocol, outcome.run.certified, eps=eps, delta=delta)
        comparison = comparison.with_outcome(outcome)
        if out is not None:
            comparison.write(out)
    return comparison


def _train_and_measure(contender: Contender, task: Task | None, seeds: int, observe: Callable[[str], None]) -> Outcome:
    """Train a contender with the seeds 0 to `seeds` - 1, and measure its costs.

    Returns: its run, or the reason why there is none. Statements and costs are those of the first seed; they do not
    depend on it.
    """
    name = contender.protocol
    if contender.config is None:
        return Outcome(protocol=name, reason=contender.reason)
    config = contender.config
    results = []
    for seed in range(seeds):
        observe(f"{name}, seed {seed}")
        try:
            plan = experiment.prepare(_with_seed(config, seed), task=task)
        except ValueError as refusal:  # no noise meets the target, or a theorem does not apply
            return Outcome(protocol=name, reason=str(refusal))
        if plan.dataset.target == "number":
            raise ValueError("protocols are compared by accuracy, and the labels of this task are numbers")
        config = _with_noise(config, plan.sampler.protocol)
        results.append(experiment.run(plan, evaluate_every=plan.num_rounds))
    observe(f"{name}, costs")
    first = results[0]
    protocol = plan.sampler.protocol
    dim = plan.engine.dim
    return Outcome(
        protocol=name,
        run=Run(
            accuracies=tuple(result.metrics["accuracy"] for result in results),
            certified=first.statement.without_users(),
            local=first.quote.local.without_users(),
            shuffler=None if first.quote.shuffler is None else first.quote.shuffler.without_users(),
            trust=_trust_in_words(first.statement, protocol, dim),
            shufflers=protocol.layout(dim).shufflers,
            may_collude=max_colluders(protocol),
            costs=costs(protocol, plan.sampler.schedule.num_uploads_of(0), dim),
            rounds=first.rounds,
            seconds_per_round=first.seconds_per_round,
            settings=contender.config.protocol if protocol.budgets is not None else config.protocol,
            server_step=config.server.learning_rate,
            version=__version__,
            machine=machine.describe(),
            baseline=first.baseline.get("accuracy"),
        ),
    )


def _refuse_unequal(protocol: str, statement: Statement, *, eps: float, delta: float) -> None:
    """Refuse a statement for another unit or relation than replacing one user, or above (eps, delta)."""
    alike = statement.neighbors is Neighbors.REPLACE_ONE and statement.unit is Unit.USER
    if not alike or statement.eps > eps or statement.delta > delta:
        raise ValueError(
            f"{protocol!r} states {statement.headline()}, and what is compared is ({eps}, {delta})-DP for "
            "replacing one user"
        )


def _with_seed(config: Config, seed: int) -> Config:
    """The config with this seed, from which noise is derived too, so that the comparison can be repeated."""
    return msgspec.structs.replace(config, seed=seed, noise="seeded")


def _with_noise(config: Config, protocol: Protocol) -> Config:
    """The config with the protocol's noise, which was calibrated with the first seed: others need not search again."""
    return msgspec.structs.replace(config, protocol={**config.protocol, **noise_settings(protocol)})


def noise_settings(protocol: Protocol) -> dict[str, Any]:
    """The keys of [protocol] that give a calibrated protocol's noise, so that it is not calibrated again.

    Where users have budgets of their own, those hold the noise. Empty for a protocol without noise.
    """
    if protocol.noise_field is None:
        return {}
    scale = getattr(protocol, protocol.noise_field)
    return (
        {protocol.noise_field: scale}
        if scale is not None
        else {"budgets": protocol.budgets, protocol.noise_field: None}
    )


def _trust_in_words(statement: Statement, protocol: Protocol, dim: int) -> str:
    """Whom a user must trust, as a phrase; "everybody" where nothing is certified, shufflers and shares apart."""
    if statement.is_unbounded and statement.trust not in (Trust.SHUFFLE, Trust.SHARES):
        return "everybody"
    return trust_in_words(statement.trust, protocol, dim)
