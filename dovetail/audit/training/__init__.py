"""The audit of a whole training: canaries in one real run, and what can be said of their coins afterwards.

The plan is made with all canaries in it and run by the engine, round by round; half of them are in the other world.

- *white-box*: the attacker sees every model, and so every released sum. It takes off what all others add
  (`attacker`), and reads off the rest how far each canary's own clipped update is in it: the mean of the coins
  given the sums, were the noise Gaussian and independent between rounds.
- *black-box*: the attacker sees the last model alone, and compares the canaries' losses with those of a model that it
  trains itself, on all other data, with half of each canary and without noise.

Scores need no proof: a bad one makes the bound small, never wrong. The bound is that of `one_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from dovetail import _validate
from dovetail.audit.bounds import LowerBound
from dovetail.audit.training import one_run
from dovetail.audit.training.attacker import Attacker, AttackerView
from dovetail.audit.training.canaries import Canaries
from dovetail.data import Task
from dovetail.engine.devices import to_host
from dovetail.experiment.config import Config
from dovetail.experiment.preparation import Plan, prepare, protocol_of, rounds_due
from dovetail.experiment.spending import open_account_of_plan
from dovetail.protocols.subjects import require_item_level
from dovetail.statements import Neighbors, Statement, Unit

__all__ = ["ATTACKS", "TrainingAudit", "audit"]

ATTACKS = ("white-box", "black-box")
_SHARES = (10, 5, 2, 1)  # of the coins a tenth, a fifth, half or all are guessed, unless the caller says how many
_COINS = 2**31  # no other draw of a run starts from this number: seeds are smaller
_ENOUGH_ROOM = 30  # coordinates, beyond one for each canary, from which a variance can be estimated
_LEAST_NOISE = 1e-3  # of a canary's update, where there is none: keeps the normal equations solvable


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingAudit:
    """What an attack on one training found, beside what is certified for the same training.

    Of `canaries` coins `guesses` were guessed, and `right` of the guesses were right.
    """

    bound: LowerBound
    statement: Statement
    attack: str
    canaries: int
    guesses: int
    right: int

    @property
    def is_consistent(self) -> bool:
        """Whether the attack found no larger eps than is certified."""
        return self.bound.eps <= self.statement.eps

    def to_json(self) -> dict[str, Any]:
        """Plain data; `certified` is the statement of the run that was attacked."""
        return {
            "eps_lower": self.bound.eps,
            "unbounded": self.bound.is_unbounded,
            "delta": self.bound.delta,
            "confidence": self.bound.confidence,
            "attack": self.attack,
            "canaries": self.canaries,
            "guesses": self.guesses,
            "right": self.right,
            "theorem": dataclasses.asdict(one_run.THEOREM),
            "certified": self.statement.to_json(),
            "consistent": self.is_consistent,
        }


def audit(
    config: Config,
    *,
    canaries: int,
    attack: Literal["white-box", "black-box"] = "white-box",
    confidence: float = 0.95,
    guesses: int | None = None,
    seed: int = 0,
    task: Task | None = None,
    ledger: str | Path | bool | None = None,
) -> TrainingAudit:
    """Run the training of this config once with so many canaries in it, attack it, and bound its eps from below.

    Arguments:
        attack: whether the attacker sees every model, or the last one alone.
        guesses: how many coins are guessed; without it several numbers are tried and paid for.
        seed: replaces the config's own, and tosses the coins.
        task: the task to train; the config's own unless given.
        ledger: the ledger of all runs on the same people, as `spending.open_account` reads it. The training counts as
            one without a guarantee, for its noise comes from a seed.

    Guarantees:
        If what is certified holds, the result is `consistent` with probability at least `confidence`.
        The certified statement is that of the run with the canaries in it, whatever their coins.
    """
    _validate.one_of(ATTACKS, attack=attack)
    _validate.integer(canaries=canaries, seed=seed)
    _validate.at_least(20, canaries=canaries)
    _validate.in_interval(0, 2**31 - 1, seed=seed)
    _validate.in_open_interval(0.5, 1, confidence=confidence)
    numbers = tuple(canaries // share for share in _SHARES) if guesses is None else (guesses,)
    for number in numbers:
        _validate.integer(guesses=number)
        _validate.in_interval(1, canaries, guesses=number)
    if attack == "white-box":
        _refuse_hidden_steps(config)
    config = msgspec.structs.replace(config, seed=seed, noise="seeded", diagnostics=False)
    hidden = _make_canaries(config, canaries)
    plan = prepare(config, task=task, guests=hidden)
    guarantee = plan.guarantee
    if guarantee.target_unit is not guarantee.scope.unit:
        raise ValueError(
            f"an attack on {guarantee.protocol.name!r} needs privacy.unit={guarantee.scope.unit.value!r}, the unit "
            f"that it protects, got {guarantee.target_unit.value!r}"
        )
    account = open_account_of_plan(plan, ledger=ledger, ceiling=config.privacy.ceiling, what="audit")
    account.reserve(plan.record(range(plan.num_rounds)))
    released: list[int] = []
    scores = (_score_white_box if attack == "white-box" else _score_black_box)(plan, hidden, released)
    account.settle(record := plan.record(released))
    statement = record.certified_statement()
    tried = {number: _count_right(scores, hidden.coins, number) for number in numbers}
    number, bound = one_run.best_bound_of_guesses(
        tried,
        canaries=canaries,
        delta=statement.delta,
        confidence=confidence,
        attack=f"{attack} attack on {canaries} canary {_plural_of_unit(hidden.unit)} of one training",
    )
    return TrainingAudit(
        bound=bound, statement=statement, attack=attack, canaries=canaries, guesses=number, right=tried[number]
    )


def _count_right(scores: np.ndarray, coins: np.ndarray, guesses: int) -> int:
    """How many of `guesses` guesses are right, made about the canaries whose scores are farthest from the mean.

    A score above the mean is taken for True, one below for False.
    """
    centred = scores - scores.mean()
    guessed = np.argsort(-np.abs(centred), kind="stable")[:guesses]
    return int(np.sum(coins[guessed] == (centred[guessed] > 0)))


def _plural_of_unit(unit: Unit) -> str:
    return {Unit.USER: "users", Unit.SUBJECT: "subjects", Unit.ITEM: "records"}[unit]


def _refuse_hidden_steps(config: Config) -> None:
    """Refuse server optimizers whose steps do not show the released sum."""
    if config.server.optimizer not in ("sgd", "ridge"):  # of moments, the sum itself is what is released
        raise ValueError(
            "a white-box attack reads sums off the steps of models and needs server.optimizer = 'sgd', "
            f"got {config.server.optimizer!r}"
        )


def _make_canaries(config: Config, count: int) -> Canaries:
    """The canaries that fit what the config protects, and under which relation."""
    settings = config.protocol
    protocol = protocol_of(config)
    unit = protocol.protects
    items = 1
    if protocol.samples == "records":
        items = require_item_level(protocol).items_per_subject or 1
    clip = settings.get("clip_norm", settings.get("clip"))
    return Canaries(
        coins=np.random.default_rng((_COINS, config.seed)).random(count) < 0.5,
        unit=unit,
        swapped=unit is Unit.USER and Neighbors(config.privacy.neighbors) is Neighbors.REPLACE_ONE,
        seed=config.seed,
        items=items,
        items_per_user=settings.get("items_per_user"),
        clip_norm=None if isinstance(clip, str) else clip,
        clip_value=settings.get("clip_value"),
        step=1.0 if config.client.update in ("fedsgd", "moments") else config.client.learning_rate,
    )


def _train(plan: Plan, hidden: Canaries, released: list[int]) -> Iterator[AttackerView]:
    """Train as any run does, and show what an observer of every model sees, a view for each released round.

    Arguments:
        released: the numbers of the rounds that were released; filled on the way.
    """
    training = plan.engine.start()
    for index, users in rounds_due(plan, released):
        if len(users) < plan.sampler.schedule.min_size:
            training = plan.skip(training, index)
            continue
        before = to_host(training.params).copy()  # a step consumes what it starts from
        seen = plan.sampler.protocol.public_state(training.protocol), training.server
        state, server = jax.tree.map(lambda leaf: to_host(leaf).copy(), seen)
        there = (
            users
            if plan.sampler.protocol.shuffled
            else hidden.contributing_users(users, plan.sampler.schedule.population)
        )
        training = plan.step(training, index, there)
        released.append(index)
        yield AttackerView(index, users, before, to_host(training.params).copy(), state, server)


def _score_white_box(plan: Plan, hidden: Canaries, released: list[int]) -> np.ndarray:
    """A score for each canary: the mean of its coin (+1 or -1) given all released sums, as if noise were Gaussian.

    Half the difference of a canary's two updates is the column of a linear model, its coin the coefficient, with a
    standard normal prior. The normal equations are summed up over rounds: `precision` @ means = `evidence`.
    """
    attacker = Attacker(plan, hidden)
    precision = np.eye(hidden.count)
    evidence = np.zeros(hidden.count)
    for view in _train(plan, hidden, released):
        weights = attacker.canary_weights(view).astype(np.float32)
        there = np.flatnonzero(weights)
        middle, half = attacker.mean_and_half_difference_of_worlds(view)
        half = weights[there, None] * half[there]
        rest = attacker.released_sum(view) - attacker.sum_of_others(view) - weights[there] @ middle[there]
        rest = rest.astype(np.float32)  # as the updates are: their products need no more
        products = (half @ half.T).astype(np.float64)
        match = (half @ rest).astype(np.float64)
        variance = _estimate_noise_variance(rest, products, match, planned=attacker.noise_std(view) ** 2)
        precision[np.ix_(there, there)] += products / variance
        evidence[there] += match / variance
    return np.linalg.solve(precision, evidence)


def _estimate_noise_variance(residual: np.ndarray, products: np.ndarray, match: np.ndarray, *, planned: float) -> float:
    """The variance of the noise on a coordinate, estimated from what no mixture of canaries explains.

    The real noise, not the planned one, which may be wrong. Where there are hardly more coordinates than canaries
    nothing is left to estimate from, and the planned variance is taken.

    Arguments:
        residual: the released sum without what is known of it, (dim,).
        products: inner products of the canaries' updates with each other.
        match: their inner products with `residual`.
        planned: the variance that the plan's noise has.
    """
    least = _LEAST_NOISE * float(np.trace(products)) / max(1, len(products)) or 1.0
    room = len(residual) - len(products)
    if room < _ENOUGH_ROOM:
        return max(planned, least)
    ridge = least * 1e-3 * np.eye(len(products))
    explained = float(match @ np.linalg.solve(products + ridge, match))
    return max((float(residual @ residual) - explained) / room, least)


def _score_black_box(plan: Plan, hidden: Canaries, released: list[int]) -> np.ndarray:
    """A score for each canary: how much lower its loss in the last model is than in one trained with half of each.

    Of canaries that have other records in their second world, the same number for these is subtracted.
    """
    attacker = Attacker(plan, hidden)
    last = expected = jnp.asarray(to_host(plan.engine.start().params))
    momentum = attacker.server.init(expected)
    state = plan.sampler.protocol.init(plan.engine.dim)
    for view in _train(plan, hidden, released):
        last = jnp.asarray(view.after)
        own = view._replace(before=expected, state=state)
        mean = (
            attacker.sum_of_others(own)
            + attacker.canary_weights(own) @ attacker.mean_and_half_difference_of_worlds(own)[0]
        )
        step = jnp.asarray(mean / attacker.divisor(own), jnp.float32)
        expected, momentum = attacker.server.step(expected, momentum, step)
    rows, other = hidden.record_numbers(len(plan.dataset.labels))
    lower = attacker.losses(expected, rows) - attacker.losses(last, rows)
    return lower if other is None else lower - attacker.losses(expected, other) + attacker.losses(last, other)
