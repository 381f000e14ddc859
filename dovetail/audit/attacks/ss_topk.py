"""SS-Topk where counts or indices show, which are a function of the data.

- A surplus that is kept: `n - 1` others report a coordinate, and the number of its messages is n if the victim does,
  too, else n - 1.
- Whole messages without decoys: the victim's has one set of indices or the other; nobody else has either. Dummies come
  in messages, too, but there are more sets of k indices than messages.
- Whole messages of all coordinates: messages with many ones, as for SS-Simple.
"""

from __future__ import annotations

import math

import numpy as np

from dovetail.audit.attacks import _own
from dovetail.audit.attacks._linked import messages_like_the_victims, ones
from dovetail.audit.attacks.registry import on_own_reports, stronger
from dovetail.audit.bounds import ExactAttack, disjoint
from dovetail.protocols import Cohort
from dovetail.protocols.flame.ss_topk import SsTopk

__all__ = ["exact_attacks", "own_reports"]


@stronger.register(SsTopk)
def exact_attacks(protocol: SsTopk, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """What is beyond the exact attacks on the event."""
    users, pad_to, decoys = cohort.crowd(), protocol.padding.pad_to, protocol.per_client(dim) - protocol.k
    rest = dim - protocol.k
    if protocol.linkage == "vector":
        if decoys == rest:
            others, dummies = users - cohort.colluders - 1, max(0, pad_to - users)
            return messages_like_the_victims(ones(protocol.report), protocol.k, others=others, dummies=dummies)
        messages = users + -(-dim * pad_to // protocol.k)
        if decoys == 0 and math.comb(dim, protocol.k) > messages + 1:
            return [disjoint("the indices of the victim's message")]
        return []
    if protocol.overflow == "keep" and users > pad_to and decoys < rest:
        with np.errstate(divide="ignore"):
            by_chance = np.log([1 - decoys / rest, decoys / rest])
        attack = "the number of messages of a coordinate that all others report"
        return [ExactAttack(attack=attack, log_first=np.array([-np.inf, 0.0]), log_second=by_chance)]
    return []


@on_own_reports.register(SsTopk)
def own_reports(protocol: SsTopk, cohort: Cohort, dim: int) -> list[ExactAttack]:
    """The signs of the k largest; or which they are, unless a client reports every coordinate."""
    rest, decoys = dim - protocol.k, protocol.per_client(dim) - protocol.k
    if decoys == rest:
        return _own.reports(protocol.report, protocol.k)
    changed = min(protocol.k, rest)
    by_chance = math.comb(rest - changed, decoys - changed) / math.comb(rest, decoys) if decoys >= changed else 0.0
    with np.errstate(divide="ignore"):
        logs = np.log([by_chance, 1 - by_chance])
    attack = "whether the victim reports all its largest coordinates of the first world"
    return [ExactAttack(attack=attack, log_first=np.array([0.0, -np.inf]), log_second=logs)]
