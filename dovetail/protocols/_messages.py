"""What a protocol sends in a deployment: bytes of one length, drawn from the operating system's randomness.

`Protocol.randomize` simulates; a deployed client calls `Messages.randomize` of the same protocol instead. Every client
sends the same number of messages, all of one length, so neither depends on the data. Privacy relies on integers and
exact coins alone: floating point only rounds inputs, before any noise.
The analyzer reads messages back with range checks: what no honest client can have sent is refused and counted.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import numpy as np

from dovetail.mechanisms import ExactRandomizedResponse, ExactSampler
from dovetail.mechanisms.gaussian import finite_or_zero
from dovetail.shufflers import ShuffledReports, reports_from_messages

__all__ = ["Levels", "Messages", "Positions", "Sent", "from_bytes", "to_bytes"]


class Sent(NamedTuple):
    """What one client sends: the shuffled slot of each message, and its plaintext."""

    slot: np.ndarray  # (messages,) int64, in 0 .. slots - 1
    body: np.ndarray  # (messages, size) uint8


class Messages(abc.ABC):
    """A protocol's messages in a deployment, for updates of one dimension.

    Guarantees:
        Every client sends `per_client` messages of `size` bytes, whatever its update.
        The law of one client's messages is within `total_variation` of the one that is accounted, or of a
        post-processing of it, message by message, that leaves dummies as they are.
        `read` refuses bodies that no honest client sends, and counts them; all others reach `Protocol.tally`.
    """

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Bytes of every message's plaintext."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """How many slots all shufflers hold together."""

    @property
    @abc.abstractmethod
    def per_client(self) -> int:
        """How many messages every client sends."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a statement about deployed messages relies on besides the protocol's own assumptions."""
        return (
            "the random bytes from the operating systems of clients and shufflers are uniform and independent",
            "nobody learns how long a client takes to draw its messages",
        )

    @property
    def total_variation(self) -> float:
        """Total variation between one client's messages and the law that is accounted, at most; users' add up."""
        return 0.0

    def shuffler_of(self, slot: np.ndarray) -> np.ndarray:
        """Which shuffler holds a slot; one holds them all, unless a protocol deals them out."""
        return np.zeros(np.shape(slot), np.int64)

    @abc.abstractmethod
    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """Client: the messages for one update of shape (dim,)."""

    def dummies(self, count: int, *, sampler: ExactSampler) -> np.ndarray:
        """Shuffler: plaintexts from the blanket, (count, size) uint8, for slots that are padded."""
        raise ValueError(f"expected a protocol that pads its slots, got one that has no dummies (count={count})")

    @abc.abstractmethod
    def read(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        """Analyzer: what `Protocol.tally` takes, and how many messages were refused."""

    def check_update(self, x: np.ndarray, dim: int) -> np.ndarray:
        """The update that counts: x, or zeros where its squared norm is not finite; refuses another shape."""
        if np.shape(x) != (dim,):
            raise ValueError(f"expected an update of shape ({dim},), got shape={np.shape(x)}")
        return finite_or_zero(np.asarray(x))

    def check_slots(self, slot: np.ndarray, body: np.ndarray) -> np.ndarray:
        """Which of these messages are in a slot that exists; refuses arrays of another shape or type."""
        if slot.ndim != 1 or body.shape != (len(slot), self.size) or body.dtype != np.uint8:
            raise ValueError(
                f"expected slot of shape (messages,) and body (messages, {self.size}) of uint8, "
                f"got slot={slot.shape} and body={body.shape} of {body.dtype}"
            )
        return (slot >= 0) & (slot < self.slots)

    def keep_valid(self, slot: np.ndarray, value: np.ndarray, valid: np.ndarray) -> tuple[ShuffledReports, int]:
        """One report per row, with how many were refused; those are there, but neither valid nor with a value."""
        kept = np.where(valid, slot, 0).astype(np.int32), np.where(valid, value, 0).astype(value.dtype), valid
        return reports_from_messages(*(column[:, None] for column in kept)), int(np.count_nonzero(~valid))


class Positions(NamedTuple):
    """What a client reports by randomized response, one entry for each message.

    `slot` is where it goes, `position` in [0, 1] what is reported (clipped later), and where `depends_on_data` is False
    a uniform level is sent instead.
    """

    slot: np.ndarray
    position: np.ndarray
    depends_on_data: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels(Messages):
    """Level indices of randomized response, in as few bytes as hold a level; decoys and dummies are uniform levels.

    The probability of the truth is rounded down, towards uniform: that is the law that is accounted with some more
    reports replaced by uniform levels, so there is no distance to add.
    """

    response: ExactRandomizedResponse
    padded: bool = False

    @property
    def size(self) -> int:
        """Bytes of a level: one for up to 256 levels."""
        return -(-(self.response.levels - 1).bit_length() // 8)

    @abc.abstractmethod
    def positions(self, x: np.ndarray, *, sampler: ExactSampler) -> Positions:
        """Client: what it reports of an update of shape (dim,), before any randomness that protects it."""

    def randomize(self, x: np.ndarray, *, sampler: ExactSampler) -> Sent:
        """A randomized response on every position that depends on the data, a uniform level on the others."""
        slot, position, depends_on_data = self.positions(x, sampler=sampler)
        decoys = sampler.integers(self.response.levels, len(slot))
        levels = np.where(depends_on_data, self.response(position, sampler=sampler), decoys)
        return Sent(slot.astype(np.int64), to_bytes(levels, self.size))

    def dummies(self, count: int, *, sampler: ExactSampler) -> np.ndarray:
        """Uniform levels, where slots are padded."""
        if not self.padded:
            return super().dummies(count, sampler=sampler)
        return to_bytes(sampler.integers(self.response.levels, count), self.size)

    def read(self, slot: np.ndarray, body: np.ndarray) -> tuple[ShuffledReports, int]:
        """Levels, one per row; refuses what is not a level."""
        valid = self.check_slots(slot, body)
        levels = from_bytes(body).astype(np.int32)
        return self.keep_valid(slot, levels, valid & (levels < self.response.levels))


def to_bytes(values: np.ndarray, size: int) -> np.ndarray:
    """Integers below 2^(8 size) in little-endian bytes, (values, size) uint8; size is 4 at most."""
    return np.ascontiguousarray(values.astype("<u4")[:, None].view(np.uint8)[:, :size])


def from_bytes(body: np.ndarray) -> np.ndarray:
    """The integers of little-endian bytes, (values, size) uint8, as uint32."""
    words = np.zeros((len(body), 4), np.uint8)
    words[:, : body.shape[1]] = body
    return words.view("<u4")[:, 0].astype(np.uint32)
