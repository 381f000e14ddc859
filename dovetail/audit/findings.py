"""What an audit found, beside what is certified and what is claimed.

Two kinds of attack are made. *Exact* ones compute both worlds from the event and the densities of the reports: they
need no runs and reach the sizes and deltas of real deployments, but trust the code to do what its event says. *Counted*
ones run the code itself, many times: they trust nothing, and reach as far as their trials do. A certified eps below
either is an error in a proof or in the code, and the finding says that it is not consistent.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from dovetail import _validate
from dovetail.audit import attacks, exact, runs
from dovetail.audit.bounds import ExactAttack, LowerBound, best_bound, disjoint_attack
from dovetail.audit.runs.games import Game, neighboring_worlds
from dovetail.audit.runs.scores import VIEWS, View
from dovetail.events import Round
from dovetail.guarantee import quotes
from dovetail.protocols import Cohort, Protocol
from dovetail.statements import NotApplicable, Statement

__all__ = ["Finding", "attack_training", "audit"]

_MOST_REPORTS = 20_000  # with more reports in a trial, runs are only counted if the caller asks for trials
_NOTHING = "no attack was tried"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Finding:
    """The best lower bound on a protocol's eps in one view, every other that was found, and the statements about it.

    `certified` is what the bound is held against: in the view "colluding" the local statement, where nobody is trusted.
    `exact_attacks` are kept to compute bounds at other deltas.
    """

    protocol: str
    view: View
    terms: quotes.Terms
    bound: LowerBound
    others: tuple[LowerBound, ...]
    certified: Statement
    claimed: Statement | None
    exact_attacks: tuple[ExactAttack, ...] = ()

    @property
    def counted_bound(self) -> LowerBound | None:
        """The bound from runs of the code, if there were any."""
        return next((bound for bound in (self.bound, *self.others) if bound.trials), None)

    @property
    def is_consistent(self) -> bool:
        """Whether the attacks found no larger eps than is certified; False shows an error in a proof or in the code."""
        return self.bound.eps <= self.certified.eps

    @property
    def is_claim_refuted(self) -> bool | None:
        """Whether the attacks found a larger eps than is claimed; None without a claim for the same neighbours."""
        if self.claimed is None or self.claimed.neighbors is not self.certified.neighbors:
            return None
        return self.bound.eps > self.claimed.eps

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data; the eps of an unbounded bound is None."""
        return {
            "protocol": self.protocol,
            "view": self.view,
            "n": self.terms.num_users,
            "dim": self.terms.dim,
            "rounds": self.terms.rounds,
            "settings": dict(self.terms.settings),
            **_bound_json(self.bound),
            "attacks": [_bound_json(bound) for bound in (self.bound, *self.others)],
            "certified": self.certified.to_json(),
            "claimed": None if self.claimed is None else self.claimed.to_json(),
            "consistent": self.is_consistent,
            "claim_refuted": self.is_claim_refuted,
        }


def _bound_json(bound: LowerBound) -> dict[str, Any]:
    """A lower bound as plain data; the eps of an unbounded one is null."""
    return {
        "eps_lower": None if bound.is_unbounded else bound.eps,
        "unbounded": bound.is_unbounded,
        "delta": bound.delta,
        "confidence": bound.confidence,
        "trials": bound.trials,
        "attack": bound.attack,
    }


def audit(
    name: str,
    terms: quotes.Terms,
    *,
    view: View = "analyzer",
    trials: int | None = None,
    confidence: float = 0.95,
    seed: int = 0,
    observe: Callable[[str], None] | None = None,
) -> Finding:
    """Attack a protocol at these parameters.

    Arguments:
        name: the protocol's.
        terms: its settings, users, coordinates, rounds and delta.
        view: whether the adversary is the analyzer, an observer of estimates, or shuffler and analyzer colluding.
        trials: how many runs are counted in each world; 0 for none, None for as many as are quickly done.
        confidence: with probability at most 1 - confidence, over the coins of counted runs, the bound is above the
            true eps.
        seed: of the counted runs' randomness.
        observe: called with what is done next.
    """
    _validate.one_of(VIEWS, view=view)
    _validate.in_open_interval(0, 1, confidence=confidence)
    quote = quotes.quote(name, terms)
    protocol, cohort = quotes.settle_protocol(name, terms)
    about = quote.local if view == "colluding" else quote.certified
    delta = about.delta if view == "colluding" else terms.delta
    if observe:
        observe("exact attacks")
    exact_attacks = _exact_attacks(protocol, cohort, terms, view)
    bounds = [exact_attack.eps(delta=delta) for exact_attack in exact_attacks]
    games = [] if trials == 0 else _playable_games(protocol, cohort, terms)
    num_trials = _num_trials(games, trials)
    if num_trials:
        bounds.append(
            runs.lower_bound(
                games,
                view=view,
                trust=protocol.view(cohort, terms.dim, neighbors=terms.relation(protocol)).scope.trust,
                delta=delta,
                trials=num_trials,
                confidence=confidence,
                seed=seed,
                observe=observe,
            )
        )
    top = best_bound(bounds) if bounds else LowerBound(eps=0.0, delta=delta, attack=_NOTHING)
    return Finding(
        protocol=name,
        view=view,
        terms=terms,
        bound=top,
        others=tuple(bound for bound in bounds if bound is not top),
        certified=about,
        claimed=None if view == "colluding" else quote.claimed,
        exact_attacks=exact_attacks,
    )


def attack_training(rounds: Sequence[Round], *, delta: float) -> LowerBound | None:
    """The best exact attack on a training by these rounds, as they are certified; None where none is known.

    Arguments:
        rounds: all rounds of the training, on the same inputs; of several kinds only where users are Poisson samples.
    """
    try:
        return best_bound([exact_attack.eps(delta=delta) for exact_attack in exact.exact_attacks_on_rounds(rounds)])
    except NotApplicable:
        return None


def _exact_attacks(protocol: Protocol, cohort: Cohort, terms: quotes.Terms, view: View) -> tuple[ExactAttack, ...]:
    """The exact attacks that are known in this view; none for an observer of estimates, which is left to counting.

    Attacks that know the protocol (`stronger_attacks`, `attacks.attacks_on_own_reports`) are for one round and for the
    protocol's own neighbouring relation; those on the event of a round are for any.
    """
    if view == "observer":
        return ()
    fits = terms.rounds == 1 and terms.relation(protocol) is protocol.relation
    if view == "colluding":
        with contextlib.suppress(NotApplicable):
            return tuple(attacks.attacks_on_own_reports(protocol, cohort, terms.dim)) if fits else ()
        return ()
    listed: list[ExactAttack] = []
    if fits:
        with contextlib.suppress(NotApplicable):
            listed = attacks.stronger_attacks(protocol, cohort, terms.dim)
    if not protocol.private_steps and protocol.noise_std(cohort.size, terms.dim) == 0:
        listed = [*listed, disjoint_attack("the released estimate, which has no noise")]
    item = protocol.view(cohort, terms.dim, neighbors=terms.relation(protocol)).round
    if not attacks.shows_less_than_event(protocol):
        with contextlib.suppress(NotApplicable):
            listed = [*listed, *exact.exact_attacks_on_rounds([item] * terms.rounds)]
    return tuple(listed)


def _playable_games(protocol: Protocol, cohort: Cohort, terms: quotes.Terms) -> list[Game]:
    """A game for every pair of worlds in which the protocol's code can be run."""
    worlds = neighboring_worlds(protocol, cohort, terms.dim, neighbors=terms.relation(protocol), rounds=terms.rounds)
    return [Game(protocol=protocol, cohort=cohort, worlds=pair) for pair in worlds]


def _num_trials(games: list[Game], requested: int | None) -> int:
    """How many trials to count: as requested; else as many as are quickly done, and none where trials are large."""
    if requested is not None:
        return requested
    return runs.default_trials(games[0]) if games[0].reports_per_trial <= _MOST_REPORTS else 0
