"""Exact attacks on what an event says was run: both worlds in closed form, no runs counted.

`duels` knows, for every kind of event, neighbouring inputs that are hard to hide and a statistic that tells them apart.
What it shows is a lower bound on the eps of that event; a certified bound below it would be wrong. Rounds repeat the
same inputs with fresh randomness.
"""

from __future__ import annotations

from dovetail import _validate
from dovetail.audit.bounds import Duel
from dovetail.audit.exact import crowds, noise, personal
from dovetail.events import (
    Gaussian,
    Laplace,
    Mechanism,
    NonPrivate,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    SampledSubject,
    Shuffled,
    SplitAndMix,
)
from dovetail.statements import NotApplicable

__all__ = ["duels"]


def duels(mechanism: Mechanism, *, rounds: int = 1) -> list[Duel]:
    """The exact attacks on so many rounds of this mechanism; the caller takes the best for its delta.

    Guarantees:
        At no eps is the delta of a duel above the hockey-stick divergence of the whole view, for some neighbours.
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
            return personal.duels(mechanism, rounds)
        case SplitAndMix():
            return noise.split_and_mix(mechanism, rounds)
        case SampledSubject():
            return noise.sampled_subject(mechanism, rounds)
        case NonPrivate():
            raise NotApplicable(f"an event that promises nothing does not say what was run: {mechanism.reason}")
