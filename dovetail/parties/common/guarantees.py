"""What a task guarantees a user: statements of a `Guarantee`, as `dovetail account protocol` prints them.

A small part of delta is set aside for what sampling on a computer differs from the law that is accounted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dovetail import _validate, protocols
from dovetail._structs import resolve_fields
from dovetail.guarantee import Guarantee, Spread
from dovetail.parties.common.task import TrainingTask, cohort_of
from dovetail.statements import Spent, Statement, no_guarantee

__all__ = ["calibrate_noise", "certify_task"]

_LOCK = threading.Lock()
_OWN_PLACES = "every user has a place in the list of budgets of its own: whoever enrols users gives no number twice"
_SAMPLING_SHARE = 1e-6  # of delta: for what sampling on a computer is off by


def calibrate_noise(
    *,
    protocol: str,
    settings: Mapping[str, Any],
    dim: int,
    rounds: int,
    min_clients: int,
    max_clients: int,
    colluders: int,
    eps: float | None,
    delta: float,
    aggregators: int | None = None,
) -> dict[str, Any]:
    """A protocol's settings with their noise: as given, or such that all rounds together cost at most `eps`.

    Arguments:
        protocol: name of the protocol.
        settings: its settings, with or without noise.
        dim: coordinates of a report.
        rounds: number of rounds.
        min_clients: users of a round, at least, which is what noise is calibrated for.
        max_clients: users of a round, at most.
        colluders: users of a round that may be fake or the adversary's.
        eps: budget of all rounds together; needed where `settings` have no noise.
        delta: the same.
        aggregators: number of aggregators, if there are any.
    """
    built = protocols.build(protocol, settings)
    if built.is_calibrated:
        return dict(settings)
    if eps is None or built.noise_field is None:
        raise ValueError(f"give the budget, privacy.eps, or the noise, protocol.{built.noise_field}: one is needed")
    training = _guarantee(
        built,
        cohort_of(min_clients, max_clients, colluders, aggregators=aggregators),
        rounds,
        dim=dim,
        delta=delta * (1 - _SAMPLING_SHARE),
    )
    return {**settings, built.noise_field: getattr(training.calibrate(eps).protocol, built.noise_field)}


def _guarantee(
    protocol: protocols.Protocol,
    cohort: protocols.Cohort,
    rounds: int,
    *,
    dim: int,
    delta: float,
    assumptions: tuple[str, ...] = (),
) -> Guarantee:
    """The guarantee of `rounds` rounds, each with the fewest users that it may have."""
    return Guarantee(
        protocol=protocol,
        cohorts=(cohort,) * rounds,
        dim=dim,
        relation=protocol.relation,
        delta=delta,
        spread=Spread(users=cohort.size),
        assumptions=assumptions,
    )


def _user_output_and_distance(task: TrainingTask) -> tuple[protocols.Messages | protocols.Contribution, float]:
    """What leaves users, and how far at most the law of a round is from the one that is accounted."""
    if not task.aggregators:
        messages = task.messages()
        return messages, messages.total_variation * task.max_clients
    shared = task.contribution()
    return shared, shared.total_variation * task.max_clients + shared.noise_total_variation * len(task.aggregators)


@functools.lru_cache(maxsize=256)
def _certify_task_body(body: bytes, rounds: int) -> tuple[Statement, Statement]:
    """What `certify_task` returns, by the task's JSON, so that equal tasks are certified once."""
    task = msgspec.json.decode(body, type=resolve_fields(TrainingTask))
    protocol, cohort = task.build()
    sent, distance = _user_output_and_distance(task)
    delta = task.delta * (1 - _SAMPLING_SHARE) if distance else task.delta
    assumptions = (*sent.assumptions, *(() if protocol.budgets is None else (_OWN_PLACES,)))
    training = _guarantee(protocol, cohort, rounds, dim=task.dim, delta=delta, assumptions=assumptions)
    record = training.record()
    certified = dataclasses.replace(record.certified_statement(), delta=task.delta)
    if distance and not certified.is_unbounded:
        on = "the zero-knowledge error of proofs, and samples" if task.has_proofs else "samples"
        part = Spent(task.delta * _SAMPLING_SHARE, f"{on} whose law is not exact")
        certified = dataclasses.replace(certified, proof=certified.proof.with_spent(part))
        total = float(np.logaddexp(0.0, certified.eps)) + math.log(distance * rounds)
        if not total <= math.log(task.delta * _SAMPLING_SHARE):
            reason = "not certified: sampling is too coarse for so large an eps"
            certified = no_guarantee(training.scope, reason=reason, delta=task.delta).with_verdict(record.verdict)
    if task.has_proofs and not certified.is_unbounded:
        note = "what users' proofs tell follows from public randomness (docs/proofs/verified.md)"
        certified = dataclasses.replace(certified, proof=certified.proof.with_notes(note))
    local = record.local_statement()
    without_repeats = dict.fromkeys((*local.assumptions, *sent.assumptions))
    local = dataclasses.replace(local, assumptions=tuple(without_repeats))
    return certified, local


def certify_task(task: TrainingTask, rounds: int) -> tuple[Statement, Statement]:
    """Statements about so many rounds of a task, each with the fewest users that it may have.

    How many users really come is nobody's promise.

    Returns: the statement against the analyzer, and the one if nobody is trusted.
    """
    _validate.integer(rounds=rounds)
    _validate.in_interval(1, task.rounds, rounds=rounds)
    with _LOCK:  # users that share a process would all compute the same
        return _certify_task_body(task.body, rounds)
