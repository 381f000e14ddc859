"""Attacks that know a protocol, registered by its class and found along its ancestors: a subclass inherits them.

A module from outside adds those on its own protocol:

    @registry.stronger_attacks.register(ItsProtocol)
    def its_attacks(protocol: ItsProtocol, cohort: Cohort, dim: int) -> list[ExactAttack]: ...
"""

from __future__ import annotations

import functools

from dovetail.audit.attacks import _own
from dovetail.audit.bounds import ExactAttack
from dovetail.protocols import Cohort, Protocol

__all__ = ["attacks_on_own_reports", "shows_less_than_event", "stronger_attacks"]


@functools.singledispatch
def stronger_attacks(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on one round of a settled protocol beyond those of `audit.exact` on its event; none are known."""
    return []


@functools.singledispatch
def shows_less_than_event(protocol: Protocol) -> bool:
    """Whether the analyzer sees less than the event of a round says, as where a proof gives something away for free.

    Attacks on the event then prove nothing about the protocol, and only `stronger_attacks` may be used.
    """
    return False


@functools.singledispatch
def attacks_on_own_reports(protocol: Protocol, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """Attacks on one round of a settled protocol by all who receive anything of it, who know who sent what.

    Unless a protocol registers its own they follow from what it declares: `log_density`, else `own_reports`.

    Guarantees:
        At delta = 0 exactly the local eps, to 1e-6, where reports are independent and the randomizer has a finite one.
    """
    return _own.attacks_on_declared_reports(protocol, cohort, dim)
