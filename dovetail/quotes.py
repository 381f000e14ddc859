"""What a protocol promises before it is run: certified, claimed by its paper, and left when nobody is trusted.

A quote needs the protocol's name, the number of users, the dimension and the protocol's own settings; no data, no
model. `quote` certifies given parameters, `calibrate` finds the one that meets a target.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail import _validate, accounting, protocols
from dovetail.accounting import pairs
from dovetail.accounting.published import CLAIMS, flame
from dovetail.events import (
    Crowd,
    Disjoint,
    Everyone,
    Gaussian,
    Laplace,
    Mechanism,
    PaddedBernoulli,
    PaddedTopk,
    Participation,
    Personalized,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import (
    Bound,
    NotApplicable,
    Scope,
    Statement,
    Theorem,
    Trust,
    Unit,
    Verdict,
    unbounded,
)

__all__ = ["Plan", "Quote", "calibrate", "certified", "quote", "settled", "state"]

_TRUTH = 50.0  # a report with a larger eps_local lies less often than a computer errs
_NOTHING_SHOWN = Theorem(key="none shown", where="which slots a client fills does not depend on its data")
_FROM_DATA = "the paper's Z is read off the data, and this claim tells it: a diagnostic, covered by no statement"
_INDICES_TELL = Theorem(key="none", where="which coordinates a client reports depends on its data")
_EACH_COORDINATE = Theorem(key="DR14.thm3.16", where="basic composition of a user's own reports")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How many users, of what dimension, for how long; `settings` are the protocol's own keys."""

    num_users: int
    dim: int
    delta: float
    rounds: int = 1
    colluders: int = 0
    participation: Participation = dataclasses.field(default_factory=Everyone)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, dim=self.dim, rounds=self.rounds, colluders=self.colluders)
        _validate.at_least(2, num_users=self.num_users)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds)
        _validate.in_open_interval(0, 1, delta=self.delta)

    def with_setting(self, key: str, value: Any) -> Plan:
        """The same plan with one setting changed."""
        return dataclasses.replace(self, settings={**self.settings, key: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quote:
    """A protocol's statements side by side: who promises what, against whom."""

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


def quote(name: str, plan: Plan) -> Quote:
    """All statements of a protocol at these parameters."""
    protocol, cohort = settled(name, plan)
    view = protocol.view(cohort, plan.dim, neighbors=protocol.relation)
    cohorts = [cohort] * plan.rounds
    return state(protocol, cohorts, plan.dim, [view.round] * plan.rounds, view.scope, delta=plan.delta)


def state(
    protocol: protocols.Protocol,
    cohorts: Sequence[protocols.Cohort],
    dim: int,
    rounds: Sequence[Round],
    scope: Scope,
    *,
    delta: float,
    statement: Statement | None = None,
) -> Quote:
    """All statements about these rounds of a settled protocol; `statement` if what is certified is known already."""
    about = protocol.published_event(cohorts[0], dim) if cohorts and protocol.claimed_for == "round" else None
    claimed = _claimed_for_round(protocol.name, about, scope, delta)
    if protocol.claimed_for == "training":
        claimed = _claimed_for_training(protocol, cohorts, dim, scope, delta)
    return Quote(
        protocol=protocol.name,
        certified=statement or certified(rounds, scope, delta=delta),
        claimed=claimed,
        local=_local(rounds, scope, about and about[0], delta),
        shuffler=_shuffler(rounds, scope, about and about[0]),
    )


def certified(rounds: Sequence[Round], scope: Scope, *, delta: float, eps: float | None = None) -> Statement:
    """What is certified for these rounds at this delta, or at this eps: a number, or that there is none, and why."""
    try:
        if eps is not None:
            return accounting.certify(rounds, scope, eps=eps)
        return accounting.certify(rounds, scope, delta=delta)
    except NotApplicable as refusal:
        return unbounded(scope, reason=f"not certified: {refusal}", delta=delta)


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
    """The parameter that meets a central eps, and the quote at it; never on the unsafe side.

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


def _build(name: str, plan: Plan) -> protocols.Protocol:
    """The protocol with these settings; how far updates are clipped changes no statement, so 1 will do."""
    clips = {key: 1.0 for key in ("clip_norm", "clip_value") if protocols.requires(name, key)}
    if name == "dp_fl" and "clip" not in plan.settings:
        clips["clip_norm"] = 1.0
    return protocols.build(name, {**clips, **plan.settings})


def settled(name: str, plan: Plan) -> tuple[protocols.Protocol, protocols.Cohort]:
    """The protocol that a plan is about, with everything set that follows from its cohort."""
    protocol = _build(name, plan)
    cohort = protocols.Cohort(
        participation=plan.participation,
        size=plan.num_users,
        min_size=plan.num_users if protocol.shuffled else 0,
        colluders=plan.colluders,
    )
    return protocol.settle(cohort, plan.dim), cohort


def _noise_parameter(name: str, plan: Plan) -> str:
    """The field that the protocol's noise is in."""
    needed = {"beta": 1.0} if protocols.requires(name, "beta") else {}
    field = _build(name, dataclasses.replace(plan, settings={**needed, **plan.settings})).noise_field
    if field is None:
        raise ValueError(f"expected a protocol with noise to calibrate, got {name!r}")
    return field


def _local(rounds: Sequence[Round], scope: Scope, about: Mechanism | None, delta: float) -> Statement:
    """What is left when shuffler and analyzer collude.

    Rounds of one training differ in their crowds alone, which hide nobody here: one stands for all.
    """
    epochs = {item.participation.epoch for item in rounds if isinstance(item.participation, Disjoint)}
    times = max(1, len(epochs) + sum(not isinstance(item.participation, Disjoint) for item in rounds))
    mine = dataclasses.replace(
        scope,
        trust=Trust.LOCAL,
        adversary="shuffler and analyzer, and everyone else"
        if scope.trust is Trust.SHUFFLE
        else "whoever sees what a user sends, and everyone else",
        assumptions=("users' noise is independent and fresh",),
    )
    mechanism = about or (rounds[0].mechanism if rounds else None)
    match mechanism:
        case Shuffled() | PaddedBernoulli() | PaddedTopk():
            one = _one_client(mechanism, delta / times)
        case Personalized():
            one = Bound(eps=mechanism.coordinates * max(mechanism.eps_locals), delta=0.0, theorem=_EACH_COORDINATE)
        case SampledSubject() if scope.trust is Trust.LOCAL:
            return certified(rounds, scope, delta=delta)
        case Gaussian() | Laplace() if scope.trust is Trust.LOCAL:
            return certified(rounds, mine, delta=delta)
        case SplitAndMix():
            return unbounded(
                mine, reason="all shufflers together see every share, and one client's noise is too little"
            )
        case _:
            return unbounded(mine, reason="the curator sees every update")
    if math.isinf(one.eps):
        return unbounded(mine, reason=one.theorem.where)
    whole = Bound(eps=one.eps * times, delta=min(1.0, one.delta * times), theorem=one.theorem)
    return mine.state(whole, Verdict.CERTIFIED)


def _one_client(mechanism: Crowd, delta: float) -> Bound:
    """The reports of one client in one round, seen with its name on them."""
    try:
        bound = pairs.local(mechanism, delta=delta)
    except NotApplicable as refusal:
        return Bound(eps=math.inf, delta=delta, theorem=Theorem(key="none", where=f"not certified: {refusal}"))
    if math.isinf(bound.eps):
        return dataclasses.replace(bound, theorem=_INDICES_TELL)
    return bound


def _shuffler(rounds: Sequence[Round], scope: Scope, about: Mechanism | None) -> Statement | None:
    """What the shuffler learns, who sees names and slots but no values."""
    if scope.trust is not Trust.SHUFFLE:
        return None
    theirs = dataclasses.replace(
        scope, adversary="shuffler", assumptions=("values are encrypted for the analyzer, and all messages look alike",)
    )
    mechanism = about or (rounds[0].mechanism if rounds else None)
    if isinstance(mechanism, PaddedTopk) and mechanism.decoys < mechanism.coordinates - mechanism.top:
        return unbounded(
            theirs, reason=f"the shuffler sees which coordinates a client reports; {_index_privacy(mechanism)}"
        )
    return theirs.state(Bound(eps=0.0, delta=0.0, theorem=_NOTHING_SHOWN), Verdict.CERTIFIED)


def _index_privacy(event: PaddedTopk) -> str:
    """FLAME's measure of what indices tell."""
    try:
        nu = flame.theorem5(num_users=event.num_users, pad_to=event.pad_to, beta=event.top / event.coordinates)
    except NotApplicable as refusal:
        return f"FLAME Thm. 5: {refusal}"
    return f"FLAME Thm. 5 allows {nu.quantity} and nu {nu.value:.4g} at the best. {nu.reason}"
