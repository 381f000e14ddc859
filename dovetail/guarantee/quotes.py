"""What a protocol guarantees, before it runs: certified, claimed by its paper, and what remains if nobody is trusted.

A quote needs the protocol's name, the number of users, the dimension and the protocol's own settings; no data, no
model. `quote` certifies given parameters, `calibrate` finds the one that meets a target.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from dovetail import _validate, accounting, protocols
from dovetail.events import Disjoint, Everyone, FixedSize, Participation, Poisson, Separated
from dovetail.guarantee import Guarantee, Quote, Spread
from dovetail.statements import Neighbors, NotApplicable

__all__ = [
    "SAMPLED",
    "Quote",
    "Terms",
    "calibrate",
    "guarantee",
    "quote",
    "settle_protocol",
    "with_cohort",
    "with_sampling",
]

SAMPLED = ("everyone", "separated", "fixed", "poisson", "secret")  # ways to take part, by their names in a config
_NO_COMMON_NOISE = "there is no sum in which the noise of all users adds up"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """What a quote is about: how many users, of what dimension, for how long, under which settings."""

    num_users: int  # that take part in a round
    dim: int  # of an update
    delta: float
    rounds: int = 1
    colluders: int = 0
    min_size: int | None = None  # users that a round must have; all of them unless given, where they hide each other
    uploads: int | None = None  # users that upload, where each decides in secret whether its data enter a round
    noise_scale: float = 1.0
    participation: Participation = dataclasses.field(default_factory=Everyone)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the protocol's own, by their config keys
    neighbors: Neighbors | None = None  # what is stated under; the protocol's own relation unless given

    def __post_init__(self) -> None:
        _validate.integer(num_users=self.num_users, dim=self.dim, rounds=self.rounds, colluders=self.colluders)
        _validate.at_least(2, num_users=self.num_users)
        _validate.at_least(1, dim=self.dim, rounds=self.rounds)
        _validate.in_open_interval(0, 1, delta=self.delta)

    def relation(self, protocol: protocols.Protocol) -> Neighbors:
        """The neighbouring relation that statements about this protocol are made under."""
        return self.neighbors or protocol.relation

    def with_setting(self, key: str, value: Any) -> Terms:
        """The same terms with one setting changed."""
        return dataclasses.replace(self, settings={**self.settings, key: value})


def with_sampling(terms: Terms, kind: str, population: int) -> Terms:
    """The same terms where `num_users` of a population take part in a round, in one of the ways of `SAMPLED`.

    With "poisson" and "secret" they are so many on average; with "secret" the whole population uploads. With
    "separated" they take turns, as `sampling.Schedule` has it.
    """
    _validate.one_of(SAMPLED, participation=kind)
    _validate.integer(population=population)
    _validate.at_least(terms.num_users, population=population)
    taking = Poisson(prob=terms.num_users / population)
    match kind:
        case "separated":
            uploads = -(-terms.rounds * terms.num_users // population)
            turns = Separated(uploads=uploads, separation=population // terms.num_users, rounds=terms.rounds)
            return dataclasses.replace(terms, participation=turns)
        case "fixed":
            return dataclasses.replace(terms, participation=FixedSize(size=terms.num_users, population=population))
        case "poisson":
            return dataclasses.replace(terms, participation=taking)
        case "secret":
            return dataclasses.replace(terms, participation=taking, uploads=population)
    if population != terms.num_users:
        raise ValueError(f"where everyone takes part, population is {terms.num_users}, got population={population}")
    return terms


def with_cohort(terms: Terms, kind: str | None, population: int | None) -> Terms:
    """The same terms for a sample of a population, if there is one; a secret sample of fixed size unless `kind` says.

    Without a population everyone takes part; kinds that draw from one are refused then.
    """
    if kind is not None:
        _validate.one_of(SAMPLED, participation=kind)
    if population is None and kind not in (None, "everyone"):
        raise ValueError(f"--participation {kind} needs --population, of which --n take part in a round")
    return terms if population is None else with_sampling(terms, kind or "fixed", population)


def guarantee(name: str, terms: Terms) -> Guarantee:
    """The `Guarantee` of a training with this protocol on these terms: equal rounds, one cohort."""
    protocol, cohort = _build_protocol(name, terms)
    return Guarantee(
        protocol=protocol,
        cohorts=(cohort,) * terms.rounds,
        dim=terms.dim,
        relation=terms.relation(protocol),
        delta=terms.delta,
        spread=Spread(users=terms.num_users if _draws_nobody(cohort) else cohort.population),
    )


def _draws_nobody(cohort: protocols.Cohort) -> bool:
    """Whether the cohort's participation does not say how many users there are: batches, streams, probability 0."""
    participation = cohort.participation
    return isinstance(participation, Disjoint | Separated) or (
        isinstance(participation, Poisson) and participation.prob == 0
    )


def quote(name: str, terms: Terms) -> Quote:
    """All statements of a protocol on these terms: certified, claimed by its paper, local, against the shuffler."""
    return guarantee(name, terms).quote()


def settle_protocol(name: str, terms: Terms) -> tuple[protocols.Protocol, protocols.Cohort]:
    """The protocol with everything set that follows from cohort and dimension, and the cohort of one round."""
    protocol, cohort = _build_protocol(name, terms)
    return protocol.settle(cohort, terms.dim), cohort


def calibrate(
    name: str, terms: Terms, *, eps: float, parameter: str | None = None, tolerance: float = 1e-4
) -> tuple[str, float | int, Quote]:
    """Find the parameter that meets a central eps; it is always rounded conservatively.

    Arguments:
        name: the protocol.
        terms: users, dimension, rounds and the protocol's other settings.
        eps: the central target, at the terms' delta.
        parameter: what is searched for: "beta", "pad_to", or by default the protocol's own noise (eps_local,
            noise_multiplier or budget_scale).
        tolerance: noise is at most this much above the least, relatively.

    Returns: the parameter's name, its value, and the quote at it.
    """
    own = protocols.build(name, terms.settings).noise_field
    if own is None:
        raise ValueError(f"{name!r} has no noise to calibrate")
    parameter = parameter or own
    _validate.one_of(tuple(dict.fromkeys((own, "beta", "pad_to"))), parameter=parameter)
    if parameter == own:
        calibrated = guarantee(name, terms).calibrate(eps, tolerance=tolerance)
        return own, getattr(calibrated.protocol, own), calibrated.quote()

    def eps_at(value: float | int) -> float:
        try:
            return guarantee(name, terms.with_setting(parameter, value)).bound().eps
        except NotApplicable:
            return math.inf

    value: float | int
    if parameter == "pad_to":
        value = accounting.smallest_integer(eps_at, eps=eps, low=terms.colluders + 2, high=100 * terms.num_users)
    else:
        value = min(1.0, 1 / accounting.smallest_noise(lambda noise: eps_at(min(1.0, 1 / noise)), eps=eps))
    return parameter, value, quote(name, terms.with_setting(parameter, value))


def _build_protocol(name: str, terms: Terms) -> tuple[protocols.Protocol, protocols.Cohort]:
    """The protocol as it is configured, and the cohort of one round; refuses secret uploads where there are none."""
    protocol = protocols.build(name, terms.settings)
    if terms.uploads is not None and not protocol.secret_rounds:
        raise NotApplicable(f"users of {name!r} cannot decide in secret whether their data enter: {_NO_COMMON_NOISE}")
    most = terms.num_users if terms.uploads is None else terms.uploads
    cohort = protocols.Cohort(
        participation=terms.participation,
        size=terms.num_users,
        min_size=(most if protocol.needs_minimum else 0) if terms.min_size is None else terms.min_size,
        colluders=terms.colluders,
        noise_scale=terms.noise_scale,
        uploads=terms.uploads,
    )
    return protocol, cohort
