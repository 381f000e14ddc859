"""What several runs on the same people state together, each chosen after seeing the ones before.

`compose_runs` states what holds however runs were chosen, `compose_runs_fixed_beforehand` what holds if noise, cohorts
and rounds of all of them were fixed before the first (docs/proofs/across-runs.md). Runs that promise nothing are not
added up: with one of them, all runs together promise nothing, which the caller has to say.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Sequence

from dovetail import accounting
from dovetail.accounting import adaptive
from dovetail.events import Round
from dovetail.guarantee import trials
from dovetail.guarantee.record import Record
from dovetail.numbers import round_to
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

__all__ = ["ODOMETER", "RunSpending", "compose_runs", "compose_runs_fixed_beforehand"]

ODOMETER = (
    "how much was spent in all does not depend on what earlier runs showed; where it does, the bound is for what is "
    "seen without more being spent, and outright under a ceiling set before the first run (docs/proofs/across-runs.md)"
)
_FIXED = "noise, cohorts and numbers of rounds of all runs were fixed before the first of them"
_LISTED = (
    "these are all runs on these people's data (one in no ledger, or in another, adds to it), and which runs were on "
    "the same people is public"
)
_SETTINGS = "settings were chosen without the private data, but for what the runs that are counted here had shown"
_ITEMS = "whoever is protected has one record in each table"
_SEEDED = (Verdict.REPRODUCIBLE, Verdict.DECLARED_REPRODUCIBLE)
_MOST_TRUST_FIRST = (Trust.NONE, Trust.CURATOR, Trust.SHARES, Trust.SHUFFLE, Trust.LOCAL)
_MOST_PREMISES = 8  # runs that a statement tells one by one


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSpending:
    """What one run has spent: its statement, and its rounds in privacy terms where they can be read.

    A ledger may hold rounds of a protocol whose code is not there; its statement still counts.
    """

    statement: Statement
    record: Record | None

    @classmethod
    def from_record(cls, record: Record) -> RunSpending:
        """What a run with this record spends: its certified statement, without the proofs of its single rounds."""
        statement = dataclasses.replace(record.certified_statement(), premises=(), per_user=None)
        return cls(statement=statement, record=record)

    @property
    def reason_without_bound(self) -> str | None:
        """Why the run promises nothing, in words; None where it does."""
        if self.statement.verdict in _SEEDED:
            return "its noise came from a seed, and whoever knows the seed can subtract it"
        return str(self.statement.proof) if self.statement.is_unbounded else None

    @property
    def bound(self) -> Bound:
        """The (eps, delta) of the run, with its proof."""
        return Bound(eps=self.statement.eps, delta=self.statement.delta, proof=self.statement.proof)

    @property
    def costliest_rounds(self) -> tuple[Round, ...] | None:
        """The rounds that cost anybody most, where they are stated for the unit that they protect themselves, or None.

        Whoever is held out for private scores is in none of the rounds of the training: of both sides that with more
        Gaussian noise counts, and None stands for others.
        """
        record = self.record
        if record is None or record.unit is not record.own.scope.unit:
            return None
        scores = record.evaluation
        if scores is None:
            return record.own.rounds
        sides = (record.own.rounds, scores.own.rounds)
        shifts = [adaptive.total_gaussian_mu(side) for side in sides]
        if record.unit is not scores.own.scope.unit or shifts[0] is None or shifts[1] is None:
            return None
        return sides[0] if shifts[0] >= shifts[1] else sides[1]

    def restate(self, unit: Unit, relation: Neighbors) -> RunSpending | None:
        """The same rounds, stated for this unit under this relation; None where nothing is promised then."""
        if (self.statement.unit, self.statement.neighbors) == (unit, relation):
            return self
        if self.record is None:
            return None
        own = self.record.own
        if relation is Neighbors.REPLACE_ONE and own.scope.neighbors is not relation and self.record.replaced:
            own = self.record.replaced
        try:
            converted = RunSpending.from_record(dataclasses.replace(self.record, own=own, unit=unit, eps=None))
        except ValueError:
            return None
        return None if converted.statement.neighbors is not relation or converted.statement.is_unbounded else converted


def compose_runs(runs: Sequence[RunSpending]) -> tuple[Statement, ...]:
    """What these runs spend together, however each was chosen after seeing the ones before.

    Arguments:
        runs: each promises something; at least one.

    Returns: one statement; or, where runs protect different units and none of them can be stated for all, one for every
        unit and relation, of the runs that are stated for it.

    Guarantees:
        The eps of one run is its own. With more runs it never falls, nor does delta.
    """
    return tuple(_compose_alike(alike) for alike in _group_by_unit_and_relation(runs))


def compose_runs_fixed_beforehand(runs: Sequence[RunSpending]) -> Statement | None:
    """What these runs spend together if noise, cohorts and rounds of all of them were fixed beforehand.

    The accountant composes all of their rounds. None where that is no statement about one unit, and for one run.
    """
    kinds = _group_by_unit_and_relation(runs)
    rounds = _all_rounds(kinds[0])
    if len(kinds) != 1 or len(runs) == 1 or rounds is None:
        return None
    delta = adaptive.total_delta([run.bound for run in kinds[0]])
    try:
        bound = accounting.bound(rounds, delta=delta)
    except (NotApplicable, ValueError):
        return None
    return _state_bound(kinds[0], bound, _FIXED)


def _compose_alike(runs: Sequence[RunSpending]) -> Statement:
    """The statement of runs that are stated for one unit and relation."""
    if len(runs) == 1:
        return _state_bound(runs, runs[0].bound, None)
    total = adaptive.add_up([run.bound for run in runs])
    rounds = _all_rounds(runs)
    if rounds is not None:
        try:
            gaussian = adaptive.gaussian_bound(rounds, delta=round_to(total.delta, 9, decimal.ROUND_HALF_EVEN))
        except (NotApplicable, ValueError):
            pass
        else:
            total = min(total, gaussian, key=lambda bound: bound.eps)
    return _state_bound(runs, total, ODOMETER)


def _all_rounds(runs: Sequence[RunSpending]) -> tuple[Round, ...] | None:
    """The rounds of all runs, batches of different runs in different epochs; None where a run's do not say it."""
    rounds = [run.costliest_rounds for run in runs]
    return None if None in rounds else trials.concatenate_rounds([each for each in rounds if each is not None])


def _state_bound(runs: Sequence[RunSpending], bound: Bound, condition: str | None) -> Statement:
    """The statement of this bound for these runs, of one unit and relation.

    Arguments:
        condition: what is assumed of how the runs were chosen, if anything.
    """
    own = [run.statement for run in runs]
    first = own[0]
    assumed = dict.fromkeys(text for statement in own for text in statement.assumptions if text != TUNING_ASSUMPTION)
    more = [_SETTINGS, _LISTED, *([] if condition is None else [condition])]
    if first.unit is Unit.ITEM and len(runs) > 1:
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
    declared = any(statement.verdict is Verdict.DECLARED for statement in own)
    return scope.state(
        bound,
        Verdict.DECLARED if declared else Verdict.CERTIFIED,
        span=f"{len(runs)} run{'s' * (len(runs) != 1)}",
        premises=tuple(own) if 1 < len(own) <= _MOST_PREMISES else (),
    )


def _group_by_unit_and_relation(runs: Sequence[RunSpending]) -> list[list[RunSpending]]:
    """The runs, grouped by what they are stated for; as one group, converted, where that keeps a bound for each.

    Units are tried from the largest, and runs under different relations are stated under replacement.
    """
    kinds: dict[tuple[Unit, Neighbors], list[RunSpending]] = {}
    for run in runs:
        kinds.setdefault((run.statement.unit, run.statement.neighbors), []).append(run)
    if len(kinds) == 1:
        return [list(runs)]
    relations = {relation for _, relation in kinds}
    relation = relations.pop() if len(relations) == 1 else Neighbors.REPLACE_ONE
    for unit in (Unit.SUBJECT, Unit.USER, Unit.ITEM):
        if not any(unit is kind for kind, _ in kinds):
            continue
        converted = [found for run in runs if (found := run.restate(unit, relation)) is not None]
        if len(converted) == len(runs):
            return [converted]
    return list(kinds.values())
