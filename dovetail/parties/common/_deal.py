"""Which shuffler holds which slots of a task."""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail.protocols import Messages

__all__ = ["Deal", "dealt"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deal:
    """Which shuffler holds which slots: `holder` and `place` (the slot's number there) by slot, `slots` by shuffler."""

    holder: np.ndarray
    place: np.ndarray
    slots: tuple[np.ndarray, ...]


def dealt(messages: Messages, shufflers: int) -> Deal:
    """Slots in turn to the shufflers that may hold them."""
    party = messages.shuffler_of(np.arange(messages.slots))
    parties, processes = int(party.max()) + 1, shufflers
    if processes % parties or processes < parties:
        raise ValueError(f"expected {parties} shufflers or a multiple of that, got {processes}")
    rank = np.empty_like(party)
    for one in range(parties):
        rank[party == one] = np.arange(np.sum(party == one))
    each = processes // parties
    if each > np.min(np.bincount(party)):
        raise ValueError(f"expected at most one shuffler per slot, got {processes} for {messages.slots} slots")
    return Deal(
        holder=party * each + rank % each,
        place=rank // each,
        slots=tuple(np.flatnonzero(party * each + rank % each == index) for index in range(processes)),
    )
