"""The messages of split-and-mix in a deployment: one share each, a 32-bit word.

The encoded update gets exact Skellam noise and is split by `mechanisms.exact_skellam`. The shares of a coordinate are
neighbouring slots, assigned to the shufflers in turn.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from dovetail.mechanisms import ExactSampler, ExactSkellam, exact_skellam
from dovetail.mechanisms.skellam import Encoding
from dovetail.protocols._messages import Messages, Sent, from_bytes, to_bytes
from dovetail.shufflers import ShuffledReports

__all__ = ["Shares"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shares(Messages):
    """Every share of every coordinate, 4 bytes each.

    Guarantees:
        `distance` covers the noise, the one thing that is not drawn exactly.
    """

    size: ClassVar[int] = 4

    encoding: Encoding
    noise: ExactSkellam
    shares: int
    modulus: int
    shufflers: int

    @property
    def slots(self) -> int:
        """One per share."""
        return self.encoding.dim * self.shares

    @property
    def per_client(self) -> int:
        """All shares."""
        return self.slots

    @property
    def distance(self) -> float:
        """That of the noise on every coordinate."""
        return self.encoding.dim * self.noise.distance

    def shuffler_of(self, slot: np.ndarray) -> np.ndarray:
        """Share j is held by shuffler j mod `shufflers`."""
        return np.asarray(slot, np.int64) % self.shares % self.shufflers

    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """The shares of the encoded update with the client's part of the noise."""
        x = self.check_update(x, self.encoding.dim)
        noisy = exact_skellam.encode(self.encoding, x, sampler=sampler) + self.noise(len(x), sampler=sampler)
        shares = exact_skellam.split(noisy, self.shares, self.modulus, sampler=sampler)
        return Sent(np.arange(self.slots, dtype=np.int64), to_bytes(shares.ravel(), self.size))

    def read(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        """Shares, one per row; refuses what is not below the modulus."""
        valid = self.check(slot, body)
        shares = from_bytes(body)
        return self.forwarded(slot, shares, valid & (shares < self.modulus))
