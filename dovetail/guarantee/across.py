"""What several runs on the same people state together, each chosen after seeing the ones before.

`compose_runs` states what holds however runs were chosen, `compose_fixed` what holds if noise, cohorts and rounds of
all of them were fixed before the first (docs/proofs/across-runs.md). Runs that promise nothing are not added up: with
one of them, all runs together promise nothing, which the caller has to say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from dovetail.accounting import adaptive
from dovetail.guarantee import trials
from dovetail.guarantee.record import Record
from dovetail.statements import (
    TUNING_ASSUMPTION,
    Bound,
    Neighbors,
    NotApplicable,
    Scope,
    Statement,
    Trust,
    Unit,
    Verdict,
)

__all__ = ["ODOMETER", "compose_fixed", "compose_runs", "reason_without_bound"]

ODOMETER = (
    "how much was spent in all does not depend on what earlier runs showed; where it does, the bound is for what is "
    "seen without more being spent, and outright under a ceiling set before the first run (docs/proofs/across-runs.md)"
)
_FIXED = "noise, cohorts and numbers of rounds of all runs were fixed before the first of them"
_LISTED = (
    "these are all the runs that these people's data were used in: runs that are in no ledger, or another, add to it"
)
_SETTINGS = "settings were chosen without the private data, but for what the runs that are counted here had shown"
_ITEMS = "whoever is protected has one record in each table"
_SEEDED = (Verdict.REPRODUCIBLE, Verdict.DECLARED_REPRODUCIBLE)
_MOST_TRUST_FIRST = (Trust.NONE, Trust.CURATOR, Trust.SHARES, Trust.SHUFFLE, Trust.LOCAL)
_MOST_PREMISES = 8  # runs that a statement tells one by one


def reason_without_bound(record: Record) -> str | None:
    """Why a run promises nothing, in words; None where it does."""
    if record.verdict in _SEEDED:
        return "its noise came from a seed, and whoever knows the seed can subtract it"
    statement = _statement(record)
    return str(statement.proof) if statement.is_unbounded else None


def compose_runs(records: Sequence[Record]) -> tuple[Statement, ...]:
    """What these runs spend together, however each was chosen after seeing the ones before.

    Arguments:
        records: of all runs, each of which promises something; at least one.

    Returns: one statement; or, where runs protect different units and none of them can be stated for all, one for every
        unit and relation, of the runs that are stated for it.

    Guarantees:
        The eps of one run is its own. With more runs it never falls, nor does delta.
    """
    return tuple(_compose(alike) for alike in _of_one_kind(records))


def compose_fixed(records: Sequence[Record]) -> Statement | None:
    """What these runs spend together if noise, cohorts and rounds of all of them were fixed beforehand.

    The accountant composes all of their rounds. None where that is no statement about one unit, and for one run.
    """
    kinds = _of_one_kind(records)
    if len(kinds) != 1 or len(records) == 1 or any(record.unit is not record.own.scope.unit for record in kinds[0]):
        return None
    alike = kinds[0]
    delta = adaptive.total_delta([_bound(record) for record in alike])
    try:
        rounds = trials.concatenate([record.own.rounds for record in alike])
        joined = dataclasses.replace(
            alike[0],
            own=dataclasses.replace(alike[0].own, rounds=rounds),
            replaced=None,
            delta=delta,
            eps=None,
        )
        bound = trials.bound(joined)
    except (NotApplicable, ValueError):
        return None
    return _state(alike, bound, _FIXED)


def _compose(records: Sequence[Record]) -> Statement:
    """The statement of runs that are stated for one unit and relation."""
    bounds = [_bound(record) for record in records]
    if len(records) == 1:
        return _state(records, bounds[0], None)
    total = adaptive.add_up(bounds)
    if all(record.unit is record.own.scope.unit for record in records):
        try:
            rounds = trials.concatenate([record.own.rounds for record in records])
            gaussian = adaptive.gaussian_bound(rounds, delta=total.delta)
        except (NotApplicable, ValueError):
            pass
        else:
            total = min(total, gaussian, key=lambda bound: bound.eps)
    return _state(records, total, ODOMETER)


def _state(records: Sequence[Record], bound: Bound, condition: str | None) -> Statement:
    """The statement of this bound for these runs, of one unit and relation.

    Arguments:
        condition: what is assumed of how the runs were chosen, if anything.
    """
    own = [_statement(record) for record in records]
    first = own[0]
    assumed = dict.fromkeys(text for statement in own for text in statement.assumptions if text != TUNING_ASSUMPTION)
    more = [_SETTINGS, _LISTED, *([] if condition is None else [condition])]
    if first.unit is Unit.ITEM and len(records) > 1:
        more.append(_ITEMS)
    counts = [statement.population for statement in own]
    known = [count for count in counts if count is not None]
    adversaries = dict.fromkeys(statement.adversary for statement in own)
    scope = Scope(
        trust=min((statement.trust for statement in own), key=_MOST_TRUST_FIRST.index),
        adversary=first.adversary if len(adversaries) == 1 else f"holder of all views: {', '.join(adversaries)}",
        neighbors=first.neighbors,
        unit=first.unit,
        assumptions=(*assumed, *more),
        population=min(known) if len(known) == len(counts) else None,
    )
    declared = any(record.verdict is Verdict.DECLARED for record in records)
    span = f"{len(records)} run{'s' * (len(records) != 1)}"
    premises = tuple(dataclasses.replace(statement, premises=(), per_user=None) for statement in own)
    return scope.state(
        bound,
        Verdict.DECLARED if declared else Verdict.CERTIFIED,
        span=span,
        premises=premises if 1 < len(own) <= _MOST_PREMISES else (),
    )


def _of_one_kind(records: Sequence[Record]) -> list[list[Record]]:
    """The runs, grouped by what they are stated for; as one group, converted, where that keeps a bound for each.

    Units are tried from the largest, and runs under different relations are stated under replacement.
    """
    kinds: dict[tuple[Unit, Neighbors], list[Record]] = {}
    for record in records:
        kinds.setdefault((record.unit, _statement(record).neighbors), []).append(record)
    if len(kinds) == 1:
        return [list(records)]
    units = [unit for unit in (Unit.SUBJECT, Unit.USER, Unit.ITEM) if any(unit is kind for kind, _ in kinds)]
    relations = {relation for _, relation in kinds}
    relation = relations.pop() if len(relations) == 1 else Neighbors.REPLACE_ONE
    for unit in units:
        converted = [_convert(record, unit, relation) for record in records]
        if all(record is not None for record in converted):
            return [[record for record in converted if record is not None]]
    return list(kinds.values())


def _convert(record: Record, unit: Unit, relation: Neighbors) -> Record | None:
    """The record of the same rounds, stated for this unit under this relation; None where nothing is promised then."""
    stated = dataclasses.replace(record, unit=unit, eps=None)
    if relation is Neighbors.REPLACE_ONE and record.own.scope.neighbors is not relation and record.replaced is not None:
        stated = dataclasses.replace(stated, own=record.replaced)
    try:
        statement = _statement(stated)
    except ValueError:
        return None
    return stated if statement.neighbors is relation and not statement.is_unbounded else None


def _bound(record: Record) -> Bound:
    """The (eps, delta) of a run, with its proof."""
    statement = _statement(record)
    return Bound(eps=statement.eps, delta=statement.delta, proof=statement.proof)


@functools.lru_cache(maxsize=256)
def _statement(record: Record) -> Statement:
    """What a run states; kept, for every run on the same people asks it of all that came before."""
    return record.certified_statement()
