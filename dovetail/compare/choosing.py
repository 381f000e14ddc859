"""Which protocols fit a situation: whom users trust, how many they are, how often they come, how large the model is.

Every protocol that asks for no more trust than there is gets the least noise that meets one target (eps, delta), by the
accountant that certifies runs; its messages are counted and timed as `compare` does. Accuracies are those of an earlier
comparison, where one is near. Every other protocol is ruled out with a reason.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from dovetail import _validate, protocols
from dovetail.compare._contenders import Committed, max_colluders, nearest_comparison, trust_in_words
from dovetail.compare._costs import Costs, costs
from dovetail.events import Everyone
from dovetail.guarantee import quotes
from dovetail.protocols import Protocol
from dovetail.statements import Statement, Trust

__all__ = ["PARTICIPATION", "TRUST", "Choice", "Fitting", "RuledOut", "Situation", "choose"]

TRUST = ("nobody", "aggregators", "shuffler", "curator")  # each suffices for what those before it suffice for
PARTICIPATION = ("everyone", "disjoint", "separated", "fixed", "poisson", "secret")
_LEVELS = {Trust.LOCAL: "nobody", Trust.SHARES: "aggregators", Trust.SHUFFLE: "shuffler", Trust.CURATOR: "curator"}
_COMPARED_PARTICIPATION = ("everyone", "disjoint")  # how users took part in the committed comparisons
_TOLERANCE = 1e-3  # of the noise, from above: finer searches take longer and print the same
_NO_NOISE = "it adds no noise and promises nothing"
_PERSONAL = "it is for users who have budgets of their own: see `dovetail calibrate {name}`, which may take minutes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known before a protocol is chosen.

    `trust` is the most that users accept. `per_round` users take part in each of `rounds` rounds, all unless given: in
    disjoint batches, which are public, unless another participation is given. All records of a user are protected
    together, however many there are.
    """

    trust: Literal["nobody", "aggregators", "shuffler", "curator"]
    users: int
    dim: int
    rounds: int
    eps: float
    delta: float
    per_round: int | None = None
    participation: str | None = None
    records_per_user: int = 1

    def __post_init__(self) -> None:
        _validate.one_of(TRUST, trust=self.trust)
        counts = {
            "users": self.users,
            "dim": self.dim,
            "rounds": self.rounds,
            "records_per_user": self.records_per_user,
        }
        _validate.integer(**counts, **_validate.not_none(per_round=self.per_round))
        _validate.at_least(2, users=self.users)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds, records_per_user=self.records_per_user)
        _validate.in_interval(2, self.users, **_validate.not_none(per_round=self.per_round))
        _validate.positive(eps=self.eps)
        _validate.in_open_interval(0, 1, delta=self.delta)
        _validate.one_of(PARTICIPATION, participation=self.kind)
        if self.kind == "everyone" and self.size != self.users:
            raise ValueError(f"where everyone takes part, per_round is {self.users}, got per_round={self.size}")
        if self.kind not in ("everyone", "disjoint") and self.per_round is None:
            raise ValueError(f"participation={self.kind!r} needs per_round")

    @property
    def size(self) -> int:
        """How many users' data enter a round; on average, where users are sampled independently."""
        return self.users if self.per_round is None else self.per_round

    @property
    def kind(self) -> str:
        """How users take part: a value of cohort.kind; by default "everyone" or "disjoint"."""
        return self.participation or ("everyone" if self.size == self.users else "disjoint")

    @property
    def uploads(self) -> int:
        """How many users upload in a round: with secret participation all of them."""
        return self.users if self.kind == "secret" else self.size

    def terms(self, name: str) -> quotes.Terms:
        """What protocol `name` is calibrated for in this situation: users, rounds, sampling, and its example settings.

        Of several shufflers all but one may collude. Where users come rarely `secagg` has the noise of aggregators,
        which later rounds can take back. In disjoint batches a user takes part once per epoch, so `rounds` of the terms
        are epochs, rounded up.
        """
        settings = protocols.fill_settings(name, self.dim, {})
        if hasattr(protocols.find(name), "colluding_shufflers"):
            settings["colluding_shufflers"] = protocols.build(name, settings).shufflers - 1  # type: ignore[attr-defined]
        if self.kind == "separated" and name == protocols.SecAgg.name:
            settings["noise"] = "aggregators"
        epochs = math.ceil(self.rounds / (self.users // self.size))
        terms = quotes.Terms(
            num_users=self.size,
            dim=self.dim,
            delta=self.delta,
            rounds=epochs if self.kind == "disjoint" else self.rounds,
            settings=settings,
        )
        return terms if self.kind in ("everyone", "disjoint") else quotes.with_sampling(terms, self.kind, self.users)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitting:
    """A protocol that fits: its statements, its noise and what a round costs.

    `parameter` is the name of the setting that sets the noise, `value` its calibrated value. `std` is the standard
    deviation of the noise on a coordinate of the mean update, divided by the setting that `clip` names; of noise that
    later rounds take back, what is left of it on the mean of all rounds, as if rounds were independent.
    """

    protocol: str
    trust: str  # whom a user must trust, in words
    certified: Statement
    local: Statement  # what is left if nobody is trusted
    parameter: str
    value: float
    std: float
    clip: str
    costs: Costs
    accuracy: float | None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "protocol": self.protocol,
            "trust": self.trust,
            "certified": self.certified.to_json(),
            "local": self.local.to_json(),
            self.parameter: self.value,
            "parameter": self.parameter,
            "noise_std": self.std,
            "noise_std_over": self.clip,
            "messages_per_user": self.costs.messages,
            "bytes_per_user": self.costs.bytes,
            "client_seconds": self.costs.client_seconds,
            "server_seconds": self.costs.server_seconds,
            "accuracy": self.accuracy,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuledOut:
    """A protocol that does not fit, and why."""

    protocol: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """All protocols for a situation: the most accurate first, or those that send least where no accuracy is known.

    `source` is the earlier comparison from which the accuracies are taken; None if none was near.
    """

    situation: Situation
    fitting: tuple[Fitting, ...]
    ruled_out: tuple[RuledOut, ...]
    source: Committed | None

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form."""
        situation = dataclasses.asdict(self.situation)
        return {
            **situation,
            "per_round": self.situation.size,
            "participation": self.situation.kind,
            "protocols": [fitting.to_json() for fitting in self.fitting],
            "ruled_out": [dataclasses.asdict(ruled_out) for ruled_out in self.ruled_out],
            "accuracy_from": None if self.source is None else dataclasses.asdict(self.source),
        }


def choose(situation: Situation, *, observe: Callable[[str], None] = lambda name: None) -> Choice:
    """Calibrate every protocol to the situation's target, or say why it is ruled out.

    Arguments:
        observe: called with each protocol's name before its turn, for progress.

    Guarantees:
        What is certified of a fitting protocol is at most the target, and asks for no more trust than there is.
        Every bundled protocol is in exactly one of the two lists.
    """
    source = None
    if situation.kind in _COMPARED_PARTICIPATION:
        source = nearest_comparison(eps=situation.eps, users=situation.users, dim=situation.dim)
    fitting, ruled_out = [], []
    for name in protocols.PROTOCOLS:
        observe(name)
        try:
            reason = _reason_against(name, situation)
            fit = None if reason else _calibrate_fitting(name, situation, source)
        except ValueError as refusal:  # no noise meets the target, or a theorem does not apply
            reason = str(refusal)
        if reason:
            ruled_out.append(RuledOut(protocol=name, reason=reason))
        elif fit is not None:
            fitting.append(fit)
    ranked = sorted(fitting, key=lambda fit: (-(fit.accuracy or 0.0), fit.costs.bytes))
    return Choice(situation=situation, fitting=tuple(ranked), ruled_out=tuple(ruled_out), source=source)


def _reason_against(name: str, situation: Situation) -> str | None:
    """The reason why a protocol is ruled out before anything is calibrated; None if there is none."""
    if (uncompared := protocols.find(name).uncompared) is not None:
        return uncompared
    terms = situation.terms(name)
    built = protocols.build(name, terms.settings)
    if built.noise_field is None:
        return _NO_NOISE
    if built.noise_field == "budget_scale":
        return _PERSONAL.format(name=name)
    guarantee = quotes.guarantee(name, dataclasses.replace(terms, participation=Everyone(), uploads=None))
    trust = guarantee.scope.trust
    settled = guarantee.settled_protocol
    one_of_several = trust is Trust.SHUFFLE and max_colluders(settled) > 0  # the same trust as in aggregators
    level = _LEVELS[Trust.SHARES if one_of_several else trust]
    if TRUST.index(level) > TRUST.index(situation.trust):
        return f"it needs more trust: {trust_in_words(trust, settled, situation.dim)}"
    return None


def _calibrate_fitting(name: str, situation: Situation, source: Committed | None) -> Fitting:
    """The protocol with the least noise that meets the target; raises ValueError where no noise does."""
    terms = situation.terms(name)
    parameter, value, quote = quotes.calibrate(name, terms, eps=situation.eps, tolerance=_TOLERANCE)
    protocol, _ = quotes.settle_protocol(name, terms.with_setting(parameter, value))
    clip, length = _clip_setting(protocol)
    std_of_mean = protocol.noise_std(situation.uploads, situation.dim) * situation.uploads / situation.size
    return Fitting(
        protocol=name,
        trust=trust_in_words(quote.certified.trust, protocol, situation.dim),
        certified=quote.certified,
        local=quote.certified if quote.certified.trust is Trust.LOCAL else quote.local,
        parameter=parameter,
        value=value,
        std=std_of_mean * protocol.noise_kept(situation.rounds) / length,
        clip=clip,
        costs=costs(protocol, situation.uploads, situation.dim),
        accuracy=None if source is None else source.accuracy(name, rounds=situation.rounds, per_round=situation.size),
    )


def _clip_setting(protocol: Protocol) -> tuple[str, float]:
    """The setting that bounds an update, and its value; ("update", 1) for a protocol without one."""
    for field in ("clip_norm", "clip_value"):
        if isinstance(value := getattr(protocol, field, None), int | float):
            return field, float(value)
    return "update", 1.0
