"""An aggregator: it adds up the shares of a round's users, and hands on the sum and nothing else.

A share alone is random. The sum that it makes of the agreed users' shares is, together with those of the other
aggregators, the sum of what users contributed, and with fewer of them random again. Where aggregators add the noise,
each adds all of it, so that one that is honest suffices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dovetail.mechanisms import ExactSampler
from dovetail.parties.aggregator.store import REFUSED, SumStore, VerifiedStore, round_key
from dovetail.parties.common.http_clients import IntermediaryClient
from dovetail.parties.common.keys import ServiceKeys
from dovetail.parties.common.sealing import Purpose, seal
from dovetail.parties.common.sharing import proof_nonce
from dovetail.parties.common.task import TrainingTask
from dovetail.parties.common.wire import BATCH_ID, Verifiers
from dovetail.parties.intermediary.party import Intermediary, all_or_none
from dovetail.parties.intermediary.store import State

__all__ = ["Aggregator"]


class Aggregator(Intermediary[SumStore]):
    """One of the aggregators of a task, without the network around it.

    Replicas with a database may keep shares as `segments` of a folder that they all reach.

    Guarantees:
        What leaves is one sum over at least the task's minimum of users, sealed to the analyzer, the same bytes however
        often it is sent.
        Noise that it owes is in the sum before the sum is written down.
        In a verified task a user counts only if all aggregators accept its proof; who does not is named in a file of
        this aggregator's, and to nobody else.
    """

    kind: ClassVar[str] = "aggregator"

    def __init__(self, folder: Path, *, segments: Path | None = None, **options: Any) -> None:
        self._sampler = ExactSampler()
        self._folder = folder
        self._segments = segments
        super().__init__(folder, **options)

    @classmethod
    def service_keys(cls, task: TrainingTask) -> Sequence[ServiceKeys]:
        """The public keys of the task's aggregators."""
        return task.aggregators

    def _open_store(self, where: Path | str, owner: bytes) -> SumStore:
        self._contribution = self.task.contribution()
        self._sharing = self.task.sharing()
        return (VerifiedStore if self.task.has_proofs else SumStore)(
            where,
            sharing=self._sharing,
            index=self.index,
            finish=self._seal_noisy_sum,
            min_uploads=self.task.min_clients,
            max_uploads=self.task.max_clients,
            owner=owner,
            segments=self._segments,
        )

    @property
    def max_content_bytes(self) -> int:
        """Bytes of a share."""
        return self._sharing.size(self.index)

    def agree_and_close(self, round: int, peers: Sequence[IntermediaryClient]) -> State:
        """Agree with the others on whom to count, on whose proofs hold where there are proofs, and close.

        Parts of the round's key travel with the rosters, and verifiers with the digests of what was agreed: verifying
        takes one exchange. Where users' proofs do not hold the round goes on without them.
        """
        if not isinstance(self.store, VerifiedStore):
            return super().agree_and_close(round, peers)
        if (state := self.store.state(round)) not in ("unknown", "open", "frozen"):
            return state
        rosters = all_or_none([peer.roster(round) for peer in peers])
        parts = all_or_none([peer.challenge(round) for peer in peers])
        own = self.store.challenge(round)
        if rosters is None or parts is None or own is None:
            return "frozen"
        roster, digest = self.decide_whom_to_count(round, rosters)
        counted = set() if roster is None else roster
        self.store.compute_verifiers(round, counted, round_key(self.task.task_id, round, [own, *parts]))
        agreed = all_or_none([peer.agreed_digest(round) for peer in peers])
        if agreed is None or any(other != digest for other in agreed):
            return "frozen" if agreed is None else self.close_round(round, rosters, agreed=agreed)
        verifiers = all_or_none([peer.verifiers(round, reports=len(counted)) for peer in peers])
        if verifiers is None:
            return "frozen"
        valid = self.store.decide_valid(round, counted, verifiers)
        self.store.write_refused(self._folder / REFUSED)
        return self.close_round(round, rosters, agreed=agreed, valid=valid)

    def challenge(self, round: int) -> bytes | None:
        """Its part of the key that a round's proofs are tested with, once the round is frozen."""
        return self.store.challenge(round) if isinstance(self.store, VerifiedStore) else None

    def verifiers(self, round: int, first: int) -> Verifiers | None:
        """Its verifiers of a round's reports, from the one with this number on."""
        return self.store.verifiers(round, first) if isinstance(self.store, VerifiedStore) else None

    def _content_of_upload(self, opened: bytes, purpose: Purpose) -> bytes:
        """The share; before it, where there is a proof, the nonce that binds it to user, round and report."""
        if not isinstance(self.store, VerifiedStore):
            return opened
        return proof_nonce(purpose.task_id, purpose.round, purpose.sender, purpose.report) + opened

    def _prepare_close(self, round: int, roster: Collection[bytes] | None) -> None:
        """Make partial sums, outside of the transaction that closes the round."""
        if roster is not None:
            self.store.make_partial_sums(round, roster)

    def _batch_id(self, digest: bytes) -> bytes:
        """The same at all aggregators that agree, so that the analyzer notices if they do not."""
        return digest[:BATCH_ID]

    def _seal_noisy_sum(self, round: int, total: np.ndarray) -> bytes:
        """The sum with this aggregator's noise, sealed to the analyzer."""
        noise = self._contribution.noise(sampler=self._sampler)
        purpose = self.task.sum_purpose(round, self.index, batch=self.store.batch_id(round))
        return seal(self._sharing.encode_sum(total, noise), self.task.analyzer.sealing_key(), purpose)
