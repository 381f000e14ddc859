"""Between clients and analyzer: the only place where `Shuffled` is made.

Protocols without a shuffler hand their reports over directly; whoever receives them is then trusted (curator) or sees
only locally randomized reports (local), and the protocol's view says which.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

__all__ = ["Layout", "Reports", "Shuffled", "deliver"]


class Reports(NamedTuple):
    """What clients send: `value` of shape (clients, reports), which `slot` each belongs to, which are `valid`.

    A dense protocol reports every slot in order and leaves `slot` as None; `valid` then has shape (clients,).
    """

    slot: jax.Array | None
    value: jax.Array
    valid: jax.Array


class Shuffled(NamedTuple):
    """What the analyzer sees; made only here, so that raw reports cannot reach an analyzer by mistake."""

    slot: jax.Array | None
    value: jax.Array
    valid: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The shape of a round's messages; `shufflers` is 0 in the curator and local models."""

    slots: int
    reports_per_client: int
    shufflers: int


def deliver(reports: Reports, layout: Layout) -> Shuffled:
    """Hand a batch of reports to the analyzer as the layout asks."""
    if layout.shufflers:
        raise ValueError(f"expected a protocol without shufflers, got shufflers={layout.shufflers}")
    return Shuffled(*reports)
