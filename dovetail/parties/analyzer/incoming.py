"""What reaches the analyzer in a round, and whether it is all that should: messages from shufflers, or sums.

Shufflers send parts of a batch of messages, each sealed on its own; a message whose encapsulated key was seen before in
the round is not counted, for nobody honest sends one twice. Aggregators send one sum each, over the same users.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dovetail.parties.analyzer.learning import Learner
from dovetail.parties.analyzer.store import AnalyzerStore, Refusals
from dovetail.parties.common.sealing import OVERHEAD, Unsealable, Workers, open_sealed
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import PART, Closed, Malformed, Packed

__all__ = ["Incoming", "OpenedPart", "incoming_of"]

_ENCAPSULATED = 16  # bytes of an encapsulated key that tell it from others


class OpenedPart(NamedTuple):
    """A part as it counts: how many messages it has, which of them do not count, and what the others add up to."""

    messages: int
    refused: Refusals
    tally: list[np.ndarray]


class Incoming(abc.ABC):
    """What intermediaries of a task send."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey) -> None:
        self._task, self._key = task, key

    @property
    @abc.abstractmethod
    def max_part_bytes(self) -> int:
        """Bytes of a part, at most."""

    @abc.abstractmethod
    def marks(self, sender: int, data: bytes) -> list[bytes]:
        """By what each message of a part is told from others of the round; refuses a part of another form."""

    @abc.abstractmethod
    def read(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """What a part adds up to, without the messages that are repeated."""

    @abc.abstractmethod
    def is_complete(self, round: int, said: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """Whether a round has what intermediaries must send."""

    def shut(self) -> None:  # noqa: B027 - most have no processes
        """Let go of processes."""

    def _same_users(self, said: Mapping[int, Closed]) -> bool:
        """Whether everybody counted as many users, within the task's limits."""
        uploads = {one.uploads for one in said.values()}
        return len(uploads) == 1 and self._task.min_clients <= min(uploads) <= self._task.max_clients


class ShuffledParts(Incoming):
    """Messages, opened one by one by worker processes."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey, learner: Learner, workers: int | None) -> None:
        super().__init__(task, key)
        self._learner, self._workers = learner, Workers(workers)
        self._messages, self._length, self._deal = task.messages(), task.message_bytes, task.assign_slots()

    @property
    def max_part_bytes(self) -> int:
        """So many messages with their slots."""
        return Packed.size(PART, length=self._length)

    def marks(self, sender: int, data: bytes) -> list[bytes]:
        """Encapsulated keys."""
        packed, slots = Packed.decode(data, length=self._length), self._deal.slots[sender]
        if len(packed.slots) and not packed.slots.max() < len(slots):
            raise Malformed(f"expected slots from 0 to {len(slots) - 1}, got {int(packed.slots.max())}")
        return [ciphertext[:_ENCAPSULATED] for ciphertext in packed.ciphertexts()]

    def read(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """The tally of what opens, once."""
        packed, slots = Packed.decode(data, length=self._length), self._deal.slots[sender]
        kept = [i for i in range(len(packed.slots)) if i not in repeated]
        ciphertexts = packed.ciphertexts()
        opened = self._workers.open_all([ciphertexts[i] for i in kept], self._key, self._task.purpose(round))
        fine = [i for i, body in zip(kept, opened, strict=True) if body is not None]
        bodies = np.frombuffer(b"".join(body for body in opened if body is not None), np.uint8)
        tally, out_of_range = self._learner.tally(
            slots[packed.slots[fine]], bodies.reshape(len(fine), self._messages.size)
        )
        return OpenedPart(len(ciphertexts), Refusals(len(kept) - len(fine), out_of_range, len(repeated)), tally)

    def is_complete(self, round: int, said: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """As many users everywhere, all of their messages, or dummies.

        Of shares, none may be missing; of other reports, those that did not open or fit are left out.
        """
        if not self._same_users(said):
            return False
        uploads, layout = said[0].uploads, self._task.build()[0].layout(self._task.dim)
        for shuffler, slots in enumerate(self._deal.slots):
            expected = uploads * len(slots)
            if layout.padding is not None:
                expected = layout.padding.pad_to * len(slots)
            elif self._messages.per_client < self._messages.slots:
                expected = uploads * self._messages.per_client
            if store.messages(round, shuffler) != expected:
                return False
        return layout.shufflers == 1 or not any(store.refusals(round))

    def shut(self) -> None:
        """End the worker processes."""
        self._workers.shut()


class SharedSums(Incoming):
    """One sum per aggregator: together the sum of all users' contributions."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey) -> None:
        super().__init__(task, key)
        self._sharing = task.sharing()

    @property
    def max_part_bytes(self) -> int:
        """A sealed sum."""
        return self._sharing.sum_size + OVERHEAD

    def marks(self, sender: int, data: bytes) -> list[bytes]:
        """The encapsulated key."""
        if len(data) != self.max_part_bytes:
            raise Malformed(f"expected a sealed sum of {self.max_part_bytes} bytes, got {len(data)}")
        return [data[:_ENCAPSULATED]]

    def read(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """The sum itself; one that came before in the round is nobody's."""
        if repeated:
            raise Malformed(f"expected a sum of aggregator {sender}'s own, got one that came before")
        purpose = self._task.sum_purpose(round, sender, batch=batch)
        try:
            opened = open_sealed(data, self._key, purpose)
        except Unsealable as error:
            raise Malformed(f"expected the sum of aggregator {sender} over its batch, got another message") from error
        return OpenedPart(1, Refusals(0, 0, 0), self._sharing.read_sum(opened))

    def is_complete(self, round: int, said: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """A sum from everybody, over the same users."""
        batches = {one.batch for one in said.values()}
        return self._same_users(said) and len(batches) == 1 and all(store.parts(round, one) == 1 for one in said)


def incoming_of(task: TrainingTask, key: X25519PrivateKey, learner: Learner, *, workers: int | None) -> Incoming:
    """What the intermediaries of a task send."""
    return SharedSums(task, key) if task.aggregators else ShuffledParts(task, key, learner, workers)
