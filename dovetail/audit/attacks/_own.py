"""What is left when shuffler and analyzer collude: the victim's own reports, with its name on them.

Nobody else hides the victim, so the law of its reports in both worlds is all there is. Reports that are independent add
up their log-likelihood ratios. Where which slots a client fills is a function of its data, or where the server gets the
update itself, the supports differ and no finite eps holds.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dovetail.audit import exact
from dovetail.audit.bounds import ExactAttack, disjoint_attack
from dovetail.audit.exact import cells
from dovetail.audit.exact.cells import log_binomial_pmf
from dovetail.audit.exact.sums import attacks_on_repeated_reports
from dovetail.events import Report, Shuffled
from dovetail.protocols import Cohort, Protocol
from dovetail.statements import NotApplicable

__all__ = [
    "SERVER",
    "attacks_by_the_server",
    "attacks_on_declared_reports",
    "attacks_on_laws",
    "attacks_on_own_event",
    "attacks_on_reports",
    "attacks_on_round_event",
]

_OWN = "the victim's own reports"
SERVER = "the victim's update, which the server gets as it is"
_FAR = 1e4  # an update that every protocol clips
_SAMPLES = 2000  # reports that are drawn to see which values occur
_MOST_VALUES = 64  # that a law may have to be used
_COMPLETE = 1e-9  # by how much the probabilities of all values may miss 1


def attacks_on_reports(report: Report, count: int) -> list[ExactAttack]:
    """Attacks on `count` independent reports, all of them on the high end in one world, on the low end in the other."""
    high, low = cells.cells_of_report(report).masses_at_ends(report.eps_local)
    return attacks_on_laws(high, low, count)


def attacks_on_laws(first: np.ndarray, second: np.ndarray, count: int, *, pure_eps: float = 0.0) -> list[ExactAttack]:
    """Attacks on `count` independent reports that have one of two laws.

    Arguments:
        first: the probabilities of a report's cells in the first world; `second` likewise.
        pure_eps: a lower bound on eps at delta = 0 that is known beside the laws (see `ExactAttack`).
    """
    if len(first) == 2:
        logs = [log_binomial_pmf(count, float(law[1])) for law in (first, second)]
        return [ExactAttack(attack=f"ones among {_OWN}", log_first=logs[0], log_second=logs[1])]
    return attacks_on_repeated_reports(f"log-likelihood ratios of {_OWN}", first, second, count, pure_eps=pure_eps)


def attacks_on_round_event(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The exact attacks on the round's event, for protocols in which a client's report is all that the server sees."""
    return exact.exact_attacks(protocol.view(cohort, dim, neighbors=protocol.relation).round.mechanism)


def attacks_on_declared_reports(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on a client's reports by what a settled protocol declares of them.

    That is their density, where reports have few values and every slot the same law; otherwise the event
    `own_reports`. The victim is the user with the largest budget, and holds updates far beyond clipping, in opposite
    directions.
    """
    laws = _laws_of_finite_reports(protocol, dim)
    if laws is not None:
        return attacks_on_laws(*laws, protocol.layout(dim).slots)
    return attacks_on_own_event(protocol.own_reports(cohort, dim))


@functools.singledispatch
def attacks_on_own_event(event: Any) -> list[ExactAttack]:
    """Attacks on the event of one client's reports: those of `audit.exact`, where nobody else is in it."""
    return exact.exact_attacks(event)


@attacks_on_own_event.register(Shuffled)
def _attacks_without_a_crowd(event: Shuffled) -> list[ExactAttack]:
    """Attacks on the reports of a shuffled event as if they were not shuffled: one for each coordinate."""
    if event.report.kind in ("generic", "cap"):
        raise NotApplicable(f"the randomizer is not known from an event of kind {event.report.kind!r}: no exact attack")
    return attacks_on_reports(event.report, event.coordinates)


def _laws_of_finite_reports(protocol: Protocol, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The probabilities of a report's values at the high and at the low end.

    None unless every slot has the same law, on few values, all of which occur among `_SAMPLES` draws: then their
    densities add up to 1.
    """
    budget = None if protocol.budgets is None else float(max(protocol.budgets))
    traced = None if budget is None else jnp.float32(budget)
    state = protocol.init(dim)
    keys = jax.random.split(jax.random.key(0), _SAMPLES)
    ends = (_FAR, -_FAR)
    seen = []
    for end in ends:
        x = jnp.full(dim, end, jnp.float32)
        sent = jax.vmap(lambda key, x=x: protocol.randomize(x, state, key=key, budget=traced))(keys)
        if sent.slot is not None or not bool(jnp.all(sent.valid)):
            return None
        seen.append(np.asarray(sent.value, np.float64))
    values = np.unique(seen)
    slots = protocol.layout(dim).slots
    if len(values) > _MOST_VALUES:
        return None
    table = np.broadcast_to(values[:, None], (len(values), slots))
    laws = []
    for end in ends:
        logs = protocol.log_density(table, np.full(dim, end), budget=budget)
        if logs is None or logs.shape != table.shape:
            return None
        laws.append(np.exp(logs))
    if any(np.abs(law.sum(axis=0) - 1).max() > _COMPLETE or np.ptp(law, axis=1).max() > _COMPLETE for law in laws):
        return None
    return laws[0][:, 0], laws[1][:, 0]


def attacks_by_the_server(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The attack on updates that the server gets without noise: it sees the victim's data whenever that is drawn."""
    prob = cohort.participation.prob_drawn
    if prob == 1:
        return [disjoint_attack(SERVER)]
    logs = np.array([math.log(prob), -math.inf, math.log1p(-prob)])
    return [ExactAttack(attack=SERVER, log_first=logs, log_second=logs[[1, 0, 2]])]
