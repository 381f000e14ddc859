"""What several trainings on the same data state together: all that was tried, as one record.

Who sees every trial sees all their rounds (`record_of_all`). Who sees the best of a random number of them alone sees
one release (`record_of_best`, docs/proofs/private-selection.md). Either record is a ledger like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dovetail.accounting.exposure import exposures_of
from dovetail.accounting.releases import release_of
from dovetail.events import BestTrial, Disjoint, Everyone, NonPrivate, Repeated, Round, Separated
from dovetail.guarantee import units
from dovetail.guarantee.record import Record
from dovetail.guarantee.units import ScopedRounds
from dovetail.statements import Bound, NotApplicable, Scope, Trust

__all__ = ["bound", "concatenate_rounds", "record_of_all", "record_of_best"]

_OBSERVER = "observer of the chosen trial's models"
_KEPT = (
    "the curator keeps all other trials to itself: their models and scores, how many there were, and the time they "
    "took; users who saw models of other trials do not tell"
)
_SEEN = NonPrivate(reason="the curator sees every update of every trial")


def record_of_all(records: Sequence[Record], *, tuning: str) -> Record:
    """All rounds of all trials, one after the other: what is stated where somebody sees every trial.

    Arguments:
        records: one of every trial.
        tuning: the assumption about what was tried, which the statement makes in place of "hyper-parameters were chosen
            without the private data".

    Guarantees:
        Disjoint batches of different trials are not taken for disjoint: every trial has epochs of its own.
        Refuses trials that are stated for different units or relations, or against different adversaries.
    """
    scope = _common_scope(records, tuning)
    replaced = [record.replaced for record in records if record.replaced is not None]
    slots = [record.slots for record in records if record.slots is not None]
    revealing = [slot for slot in slots if release_of(slot).refusal is not None]
    return dataclasses.replace(
        records[0],
        own=ScopedRounds(rounds=concatenate_rounds([record.own.rounds for record in records]), scope=scope),
        replaced=ScopedRounds(
            rounds=concatenate_rounds([trial.rounds for trial in replaced]),
            scope=_with_assumptions(replaced[0].scope, replaced, tuning),
        )
        if len(replaced) == len(records)
        else None,
        reports=concatenate_rounds([record.reports for record in records]),
        slots=next(iter((*revealing, *slots)), None),
        declared=_all_declarations(records),
    )


def record_of_best(records: Sequence[Record], *, eta: float, gamma: float, tuning: str) -> Record:
    """The best of a random number of trials, each with one of the settings that these records are of.

    Arguments:
        records: one of every setting that a trial may draw.
        eta: shape of the law of the number of trials (a truncated negative binomial; 0: logarithmic, 1: geometric).
        gamma: success probability of that law.
        tuning: the assumption about what was tried, as in `record_of_all`.

    Guarantees:
        Refuses trials that anybody but a trusted curator sees.
    """
    scope = _common_scope(records, tuning)
    if scope.trust is not Trust.CURATOR:
        raise NotApplicable(
            f"private selection needs a trusted curator who alone sees the trials, and the {scope.adversary} sees "
            "every one of them: count them all instead (composition)"
        )

    def view_best(views: Sequence[ScopedRounds]) -> ScopedRounds:
        settings = tuple(dict.fromkeys(_exposure_to_trial(view.rounds) for view in views))
        event = BestTrial(settings=settings, eta=eta, gamma=gamma)
        scope = _with_assumptions(views[0].scope, views, tuning)
        scope = dataclasses.replace(scope, adversary=_OBSERVER, assumptions=(*scope.assumptions, _KEPT))
        return ScopedRounds(rounds=(Round(mechanism=event, participation=Everyone()),), scope=scope)

    replaced = [record.replaced for record in records if record.replaced is not None]
    return dataclasses.replace(
        records[0],
        own=view_best([record.own for record in records]),
        replaced=view_best(replaced) if len(replaced) == len(records) else None,
        reports=(Round(mechanism=_SEEN, participation=Everyone()),),
        slots=None,
        declared=_all_declarations(records),
    )


def bound(record: Record) -> Bound:
    """The (eps, delta) of a record's statement about its unit; `NotApplicable` where nothing is certified."""
    return units.bound(record.unit, record.own, record.replaced, record.spread, delta=record.delta)


def _common_scope(records: Sequence[Record], tuning: str) -> Scope:
    """The scope of all records, with the assumptions of each; ValueError if they differ in anything else."""
    if not records:
        raise ValueError("expected at least one trial, got none")
    first = records[0]

    def question(record: Record) -> tuple[object, ...]:
        scope = record.own.scope
        adversary = (scope.trust, scope.adversary, scope.neighbors, scope.unit, scope.population)
        return (*adversary, record.spread, record.unit, record.delta, record.eps, record.verdict)

    if any(question(record) != question(first) for record in records):
        raise ValueError("expected trials with one adversary, unit, relation, delta and verdict, got different ones")
    return _with_assumptions(first.own.scope, [record.own for record in records], tuning)


def _all_declarations(records: Sequence[Record]) -> tuple[str, ...]:
    """What is declared of the code of any trial, each declaration once."""
    return tuple(dict.fromkeys(declaration for record in records for declaration in record.declared))


def _with_assumptions(scope: Scope, views: Sequence[ScopedRounds], tuning: str) -> Scope:
    """The scope with the assumptions of all views, each once, and this assumption about tuning."""
    assumptions = dict.fromkeys(assumption for view in views for assumption in view.scope.assumptions)
    return dataclasses.replace(scope, assumptions=tuple(assumptions), tuning=tuning)


def concatenate_rounds(trials: Sequence[Sequence[Round]]) -> tuple[Round, ...]:
    """The rounds of all trials; equal ones become one object, which the accountant counts fast."""
    rounds: list[Round] = []
    same: dict[Round, Round] = {}
    before = 0
    for trial in trials:
        later = {id(item): _shift_group(item, before) for item in trial}
        rounds += [same.setdefault(later[id(item)], later[id(item)]) for item in trial]
        before = 1 + max((_group_number(item) for item in same), default=-1)
    return tuple(rounds)


def _group_number(item: Round) -> int:
    """The number of the round's epoch of disjoint batches, or of its stream; -1 if it is in neither."""
    match item.participation:
        case Disjoint(epoch=number) | Separated(stream=number):
            return number
    return -1


def _shift_group(item: Round, num_groups: int) -> Round:
    """The round with the number of its epoch or stream raised by so many, if it is in one."""
    match item.participation:
        case Disjoint(epoch=epoch):
            return dataclasses.replace(item, participation=Disjoint(epoch=epoch + num_groups))
        case Separated(stream=stream):
            return dataclasses.replace(
                item, participation=dataclasses.replace(item.participation, stream=stream + num_groups)
            )
    return item


def _exposure_to_trial(rounds: Sequence[Round]) -> tuple[Repeated, ...]:
    """What one user is exposed to in a trial; a trial with a release that promises nothing is that release."""
    refused = next((item for item in rounds if release_of(item.mechanism).refusal is not None), None)
    if refused is not None:
        return (Repeated(mechanism=refused.mechanism, sampling=Everyone(), times=1),)
    return tuple(
        Repeated(mechanism=exposure.mechanism, sampling=exposure.sampling, times=exposure.times)
        for exposure in exposures_of(rounds)
    )
