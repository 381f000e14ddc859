"""Attacks that know a protocol and not only the event of its round: one file each.

`STRONGER` holds, by protocol name, attacks beyond those of `audit.exact` on the event. `shows_less` says where the
event of a round stands for more than the analyzer sees, as it does wherever a proof gives something away for free:
there the attacks on the event prove nothing about the protocol, and only those here may be used. A list is empty
where nothing beyond the event, or nothing exact, is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.audit.attacks import central_sub, dp_fl, privunit, s_apes, ss_double, ss_simple, ss_topk
from dovetail.audit.bounds import ExactAttack
from dovetail.protocols import Protocol
from dovetail.protocols.flame.ss_double import SsDouble
from dovetail.protocols.personal.s_apes import SApes

__all__ = ["STRONGER", "shows_less"]

STRONGER: dict[str, Callable[[Any, Any, int], list[ExactAttack]]] = {
    "central_sub": central_sub.exact_attacks,
    "dp_fl": dp_fl.exact_attacks,
    "local_sub": central_sub.exact_attacks,
    "privunit": privunit.exact_attacks,
    "s_apes": s_apes.exact_attacks,
    "ss_double": ss_double.exact_attacks,
    "ss_simple": ss_simple.exact_attacks,
    "ss_topk": ss_topk.exact_attacks,
}


def shows_less(protocol: Protocol) -> bool:
    """Whether the analyzer of this protocol sees less than the event of its round says."""
    match protocol:
        case SApes():
            return True
        case SsDouble():
            return protocol.inclusion == "fixed-k"
    return False
