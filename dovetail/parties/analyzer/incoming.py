"""What reaches the analyzer in a round, and whether it is complete: messages from shufflers, or sums.

Shufflers send parts of a batch of messages, each sealed on its own; a message whose encapsulated key was seen before in
the round is not counted, for no honest user sends one twice. Aggregators send one sum each, over the same users.
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
    """An opened part: how many messages it has, how many of them do not count and why, and the sums of the others."""

    messages: int
    refused: Refusals
    tally: list[np.ndarray]


class Incoming(abc.ABC):
    """What the shufflers or aggregators of a task send, a part at a time."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey) -> None:
        self._task = task
        self._key = key

    @property
    @abc.abstractmethod
    def max_part_bytes(self) -> int:
        """The most bytes that a part has."""

    @abc.abstractmethod
    def replay_marks(self, sender: int, data: bytes) -> list[bytes]:
        """A mark for each message of a part, by which repetitions are recognised; refuses a part of another form."""

    @abc.abstractmethod
    def read_part(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """Open a part and add it up.

        Arguments:
            sender: the index of the shuffler or aggregator.
            round: the round that the part is for.
            batch: the id of the sender's batch.
            data: the part as it was sent.
            repeated: places of messages that were counted before, which are left out.
        """

    @abc.abstractmethod
    def is_complete(self, round: int, closures: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """Whether all that honest shufflers or aggregators send in such a round was counted.

        Arguments:
            round: a round that all of them have closed.
            closures: how each of them closed it, by index.
            store: what was counted.
        """

    def stop_workers(self) -> None:  # noqa: B027 - most have no processes
        """End the worker processes, if there are any."""

    def _has_one_count(self, closures: Mapping[int, Closed]) -> bool:
        """Whether all counted the same number of users, and the task allows it."""
        uploads = {closed.uploads for closed in closures.values()}
        return len(uploads) == 1 and self._task.min_clients <= min(uploads) <= self._task.max_clients


class ShuffledParts(Incoming):
    """Messages, opened one by one by worker processes."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey, learner: Learner, workers: int | None) -> None:
        super().__init__(task, key)
        self._learner = learner
        self._workers = Workers(workers)
        self._messages = task.messages()
        self._length = task.message_bytes
        self._deal = task.assign_slots()

    @property
    def max_part_bytes(self) -> int:
        """Bytes of a part that is full of messages, with their slots."""
        return Packed.size(PART, length=self._length)

    def replay_marks(self, sender: int, data: bytes) -> list[bytes]:
        """The beginnings of the encapsulated keys."""
        packed = Packed.decode(data, length=self._length)
        slots = self._deal.slots[sender]
        if len(packed.slots) and not packed.slots.max() < len(slots):
            raise Malformed(
                f"slot {int(packed.slots.max())} does not exist: shuffler {sender} has slots 0 to {len(slots) - 1}"
            )
        return [ciphertext[:_ENCAPSULATED] for ciphertext in packed.ciphertexts()]

    def read_part(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """Open messages in worker processes, and tally those that open and fit."""
        packed = Packed.decode(data, length=self._length)
        slots = self._deal.slots[sender]
        kept = [i for i in range(len(packed.slots)) if i not in repeated]
        ciphertexts = packed.ciphertexts()
        bodies = self._workers.open_all([ciphertexts[i] for i in kept], self._key, self._task.message_purpose(round))
        opened = [i for i, body in zip(kept, bodies, strict=True) if body is not None]
        rows = np.frombuffer(b"".join(body for body in bodies if body is not None), np.uint8)
        tally, out_of_range = self._learner.tally(
            slots[packed.slots[opened]], rows.reshape(len(opened), self._messages.size)
        )
        return OpenedPart(len(ciphertexts), Refusals(len(kept) - len(opened), out_of_range, len(repeated)), tally)

    def is_complete(self, round: int, closures: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """Whether all shufflers counted as many users, and sent all of their messages and dummies.

        Of shares, none may be missing; of other reports, those that did not open or fit are left out.
        """
        if not self._has_one_count(closures):
            return False
        uploads = closures[0].uploads
        layout = self._task.build()[0].layout(self._task.dim)
        for shuffler, slots in enumerate(self._deal.slots):
            expected = uploads * len(slots)
            if layout.padding is not None:
                expected = layout.padding.pad_to * len(slots)
            elif self._messages.per_client < self._messages.slots:
                expected = uploads * self._messages.per_client
            if store.num_messages(round, shuffler) != expected:
                return False
        return layout.shufflers == 1 or not any(store.refusals(round))

    def stop_workers(self) -> None:
        """End the worker processes."""
        self._workers.stop()


class SharedSums(Incoming):
    """One sum per aggregator: together the sum of all users' contributions."""

    def __init__(self, task: TrainingTask, key: X25519PrivateKey) -> None:
        super().__init__(task, key)
        self._sharing = task.sharing()

    @property
    def max_part_bytes(self) -> int:
        """Bytes of a sealed sum."""
        return self._sharing.sum_size + OVERHEAD

    def replay_marks(self, sender: int, data: bytes) -> list[bytes]:
        """The beginning of the encapsulated key."""
        if len(data) != self.max_part_bytes:
            raise Malformed(f"a sealed sum of this task has {self.max_part_bytes} bytes, and this one {len(data)}")
        return [data[:_ENCAPSULATED]]

    def read_part(self, sender: int, round: int, batch: bytes, data: bytes, *, repeated: set[int]) -> OpenedPart:
        """Open the sum of an aggregator; refuses one that came before in the round, from whomever."""
        if repeated:
            raise Malformed(f"aggregator {sender} sends a sum that came before in round {round}")
        purpose = self._task.sum_purpose(round, sender, batch=batch)
        try:
            encoded = open_sealed(data, self._key, purpose)
        except Unsealable as error:
            raise Malformed(
                f"this is not a sum that aggregator {sender} sealed for round {round} and batch {batch.hex()}"
            ) from error
        return OpenedPart(1, Refusals(0, 0, 0), self._sharing.read_sum(encoded))

    def is_complete(self, round: int, closures: Mapping[int, Closed], store: AnalyzerStore) -> bool:
        """Whether every aggregator sent a sum, over the same users."""
        batches = {closed.batch for closed in closures.values()}
        has_all = all(store.num_parts(round, sender) == 1 for sender in closures)
        return self._has_one_count(closures) and len(batches) == 1 and has_all


def incoming_of(task: TrainingTask, key: X25519PrivateKey, learner: Learner, *, workers: int | None) -> Incoming:
    """The kind of messages that a task's shufflers or aggregators send, opened by so many worker processes."""
    return SharedSums(task, key) if task.aggregators else ShuffledParts(task, key, learner, workers)
