"""Uploads to a shuffler or aggregator: recognised by their head, opened, and written to the store in groups.

Whatever arrives while one group is being written makes up the next, with what arrives a moment later if many upload.
Nobody is told that an upload was taken before it is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from dovetail.parties.common.keys import PublicKey
from dovetail.parties.common.notices import Notices
from dovetail.parties.common.wire import Malformed, RequestHead, TooLate, Upload
from dovetail.parties.http.requests import Counts, authenticate_head, number_in_path, read_body, refusal_response
from dovetail.parties.intermediary.enrolment import user_of
from dovetail.parties.intermediary.party import Intermediary
from dovetail.parties.intermediary.store import Accepted, Arrival, RoundClosed, RoundNotOpen, UploadRefused

__all__ = ["Uploads"]

_TOGETHER = 256  # uploads that are written in one transaction
_GATHER = 0.01  # seconds in which a group gathers, if the one before was not a single upload: writing costs per group
_SMALL = 1 << 17  # bytes of an upload that is opened at once; a larger one would hold up others
_Outcome = Accepted | UploadRefused


class _NotWritten(UploadRefused):
    """An upload that the store failed to keep; its sender tries again."""


class Uploads:
    """Takes uploads to a party: an application of its own behind a route, without Starlette's request and its stream.

    Arguments:
        party: the shuffler or aggregator.
        enrolled: the keys of the users that may upload, by id.
        notices: what the task's signer has announced.
        counts: how often what was taken or refused.
        current: the round that the analyzer has open, if it is known.
        headers: sent with the answer to an upload that was taken.
        complain: hears of a store that does not keep what it is given.

    Guarantees:
        Who sends an upload is known before any of its body is read.
        Nobody fills our memory with uploads of which one counts: a sender has one in progress at a time.
        An upload is answered after it is on disk.
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
        self.failing = False
        self.in_progress: set[bytes] = set()  # ids of their senders' keys
        self._party = party
        self._enrolled = enrolled
        self._notices = notices
        self._counts = counts
        self._current = current
        self._headers = headers
        self._complain = complain
        self._waiting: list[tuple[Arrival, asyncio.Future[_Outcome]]] = []
        self._has_arrived = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Take an upload; what it raises is answered by the application around it."""
        round = number_in_path(scope["path_params"], self._party.task.task_id)
        if scope["path_params"]["index"] != str(self._party.index):
            raise Malformed(f"this is {self._party.kind} {self._party.index}, and the path names another one")
        if reason := self._notices().why_ended(self._party.signed):
            raise TooLate(f"this upload comes too late: {reason}")
        max_bytes = self._party.max_upload_bytes
        head = authenticate_head(
            self._enrolled, scope["method"], scope["path"], Headers(scope=scope), max_bytes=max_bytes
        )
        if head.sender in self.in_progress:
            raise HTTPException(429)
        self.in_progress.add(head.sender)
        try:
            body = await read_body(receive, max_bytes=head.length)
            is_small = len(body) <= _SMALL
            arrival = (
                self._open_upload(round, head, body)
                if is_small
                else await asyncio.to_thread(self._open_upload, round, head, body)
            )
            answer = self._response_to(await self._write_with_group(arrival), round)
        finally:
            self.in_progress.discard(head.sender)
        await answer(scope, receive, send)

    def _open_upload(self, round: int, head: RequestHead, body: bytes) -> Arrival:
        """Open what is sealed in a body; refuses another body than the head stated."""
        head.check(body)
        client = user_of(self._enrolled, head.sender)
        return self._party.open_upload(round, client=client, sender=head.sender, upload=Upload.decode(body))

    async def _write_with_group(self, arrival: Arrival) -> _Outcome:
        """Have it written with the next group, and wait for that."""
        future: asyncio.Future[_Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((arrival, future))
        self._has_arrived.set()
        return await future

    async def write_groups(self) -> None:
        """Write what arrives, group by group, until cancelled."""
        busy = False
        while True:
            await self._has_arrived.wait()
            if busy and len(self._waiting) < _TOGETHER:
                await asyncio.sleep(_GATHER)
            group = self._waiting[:_TOGETHER]
            self._waiting = self._waiting[_TOGETHER:]
            if not self._waiting:
                self._has_arrived.clear()
            busy = len(group) > 1
            outcomes: Sequence[_Outcome]
            try:
                outcomes = await asyncio.to_thread(self._party.store.accept_all, [arrival for arrival, _ in group])
                self.failing = False
            except Exception as error:
                outcomes = [_NotWritten("this upload could not be stored; try again in a moment")] * len(group)
                self.failing = True
                self._complain(error)
            for (_, future), outcome in zip(group, outcomes, strict=True):
                if not future.done():  # its sender may have left
                    future.set_result(outcome)

    def _response_to(self, outcome: _Outcome, round: int) -> Response:
        """Senders ahead of this party, or not written down, ask again (425, 503); those who are late do not (410)."""
        if not isinstance(outcome, UploadRefused):
            self._counts[outcome] += 1
            return PlainTextResponse(outcome, headers=self._headers())
        if isinstance(outcome, _NotWritten):
            return PlainTextResponse(str(outcome), status_code=503)
        if not isinstance(outcome, RoundNotOpen | RoundClosed):
            return refusal_response(outcome, self._counts)
        current = self._current()
        is_ahead = isinstance(outcome, RoundNotOpen) and (current is None or round >= current)
        status = 425 if is_ahead else 410
        self._counts[f"refused {status}"] += 1
        return PlainTextResponse(str(outcome), status_code=status)
