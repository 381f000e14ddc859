"""What a protocol promises before it is run: certified, claimed by its paper, and left when nobody is trusted.

A quote needs the protocol's name, the number of users, the dimension and the protocol's own settings; no data, no
model. `quote` certifies given parameters, `calibrate` finds the one that meets a target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import _validate, accounting, protocols
from dovetail.accounting import pairs
from dovetail.accounting.published import CLAIMS
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
    Report,
    Round,
    Shuffled,
)
from dovetail.statements import (
    Bound,
    Neighbors,
    NotApplicable,
    Scope,
    Statement,
    Theorem,
    Trust,
    Unit,
    Verdict,
    unbounded,
)

__all__ = ["NAMES", "Plan", "Quote", "calibrate", "quote"]

_SHUFFLE_ASSUMPTIONS = (
    "users' noise is independent and fresh",
    "the shuffler permutes every coordinate uniformly and independently, adds and hides the dummies",
    "shuffler and analyzer do not collude",
    "each user uploads all of its reports or none",
)
_TRUTH = 50.0  # a report with a larger eps_local lies less often than a computer errs
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
    """A protocol's statements side by side."""

    protocol: str
    certified: Statement
    claimed: Statement | None
    local: Statement

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "protocol": self.protocol,
            "certified": self.certified.to_json(),
            "claimed": None if self.claimed is None else self.claimed.to_json(),
            "local": self.local.to_json(),
        }


def quote(name: str, plan: Plan) -> Quote:
    """Certified, claimed and local statements of a protocol at these parameters."""
    rounds, scope = _rounds(name, plan)
    try:
        certified = accounting.certify(rounds, scope, delta=plan.delta)
    except NotApplicable as refusal:
        certified = unbounded(scope, reason=f"not certified: {refusal}", delta=plan.delta)
    return Quote(
        protocol=name,
        certified=certified,
        claimed=_claimed(name, plan, rounds, scope),
        local=_local(plan, rounds, scope),
    )


def calibrate(name: str, plan: Plan, *, eps: float, parameter: str | None = None) -> tuple[str, float | int, Quote]:
    """The parameter that meets a central eps, and the quote at it; never on the unsafe side.

    `parameter` is eps_local (the default of shuffled protocols), noise_multiplier (of Gaussian ones), beta or pad_to.
    """
    parameter = parameter or ("noise_multiplier" if _is_gaussian(name, plan) else "eps_local")
    _validate.one_of(("eps_local", "noise_multiplier", "beta", "pad_to"), parameter=parameter)

    def eps_at(value: float | int) -> float:
        rounds, _ = _rounds(name, plan.with_setting(parameter, value))
        try:
            return accounting.bound(rounds, delta=plan.delta).eps
        except NotApplicable:
            return float("inf")

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


def _rounds(name: str, plan: Plan) -> tuple[list[Round], Scope]:
    _validate.known("protocol", name, NAMES)
    if name in protocols.PROTOCOLS:
        protocol = protocols.build(name, {"clip_norm": 1.0, **plan.settings} if name == "dp_fl" else plan.settings)
        cohort = protocols.Cohort(participation=plan.participation, size=plan.num_users)
        view = protocol.view(cohort, plan.dim, neighbors=Neighbors.REPLACE_ONE)
        return [view.round] * plan.rounds, view.scope
    build, keys = _SHUFFLED[name]
    for key in plan.settings:
        _validate.known(f"setting of {name!r}", key, keys)
    said = f"at least {plan.num_users - plan.colluders} honest users take part, and at most {plan.colluders} are not"
    scope = Scope(
        trust=Trust.SHUFFLE,
        adversary="analyzer",
        neighbors=Neighbors.REPLACE_ONE,
        unit=Unit.USER,
        assumptions=(*_SHUFFLE_ASSUMPTIONS, said),
    )
    return [Round(mechanism=build(plan), participation=plan.participation)] * plan.rounds, scope


def _claimed(name: str, plan: Plan, rounds: list[Round], scope: Scope) -> Statement | None:
    """What the protocol's paper claims for one epoch of it."""
    mechanism = rounds[0].mechanism
    if name not in CLAIMS or not isinstance(mechanism, Crowd | Personalized):
        return None
    extra = {"kept": int(plan.settings.get("keep", 0.2) * plan.dim)} if name == "s_apes" else {}
    try:
        return CLAIMS[name](mechanism, delta=plan.delta, **extra).statement(scope, span="one round")
    except NotApplicable:
        return None


def _local(plan: Plan, rounds: list[Round], scope: Scope) -> Statement:
    """What is left when shuffler and analyzer collude."""
    times = (
        len({item.participation.epoch for item in rounds if isinstance(item.participation, Disjoint)}) or plan.rounds
    )
    mine = dataclasses.replace(
        scope,
        trust=Trust.LOCAL,
        adversary="shuffler and analyzer, and everyone else",
        assumptions=("users' noise is independent and fresh",),
    )
    mechanism = rounds[0].mechanism
    match mechanism:
        case Shuffled() | PaddedBernoulli() | PaddedTopk():
            one = pairs.local(mechanism, delta=plan.delta / times)
        case Personalized():
            one = Bound(eps=mechanism.coordinates * max(mechanism.eps_locals), delta=0.0, theorem=_EACH_COORDINATE)
        case Gaussian() | Laplace() if scope.trust is Trust.LOCAL:
            return accounting.certify(rounds, mine, delta=plan.delta)
        case _:
            return unbounded(mine, reason="the curator sees every update", delta=0.0)
    if one.eps == float("inf"):
        return unbounded(mine, reason="which coordinates a client reports depends on its data")
    whole = Bound(eps=one.eps * times, delta=min(1.0, one.delta * times), theorem=one.theorem)
    return mine.state(whole, Verdict.CERTIFIED)


def _is_gaussian(name: str, plan: Plan) -> bool:
    return name == "dp_fl" or (name == "ldp_fl" and plan.settings.get("randomizer", "gaussian") == "gaussian")


def _need(plan: Plan, key: str) -> Any:
    if key not in plan.settings:
        raise ValueError(f"expected {key}, got none: give it with --set {key}=...")
    return plan.settings[key]


def _report(plan: Plan) -> Report:
    kind = plan.settings.get("randomizer", "rr2")
    _validate.one_of(("rr2", "rr", "laplace", "generic"), randomizer=kind)
    levels = int(plan.settings.get("levels", 2)) if kind == "rr" else 2
    return Report(
        kind="rr" if kind in ("rr2", "rr") else kind, eps_local=float(_need(plan, "eps_local")), levels=levels
    )


def _shuffled(plan: Plan) -> Mechanism:
    return Shuffled(report=_report(plan), num_users=plan.num_users, colluders=plan.colluders, coordinates=plan.dim)


def _one_message(plan: Plan) -> Mechanism:
    report = Report(kind="generic", eps_local=float(_need(plan, "eps_local")))
    return Shuffled(report=report, num_users=plan.num_users, colluders=plan.colluders)


def _double(plan: Plan) -> Mechanism:
    return PaddedBernoulli(
        report=_report(plan),
        num_users=plan.num_users,
        colluders=plan.colluders,
        coordinates=plan.dim,
        pad_to=plan.settings.get("pad_to", plan.num_users),
        inclusion=_need(plan, "beta"),
    )


def _topk(plan: Plan) -> Mechanism:
    top = _need(plan, "k")
    return PaddedTopk(
        report=_report(plan),
        num_users=plan.num_users,
        colluders=plan.colluders,
        coordinates=plan.dim,
        pad_to=plan.settings.get("pad_to", plan.num_users),
        top=top,
        decoys=plan.settings.get("decoys", plan.dim - top),
    )


def _personal(kind: str) -> Callable[[Plan], Mechanism]:
    def build(plan: Plan) -> Mechanism:
        return Personalized(
            kind=kind,  # type: ignore[arg-type]
            eps_locals=_budgets(_need(plan, "budgets"), plan.num_users),
            coordinates=plan.dim,
            colluders=plan.colluders,
        )

    return build


def _budgets(given: Any, num_users: int) -> tuple[float, ...]:
    """Every user's budget: [low, high] for evenly spaced ones, or a file with one number a line."""
    if isinstance(given, str):
        path = Path(given)
        if not path.is_file():
            raise FileNotFoundError(f"expected budgets as [low, high] or a file of numbers, got {given!r}")
        values = np.loadtxt(path, ndmin=1)
    elif isinstance(given, list | tuple) and len(given) == 2:
        values = np.linspace(float(given[0]), float(given[1]), num_users)
    else:
        raise ValueError(f"expected budgets as [low, high] or a file of numbers, got budgets={given!r}")
    if len(values) != num_users:
        raise ValueError(f"expected one budget for each of {num_users} users, got {len(values)}")
    return tuple(values.tolist())


_REPORT_KEYS = ("randomizer", "levels", "eps_local")
_SHUFFLED: dict[str, tuple[Callable[[Plan], Mechanism], tuple[str, ...]]] = {
    "ss_simple": (_shuffled, _REPORT_KEYS),
    "ss_double": (_double, (*_REPORT_KEYS, "beta", "pad_to")),
    "ss_topk": (_topk, (*_REPORT_KEYS, "k", "decoys", "pad_to")),
    "privunit": (_one_message, ("eps_local",)),
    "apes": (_personal("clip_laplace"), ("budgets",)),
    "s_apes": (_personal("clip_laplace"), ("budgets", "keep")),
    "unis": (_personal("laplace"), ("budgets",)),
}
NAMES = tuple(sorted({*_SHUFFLED, *protocols.PROTOCOLS}))
