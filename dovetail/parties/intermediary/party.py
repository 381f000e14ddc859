"""What a shuffler and an aggregator do alike, without the network around them.

A round is *open* once the analyzer says so, *frozen* when it is full or its time is up, closed with the users whom all
parties of the task have complete (all agree, for a frozen roster never changes), *forwarded* part by part, and
forgotten when the analyzer has it all. Each step is durable before the next: a process that is killed goes on where it
was.
"""

from __future__ import annotations

import abc
import concurrent.futures
import contextlib
import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from dovetail.parties.common.database import locate_store, retry_until_available
from dovetail.parties.common.files import lock_folder
from dovetail.parties.common.http_clients import AnalyzerClient, Gone, IntermediaryClient
from dovetail.parties.common.keys import ServicePairs
from dovetail.parties.common.sealing import OVERHEAD, Purpose, Unsealable, open_sealed
from dovetail.parties.common.task import SignedTask, TrainingTask, verify
from dovetail.parties.common.wire import PART, REPORT_ID, Closed, Malformed, Upload, Verifiers
from dovetail.parties.intermediary.store import Accepted, Arrival, RoundStore, State

__all__ = ["Intermediary", "all_or_none"]

_IN_FLIGHT = 4  # parts on their way at a time
_Store = TypeVar("_Store", bound=RoundStore)
_Answer = TypeVar("_Answer")


def all_or_none(answers: Sequence[_Answer | None]) -> list[_Answer] | None:
    """The answers, if none of them is missing; else None."""
    present = [answer for answer in answers if answer is not None]
    return present if len(present) == len(answers) else None


def _digest_of_reports(reports: Collection[bytes]) -> bytes:
    return hashlib.sha256(b"".join(sorted(reports))).digest()


class Intermediary(abc.ABC, Generic[_Store]):
    """A shuffler or an aggregator of a task, or one replica of it.

    Arguments:
        folder: where a party without a database keeps its state.
        signed: the task, whose signature is verified.
        signer: the id of the key that must have signed it.
        index: this party's place among those of its kind in the task.
        keys: the party's own key pairs, which the task must name at this place.
        store: URL of a database that replicas share; None: a file in the folder.
        alone: whether to refuse a folder that another process works in.

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
        service_keys = self.service_keys(self.task)
        if not 0 <= index < len(service_keys):
            raise ValueError(f"{self.kind} {index} is not in this task, which has {len(service_keys)}, numbered from 0")
        if service_keys[index].key_id != keys.public.key_id:
            raise ValueError(
                f"the task names the keys {service_keys[index].key_id.hex()} for {self.kind} {index}, not "
                f"{keys.public.key_id.hex()}: check --keys and --index"
            )
        self.signed = signed
        self.index = index
        self.key = keys.sign
        self._opening = keys.seal.opening_key()
        self._alone = lock_folder(folder) if alone else contextlib.nullcontext()
        where = locate_store(store, folder, "store.db")
        owner = self.task.task_id + bytes([index])
        self.store = retry_until_available(lambda: self._open_store(where, owner))

    @classmethod
    @abc.abstractmethod
    def service_keys(cls, task: TrainingTask) -> Sequence[Any]:
        """The public keys of the parties of this kind in a task."""

    @abc.abstractmethod
    def _open_store(self, where: Path | str, owner: bytes) -> _Store:
        """The store of this kind of party."""

    @property
    @abc.abstractmethod
    def max_content_bytes(self) -> int:
        """Bytes of the content of an upload, at most."""

    @abc.abstractmethod
    def _content_of_upload(self, opened: bytes, purpose: Purpose) -> Any:
        """The content that the store keeps of an opened upload; refuses one of another form."""

    def challenge(self, round: int) -> bytes | None:
        """This party's part of the key that a round's proofs are tested with; None without proofs."""
        return None

    def verifiers(self, round: int, first: int) -> Verifiers | None:
        """Its verifiers of a round's reports, from the one with this number on; None without proofs."""
        return None

    def _prepare_close(self, round: int, roster: Collection[bytes] | None) -> None:
        """Prepare what a frozen round needs besides uploads before it is closed."""

    @property
    def max_upload_bytes(self) -> int:
        """Bytes of an upload, at most."""
        return REPORT_ID + self.max_content_bytes + OVERHEAD

    @property
    def is_alone(self) -> bool:
        """Whether the task has no other party of this kind to agree with."""
        return len(self.task.intermediaries) == 1

    def open_upload(self, round: int, *, client: bytes, upload: Upload, sender: bytes | None = None) -> Arrival:
        """Open an upload, as the store takes it.

        Refuses one that was not sealed by its sender for this round and party, or that has another form.

        Arguments:
            round: the round that the upload is for.
            client: the user whom it counts for, by the id of the user's first key.
            upload: report id and sealed content.
            sender: the id of the key that sealed and signed it, if that is not the client's first.
        """
        purpose = self.task.upload_purpose(round, self.index, sender=sender or client, report=upload.report)
        try:
            opened = open_sealed(upload.sealed, self._opening, purpose)
        except Unsealable as error:
            raise Malformed(
                f"this upload is not sealed to {self.kind} {self.index} for round {round} by the key that signed it"
            ) from error
        return Arrival(round, client, upload.report, self._content_of_upload(opened, purpose))

    def accept(self, round: int, *, client: bytes, upload: Upload, sender: bytes | None = None) -> Accepted:
        """Take the upload of a client, once."""
        return self.store.accept(self.open_upload(round, client=client, upload=upload, sender=sender))

    def is_full(self, round: int) -> bool:
        """Whether the round has as many uploads as the task allows."""
        return self.store.num_uploads(round) >= self.task.max_clients

    def decide_whom_to_count(
        self, round: int, rosters: Sequence[Collection[bytes]] = ()
    ) -> tuple[set[bytes] | None, bytes]:
        """Decide whom to count in a round, for good.

        Returns: the reports that are on all rosters (None: all of this party's), and the digest of the decision.
        """
        mine = self.store.freeze(round)
        others = len(self.task.intermediaries) - 1
        if len(rosters) != others:
            raise ValueError(f"{self.kind} {self.index} needs the rosters of {others} others, and has {len(rosters)}")
        roster = None if self.is_alone else set(mine).intersection(*rosters)
        digest = _digest_of_reports(mine if roster is None else roster)
        if self.store.keep_agreed_digest(round, digest) != digest:
            raise ValueError(
                f"the rosters of round {round} are not those of before: the store of another {self.kind} was restored "
                "from an older copy, or it is not honest; the round stays frozen until the analyzer gives it up"
            )
        return roster, digest

    def agree_and_close(self, round: int, peers: Sequence[IntermediaryClient]) -> State:
        """Agree with the others on whom to count in a frozen round, and close it.

        Nobody closes before everybody has decided, and everybody must have decided the same; as long as somebody has
        not, the round stays as it is.
        """
        rosters = all_or_none([peer.roster(round) for peer in peers])
        if rosters is None:
            return "frozen"
        self.decide_whom_to_count(round, rosters)
        agreed = all_or_none([peer.agreed_digest(round) for peer in peers])
        return "frozen" if agreed is None else self.close_round(round, rosters, agreed=agreed)

    def close_round(
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
        roster, digest = self.decide_whom_to_count(round, rosters)
        if any(other != digest for other in agreed or ()):
            return self.store.close_round(round, roster=())
        if valid is not None and roster is not None:
            roster = roster & set(valid)
            digest = _digest_of_reports(roster)
        count = self.store.num_uploads(round) if roster is None else len(roster)
        if count >= self.task.min_clients:
            self._prepare_close(round, roster)
        return self.store.close_round(round, roster=roster, batch=self._batch_id(digest))

    def _batch_id(self, digest: bytes) -> bytes | None:
        """The id of the batch of these users; None: the store draws one."""
        return None

    def drop_round(self, round: int) -> None:
        """Forget a round that the analyzer has given up."""
        self.store.freeze(round)
        self.store.close_round(round, roster=())
        self.store.delete_output(round)

    def forward(self, round: int, analyzer: AnalyzerClient) -> None:
        """Send a closed round to the analyzer, then forget it; forget it also if the analyzer has given it up."""
        state = self.store.state(round)
        if state not in ("void", "sent"):
            return
        with contextlib.suppress(Gone):
            batch = self.store.batch_id(round)
            parts = self._send_parts(round, batch, analyzer) if state == "sent" else 0
            uploads = self.store.num_uploads(round)
            analyzer.report_closed(round, Closed(state=state, parts=parts, uploads=uploads, batch=batch))
        self.store.delete_output(round)

    def _send_parts(self, round: int, batch: bytes, analyzer: AnalyzerClient) -> int:
        """Send every part, a few at a time, and return how many they are."""
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

    def close(self) -> None:
        """Close the store, and release the folder."""
        self.store.close()
        if not isinstance(self._alone, contextlib.nullcontext):
            self._alone.close()
