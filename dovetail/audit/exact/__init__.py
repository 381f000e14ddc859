"""Exact attacks on what an event says was run: both worlds in closed form, no runs counted.

`exact_attacks` knows, for every kind of event, neighbouring inputs that are hard to hide and a statistic that tells
them apart. What it shows is a lower bound on the eps of that event; a certified bound below it would be wrong. Rounds
repeat the same inputs with fresh randomness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dovetail import _validate
from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact import crowds, noise, personal
from dovetail.events import (
    Disjoint,
    Everyone,
    Gaussian,
    Laplace,
    Mechanism,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    Round,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import Neighbors, NotApplicable

__all__ = ["exact_attacks", "exact_attacks_on_rounds"]


def exact_attacks(mechanism: Mechanism, *, rounds: int = 1) -> list[ExactAttack]:
    """The exact attacks on so many rounds of this mechanism; the caller takes the best for its delta.

    Guarantees:
        At no eps is the delta of a attack above the hockey-stick divergence of the whole view, for some neighbours.
        `NotApplicable` where no exact attack is known, with the reason.
    """
    _validate.integer(rounds=rounds)
    _validate.at_least(1, rounds=rounds)
    match mechanism:
        case Gaussian():
            return noise.gaussian(mechanism, rounds)
        case Laplace():
            return noise.laplace(mechanism, rounds)
        case Shuffled():
            return crowds.shuffled(mechanism, rounds)
        case PaddedBernoulli():
            return crowds.padded_bernoulli(mechanism, rounds)
        case PaddedTopk():
            return crowds.padded_topk(mechanism, rounds)
        case Personalized():
            return personal.exact_attacks(mechanism, rounds)
        case SplitAndMix():
            return noise.split_and_mix(mechanism, rounds)
        case SampledSubject():
            return noise.sampled_subject(mechanism, rounds)
        case NonPrivate():
            raise NotApplicable(f"an event without a guarantee does not say what ran: {mechanism.reason}")
    raise NotApplicable(f"no exact attack is known on {type(mechanism).__name__}")


def exact_attacks_on_rounds(rounds: Sequence[Round]) -> list[ExactAttack]:
    """The exact attacks on a training, given as the rounds that an accountant composes.

    Guarantees:
        As those of `exact_attacks`, for the rounds together; one user is attacked in every round that it may be in.
    """
    if not rounds:
        raise NotApplicable("nothing was released")
    if all(isinstance(one.participation, Poisson) for one in rounds):
        return _sampled(rounds)
    mechanisms = {one.mechanism for one in rounds}
    if len(mechanisms) > 1:
        raise NotApplicable("no exact attack is known for rounds that differ from each other")
    if all(one.participation == Everyone() for one in rounds):
        return exact_attacks(rounds[0].mechanism, rounds=len(rounds))
    if all(isinstance(one.participation, Disjoint) for one in rounds):
        return exact_attacks(rounds[0].mechanism, rounds=len({one.participation for one in rounds}))
    raise NotApplicable("no exact attack is known for this kind of participation")


def _sampled(rounds: Sequence[Round]) -> list[ExactAttack]:
    times: Counter[tuple[Gaussian, float]] = Counter()
    for one in rounds:
        mechanism = one.mechanism
        if not isinstance(mechanism, Gaussian) or mechanism.neighbors is not Neighbors.ADD_REMOVE or mechanism.std == 0:
            raise NotApplicable(
                "with Poisson sampling, exact attacks are known only for Gaussian sums under add-remove neighbours"
            )
        times[mechanism, one.participation.prob] += 1  # type: ignore[union-attr]
    return noise.sampled_gaussians(times)
