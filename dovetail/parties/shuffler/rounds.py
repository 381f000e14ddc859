"""A shuffler: it knows who reports but not what; it forwards reports without saying who sent them.

The order of things in a round: *open* (told so by the analyzer), *frozen* when it is full or its time is up, closed
with the users that every shuffler of the task has complete (all agree, for a frozen roster never changes), *forwarded*
part by part, and forgotten when the analyzer has it all. Each step is durable before the next; a shuffler that is
killed goes on where it was.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path

from dovetail.files import hold
from dovetail.mechanisms import ExactSampler
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.common.links import AnalyzerLink, Gone
from dovetail.parties.common.sealing import Workers
from dovetail.parties.common.task import SignedTask, TrainingTask, verify
from dovetail.parties.common.wire import PART, Closed, Packed, Upload
from dovetail.parties.shuffler.arrivals import Accepted, Arrival, Shape
from dovetail.parties.shuffler.store import State, Store

__all__ = ["Shuffler"]

_IN_FLIGHT = 4  # parts on their way at a time


class Shuffler:
    """One of the shufflers of a task, without the network around it.

    Guarantees:
        What leaves are ciphertexts of one length, permuted slot by slot, with nothing that says whose they are.
        Users count at all shufflers of a task or at none.
    """

    def __init__(
        self, folder: Path, *, signed: SignedTask, signer: bytes, index: int, key: KeyPair, workers: int = 1
    ) -> None:
        self.task: TrainingTask = verify(signed, signer=signer, fresh=False)
        if not 0 <= index < len(self.task.shufflers) or self.task.shufflers[index].public != key.public.public:
            raise ValueError(f"expected the key of shuffler {index} of {len(self.task.shufflers)}, got another one")
        self.signed, self.index, self.key = signed, index, key
        self._messages, self._length = self.task.messages(), self.task.length
        self.shape = _shape(self.task, index)
        self._alone = hold(folder)
        self.store = Store(folder / "store.db", self.shape, owner=self.task.task_id + bytes([index]))
        self._workers = Workers(workers)
        self._sampler = ExactSampler()

    @property
    def alone(self) -> bool:
        """Whether there is no other shuffler to agree with."""
        return len(self.task.shufflers) == 1

    def arrival(self, round: int, *, client: bytes, upload: Upload) -> Arrival:
        """An upload as the store takes it; refuses messages of another length."""
        packed = Packed.decode(upload.packed, length=self._length)
        pairs = list(zip(packed.slots.tolist(), packed.ciphertexts(), strict=True))
        return Arrival(round, client, upload.report, pairs)

    def accept(self, round: int, *, client: bytes, upload: Upload) -> Accepted:
        """Take the upload of a client, once."""
        return self.store.accept(**self.arrival(round, client=client, upload=upload)._asdict())

    def full(self, round: int) -> bool:
        """Whether as many reported as are let in."""
        return self.store.uploads(round) >= self.task.max_clients

    def decide(self, round: int, rosters: Sequence[Collection[bytes]] = ()) -> tuple[set[bytes] | None, bytes]:
        """Whom to count in a round: the users on the rosters of all shufflers (None: all), and the digest of that."""
        mine = self.store.freeze(round)
        if len(rosters) != len(self.task.shufflers) - 1:
            raise ValueError(f"expected the rosters of {len(self.task.shufflers) - 1} others, got {len(rosters)}")
        roster = None if self.alone else set(mine).intersection(*rosters)
        digest = hashlib.sha256(b"".join(sorted(mine if roster is None else roster))).digest()
        if self.store.agree(round, digest) != digest:
            raise ValueError(f"expected the rosters of round {round} that were final before, got others")
        return roster, digest

    def close(
        self, round: int, rosters: Sequence[Collection[bytes]] = (), *, agreed: Sequence[bytes] | None = None
    ) -> State:
        """Close a round with the users that all shufflers have complete.

        `agreed` is what the other shufflers decided; if somebody decided otherwise the round is void, for then some
        users would count at some shufflers alone.
        """
        if self.store.state(round) in ("void", "sent", "done"):
            return self.store.state(round)
        roster, digest = self.decide(round, rosters)
        if any(other != digest for other in agreed or ()):
            return self.store.close(round, roster=())
        self._fill(round, roster)
        return self.store.close(round, roster=roster)

    def drop(self, round: int) -> None:
        """Forget a round that the others went on without."""
        self.store.freeze(round)
        self.store.close(round, roster=())
        self.store.acknowledge(round)

    def forward(self, round: int, analyzer: AnalyzerLink) -> None:
        """Give the analyzer what a closed round has, and forget it; a round that it gave up is forgotten, too."""
        state = self.store.state(round)
        if state not in ("void", "sent"):
            return
        with contextlib.suppress(Gone):
            parts = self._send(round, analyzer) if state == "sent" else 0
            closed = Closed(state="sent" if state == "sent" else "void", parts=parts, uploads=self.store.uploads(round))
            analyzer.closed(round, closed)
        self.store.acknowledge(round)

    def _send(self, round: int, analyzer: AnalyzerLink) -> int:
        """Every part, some at a time; how many they are."""
        count = 0
        with concurrent.futures.ThreadPoolExecutor(_IN_FLIGHT) as threads:
            waiting: list[concurrent.futures.Future[None]] = []
            for number, rows in self.store.parts(round, size=PART):
                waiting.append(threads.submit(analyzer.part, round, number, Packed.of(rows).encode()))
                count += 1
                if len(waiting) >= _IN_FLIGHT:
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        return count

    def shut(self) -> None:
        """Let go of files and processes."""
        self.store.shut()
        self._workers.shut()
        self._alone.close()

    def _fill(self, round: int, roster: Collection[bytes] | None) -> None:
        """Seal the dummies that slots lack, some at a time; nothing is sealed for a round that will be void."""
        if (self.store.uploads(round) if roster is None else len(roster)) < self.task.min_clients:
            return
        lacking = self.store.lacking(round, roster=roster)
        slots = iter([slot for slot, count in lacking.items() for _ in range(count)])
        while chunk := list(itertools.islice(slots, PART)):
            bodies = [body.tobytes() for body in self._messages.dummies(len(chunk), sampler=self._sampler)]
            sealed = self._workers.seal_all(bodies, self.task.analyzer.sealing(), self.task.purpose(round))
            self.store.stage(round, list(zip(chunk, sealed, strict=True)))


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
