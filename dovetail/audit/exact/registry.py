"""Exact attacks, registered by the type of what they attack and found along its ancestors.

A module from outside adds those on its own events:

    @registry.attacks_on_event.register(ItsEvent)
    def its_attacks(event: ItsEvent, rounds: int) -> list[ExactAttack]: ...
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from dovetail.audit.bounds import ExactAttack
from dovetail.audit.exact.sums import RepeatedCells
from dovetail.events import Round, Separated
from dovetail.statements import NotApplicable

__all__ = ["attacks_on_event", "attacks_on_rounds", "attacks_on_stream", "observe_in_sample"]


@functools.singledispatch
def attacks_on_event(event: Any, rounds: int) -> list[ExactAttack]:
    """The exact attacks on `rounds` repetitions of an event on the same inputs; NotApplicable where none are known."""
    raise NotApplicable(f"no exact attack is known on an event of type {type(event).__name__}")


@functools.singledispatch
def observe_in_sample(event: Any, prob: float, times: int) -> RepeatedCells:
    """The laws of what is seen in `times` releases of an event, with a user who is in each with probability `prob`.

    The first law is the one with the user, the second the one without.
    """
    raise NotApplicable("of Poisson samples, exact attacks are known on Gaussian sums, for adding a user")


@functools.singledispatch
def attacks_on_stream(event: Any, schedule: Separated, rounds: int) -> list[ExactAttack]:
    """The exact attacks on so many rounds of a stream, with a victim that comes first and then as soon as it may."""
    return attacks_on_event(event, min(schedule.uploads, math.ceil(rounds / schedule.separation)))


@functools.singledispatch
def attacks_on_rounds(participation: Any, rounds: Sequence[Round]) -> list[ExactAttack]:
    """The exact attacks on a training whose rounds all choose in this way who takes part."""
    raise NotApplicable("no exact attack is known for this kind of participation")
