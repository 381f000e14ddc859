"""What a training released, in privacy terms: all that its statements follow from, as plain data.

A plan has a record of the rounds it means to run, the engine one of the rounds that it ran, and `run` compares the two.
A run's ledger is the plan's record of the rounds that are charged: those that ran, and those forgone when a callback
ended the training. `dovetail verify` recomputes the statements from a ledger, by the accountant alone.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail import _validate, accounting
from dovetail._structs import resolve_fields
from dovetail.accounting.releases import release_of
from dovetail.events import DataIndependent, NonPrivate, Round, from_plain, to_plain
from dovetail.guarantee import units
from dovetail.guarantee.units import ScopedRounds, Spread
from dovetail.statements import (
    NotApplicable,
    Proof,
    Scope,
    Statement,
    Theorem,
    Trust,
    Unit,
    Verdict,
    check_guarantee,
    no_guarantee,
)

__all__ = ["PARALLEL", "Quote", "Record", "compose_in_parallel"]

_FORMAT = 1
_COUNTS = ("users", "items", "subjects", "users_per_item", "users_per_subject", "items_per_subject", "items_per_user")
_FRESH = "users draw fresh, independent noise"
_RECEIVERS = {Trust.SHUFFLE: "shuffler and analyzer", Trust.SHARES: "analyzer and all aggregators"}
_SEALED = "values are encrypted for the analyzer, and all messages look alike"
_HONEST = "the shuffler follows the protocol (a separate statement covers what the released models reveal)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The rounds of a training, as each adversary sees them, and what is asked about them.

    All views are of the same rounds, in the same order.
    """

    own: ScopedRounds  # as the protocol states them
    replaced: ScopedRounds | None  # under replacement of a user; None if the protocol has no such view
    reports: tuple[Round, ...]  # one client's part of each round, with its name on it
    slots: DataIndependent | NonPrivate | None  # what a shuffler sees; None without one
    spread: Spread
    unit: Unit  # whom the statement is about
    delta: float
    eps: float | None = None  # where delta is sought at an eps
    verdict: Verdict = Verdict.CERTIFIED
    declared: tuple[str, ...] = ()  # what every statement assumes of code from outside the package
    evaluation: Record | None = None  # of scores on held-out people, who are in none of these rounds

    def followed_by(self, more: Record) -> Record:
        """The record of these rounds and then those of another one, which has all else in common."""
        replaced = self.replaced
        if replaced is not None and more.replaced is not None:
            replaced = dataclasses.replace(replaced, rounds=replaced.rounds + more.replaced.rounds)
        return dataclasses.replace(
            self,
            own=dataclasses.replace(self.own, rounds=self.own.rounds + more.own.rounds),
            replaced=replaced,
            reports=self.reports + more.reports,
            slots=self.slots or more.slots,
        )

    def certified_statement(self) -> Statement:
        """The statement about the unit that is asked about, at the record's delta (or eps)."""
        if self.unit is not self.own.scope.unit:
            return self.statements_by_unit()[self.unit]
        training = self._certify(self.own.rounds, self.own.scope, eps=self.eps).with_verdict(self.verdict)
        if self.evaluation is None:
            return training
        return compose_in_parallel(training, self.evaluation.statements_by_unit()[self.unit])

    def statements_by_unit(self) -> Mapping[Unit, Statement]:
        """A statement for every unit (item, user, subject), at the record's delta."""
        statements = units.statements_by_unit(self.own, self.replaced, self.spread, delta=self.delta)
        training = {unit: statement.with_verdict(self.verdict) for unit, statement in statements.items()}
        if self.evaluation is None:
            return training
        scores = self.evaluation.statements_by_unit()
        return {unit: self._combine_with_scores(unit, training[unit], scores[unit]) for unit in training}

    def _combine_with_scores(self, unit: Unit, training: Statement, scores: Statement) -> Statement:
        """The statement about a unit whose data are in the training or among held-out people, where that is so."""
        if unit is Unit.SUBJECT and self.unit is not unit and self.spread.known and not self.spread.alone:
            reason = "the scores are protected per user, and a subject may have records on both sides"
            return dataclasses.replace(training, eps=math.inf, lower=None, proof=Proof(missing=reason), premises=())
        return compose_in_parallel(training, scores)

    def local_statement(self) -> Statement:
        """The statement that holds if all who receive anything collude: what a client's own noise promises."""
        training = self._local_statement_of_training()
        return training if self.evaluation is None else compose_in_parallel(training, self.evaluation.local_statement())

    def _local_statement_of_training(self) -> Statement:
        """The local statement about the training alone."""
        scope = self.own.scope
        if scope.trust is not Trust.LOCAL:
            who = _RECEIVERS.get(scope.trust, "curator")
            scope = dataclasses.replace(
                scope, trust=Trust.LOCAL, adversary=f"{who}, and everyone else", assumptions=(_FRESH, *self.declared)
            )
        return self._state_local(scope).with_verdict(self.verdict)

    def _certify(self, rounds: Sequence[Round], scope: Scope, *, eps: float | None = None) -> Statement:
        """The certified statement about these rounds, or that nothing is certified, and why."""
        try:
            if eps is not None:
                return accounting.certify(rounds, scope, eps=eps)
            return accounting.certify(rounds, scope, delta=self.delta)
        except NotApplicable as refusal:
            return no_guarantee(scope, reason=f"not certified: {refusal}", delta=self.delta)

    def _state_local(self, scope: Scope) -> Statement:
        """The statement about `reports` within this scope, or that nothing is promised, and why."""
        why = accounting.reason_for_refusal(self.reports)
        if why is not None:
            return no_guarantee(scope, reason=why)
        if self.own.scope.trust is Trust.LOCAL:
            return self._certify(self.reports, scope)
        try:
            bound = accounting.local_bound(self.reports, delta=self.delta)
        except NotApplicable as refusal:
            return no_guarantee(scope, reason=f"not certified: {refusal}")
        if bound.eps == float("inf"):
            return no_guarantee(scope, reason=str(bound.proof))
        return scope.state(bound, Verdict.CERTIFIED)

    def shuffler_statement(self) -> Statement | None:
        """The statement against the shuffler, who sees names and slots but no values; None without a shuffler."""
        if self.slots is None:
            return None
        scope = dataclasses.replace(
            self.own.scope, adversary="shuffler", assumptions=(_SEALED, _HONEST, *self.declared)
        )
        seen = release_of(self.slots)  # an evaluation by shufflers fills the same slots for everybody, too
        if seen.refusal is not None:
            return no_guarantee(scope, reason=seen.refusal).with_verdict(self.verdict)
        return scope.state(seen.local_bound(delta=0.0), Verdict.CERTIFIED).with_verdict(self.verdict)

    def statements(self) -> dict[str, Any]:
        """Every statement as `privacy.json` has it, by its name there."""
        shuffler = self.shuffler_statement()
        return {
            "certified": self.certified_statement().to_json(),
            "local": self.local_statement().to_json(),
            "shuffler": None if shuffler is None else shuffler.to_json(),
            "units": {unit.value: statement.to_json() for unit, statement in self.statements_by_unit().items()},
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data, as a run's ledger has it.

        `rounds` lists every different round once; each view is a list of (index in `rounds`, how often in a row).
        """
        numbers: dict[Round, int] = {}

        def run_lengths(rounds: Sequence[Round]) -> list[tuple[int, int]]:
            groups = itertools.groupby(rounds)
            return [(numbers.setdefault(item, len(numbers)), len(list(alike))) for item, alike in groups]

        body = {
            "format": _FORMAT,
            "unit": self.unit.value,
            "delta": self.delta,
            "eps": self.eps,
            "verdict": self.verdict.value,
            "declared": list(self.declared),
            "spread": dataclasses.asdict(self.spread),
            "slots": None if self.slots is None else to_plain(self.slots),
            "own": {"scope": msgspec.to_builtins(self.own.scope), "rounds": run_lengths(self.own.rounds)},
            "replaced": None
            if self.replaced is None
            else {"scope": msgspec.to_builtins(self.replaced.scope), "rounds": run_lengths(self.replaced.rounds)},
            "reports": run_lengths(self.reports),
        }
        events = [
            {"mechanism": to_plain(item.mechanism), "participation": to_plain(item.participation)} for item in numbers
        ]
        scores = {} if self.evaluation is None else {"held_out": self.evaluation.to_json()}
        return {**body, "rounds": events, **scores}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """The record that `to_json` wrote; ValueError for anything else."""
        try:
            if data["format"] != _FORMAT:
                raise ValueError(f"the ledger has format {data['format']!r}, and this version reads format {_FORMAT}")
            events = [
                Round(mechanism=from_plain(item["mechanism"]), participation=from_plain(item["participation"]))
                for item in data["rounds"]
            ]
            read_rounds = functools.partial(_rounds_from_json, events)
            record = cls(
                own=read_rounds(data["own"]),
                replaced=None if data["replaced"] is None else read_rounds(data["replaced"]),
                reports=_expand_run_lengths(events, data["reports"]),
                slots=None if data["slots"] is None else from_plain(data["slots"]),
                spread=Spread(**data["spread"]),
                unit=Unit(data["unit"]),
                delta=data["delta"],
                eps=data["eps"],
                verdict=Verdict(data["verdict"]),
                declared=tuple(data.get("declared", ())),
                evaluation=None if data.get("held_out") is None else cls.from_json(data["held_out"]),
            )
            record._check()
        except (KeyError, TypeError, IndexError, AttributeError, msgspec.ValidationError) as error:
            raise ValueError(f"these data are not the ledger of a run ({error})") from error
        return record

    def _check(self) -> None:
        """ValueError for numbers out of range, and for views that are not of equally many rounds."""
        check_guarantee(eps=0.0 if self.eps is None else self.eps, delta=self.delta)
        _validate.at_least(1, **_validate.not_none(**{name: getattr(self.spread, name) for name in _COUNTS}))
        seen = [self.own.rounds, self.reports, *([] if self.replaced is None else [self.replaced.rounds])]
        if len({len(rounds) for rounds in seen}) > 1:
            raise ValueError(
                f"ledger.json is damaged: its views must be of the same rounds, and have {[len(item) for item in seen]}"
            )


PARALLEL = Theorem(
    key="dovetail.parallel",
    where="scores on people who are not trained on: whoever is on one side has that side's guarantee "
    "(docs/proofs/private-evaluation.md)",
)


def compose_in_parallel(training: Statement, scores: Statement) -> Statement:
    """What holds for people each of whom is in the training, or is held out for the scores, but not both.

    Guarantees:
        Never below either of the two, in eps or in delta; nothing is promised where one of them promises nothing.
        Refuses statements for different units; under different relations nothing is promised.
    """
    span = f"{training.span} and scores on held-out people" if training.span else "scores on held-out people"
    known = None not in (training.population, scores.population)
    whole = dataclasses.replace(
        training,
        assumptions=tuple(dict.fromkeys((*training.assumptions, *scores.assumptions))),
        span=span,
        population=(training.population or 0) + (scores.population or 0) if known else None,
        lower=None,
    )
    for one in (training, scores):
        if one.is_unbounded:
            reason = one.proof if one is training else Proof(missing=f"of the scores: {one.proof}")
            return dataclasses.replace(whole, eps=math.inf, delta=training.delta, proof=reason, premises=())
    if training.unit is not scores.unit:
        raise ValueError(f"expected statements about one unit, got {training.unit.value} and {scores.unit.value}")
    if training.neighbors is not scores.neighbors:
        reason = Proof(missing="training and scores are stated under different relations")
        return dataclasses.replace(whole, eps=math.inf, proof=reason, premises=())
    theorems = dict.fromkeys((PARALLEL, *training.proof.theorems, *scores.proof.theorems))
    return dataclasses.replace(
        whole,
        eps=max(training.eps, scores.eps),
        delta=max(training.delta, scores.delta),
        proof=Proof(theorems=tuple(theorems)),
        premises=(training, dataclasses.replace(scores, span=f"scores on held-out people in {scores.span}")),
    )


def _rounds_from_json(events: Sequence[Round], data: Mapping[str, Any]) -> ScopedRounds:
    """One view of a ledger: `data` has its scope and its rounds, as (index in `events`, how often in a row)."""
    return ScopedRounds(
        rounds=_expand_run_lengths(events, data["rounds"]), scope=msgspec.convert(data["scope"], resolve_fields(Scope))
    )


def _expand_run_lengths(events: Sequence[Round], runs: Sequence[tuple[int, int]]) -> tuple[Round, ...]:
    """The rounds that these runs, (index in `events`, how often in a row), stand for."""
    for number, times in runs:
        _validate.integer(number=number, times=times)
        if not 0 <= number < len(events) or times < 1:
            raise ValueError(
                f"ledger.json is damaged: it asks {times} times for number {number} of {len(events)} kinds of rounds"
            )
    return tuple(events[number] for number, times in runs for _ in range(times))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quote:
    """A protocol's statements side by side: who guarantees what, against whom."""

    protocol: str
    certified: Statement
    claimed: Statement | None  # by the protocol's paper
    local: Statement  # if all who receive anything collude
    shuffler: Statement | None  # against the shuffler, where there is one

    def to_json(self) -> dict[str, Any]:
        """Plain data: the protocol's name, and every statement as `Statement.to_json` has it, or None."""
        return {
            "protocol": self.protocol,
            "certified": self.certified.to_json(),
            "claimed": None if self.claimed is None else self.claimed.to_json(),
            "local": self.local.to_json(),
            "shuffler": None if self.shuffler is None else self.shuffler.to_json(),
        }

    @classmethod
    def from_record(cls, protocol: str, record: Record, claim: Statement | None) -> Quote:
        """The statements of this record, beside what a paper claims of the same rounds."""
        return cls(
            protocol=protocol,
            certified=record.certified_statement(),
            claimed=claim,
            local=record.local_statement(),
            shuffler=record.shuffler_statement(),
        )
