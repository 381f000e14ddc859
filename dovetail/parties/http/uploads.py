"""Uploads on their way from the door into the store: known by their head, opened, and written in groups.

Whatever arrives while one group is being written makes up the next, with what arrives a moment later if many upload.
Nobody hears that an upload was taken before it is on disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.wire import RequestHead, TooLate, Upload, upload_path
from dovetail.parties.http.requests import Counts, Reply, announced, path_of, read_body, refusal
from dovetail.parties.intermediary.enrolment import user_of
from dovetail.parties.intermediary.party import Intermediary
from dovetail.parties.intermediary.store import Accepted, Arrival, RoundClosed, RoundNotOpen, UploadRefused

__all__ = ["Uploads"]

_TOGETHER = 256  # uploads that are written in one transaction
_GATHER = 0.01  # seconds in which a group gathers, if the one before was not a single upload: writing costs per group
_SMALL = 1 << 17  # bytes of an upload that is opened at once; a larger one would hold up others
_Outcome = Accepted | UploadRefused


class _Unwritten(UploadRefused):
    """An upload that the store failed to keep; its sender tries again."""


@dataclasses.dataclass
class _Announced:
    """An upload whose head was believed; it keeps out others of its sender until it is `done`."""

    uploads: Uploads
    round: int
    said: RequestHead

    def opened(self, body: bytes) -> Arrival:
        """What is sealed in its body; refuses another body than was announced."""
        self.said.check(body)
        sender, party = self.said.sender, self.uploads.party
        client = user_of(self.uploads.enrolled, sender)
        return party.arrival(self.round, client=client, sender=sender, upload=Upload.decode(body))

    def take(self, body: bytes, answer: Callable[[Reply], None]) -> None:
        """Open it and write it down; the answer comes when that is done."""

        def taken(outcome: _Outcome) -> None:
            self.done()
            answer(self.uploads.answer(outcome, self.round))

        self.uploads.put(self.opened(body), taken)

    def done(self) -> None:
        """It was answered, or nobody waits for an answer any more."""
        self.uploads.under_way.discard(self.said.sender)


class Uploads:
    """The way of uploads to a party.

    `current` is the round that the analyzer has open, if it is known; `headers` go with what was taken.

    Guarantees:
        Who sends an upload is known before any of its body is read.
        Nobody fills our memory with uploads of which one counts: a sender has one under way at a time.
    """

    def __init__(
        self,
        party: Intermediary[Any],
        *,
        enrolled: Mapping[bytes, PublicKey],
        notices: Callable[[], Notices],
        counts: Counts,
        current: Callable[[], int | None],
        headers: Callable[[], dict[str, str]],
        complain: Callable[[Exception], None],
    ) -> None:
        self.party, self.enrolled, self.failing = party, enrolled, False
        self.under_way: set[bytes] = set()  # by their senders
        self._notices, self._counts, self._current = notices, counts, current
        self._headers, self._complain = headers, complain
        self._before, _, self._after = upload_path(party.task.task_id, 0, party.index).rpartition("0/uploads")
        self._after = f"/uploads{self._after}"
        self._waiting: list[tuple[Arrival, Callable[[_Outcome], None]]] = []
        self._arrived = asyncio.Event()

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> _Announced | None:
        """The upload with this head, if it may be taken without a task of its own; refuses as `serve` does."""
        round = path[len(self._before) : -len(self._after)]
        if method != "POST" or path != f"{self._before}{round}{self._after}":
            return None
        named = round.isascii() and round.isdigit() and len(round) < 10
        if not named or "transfer-encoding" in headers or self.party.max_upload_bytes > _SMALL:
            return None
        return self._announced(int(round), method, path, headers)

    def refusal(self, error: Exception) -> Reply:
        """What a sender hears whose upload is not taken."""
        return refusal(error, self._counts)

    async def serve(self, request: Request, round: int) -> Response:
        """Take an upload, of whatever size."""
        upload = self._announced(round, request.method, path_of(request), request.headers)
        try:
            body = await read_body(request, most=upload.said.length)
            small = len(body) <= _SMALL
            arrival = upload.opened(body) if small else await asyncio.to_thread(upload.opened, body)
            future: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
            self.put(arrival, lambda outcome: None if future.done() else future.set_result(outcome))
            return self.answer(await future, round).response()
        finally:
            upload.done()

    def _announced(self, round: int, method: str, path: str, headers: Mapping[str, str]) -> _Announced:
        if reason := self._notices().why_ended(self.party.signed):
            raise TooLate(f"this upload comes too late: {reason}")
        said = announced(self.enrolled, method, path, headers, most=self.party.max_upload_bytes)
        if said.sender in self.under_way:
            raise HTTPException(429)
        self.under_way.add(said.sender)
        return _Announced(self, round, said)

    def put(self, arrival: Arrival, taken: Callable[[_Outcome], None]) -> None:
        """Have it written with the next group; `taken` hears when it is on disk, or why it is not."""
        self._waiting.append((arrival, taken))
        self._arrived.set()

    async def write(self) -> None:
        """Write what arrives, group by group."""
        busy = False
        while True:
            await self._arrived.wait()
            if busy and len(self._waiting) < _TOGETHER:
                await asyncio.sleep(_GATHER)
            group, self._waiting = self._waiting[:_TOGETHER], self._waiting[_TOGETHER:]
            if not self._waiting:
                self._arrived.clear()
            busy = len(group) > 1
            try:
                outcomes = await asyncio.to_thread(self.party.store.accept_all, [arrival for arrival, _ in group])
                self.failing = False
            except Exception as error:
                outcomes = [_Unwritten("expected a store that can be written to, got an error")] * len(group)
                self.failing = True
                self._complain(error)
            for (_, taken), outcome in zip(group, outcomes, strict=True):
                taken(outcome)

    def answer(self, outcome: _Outcome, round: int) -> Reply:
        """Who was not written down, or is ahead of this party, asks again (503, 425); who is late does not (410)."""
        if not isinstance(outcome, UploadRefused):
            self._counts[outcome] += 1
            return Reply(200, outcome, self._headers())
        if isinstance(outcome, _Unwritten):
            return Reply(503, str(outcome))
        if not isinstance(outcome, RoundNotOpen | RoundClosed):
            return self.refusal(outcome)
        current = self._current()
        ahead = isinstance(outcome, RoundNotOpen) and (current is None or round >= current)
        status = 425 if ahead else 410
        self._counts[f"refused {status}"] += 1
        return Reply(status, str(outcome))
