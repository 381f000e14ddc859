"""What a shuffler and an aggregator do alike, without the network around them.

The order of things in a round: *open* (told so by the analyzer), *frozen* when it is full or its time is up, closed
with the users that everybody of the task has complete (all agree, for a frozen roster never changes), *forwarded* part
by part, and forgotten when the analyzer has it all. Each step is durable before the next; who is killed goes on where
it was.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from dovetail.files import hold
from dovetail.parties.common.database import locate_store, retry_until_available
from dovetail.parties.common.http_clients import AnalyzerClient, Gone, IntermediaryClient
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.sealing import OVERHEAD, Purpose, Unsealable, open_sealed
from dovetail.parties.common.task import SignedTask, TrainingTask, verify
from dovetail.parties.common.wire import PART, REPORT_ID, Closed, Malformed, Upload, Verifiers
from dovetail.parties.intermediary.store import Accepted, Arrival, RoundStore, State

__all__ = ["Intermediary", "all_answers"]

_IN_FLIGHT = 4  # parts on their way at a time
_Store = TypeVar("_Store", bound=RoundStore)
_Said = TypeVar("_Said")


def all_answers(answers: Sequence[_Said | None]) -> list[_Said] | None:
    """What everybody said, if everybody said something."""
    said = [answer for answer in answers if answer is not None]
    return said if len(said) == len(answers) else None


def _digest(reports: Collection[bytes]) -> bytes:
    return hashlib.sha256(b"".join(sorted(reports))).digest()


class Intermediary(abc.ABC, Generic[_Store]):
    """A shuffler or an aggregator of a task, or one replica of it: these share a `store`, a URL.

    Guarantees:
        An upload is opened before it is taken: what was not sealed to this party by its sender counts nowhere.
        Users count at all shufflers or aggregators of a task or at none.
    """

    kind: ClassVar[str]
    store: _Store

    def __init__(
        self,
        folder: Path,
        *,
        signed: SignedTask,
        signer: bytes,
        index: int,
        keys: ServicePairs,
        store: str | None = None,
        alone: bool = True,
    ) -> None:
        self.task: TrainingTask = verify(signed, signer=signer, fresh=False)
        named = self.service_keys(self.task)
        if not 0 <= index < len(named) or named[index].key_id != keys.public.key_id:
            raise ValueError(f"expected the keys of {self.kind} {index} of {len(named)}, got others")
        self.signed, self.index, self.key, self._opening = signed, index, keys.sign, keys.seal.opening_key()
        self._alone = hold(folder) if alone else contextlib.nullcontext()
        where, owner = locate_store(store, folder, "store.db"), self.task.task_id + bytes([index])
        self.store = retry_until_available(lambda: self._open_store(where, owner))

    @classmethod
    @abc.abstractmethod
    def service_keys(cls, task: TrainingTask) -> Sequence[Any]:
        """The keys of those of its kind in a task."""

    @abc.abstractmethod
    def _open_store(self, where: Path | str, owner: bytes) -> _Store:
        """Its store."""

    @property
    @abc.abstractmethod
    def max_content_bytes(self) -> int:
        """Bytes of what an upload holds, at most."""

    @abc.abstractmethod
    def _content(self, opened: bytes, purpose: Purpose) -> Any:
        """What the store keeps of an upload that was opened; refuses what has another form."""

    def challenge(self, round: int) -> bytes | None:
        """Its part of the key that a round's proofs are tested with, where there are proofs."""
        return None

    def verifiers(self, round: int, first: int) -> Verifiers | None:
        """What it found about a round's proofs, from this report on."""
        return None

    def _complete(self, round: int, roster: Collection[bytes] | None) -> None:
        """Add to a frozen round what it lacks besides uploads."""

    @property
    def max_upload_bytes(self) -> int:
        """Bytes of an upload, at most."""
        return REPORT_ID + self.max_content_bytes + OVERHEAD

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return len(self.task.intermediaries) == 1

    def arrival(self, round: int, *, client: bytes, upload: Upload, sender: bytes | None = None) -> Arrival:
        """An upload as the store takes it; `sender` is the id of the key of who made it, if that is not the client's.

        Refuses what was not sealed by that sender, for this round and party, or has another form.
        """
        purpose = self.task.upload_purpose(round, self.index, sender=sender or client, report=upload.report)
        try:
            opened = open_sealed(upload.sealed, self._opening, purpose)
        except Unsealable as error:
            raise Malformed(f"expected an upload sealed to this {self.kind} by its sender, got another one") from error
        return Arrival(round, client, upload.report, self._content(opened, purpose))

    def accept(self, round: int, *, client: bytes, upload: Upload, sender: bytes | None = None) -> Accepted:
        """Take the upload of a client, once."""
        return self.store.accept(self.arrival(round, client=client, upload=upload, sender=sender))

    def is_full(self, round: int) -> bool:
        """Whether as many reported as are let in."""
        return self.store.uploads(round) >= self.task.max_clients

    def decide(self, round: int, rosters: Sequence[Collection[bytes]] = ()) -> tuple[set[bytes] | None, bytes]:
        """Whom to count in a round: the users on everybody's rosters (None: all), and the digest of that."""
        mine, others = self.store.freeze(round), len(self.task.intermediaries) - 1
        if len(rosters) != others:
            raise ValueError(f"expected the rosters of {others} others, got {len(rosters)}")
        roster = None if self.is_alone else set(mine).intersection(*rosters)
        digest = _digest(mine if roster is None else roster)
        if self.store.agree(round, digest) != digest:
            raise ValueError(f"expected the rosters of round {round} that were final before, got others")
        return roster, digest

    def exchange(self, round: int, peers: Sequence[IntermediaryClient]) -> State:
        """Agree with the others on whom to count in a frozen round, and close it.

        Nobody closes before everybody has decided, and everybody must have decided the same; as long as somebody has
        not, the round stays as it is.
        """
        rosters = all_answers([peer.roster(round) for peer in peers])
        if rosters is None:
            return "frozen"
        self.decide(round, rosters)
        agreed = all_answers([peer.agreed_digest(round) for peer in peers])
        return "frozen" if agreed is None else self.close(round, rosters, agreed=agreed)

    def close(
        self,
        round: int,
        rosters: Sequence[Collection[bytes]] = (),
        *,
        agreed: Sequence[bytes] | None = None,
        valid: Collection[bytes] | None = None,
    ) -> State:
        """Close a round with the users that all have complete.

        `agreed` is what the others decided; if somebody decided otherwise the round is void, for then some users would
        count at some alone. Of those that all have complete, only the `valid` ones count (None: all).
        """
        if self.store.state(round) in ("void", "sent", "done"):
            return self.store.state(round)
        roster, digest = self.decide(round, rosters)
        if any(other != digest for other in agreed or ()):
            return self.store.close(round, roster=())
        if valid is not None and roster is not None:
            roster = roster & set(valid)
            digest = _digest(roster)
        count = self.store.uploads(round) if roster is None else len(roster)
        if count >= self.task.min_clients:
            self._complete(round, roster)
        return self.store.close(round, roster=roster, batch=self._batch(digest))

    def _batch(self, digest: bytes) -> bytes | None:
        """What the batch of these users is called; None: it is drawn."""
        return None

    def drop_round(self, round: int) -> None:
        """Forget a round that the others went on without."""
        self.store.freeze(round)
        self.store.close(round, roster=())
        self.store.acknowledge(round)

    def forward(self, round: int, analyzer: AnalyzerClient) -> None:
        """Give the analyzer what a closed round has, and forget it; a round that it gave up is forgotten, too."""
        state = self.store.state(round)
        if state not in ("void", "sent"):
            return
        with contextlib.suppress(Gone):
            batch, sent = self.store.batch(round), state == "sent"
            parts = self._send(round, batch, analyzer) if sent else 0
            uploads = self.store.uploads(round)
            said = Closed(state="sent" if sent else "void", parts=parts, uploads=uploads, batch=batch)
            analyzer.report_closed(round, said)
        self.store.acknowledge(round)

    def _send(self, round: int, batch: bytes, analyzer: AnalyzerClient) -> int:
        """Every part, some at a time; how many they are."""
        count = 0
        with concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT) as threads:
            waiting: list[concurrent.futures.Future[None]] = []
            for number, part in self.store.parts(round, size=PART):
                waiting.append(threads.submit(analyzer.send_part, round, batch, number, part))
                count += 1
                if len(waiting) >= _IN_FLIGHT:
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        return count

    def shut(self) -> None:
        """Let go of the files."""
        self.store.shut()
        if not isinstance(self._alone, contextlib.nullcontext):
            self._alone.close()
