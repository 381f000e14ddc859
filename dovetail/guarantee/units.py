"""Whose privacy: what the same rounds promise for one item, one user, one subject.

A protocol protects one unit natively; what that says about another is worked out here, or that it says nothing:

- a user protected says the same of each of its items, but under replacement: an item more or less changes its user's
  update and does not remove it;
- a user protected says of a subject at s users what s users together are promised (`accounting.groups`), again under
  replacement, unless a subject is all of one user;
- a subject or an item protected says nothing of a user, who may hold any number of records;
- an item of a capped subject may be replaced and not removed: leaving it out may let another one in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dovetail import accounting
from dovetail.accounting import groups
from dovetail.accounting.releases import release_of
from dovetail.events import Round
from dovetail.statements import Bound, Neighbors, NotApplicable, Scope, Statement, Unit, no_guarantee

__all__ = ["ScopedRounds", "Spread", "bound", "statements_by_unit"]

_ALONE = "all records of a subject are at one user, and all records of a user are about one subject"
_SAME = "the record is replaced by another record of the same subject at the same user"
_UNKNOWN = "each user is one subject with no records elsewhere (the data do not say whom a record is about)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScopedRounds:
    """Rounds and the scope of what is stated about them."""

    rounds: tuple[Round, ...]
    scope: Scope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """How the records of a subject are spread over users; limits that are None were not declared."""

    users: int | None = None  # how many users, items and subjects there are, where that is public
    items: int | None = None
    subjects: int | None = None
    known: bool = False  # whether the data say whom a record is about
    alone: bool = True  # whether each user is one subject, all of whose records it holds
    users_per_item: int = 1  # the most users that hold the same record
    users_per_subject: int | None = 1  # the most users that hold records of one subject
    items_per_subject: int | None = None  # the most records about one subject
    items_per_user: int | None = None  # the most of these at one user
    measured: bool = False  # whether the limits were computed from the data, as only published data allow
    describes_data: bool = False  # whether it is that of a training's data, not of a quote

    def count_of(self, unit: Unit) -> int | None:
        """How many such units there are; None where that is not public. Unknown subjects are taken to be users."""
        subjects = self.subjects if self.known else self.users
        return {Unit.ITEM: self.items, Unit.USER: self.users, Unit.SUBJECT: subjects}[unit]

    @property
    def assumption(self) -> str:
        """What a statement about a subject assumes of how its records are spread, in words."""
        if not self.known:
            return _UNKNOWN
        if self.alone:
            return _ALONE
        limits = []
        if self.users_per_subject is not None:
            limits.append(f"records at more than {self.users_per_subject} user{'s' * (self.users_per_subject > 1)}")
        if self.items_per_subject is not None:
            limits.append(f"more than {self.items_per_subject} records in total")
        if self.items_per_user is not None:
            limits.append(f"more than {self.items_per_user} at one user")
        if not limits:
            return "nothing is declared of how a subject's records lie"
        limit = f"no subject has {', or '.join(limits)}"
        if self.measured:
            return f"{limit} (these limits were computed from the data, and the statement does not cover that)"
        return f"{limit} (as declared before the training)"


def bound(
    unit: Unit,
    own: ScopedRounds,
    replaced: ScopedRounds | None,
    spread: Spread,
    *,
    delta: float | None = None,
    eps: float | None = None,
) -> Bound:
    """The smallest bound for one such unit at this delta (or eps); `NotApplicable` with the reason if there is none.

    Arguments:
        unit: the one that is asked about.
        own: the rounds as the protocol states them, whose scope says which unit it protects itself.
        replaced: the same rounds under replacement of a user, where the protocol has such a view.
        spread: how a subject's records are spread over users.
        delta: at which eps is asked for.
        eps: at which delta is asked for, in place of a delta; only for the unit that the protocol protects itself.
    """
    target = {"delta": delta} if eps is None else {"eps": eps}
    native = own.scope.unit
    if unit is native or _is_one_to_one(unit, native, spread):
        return accounting.bound(own.rounds, **target)
    if eps is not None:
        raise NotApplicable(f"for one {unit.value}, eps can be computed from delta, but not delta from eps")
    at = float(delta or 0.0)
    if native is Unit.USER:
        if replaced is None:
            raise NotApplicable(f"changing one {unit.value} may replace a user's data, and there is no bound for that")
        if unit is Unit.ITEM:
            return groups.subject_bound(replaced.rounds, users=spread.users_per_item, delta=at)
        if not spread.known:
            raise NotApplicable("the data do not say whom a record is about, and several users hold the same record")
        if spread.users_per_subject is None:
            raise NotApplicable(
                "how many users may hold records of one subject was not declared (task.spread), and is not counted"
            )
        return groups.subject_bound(replaced.rounds, users=spread.users_per_subject, delta=at)
    if unit is Unit.USER:
        raise NotApplicable("records are clipped one by one, and a user may hold any number of them")
    if unit is Unit.ITEM:
        return accounting.bound(_rounds_of_replaced_item(own.rounds), delta=at)
    if spread.items_per_subject is None:
        raise NotApplicable("records are clipped one by one, and a subject may have any number of them")
    return accounting.bound(_rounds_of_subject(own.rounds, spread.items_per_subject, spread), delta=at)


def statements_by_unit(
    own: ScopedRounds, replaced: ScopedRounds | None, spread: Spread, *, delta: float
) -> Mapping[Unit, Statement]:
    """A statement for every unit at this delta: what is certified, or that nothing is, with the reason."""
    return {unit: _statement_for_unit(unit, own, replaced, spread, delta) for unit in Unit}


def _statement_for_unit(
    unit: Unit, own: ScopedRounds, replaced: ScopedRounds | None, spread: Spread, delta: float
) -> Statement:
    """The row of `statements_by_unit` for this unit, with all that its statement assumes beyond the protocol's own."""
    native, scope, rounds = own.scope.unit, own.scope, own.rounds
    one_to_one = _is_one_to_one(unit, native, spread)
    assumptions: list[str] = []
    if unit is not native and (one_to_one or unit is Unit.SUBJECT):
        assumptions.append(spread.assumption)
    elif (native, unit) == (Unit.SUBJECT, Unit.ITEM):
        scope = dataclasses.replace(scope, neighbors=Neighbors.REPLACE_ONE)
        assumptions.append(_SAME)
    elif (native, unit) == (Unit.USER, Unit.ITEM):
        assumptions.append(
            f"no record is held by more than {spread.users_per_item} user{'s' * (spread.users_per_item > 1)}"
        )
    if native is Unit.USER and unit is not native and not one_to_one and replaced is not None:
        scope, rounds = replaced.scope, replaced.rounds
    scope = dataclasses.replace(
        scope, unit=unit, population=spread.count_of(unit), assumptions=(*scope.assumptions, *assumptions)
    )
    refusal = accounting.reason_for_refusal(own.rounds)
    if refusal is not None:
        return no_guarantee(scope, reason=refusal, delta=delta)
    try:
        return accounting.certify(rounds, scope, bound=bound(unit, own, replaced, spread, delta=delta))
    except NotApplicable as error:
        return no_guarantee(scope, reason=str(error), delta=delta)


def _is_one_to_one(unit: Unit, native: Unit, spread: Spread) -> bool:
    """Whether both units are users or subjects, and each user is one subject: a bound for one is one for the other."""
    return spread.alone and Unit.ITEM not in (unit, native)


def _rounds_of_subject(rounds: Sequence[Round], items: int, spread: Spread) -> list[Round]:
    """The same sums of records, as releases about a subject with at most so many records."""
    seen = []
    for item in rounds:
        event = release_of(item.mechanism).of_subject(
            items=items, users=spread.users_per_subject or items, items_per_user=spread.items_per_user
        )
        seen.append(dataclasses.replace(item, mechanism=event))
    return seen


def _rounds_of_replaced_item(rounds: Sequence[Round]) -> list[Round]:
    """The same sums of records, as releases about one record that is replaced by another."""
    return [seen for item in rounds for seen in release_of(item.mechanism).of_replaced_item()]
