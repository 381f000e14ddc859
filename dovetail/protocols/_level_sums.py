"""Shuffled levels as a sum: what a client adds where aggregators take the shuffler's place.

A slot's reports are added up, and the sum of all clients' levels is a function of what a shuffle shows: for bits, all
that it shows. So a certificate about shuffled levels is one about this sum, for the same crowd. No slot is padded:
nobody sees how many reports one would lack.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail._jax import jnp
from dovetail.mechanisms import ExactSampler
from dovetail.protocols._base import Cohort
from dovetail.protocols._contributions import Contribution, proof_assumptions
from dovetail.protocols._messages import Levels, Messages, from_bytes
from dovetail.shufflers import SlotSums
from dovetail.statements import NotApplicable
from dovetail.vdaf.levels import LevelProofs

__all__ = ["LevelSums", "ProvenLevelSums", "level_sums"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelSums(Contribution):
    """One level for every slot, drawn as `Levels` draws its messages, modulo the least power of two that holds all.

    Guarantees:
        The sum over `most` users does not wrap around.
        The sum over a cohort has the law of the sum of its messages, slot by slot.
    """

    levels: Levels
    most: int

    @property
    def length(self) -> int:
        """One integer per slot."""
        return self.levels.slots

    @property
    def bits(self) -> int:
        """Those of `most` times the highest level."""
        return (self.most * (self.levels.response.levels - 1)).bit_length()

    @property
    def distance(self) -> float:
        """That of the messages."""
        return self.levels.distance

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """The level of every slot."""
        slot, body = self.levels.randomize(x, sampler=sampler)
        drawn = np.zeros(self.length, np.uint32)
        drawn[slot] = from_bytes(body)
        return drawn

    def tally(self, total: np.ndarray, users: int) -> SlotSums:
        """Every user has a report in every slot."""
        messages = np.full(self.length, users, np.int32)
        return SlotSums(jnp.asarray(total.astype(np.int32)), jnp.asarray(messages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProvenLevelSums(LevelSums):
    """The same with a proof that every level is one: as many as the response has, from 0 on."""

    aggregators: int

    @property
    def proof(self) -> LevelProofs:
        """Of the range of every level."""
        return LevelProofs.of(size=self.length, largest=self.levels.response.levels - 1, shares=self.aggregators)

    @property
    def distance(self) -> float:
        """That of the messages, and the zero-knowledge error of the proof."""
        return super().distance + self.proof.knowledge_error

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Of privacy, and of robustness."""
        return (*super().assumptions, *proof_assumptions(self.proof, "a report out of range"))

    def draw(self, x: np.ndarray, *, sampler: ExactSampler, budget: float | None = None) -> np.ndarray:
        """The level of every slot."""
        return super().draw(x, sampler=sampler, budget=budget).astype(np.int64)


def level_sums(messages: Messages, cohort: Cohort, *, verified: bool = False) -> LevelSums:
    """The sums of these messages; refuses those that do not fill every slot, which would show which are filled."""
    if not isinstance(messages, Levels) or messages.per_client != messages.slots:
        raise NotApplicable(
            f"expected one level for each of the {messages.slots} slots to share as sums, got {messages.per_client}"
        )
    found = LevelSums(levels=messages, most=cohort.most)
    if found.bits > 32:
        raise NotApplicable(f"expected sums of at most 32 bits, got {found.bits} for {cohort.most} users")
    if not verified:
        return found
    if cohort.aggregators is None:
        raise NotApplicable("expected aggregators for verified sums, got none")
    return ProvenLevelSums(levels=messages, most=cohort.most, aggregators=cohort.aggregators)
