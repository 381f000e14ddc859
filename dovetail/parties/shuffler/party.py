"""A shuffler: it knows who reports but not what; it forwards reports without saying who sent them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.keys import ServiceKeys
from dovetail.parties.common.sealing import Purpose, Workers
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import PART, Packed
from dovetail.parties.intermediary.party import Intermediary
from dovetail.parties.shuffler.store import Shape, ShuffleStore

__all__ = [
    "Shuffler",
]


class Shuffler(Intermediary[ShuffleStore]):
    """One of the shufflers of a task, without the network around it.

    Guarantees:
        What leaves are ciphertexts of one length, permuted slot by slot, with nothing that says whose they are.
    """

    kind: ClassVar[str] = "shuffler"

    def __init__(self, folder: Path, *, workers: int = 1, **options: Any) -> None:
        super().__init__(folder, **options)
        self._messages = self.task.messages()
        self._workers = Workers(workers)
        self._sampler = ExactSampler()

    @classmethod
    def named(cls, task: TrainingTask) -> Sequence[ServiceKeys]:
        """The task's shufflers."""
        return task.shufflers

    def _open_store(self, where: Path | str, owner: bytes) -> ShuffleStore:
        self.shape = _shape(self.task, self.index)
        return ShuffleStore(where, self.shape, owner=owner)

    @property
    def largest_content(self) -> int:
        """A message in every slot, or as many as a client sends."""
        return Packed.size(self.shape.reports or self.shape.slots, length=self.shape.length)

    def _content(self, opened: bytes, purpose: Purpose) -> Any:
        packed = Packed.decode(opened, length=self.shape.length)
        return list(zip(packed.slots.tolist(), packed.ciphertexts(), strict=True))

    def _complete(self, round: int, roster: Collection[bytes] | None) -> None:
        """Seal the dummies that slots lack, some at a time."""
        lacking = self.store.lacking(round, roster=roster)
        slots = iter([slot for slot, count in lacking.items() for _ in range(count)])
        while chunk := list(itertools.islice(slots, PART)):
            bodies = [body.tobytes() for body in self._messages.dummies(len(chunk), sampler=self._sampler)]
            sealed = self._workers.seal_all(bodies, self.task.analyzer.sealing(), self.task.purpose(round))
            self.store.stage(round, list(zip(chunk, sealed, strict=True)))

    def shut(self) -> None:
        """Let go of files and processes."""
        super().shut()
        self._workers.shut()


def _shape(task: TrainingTask, index: int) -> Shape:
    messages, (protocol, _) = task.messages(), task.build()
    mine, padding = len(task.deal().slots[index]), protocol.layout(task.dim).padding
    dense = messages.per_client == messages.slots
    return Shape(
        slots=mine,
        reports=mine if dense else messages.per_client if len(task.shufflers) == 1 else None,
        length=task.length,
        min_uploads=task.min_clients,
        max_uploads=task.max_clients,
        pad_to=None if padding is None else padding.pad_to,
    )
