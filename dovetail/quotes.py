"""What a protocol guarantees, before it runs: certified, claimed by its paper, and what remains if nobody is trusted.

A quote needs the protocol's name, the number of users, the dimension and the protocol's own settings; no data, no
model. `quote` certifies given parameters, `calibrate` finds the one that meets a target.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail import _validate, accounting, protocols
from dovetail.accounting.published import CLAIMS, flame
from dovetail.events import (
    DataIndependent,
    Disjoint,
    Everyone,
    FixedSize,
    Mechanism,
    NonPrivate,
    PaddedTopk,
    Participation,
    Poisson,
    Round,
    SampledSubject,
)
from dovetail.record import Record
from dovetail.statements import NotApplicable, Scope, Statement, Trust, Unit, Verdict
from dovetail.units import Spread, Viewed

__all__ = ["Plan", "Quote", "calibrate", "claimed", "from_data", "quote", "recorded", "settled", "verdict"]

_TRUTH = 50.0  # a report with a larger eps_local lies less often than a computer errs
_FROM_DATA = "the paper's Z is computed from the data and this claim reveals it: a diagnostic that no statement covers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How many users, of what dimension, for how long; `settings` are the protocol's own keys."""

    num_users: int
    dim: int
    delta: float
    rounds: int = 1
    colluders: int = 0
    min_size: int | None = None  # users that a round must have; all of them unless given, where they hide each other
    noise_scale: float = 1.0
    participation: Participation = dataclasses.field(default_factory=Everyone)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, dim=self.dim, rounds=self.rounds, colluders=self.colluders)
        _validate.at_least(2, num_users=self.num_users)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds)
        _validate.in_open_interval(0, 1, delta=self.delta)

    @property
    def population(self) -> int:
        """The users of the federation."""
        match self.participation:
            case FixedSize(population=population):
                return population
            case Poisson(prob=prob) if prob > 0:
                return round(self.num_users / prob)
        return self.num_users

    def with_setting(self, key: str, value: Any) -> Plan:
        """The same plan with one setting changed."""
        return dataclasses.replace(self, settings={**self.settings, key: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quote:
    """A protocol's statements side by side: who guarantees what, against whom."""

    protocol: str
    certified: Statement
    claimed: Statement | None
    local: Statement
    shuffler: Statement | None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "protocol": self.protocol,
            "certified": self.certified.to_json(),
            "claimed": None if self.claimed is None else self.claimed.to_json(),
            "local": self.local.to_json(),
            "shuffler": None if self.shuffler is None else self.shuffler.to_json(),
        }

    @classmethod
    def of(cls, protocol: str, record: Record, claim: Statement | None) -> Quote:
        """What a record says, beside a claim."""
        return cls(
            protocol=protocol,
            certified=record.certified(),
            claimed=claim,
            local=record.local(),
            shuffler=record.shuffler(),
        )


def quote(name: str, plan: Plan) -> Quote:
    """All statements of a protocol at these parameters."""
    protocol, cohort = settled(name, plan)
    view = protocol.view(cohort, plan.dim, neighbors=protocol.relation)
    scope = dataclasses.replace(view.scope, population=plan.population)
    own = Viewed(rounds=(view.round,) * plan.rounds, scope=scope)
    cohorts = [cohort] * plan.rounds
    record = recorded(protocol, cohorts, plan.dim, own, delta=plan.delta)
    return Quote.of(protocol.name, record, claimed(protocol, cohorts, plan.dim, scope, delta=plan.delta))


def recorded(
    protocol: protocols.Protocol,
    cohorts: Sequence[protocols.Cohort],
    dim: int,
    own: Viewed,
    *,
    delta: float,
    eps: float | None = None,
    replaced: Viewed | None = None,
    spread: Spread | None = None,
    unit: Unit | None = None,
    reproducible: bool = False,
) -> Record:
    """The record of rounds of a settled protocol with these cohorts, which were viewed as `own` (and `replaced`)."""
    slots = _slots(protocol, cohorts[0], dim) if own.scope.trust is Trust.SHUFFLE and cohorts else None
    return Record(
        own=own,
        replaced=replaced,
        reports=tuple(_own_reports(protocol, cohort, dim) for cohort in cohorts),
        slots=slots,
        spread=spread or Spread(),
        unit=unit or own.scope.unit,
        delta=delta,
        eps=eps,
        verdict=verdict(protocol, reproducible=reproducible),
    )


def _own_reports(protocol: protocols.Protocol, cohort: protocols.Cohort, dim: int) -> Round:
    """One client's part of a round: who sees names sees who was drawn."""
    batches = cohort.participation if isinstance(cohort.participation, Disjoint) else Everyone()
    return Round(mechanism=protocol.own_reports(cohort, dim), participation=batches)


def _slots(protocol: protocols.Protocol, cohort: protocols.Cohort, dim: int) -> DataIndependent | NonPrivate:
    """What the shuffler sees, with what FLAME says of it, where indices tell."""
    seen, reports = protocol.slots_seen(dim), protocol.own_reports(cohort, dim)
    if isinstance(seen, NonPrivate) and isinstance(reports, PaddedTopk):
        return NonPrivate(reason=f"{seen.reason}; {_index_privacy(reports)}")
    return seen


def verdict(protocol: protocols.Protocol, *, reproducible: bool = False) -> Verdict:
    """On whose word statements about a protocol stand: ours, or that of whoever wrote a protocol of their own."""
    if type(protocol) not in protocols.BUNDLED:
        return Verdict.DECLARED_REPRODUCIBLE if reproducible else Verdict.DECLARED
    return Verdict.REPRODUCIBLE if reproducible else Verdict.CERTIFIED


def from_data(claim: Statement | None) -> bool:
    """Whether a claim tells of the data, and so is a diagnostic."""
    return claim is not None and _FROM_DATA in claim.assumptions


def claimed(
    protocol: protocols.Protocol, cohorts: Sequence[protocols.Cohort], dim: int, scope: Scope, *, delta: float
) -> Statement | None:
    """What the protocol's paper claims for these rounds; None where it says nothing."""
    if not cohorts:
        return None
    if protocol.claimed_for == "training":
        return _claimed_for_training(protocol, cohorts, dim, scope, delta)
    return _claimed_for_round(protocol.name, protocol.published_event(cohorts[0], dim), scope, delta)


def _claimed_for_round(
    name: str, about: tuple[Mechanism, Mapping[str, Any]] | None, scope: Scope, delta: float
) -> Statement | None:
    """What the protocol's paper claims for one round of it, which is also one epoch of disjoint batches."""
    if name not in CLAIMS or about is None:
        return None
    event, extra = about
    try:
        return CLAIMS[name](event, delta=delta, **extra).statement(scope, span="one round")
    except NotApplicable:
        return None


def _claimed_for_training(
    protocol: protocols.Protocol, cohorts: Sequence[protocols.Cohort], dim: int, scope: Scope, delta: float
) -> Statement | None:
    """What the protocol's paper claims for all rounds together."""
    abouts = [protocol.published_event(cohort, dim) for cohort in cohorts]
    if protocol.name not in CLAIMS or not abouts or any(about is None for about in abouts):
        return None
    released, extra = [], {}
    for about, cohort in zip(abouts, cohorts, strict=True):
        event, extra = about  # type: ignore[misc]
        sampling = getattr(protocol, "published_sampling", cohort.participation)
        released += [Round(mechanism=event, participation=sampling)] * max(1, protocol.private_steps)
    mine = dataclasses.replace(scope, neighbors=getattr(released[0].mechanism, "neighbors", scope.neighbors))
    if released[0].mechanism.__class__ is SampledSubject:
        mine = dataclasses.replace(mine, unit=Unit.SUBJECT)  # its theorems are about groups of a subject's items
    if getattr(protocol, "group_in_batch", None) is not None:
        mine = dataclasses.replace(mine, assumptions=(*mine.assumptions, _FROM_DATA))
    try:
        claim = CLAIMS[protocol.name](released, delta=delta, **extra)
    except NotApplicable:
        return None
    asked = getattr(protocol, "claimed_eps", None)  # the recipe set the noise batch by batch to meet just this
    claim = claim if asked is None else dataclasses.replace(claim, eps=asked)
    return claim.statement(mine, span=f"{len(cohorts)} rounds")


def calibrate(name: str, plan: Plan, *, eps: float, parameter: str | None = None) -> tuple[str, float | int, Quote]:
    """The parameter that meets a central eps, and the quote at it; always rounded conservatively.

    `parameter` is the protocol's own noise (eps_local, noise_multiplier, budget_scale) unless beta or pad_to is asked
    for.
    """
    own = _noise_parameter(name, plan)
    parameter = parameter or own
    _validate.one_of(tuple(dict.fromkeys((own, "beta", "pad_to"))), parameter=parameter)

    def eps_at(value: float | int) -> float:
        try:
            protocol, cohort = settled(name, plan.with_setting(parameter, value))
            view = protocol.view(cohort, plan.dim, neighbors=protocol.relation)
            return accounting.bound([view.round] * plan.rounds, delta=plan.delta).eps
        except NotApplicable:
            return math.inf

    value: float | int
    if parameter == "pad_to":
        value = accounting.smallest_integer(eps_at, eps=eps, low=plan.colluders + 2, high=100 * plan.num_users)
    elif parameter == "noise_multiplier":
        value = accounting.smallest_noise(eps_at, eps=eps)
    else:
        most = 1.0 if parameter == "beta" else _TRUTH
        value = 1 / accounting.smallest_noise(lambda noise: eps_at(min(most, 1 / noise)), eps=eps)
        value = min(most, value)
    return parameter, value, quote(name, plan.with_setting(parameter, value))


def settled(name: str, plan: Plan) -> tuple[protocols.Protocol, protocols.Cohort]:
    """The protocol that a plan is about, with everything set that follows from its cohort."""
    protocol = protocols.build(name, plan.settings)
    cohort = protocols.Cohort(
        participation=plan.participation,
        size=plan.num_users,
        min_size=(plan.num_users if protocol.shuffled else 0) if plan.min_size is None else plan.min_size,
        colluders=plan.colluders,
        noise_scale=plan.noise_scale,
    )
    return protocol.settle(cohort, plan.dim), cohort


def _noise_parameter(name: str, plan: Plan) -> str:
    """The field that the protocol's noise is in."""
    field = protocols.build(name, plan.settings).noise_field
    if field is None:
        raise ValueError(f"expected a protocol with noise to calibrate, got {name!r}")
    return field


def _index_privacy(event: PaddedTopk) -> str:
    """FLAME's measure of what indices tell."""
    try:
        nu = flame.theorem5(num_users=event.num_users, pad_to=event.pad_to, beta=event.top / event.coordinates)
    except NotApplicable as refusal:
        return f"FLAME Thm. 5: {refusal}"
    return f"FLAME Thm. 5 allows {nu.quantity} and nu {nu.value:.4g} at the best. {nu.reason}"
