"""What was run, in privacy terms: plain data that protocols emit and accountants read.

A `Round` is one release: a mechanism (noise, a shuffled round, a sum by shares or over a subject's items, the best of
several trainings) and who took part in it (`Everyone`, `Disjoint`, `Separated`, `FixedSize`, `Poisson`). Sensitivities
are those of the event's own neighbouring relation, never of a convention that an accountant may or may not share. No
event holds user data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from dovetail.events._noise import (
    CorrelatedGaussian,
    DataIndependent,
    Gaussian,
    Laplace,
    NonPrivate,
    ReplacedUsers,
    SampledSubject,
)
from dovetail.events._participation import Disjoint, Everyone, FixedSize, Participation, Poisson, Separated
from dovetail.events._plain import from_plain, register_event, to_plain
from dovetail.events._shuffled import Crowd, PaddedBernoulli, PaddedTopk, Personalized, Report, Shuffled
from dovetail.events._sums import CorrelatedSum, EncodedSum, SkellamNoise, SkellamSum, SplitAndMix
from dovetail.events._trials import BestTrial, Repeated
from dovetail.statements import Scope

__all__ = [
    "BestTrial",
    "CorrelatedGaussian",
    "CorrelatedSum",
    "Crowd",
    "DataIndependent",
    "Disjoint",
    "EncodedSum",
    "Everyone",
    "FixedSize",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NonPrivate",
    "PaddedBernoulli",
    "PaddedTopk",
    "Participation",
    "Personalized",
    "Poisson",
    "Repeated",
    "ReplacedUsers",
    "Report",
    "Round",
    "SampledSubject",
    "Separated",
    "Shuffled",
    "SkellamNoise",
    "SkellamSum",
    "SplitAndMix",
    "View",
    "from_plain",
    "register_event",
    "to_plain",
]

Mechanism = Any  # a bundled event, or any frozen dataclass with a registered release


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """One release: what was run and who took part."""

    mechanism: Mechanism  # an event: what is released of the data of those who take part
    participation: Participation


@dataclasses.dataclass(frozen=True, kw_only=True)
class View:
    """One round as one adversary sees it."""

    round: Round
    scope: Scope  # who that adversary is, who is trusted, and what is assumed
