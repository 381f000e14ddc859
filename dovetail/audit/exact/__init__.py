"""Exact attacks on what an event says was run: both worlds in closed form, no runs counted.

For every type of event that is registered (`registry`), `exact_attacks` knows neighbouring inputs that are hard to hide
and a statistic that tells them apart. What it shows is a lower bound on the eps of that event; a certified bound below
it would be wrong. Rounds repeat the same inputs with fresh randomness.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from dovetail import _validate
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import crowds, noise, personal, registry
from dovetail.audit.exact.sums import attack_likelihood_ratios
from dovetail.events import Disjoint, Everyone, Mechanism, NonPrivate, Poisson, Round, Separated
from dovetail.statements import NotApplicable

__all__ = ["crowds", "exact_attacks", "exact_attacks_on_rounds", "noise", "personal", "registry"]


def exact_attacks(mechanism: Mechanism, *, rounds: int = 1) -> list[ExactAttack]:
    """The exact attacks on this mechanism, of which the caller takes the best for its delta.

    Arguments:
        mechanism: the event of one round.
        rounds: how often it is repeated on the same inputs.

    Guarantees:
        At no eps is the delta of an attack above the hockey-stick divergence of the whole view, for some neighbours.
        `NotApplicable` where no exact attack is known, with the reason.
    """
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    return registry.attacks_on_event(mechanism, rounds)


def exact_attacks_on_rounds(rounds: Sequence[Round]) -> list[ExactAttack]:
    """The exact attacks on a training, given as the rounds that an accountant composes.

    Guarantees:
        As those of `exact_attacks`, for the rounds together; one user is attacked in every round that it may be in.
    """
    if not rounds:
        raise NotApplicable("nothing was released")
    if len({type(item.participation) for item in rounds}) > 1:
        raise NotApplicable("no exact attack is known for this kind of participation")
    return registry.attacks_on_rounds(rounds[0].participation, rounds)


@registry.attacks_on_event.register(NonPrivate)
def _refuse_non_private(event: NonPrivate, rounds: int) -> list[ExactAttack]:
    raise NotApplicable(f"an event without a guarantee does not say what ran: {event.reason}")


@registry.attacks_on_rounds.register(Everyone)
def _attack_everyone(participation: Everyone, rounds: Sequence[Round]) -> list[ExactAttack]:
    """The attacks on a user who is in every round."""
    return _attack_equal_rounds(rounds, len(rounds))


@registry.attacks_on_rounds.register(Disjoint)
def _attack_disjoint(participation: Disjoint, rounds: Sequence[Round]) -> list[ExactAttack]:
    """The attacks on a user who is in one batch of each epoch."""
    return _attack_equal_rounds(rounds, len({item.participation for item in rounds}))


@registry.attacks_on_rounds.register(Separated)
def _attack_separated(participation: Separated, rounds: Sequence[Round]) -> list[ExactAttack]:
    """The attacks on a user who comes at the first round and then as soon as the schedule allows."""
    if len({item.participation for item in rounds}) > 1:
        raise NotApplicable("no exact attack is known for several streams")
    return registry.attacks_on_stream(_mechanism_of_all(rounds), participation, len(rounds))


@registry.attacks_on_rounds.register(Poisson)
def _attack_poisson(participation: Poisson, rounds: Sequence[Round]) -> list[ExactAttack]:
    """The attack on a user who is drawn for each round by a coin, by the likelihood ratio of all releases."""
    times = Counter((item.mechanism, item.participation) for item in rounds)
    observations = [
        registry.observe_in_sample(event, sample.prob_drawn, count) for (event, sample), count in times.items()
    ]
    return [
        attack_likelihood_ratios("log-likelihood ratios of all releases, drawn or not", observations, pure_eps=math.inf)
    ]


def _attack_equal_rounds(rounds: Sequence[Round], times: int) -> list[ExactAttack]:
    """The attacks on a user who is in `times` of these rounds, which must all be the same."""
    return exact_attacks(_mechanism_of_all(rounds), rounds=times)


def _mechanism_of_all(rounds: Sequence[Round]) -> Mechanism:
    """The mechanism that all rounds have; refuses rounds that differ."""
    if len({item.mechanism for item in rounds}) > 1:
        raise NotApplicable("no exact attack is known for rounds that differ from each other")
    return rounds[0].mechanism
