"""An aggregator: it adds up the shares of a round's users, and hands on the sum and nothing else.

A share alone is random. The sum that it makes of the agreed users' shares is, together with those of the other
aggregators, the sum of what users contributed, and with fewer of them random again. Where aggregators add the noise,
each adds all of it, so that one that is honest suffices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from dovetail.mechanisms import ExactSampler
from dovetail.parties.aggregator.store import SumStore
from dovetail.parties.common.keys import ServiceKeys, ServicePairs
from dovetail.parties.common.sealing import seal
from dovetail.parties.common.shares import encode_sum, share_size
from dovetail.parties.common.task import SignedTask, TrainingTask
from dovetail.parties.common.wire import BATCH_ID
from dovetail.parties.intermediary.party import Intermediary

__all__ = ["Aggregator"]


class Aggregator(Intermediary[SumStore]):
    """One of the aggregators of a task, without the network around it.

    Guarantees:
        What leaves is one sum over at least the task's minimum of users, sealed to the analyzer, the same bytes however
        often it is sent.
        Noise that it owes is in the sum before the sum is written down.
    """

    kind: ClassVar[str] = "aggregator"

    def __init__(self, folder: Path, *, signed: SignedTask, signer: bytes, index: int, keys: ServicePairs) -> None:
        self._sampler = ExactSampler()
        super().__init__(folder, signed=signed, signer=signer, index=index, keys=keys)

    @classmethod
    def named(cls, task: TrainingTask) -> Sequence[ServiceKeys]:
        """The task's aggregators."""
        return task.aggregators

    def _open_store(self, path: Path, owner: bytes) -> SumStore:
        self._shared = self.task.contribution()
        return SumStore(
            path,
            length=self._shared.length,
            bits=self._shared.bits,
            last=self._last,
            finish=self._finish,
            min_uploads=self.task.min_clients,
            max_uploads=self.task.max_clients,
            owner=owner,
        )

    @property
    def _last(self) -> bool:
        return self.index == len(self.task.aggregators) - 1

    @property
    def largest_content(self) -> int:
        """A share."""
        return share_size(self._shared.length, self._shared.bits, last=self._last)

    def _content(self, opened: bytes) -> bytes:
        return opened

    def _batch(self, digest: bytes) -> bytes:
        """The same at all aggregators that agree, so that the analyzer notices if they do not."""
        return digest[:BATCH_ID]

    def _finish(self, round: int, total: np.ndarray) -> bytes:
        """The sum with this aggregator's noise, sealed to the analyzer."""
        noise = self._shared.noise(sampler=self._sampler)
        if noise is not None:
            total = total + noise
        purpose = self.task.sum_purpose(round, self.index, batch=self.store.batch(round))
        return seal(encode_sum(total, self._shared.bits), self.task.analyzer.sealing(), purpose)
