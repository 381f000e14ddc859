"""What a task costs a user: a `Guarantee`, as `dovetail account protocol` asks it, less what exact sampling misses."""

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
from dovetail._structs import ready
from dovetail.guarantee import Guarantee, Spread
from dovetail.parties.common.task import TrainingTask, cohort_of
from dovetail.statements import Spent, Statement, no_guarantee

__all__ = ["calibrate_noise", "certify_task"]

_ONE_AT_A_TIME = threading.Lock()
_OWN_PLACES = "every user has a place in the list of budgets of its own: whoever enrols users gives no number twice"
_CHARGED = 1e-6  # of delta: for what sampling on a computer is off by


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
    """The settings with their noise set: as given, or such that all rounds together cost at most `eps`."""
    built = protocols.build(protocol, settings)
    if built.is_calibrated:
        return dict(settings)
    if eps is None or built.noise_field is None:
        raise ValueError(f"expected privacy.eps or protocol.{built.noise_field}, got neither")
    training = _guarantee(
        built,
        cohort_of(min_clients, max_clients, colluders, aggregators=aggregators),
        rounds,
        dim=dim,
        delta=delta * (1 - _CHARGED),
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
    """So many rounds of a task, each with the fewest users that it may have."""
    return Guarantee(
        protocol=protocol,
        cohorts=(cohort,) * rounds,
        dim=dim,
        relation=protocol.relation,
        delta=delta,
        spread=Spread(users=cohort.size),
        assumptions=assumptions,
    )


def _messages_of(task: TrainingTask) -> tuple[protocols.Messages | protocols.Contribution, float]:
    """What leaves users, and how far the law of a round is from the one that is accounted, at most."""
    if not task.aggregators:
        messages = task.messages()
        return messages, messages.distance * task.max_clients
    shared = task.contribution()
    return shared, shared.distance * task.max_clients + shared.noise_distance * len(task.aggregators)


@functools.lru_cache(maxsize=256)
def _certify(body: bytes, rounds: int) -> tuple[Statement, Statement]:
    task = msgspec.json.decode(body, type=ready(TrainingTask))
    protocol, cohort = task.build()
    sent, off = _messages_of(task)
    delta = task.delta * (1 - _CHARGED) if off else task.delta
    assumed = (*sent.assumptions, *(() if protocol.budgets is None else (_OWN_PLACES,)))
    training = _guarantee(protocol, cohort, rounds, dim=task.dim, delta=delta, assumptions=assumed)
    record = training.record()
    certified = dataclasses.replace(record.certified_statement(), delta=task.delta)
    if off and not certified.is_unbounded:
        on = "the zero-knowledge error of proofs, and samples" if task.has_proofs else "samples"
        charged = Spent(task.delta * _CHARGED, f"{on} whose law is not exact")
        certified = dataclasses.replace(certified, proof=certified.proof.with_spent(charged))
        total = float(np.logaddexp(0.0, certified.eps)) + math.log(off * rounds)
        if not total <= math.log(task.delta * _CHARGED):
            reason = "not certified: sampling is too coarse for so large an eps"
            certified = no_guarantee(training.scope, reason=reason, delta=task.delta).with_verdict(record.verdict)
    if task.has_proofs and not certified.is_unbounded:
        note = "what users' proofs tell follows from public randomness (docs/proofs/verified.md)"
        certified = dataclasses.replace(certified, proof=certified.proof.with_notes(note))
    local = record.local_statement()
    said = dict.fromkeys((*local.assumptions, *sent.assumptions))
    local = dataclasses.replace(local, assumptions=tuple(said))
    return certified, local


def certify_task(task: TrainingTask, rounds: int) -> tuple[Statement, Statement]:
    """What so many rounds of a task cost a user: against the analyzer, and if nobody is trusted.

    Rounds are counted with the fewest users that one may have; how many really come is nobody's promise.
    """
    _validate.integer(rounds=rounds)
    _validate.in_interval(1, task.rounds, rounds=rounds)
    with _ONE_AT_A_TIME:  # users that share a process would all compute the same
        return _certify(task.body, rounds)
